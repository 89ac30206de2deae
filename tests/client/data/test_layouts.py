"""Tests that every layout of one dataset gives the same cases, channels, labels and patients."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from client.data.bids import read_label_table
from client.data.cases import record_cases
from client.data.layouts import (
    LAYOUTS,
    DatasetSettings,
    load_names,
    match_study,
    open_dataset,
    open_for_training,
)
from client.operations.doctor import check_data
from client.operations.findings import CheckResult, State, to_json
from client.records.patient_deal import load_or_deal
from client.records.scan_patients import check_scans, record_scans
from common.config import DataConfig
from common.data.dataset import Dataset, PatientIdentity, check_labels
from common.data.patients import counted_once, scans_by_patient
from common.errors import InvalidInput
from common.names import is_utf8
from tests.contracts.layout_contract import held

CHANNELS = ("T1", "T1c", "T2", "FLAIR")
DATA = DataConfig(
    labels=("background", "edema", "core"),
    spacing_mm=(1, 1, 1),
    grid=(8, 8, 8),
    channels=("FLAIR", "T1", "T1c", "T2"),
)


def volume(value: int) -> nib.Nifti1Image:
    array = np.full((4, 5, 6), value, dtype=np.uint8)
    array[0, 0, 0] = 0
    return nib.Nifti1Image(array, np.eye(4))


def save(path: Path, value: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(volume(value), path)


def brightness(case: int, channel: int) -> int:
    """Return a value that differs between all image files of the test datasets."""
    return 10 * case + channel + 1


def make_msd(folder: Path) -> Path:
    training = []
    for case in range(3):
        stacked = np.stack([volume(brightness(case, c)).get_fdata() for c in range(4)], axis=-1).astype(np.uint8)
        (folder / "imagesTr").mkdir(parents=True, exist_ok=True)
        nib.save(nib.Nifti1Image(stacked, np.eye(4)), folder / f"imagesTr/p{case}.nii.gz")
        save(folder / f"labelsTr/p{case}.nii.gz", 1)
        training.append({"image": f"./imagesTr/p{case}.nii.gz", "label": f"./labelsTr/p{case}.nii.gz"})
    index = {
        "modality": {str(i): name for i, name in enumerate(("T1w", "t1gd", "T2w", "FLAIR"))},
        "labels": {"0": "background", "1": "edema", "2": "core"},
        "training": training,
        "test": [],
    }
    (folder / "dataset.json").write_text(json.dumps(index))
    (folder / "patients.tsv").write_text("case_id\tpatient_id\np0\tsub-a\np1\tsub-b\np2\tsub-b\n")
    return folder


def make_nnunet(folder: Path) -> Path:
    for case in range(3):
        for channel in range(4):
            save(folder / f"imagesTr/p{case}_{channel:04d}.nii.gz", brightness(case, channel))
        save(folder / f"labelsTr/p{case}.nii.gz", 1)
    index = {
        "channel_names": {str(i): name for i, name in enumerate(CHANNELS)},
        "labels": {"background": 0, "edema": 1, "core": 2},
        "numTraining": 3,
        "file_ending": ".nii.gz",
    }
    (folder / "dataset.json").write_text(json.dumps(index))
    (folder / "patients.csv").write_text("case_id,patient_id\np0,sub-a\np1,sub-b\np2,sub-b\n")
    return folder


def make_bids(folder: Path) -> Path:
    for case, (subject, session) in enumerate([("sub-a", "ses-1"), ("sub-b", "ses-1"), ("sub-b", "ses-2")]):
        stem = f"{subject}/{session}/anat/{subject}_{session}"
        for channel, suffix in enumerate(("T1w", "ce-gadolinium_T1w", "T2w", "FLAIR")):
            save(folder / f"{stem}_{suffix}.nii.gz", brightness(case, channel))
        save(folder / f"derivatives/manual/{stem}_dseg.nii.gz", 1)
    (folder / "dataset_description.json").write_text('{"Name": "x", "BIDSVersion": "1.9.0"}')
    (folder / "derivatives/manual/dseg.tsv").write_text("index\tname\n1\tedema\n2\tcore\n")
    return folder


def make_table(folder: Path) -> Path:
    rows = ["case_id;patient_id;" + ";".join(f"image_{name}" for name in CHANNELS) + ";label"]
    for case, patient in enumerate(("sub-a", "sub-b", "sub-b")):
        files = [f"scans/p{case}/{name}.nii.gz" for name in CHANNELS]
        for channel, file in enumerate(files):
            save(folder / file, brightness(case, channel))
        save(folder / f"scans/p{case}/seg.nii.gz", 1)
        rows.append(";".join([f"p{case}", patient, *files, f"scans/p{case}/seg.nii.gz"]))
    (folder / "cases.csv").write_text("\n".join(rows) + "\n")
    (folder / "labels.tsv").write_text("index\tname\n1\tedema\n2\tcore\n")
    return folder


MAKE = {"msd": make_msd, "nnunet": make_nnunet, "bids": make_bids, "table": make_table}


def test_every_layout_is_tested() -> None:
    assert {*MAKE, "brats"} | held() == LAYOUTS.keys()  # brats has labels of its own: test_brats.py


@pytest.mark.parametrize("layout", MAKE)
def test_every_layout_is_found_by_itself_and_gives_the_same_cases_channels_and_patients(
    layout: str, tmp_path: Path
) -> None:
    found = open_dataset(MAKE[layout](tmp_path / "set"))
    assert len(found.cases) == len(found.listed) == 3
    assert found.problems == ()
    assert [found.patient_of(name) for name in found.listed] == ["sub-a", "sub-b", "sub-b"]
    assert [case.patient for case in found.cases] == ["sub-a", "sub-b", "sub-b"]
    expected = PatientIdentity.SUBJECT if layout == "bids" else PatientIdentity.TABLE
    assert found.patient_identity is expected
    assert found == open_dataset(tmp_path / "set", layout=layout)

    matched = match_study(found, DATA)
    check_labels(matched, DATA)
    for number, case in enumerate(matched.cases):
        assert case.label_map == ()
        assert case.label is not None
        if case.channel_files:
            seen = [int(np.asarray(nib.load(path).dataobj).max()) for path in case.images]
        else:
            stacked = np.asarray(nib.load(case.image).dataobj)
            seen = [int(stacked[..., channel].max()) for channel in case.channel_order]
        assert seen == [brightness(number, CHANNELS.index(name)) for name in DATA.channels]


@pytest.mark.parametrize("layout", MAKE)
def test_the_hidden_files_of_a_desktop_change_no_layout(layout: str, tmp_path: Path) -> None:
    """macOS writes a file `._NAME` beside each copied file. It must not count as an image or a table."""
    root = MAKE[layout](tmp_path / "set")
    before = open_dataset(root)
    for path in list(root.rglob("*")):
        hidden = path / ".DS_Store" if path.is_dir() else path.with_name(f"._{path.name}")
        hidden.write_bytes(b"\0\5\x16\7")
    (root / "._dseg.tsv").write_bytes(b"\0\5\x16\7")
    assert open_dataset(root) == before


def test_the_doctor_names_each_case_without_a_label_map(tmp_path: Path) -> None:
    """No voter uses a case without a label map, so a person must see which cases these are."""
    root = make_bids(tmp_path / "set")
    (root / "derivatives/manual/sub-b/ses-2/anat/sub-b_ses-2_dseg.nii.gz").unlink()
    (note,) = (one for one in check_data(root, DATA, DatasetSettings()) if "without a label map" in one.text)
    assert (note.state, note.subject, note.text.split()[0]) == (State.NOTE, "sub-b_ses-2", "1")


def test_notes_on_the_cases_beside_a_dataset_are_no_layout_but_a_table_that_names_patients_is(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text("{}")
    for columns, found in (("case_id,site,grade", "msd"), ("case_id,patient_id", "table"), ("image_T1,site", "table")):
        (tmp_path / "cases.csv").write_text(f"{columns}\n{','.join('a' for _ in columns.split(','))}\n")
        assert next(layout.name for layout in LAYOUTS.values() if layout.matches(tmp_path)) == found


@pytest.mark.parametrize("layout", MAKE)
def test_one_missing_file_costs_one_case_and_says_which(layout: str, tmp_path: Path) -> None:
    root = MAKE[layout](tmp_path / "set")
    victim = {
        "msd": "labelsTr/p1.nii.gz",
        "nnunet": "imagesTr/p1_0002.nii.gz",
        "bids": "sub-b/ses-1/anat/sub-b_ses-1_T2w.nii.gz",
        "table": "scans/p1/T2.nii.gz",
    }[layout]
    (root / victim).unlink()
    found = match_study(open_dataset(root), DATA)
    assert len(found.cases) == 2
    assert len(found.problems) == 1
    assert "missing" in found.problems[0].reason
    assert len(found.listed) == 3
    assert found.patient_of(found.problems[0].case) == "sub-b"


def test_a_subset_of_the_channels_is_enough_for_a_study_that_asks_for_no_more(tmp_path: Path) -> None:
    one = DataConfig(labels=DATA.labels, spacing_mm=(1, 1, 1), grid=(8, 8, 8), channels=("T2",))
    for layout, make in MAKE.items():
        case = match_study(open_dataset(make(tmp_path / layout)), one).cases[0]
        if layout == "msd":
            assert case.channel_order == (2,)
        else:
            assert int(np.asarray(nib.load(case.image).dataobj).max()) == brightness(0, 2)
            assert case.images == (case.image,)


def test_the_sites_names_are_mapped_to_the_studys_and_nothing_is_guessed(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "set")
    (root / "derivatives/manual/dseg.tsv").write_text(
        "index\tname\n17\tLeft-Edema\n53\tright edema\n9\tCORE\n4\tbone\n"
    )
    found = open_dataset(root)
    with pytest.raises(InvalidInput, match="--label-map") as caught:
        match_study(found, DATA)
    assert all(word in str(caught.value) for word in ("17 = Left-Edema", "53 = right edema", "4 = bone"))
    assert "CORE" not in str(caught.value)
    mapping = {"left edema": "Edema", "53": "edema", "bone": "background"}
    pairs = match_study(found, DATA, labels=mapping).cases[0].label_map
    assert dict(pairs) == {0: 0, 4: 0, 9: 2, 17: 1, 53: 1}
    for bad, word in [
        ({"left edema": "tumour"}, "label that the study lacks"),
        ({"left edma": "edema", "53": "edema", "bone": "background"}, "17 = Left-Edema.*lacks: left edma"),
    ]:
        with pytest.raises(InvalidInput, match=word):
            match_study(found, DATA, labels=bad)


def test_a_file_name_that_is_utf8_in_no_locale_costs_that_case_alone_in_an_ascii_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_nnunet(tmp_path / "set")
    first, *others = open_dataset(root).listed
    for path in [*root.rglob(f"{first}*")]:
        path.rename(path.with_name(path.name.replace(first, os.fsdecode(b"M\xfcller"))))
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    found = open_dataset(root)
    assert (found.listed, len(found.problems)) == (tuple(others), 1)


def test_a_patients_name_is_refused_in_a_locale_that_reads_it_differently(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_nnunet(tmp_path / "set")
    read = open_dataset(root).listed
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    assert open_dataset(root).listed == read  # ASCII names are the same under every locale
    for path in [*root.rglob(f"{read[0]}*")]:
        path.rename(path.with_name(path.name.replace(read[0], "M\u00fcller")))
    with pytest.raises(InvalidInput, match=r"iso8859-1.*xfcller.*to fix: set LC_ALL=C.UTF-8"):
        open_dataset(root)


@pytest.mark.parametrize("ending", [".nii.gz", ".dcm"])
def test_one_cases_label_format_does_not_decide_whether_a_dataset_is_used(tmp_path: Path, ending: str) -> None:
    """A name that the dataset lacks was refused, unless one patient's label was a DICOM file."""
    found = open_dataset(make_nnunet(tmp_path / "set"))
    one = replace(found.cases[0], label=tmp_path / f"label{ending}")
    mapped = match_study(replace(found, cases=(one, *found.cases[1:])), DATA, labels={"GTV": "core"})
    assert len(mapped.cases) == len(found.cases)


