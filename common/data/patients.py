"""Determines the patient of each case, from a table beside the data or one named on the command line.

Called by the readers of layouts and by the split. The table has a header with the columns ``case_id`` and
``patient_id``, in CSV (commas or semicolons) or TSV. It is read before any scan is opened, so a refusal depends on the
table alone. Refuses a table that misses a listed case or assigns a case to two patients. A patient who is listed under
two names would be protected only as a group of two patients, with a larger ε.
"""

from __future__ import annotations

import csv
import io
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from common.canonical import digest, sha256_file
from common.data.access import entries
from common.data.dataset import Case, Dataset, DuplicateCases, PatientIdentity, Problem
from common.errors import InvalidInput
from common.reading import read_text
from common.wording import many

PATIENT_TABLES = ("patients.tsv", "patients.csv")
MAX_TABLE_BYTES = 1 << 24
MAX_TABLE_CELLS = 1_000_000


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV or TSV file with a header, as :func:`read_rows` reads them, without line numbers.

    Args:
        path: The file.

    Returns:
        One mapping from column name to value for each row.

    Raises:
        InvalidInput: If :func:`read_rows` refuses the file.
    """
    return [row for _, row in read_rows(path)]


def read_rows(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of a CSV or TSV file with a header; names and values are stripped of surrounding blanks.

    The separator is the tab, comma or semicolon that occurs most often in the header; a ``.tsv`` file with a tab in its
    header is separated by tabs. Empty rows are skipped. Known columns are recognised in upper and lower case.

    Args:
        path: The file.

    Returns:
        For each row the number of its last line in the file, and the mapping from column name to value.

    Raises:
        InvalidInput: If the file cannot be read, is too large, not UTF-8 text, has no header, has a row of another
            length, a quotation mark without its partner, or a line break in a value of a known column.
    """
    text = read_text(path, what="table", most_bytes=MAX_TABLE_BYTES, remedy="save it as CSV in UTF-8").lstrip("\ufeff")
    if text.count("\n") + text.count("\r") + sum(map(text.count, ",;\t")) > MAX_TABLE_CELLS:
        raise InvalidInput(
            "cells of a table",
            value=path.name,
            limit=f"at most {MAX_TABLE_CELLS}",
            remedy="remove the rows and columns that the study does not use",
        )
    stated = re.match(r"sep=([,;\t])\r?\n", text, re.IGNORECASE)  # a first line for spreadsheets
    header = next((line for line in text[stated.end() if stated else 0 :].splitlines() if line.strip(" \t,;")), "")
    delimiter = stated[1] if stated else max(",;\t", key=header.count)
    if path.suffix.lower() == ".tsv" and "\t" in header:
        delimiter = "\t"
    rows = [(line, cells) for line, cells in _cells(path, text, delimiter) if any(cells)][1 if stated else 0 :]
    columns = [_known(name) for name in rows[0][1]] if rows else []
    if not columns or not all(columns) or len(set(columns)) != len(columns):
        raise InvalidInput(
            "table without a header", value=[path.name], remedy="name every column once in the first line"
        )
    found = []
    for line, cells in rows[1:]:
        if len(cells) != len(columns):
            limit = f"{len(columns)} columns in line {line}, which has {len(cells)}"
            raise InvalidInput(
                "row of a table",
                value=[path.name, cells[0]],
                limit=limit,
                remedy="correct the row; put a value that contains the separator in quotation marks",
            )
        row = dict(zip(columns, cells, strict=True))
        broken = next((name for name, value in row.items() if name in _KNOWN.values() and _BREAK.search(value)), None)
        if broken is not None:
            raise InvalidInput(
                f"value of a table in line {line}",
                value=[path.name, row[broken]],
                limit=f"a value of {broken} without a line break",
                remedy="correct the row; it may lack a quotation mark",
            )
        found.append((line, row))
    return found


