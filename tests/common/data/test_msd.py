"""Tests the MSD layout: what is read, which faults refuse a dataset, and which leave out one case."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from client.data.cases import record_cases
from client.data.layouts import DatasetSettings
from client.operations.doctor import check_data
from client.operations.findings import State
from common.config import DataConfig
from common.data.msd import Case, case_id, check_labels, read_dataset, write_dataset
from common.errors import InvalidInput


def write_volume(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(np.full((4, 4, 4), value, dtype=np.uint8), np.eye(4)), path)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    cases = []
    for i in range(4):
        image = write_volume(tmp_path / "raw" / f"p{i}.nii.gz", i)
        label = write_volume(tmp_path / "raw" / "labels" / f"p{i}.nii.gz") if i < 3 else None
        cases.append(Case(id=f"p{i}", image=image, label=label, hospital="north" if i == 0 else None))
    write_dataset(tmp_path / "set", name="demo", labels=["background", "core"], channels=["MRI"], cases=cases)
    return tmp_path / "set"


def edit(directory: Path, **changes: Any) -> None:
    path = directory / "dataset.json"
    document = json.loads(path.read_text())
    document.update(changes)
    path.write_text(json.dumps(document))


def test_a_written_dataset_is_read_back_in_the_msd_layout(directory: Path) -> None:
    dataset = read_dataset(directory)
    assert [case.id for case in dataset.cases] == ["p0", "p1", "p2", "p3"]
    assert [case.id for case in dataset.labelled] == ["p0", "p1", "p2"]
    assert dataset.labels == ("background", "core")
    assert dataset.channels == ("MRI",)
    assert dataset.problems == ()
    assert dataset.cases[0].hospital == "north"
    assert (directory / "imagesTr/p0.nii.gz").is_file()
    assert (directory / "labelsTr/p0.nii.gz").is_file()
    assert (directory / "imagesTs/p3.nii.gz").is_file()


def test_one_bad_case_is_left_out_named_and_counted(directory: Path) -> None:
    (directory / "labelsTr/p1.nii.gz").unlink()
    dataset = read_dataset(directory)
    assert [case.id for case in dataset.cases] == ["p0", "p2", "p3"]
    (problem,) = dataset.problems
    assert problem.case == "p1"
    assert "label file is missing; to fix: " in problem.reason
    assert dataset.listed == ("p0", "p1", "p2")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (None, "link to a file that is missing"),
        (errno.ELOOP, "symbolic links form a loop"),
        (errno.ESTALE, "Stale file handle"),
        (errno.EIO, "Input/output error"),
        (0, "not a regular file"),
    ],
)
def test_a_file_that_is_there_and_cannot_be_opened_is_not_called_missing(
    directory: Path, number: int | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = directory / "labelsTr/p1.nii.gz"
    path.unlink()
    if number in (None, errno.ELOOP):
        path.symlink_to(path.name if number else "gone.nii.gz")
    elif number == 0:
        os.mkfifo(path)
    else:
        real = os.stat

        def stat(asked: str | Path, **more: Any) -> os.stat_result:
            if str(asked) == str(path):
                raise OSError(number, os.strerror(number), str(path))
            return real(asked, **more)

        monkeypatch.setattr(os, "stat", stat)
    (problem,) = read_dataset(directory).problems
    assert reason in problem.reason
    assert "; to fix: " in problem.reason
    assert str(directory) not in problem.reason


def test_files_that_the_index_does_not_list_are_named_and_belong_to_no_voter(directory: Path, tmp_path: Path) -> None:
    before = read_dataset(directory)
    assert before.unlisted == ()
    write_volume(directory / "imagesTr/p7.nii.gz", 7)
    write_volume(directory / "labelsTr/p7.nii.gz")
    write_volume(directory / "labelsTr/p8.nii")
    (directory / "imagesTr/p9").mkdir()
    for hidden in ("._p9.nii.gz", ".DS_Store", "readme.txt"):
        (directory / "imagesTr" / hidden).touch()
    (directory / "labelsTr/p0.nii.gz").rename(directory / "labelsTr/drawn-p0.nii.gz")
    entry = {"image": ".\\imagesTr\\p0.nii.gz", "label": "./labelsTr/drawn-p0.nii.gz"}
    edit(directory, training=[entry, *json.loads((directory / "dataset.json").read_text())["training"][1:]])
    after = read_dataset(directory)
    assert [problem.case for problem in after.unlisted] == ["p7", "p8"]
    assert "dataset.json does not list it; to fix: list it" in after.unlisted[0].reason
    assert (after.listed, after.patients_listed, after.problems) == (before.listed, before.patients_listed, ())
    assert [case.id for case in after.cases] == [case.id for case in before.cases]
    record = record_cases(tmp_path, after, [])
    assert (record.listed, record.patients, record.left_out) == (len(before.listed) + 2, len(before.listed), 2)
    study = DataConfig(labels=("background", "core"), channels=("MRI",), spacing_mm=(1, 1, 1), grid=(8, 8, 8))
    (said,) = (one for one in check_data(directory, study, DatasetSettings()) if "not list; no voter" in one.text)
    assert (said.state, said.subject) == (State.NOTE, "p7, p8")
    assert "p7" not in said.text


def test_images_named_as_nnunet_v1_names_them_are_the_listed_cases(directory: Path) -> None:
    edit(directory, modality={"0": "T1", "1": "T2"})
    for case in ("p0", "p1", "p2"):
        image = directory / f"imagesTr/{case}.nii.gz"
        shutil.copy(image, directory / f"imagesTr/{case}_0001.nii.gz")
        image.rename(directory / f"imagesTr/{case}_0000.nii.gz")
    (directory / "imagesTr/p1_0001.nii.gz").unlink()
    write_volume(directory / "imagesTr/p2_0002.nii.gz")
    write_volume(directory / "imagesTr/p7_0000.nii.gz")
    dataset = read_dataset(directory)
    assert [case.id for case in dataset.labelled] == ["p0"]
    names = [(channel, path.name) for channel, path in dataset.cases[0].channel_files]
    assert names == [("T1", "p0_0000.nii.gz"), ("T2", "p0_0001.nii.gz")]
    assert dataset.cases[0].image.name == "p0_0000.nii.gz"
    reasons = {problem.case: problem.reason for problem in dataset.problems}
    assert "the image of channel T2 is missing; to fix: " in reasons["p1"]
    assert "more channel files than the 2 that dataset.json names; to fix: " in reasons["p2"]
    assert [problem.case for problem in dataset.unlisted] == ["p7_0000"]


def test_one_channel_named_as_nnunet_v1_names_it_is_the_whole_image(directory: Path) -> None:
    (directory / "imagesTr/p0.nii.gz").rename(directory / "imagesTr/p0_0000.nii.gz")
    (directory / "imagesTs/p3.nii.gz").rename(directory / "imagesTs/p3_0000.nii.gz")
    dataset = read_dataset(directory)
    assert dataset.problems == dataset.unlisted == ()
    assert {case.id: case.image.name for case in dataset.cases}["p0"] == "p0_0000.nii.gz"
    assert all(case.channel_files == () for case in dataset.cases)


def test_an_image_beside_the_one_that_the_index_lists_stays_unlisted(directory: Path) -> None:
    shutil.copy(directory / "imagesTr/p0.nii.gz", directory / "imagesTr/p0_0000.nii.gz")
    dataset = read_dataset(directory)
    assert dataset.cases[0].image.name == "p0.nii.gz"
    assert [problem.case for problem in dataset.unlisted] == ["p0_0000"]


def test_labels_as_nnunet_v2_states_them_are_read_or_refused_with_the_form_that_is_read(directory: Path) -> None:
    edit(directory, labels={"core": 1, "background": 0})
    assert read_dataset(directory).labels == ("background", "core")
    for labels in ({"background": 0, "core": 2}, {"background": 0, "whole": [1, 2]}, {"background": False, "core": 1}):
        edit(directory, labels=labels)
        with pytest.raises(InvalidInput, match=r'from 0 without a gap, such as \{"0": "background".*"background": 0'):
            read_dataset(directory)


def test_an_index_that_windows_wrote_is_read(directory: Path) -> None:
    path = directory / "dataset.json"
    document = json.loads(path.read_text())
    for entry in document["training"]:
        entry.update({key: text.removeprefix("./").replace("/", "\\") for key, text in entry.items()})
    path.write_text("\ufeff" + json.dumps(document).replace(", ", ",\r\n"), encoding="utf-8", newline="")
    (directory / "patients.csv").write_text("case_id,patient_id\np0,a\np1,b\np2,b\np3,c\n")
    found = read_dataset(directory)
    assert found.problems == ()
    assert found.listed == ("p0", "p1", "p2")


def test_an_index_that_is_no_json_is_named_by_its_line_with_a_remedy(directory: Path) -> None:
    path = directory / "dataset.json"
    path.write_text('{"labels": {\n"0": "background",\n}}')
    with pytest.raises(InvalidInput, match=r"cannot be read \(line 3, column 1\)") as caught:
        read_dataset(directory)
    assert "comma" in caught.value.remedy


def test_a_case_listed_twice_is_used_neither_time(directory: Path) -> None:
    document = json.loads((directory / "dataset.json").read_text())
    edit(directory, training=document["training"] * 2)
    dataset = read_dataset(directory)
    assert [case.id for case in dataset.cases] == ["p3"]
    assert {problem.case for problem in dataset.problems} == {"p0", "p1", "p2"}


@pytest.mark.parametrize(
    "entry",
    [
        {"image": "../secret.nii.gz", "label": "labelsTr/p0.nii.gz"},
        {"image": "/etc/secret.nii.gz", "label": "labelsTr/p0.nii.gz"},
        {"image": "imagesTr/p0.txt", "label": "labelsTr/p0.nii.gz"},
        {"image": "imagesTr/p0.nii.gz"},
        {"label": "labelsTr/p0.nii.gz"},
        17,
    ],
)
def test_an_entry_that_is_not_understood_is_a_problem_not_a_crash(directory: Path, entry: object) -> None:
    edit(directory, training=[entry], test=[])
    dataset = read_dataset(directory)
    assert dataset.cases == ()
    assert len(dataset.problems) == 1


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"labels": {"0": "background"}}, "labels"),
        ({"labels": {"0": "background", "2": "core"}}, "labels"),
        ({"labels": {"0": "same", "1": "same"}}, "labels"),
        ({"labels": ["background", "core"]}, "labels"),
        ({"modality": {}}, "modality"),
        ({"training": [], "test": []}, "no cases"),
        ({"hospitals": []}, "hospitals"),
    ],
)
def test_an_invalid_dataset_is_refused_with_the_key(directory: Path, changes: dict[str, Any], word: str) -> None:
    edit(directory, **changes)
    with pytest.raises(InvalidInput, match=word):
        read_dataset(directory)


def test_a_missing_or_broken_index_is_refused_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"dataset\.json.*to fix"):
        read_dataset(tmp_path)
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(InvalidInput, match="JSON"):
        read_dataset(tmp_path)
    (tmp_path / "dataset.json").write_text("[]")
    with pytest.raises(InvalidInput, match="object"):
        read_dataset(tmp_path)


def test_labels_are_compared_by_name_without_letter_case(directory: Path) -> None:
    dataset = read_dataset(directory)
    check_labels(dataset, DataConfig(labels=("Background", "CORE"), spacing_mm=(1, 1, 1), grid=(8, 8, 8)))
    with pytest.raises(InvalidInput, match="labels"):
        check_labels(dataset, DataConfig(labels=("background", "rim"), spacing_mm=(1, 1, 1), grid=(8, 8, 8)))
    with pytest.raises(InvalidInput, match="channels"):
        check_labels(
            dataset,
            DataConfig(labels=("background", "core"), spacing_mm=(1, 1, 1), grid=(8, 8, 8), channels=("T1", "T2")),
        )


def test_case_ids_have_no_path_and_no_suffix() -> None:
    assert case_id("./imagesTr/patient.01.nii.gz") == "patient.01"
    assert case_id("patient.nii") == "patient"
    with pytest.raises(InvalidInput, match="file name"):
        case_id("patient.mha")
