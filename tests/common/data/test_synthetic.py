"""Tests phantoms: equal for equal seeds, different for each patient, and good enough to train on."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from common.config import TrainingConfig
from common.data.msd import Dataset, read_dataset
from common.data.synthetic import PhantomImaging, phantom, scanner_of, study_data, write_phantoms
from common.data.synthetic_tumours import write_tumours
from common.data.volume import load_label, load_volume
from common.errors import InvalidInput
from common.metrics import mean_dice
from common.models.fit import fit, one_hot, predict
from common.models.unet import build_unet
from consilium.cli.data import app

pytestmark = pytest.mark.slow

DATA = study_data()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return write_phantoms(tmp_path_factory.mktemp("phantoms") / "set", cases=32, seed=11, hospitals=4)


def labels_of(dataset: Dataset) -> list[np.ndarray]:
    return [load_label(case.label, DATA) for case in dataset.cases if case.label is not None]


def test_a_case_is_a_function_of_seed_and_number_alone(tmp_path: Path, dataset: Dataset) -> None:
    again = write_phantoms(tmp_path / "few", cases=5, seed=11, hospitals=4)
    other = write_phantoms(tmp_path / "other", cases=5, seed=12, hospitals=4)
    for mine, first, different in zip(again.cases, dataset.cases, other.cases, strict=False):
        same, changed = (np.asarray(nib.load(case.image).dataobj) for case in (first, different))
        np.testing.assert_array_equal(np.asarray(nib.load(mine.image).dataobj), same)
        assert changed.shape != same.shape or not np.array_equal(changed, same)


def test_hospitals_differ_in_spacing_orientation_and_brightness(dataset: Dataset) -> None:
    first = [nib.load(case.image) for case in dataset.cases[:4]]
    assert len({image.header.get_zooms() for image in first}) == 4
    assert len({nib.aff2axcodes(image.affine) for image in first}) == 4
    assert {case.hospital for case in dataset.cases} == {f"hospital-{i:02d}" for i in range(1, 5)}
    means = [np.asarray(image.dataobj).mean() for image in first]
    assert max(means) > 1.2 * min(means)


def test_anterior_lies_in_front_of_posterior_on_the_study_grid_of_every_hospital(dataset: Dataset) -> None:
    for labels in labels_of(dataset)[:8]:
        front, back = (np.argwhere(labels == value)[:, 1].mean() for value in (1, 2))
        assert front > back + 4


def test_a_drawing_sets_how_large_bodies_are_and_how_far_from_the_centre_they_lie() -> None:
    """Volumes must grow with the cube of the size, and the centres' spread with the shift."""

    def bodies(drawing: PhantomImaging) -> tuple[float, float]:
        voxels, centres = [], []
        for number in range(12):
            _, labels, affine = phantom(np.random.default_rng(number), scanner_of(0, seed=0), drawing=drawing)
            inside = np.argwhere(labels > 0)
            voxels.append(len(inside))
            centres.append((inside.mean(axis=0) * np.diag(affine)[:3] + affine[:3, 3])[0])
        return float(np.mean(voxels)), float(np.std(centres))

    (small, still), (large, _), (_, shifted) = map(
        bodies, (PhantomImaging(), PhantomImaging(size=1.2), PhantomImaging(shift_mm=7.0))
    )
    assert large / small == pytest.approx(1.2**3, rel=0.08)
    assert 1.5 < shifted / still < 2.5


@pytest.mark.parametrize("structures", [2, 3])
def test_every_structure_is_there_and_brightness_alone_does_not_find_them(structures: int) -> None:
    for number in range(6):
        image, labels, _ = phantom(np.random.default_rng(number), scanner_of(0, seed=1), structures=structures)
        counts = np.bincount(labels.ravel(), minlength=structures + 1)
        assert (counts[1:] > 60).all()
        assert labels.max() == structures
        inside = labels > 0
        low, high = np.quantile(image[inside], [0.1, 0.9])
        band = (image >= low) & (image <= high)
        assert 2 * (band & inside).sum() / (band.sum() + inside.sum()) < 0.75


