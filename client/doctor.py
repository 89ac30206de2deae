"""What `consilium site doctor` finds: a table for the administrator, a report without patients' names.

A check is a function that returns findings; groups of checks (the data, the network, the keys) know nothing of each
other. A finding may have a subject, such as a case's name: the table on the site's own terminal shows it, the report
gives its number alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from common.objects import write_atomically

NEEDS_REPAIR = 8
"""Exit code: at least one finding is a failure."""


class State(StrEnum):
    """OK: fine. NOTE: works, and somebody should know. FAIL: something does not work until it is repaired."""

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found. ``text`` and ``remedy`` name no patient; ``subject`` may, ``number`` stands in for it."""

    check: str
    state: State
    text: str
    remedy: str = ""
    number: int | None = None
    subject: str = ""
    picture: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """0, or :data:`NEEDS_REPAIR`."""
    return NEEDS_REPAIR if any(finding.state is State.FAIL for finding in findings) else 0


def print_table(findings: Iterable[Finding]) -> None:
    """The findings on standard output, with their subjects."""
    from rich.console import Console
    from rich.table import Table

    colours = {State.OK: "green", State.NOTE: "yellow", State.FAIL: "red"}
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "no.", "subject", "finding", "to fix"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        number = "" if finding.number is None else str(finding.number)
        colour = colours[finding.state]
        table.add_row(
            f"[{colour}]{finding.state}[/]",
            finding.check,
            number,
            _plain(finding.subject),
            _plain(finding.text),
            _plain(finding.remedy),
        )
    Console(soft_wrap=False).print(table)


def to_json(findings: Iterable[Finding]) -> str:
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


def write_report(directory: Path, findings: Iterable[Finding]) -> tuple[Path, Path]:
    """Write ``doctor.json`` and ``doctor.html`` into ``directory``; returns their paths. No subject is in either."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    findings = tuple(findings)
    page = Environment(loader=PackageLoader("client"), autoescape=select_autoescape()).get_template("doctor.html")
    counts = {str(state): sum(finding.state is state for finding in findings) for state in State}
    directory.mkdir(parents=True, exist_ok=True)
    paths = directory / "doctor.json", directory / "doctor.html"
    write_atomically(paths[0], (to_json(findings) + "\n").encode())
    write_atomically(paths[1], page.render(findings=findings, counts=counts).encode())
    return paths


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
