"""Reads a study's facts from its directory: its ledger, and the report of its student's scores.

The status, the commands and the dashboard use it. If the ledger is damaged or an older copy, the field ``doubt`` of the
spending says so. A report that is invalid, or of another study, counts as no measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InvalidInput, LedgerCorrupt, StorageFailed
from common.ledger.rollback_guard import standing_path
from common.measured_gain import MeasuredGain, Score, case_mean, over_best
from common.objects import read_regular
from common.reading import parse_json
from common.study_facts import StudyFacts, study_facts
from server.ledger.server_ledger import Ledger
from server.study.pools import gone_pools
from server.study.workspace import Workspace

MAX_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Measured:
    """The scores of a study's student and its controls.

    Attributes:
        measured_gain: The student's gain over the best control.
        controls: Mean Dice of every control over the cases, by its name.
    """

    measured_gain: MeasuredGain
    controls: Mapping[str, float] = field(default_factory=dict)

    def line(self) -> str:
        """Return a line with the Dice of the student and of every control."""
        each = [f"{name.replace('_', ' ')} {dice:.3f}" for name, dice in self.controls.items()]
        return f"student {self.measured_gain.student:.3f}; controls: {', '.join(each)}"


def facts_in(ledger: Ledger, workspace: Workspace) -> StudyFacts:
    """Return a study's figures: spending, number of answers, and the student's gain if it was measured.

    Args:
        ledger: The study's open ledger.
        workspace: The study's directory.

    Returns:
        The figures.
    """
    study = workspace.study()
    found = read_measured(workspace.root, study.id)
    asked = [site.pool for site in workspace.registered()]
    revoked = gone_pools(ledger.pools(), revoked=workspace.revoked(), left=workspace.left())
    return ledger.study_facts(study, gain=None if found is None else found.measured_gain, asked=asked, revoked=revoked)


def facts_of(workspace: Workspace) -> StudyFacts:
    """Compute a study's figures from its directory.

    Args:
        workspace: The study's directory.

    Returns:
        The figures. The spending is 0 if there is neither a ledger nor its standing (the small file beside a ledger
        that records its newest row). If the ledger cannot be read, or is missing although its standing exists, the
        spending is 0 and ``doubt`` is the reason.
    """
    try:
        if workspace.ledger_file.exists() or standing_path(workspace.ledger_file).exists():
            with Ledger.open(workspace.ledger_file) as ledger:
                return facts_in(ledger, workspace)
    except (LedgerCorrupt, InvalidInput, StorageFailed) as error:
        return study_facts(workspace.study(), doubt=str(error))
    return study_facts(workspace.study())


def measured_files(root: Path) -> tuple[Path, ...]:
    """Return the files that may contain the scores of a study's student.

    Args:
        root: The study's directory.

    Returns:
        ``report.json`` in the directory and in its parent, in the order in which :func:`read_measured` tries them.
    """
    return root / "report.json", root.parent / "report.json"


def read_measured(root: Path, study_id: str) -> Measured | None:
    """Return the scores of this study's student and controls from the first valid report.

    Args:
        root: The study's directory.
        study_id: The study's id; a report of another study is ignored.

    Returns:
        The scores; None if no valid report of this study contains them.
    """
    for path in measured_files(root):
        try:
            found = parse_json(read_regular(path, most_bytes=MAX_BYTES), what="report of a study")
            if found["study"]["id"] == study_id:
                return _measured(found)
        except (InvalidInput, OSError, LookupError, TypeError, AttributeError, ValueError):
            continue
    return None


def _measured(report: dict[str, Any]) -> Measured | None:
    scored = {str(name): _score(one["dice"]) for name, one in report["controls"].items() if one["dice"] is not None}
    found = over_best(_score(report["student"]["dice"]), scored)
    return None if found is None else Measured(found, {name: case_mean(one) for name, one in scored.items()})


def _score(stated: Mapping[str, Any]) -> Score:
    """Return a network's Dice as a report states it: the mean, and the value of each case (NaN if a case has none)."""
    cases = (float("nan") if value is None else _dice(value) for value in stated.get("cases") or ())
    return Score((), _dice(stated["mean"]), tuple(cases))


def _dice(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise InvalidInput("Dice in the study's report.json", limit="a number from 0 to 1")
    return float(value)
