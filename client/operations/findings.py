"""Reports what `consilium site doctor` finds: lines for the administrator, and a report without patients' names.

A check is a function that returns findings; groups of checks (the data, the network, the keys) know nothing of each
other. A finding may have a subject, such as a case's name: the site's own terminal shows it, the report gives its
number alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from common.objects import write_atomically
from common.plain import joined

NEEDS_REPAIR = 8
"""Exit code: at least one finding is a failure."""


class State(StrEnum):
    """OK: fine. NOTE: works, and somebody should know. FAIL: something does not work until it is repaired."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Checkup:
    """What one check found. ``text`` and ``remedy`` name no patient; ``subject`` may, ``number`` stands in for it."""

    check: str
    state: State
    text: str
    remedy: str = ""
    number: int | None = None
    subject: str = ""
    picture: str = ""

    @property
    def ok(self) -> bool:
        return self.state is State.OK


def exit_code(findings: Iterable[Checkup]) -> int:
    """0, or :data:`NEEDS_REPAIR`."""
    return NEEDS_REPAIR if any(finding.state is State.FAIL for finding in findings) else 0


def to_text(findings: Iterable[Checkup]) -> str:
    """The findings for the administrator's terminal, with their subjects."""
    lines = []
    for finding in findings:
        state = "FAIL" if finding.state is State.FAIL else str(finding.state)
        number = "" if finding.number is None else f" {finding.number}"
        subject = f" ({finding.subject})" if finding.subject else ""
        lines.append(f"{state:4} {finding.check}{number}{subject}: {finding.text}")
        if finding.remedy:
            lines.append(f"     to fix: {finding.remedy}")
    return joined(lines)


def to_json(findings: Iterable[Checkup]) -> str:
    """The findings for a machine or for somebody else: without subjects."""
    rows = [
        {
            "check": finding.check,
            "state": str(finding.state),
            "number": finding.number,
            "finding": finding.text,
            "remedy": finding.remedy,
            "picture": finding.picture,
        }
        for finding in findings
    ]
    counts = {str(state): sum(row["state"] == state for row in rows) for state in State}
    return json.dumps({"schema": 1, "counts": counts, "findings": rows}, indent=1, ensure_ascii=False)


_WORDS = {State.FAIL: "repair", State.NOTE: "know", State.OK: "ok"}


def write_report(directory: Path, findings: Iterable[Checkup]) -> tuple[Path, Path]:
    """Write ``doctor.json`` and ``doctor.html`` into ``directory``; returns their paths. No subject is in either.

    The page begins with what is to be repaired.
    """
    from jinja2 import Environment, PackageLoader, select_autoescape

    findings = tuple(findings)
    page = Environment(loader=PackageLoader("client"), autoescape=select_autoescape()).get_template("doctor.html")
    counts = {str(state): sum(finding.state is state for finding in findings) for state in State}
    in_order = sorted(findings, key=lambda finding: list(_WORDS).index(finding.state))
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "doctor.json", directory / "doctor.html"
    write_atomically(paths[0], (to_json(findings) + "\n").encode())
    write_atomically(paths[1], page.render(findings=in_order, counts=counts, words=_WORDS).encode())
    return paths
