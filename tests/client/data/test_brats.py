"""Tests BraTS data: raw folders of both editions, regions, skull-stripped brains, and a hospital without T1ce."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from client.data.brats import LABELS, REGIONS
from client.data.layouts import DatasetSettings, load_names, match_study, open_dataset, open_for_training
from client.teachers.teacher import Teachers
from common.config import DataConfig, TrainingConfig, parse_study, render_study
from common.data.volume import load_example
from common.errors import InvalidInput
from common.models.bundle import Bundle
from common.models.fit import kept_channels
from consilium.predict import _predict, find_cases, to_text
from tests.trained_sites import train_site
from tests.tumours import nested
from tests.worlds import make_study

CHANNELS = ("T1", "T1ce", "T2", "FLAIR")
STUDY = DataConfig(LABELS, (1, 1, 1), (32, 32, 32), CHANNELS, REGIONS, "nonzero")
NAMES = {"_": ("t1", "t1ce", "t2", "flair"), "-": ("t1n", "t1c", "t2w", "t2f")}


def folder(root: Path, name: str, *, sign: str = "_", without: tuple[str, ...] = (), seed: int = 0) -> Path:
    """Write one case: nested tumours in a brain. Each contrast shows other tissue; enhancing tumour has label
    4, or 3.
    """
    rng = np.random.default_rng(seed)
    where = root / name
    where.mkdir(parents=True)
    labels = nested((9, 6, 3), tuple(rng.integers(13, 19, 3)))
    brain = nested((15, 0, 0)) > 0
    bright = {0: (1, 1, 1, 1), 1: (0.4, 0.5, 1.5, 1.2), 2: (0.9, 0.9, 2, 2.2), 3: (1.2, 3, 1.6, 1.8)}
    for place, contrast in enumerate(NAMES[sign]):
        image = sum(factors[place] * (labels == value) for value, factors in bright.items())
        image = np.where(brain, image * 100 + rng.normal(0, 6, labels.shape), 0).astype(np.float32)
        if contrast not in without:
            nib.save(nib.Nifti1Image(image, np.eye(4)), where / f"{name}{sign}{contrast}.nii.gz")
    stored = np.where(labels == 3, 4, labels) if sign == "_" else labels
    nib.save(nib.Nifti1Image(stored.astype(np.uint8), np.eye(4)), where / f"{name}{sign}seg.nii.gz")
    return where


@pytest.mark.parametrize(
    ("sign", "names"),
    [("_", ["BraTS20_Training_001", "BraTS20_Training_002"]), ("-", ["BraTS-GLI-00000-000", "BraTS-GLI-00000-001"])],
)
def test_raw_folders_of_both_editions_are_read_with_labels_regions_and_patients(
    tmp_path: Path, sign: str, names: list[str]
) -> None:
    for seed, name in enumerate(names):
        folder(tmp_path, name, sign=sign, seed=seed)
    found = open_dataset(tmp_path)
    assert (found.labels, found.regions, list(found.listed)) == (LABELS, REGIONS, names)
    patients = {found.patient_of(name) for name in names}
    assert patients == (set(names) if sign == "_" else {"BraTS-GLI-00000"})  # two visits are one patient
    example = load_example(match_study(found, STUDY).cases[0], STUDY)
    assert example.volume.image.shape == (4, 32, 32, 32)
    assert sorted(np.unique(example.label)) == [0, 1, 2, 3]
    inside = example.volume.image[1][example.label == 3].mean()
    assert inside > 2 * example.volume.image[0][example.label == 3].mean()  # T1ce is channel 1, whatever the file order


def test_editions_are_not_mixed(tmp_path: Path) -> None:
    folder(tmp_path, "BraTS20_Training_001")
    folder(tmp_path, "BraTS-GLI-00001-000", sign="-")
    with pytest.raises(InvalidInput, match="two BraTS editions"):
        open_dataset(tmp_path)


def test_the_z_score_is_of_the_brain_and_what_lies_outside_stays_zero(tmp_path: Path) -> None:
    folder(tmp_path, "BraTS20_Training_001")
    image = load_example(match_study(open_dataset(tmp_path), STUDY).cases[0], STUDY).volume.image
    brain = nested((15, 0, 0)) > 0
    for channel in image:
        assert not channel[~brain].any()
        assert channel[brain].mean() == pytest.approx(0, abs=1e-3)
        assert channel[brain].std() == pytest.approx(1, abs=1e-2)


def test_nnunets_region_labels_are_read_as_regions_of_exclusive_labels(tmp_path: Path) -> None:
    for sub in ("imagesTr", "labelsTr"):
        (tmp_path / sub).mkdir()
    index = {
        "channel_names": {"0": "T1"},
        "labels": {"background": 0, "whole tumor": [1, 2, 3], "tumor core": [2, 3], "enhancing tumor": 3},
        "regions_class_order": [1, 2, 3],
        "file_ending": ".nii.gz",
    }
    (tmp_path / "dataset.json").write_text(json.dumps(index))
    nib.save(
        nib.Nifti1Image(np.arange(512, dtype=np.float32).reshape(8, 8, 8), np.eye(4)),
        tmp_path / "imagesTr" / "a_0000.nii.gz",
    )
    nib.save(nib.Nifti1Image(np.zeros((8, 8, 8), np.uint8), np.eye(4)), tmp_path / "labelsTr" / "a.nii.gz")
    found = open_dataset(tmp_path)
    assert found.label_values == (0, 1, 2, 3)
    assert found.labels == (
        "background",
        "whole tumor without tumor core and enhancing tumor",
        "tumor core without enhancing tumor",
        "enhancing tumor",
    )
    data = DataConfig(found.labels, (1, 1, 1), (8, 8, 8), ("T1",), found.regions)
    assert data.structures == ("whole tumor", "tumor core", "enhancing tumor")
    assert data.members == ((1, 2, 3), (2, 3), (3,))


@pytest.mark.slow
def test_a_hospital_without_t1ce_trains_a_teacher_that_does_not_look_at_it(tmp_path: Path) -> None:
    for seed in range(3):
        folder(tmp_path / "data", f"BraTS20_Training_00{seed}", without=("t1ce",), seed=seed)
    (tmp_path / "names.toml").write_text('[dataset]\nabsent = "t1ce"\n')
    settings = load_names(tmp_path / "names.toml")
    dataset = open_for_training(tmp_path / "data", STUDY, settings)
    assert not dataset.problems
    recipe = TrainingConfig((4, 8), steps=12, modality_dropout=0.25)
    report = train_site(
        dataset, teachers=tmp_path / "teachers", data=STUDY, recipe=recipe, voters=1, trainer="standard"
    )
    assert report.voters[0].trained_on == 3
    whole = load_example(
        match_study(open_dataset(folder(tmp_path / "p", "BraTS20_Training_009").parent), STUDY).cases[0], STUDY
    )
    image, other = whole.volume.image.copy(), whole.volume.image.copy()
    other[1] = np.random.default_rng(0).normal(size=other[1].shape)
    teachers = Teachers.load(tmp_path / "teachers", data=STUDY)
    (seen,), (again,) = teachers.predict(image), teachers.predict(other)
    assert seen is not None
    assert again is not None
    np.testing.assert_array_equal(seen, again)
    other[0] = other[1]
    (moved,) = teachers.predict(other)
    assert moved is not None
    assert not np.array_equal(seen, moved)
    # the consortium's network predicts for that hospital too, and its scores are the regions'
    model = teachers.models[0]
    assert model is not None
    bundle = Bundle(model.model, STUDY, "")
    cases, problems = find_cases(tmp_path / "data", bundle, labels=None, settings=settings)
    assert not problems
    done = _predict(cases[0], bundle, tmp_path, uncertainty=False, lesions=False, even_if_unlike=False, box=None)
    told = to_text([done], bundle)
    assert all(f"{name} Dice" in told and "HD95" in told for name in ("WT", "TC", "ET"))


def test_a_missing_contrast_that_nobody_declared_is_a_problem_of_its_case(tmp_path: Path) -> None:
    folder(tmp_path, "BraTS20_Training_000", without=("t1ce",))
    folder(tmp_path, "BraTS20_Training_001", seed=1)
    found = open_for_training(tmp_path, STUDY, DatasetSettings())
    assert [problem.case for problem in found.problems] == ["BraTS20_Training_000"]
    with pytest.raises(InvalidInput, match="absent"):
        match_study(open_dataset(tmp_path), STUDY, absent=("PET",))
    with pytest.raises(InvalidInput, match="absent"):
        match_study(open_dataset(tmp_path), STUDY, absent=CHANNELS)


def test_modality_dropout_hides_channels_at_its_rate_and_never_all_of_them() -> None:
    kept = torch.cat([kept_channels((4, 4), 0.5, seed=1, step=step) for step in range(500)]).flatten(1)
    assert bool((kept.sum(dim=1) >= 1).all())
    assert float(kept.mean()) == pytest.approx(0.5 + 0.5**4 / 4, abs=0.02)
    assert torch.equal(kept_channels((2, 4), 0.5, seed=1, step=3), kept_channels((2, 4), 0.5, seed=1, step=3))
    assert bool((kept_channels((4, 1), 0.9, seed=1, step=0) == 1).all())


def test_a_study_says_its_regions_and_networks_and_is_read_back() -> None:
    said = make_study(name="brats", data=STUDY, teacher=TrainingConfig(network="dynunet", modality_dropout=0.25))
    study = parse_study(render_study(said))
    assert study == said
    assert study.data.structures == ("WT", "TC", "ET")
    assert (study.teacher.network, study.teacher.modality_dropout) == ("dynunet", 0.25)
    plain = replace(said, data=DataConfig(LABELS, (1, 1, 1), (32, 32, 32), CHANNELS))
    assert parse_study(render_study(plain)).data.structures == LABELS[1:]
    assert plain.id != study.id


def misnamed_segmentation(case: Path) -> None:
    (case / f"{case.name}_seg.nii.gz").rename(case / "W39_1998.09.19_Segm.nii.gz")


def misnamed_folder(case: Path) -> None:
    case.rename(case.with_name("patient4"))


def second_segmentation(case: Path) -> None:
    (case / f"{case.name}_seg.nii").write_bytes(b"")


def other_segmentation(case: Path) -> None:
    (case / f"{case.name}_seg.nii.gz").rename(case / f"{case.name}_seg.nrrd")


def other_format(case: Path) -> None:
    for path in list(case.iterdir()):
        path.rename(path.with_name(path.name.replace(".nii.gz", ".mha")))


@pytest.mark.parametrize(
    ("change", "name", "word"),
    [
        (misnamed_segmentation, "BraTS20_Training_002", "fits no role"),
        (misnamed_folder, "patient4", "fits no role"),
        (second_segmentation, "BraTS20_Training_002", "two files for seg"),
        (other_segmentation, "BraTS20_Training_002", "not NIfTI"),
        (other_format, "BraTS20_Training_002", "not NIfTI"),
    ],
)
def test_a_folder_whose_files_do_not_fit_is_listed_and_left_out(
    tmp_path: Path, change: Callable[[Path], None], name: str, word: str
) -> None:
    empty_case(tmp_path / "BraTS20_Training_001")
    change(empty_case(tmp_path / "BraTS20_Training_002"))
    found = match_study(open_dataset(tmp_path), STUDY)
    assert [case.id for case in found.cases] == ["BraTS20_Training_001"]
    assert set(found.listed) == {"BraTS20_Training_001", name}
    assert [(problem.case, word in problem.reason) for problem in found.problems] == [(name, True)]


def test_a_folder_without_the_studys_only_contrast_is_left_out(tmp_path: Path) -> None:
    empty_case(tmp_path / "BraTS20_Training_001")
    case = empty_case(tmp_path / "BraTS20_Training_002")
    for contrast in ("flair", "t1", "t2"):
        (case / f"{case.name}_{contrast}.nii.gz").unlink()
    found = match_study(open_dataset(tmp_path), replace(STUDY, channels=("FLAIR",)))
    assert [case.id for case in found.cases] == ["BraTS20_Training_001"]
    assert "channel FLAIR is missing" in found.problems[0].reason


def test_an_empty_folder_is_named_and_assigned_to_no_voter(tmp_path: Path) -> None:
    empty_case(tmp_path / "BraTS20_Training_001")
    (tmp_path / "BraTS20_Training_002").mkdir()
    found = open_dataset(tmp_path)
    assert [problem.case for problem in found.problems] == ["BraTS20_Training_002"]
    assert found.listed == ("BraTS20_Training_001",)


def empty_case(where: Path) -> Path:
    """Make a folder of empty files with the right names; the index opens none of them."""
    where.mkdir()
    for contrast in (*NAMES["_"], "seg"):
        (where / f"{where.name}_{contrast}.nii.gz").touch()
    return where
