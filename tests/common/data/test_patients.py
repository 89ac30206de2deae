"""Whose scan a case is: said by a table or by nobody, and never by half."""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from client.data.case_table import TableLayout
from common.data.dataset import Dataset, PatientIdentity
from common.data.msd import Case, read_dataset, write_dataset
from common.data.patients import read_patients, read_table
from common.errors import InvalidInput


def dataset(folder: Path, patients: list[str | None]) -> Dataset:
    cases = []
    for i, patient in enumerate(patients):
        path = folder / "raw" / f"p{i}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(np.full((3, 3, 3), i, dtype=np.uint8), np.eye(4)), path)
        cases.append(Case(id=f"p{i}", image=path, label=path, patient=patient))
    return write_dataset(folder / "set", name="s", labels=["background", "core"], channels=["MRI"], cases=cases)


def test_without_a_table_every_file_is_a_patient_and_the_dataset_says_so(tmp_path: Path) -> None:
    found = dataset(tmp_path, [None, None])
    assert found.patient_identity is PatientIdentity.FILE
    assert [found.patient_of(case.id) for case in found.cases] == ["p0", "p1"]
    assert "every file" in found.patient_identity.sentence


def test_a_table_says_whose_scan_a_case_is_also_for_one_that_cannot_be_read(tmp_path: Path) -> None:
    found = dataset(tmp_path, ["anna", "berta", "anna"])
    assert found.patient_identity is PatientIdentity.TABLE
    assert [case.patient for case in found.cases] == ["anna", "berta", "anna"]
    (tmp_path / "set/imagesTr/p2.nii.gz").unlink()
    again = read_dataset(tmp_path / "set")
    assert [problem.case for problem in again.problems] == ["p2"]
    assert [again.patient_of(case) for case in again.listed] == ["anna", "berta", "anna"]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("case_id,patient_id\np0,a\n", "without a patient"),
        ("case_id,patient_id\np0,a\np1,b\np1,c\n", "two patients"),
        ("case,patient\np0,a\np1,b\n", "columns case_id"),
        ("case_id,patient_id\np0,a\np1,\n", "columns case_id"),
        ("case_id,patient_id\np0,a,x\n", "row 2"),
        ("", "header"),
        ("case_id,\np0,a\n", "header"),
    ],
)
def test_a_table_that_leaves_doubt_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "patients.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=word):
        read_patients(path, ["p0", "p1"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", "case_id,patient_id\np0,a\n"),
        ("t.csv", "\ufeffcase_id;patient_id\r\np0;a\r\n"),
        ("t.tsv", "case_id\tpatient_id\n\np0 \t a\n"),
        ("t.csv", 'case_id,patient_id\n"p0","a"\n'),
    ],
)
def test_tables_are_read_as_spreadsheets_write_them(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert read_table(tmp_path / name) == [{"case_id": "p0", "patient_id": "a"}]


@pytest.mark.parametrize("image", [f"{'long' * 100}.nii.gz", "no/such/folder.nii.gz", ".nii.gz"])
def test_a_row_that_names_no_file_is_that_cases_problem_and_stops_nobody(tmp_path: Path, image: str) -> None:
    made = dataset(tmp_path, ["anna", "berta"])
    folder = tmp_path / "set"
    (folder / "dataset.json").unlink()
    rows = [f"{case.id},{case.patient},imagesTr/{case.id}.nii.gz,labelsTr/{case.id}.nii.gz" for case in made.cases]
    rows[1] = f"p1,berta,{image},labelsTr/p1.nii.gz"
    (folder / "patients.tsv").unlink()
    (folder / "cases.csv").write_text("\n".join(["case_id,patient_id,image,label", *rows]) + "\n")
    found = TableLayout().read(folder)
    assert [case.id for case in found.cases] == ["p0"]
    assert [problem.case for problem in found.problems] == ["p1"]
    assert found.listed == ("p0", "p1")


def test_a_table_that_is_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00\x81")
    for name in ("t.csv", "missing.csv"):
        with pytest.raises(InvalidInput, match="cannot be read"):
            read_table(tmp_path / name)