def _cells(path: Path, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield, for each row of a table, the number of its last line in the text, and its cells.

    Only a line break outside quotation marks ends a row, so a row may span several lines.
    """
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        for cells in reader:
            yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise InvalidInput(
            f"table cannot be read in line {reader.line_num}",
            value=[path.name],
            limit="quotation marks only around a whole value, cells of at most 131,072 characters",
            remedy="correct the line, and the quotation marks before it",
        ) from error


_KNOWN = {name.replace("_", ""): name for name in ("case_id", "patient_id", "site", "image", "label", "index", "name")}
"""The columns that Consilium reads, by their names without separators."""

_BREAK = re.compile(r"[\r\n\0]")


def _known(column: str) -> str:
    """Return the name that Consilium uses for a column; a name that it does not know is returned unchanged."""
    if column.casefold().startswith("image_"):
        return f"image_{column[6:]}"
    return _KNOWN.get(re.sub(r"[\s_-]", "", column.casefold()), column)


def read_patients(path: Path, listed: Iterable[str]) -> dict[str, str]:
    """Return the patient of every listed case.

    Args:
        path: The table.
        listed: Ids of the cases that must be in it.

    Returns:
        Patient id by case id.

    Raises:
        InvalidInput: If a listed case is missing, a case has two patients, or a row lacks a case or a patient.
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
        InvalidInput: If a listed case is missing, a case has two values, or a row lacks a case or a value.
    """
    found: dict[str, str] = {}
    for line, row in read_rows(path):
        case, value = row.get("case_id", ""), row.get(column, "")
        if not case or not value:
            raise InvalidInput(
                f"table of {what}s, line {line}",
                value=[path.name, *filter(None, [case])],
                limit=f"columns case_id and {column}, filled in every row",
                remedy="give the columns these names, and fill them in every row",
            )
        if found.setdefault(case, value) != value:
            raise InvalidInput(
                f"a case belongs to two {what}s in the table, line {line}",
                value=[path.name, case],
                remedy=f"give it one {what}",
            )
    listed = tuple(listed)
    if missing := [case for case in listed if case not in found]:
        raise InvalidInput(
            f"{many(len(missing), 'case')} without a {what} in the table",
            value=[path.name, *missing[:3]],
            remedy=remedy,
        )
    return {case: found[case] for case in listed}


def with_patients(dataset: Dataset, table: Path) -> Dataset:
    """Return the dataset with the patient of each case, from a table.

    Args:
        dataset: The dataset.
        table: A table as :func:`read_patients` reads it.

    Returns:
        A new dataset, whose ``patient_identity`` says that a table identifies the patients.

    Raises:
        InvalidInput: If a case is missing in the table or has two patients there; if the dataset states that two cases
            are one patient's and the table does not; or if two tables group the cases differently.
    """
    ids = dict.fromkeys([*dataset.listed, *(case.id for case in dataset.cases)])
    patients = read_patients(table, ids)
    apart = _apart(dataset.patients, patients)
    if dataset.patient_identity is PatientIdentity.TABLE:
        if apart := apart + _apart(patients, dataset.patients):
            raise InvalidInput(
                "two tables disagree about which scans belong to the same patient",
                value=[table.name, *apart[:3]],
                limit="the same scans of one patient in both tables; the patients' names may differ",
                remedy="correct the table that is wrong, or remove one of them",
            )
    elif apart:
        raise InvalidInput(
            "the table of patients gives scans of one patient's folder to several patients",
            value=[table.name, *apart[:3]],
            limit="one patient in the table for all scans of one patient's folder",
            remedy="correct the table or the folders, or remove the table",
        )
    return replace(
        dataset,
        cases=tuple(replace(case, patient=patients[case.id]) for case in dataset.cases),
        patients=patients,
        patient_identity=PatientIdentity.TABLE,
    )


def scans_by_patient(dataset: Dataset) -> dict[str, tuple[str, ...]]:
    """Return the scans of each patient that are listed for training, usable or not.

    Only the dataset's index is read. A scan without a named patient is a patient of its own.

    Args:
        dataset: The site's dataset.

    Returns:
        Sorted scan ids by patient.
    """
    scans: dict[str, list[str]] = {}
    for scan in dataset.listed:
        scans.setdefault(dataset.patient_of(scan), []).append(scan)
    return {patient: tuple(sorted(ids)) for patient, ids in scans.items()}


def _apart(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the cases that ``one`` gives to the patient of an earlier case, while ``other`` gives the two cases to
    different patients.

    >>> _apart({"scan 1": "A", "scan 2": "A"}, {"scan 1": "X", "scan 2": "Y"})
    ['scan 2']
    """
    first: dict[str, str] = {}
    both = [case for case in one if case in other]
    return [case for case in both if first.setdefault(one[case], other[case]) != other[case]]


def counted_once(dataset: Dataset) -> Dataset:
    """Return the dataset with repeated scans of one patient left out, and a note of scans and label maps that occur
    under two patients.

    Scans are compared by the hash of their image files. Copies that are compressed or stored differently are found by
    `site doctor`. Label maps are compared by their paths, because two patients may both have an empty one. Within one
    patient a repeated scan becomes a Problem and is left out, independently of other patients. Between patients nothing
    is left out: if one patient's files decided whether another's are used, one patient could change two voters. Such
    pairs are listed in :attr:`Dataset.doubled`.

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
    pairs = [*_copies(kept, content), *_shared_labels(kept)]
    between = dict.fromkeys((a, b) for a, b in pairs if patient(a) != patient(b))
    problems = (Problem(copy, f"the same scan as {copies[copy]}; to fix: remove one of them") for copy in copies)
    return replace(
        dataset,
        cases=tuple(case for case in dataset.cases if case.id not in copies),
        problems=(*dataset.problems, *problems),
        doubled=tuple(DuplicateCases(case, same_as) for case, same_as in between),
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


def _shared_labels(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """Return (id, id of the first earlier case) for every case whose label map is the same file as an earlier case's.

    The patient whose label map it is would also change what the other patient's voter learns.
    """
    first: dict[str, str] = {}
    firsts = [(case.id, first.setdefault(os.path.realpath(case.label), case.id)) for case in cases if case.label]
    return [(case, earlier) for case, earlier in firsts if case != earlier]


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


def find_table(directory: Path) -> Path | None:
    """Return ``patients.tsv`` or ``patients.csv`` in a dataset's directory, in upper or lower case.

    Args:
        directory: The dataset's directory.

    Returns:
        The path; None if there is neither.

    Raises:
        InvalidInput: If there are two that differ, or the directory cannot be listed.
    """
    return table_in(directory, PATIENT_TABLES)


def table_in(directory: Path, names: Sequence[str]) -> Path | None:
    """Return the file of a dataset's directory that has one of these names, in upper or lower case.

    Args:
        directory: The dataset's directory.
        names: The names in lower case, the preferred one first.

    Returns:
        The path, which may be a broken link; None if there is none.

    Raises:
        InvalidInput: If there are two that differ, or the directory cannot be listed.
    """
    found = [path for path in entries(directory) if path.name.casefold() in names]
    found.sort(key=lambda path: names.index(path.name.casefold()))
    if len(found) > 1 and any(read_table(path) != read_table(found[0]) for path in found[1:]):
        raise InvalidInput(
            "two tables of the same kind that differ", value=[path.name for path in found], remedy="remove one of them"
        )
    return found[0] if found else None