def test_a_structure_the_site_never_drew_is_refused(tmp_path: Path) -> None:
    root = make_nnunet(tmp_path / "set")
    index = json.loads((root / "dataset.json").read_text())
    index["labels"] = {"background": 0, "edema": 1}
    (root / "dataset.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match="is mapped to"):
        match_study(open_dataset(root), DATA)


def test_channels_of_unknown_names_are_mapped_or_refused(tmp_path: Path) -> None:
    root = make_nnunet(tmp_path / "set")
    index = json.loads((root / "dataset.json").read_text())
    index["channel_names"] = {"0": "noNorm", "1": "gad", "2": "T2", "3": "FLAIR"}
    (root / "dataset.json").write_text(json.dumps(index))
    found = open_dataset(root)
    with pytest.raises(InvalidInput, match=r"'noNorm', 'gad'.*--label-map"):
        match_study(found, DATA)
    case = match_study(found, DATA, channels={"noNorm": "T1", "gad": "T1c"}).cases[0]
    seen = [int(np.asarray(nib.load(path).dataobj).max()) for path in case.images]
    assert seen == [brightness(0, 3), brightness(0, 0), brightness(0, 1), brightness(0, 2)]
    for bad, word in [
        ({"noNorm": "T1", "gad": "T1"}, "twice"),
        ({"noNorm": "PET"}, "channel that the study lacks"),
        ({"xyz": "T1"}, "channel that the dataset lacks"),
    ]:
        with pytest.raises(InvalidInput, match=word):
            match_study(found, DATA, channels=bad)


def test_a_table_without_label_names_is_taken_in_the_studys_numbers_unless_it_is_mapped(tmp_path: Path) -> None:
    root = make_table(tmp_path / "set")
    (root / "labels.tsv").unlink()
    found = open_dataset(root)
    assert found.labels == ()
    assert match_study(found, DATA).cases[0].label_map == ()
    assert dict(match_study(found, DATA, labels={"3": "edema", "7": "core"}).cases[0].label_map) == {0: 0, 3: 1, 7: 2}


def test_one_scan_under_two_patients_is_reported_and_both_keep_their_files(tmp_path: Path) -> None:
    """Who takes part and whose files are used must not depend on what another patient's files hold."""
    root = make_nnunet(tmp_path / "set")
    before = open_for_training(root, DATA, DatasetSettings())
    (root / "imagesTr/p1_0000.nii.gz").write_bytes((root / "imagesTr/p0_0000.nii.gz").read_bytes())
    found = open_for_training(root, DATA, DatasetSettings())
    assert (found.cases, found.problems, found.listed) == (before.cases, before.problems, before.listed)
    assert before.doubled == ()
    (pair,) = found.doubled
    assert (pair.same_as, pair.case) == ("p0", "p1")
    assert "g = 2" in pair.sentence
    assert "to fix" in pair.sentence


def test_one_label_map_under_two_patients_is_reported_and_two_empty_ones_are_not(tmp_path: Path) -> None:
    """A slip in a table trains one patient's voter on another patient's label map."""
    for name in ("a.nii.gz", "b.nii.gz", "c.nii.gz"):
        save(tmp_path / name, ord(name[0]))
    for name in ("drawn.nii.gz", "empty.nii.gz"):
        save(tmp_path / name, 0)

    def doubled(*labels: str) -> list[tuple[str, str]]:
        rows = [f"{case}.nii.gz,{label}.nii.gz,{case}" for case, label in zip("abc", labels, strict=True)]
        (tmp_path / "cases.csv").write_text("\n".join(["image,label,patient_id", *rows]) + "\n")
        found = counted_once(open_dataset(tmp_path))
        assert [case.id for case in found.cases] == ["a", "b", "c"]
        return [(pair.case, pair.same_as) for pair in found.doubled]

    assert doubled("drawn", "empty", "drawn") == [("c", "a")]
    shutil.copy(tmp_path / "empty.nii.gz", tmp_path / "other.nii.gz")
    assert doubled("drawn", "empty", "other") == []


def test_a_copy_is_left_out_by_what_its_own_patient_has_and_by_nobody_else(tmp_path: Path) -> None:
    """p1 and p2 belong to one person, p0 to another. p2 is left out only if its files equal p1's. The files of
    p0 do not matter.
    """
    root = make_nnunet(tmp_path / "set")
    (root / "patients.csv").write_text("case_id,patient_id\np0,a\np1,b\np2,b\n")
    images = {case: [root / f"imagesTr/{case}_{channel:04d}.nii.gz" for channel in range(4)] for case in ("p0", "p2")}
    for mine, theirs in zip(images["p0"], images["p2"], strict=True):
        mine.write_bytes(theirs.read_bytes())
    found = open_for_training(root, DATA, DatasetSettings())
    assert [case.id for case in found.cases] == ["p0", "p1", "p2"]
    assert [(pair.same_as, pair.case) for pair in found.doubled] == [("p0", "p2")]


def test_a_scan_that_cannot_be_looked_at_is_its_own_problem_when_copies_are_sought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = match_study(open_dataset(make_nnunet(tmp_path / "set")), DATA)
    looked = Path.stat

    def stat(path: Path, **options: bool) -> os.stat_result:
        if path.name.startswith("p1_"):
            raise PermissionError(13, "Permission denied")
        return looked(path, **options)

    monkeypatch.setattr(Path, "stat", stat)
    assert counted_once(dataset).cases == dataset.cases


def test_a_scan_that_is_there_twice_under_one_patient_is_used_once(tmp_path: Path) -> None:
    root = make_nnunet(tmp_path / "set")
    (root / "patients.csv").write_text("case_id,patient_id\np0,a\np1,b\np2,b\n")
    for channel in range(4):
        name = f"{channel:04d}.nii.gz"
        (root / f"imagesTr/p2_{name}").write_bytes((root / f"imagesTr/p1_{name}").read_bytes())
    found = open_for_training(root, DATA, DatasetSettings())
    assert [case.id for case in found.cases] == ["p0", "p1"]
    (problem,) = found.problems
    assert problem.case == "p2"
    assert " p1;" in problem.reason


def nnunet_index(**changes: Any) -> dict[str, Any]:
    base = {"channel_names": {"0": "T1"}, "labels": {"background": 0, "core": 1}, "file_ending": ".nii.gz"}
    return {**base, **changes}


@pytest.mark.parametrize(
    ("index", "word"),
    [
        (nnunet_index(labels={"background": 0, "whole": [1, "2"]}), "region"),
        (nnunet_index(labels={"background": 0, "whole": [1, 1]}), "labels"),
        (nnunet_index(labels={"background": 0, "a": 1, "b": 1}), "labels"),
        (nnunet_index(labels={"a": 1, "b": 2}), "background is 0"),
        (nnunet_index(labels=[]), "labels"),
        (nnunet_index(file_ending=".nrrd"), "file_ending"),
        (nnunet_index(channel_names={"1": "T1"}), "channel_names"),
        (nnunet_index(channel_names={"0": "T1", "1": "T1"}), "twice"),
        (nnunet_index(), "no case"),
    ],
)
def test_an_invalid_nnunet_index_is_refused(tmp_path: Path, index: dict[str, Any], word: str) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps(index))
    with pytest.raises(InvalidInput, match=word):
        open_dataset(tmp_path)


