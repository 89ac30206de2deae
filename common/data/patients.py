"""Whose scan a case is: a table beside the data, or one named on the command line.

The table has a header with the columns ``case_id`` and ``patient_id``, in CSV (commas or semicolons) or TSV. Refuses a
table that leaves out a listed case or gives one case to two patients: a patient counted twice would be protected half
as well as stated. A table is read before any scan is looked at, so what is refused is what a person wrote.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from common.canonical import digest, sha256_file
from common.data.dataset import Case, Dataset, Doubled, PatientIdentity, Problem
from common.errors import InvalidInput
from common.objects import read_regular
from common.reading import parsing

PATIENT_TABLES = ("patients.tsv", "patients.csv")
MAX_TABLE_BYTES = 1 << 24
MAX_TABLE_CELLS = 1_000_000


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV or TSV file with a header; names and values without surrounding blanks.

    The separator is the tab in a ``.tsv``, else whichever of ``,`` and ``;`` the header holds. Raises InvalidInput for
    a file that is not UTF-8 text, has no header, or a row of another length.
    """
    wrong = {"value": path.name, "remedy": "save it as CSV in UTF-8"}
    with parsing("table cannot be read", limit="text in UTF-8", **wrong):
        if path.stat().st_size > MAX_TABLE_BYTES:
            raise InvalidInput("table is too large", value=path.name, limit=f"{MAX_TABLE_BYTES} bytes")
        text = read_regular(path, most_bytes=MAX_TABLE_BYTES).decode("utf-8-sig")
        lines = text.splitlines()
    if len(lines) + sum(map(text.count, ",;\t")) > MAX_TABLE_CELLS:
        raise InvalidInput("cells of a table", value=path.name, limit=f"at most {MAX_TABLE_CELLS}")
    header = lines[0] if lines else ""
    delimiter = "\t" if path.suffix == ".tsv" else ";" if header.count(";") > header.count(",") else ","
    with parsing("table cannot be read", limit="cells of at most 131,072 characters, no NUL", **wrong):
        rows = [[cell.strip() for cell in row] for row in csv.reader(lines, delimiter=delimiter) if any(row)]
    if not rows or not all(rows[0]) or len(set(rows[0])) != len(rows[0]):
        raise InvalidInput("table without a header", value=path.name, remedy="name every column once in the first line")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(rows[0]):
            raise InvalidInput(f"row {number} of {path.name}", value=len(row), limit=f"{len(rows[0])} columns")
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def read_patients(path: Path, listed: Iterable[str]) -> dict[str, str]:
    """Case id → patient id of every listed case. Raises InvalidInput for a gap or a case with two patients."""
    patients: dict[str, str] = {}
    for row in read_table(path):
        case, patient = row.get("case_id", ""), row.get("patient_id", "")
        if not case or not patient:
            raise InvalidInput(
                "table of patients", value=path.name, limit="columns case_id and patient_id, filled in every row"
            )
        if patients.setdefault(case, patient) != patient:
            raise InvalidInput(
                "a case belongs to two patients", value=case, remedy=f"give it one patient in {path.name}"
            )
    listed = tuple(listed)
    missing = [case for case in listed if case not in patients]
    if missing:
        raise InvalidInput(
            f"{len(missing)} case(s) without a patient in {path.name}",
            value=missing[:3],
            remedy="add a row for every case, or take the table away: then every file counts as a patient",
        )
    return {case: patients[case] for case in listed}


def with_patients(dataset: Dataset, table: Path) -> Dataset:
    """The dataset with whose scan each case is, from a table (:func:`read_patients`)."""
    ids = dict.fromkeys([*dataset.listed, *(case.id for case in dataset.cases)])
    patients = read_patients(table, ids)
    return replace(
        dataset,
        cases=tuple(replace(case, patient=patients[case.id]) for case in dataset.cases),
        patients=patients,
        patient_identity=PatientIdentity.TABLE,
    )


def counted_once(dataset: Dataset) -> Dataset:
    """The dataset with every scan once a patient, and a note of scans that stand under two patients.

    Scans are alike by the content of their image files; other copies, compressed or stored differently, are for
    `site doctor` to find. Among one patient's a copy is a Problem and left out, whatever any other patient has. Between
    patients nothing is left out: each keeps its slot and its own files, for a rule that let one's files decide about
    another's would let one patient move two voters. What it means is said (:attr:`Dataset.doubled`). Refuses nothing.
    """
    labelled = sorted(dataset.labelled, key=lambda case: case.id)
    own: dict[str, list[Case]] = {}
    for case in labelled:
        own.setdefault(dataset.patient_of(case.id), []).append(case)
    content = cache(_content)  # a large scan is read once
    copies = {copy: first for cases in own.values() for copy, first in _copies(cases, content)}
    patient = dataset.patient_of
    kept = [case for case in labelled if case.id not in copies]
    between = [(a, b) for a, b in _copies(kept, content) if patient(a) != patient(b)]
    problems = (Problem(copy, f"the same scan as {copies[copy]}; to fix: take one of them out") for copy in copies)
    return replace(
        dataset,
        cases=tuple(case for case in dataset.cases if case.id not in copies),
        problems=(*dataset.problems, *problems),
        doubled=tuple(Doubled(case, same_as) for case, same_as in between),
    )


def _copies(cases: Sequence[Case], content_of: Callable[[Path], str | None]) -> list[tuple[str, str]]:
    """(id, id of the first before it with an image file of the same content) of every case that repeats another."""
    sizes = Counter(_size(path) for case in cases for path in case.images)
    seen: dict[str, str] = {}
    found: list[tuple[str, str]] = []
    for case in cases:
        alike = [path for path in case.images if (size := _size(path)) is not None and sizes[size] > 1]
        hashes = [content for path in alike if (content := content_of(path)) is not None]
        first = next((seen[content] for content in hashes if content in seen), None)
        if first is None:
            seen |= dict.fromkeys(hashes, case.id)
        else:
            found.append((case.id, first))
    return found


def content_hash(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files (a DICOM series), whatever they are called."""
    if not path.is_dir():
        return sha256_file(path)
    return digest("folder", sorted(sha256_file(file) for file in path.iterdir() if file.is_file()))


def _size(path: Path) -> int | None:
    """None for what cannot be looked at: reading it will say so."""
    try:
        files = path.iterdir() if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError:
        return None


def _content(path: Path) -> str | None:
    try:
        return content_hash(path)
    except OSError:
        return None


def write_patients(directory: Path, cases: Iterable[Case]) -> None:
    """Write ``patients.tsv``; a case that does not say whose scan it is counts as its own patient."""
    lines = ["case_id\tpatient_id", *(f"{case.id}\t{case.patient or case.id}" for case in cases)]
    (directory / PATIENT_TABLES[0]).write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_table(directory: Path) -> Path | None:
    """``patients.tsv`` or ``patients.csv`` in a dataset's directory."""
    return next((directory / name for name in PATIENT_TABLES if (directory / name).is_file()), None)
