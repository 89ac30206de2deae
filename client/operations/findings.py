"""Reports what `consilium site doctor` finds: as lines for the administrator, and as a report without patients' names.

A check is a function that returns findings; groups of checks (data, network, keys) are independent. A finding may have
a subject, such as a case's name. The terminal shows the subject; the report replaces it by its number.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from common.errors import ConsiliumError, InvalidInput
from common.ledger.sqlite_file import ledger_error
from common.objects import write_atomically
from common.plain import joined
from common.system_errors import explain, system_cause

NEEDS_REPAIR = 8
"""Exit code if at least one finding is a failure."""

TROUBLE = (ConsiliumError, OSError, sqlite3.Error)
"""The errors that a check reports with :func:`failure`."""


class State(StrEnum):
    """The state of a finding.

    OK means that nothing is wrong, NOTE that the site works but somebody should know of the finding, and FAIL that it
    must be repaired.
    """

    OK = "ok"
    NOTE = "note"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The finding of one check.

    Attributes:
        check: Name of the check.
        state: Ok, note or fail.
        text: What was found, without a patient's name.
        remedy: What to do, without a patient's name.
        number: Number that stands for the subject in the report.
        subject: What it is about; may name a case, and must not leave the site.
        picture: Path of a picture of the case, relative to the report; empty without a picture.
    """

    check: str
    state: State
    text: str
    remedy: str = ""
    number: int | None = None
    subject: str = ""
    picture: str = ""

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return self.state is State.OK


def fine(check: str, text: str) -> CheckResult:
    """Return a finding that nothing is wrong.

    Args:
        check: Name of the check.
        text: What was found, without a patient's name.

    Returns:
        The finding.
    """
    return CheckResult(check, State.OK, text)


def note(check: str, text: str, remedy: str = "") -> CheckResult:
    """Return a finding that somebody should know of.

    Args:
        check: Name of the check.
        text: What was found, without a patient's name.
        remedy: What to do, without a patient's name.

    Returns:
        The finding.
    """
    return CheckResult(check, State.NOTE, text, remedy)


def fail(check: str, text: str, remedy: str, *, subject: str = "") -> CheckResult:
    """Return a finding that must be repaired.

    Args:
        check: Name of the check.
        text: What was found, without a patient's name.
        remedy: What to do, without a patient's name.
        subject: What it is about; may name a case.

    Returns:
        The finding.
    """
    return CheckResult(check, State.FAIL, text, remedy, subject=subject)


def failure(check: str, error: Exception, remedy: str) -> CheckResult:
    """Report an error that ended a check.

    If a full or failing disk or a missing permission caused the error, the finding states that cause with its own
    remedy, because ``remedy`` (such as to restore a file) would not help. Otherwise the finding states the remedy that
    the error's text names, or else ``remedy``.

    Args:
        check: Name of the check.
        error: The error.
        remedy: What to do if the error names no remedy.

    Returns:
        The finding.
    """
    error = system_cause(error) or error
    if isinstance(error, sqlite3.Error):
        error = ledger_error(error, "the ledger file cannot be read")
    if isinstance(error, OSError):
        return fail(check, *explain(error))
    text, _, own = str(error).partition("; to fix: ")
    return fail(check, text, own or remedy)


def unnamed_failure(check: str, error: InvalidInput | OSError, remedy: str = "") -> CheckResult:
    """Report an error about a dataset. Its value, which may name a case, becomes the finding's subject.

    The terminal shows subjects; the report without names omits them.

    Args:
        check: Name of the check.
        error: The error.
        remedy: What to do if the error names no remedy.

    Returns:
        The finding.
    """
    if isinstance(error, OSError):
        return fail(check, error.strerror or type(error).__name__, explain(error)[1], subject=str(error.filename or ""))
    value = error.value
    names = value if isinstance(value, tuple | list) else [] if value is None else [value]
    text = f"{error.what}; allowed: {error.limit}" if error.limit else error.what
    return fail(check, text, error.remedy or remedy, subject=", ".join(map(str, names)))


def exit_code(findings: Iterable[CheckResult]) -> int:
    """Return the exit code of `site doctor`.

    Args:
        findings: The findings.

    Returns:
        0, or :data:`NEEDS_REPAIR` if a finding is a failure.
    """
    return NEEDS_REPAIR if any(finding.state is State.FAIL for finding in findings) else 0


def to_text(findings: Iterable[CheckResult]) -> str:
    """Format the findings with their subjects for the administrator's terminal.

    Args:
        findings: The findings.

    Returns:
        The text.
    """
    lines = []
    for finding in findings:
        state = "FAIL" if finding.state is State.FAIL else str(finding.state)
        number = "" if finding.number is None else f" {finding.number}"
        subject = f" ({finding.subject})" if finding.subject else ""
        lines.append(f"{state:4} {finding.check}{number}{subject}: {finding.text}")
        if finding.remedy:
            lines.append(f"     to fix: {finding.remedy}")
    return joined(lines)


def to_json(findings: Iterable[CheckResult]) -> str:
    """Format the findings as JSON without their subjects, for a machine or another person.

    Args:
        findings: The findings.

    Returns:
        The JSON text.
    """
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


def write_report(directory: Path, findings: Iterable[CheckResult]) -> tuple[Path, Path]:
    """Write ``doctor.json`` and ``doctor.html`` without subjects; the page begins with what must be repaired.

    Args:
        directory: Where to write; it is created if missing.
        findings: The findings.

    Returns:
        Paths of both files.
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
