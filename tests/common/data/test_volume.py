"""Tests volumes: left stays left in every orientation, and doubtful files are refused without naming a patient."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from common.config import DataConfig
from common.data.volume import (
    load_label,
    load_volume,
    save_label,
    to_native,
    volume_from_bytes,
)
from common.errors import InvalidInput
from tests.common.data.corpus import label_of

DATA = DataConfig(labels=("background", "left", "top"), spacing_mm=(1, 1, 1), grid=(16, 24, 16))
ORIENTATIONS = [
    "".join(code) for axes in itertools.permutations(("LR", "PA", "IS")) for code in itertools.product(*axes)
]


def phantom() -> tuple[np.ndarray, np.ndarray]:
    """Return an asymmetric L in RAS+ voxels of 1 mm: label 1 towards the patient's left, label 2 above."""
    labels = np.zeros((14, 20, 15), dtype=np.uint8)
    labels[2:5, 4:16, 3:5] = 1
    labels[3:10, 6:9, 9:12] = 2
    image = labels.astype(np.float32) * 40 + np.random.default_rng(3).normal(100, 3, labels.shape)
    return image.astype(np.float32), labels


def nifti(array: np.ndarray, affine: np.ndarray | None = None) -> bytes:
    return bytes(nib.Nifti1Image(array, np.eye(4) if affine is None else affine).to_bytes())


def oriented(array: np.ndarray, code: str) -> bytes:
    """Return the same anatomy stored with another order and direction of axes, by nibabel."""
    image = nib.Nifti1Image(array, np.eye(4))
    transform = nib.orientations.ornt_transform(
        nib.orientations.axcodes2ornt("RAS"), nib.orientations.axcodes2ornt(code)
    )
    return bytes(image.as_reoriented(transform).to_bytes())


@pytest.mark.parametrize("code", ORIENTATIONS)
def test_left_stays_left_through_all_48_orientations_there_and_back(code: str) -> None:
    image, labels = phantom()
    reference = volume_from_bytes(nifti(image), DATA)
    volume = volume_from_bytes(oriented(image, code), DATA)
    np.testing.assert_allclose(volume.image, reference.image, atol=1e-5)
    on_grid = label_of(oriented(labels, code), DATA, volume=volume)
    np.testing.assert_array_equal(on_grid, label_of(nifti(labels), DATA))
    native = np.asarray(nib.Nifti1Image.from_bytes(oriented(labels, code)).dataobj)
    np.testing.assert_array_equal(to_native(on_grid, volume), native)


def test_the_grid_is_the_centre_and_padding_is_the_mean() -> None:
    image, labels = phantom()
    volume = volume_from_bytes(nifti(image), DATA)
    assert volume.image.shape == (1, 16, 24, 16)
    assert volume.image.dtype == np.float32
    np.testing.assert_allclose(volume.image[0, 1:15, 2:22, 0:15], (image - image.mean()) / image.std(), atol=1e-4)
    assert volume.image[0, 0].any() == np.False_
    np.testing.assert_array_equal(label_of(nifti(labels), DATA)[1:15, 2:22, 0:15], labels)
    np.testing.assert_allclose(volume.affine[:3, 3], [-1, -2, 0])


def test_a_volume_is_immutable_and_a_copy() -> None:
    volume = volume_from_bytes(nifti(phantom()[0]), DATA)
    with pytest.raises(ValueError, match="read-only"):
        volume.image[0, 0, 0, 0] = 1


def test_probabilities_come_back_as_probabilities_and_agree_with_labels() -> None:
    image, labels = phantom()
    big = np.pad(image, 6, constant_values=90)
    volume = volume_from_bytes(nifti(big), DATA)
    on_grid = label_of(nifti(np.pad(labels, 6)), DATA)
    probabilities = np.moveaxis(np.eye(3, dtype=np.float32)[on_grid], -1, 0)
    native = to_native(probabilities, volume)
    assert native.shape == (3, *big.shape)
    np.testing.assert_allclose(native.sum(axis=0), 1, atol=1e-5)
    np.testing.assert_array_equal(native.argmax(axis=0), to_native(on_grid, volume))
    assert native[0, 0, 0, 0] == 1


def test_resampling_keeps_sizes_in_mm(tmp_path: Path) -> None:
    fine = np.zeros((40, 40, 40), dtype=np.uint8)
    fine[10:30, 10:30, 10:30] = 1
    affine = np.diag([0.5, 0.5, 0.5, 1])
    volume = volume_from_bytes(nifti(fine.astype(np.float32) * 100, affine), DATA)
    on_grid = label_of(nifti(fine, affine), DATA, volume=volume)
    assert int(on_grid.sum()) == pytest.approx(1000, rel=0.05)
    assert int(to_native(on_grid, volume).sum()) == pytest.approx(8000, rel=0.05)
    save_label(tmp_path / "out.nii.gz", to_native(on_grid, volume), volume)
    saved = nib.load(tmp_path / "out.nii.gz")
    assert saved.shape == fine.shape
    np.testing.assert_allclose(saved.affine, affine)