@pytest.fixture
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_a_small_teacher_beats_the_mean_shape_of_public_label_maps(dataset: Dataset) -> None:
    labels = labels_of(dataset)
    images = [load_volume(case.image, DATA).image for case in dataset.cases]
    maps, test, train = range(12), range(12, 20), range(20, 32)
    mean_shape = np.mean([one_hot(labels[i], 3) for i in maps], axis=0).argmax(axis=0).astype(np.uint8)
    recipe = TrainingConfig(channels=(8, 16, 32), steps=200, learning_rate=1e-2)
    model = build_unet(recipe.channels, in_channels=1, out_channels=3, seed=0)
    fit(model, np.stack([images[i] for i in train]), np.stack([one_hot(labels[i], 3) for i in train]), recipe, seed=0)
    teacher = np.mean([mean_dice(predict(model, images[i]).argmax(0).astype(np.uint8), labels[i], 3) for i in test])
    public = np.mean([mean_dice(mean_shape, labels[i], 3) for i in test])
    assert 0.3 < public < 0.6
    assert teacher > public + 0.15


def test_label_maps_may_be_drawn_by_another_rule_than_the_same_image_shows() -> None:
    scanner = scanner_of(0, seed=1)
    seen = phantom(np.random.default_rng(3), scanner)
    drawn = phantom(np.random.default_rng(3), scanner, drawing=PhantomImaging(border_mm=6.0))
    np.testing.assert_array_equal(seen[0], drawn[0])
    np.testing.assert_array_equal(seen[1] > 0, drawn[1] > 0)
    assert (drawn[1] == 1).sum() < 0.8 * (seen[1] == 1).sum()
    assert set(np.unique(seen[1][seen[1] != drawn[1]])) == {1}


def test_phantoms_of_one_seed_in_two_places_are_different_patients(tmp_path: Path) -> None:
    one, two = (write_phantoms(tmp_path / str(first), cases=2, seed=1, first=first) for first in (0, 2))
    assert [case.id for case in (*one.cases, *two.cases)] == [f"phantom_{number:04d}" for number in range(4)]
    assert not np.array_equal(*(np.asarray(nib.load(data.cases[0].label).dataobj) for data in (one, two)))


def test_impossible_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="hospitals"):
        write_phantoms(tmp_path / "a", cases=2, seed=1, hospitals=3)
    with pytest.raises(InvalidInput, match="structures"):
        write_phantoms(tmp_path / "a", cases=2, seed=1, structures=4)
    (tmp_path / "file").touch()
    with pytest.raises(InvalidInput, match="not empty"):
        write_phantoms(tmp_path, cases=2, seed=1)


def test_the_command_writes_a_dataset_and_prints_json(tmp_path: Path) -> None:
    out = tmp_path / "set"
    arguments = ["synth", "--out", str(out), "--cases", "2", "--seed", "1", "--structures", "3", "--json"]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert json.loads(result.stdout)["labels"] == ["background", "anterior", "posterior", "lateral"]
    assert len(read_dataset(out).cases) == 2


@pytest.mark.parametrize("kind", ["phantoms", "tumours"])
def test_synthetic_data_that_find_no_room_name_their_folder_and_leave_nothing_in_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the error named no folder, and the same command was then refused."""
    out, writes, save = tmp_path / "made", write_phantoms if kind == "phantoms" else write_tumours, nib.save
    out.mkdir()

    def nearly_full(image: object, path: Path) -> None:
        save(image, path)
        if len(list(out.rglob("*.nii.gz"))) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("nibabel.save", nearly_full)
        with pytest.raises(OSError, match=f"No space left on device: '{out}'$"):
            writes(out, cases=2, seed=0)
    assert not list(out.iterdir())
    writes(out, cases=2, seed=0)
