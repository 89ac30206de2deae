"""The utility benchmark on any dataset: roles by number or by real sites, every structure and hospital in its table."""

from __future__ import annotations

import io
import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from rich.console import Console

from common.config import TrainingConfig
from common.data.msd import Case, write_dataset
from common.data.split import SplitCounts
from common.errors import InvalidInput
from common.privacy.mechanism import Unit
from consilium.research.bench import Bench
from consilium.research.roles import Source
from consilium.research.setting import ARMS, Setting
from consilium.research.table import render, summary
from consilium.research.utility import run
from server.protocols.controls import CONTROLS

COUNTS = SplitCounts(public_images=4, label_maps=4, paired=3)
HOSPITALS = ["A"] * 15 + ["B"] * 7 + ["C"]
SMALL = TrainingConfig(channels=(4, 8), steps=9, learning_rate=5e-3)


def boxes(folder: Path) -> Source:
    """23 scans of two channels and two structures, slices twice as thick: hospitals of 14, 7 and 1 patients.

    Two scans of A are of one patient.
    """
    rng = np.random.default_rng(0)
    (folder / "raw").mkdir(parents=True)
    cases = []
    for number, hospital in enumerate(HOSPITALS):
        label = np.zeros((14, 14, 7), dtype=np.uint8)
        (x, y, z), (across, along) = rng.integers(2, 4, 3), rng.integers(5, 8, 2)
        label[x : x + across, y : y + along, z : z + 3] = 1
        label[x : x + 3, y : y + along, z : z + 3] = 2
        image = (label[..., None] * [1.0, -1.0] + rng.normal(0, 0.2, (*label.shape, 2))).astype(np.float32)
        files = [folder / "raw" / f"{hospital}{number:02d}-{kind}.nii.gz" for kind in ("image", "label")]
        for path, array in zip(files, (image, label), strict=True):
            nib.save(nib.Nifti1Image(array, np.diag([1.0, 1.0, 2.0, 1.0])), path)
        cases.append(Case(f"{hospital}{number:02d}", *files, patient=f"patient-{max(1, number)}"))
    write_dataset(
        folder / "set", name="boxes", labels=["background", "left", "right"], channels=["T1", "FLAIR"], cases=cases
    )
    rows = [f"{case.id},{hospital}" for case, hospital in zip(cases, HOSPITALS, strict=True)]
    (folder / "sites.csv").write_text("\n".join(["case_id,site", *rows]))
    return Source(folder / "set", COUNTS, sites=folder / "sites.csv")


def test_grid_spacing_channels_and_classes_are_the_datas(tmp_path: Path) -> None:
    source = boxes(tmp_path)
    data = source.study_data()
    assert (data.labels, data.channels) == (("background", "left", "right"), ("T1", "FLAIR"))
    assert (data.spacing_mm, data.grid) == ((1.0, 1.0, 2.0), (16, 16, 8))
    assert source.study_data(grid=(8, 8, 8)).grid == (8, 8, 8)
    assert source.study_data(spacing_mm=(2, 2, 2)).grid == (8, 8, 8)
    assert source.roles(data, seed=0).public.images.shape == (4, 2, 16, 16, 8)


def test_nobody_plays_two_parts_and_every_patient_is_tested_on_but_one_of_each_hospital(tmp_path: Path) -> None:
    source = boxes(tmp_path)
    dataset = source.read()
    tested: list[str] = []
    for seed in range(5):
        split = source.split(dataset, seed=seed)
        parts = [*split.sites.values(), split.public_images, split.label_maps, split.paired, split.test]
        assert sorted(case.id for part in parts for case in part) == sorted(case.id for case in dataset.cases)
        homes = [{case.patient for case in part} for part in parts]
        assert sum(map(len, homes)) == len(set().union(*homes)) == 22
        assert [case.id for case in split.sites["C"]] == ["C22"]
        assert len(split.paired) >= 3
        assert {case.hospital for case in split.sites["B"]} == {"B"}
        tested += [case.id for case in split.test]
    assert len(tested) == len(set(tested))
    assert len({dict(zip([c.id for c in dataset.cases], dataset.cases, strict=True))[t].patient for t in tested}) == 15


def test_a_table_of_sites_must_name_every_case_once(tmp_path: Path) -> None:
    source = boxes(tmp_path)
    assert source.sites is not None
    text = source.sites.read_text()
    for rows, complaint in ((text.replace("C22,C", ""), "without a site"), (text + "\nC22,A", "two sites")):
        source.sites.write_text(rows)
        with pytest.raises(InvalidInput, match=complaint):
            source.read()
    source.sites.write_text(text.replace("A01,A", "A01,B"))  # the patient's other scan stays with A
    with pytest.raises(InvalidInput, match="two hospitals"):
        source.split(source.read(), seed=0)


@pytest.mark.slow
def test_uneven_hospitals_are_each_beside_the_student_in_table_and_json(tmp_path: Path) -> None:
    """The hospital with one patient has one teacher of its two, and no case held out to be scored on."""
    source = boxes(tmp_path)
    data = source.study_data()
    roles = source.roles(data, seed=1)
    setting = Setting("pca", 3, 2, 8.0, 1e-3, Unit.PATIENT, 4, SMALL, SMALL)
    bench = Bench(setting, roles, data, seed=1, cache=tmp_path / "cache")
    assert (len(bench.teachers(None)), bench.voters) == (5, 6)
    row = run(bench, lambda _stage: None)
    document = summary(setting, [row, row])
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert document["structures"].keys() == {"left", "right"}
    assert document["structures"]["left"].keys() >= {*ARMS, *CONTROLS, "labels", "ensemble", "all_data"}
    assert [site["cases"] for site in document["sites"].values()] == [len(part) for part in roles.private]
    assert document["sites"]["A"]["gain"]["mean"] == pytest.approx(row["student"] - row["teacher@A"])
    assert "on_its_own" in document["sites"]["A"]
    assert "on_its_own" not in document["sites"]["C"]
    text = io.StringIO()
    render(document, Console(file=text, width=200))
    assert all(name in text.getvalue() for name in ("left", "right", "HD95", "its own teacher", "on its own cases"))
