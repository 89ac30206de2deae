"""Tests that left stays left for a known label in 48 orientations, four spacings and every layout, both ways.

The oracle is the function that draws the patient. For any axes of the file, a voxel of the study's grid must have the
value of this function at its position in mm.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from nibabel.orientations import axcodes2ornt, ornt_transform

from client.data.layouts import LAYOUTS, match_study, open_dataset
from common.config import DataConfig
from common.data.volume import load_example, save_label, to_native
from tests.contracts.layout_contract import held

DATA = DataConfig(labels=("background", "stem", "foot"), spacing_mm=(1, 1, 1), grid=(40, 40, 40))
ORIENTATIONS = [
    "".join(code) for axes in itertools.permutations(("LR", "PA", "IS")) for code in itertools.product(*axes)
]
SPACINGS = [(1.0, 1.0, 1.0), (0.8, 0.8, 0.8), (0.7, 1.0, 2.0), (1.5, 0.9, 1.1)]


def drawn(mm: np.ndarray) -> np.ndarray:
    """Return the label at each place [..., 3] in mm of RAS+: an asymmetric L, stem on the right, foot pointing left."""
    x, y, z = np.moveaxis(mm, -1, 0)
    stem = (x > 2) & (x < 9) & (np.abs(y - 2) < 5) & (np.abs(z) < 12)
    foot = (x > -11) & (x <= 2) & (np.abs(y - 2) < 5) & (z > -12) & (z < -4)
    return np.where(stem, 1, np.where(foot, 2, 0)).astype(np.uint8)


def stored(array: np.ndarray, affine: np.ndarray, code: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    turn = ornt_transform(axcodes2ornt("RAS"), axcodes2ornt(code))
    nib.save(nib.Nifti1Image(array, affine).as_reoriented(turn), path)


def scan(spacing: tuple[float, float, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return image, label map and affine in RAS+ axes, 36 mm a side around the drawing."""
    shape = tuple(round(36 / step) for step in spacing)
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = [-(n - 1) / 2 * step for n, step in zip(shape, spacing, strict=True)]
    index = np.stack(np.meshgrid(*[np.arange(n) for n in shape], indexing="ij"), axis=-1)
    labels = drawn(index @ affine[:3, :3].T + affine[:3, 3])
    noise = np.random.default_rng(4).normal(0, 5, shape)
    return (labels * 100.0 + noise).astype(np.float32), labels, affine


def place(image: str, label: str) -> Callable[[Path, tuple[np.ndarray, np.ndarray, np.ndarray], str], None]:
    def write(root: Path, volumes: tuple[np.ndarray, np.ndarray, np.ndarray], code: str) -> None:
        stored(volumes[0], volumes[2], code, root / image)
        stored(volumes[1], volumes[2], code, root / label)

    return write


FILES = {
    "msd": place("imagesTr/p.nii.gz", "labelsTr/p.nii.gz"),
    "nnunet": place("imagesTr/p_0000.nii.gz", "labelsTr/p.nii.gz"),
    "bids": place("sub-p/anat/sub-p_T1w.nii.gz", "derivatives/d/sub-p/anat/sub-p_dseg.nii.gz"),
    "table": place("scan.nii.gz", "drawn.nii.gz"),
    "brats": place("p/p_t1.nii.gz", "p/p_seg.nii.gz"),
}
INDEX = {
    "msd": (
        "dataset.json",
        json.dumps(
            {
                "modality": {"0": "MRI"},
                "labels": {"0": "background", "1": "stem", "2": "foot"},
                "training": [{"image": "imagesTr/p.nii.gz", "label": "labelsTr/p.nii.gz"}],
            }
        ),
    ),
    "nnunet": (
        "dataset.json",
        json.dumps(
            {
                "channel_names": {"0": "MRI"},
                "labels": {"background": 0, "stem": 1, "foot": 2},
                "file_ending": ".nii.gz",
            }
        ),
    ),
    "bids": ("derivatives/d/dseg.tsv", "index\tname\n1\tstem\n2\tfoot\n"),
    "table": ("cases.csv", "image,label\nscan.nii.gz,drawn.nii.gz\n"),
    "brats": ("README", "no index\n"),
}
NAMES = {"brats": {"non-enhancing tumor": "stem", "edema": "foot", "enhancing tumour": "background"}}
"""A layout's names for the drawing's parts, if it has names of its own."""


def test_every_layout_is_walked_through() -> None:
    assert FILES.keys() == INDEX.keys()
    assert FILES.keys() | held() == LAYOUTS.keys()
    assert len(set(ORIENTATIONS)) == 48
    turns = [(number, 1 + number % (len(SPACINGS) - 1)) for number in range(len(ORIENTATIONS))]
    assert len({(step, (number + step) % len(FILES)) for number, step in turns}) == (len(SPACINGS) - 1) * len(FILES)


@pytest.mark.parametrize("code", ORIENTATIONS)
def test_a_label_keeps_its_position_and_returns_to_the_voxels_of_its_file(code: str, tmp_path: Path) -> None:
    """Each orientation is tested at the study's spacing and at one other, in two layouts; every layout meets every
    spacing.
    """
    number = ORIENTATIONS.index(code)
    for step in (0, 1 + number % (len(SPACINGS) - 1)):
        spacing = SPACINGS[step]
        volumes = scan(spacing)
        layout = list(FILES)[(number + step) % len(FILES)]
        root = tmp_path / f"{step}"
        FILES[layout](root, volumes, code)
        name, text = INDEX[layout]
        (root / name).write_text(text)
        (case,) = match_study(open_dataset(root), DATA, labels=NAMES.get(layout)).cases
        example = load_example(case, DATA)

        index = np.stack(np.meshgrid(*[np.arange(40)] * 3, indexing="ij"), axis=-1)
        affine = example.volume.affine
        truth = drawn(index @ affine[:3, :3].T + affine[:3, 3])
        agreement = _dice(example.label, truth)
        assert min(agreement) > (0.999 if step == 0 else 0.85), (layout, spacing, agreement)
        bright = example.volume.image[0]
        assert bright[truth == 2].mean() > bright[truth == 1].mean() > bright[truth == 0].mean() + 1

        save_label(tmp_path / "back.nii.gz", to_native(example.label, example.volume), example.volume)
        back = nib.load(tmp_path / "back.nii.gz")
        native = nib.load(case.label)
        assert nib.aff2axcodes(back.affine) == tuple(code)
        assert back.shape == native.shape
        np.testing.assert_allclose(back.affine, native.affine, atol=1e-5)
        agreement = _dice(np.asarray(back.dataobj), np.asarray(native.dataobj))
        assert min(agreement) > (0.999 if step == 0 else 0.85), (layout, spacing, agreement)
        left = nib.affines.apply_affine(back.affine, np.argwhere(np.asarray(back.dataobj) == 2)).mean(axis=0)[0]
        right = nib.affines.apply_affine(back.affine, np.argwhere(np.asarray(back.dataobj) == 1)).mean(axis=0)[0]
        assert left < -3 < 4 < right


def _dice(one: np.ndarray, other: np.ndarray) -> list[float]:
    return [2 * float(((one == v) & (other == v)).sum()) / float((one == v).sum() + (other == v).sum()) for v in (1, 2)]
