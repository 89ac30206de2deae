"""The studies of one ledger side by side: what each asks of whom, what it has spent, what its student gained.

Settings and spending are the ledger's own. A gain is known where a study's directory lies beside this one and holds a
report; any other study was not measured, as far as this dashboard can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.config import load_study
from common.errors import ConsiliumError
from common.ledger.spending import of_study
from common.protocol_terms import framed_in
from server.dashboard.ledger_fold import History
from server.dashboard.read_model import Follower
from server.dashboard.views.verdict import Measured, read_measured

MOST_NEIGHBOURS = 50


@dataclass(frozen=True, slots=True)
class StudyRow:
    """One study: ``epsilon`` by its gate on the pool it cost most, a lower bound where there is ``doubt``.

    ``guaranteed`` is the larger of that and the budget.
    ``share`` is of the Σμ² its own budget admits; ``here`` is the study this dashboard follows.
    """

    id: str
    name: str
    here: bool
    registered: str
    last: str | None
    unit: str
    relation: str
    delta: float
    accountant: str
    budget: float
    epsilon: float
    guaranteed: float | None
    share: float
    doubt: str | None
    quorum: int
    voters_per_site: int
    noise: str
    asks: str
    planned: int | None
    answers: int
    refused: int
    sites: int
    word: str | None
    gain: float | None
    interval: tuple[float, float] | None
    student: float | None
    control: float | None


def study_rows(follower: Follower) -> tuple[StudyRow, ...]:
    """Every study of the ledger, the newest first."""
    measured = _measured(follower.workspace.root, follower.study.id)
    rows = [
        _row(follower, study_id, history, measured.get(study_id))
        for study_id, history in follower.ledger.histories.items()
    ]
    return tuple(sorted(rows, key=lambda row: row.registered, reverse=True))


def _row(follower: Follower, study_id: str, history: History, measured: Measured | None) -> StudyRow:
    books = follower.ledger.books
    terms, spending = books.studies[study_id], of_study(books, study_id, doubt=follower.doubt)
    codec, privacy = _table(history.consent, "codec"), _table(history.consent, "privacy")
    planned = privacy.get("planned_queries")
    row = StudyRow(
        id=study_id,
        name=terms.name,
        here=study_id == follower.study.id,
        registered=history.registered,
        last=history.last,
        unit=str(terms.protection.unit),
        relation=str(terms.protection.relation),
        delta=terms.budget.delta,
        accountant=str(terms.accountant),
        budget=terms.budget.epsilon,
        epsilon=spending.spent.epsilon,
        guaranteed=None if spending.doubt else spending.guaranteed.epsilon,
        share=spending.share,
        doubt=spending.doubt,
        quorum=terms.quorum,
        voters_per_site=terms.voters_per_site,
        noise="the server" if terms.colluders is None else f"the hospitals, up to {terms.colluders} colluding",
        asks="all volumes in one query, in rounds" if framed_in(codec) else "one volume a query",
        planned=planned if isinstance(planned, int) else None,
        answers=history.answers,
        refused=history.refused,
        sites=len(history.sites),
        word=None,
        gain=None,
        interval=None,
        student=None,
        control=None,
    )
    if measured is None or not history.answers:  # a copy of the study beside this one may have both
        return row
    found = measured.worth
    return replace(
        row,
        word=str(found.word),
        gain=found.gain,
        interval=found.interval,
        student=found.student,
        control=found.other,
    )


def _table(consent: Mapping[str, object], name: str) -> Mapping[str, Any]:
    found = consent.get(name)
    return found if isinstance(found, dict) else {}


def _measured(root: Path, own: str) -> dict[str, Measured]:
    """What was measured of this study and of those whose directories lie beside it, by study id."""
    found = {own: read_measured(root, own)}
    neighbours = (path.parent for path in sorted(root.absolute().parent.glob("*/study.toml"))[:MOST_NEIGHBOURS])
    for folder in neighbours:
        try:
            study_id = load_study(folder / "study.toml").id
        except (ConsiliumError, OSError):
            continue
        if found.get(study_id) is None:
            found[study_id] = read_measured(folder, study_id)
    return {study_id: one for study_id, one in found.items() if one is not None}
