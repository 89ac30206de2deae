"""Reads a folder with a table ``cases.csv`` that names every case's image, label and patient.

The image is in the column ``image`` (a NIfTI file with all channels, or a folder with one DICOM series), or each
channel has its own column ``image_NAME``. Three columns are optional: ``label`` (NIfTI, a DICOM Segmentation or an RT
Structure Set), ``patient_id`` and ``case_id``. Paths are relative to the table. Labels are named by ``labels.tsv``
(``index``, ``name``) beside it; without it the label maps must use the study's numbers. The structures of an RT
Structure Set are matched by their own names. It refuses a table without image columns, one that names the patient of
some rows only, and one in which rows of two patients have the same case id.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path, PurePosixPath

from client.data.bids import read_label_table
from common.data.access import absent, check_opens, closed_folder
from common.data.dataset import Case, Dataset, PatientIdentity, Problem
from common.data.msd import case_id, is_file, nifti_ending
from common.data.patients import read_rows, read_table, table_in
from common.errors import InvalidInput
from common.wording import many

CASE_TABLES = ("cases.csv", "cases.tsv")
_PREFIX = "image_"
_MEANS_PATIENT = frozenset(
    f"{person}{part}"
    for person in ("patient", "subject", "participant", "p")
    for part in ("", "s", "id", "no", "number")
) - {"p", "ps", "pno"}


class TableLayout:
    """The layout of a folder with a table of cases."""

    name = "table"
    says = "cases.csv with columns image (or image_T1, image_T2, …), label, patient_id"

    def matches(self, directory: Path) -> bool:
        """Tell whether the directory has a table of cases.

        If there is also a ``dataset.json``, a table without any of the known columns does not count, because it may
        contain notes.
        """
        table = table_in(directory, CASE_TABLES)
        if table is None or not (directory / "dataset.json").is_file():
            return table is not None
        columns = {name for row in read_table(table)[:1] for name in row}
        return not columns or any(name in ("label", "patient_id") or name.startswith("image") for name in columns)

    def read(self, directory: Path) -> Dataset:
        """Read the table; no scan is opened.

        Raises:
            InvalidInput: If there is no table, it is empty or has wrong columns, only some rows name a patient, or rows
                of two patients have the same case id.
        """
        path = table_in(directory, CASE_TABLES)
        if path is None:
            raise InvalidInput("no cases.csv in the data directory", limit=self.says)
        found = read_rows(path)
        lines, rows = [line for line, _ in found], [row for _, row in found]
        if not rows:
            raise InvalidInput("table of cases is empty", value=path.name, limit=self.says)
        columns = [name for name in rows[0] if name == "image" or (name.startswith(_PREFIX) and name != _PREFIX)]
        if not columns or ("image" in columns and len(columns) > 1):
            raise InvalidInput("columns of the table of cases", value=sorted(rows[0]), limit=self.says)
        meant = [name for name in rows[0] if re.sub(r"[\W_]", "", name.casefold()) in _MEANS_PATIENT]
        if meant and "patient_id" not in rows[0]:
            raise InvalidInput(
                "table of cases without the column patient_id",
                value=meant,
                limit="a column patient_id, if the table names the patients",
                remedy="rename the column to patient_id, or remove it; every file then counts as a patient",
            )
        known = [bool(row.get("patient_id")) for row in rows]
        if any(known) and not all(known):
            raise InvalidInput(
                f"{many(known.count(False), 'row')} of the table of cases without patient_id, the first in line "
                f"{lines[known.index(False)]}",
                remedy="fill patient_id in every row, or leave the column out",
            )
        ids = [_name(row, columns, number) for number, row in enumerate(rows, start=1)]
        _check_one_patient(path, ids, found)
        counts = Counter(ids)
        cases, problems = [], {}
        for name, line, row in zip(ids, lines, rows, strict=True):
            outcome = _read_row(directory, row, columns, name, line)
            if counts[name] > 1:
                problems[name] = Problem(
                    name, "listed twice, so it is not clear which scan is meant; to fix: list it once"
                )
            elif isinstance(outcome, Problem):
                problems[name] = outcome
            else:
                cases.append(outcome)
        if not cases:
            own = [[row[column] for column in (*columns, "label") if row.get(column)] for row in rows]
            check_opens([directory / text.replace("\\", "/") for text in texts] for texts in own)
        by_case = list(zip(ids, rows, strict=True))
        patients = {name: row["patient_id"] for name, row in by_case if any(known)}
        table = directory / "labels.tsv"
        names = {0: "background", **read_label_table(table)} if table.is_file() else {}
        return Dataset(
            name=directory.name,
            labels=tuple(names[value] for value in sorted(names)),
            label_values=tuple(sorted(names)),
            channels=("image",) if columns == ["image"] else tuple(c.removeprefix(_PREFIX) for c in columns),
            cases=tuple(cases),
            problems=tuple(problems.values()),
            listed=tuple(dict.fromkeys(name for name, row in by_case if row.get("label"))),
            patients=patients,
            patient_identity=PatientIdentity.TABLE if patients else PatientIdentity.FILE,
        )


def _check_one_patient(table: Path, ids: list[str], found: list[tuple[int, dict[str, str]]]) -> None:
    """Refuse a table in which rows of two patients have the same case id.

    Without this check, cases with a repeated id would be left out. One patient's row would then decide whether another
    patient's scan is used, so exchanging one patient could change two voters.
    """
    first: dict[str, str | None] = {}
    for name, (line, row) in zip(ids, found, strict=True):
        if first.setdefault(name, row.get("patient_id")) != row.get("patient_id"):
            raise InvalidInput(
                f"a case belongs to two patients in the table, line {line}",
                value=[table.name, name],
                limit="a case id that no other patient has; without the column case_id it is the image's name",
                remedy="give each scan its own name in the column case_id, or correct the patient",
            )


def _name(row: dict[str, str], columns: list[str], number: int) -> str:
    """Return the row's ``case_id``; without one, the name of its first image; without that, ``row N``."""
    image = row[columns[0]]
    if row.get("case_id"):
        return row["case_id"]
    if (ending := nifti_ending(image)) and PurePosixPath(image).name != ending:
        return case_id(image)
    return PurePosixPath(image).name or f"row {number}"