def test_a_session_with_two_candidates_is_left_out_and_says_what_to_do(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "set")
    save(root / "sub-a/ses-1/anat/sub-a_ses-1_run-2_T1w.nii.gz", 9)
    save(root / "derivatives/manual/sub-b/ses-1/anat/sub-b_ses-1_desc-auto_dseg.nii.gz", 1)
    save(root / "derivatives/manual/sub-c/anat/sub-c_dseg.nii.gz", 1)
    found = match_study(open_dataset(root), DATA)
    reasons = {problem.case: problem.reason for problem in found.problems}
    wanted = {
        "sub-a_ses-1": r"several T1w .* run in \[bids\.T1w\] of site\.toml",
        "sub-b_ses-1": r"several label maps .* desc in \[bids\.dseg\] of site\.toml",
        "sub-c": r"without an image; .*\[bids\] in site\.toml",
    }
    assert reasons.keys() == wanted.keys()
    for case, reason in wanted.items():
        assert re.search(reason, reasons[case])
    assert [case.id for case in found.cases] == ["sub-b_ses-2"]


def test_two_label_maps_that_nothing_tells_apart_are_left_to_a_table(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "set")
    save(root / "derivatives/auto/sub-b/ses-1/anat/sub-b_ses-1_dseg.nii.gz", 1)
    (problem,) = match_study(open_dataset(root), DATA).problems
    assert "cases.csv" in problem.reason


