"""Tests which patient a case belongs to: a table states it for all cases or for none."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from client.data.case_table import TableLayout
from client.data.layouts import open_dataset
from common.data.dataset import Dataset, PatientIdentity
from common.data.msd import Case, read_dataset, write_dataset
from common.data.patients import find_table, read_patients, read_table, with_patients
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


def test_a_table_names_the_patient_of_a_case_even_if_the_case_cannot_be_read(tmp_path: Path) -> None:
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
        ("case_id,patient_id\np0,a,x\n", "line 2"),
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
        ("t.csv", "\n\n ; \ncase_id;patient_id\np0;a\n;\n ; \n\n"),
        ("t.csv", "case_id\tpatient_id\np0\ta\n"),
        ("t.tsv", "case_id,patient_id\np0,a\n"),
        ("t.csv", "case_id,patient_id\rp0,a\r"),
        ("t.csv", "Case_ID,Patient ID\np0,a\n"),
        ("t.csv", "CASE-ID,PatientID\np0,a\n"),
        ("t.csv", "\ufeff\ufeffcase_id,patient_id\np0,a\n"),
        ("t.csv", "sep=;\ncase_id;patient_id\np0;a\n"),
    ],
)
def test_tables_are_read_as_spreadsheets_write_them(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8", newline="")
    assert read_table(tmp_path / name) == [{"case_id": "p0", "patient_id": "a"}]


def test_a_note_of_several_lines_and_a_line_separator_stay_in_their_cell(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        'case_id,patient_id,note\n"p\u20280",a,"left\r\nright"\n\np1,b,\x0cc\x85d\n', encoding="utf-8", newline=""
    )
    assert [list(row.values()) for row in read_table(path)] == [
        ["p\u20280", "a", "left\r\nright"],
        ["p1", "b", "c\x85d"],
    ]


@pytest.mark.parametrize(
    ("text", "line", "named"),
    [
        ('case_id,patient_id\n\np0,a\np1,"b\n', 4, ()),  # would take the rest of the table into one cell
        ('case_id,patient_id\np0,"a" b\np1,b\n', 2, ()),
        ('case_id,patient_id\np0,"a\np1",b\n', 3, ("p0",)),
        ('case_id,patient_id\n"p\n0",a\np1,b\n', 3, ("p\n0",)),
        ("case_id,patient_id\n\np0,a\n\np1\n", 5, ("p1",)),
        ("case_id,patient_id\n\np0,a\n\np1,\n", 5, ("p1",)),
        ('case_id,note,patient_id\np0,"a\nb",a\np1,c,\n', 4, ("p1",)),
    ],
)
def test_a_wrong_row_is_named_by_its_line_with_a_remedy(
    tmp_path: Path, text: str, line: int, named: tuple[str, ...]
) -> None:
    path = tmp_path / "mueller.csv"
    path.write_text(text, newline="")
    with pytest.raises(InvalidInput) as caught:
        read_patients(path, ["p0", "p1"])
    assert f"line {line}" in caught.value.without_value
    assert caught.value.remedy
    assert "mueller" not in caught.value.without_value
    assert caught.value.value == [path.name, *named]


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("case_id,patient_id\np0,a\n", ["p0", "anna"]),
        ("case_id,patient_id\nanna,a\nanna,b\n", ["anna"]),
        ("case_id,patient_id\nanna,\n", ["anna"]),
        ("anna,b\n", ["anna"]),
        ("anna,anna\n", ["anna"]),
        ("case_id\tanna\n", ["anna"]),
    ],
)
def test_the_error_without_names_for_a_table_contains_no_name_of_a_file_or_patient(
    tmp_path: Path, text: str, listed: list[str]
) -> None:
    path = tmp_path / "mueller.csv"
    path.write_text(text)
    with pytest.raises(InvalidInput) as caught:
        read_patients(path, listed)
    assert not re.search("mueller|anna", caught.value.without_value)
    assert "mueller.csv" in str(caught.value)
    assert caught.value.remedy


def test_a_table_that_one_may_not_read_asks_for_access_and_not_for_another_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, index = tmp_path / "patients.csv", tmp_path / "dataset.json"
    table.write_text("case_id,patient_id\n")
    index.write_text("{}")

    def closed(path: object, *_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("common.objects.os.open", closed)
    for read in (lambda: read_table(table), lambda: read_dataset(tmp_path)):
        with pytest.raises(InvalidInput, match="Permission denied") as caught:
            read()
        assert "access" in caught.value.remedy
        assert "UTF-8" not in str(caught.value)


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


def tables(folder: Path, own: str, **others: str) -> Path:
    """Write a table of cases, with the column of patients in ``own``, and further tables into the same folder."""
    made = dataset(folder, [None, None, None])
    directory = folder / "set"
    (directory / "dataset.json").unlink()
    rows = [
        f"{case.id},{patient},imagesTr/{case.id}.nii.gz,labelsTr/{case.id}.nii.gz"
        for case, patient in zip(made.cases, own, strict=True)
    ]
    (directory / "cases.csv").write_text("\n".join(["case_id,patient_id,image,label", *rows]) + "\n")
    for name, patients in others.items():
        lines = [f"p{i},{patient}" for i, patient in enumerate(patients)]
        (directory / name.replace("_", ".")).write_text("\n".join(["case_id,patient_id", *lines]) + "\n")
    return directory


@pytest.mark.parametrize("beside", ["xyz", "xxx"])
def test_two_tables_that_disagree_about_the_patients_are_refused(tmp_path: Path, beside: str) -> None:
    directory = tables(tmp_path, "aba", patients_csv=beside)
    with pytest.raises(InvalidInput, match="two tables disagree") as caught:
        open_dataset(directory)
    assert not re.search("p[012]", caught.value.without_value)
    assert caught.value.value[0] == "patients.csv"
    (directory / "patients.csv").unlink()
    assert open_dataset(directory).patient_of("p2") == "a"


def test_two_tables_may_call_the_same_patients_by_other_names(tmp_path: Path) -> None:
    found = open_dataset(tables(tmp_path, "aba", patients_csv="xyx"))
    assert [found.patient_of(f"p{i}") for i in range(3)] == ["x", "y", "x"]


def test_a_table_may_join_the_subjects_of_a_layout_and_never_split_one(tmp_path: Path) -> None:
    subjects = {"a_1": "a", "a_2": "a", "b": "b"}
    cases = tuple(Case(name, tmp_path, patient=patient) for name, patient in subjects.items())
    found = Dataset(
        "s", (), (), cases, listed=tuple(subjects), patients=subjects, patient_identity=PatientIdentity.SUBJECT
    )
    table = tmp_path / "patients.csv"
    table.write_text("case_id,patient_id\na_1,x\na_2,x\nb,x\n")
    assert set(with_patients(found, table).patients.values()) == {"x"}
    table.write_text("case_id,patient_id\na_1,x\na_2,y\nb,z\n")
    with pytest.raises(InvalidInput, match=r"one patient's folder to several patients: got .*a_2") as caught:
        with_patients(found, table)
    assert "a_2" not in caught.value.without_value


@pytest.mark.parametrize("names", [("patients.csv", "patients.tsv"), ("Patients.csv", "patients.csv")])
def test_a_second_table_of_patients_is_never_passed_over(tmp_path: Path, names: tuple[str, str]) -> None:
    texts = ("case_id,patient_id\np0,a\n", "case_id,patient_id\np0,b\n")
    for name, text in zip(names, texts, strict=True):
        (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match="two tables"):
        find_table(tmp_path)
    (tmp_path / names[1]).write_text(texts[0])
    assert find_table(tmp_path) is not None


@pytest.mark.parametrize("name", ["Patients.CSV", "PATIENTS.tsv"])
def test_a_table_of_patients_is_found_in_any_letter_case_and_behind_a_broken_link(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "gone")
    assert find_table(tmp_path) == tmp_path / name
    with pytest.raises(InvalidInput, match="No such file"):
        read_patients(tmp_path / name, [])


def test_a_column_that_may_name_patients_is_not_passed_over(tmp_path: Path) -> None:
    directory = tables(tmp_path, "aba")
    table = directory / "cases.csv"
    for column in ("Patient", "Subject-ID", "PID"):
        table.write_text(table.read_text().replace("patient_id", column))
        with pytest.raises(InvalidInput, match="patient_id"):
            open_dataset(directory)
        table.write_text(table.read_text().replace(column, "patient_id"))


@pytest.mark.parametrize("name", ["10:30.nii.gz", "a:30.nii.gz"])
def test_a_colon_in_a_files_name_leaves_no_directory(tmp_path: Path, name: str) -> None:
    directory = tables(tmp_path, "abc")
    (directory / "imagesTr/p0.nii.gz").rename(directory / name)
    table = directory / "cases.csv"
    table.write_text(table.read_text().replace("imagesTr/p0.nii.gz", name).replace("imagesTr/p1", "C:\\scans\\p1"))
    found = open_dataset(directory)
    assert [case.id for case in found.cases] == ["p0", "p2"]
    assert [(one.case, "leaves" in one.reason) for one in found.problems] == [("p1", True)]


def test_a_row_without_an_image_or_a_patient_is_named_by_its_line(tmp_path: Path) -> None:
    directory = tables(tmp_path, "abc")
    table = directory / "cases.csv"
    lines = table.read_text().replace("imagesTr/p1.nii.gz", "").splitlines()
    table.write_text("\n".join([lines[0], "", *lines[1:]]))
    assert "line 4" in open_dataset(directory).problems[0].reason
    table.write_text(table.read_text().replace("p2,c", "p2,"))
    with pytest.raises(InvalidInput, match="line 5"):
        open_dataset(directory)