def _read_row(directory: Path, row: dict[str, str], columns: list[str], name: str, line: int) -> Case | Problem:
    found: dict[str, Path] = {}
    for column in (*columns, *(["label"] if row.get("label") else [])):
        what = "label" if column == "label" else "image" if column == "image" else column.replace("_", " of ", 1)
        relative = PurePosixPath(row[column].replace("\\", "/"))
        if not row[column]:
            return Problem(name, f"the {what} is not named in line {line} of the table; to fix: fill in its column")
        if relative.is_absolute() or ".." in relative.parts or re.match("[A-Za-z]:/", str(relative)):
            reason = f"the {what}'s path in line {line} of the table leaves the data directory"
            return Problem(name, f"{reason}; to fix: put the file into the directory")
        path = directory / relative
        series = column != "label" and _is_folder(path)
        dicom = column == "label" and relative.suffix.lower() == ".dcm"
        if not series and not is_file(path) and closed_folder(path) is not None:
            return Problem(name, absent(path, what))
        if not series and not dicom and not nifti_ending(relative.name):
            return Problem(name, f"the {what} is not a .nii or .nii.gz file; to fix: convert it to NIfTI")
        if not series and not is_file(path):
            return Problem(name, absent(path, what))
        found[column] = path
    own = tuple((column.removeprefix(_PREFIX), found[column]) for column in columns)
    return Case(
        id=name,
        image=own[0][1],
        label=found.get("label"),
        patient=row.get("patient_id") or None,
        channel_files=own if columns != ["image"] else (),
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        return False