def test_two_images_of_a_contrast_the_study_does_not_use_stop_nobody(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "set")
    save(root / "sub-a/ses-1/anat/sub-a_ses-1_run-2_T1w.nii.gz", 9)
    found = match_study(open_dataset(root), replace(DATA, channels=("T2", "FLAIR")))
    assert found.problems == ()
    assert len(found.cases) == 3


@pytest.mark.parametrize(
    ("extra", "choice", "taken"),
    [
        (("run-1", "run-2"), {"run": "2"}, "run-2"),
        (("run-01", "run-02"), {"run": "2"}, "run-02"),
        (("acq-mprage", "acq-space"), {"acq": "mprage"}, "acq-mprage"),
        (
            ("acq-mprage_run-1", "acq-mprage_run-2", "acq-space_run-1"),
            {"acq": "mprage", "run": "1"},
            "acq-mprage_run-1",
        ),
        (("", "rec-norm"), {"rec": "norm"}, "rec-norm"),
        (("", "acq-space"), {"acq": "mprage"}, ""),
        (("acq-mprage", "acq-space"), {"acq": "fse"}, None),
        (("run-1", "run-2"), {"acq": "mprage"}, None),
    ],
)
def test_the_sites_choice_says_which_of_several_images_is_meant(
    extra: tuple[str, ...], choice: dict[str, str], taken: str | None, tmp_path: Path
) -> None:
    root = make_bids(tmp_path / "set")
    (root / "sub-a/ses-1/anat/sub-a_ses-1_T1w.nii.gz").unlink()
    for number, entities in enumerate(extra):
        name = "_".join(filter(None, ("sub-a_ses-1", entities, "T1w.nii.gz")))
        save(root / "sub-a/ses-1/anat" / name, 100 + number)
    found = match_study(open_dataset(root, choice={"T1w": choice}), DATA)
    if taken is None:
        assert [problem.case for problem in found.problems] == ["sub-a_ses-1"]
        return
    assert found.problems == ()
    case = next(case for case in found.cases if case.id == "sub-a_ses-1")
    assert case.images[1].name == "_".join(filter(None, ("sub-a_ses-1", taken, "T1w.nii.gz")))


def test_the_sites_choice_says_which_of_several_label_maps_is_meant(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "set")
    save(root / "derivatives/manual/sub-b/ses-1/anat/sub-b_ses-1_desc-auto_dseg.nii.gz", 1)
    (root / "site.toml").write_text('[bids.dseg]\ndesc = "auto"\n')
    settings = load_names(root / "site.toml")
    found = open_for_training(root, DATA, settings)
    labels = {case.id: case.label.name for case in found.cases if case.label is not None}
    assert labels["sub-b_ses-1"] == "sub-b_ses-1_desc-auto_dseg.nii.gz"
    assert labels["sub-b_ses-2"] == "sub-b_ses-2_dseg.nii.gz"  # the only one there


def test_a_choice_that_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "bids")  # a dataset without any T3w is no error
    assert open_dataset(root, choice={"T3w": {"run": "1"}}) == open_dataset(root)
    with pytest.raises(InvalidInput, match=r"\[bids\] .*'msd'.*site\.toml"):
        open_dataset(make_msd(tmp_path / "msd"), choice={"T1w": {"run": "1"}})
    for text in ("bids = 3\n", "[bids]\nT1w = 1\n", "[bids.T1w]\nrun = 1\n"):
        (tmp_path / "names.toml").write_text(text)
        with pytest.raises(InvalidInput, match="bids"):
            load_names(tmp_path / "names.toml")


@pytest.mark.parametrize("table", [False, True])
def test_a_file_name_that_is_not_utf8_costs_that_case_alone(tmp_path: Path, table: bool) -> None:
    """Such a name could be stored, but not read again."""
    folder = make_bids(tmp_path)
    (subject, *_) = open_dataset(folder).listed
    wrong = os.fsdecode(b"sub-M\xfcller")
    for path in sorted(folder.rglob(f"*{subject.split('_')[0]}*"), reverse=True):
        path.rename(path.with_name(path.name.replace(subject.split("_")[0], wrong)))
    others = open_dataset(folder).listed
    if table:
        (folder / "patients.csv").write_text("case_id,patient_id\n" + "".join(f"{one},x\n" for one in others))
    found = open_dataset(folder)
    assert others
    assert found.listed == others
    assert all(is_utf8(text) for case in found.cases for text in (case.id, case.patient or ""))
    (problem,) = (one for one in found.problems if "not UTF-8; to fix: rename the file" in one.reason)
    assert problem.case.startswith("sub-M\\udcfcller")
    record = record_cases(tmp_path, found, [])
    assert (record.listed, record.left_out) == (len(others) + 1, 1)
    assert record.patients == 2
    (said, *_) = (one for one in check_data(folder, DATA, DatasetSettings()) if one.check == "patients")
    assert f"{record.patients} patients in {record.listed} labelled cases" in said.text


