"""Determines the patient of each case, from a table beside the data or one named on the command line.

Called by the readers of layouts and by the split. The table has a header with the columns ``case_id`` and
``patient_id``, in CSV (commas or semicolons) or TSV. It is read before any scan is opened, so a refusal depends on the
table alone. Refuses a table that misses a listed case or assigns a case to two patients. A patient who is listed under
two names would be protected only as a group of two patients, with a larger ε.
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
    """Return the rows of a CSV or TSV file with a header; names and values are stripped of surrounding blanks.

    The separator is a tab in a ``.tsv`` file; otherwise it is ``,`` or ``;``, the one that occurs more often in the
    header.

    Args:
        path: The file.

    Returns:
        One mapping from column name to value for each row.

    Raises:
        InvalidInput: If the file is too large, not UTF-8 text, has no header, or has a row of another length.
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
            limit = f"{len(rows[0])} columns in row {number}, which has {len(row)}"
            raise InvalidInput("row of a table", value=path.name, limit=limit, remedy="correct the row")
    return [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]


def read_patients(path: Path, listed: Iterable[str]) -> dict[str, str]:
    """Return the patient of every listed case.

    Args:
        path: The table.
        listed: Ids of the cases that must be in it.

    Returns:
        Patient id by case id.

    Raises:
        InvalidInput: If a case is missing or has two patients.
    """
    remedy = "add a row for every case, or remove the table; every file then counts as a patient"
    return read_column(path, "patient_id", listed, what="patient", remedy=remedy)


def read_column(path: Path, column: str, listed: Iterable[str], *, what: str, remedy: str) -> dict[str, str]:
    """Return what a table states about every listed case.

    Args:
        path: The table; its column ``case_id`` has the cases' ids.
        column: The column with the values.
        listed: Ids of the cases that must be in it.
        what: What a value is, such as patient.
        remedy: What to do if a case is missing.

    Returns:
        Values by case id.

    Raises:
        InvalidInput: If a case is missing or has two values.
    """
    found: dict[str, str] = {}
    for row in read_table(path):
        case, value = row.get("case_id", ""), row.get(column, "")
        if not case or not value:
            raise InvalidInput(
                f"table of {what}s", value=path.name, limit=f"columns case_id and {column}, filled in every row"
            )
        if found.setdefault(case, value) != value:
            raise InvalidInput(
                f"a case belongs to two {what}s", value=case, remedy=f"give it one {what} in {path.name}"
            )
    listed = tuple(listed)
    if missing := [case for case in listed if case not in found]:
        raise InvalidInput(f"{len(missing)} case(s) without a {what} in {path.name}", value=missing[:3], remedy=remedy)
    return {case: found[case] for case in listed}


def with_patients(dataset: Dataset, table: Path) -> Dataset:
    """Return the dataset with the patient of each case, from a table.

    Args:
        dataset: The dataset.
        table: A table as :func:`read_patients` reads it.

    Returns:
        A new dataset, whose ``patient_identity`` says that a table identifies the patients.

    Raises:
        InvalidInput: If a case is missing in the table or has two patients there.
    """
    ids = dict.fromkeys([*dataset.listed, *(case.id for case in dataset.cases)])
    patients = read_patients(table, ids)
    return replace(
        dataset,
        cases=tuple(replace(case, patient=patients[case.id]) for case in dataset.cases),
        patients=patients,
        patient_identity=PatientIdentity.TABLE,
    )


def counted_once(dataset: Dataset) -> Dataset:
    """Return the dataset with repeated scans of one patient left out, and a note of scans that occur under two
    patients.

    Scans are compared by the hash of their image files. Copies that are compressed or stored differently are found by
    `site doctor`. Within one patient a repeated scan becomes a Problem and is left out, independently of other
    patients. Between patients nothing is left out: if one patient's files decided whether another's are used, one
    patient could change two voters. Such pairs are listed in :attr:`Dataset.doubled`.

    Args:
        dataset: The dataset.

    Returns:
        A new dataset. Nothing is refused.
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
    problems = (Problem(copy, f"the same scan as {copies[copy]}; to fix: remove one of them") for copy in copies)
    return replace(
        dataset,
        cases=tuple(case for case in dataset.cases if case.id not in copies),
        problems=(*dataset.problems, *problems),
        doubled=tuple(Doubled(case, same_as) for case, same_as in between),
    )


def _copies(cases: Sequence[Case], content_of: Callable[[Path], str | None]) -> list[tuple[str, str]]:
    """Return (id of the repeat, id of the first earlier case) for every case that has an image file with the same
    content as an earlier case's.
    """
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
    """Return the SHA-256 of a file, or of the files of a folder (a DICOM series) independently of their names.

    Args:
        path: File or folder.

    Returns:
        The hash as a hex string.
    """
    if not path.is_dir():
        return sha256_file(path)
    return digest("folder", sorted(sha256_file(file) for file in path.iterdir() if file.is_file()))


def _size(path: Path) -> int | None:
    """Return the size in bytes; None if it cannot be read. Opening the file reports that error later."""
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
    """Write ``patients.tsv``; a case without a patient counts as a patient of its own.

    Args:
        directory: The dataset's directory.
        cases: The cases.
    """
    lines = ["case_id\tpatient_id", *(f"{case.id}\t{case.patient or case.id}" for case in cases)]
    (directory / PATIENT_TABLES[0]).write_text("\n".join(lines) + "\n", encoding="utf-8")


def find_table(directory: Path) -> Path | None:
    """Return ``patients.tsv`` or ``patients.csv`` in a dataset's directory.

    Args:
        directory: The dataset's directory.

    Returns:
        The path; None if there is neither.
    """
    return next((directory / name for name in PATIENT_TABLES if (directory / name).is_file()), None)
