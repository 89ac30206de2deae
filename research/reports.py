"""Keeps the choice of a recipe apart from its report: decides which patients each may score, and counts reports.

`consilium bench utility` uses it. The SHA-256 of a patient's name decides whether the patient is scored during
development or only in a report, so the decision does not depend on the seed, on the assignment to hospitals or on the
rest of the dataset. Patients who are not scored in a run may still be private, a public image or a public label map in
it. The register of reports is one file for each dataset in the clone. It is written before anything is trained, so a
report that was looked at and discarded stays counted.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from common.canonical import digest
from common.objects import write_atomically
from research.setting import Setting

DEVELOPMENT, REPORT = "development", "report"

ROOT = Path(__file__).resolve().parents[1]
REGISTER = ROOT / "benchmarks" / "results" / "reports"
RECIPE_SOURCES = (
    "common/codecs",
    "common/models",
    "common/protocols",
    "server/protocols",
    "server/planning/recommend.py",
)
"""Code that belongs to a recipe, relative to the clone. Its comments and docstrings do not change the hash."""


def part_of(name: str) -> str:
    """Return the part of the patients, for development or for reports, to which a patient belongs.

    Args:
        name: The patient's name, or the case's own if it names no patient.

    Returns:
        :data:`REPORT` if the first bit of the name's SHA-256 is 0, else :data:`DEVELOPMENT`.

    >>> part_of("patient021"), part_of("TCGA_FG_5964")
    ('report', 'development')
    """
    return REPORT if hashlib.sha256(name.encode()).digest()[0] < 128 else DEVELOPMENT


def recipe_hash(setting: Setting) -> str:
    """Hash a recipe: the protocol, its trainings and rounds, and the code that makes labels and students.

    Args:
        setting: The row of the table; its budget, hospitals and voters do not count.

    Returns:
        Sixteen hexadecimal digits.
    """
    terms = [setting.recipe, setting.rounds, bool(setting.paired), asdict(setting.teacher), asdict(setting.student)]
    return digest("recipe", [repr(terms), [_meaning(path) for path in _sources()]])[:16]


class Register:
    """The reports that were made of one dataset.

    Args:
        folder: Folder of the registers, one file for each dataset.
        data: Name of the dataset.
        names: Names of the dataset's patients. The file's name is a hash of the names of the patients who may be scored
            in a report (:func:`part_of`), so a copy of the dataset has the same register.
    """

    def __init__(self, folder: Path, *, data: str, names: Iterable[str]) -> None:
        scored = sorted(name for name in set(names) if part_of(name) == REPORT)
        self._path = folder / f"{digest('report-cases', scored)[:16]}.json"
        self._data, self._scored = data, len(scored)
        self._mine: dict[str, Any] = {}

    @property
    def reports(self) -> list[dict[str, Any]]:
        """The reports so far, as the file states them."""
        held = json.loads(self._path.read_text(encoding="utf-8")) if self._path.exists() else {"reports": []}
        reports: list[dict[str, Any]] = held["reports"]
        return reports

    def begin(self, setting: Setting, *, seeds: int) -> dict[str, Any]:
        """Count a report before anything of it is trained; an unfinished report of the same setting is continued.

        Args:
            setting: What is reported.
            seeds: Number of seeds, each with another fold held out.

        Returns:
            What the report's record states: the hash ``recipe``, the number ``times`` of reports of this dataset so far
            including this one, and in ``recipes`` the number for each recipe's hash.
        """
        recipe, terms = recipe_hash(setting), digest("reported-setting", [repr(setting), seeds])[:16]
        self._mine = {"recipe": recipe, "setting": terms, "finished": False}
        with self._locked():
            reports = self.reports
            if self._open(reports) is None:
                reports.append({"date": datetime.now(UTC).date().isoformat(), **self._mine})
                self._write(reports)
        counted = Counter(one["recipe"] for one in reports)
        return {"recipe": recipe, "times": len(reports), "recipes": dict(sorted(counted.items()))}

    def finish(self) -> None:
        """Mark the report that :meth:`begin` entered as finished.

        If its command is run again, another report is counted.
        """
        with self._locked():
            reports = self.reports
            if (mine := self._open(reports)) is not None:
                mine["finished"] = True
                self._write(reports)

    def _open(self, reports: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
        return next((one for one in reports if one.items() >= self._mine.items()), None)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Lock the register's file, so that reports that run at once do not overwrite each other's entries."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write(self, reports: Sequence[dict[str, Any]]) -> None:
        held = {"data": self._data, "report_patients": self._scored, "reports": reports}
        write_atomically(self._path, (json.dumps(held, indent=1) + "\n").encode())


def _sources() -> Iterator[Path]:
    for name in RECIPE_SOURCES:
        path = ROOT / name
        yield from (path,) if path.is_file() else sorted(path.rglob("*.py"))


def _meaning(path: Path) -> str:
    """Return a module's code without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [one for one in body if not _is_text(one)] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