@pytest.mark.parametrize("name", ["M\ud800ller", "a\0b"])
@pytest.mark.parametrize("place", ["name.nii.gz", "name/image.nii.gz"])
@pytest.mark.parametrize("layout", ["table", "msd"])
def test_a_file_name_that_this_machine_cannot_express_costs_that_case_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str, layout: str
) -> None:
    """An ASCII locale expresses "Müller" as little as this one an unpaired surrogate."""
    files = [f"imagesTr/{number}.nii.gz" for number in range(2)] + [place.replace("name", name)]
    for file in files[:2]:
        save(tmp_path / file, 3)
    if layout == "table":
        monkeypatch.setattr("client.data.case_table.read_rows", lambda _: [(2, {"image": file}) for file in files])
        (tmp_path / "cases.csv").touch()
    else:
        index = {"channel_names": {"0": "MRI"}, "labels": {"0": "background", "1": "core"}, "training": []}
        index["training"] = [{"image": file, "label": files[0]} for file in files]
        (tmp_path / "dataset.json").write_text(json.dumps(index))
        monkeypatch.setattr("common.data.msd.parse_json", lambda *_, **__: index)
    found = open_dataset(tmp_path, layout=layout)
    assert len(found.cases) == 2
    (problem,) = found.problems
    assert "to fix" in problem.reason


def test_a_subjects_own_table_of_labels_speaks_for_that_subject_alone(tmp_path: Path) -> None:
    own = {"x": "1\tcore\n2\tedema\n", "y": "1\tedema\n2\tcore\n", "z": "1\tedema\n2\tbone\n"}
    for subject, rows in own.items():
        for contrast in ("T1w", "T2w"):
            save(tmp_path / f"sub-{subject}/anat/sub-{subject}_{contrast}.nii.gz", 3)
        drawn = tmp_path / f"derivatives/sub-{subject}/anat"
        save(drawn / f"sub-{subject}_dseg.nii.gz", 1)
        (drawn / f"sub-{subject}_dseg.tsv").write_text(f"index\tname\n{rows}")
    data = DataConfig(("background", "edema", "core"), (1, 1, 1), (8, 8, 8), channels=("T1", "T2"))
    found = match_study(open_dataset(tmp_path), data)
    assert {case.id: case.label_map for case in found.cases} == {"sub-x": ((0, 0), (1, 2), (2, 1)), "sub-y": ()}
    assert [(problem.case, "labels differ" in problem.reason) for problem in found.problems] == [("sub-z", True)]
    (tmp_path / "derivatives/dseg.tsv").write_text("index\tname\n1\tedema\n2\tcore\n")
    found = match_study(open_dataset(tmp_path), data)
    assert [case.id for case in found.cases] == ["sub-y"]
    assert [problem.case for problem in found.problems] == ["sub-x", "sub-z"]


@pytest.mark.parametrize("folder", ["", "derivatives/manual"])
def test_a_label_table_named_after_a_subject_speaks_for_that_subject_alone_in_any_folder(
    tmp_path: Path, folder: str
) -> None:
    """Flat derivatives have no subjects' folders. One patient's table must not decide how others are read."""
    root, flat = make_bids(tmp_path), tmp_path / folder
    before = match_study(open_dataset(root), DATA)
    for rows in ("1\tcore\n2\tedema\n", "1\tbone\n", "one\ttwo\n"):
        (flat / "sub-b_dseg.tsv").write_text(f"index\tname\n{rows}")
        after = match_study(open_dataset(root), DATA)
        assert [case for case in after.cases if case.patient == "sub-a"] == [
            case for case in before.cases if case.patient == "sub-a"
        ]
    (root / "derivatives/manual/dseg.tsv").unlink()
    (flat / "sub-b_dseg.tsv").write_text("index\tname\n1\tcore\n2\tedema\n")
    maps = {case.id: case.label_map for case in match_study(open_dataset(root), DATA).cases}
    assert maps == {"sub-a_ses-1": (), "sub-b_ses-1": ((0, 0), (1, 2), (2, 1)), "sub-b_ses-2": ((0, 0), (1, 2), (2, 1))}


def test_one_subjects_files_never_stop_a_dataset(tmp_path: Path) -> None:
    root = make_bids(tmp_path / "set")
    before = match_study(open_dataset(root), DATA)
    save(root / "sub-b/ses-1/anat/sub-b_ses-1_ce-gd_T1w.nii.gz", 5)
    save(root / "sub-b/ses-1/anat/sub-b_ses-1_T1c.nii.gz", 5)
    (root / "derivatives/manual/sub-b").mkdir(parents=True, exist_ok=True)
    (root / "derivatives/manual/sub-b/sub-b_dseg.tsv").write_text("index\tname\n1\tbone\n")
    after = match_study(open_dataset(root), DATA)
    assert [case for case in after.cases if case.patient != "sub-b"] == [
        case for case in before.cases if case.patient != "sub-b"
    ]
    assert {problem.case for problem in after.problems} == {case.id for case in before.cases if case.patient == "sub-b"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("picture,label\na.nii,b.nii\n", "columns"),
        ("image,image_T1,label\na.nii,b.nii,c.nii\n", "columns"),
        ("image,label,patient_id\na.nii,b.nii,x\nc.nii,d.nii,\n", "patient_id"),
        ("image,label\n", "empty"),
    ],
)
def test_an_invalid_table_of_cases_is_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "cases.csv").write_text(text)
    with pytest.raises(InvalidInput, match=word):
        open_dataset(tmp_path)


@pytest.mark.parametrize("names", ["", "one one"])
def test_no_patients_row_decides_whether_another_patients_scan_is_used(tmp_path: Path, names: str) -> None:
    """An export by folders may give the scans of two patients one name; one of them alone would be used."""
    for patient in "ab":
        (tmp_path / patient).mkdir()
        for name in ("t1.nii.gz", "t1_seg.nii.gz"):
            save(tmp_path / patient / name, 4)

    def opened(names: str) -> Dataset:
        header = "image,label,patient_id" + ",case_id" * bool(names)
        ids = [f",{name}" for name in names.split()] or ["", ""]
        rows = [f"{one}/t1.nii.gz,{one}/t1_seg.nii.gz,{one}{of}" for one, of in zip("ab", ids, strict=True)]
        (tmp_path / "cases.csv").write_text("\n".join([header, *rows]) + "\n")
        return open_dataset(tmp_path)

    with pytest.raises(InvalidInput, match=r"two patients in the table, line 3.*to fix: .*case_id"):
        opened(names)
    assert {case.id: case.patient for case in opened("one two").cases} == {"one": "a", "two": "b"}


