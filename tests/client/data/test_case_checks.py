"""Tests the first check of a dataset: unreadable cases are left out; the position of structures leaves out none."""

from __future__ import annotations

import errno
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from client.data.case_checks import readable
from client.data.layouts import DatasetSettings
from client.operations.doctor import check_data
from client.operations.findings import State, to_json
from common.config import DataConfig
from common.data.dataset import Dataset
from common.data.msd import Case, write_dataset
from common.data.volume import load_case
from common.errors import InvalidInput


def _dataset(root: Path, **places: tuple[int, int, int]) -> Dataset:
    """Write volumes of 96 mm, each with one structure of 6 mm at the given corner."""
    cases = []
    for name, (x, y, z) in places.items():
        labels = np.zeros((96, 96, 96), dtype=np.uint8)
        labels[x : x + 6, y : y + 6, z : z + 6] = 1
        image = np.random.default_rng(0).integers(20, 90, labels.shape).astype(np.int16)
        paths = [root / f"{name}-{kind}.nii.gz" for kind in ("image", "label")]
        for path, array in zip(paths, (image, labels), strict=True):
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
        cases.append(Case(name, paths[0], paths[1]))
    return write_dataset(root / "set", name="n", labels=["background", "core"], channels=["MRI"], cases=cases)


def test_no_case_is_left_out_because_of_its_structures_position(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, corner=(0, 0, 0), centre=(45, 45, 45), edge=(88, 40, 3))
    left = readable(dataset)
    assert [case.id for case in left.cases] == [case.id for case in dataset.cases]
    assert left.problems == ()


@pytest.mark.slow
def test_a_structure_at_the_end_of_a_scan_of_a_metre_is_no_reason_either(tmp_path: Path) -> None:
    labels = np.zeros((32, 32, 256), dtype=np.uint8)
    labels[:6, :6, -3:] = 1
    image = np.random.default_rng(0).integers(20, 90, labels.shape).astype(np.int16)
    for name, array in (("image", image), ("label", labels)):
        nib.save(nib.Nifti1Image(array, np.diag([2, 2, 4, 1])), tmp_path / f"{name}.nii.gz")
    case = Case("long", tmp_path / "image.nii.gz", tmp_path / "label.nii.gz")
    dataset = write_dataset(tmp_path / "set", name="n", labels=["background", "core"], channels=["MRI"], cases=[case])
    assert readable(dataset).problems == ()


def test_a_case_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    dataset = _dataset(tmp_path, good=(45, 45, 45), torn=(45, 45, 45))
    torn = next(case for case in dataset.cases if case.id == "torn")
    torn.image.write_bytes(torn.image.read_bytes()[:200])
    left = readable(dataset)
    assert [case.id for case in left.cases] == ["good"]
    assert [problem.case for problem in left.problems] == ["torn"]
    (tmp_path / "other").mkdir()
    torn_only = _dataset(tmp_path / "other", torn=(9, 9, 9))
    torn_only.cases[0].image.write_bytes(b"no image")
    with pytest.raises(InvalidInput, match="torn"):
        readable(torn_only)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.EIO, "Input/output error", "/data/mueller"), "cannot be read (Input/output error)"),
        (RuntimeError("mueller"), "cannot be read (RuntimeError, a fault of this software)"),
    ],
)
def test_no_error_of_one_case_stops_the_doctor_or_names_the_patient(
    tmp_path: Path, error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def torn(case: Case, *args: object, **more: object) -> object:
        if case.id == "torn":
            raise error
        return load_case(case, *args, **more)  # type: ignore[arg-type]

    dataset = _dataset(tmp_path, good=(45, 45, 45), torn=(45, 45, 45))
    monkeypatch.setattr("client.data.case_checks.load_case", torn)
    monkeypatch.setattr("common.models.native.load_case", torn)
    monkeypatch.setattr("client.operations.doctor.load_case", torn)
    monkeypatch.setattr("common.data.volume.load_case", torn)
    assert [reason in one.reason for one in readable(dataset).problems] == [True]
    data = DataConfig(dataset.labels, (12, 12, 12), (8, 8, 8), dataset.channels)
    findings = check_data(tmp_path / "set", data, DatasetSettings(), pictures=tmp_path / "pictures")
    (case,) = (one for one in findings if one.check == "case")
    assert (case.state, case.text) == (State.FAIL, reason)
    assert case.remedy
    assert "mueller" not in to_json(findings)
