"""Tests DICOM series that pydicom builds as the standard defines them: position and orientation place each slice."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from common.config import DataConfig
from common.data.dicom import read_series
from common.data.volume import load_example, load_volume
from common.errors import InvalidInput
from tests.common.data.corpus import packed
from tests.dicom_files import ORIGIN, STEP, write_series

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("SimpleITK") is None or importlib.util.find_spec("pydicom") is None,
    reason="needs the extras dicom and dev",
)
SHAPE = (6, 5, 4)  # columns, rows, slices
DATA = DataConfig(labels=("background", "core"), spacing_mm=(1.0, 1.5, 2.5), grid=(8, 8, 8))


def voxels(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(10, 900, SHAPE).astype(np.uint16)


@pytest.mark.parametrize("size", [(60_000, 60_000), (5, 7)])
def test_a_slice_of_another_size_is_refused_by_its_header(tmp_path: Path, size: tuple[int, int]) -> None:
    import pydicom

    write_series(tmp_path / "s", voxels())
    path = sorted((tmp_path / "s").iterdir())[2]
    file = pydicom.dcmread(path)
    file.Rows, file.Columns = size
    file.PixelData = bytes(2 * 35)
    pydicom.dcmwrite(path, file, enforce_file_format=True)
    with pytest.raises(InvalidInput, match="differ in size"):
        read_series(tmp_path / "s")


def test_every_voxel_lies_where_its_slice_says_in_ras(tmp_path: Path) -> None:
    array = voxels()
    write_series(tmp_path / "s", array, slope=2.0)
    scan = read_series(tmp_path / "s")
    assert scan.array.shape == (1, *SHAPE)
    for i, j, k in [(0, 0, 0), (5, 4, 3), (2, 3, 1)]:
        lps = np.array([ORIGIN[0] + i * STEP[0], ORIGIN[1] + j * STEP[1], ORIGIN[2] + k * STEP[2]])
        at = np.linalg.solve(scan.affine, [-lps[0], -lps[1], lps[2], 1])[:3]
        np.testing.assert_allclose(at, np.rint(at), atol=1e-6)
        a, b, c = np.rint(at).astype(int)
        assert scan.array[0, a, b, c] == 2 * array[i, j, k]


def test_a_series_and_the_nifti_file_of_the_same_scan_give_the_same_volume_with_the_same_label(tmp_path: Path) -> None:
    from common.data.dataset import Case

    array = voxels()
    write_series(tmp_path / "s", array)
    affine = np.diag([-STEP[0], -STEP[1], STEP[2], 1.0])
    affine[:3, 3] = [-ORIGIN[0], -ORIGIN[1], ORIGIN[2]]
    labels = np.zeros(SHAPE, dtype=np.uint8)
    labels[1:3, 1:3, 1:3] = 1
    (tmp_path / "scan.nii").write_bytes(packed(array.astype(np.int32), affine))
    (tmp_path / "label.nii").write_bytes(packed(labels, affine))
    reference = load_volume(tmp_path / "scan.nii", DATA)
    example = load_example(Case("p", tmp_path / "s", tmp_path / "label.nii"), DATA)
    np.testing.assert_allclose(example.volume.image, reference.image, atol=1e-5)
    assert example.label.sum() == 8


def test_a_missing_slice_and_two_series_in_one_folder_are_refused_without_a_name(tmp_path: Path) -> None:
    write_series(tmp_path / "gap", voxels())
    sorted((tmp_path / "gap").iterdir())[1].unlink()
    write_series(tmp_path / "two", voxels())
    write_series(tmp_path / "two/more", voxels(2), uid="1.2.3.9")
    for file in (tmp_path / "two/more").iterdir():
        file.rename(tmp_path / "two" / f"b{file.name}")
    (tmp_path / "two/more").rmdir()
    write_series(tmp_path / "one", voxels()[:, :, :1])
    for name, word in [("gap", "evenly spaced"), ("two", "several"), ("one", "single slice")]:
        with pytest.raises(InvalidInput, match=word) as caught:
            read_series(tmp_path / name)
        assert "Jane" not in str(caught.value)
        assert str(caught.value).count("to fix:") == 1


def test_a_slice_cut_short_is_refused(tmp_path: Path) -> None:
    write_series(tmp_path / "s", voxels())
    victim = sorted((tmp_path / "s").iterdir())[2]
    victim.write_bytes(victim.read_bytes()[:200])
    with pytest.raises(InvalidInput):
        read_series(tmp_path / "s")


def test_slices_that_are_shifted_along_the_stack_keep_their_places(tmp_path: Path) -> None:
    import pydicom

    write_series(tmp_path / "s", voxels())
    for path in (tmp_path / "s").iterdir():
        file = pydicom.dcmread(path)
        x, y, z = file.ImagePositionPatient
        file.ImagePositionPatient = [x + 0.4 * round((z - ORIGIN[2]) / STEP[2]), y, z]
        pydicom.dcmwrite(path, file, enforce_file_format=True)
    scan = read_series(tmp_path / "s")
    np.testing.assert_allclose(scan.affine[:3, 2], [-0.4, 0, STEP[2]], atol=1e-6)


@pytest.mark.parametrize(("spacing", "word"), [(None, "does not state its PixelSpacing"), ([3, 2], "differ in Pixel")])
def test_a_slice_without_a_pixel_size_or_with_another_one_is_refused(
    tmp_path: Path, spacing: list[float] | None, word: str
) -> None:
    import pydicom

    write_series(tmp_path / "s", voxels())
    path = sorted((tmp_path / "s").iterdir())[1]
    file = pydicom.dcmread(path)
    if spacing is None:
        del file.PixelSpacing
    else:
        file.PixelSpacing = spacing
    pydicom.dcmwrite(path, file, enforce_file_format=True)
    with pytest.raises(InvalidInput, match=word):
        read_series(tmp_path / "s")