def test_a_row_that_cannot_be_used_costs_one_case(tmp_path: Path) -> None:
    save(tmp_path / "a.nii.gz", 4)
    rows = [
        "image,label",
        "a.nii.gz,a.nii.gz",
        "a.nii.gz,",
        "../z.nii.gz,",
        "C:/y.nii.gz,",
        "b.nii.gz,",
        "c.png,",
        ",x.nii",
    ]
    (tmp_path / "cases.csv").write_text("\n".join(rows) + "\n")
    found = open_dataset(tmp_path)
    assert [case.id for case in found.cases] == []
    reasons = [problem.reason for problem in found.problems]
    assert all(reason.count("; to fix: ") == 1 for reason in reasons)
    assert any("listed twice" in reason for reason in reasons)
    assert any("leaves" in reason for reason in reasons)
    assert any("not a .nii" in reason for reason in reasons)
    assert any("missing" in reason for reason in reasons)
    assert any("not named" in reason for reason in reasons)


def test_a_folder_of_no_known_layout_is_refused_with_one_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"is not recognised") as caught:
        open_dataset(tmp_path)
    assert str(caught.value).count("to fix:") == 1
    with pytest.raises(InvalidInput, match="layout"):
        open_dataset(tmp_path, layout="zarr")
    with pytest.raises(InvalidInput, match="does not exist"):
        open_dataset(tmp_path / "nowhere")


def test_a_dataset_of_the_study_stays_as_it_is(tmp_path: Path) -> None:
    found: Dataset = open_dataset(make_nnunet(tmp_path / "set"))
    own = DataConfig(labels=found.labels, spacing_mm=(1, 1, 1), grid=(8, 8, 8), channels=found.channels)
    assert match_study(found, own).cases == found.cases


_VERSION_3, _OVERRIDES = 0x20080522, 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Make a folder of mode 000, and drop root's right to ignore modes in this thread."""
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(_VERSION_3, 0)
    held = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, held) == 0
    fewer = (ctypes.c_uint32 * 6)(held[0] & ~_OVERRIDES, *held[1:])
    folder.chmod(0)
    try:
        assert libc.capset(header, fewer) == 0
        yield
    finally:
        libc.capset(header, held)
        folder.chmod(0o700)


def failed(directory: Path) -> list[CheckResult]:
    data = DataConfig(("background", "edema", "core"), (1, 1, 1), (8, 8, 8), ("T1w", "T2w"))
    found = check_data(directory, data, DatasetSettings())
    return [one for one in found if one.state is State.FAIL]


@pytest.mark.parametrize("name", ["imagesTr", "labelsTr"])
@pytest.mark.parametrize("make", [make_msd, make_nnunet])
def test_a_closed_folder_of_all_cases_is_reported_once_with_the_user(
    make: Callable[[Path], Path], name: str, tmp_path: Path
) -> None:
    directory = make(tmp_path / "data")
    with closed(directory / name):
        (found,) = failed(directory)
    assert "Permission denied" in found.text
    assert f"user {os.getuid()}" in found.text
    assert found.subject == str(directory / name)
    assert "missing" not in found.text
    assert "put" not in found.remedy