def test_a_path_and_its_bytes_give_the_same_volume_gzipped_or_not(tmp_path: Path) -> None:
    image, labels = phantom()
    plain = nifti(image)
    (tmp_path / "v.nii").write_bytes(plain)
    (tmp_path / "v.nii.gz").write_bytes(gzip.compress(plain))
    reference = volume_from_bytes(plain, DATA).image
    for name in ("v.nii", "v.nii.gz"):
        np.testing.assert_array_equal(load_volume(tmp_path / name, DATA).image, reference)
    (tmp_path / "l.nii").write_bytes(nifti(labels))
    assert load_label(tmp_path / "l.nii", DATA).max() == 2


def test_several_channels_are_normalised_each_by_itself() -> None:
    image, _ = phantom()
    data = DataConfig(labels=DATA.labels, spacing_mm=DATA.spacing_mm, grid=DATA.grid, channels=("T1", "T2"))
    volume = volume_from_bytes(nifti(np.stack([image, image * 1e6 - 5], axis=-1)), data)
    assert volume.image.shape == (2, 16, 24, 16)
    np.testing.assert_allclose(volume.image[0], volume.image[1], atol=1e-3)


def broken_images() -> dict[str, tuple[bytes, str]]:
    image, _ = phantom()
    hole = image.copy()
    hole[3, 3, 3] = np.nan
    infinite = image.copy()
    infinite[3, 3, 3] = np.inf
    plain = nifti(image)
    singular = bytearray(plain)
    rows = np.zeros(12, dtype="<f4").tobytes()
    singular[280:328] = rows
    return {
        "nan": (nifti(hole), "NaN or infinite"),
        "inf": (nifti(infinite), "NaN or infinite"),
        "constant": (nifti(np.full_like(image, 7)), "constant"),
        "time series": (nifti(np.stack([image, image], axis=-1)), "channels"),
        "2D": (nifti(image[0]), "slice"),
        "cut short": (plain[: len(plain) // 2], "cut short"),
        "cut in the header": (plain[:100], "damaged"),
        "gzip cut short": (gzip.compress(plain)[:-200], "damaged"),
        "empty file": (b"", "empty"),
        "no NIfTI": (b"\x00" * 4000, "no NIfTI"),
        "text": (b"patient Jane Doe " * 400, "no NIfTI"),
        "complex": (nifti(image.astype(np.complex64)), "voxel type"),
        "singular affine": (bytes(singular), "affine"),
    }


@pytest.mark.parametrize("name", broken_images())
def test_an_image_that_cannot_be_trusted_is_refused_without_a_name(name: str, tmp_path: Path) -> None:
    content, word = broken_images()[name]
    path = tmp_path / "jane-doe-1970.nii"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=word) as caught:
        load_volume(path, DATA)
    assert "jane" not in str(caught.value).lower()


def test_a_header_that_promises_too_much_allocates_nothing() -> None:
    header = nib.Nifti1Header()
    header.set_data_dtype(np.float32)
    header.set_data_shape((30000, 30000, 30000))
    header["vox_offset"], header["magic"] = 352, b"n+1"
    with pytest.raises(InvalidInput, match="voxels"):
        volume_from_bytes(header.binaryblock + b"\x00" * 4, DATA)


def test_a_missing_file_is_refused_without_its_path(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="cannot be read") as caught:
        load_volume(tmp_path / "jane-doe.nii.gz", DATA)
    assert "jane" not in str(caught.value)


@pytest.mark.parametrize("value", [3, 255, -1, 0.5, np.nan])
def test_label_values_outside_the_study_are_refused(value: float) -> None:
    labels = phantom()[1].astype(np.float32)
    labels[0, 0, 0] = value
    with pytest.raises(InvalidInput, match=r"whole numbers|does not define"):
        label_of(nifti(labels), DATA)


def test_a_label_drawn_on_another_geometry_is_refused() -> None:
    image, labels = phantom()
    volume = volume_from_bytes(nifti(image), DATA)
    with pytest.raises(InvalidInput, match="shapes"):
        label_of(nifti(labels[1:]), DATA, volume=volume)
    shifted = np.eye(4)
    shifted[0, 3] = 5
    with pytest.raises(InvalidInput, match="places in space"):
        label_of(nifti(labels, shifted), DATA, volume=volume)
    assert label_of(nifti(labels), DATA, volume=volume).max() == 2
