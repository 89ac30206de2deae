"""States what every layout of a site's data promises. A layout's test inherits :class:`LayoutContract` and writes
cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from client.data.layouts import LAYOUTS, Layout, match_study, open_dataset
from common.config import DataConfig
from common.data.volume import load_example
from common.errors import InvalidInput

GRID = (8, 16, 8)
DATA = DataConfig(labels=("background", "front", "back"), spacing_mm=(1, 1, 1), grid=GRID, channels=("MRI",))
PATIENTS = {"north-1": "north", "north-2": "north", "south-1": "south"}
"""Case → its patient."""


def held() -> set[str]:
    """Return the layouts that have a contract's test."""
    stems = (path.stem for path in Path(__file__).parent.glob("test_layout_*.py"))
    return {stem.removeprefix("test_layout_").replace("_", "-") for stem in stems}


def label_of(number: int) -> np.ndarray:
    """Return two blocks that differ from every turned or mirrored image of a case."""
    label = np.zeros(GRID, dtype=np.uint8)
    label[1 : 3 + number, 2:6, 1:4] = 1
    label[1:4, 7:12, 3:6] = 2
    return label


def save(path: Path, array: np.ndarray) -> Path:
    """Write an array as a NIfTI file whose axes are the world's, in millimetres."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(array, np.eye(4)), path)
    return path


class LayoutContract:
    """Tests a layout's promises; a subclass sets ``name`` and writes cases in the layout."""

    name: str
    patients = PATIENTS
    """The patient of each case, as the folder alone shows it; the case itself if the layout does not show patients."""

    def lay(self, folder: Path, cases: Mapping[str, np.ndarray]) -> dict[str, Path]:
        """Write for each case an image, its label map plus 10, and the label map; return the images' files."""
        raise NotImplementedError

    @pytest.fixture
    def images(self, tmp_path: Path) -> dict[str, Path]:
        return self.lay(tmp_path / "set", {case: label_of(number) for number, case in enumerate(PATIENTS)})

    @pytest.fixture
    def folder(self, images: dict[str, Path], tmp_path: Path) -> Path:
        return tmp_path / "set"

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.name]

    def test_it_describes_itself_in_a_line(self) -> None:
        assert self.layout.name == self.name
        assert self.layout.says.isprintable()
        assert len(self.layout.says) < 120

    def test_it_is_recognised_in_its_own_folders_and_in_no_empty_one(self, folder: Path, tmp_path: Path) -> None:
        assert next(name for name, layout in LAYOUTS.items() if layout.matches(folder)) == self.name
        (tmp_path / "empty").mkdir()
        assert not self.layout.matches(tmp_path / "empty")
        with pytest.raises(InvalidInput):
            open_dataset(tmp_path / "empty")

    def test_every_case_is_found_with_its_patient(self, folder: Path) -> None:
        found = open_dataset(folder)
        assert [case.id for case in found.labelled] == sorted(PATIENTS)
        assert found.problems == ()
        assert set(found.listed) == PATIENTS.keys()
        assert {case: found.patient_of(case) for case in found.listed} == self.patients

    def test_voxels_and_labels_come_out_where_they_lie_in_the_files(self, folder: Path) -> None:
        for number, case in enumerate(match_study(open_dataset(folder), DATA).cases):
            example = load_example(case, DATA)
            assert np.array_equal(example.label, label_of(number))
            image = example.volume.image[0]
            assert image[example.label == 2].min() > image[example.label == 1].max() > image[example.label == 0].max()

    def test_the_index_opens_no_scan(self, folder: Path, images: dict[str, Path]) -> None:
        before = open_dataset(folder)
        for path in images.values():
            path.write_bytes(b"no scan")
        assert open_dataset(folder) == before

    def test_a_missing_image_costs_its_case_and_no_other(self, folder: Path, images: dict[str, Path]) -> None:
        images["north-2"].unlink()
        found = open_dataset(folder)
        assert [case.id for case in found.labelled] == ["north-1", "south-1"]
        assert [problem.case for problem in found.problems] == ["north-2"]
        assert all("to fix" in problem.reason for problem in found.problems)