@pytest.mark.parametrize("make", [make_table, make_bids])
def test_a_closed_folder_of_one_case_costs_that_case_and_is_not_named(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    directory = make(tmp_path / "data")
    folder = one_cases_folder(directory)
    with closed(folder):
        findings = failed(directory)
    denied = [one for one in findings if "Permission denied" in one.text]
    assert denied
    for one in denied:
        assert f"user {os.getuid()}" in one.text
        assert "put it back" not in one.remedy
    assert folder.name not in to_json(denied)


def one_cases_folder(directory: Path) -> Path:
    """Return the folder of one subject; for a table, a new folder into which the first case's image is moved."""
    if (subjects := sorted(directory.glob("sub-*"))) and subjects[0].is_dir():
        return subjects[0]
    (table,) = directory.glob("cases.*")
    text = table.read_text()
    first = next(path for path in sorted(directory.rglob("*.nii*")) if str(path.relative_to(directory)) in text)
    (directory / "Emmy").mkdir()
    table.write_text(text.replace(str(first.relative_to(directory)), f"Emmy/{first.name}"))
    shutil.move(first, directory / "Emmy" / first.name)
    return directory / "Emmy"


def test_closed_label_maps_of_bids_and_closed_folders_of_all_cases_are_not_taken_for_another_layout(
    tmp_path: Path,
) -> None:
    directory = make_bids(tmp_path / "bids")
    with closed(directory / "derivatives"):
        (found,) = failed(directory)
    assert "Permission denied" in found.text
    brats = tmp_path / "brats" / "BraTS-001"
    brats.mkdir(parents=True)
    with closed(brats):
        (found,) = failed(brats.parent)
        assert "Permission denied" in found.text
        (problem,) = open_dataset(brats.parent, layout="brats").problems
    assert "Permission denied" in problem.reason


ONE_T1 = DataConfig(("background", "edema", "core"), (1, 1, 1), (8, 8, 8), ("T1",))


def make_subjects(root: Path, *contrasts: str) -> Path:
    """Write one subject for each contrast, with a label map below derivatives."""
    for number, contrast in enumerate(contrasts):
        save(root / f"sub-{number}/anat/sub-{number}_{contrast}.nii.gz", number + 1)
        save(root / f"derivatives/m/sub-{number}/anat/sub-{number}_dseg.nii.gz", 1)
    (root / "dseg.tsv").write_text("index\tname\n1\tedema\n2\tcore\n")
    return root


def with_noise(root: Path) -> Path:
    """Replace the subjects' images by noise that the doctor takes for scans."""
    for number, path in enumerate(sorted(root.glob("sub-*/anat/*_T1w.nii.gz"))):
        image = np.random.default_rng(number).normal(100, 20, (4, 5, 6)).astype(np.float32)
        nib.save(nib.Nifti1Image(image, np.eye(4)), path)
    return root


def left_out(found: Dataset) -> dict[str, str]:
    return {problem.case: problem.reason for problem in found.problems}


def test_a_session_without_the_studys_only_contrast_is_left_out_and_no_other_contrast_used(tmp_path: Path) -> None:
    root = make_subjects(tmp_path, "T1w", "T2w", "ce-gd_T1w")
    found = match_study(open_dataset(root), ONE_T1)
    assert [case.id for case in found.cases] == ["sub-0"]
    assert left_out(found).keys() == {"sub-1", "sub-2"}
    assert all("channel T1 is missing" in reason for reason in left_out(found).values())
    mapped = match_study(open_dataset(root), ONE_T1, channels={"T2w": "T1"})
    assert [case.id for case in mapped.cases] == ["sub-0", "sub-1"]
    unnamed = match_study(open_dataset(root), replace(ONE_T1, channels=("MRI",)))
    assert unnamed.problems == ()


@pytest.mark.parametrize("place", ["derivatives/m/sub-1", "sub-1", "sub-1/anat"])
def test_a_subject_behind_a_closed_folder_is_listed_and_left_out(place: str, tmp_path: Path) -> None:
    root = make_subjects(tmp_path, "T1w", "T1w", "T1w")
    with closed(root / place):
        found = match_study(open_dataset(root), ONE_T1)
    assert [case.id for case in found.labelled] == ["sub-0", "sub-2"]
    assert found.listed == ("sub-0", "sub-1", "sub-2")
    assert "Permission denied" in left_out(found)["sub-1"]


def test_a_closed_folder_of_all_label_maps_is_refused(tmp_path: Path) -> None:
    root = make_subjects(tmp_path, "T1w", "T1w")
    with closed(root / "derivatives/m"), pytest.raises(InvalidInput, match="Permission denied"):
        open_dataset(root)


def test_label_maps_behind_links_to_folders_are_found_once_and_loops_end(tmp_path: Path) -> None:
    root = make_subjects(tmp_path / "set", "T1w", "T1w")
    shutil.move(root / "derivatives/m/sub-1", tmp_path / "store")
    (root / "derivatives/m/sub-1").symlink_to(tmp_path / "store")
    (root / "derivatives/m/up").symlink_to("..")
    (root / "sub-0/self").symlink_to(root)
    (root / "sub-0/loop").symlink_to("loop")
    (root / "sub-0/other").symlink_to(root / "sub-1")
    found = match_study(open_dataset(root), ONE_T1)
    assert (len(found.labelled), found.problems) == (2, ())


def test_a_file_in_another_subjects_folder_is_no_scan_of_either(tmp_path: Path) -> None:
    root = make_subjects(tmp_path, "T1w", "T1w")
    shutil.move(root / "sub-0/anat/sub-0_T1w.nii.gz", root / "sub-0/anat/sub-7_T1w.nii.gz")
    found = match_study(open_dataset(root), ONE_T1)
    assert [case.id for case in found.cases] == ["sub-1"]
    assert "names another subject" in left_out(found)["sub-0"]


def test_findings_about_a_subject_name_no_file_of_that_subject(tmp_path: Path) -> None:
    root = make_subjects(tmp_path, "T1w", "MUELLERANNA", "T1w", "T1w")
    (root / "dseg.tsv").unlink()
    for number, rows in ((2, "1\tedema\tx\n"), (3, "x\tMuellerAnna\n")):
        folder = root / f"derivatives/m/sub-{number}/anat"
        (folder / f"sub-{number}_desc-MuellerAnna_dseg.tsv").write_text(f"index\tname\n{rows}")
    found = match_study(open_dataset(root), ONE_T1)
    assert left_out(found).keys() == {"sub-1", "sub-2", "sub-3"}
    assert "mueller" not in " ".join(left_out(found).values()).casefold()
    findings = check_data(root, ONE_T1, DatasetSettings())
    assert "mueller" not in to_json(findings).casefold()


def test_the_doctor_knows_the_channels_that_the_site_lacks(tmp_path: Path) -> None:
    root = make_subjects(tmp_path, "T1w", "T1w")
    data = replace(ONE_T1, channels=("T1", "T2"))
    findings = check_data(root, data, DatasetSettings(absent=("T2",)))
    assert not any("missing" in one.text for one in findings)


def test_an_nnunet_file_of_another_ending_or_a_second_file_costs_its_case(tmp_path: Path) -> None:
    root = make_nnunet(tmp_path)
    first, second, third = sorted(path.name.removesuffix(".nii.gz") for path in (root / "labelsTr").iterdir())
    for path in [*root.glob(f"imagesTr/{first}_*"), root / f"labelsTr/{first}.nii.gz"]:
        path.rename(path.with_suffix(""))
    (root / f"imagesTr/{second}_0000.NII.GZ").touch()
    (root / f"labelsTr/{third}.NII.GZ").touch()
    found = match_study(open_dataset(root), DATA)
    assert (found.cases, set(found.listed)) == ((), {first, second, third})
    reasons = left_out(found)
    assert "file_ending" in reasons[first]
    assert "two files for channel number 0" in reasons[second]
    assert "two files for the label map" in reasons[third]


def test_a_dataset_without_a_usable_label_map_fails_the_doctor(tmp_path: Path) -> None:
    root = with_noise(make_subjects(tmp_path, "T1w"))
    shutil.rmtree(root / "derivatives")
    assert [one.text for one in check_data(root, ONE_T1, DatasetSettings()) if one.state is State.FAIL] == [
        "no case with a label map is usable"
    ]


def test_the_doctor_counts_a_doubled_scan_as_training_does(tmp_path: Path) -> None:
    root = with_noise(make_subjects(tmp_path, "T1w", "T1w"))
    shutil.copy(root / "sub-0/anat/sub-0_T1w.nii.gz", root / "sub-1/anat/sub-1_T1w.nii.gz")
    findings = check_data(root, ONE_T1, DatasetSettings())
    counted = next(one.text for one in findings if one.check == "cases")
    assert "1 used although another case has the same voxels, 0 left out" in counted
    assert State.FAIL in [one.state for one in findings if one.check == "case"]
    (root / "patients.csv").write_text("case_id,patient_id\nsub-0,a\nsub-1,a\n")
    findings = check_data(root, ONE_T1, DatasetSettings())
    assert "1 left out" in next(one.text for one in findings if one.check == "cases")


def failures(findings: list[CheckResult], check: str) -> list[CheckResult]:
    return [one for one in findings if one.check == check and one.state is State.FAIL]


def test_the_doctor_refuses_spellings_of_patients_as_training_does(tmp_path: Path) -> None:
    root, slots = make_subjects(tmp_path / "data", "T1w", "T1w"), tmp_path / "slots.json"
    table = root / "patients.csv"

    def train(scans: dict[str, tuple[str, ...]]) -> None:
        check_scans(slots, scans, identity=PatientIdentity.TABLE)
        record_scans(slots, load_or_deal(slots, scans, voters=2), scans, identity=PatientIdentity.TABLE)

    def both(first: str, second: str) -> list[CheckResult]:
        """Return what the doctor finds, after checking that training refuses the same."""
        table.write_text(f"case_id,patient_id\nsub-0,{first}\nsub-1,{second}\n")
        scans = scans_by_patient(open_for_training(root, ONE_T1, DatasetSettings()))
        with pytest.raises(InvalidInput):
            train(scans)
        found = failures(check_data(root, ONE_T1, DatasetSettings(), slots=slots), "patients")
        assert not re.search("anna|berta|sub-", to_json(found), re.IGNORECASE)
        assert all(one.remedy for one in found)
        return found

    assert both("Anna", "anna")
    assert both("Bj\u00f6rn", "Bjo\u0308rn")
    table.write_text("case_id,patient_id\nsub-0,anna\nsub-1,berta\n")
    train(scans_by_patient(open_for_training(root, ONE_T1, DatasetSettings())))
    before = slots.read_bytes()
    assert not failures(check_data(root, ONE_T1, DatasetSettings(), slots=slots), "patients")
    assert both("ANNA", "berta")
    assert both("berta", "anna")
    assert slots.read_bytes() == before


def test_labels_are_compared_by_one_rule_everywhere() -> None:
    found = Dataset("s", ("Background", "Left_Core"), ("MRI",), ())
    study = DataConfig(("background", "left core"), (1, 1, 1), (8, 8, 8))
    check_labels(match_study(found, study), study)
    check_labels(found, study)


def renamed(files: Iterable[Path], before: str, after: str) -> None:
    for path in list(files):
        path.rename(path.with_name(path.name.replace(before, after)))


@pytest.mark.parametrize("ending", [".nrrd", ".MHA", ".img", ".nii.bz2"])
def test_an_nnunet_case_in_another_format_or_without_a_channels_number_is_counted(tmp_path: Path, ending: str) -> None:
    root = make_nnunet(tmp_path)
    renamed(root.glob("*Tr/p1*"), ".nii.gz", ending)
    (root / "labelsTr/p2.nii.gz").unlink()
    renamed((root / "imagesTr").glob("p2_*"), "_000", "_")
    found = open_dataset(root)
    assert [case.id for case in found.cases] == ["p0"]
    told = {problem.case: problem.reason for problem in found.problems}
    assert ending.lower() in told.pop("p1")
    assert set(told) == {f"p2_{channel}" for channel in range(4)}
    assert all("channel's number" in reason for reason in told.values())
    assert found.listed == ("p0", "p1")


def test_a_bids_label_map_or_image_in_another_format_is_counted_and_no_unlabelled_image_listed(tmp_path: Path) -> None:
    root = make_subjects(tmp_path, "T1w", "T1w", "T1w", "T1w")
    renamed(root.rglob("sub-0*dseg.nii.gz"), ".nii.gz", ".mgz")
    renamed([*root.rglob("sub-1*T1w.nii.gz"), *root.rglob("sub-1*dseg.nii.gz")], ".nii.gz", ".nrrd")
    renamed(root.rglob("sub-2*T1w.nii.gz"), ".nii.gz", ".mgz")
    for path in root.rglob("sub-2*dseg.nii.gz"):
        path.unlink()
    found = open_dataset(root)
    assert [case.id for case in found.cases] == ["sub-3"]
    assert found.listed == ("sub-0", "sub-1", "sub-3")
    assert {problem.case for problem in found.problems} == {"sub-0", "sub-1", "sub-2"}
    assert all(re.search("not NIfTI.*; to fix: ", problem.reason) for problem in found.problems)


def test_a_bids_subject_without_a_scan_is_named_everywhere_and_assigned_to_no_voter(tmp_path: Path) -> None:
    """For example, a failed export leaves an empty folder."""
    root = make_subjects(tmp_path / "set", "T1w", "T1w", "T1w")
    for name in ("sub-7/func/sub-7_bold.nii.gz", "sub-8/anat/sub-8_T1w.json", "sub-9/sub-9_T1w.nii.gz"):
        (root / name).parent.mkdir(parents=True)
        (root / name).touch()
    (root / "sub-empty").mkdir()
    found = open_dataset(root)
    assert [problem.case for problem in found.problems] == ["sub-8", "sub-9", "sub-empty"], "sub-7 has another scan"
    assert found.listed == ("sub-0", "sub-1", "sub-2")
    broken = [one for one in check_data(root, ONE_T1, DatasetSettings()) if "anat" in one.text]
    assert [one.subject for one in broken] == ["sub-8", "sub-9", "sub-empty"]
    record = record_cases(tmp_path / "teachers", found, [])
    assert (record.unlabelled, record.left_out) == (("sub-8", "sub-9", "sub-empty"), 0)


def test_a_label_table_of_a_statistics_program_is_read_and_a_wrong_row_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "dseg.tsv"
    path.write_text("Index\tName\n1.0\tedema\n2.00\tcore\n")
    assert read_label_table(path) == {1: "edema", 2: "core"}
    for row in ("1.5\tx", "-1\tx", "\tx", "1\tcore", "3\t"):
        path.write_text(f"index\tname\n1\tedema\n{row}\n")
        with pytest.raises(InvalidInput, match="line 3") as caught:
            read_label_table(path)
        assert caught.value.remedy


def test_an_nnunet_ending_is_read_in_upper_case_and_another_has_a_remedy_that_helps(tmp_path: Path) -> None:
    index = make_nnunet(tmp_path) / "dataset.json"
    document = json.loads(index.read_text())
    index.write_text(json.dumps({**document, "file_ending": ".NII.GZ"}))
    assert len(open_dataset(tmp_path).cases) == 3
    for wrong in ("nii.gz", ".nrrd", 3):
        index.write_text(json.dumps({**document, "file_ending": wrong}))
        with pytest.raises(InvalidInput, match=r"write \.nii\.gz"):
            open_dataset(tmp_path)


def test_a_failing_disk_is_a_finding_of_the_doctor_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Dataset:
        raise OSError(errno.EIO, "Input/output error", "/data/mueller")

    monkeypatch.setattr("client.data.nnunet.NnunetLayout.read", failing)
    found = check_data(make_nnunet(tmp_path), DATA, DatasetSettings())
    assert [(one.check, one.state, "Input/output error" in one.text) for one in found] == [
        ("dataset", State.FAIL, True)
    ]
    assert found[0].remedy
    assert "mueller" not in to_json(found)
