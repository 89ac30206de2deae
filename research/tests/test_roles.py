"""Tests the utility benchmark on other datasets: roles by number or by real sites, all structures listed."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from hashlib import sha256
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
from research.bench import Bench
from research.reports import Register
from research.roles import BenchData
from research.setting import ARMS, Setting
from research.table import render, summary
from research.utility import run
from server.protocols.controls import CONTROLS

COUNTS = SplitCounts(public_images=4, label_maps=4, paired=3)
HOSPITALS = ["A"] * 15 + ["B"] * 7 + ["C"]
SMALL = TrainingConfig(channels=(4, 8), steps=9, learning_rate=5e-3)


def boxes(folder: Path) -> BenchData:
    """Make a dataset of three hospitals with 14, 7 and 1 patients, and 23 scans: two scans of hospital A are of one
    patient.

    Scans have two channels and two structures; slices are twice as thick as pixels are wide.
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
    return BenchData(folder / "set", COUNTS, sites=folder / "sites.csv")


def test_grid_spacing_channels_and_classes_are_the_datas(tmp_path: Path) -> None:
    source = boxes(tmp_path)
    data = source.study_data()
    assert (data.labels, data.channels) == (("background", "left", "right"), ("T1", "FLAIR"))
    assert (data.spacing_mm, data.grid) == ((1.0, 1.0, 2.0), (16, 16, 8))
    assert source.study_data(grid=(8, 8, 8)).grid == (8, 8, 8)
    assert source.study_data(spacing_mm=(2, 2, 2)).grid == (8, 8, 8)
    assert source.roles(data, seed=0).public.images.shape == (4, 2, 16, 16, 8)


@pytest.mark.parametrize("scored", ["development", "report"])
def test_nobody_plays_two_parts_and_five_rotations_test_on_the_patients_of_one_part(
    tmp_path: Path, scored: str
) -> None:
    source = replace(boxes(tmp_path), scored=scored)
    dataset = source.read()
    tested: list[Case] = []
    for seed in range(5):
        split = source.split(dataset, seed=seed)
        parts = [*split.sites.values(), split.public_images, split.label_maps, split.paired, split.test]
        assert sorted(case.id for part in parts for case in part) == sorted(case.id for case in dataset.cases)
        homes = [{case.patient for case in part} for part in parts]
        assert sum(map(len, homes)) == len(set().union(*homes)) == 22
        assert [case.id for case in split.sites["C"]] == ["C22"]
        assert len(split.paired) >= 3
        assert {case.hospital for case in split.sites["B"]} == {"B"}
        tested += split.test
    names = [str(case.patient) for case in tested]
    assert len(tested) == len({case.id for case in tested}) >= 5
    # the oracle: the first hexadecimal digit of the name's SHA-256, 0 to 7 in a report
    assert {sha256(name.encode()).hexdigest()[0] in "01234567" for name in names} == {scored == "report"}


def test_no_patient_is_scored_both_while_a_recipe_is_chosen_and_in_a_report(tmp_path: Path) -> None:
    """Patients are split into a development part and a report part, which share no test patient over ten seeds.

    This holds whether one fold of patients is tested or three random patients. Patients of both parts may be public.
    """
    made = boxes(tmp_path)
    both = [replace(made, scored=part) for part in ("development", "report")]
    dataset = both[0].read()
    tested, other = [], []
    for source in (*both, *(replace(each, tested=3) for each in both)):
        splits = [source.split(dataset, seed=seed) for seed in range(10)]
        tested.append({case.patient for split in splits for case in split.test})
        other.append({case.patient for split in splits for case in (*split.public_images, *split.label_maps)})
    assert not (tested[0] | tested[2]) & (tested[1] | tested[3])
    assert all(each & tested[0] and each & tested[1] for each in other)


def test_a_report_is_counted_before_it_begins_by_dataset_and_recipe(tmp_path: Path) -> None:
    names = [f"patient-{number}" for number in range(40)]

    def register(called: str = "tumours") -> Register:
        return Register(tmp_path / "register", data=called, names=names)

    setting = Setting("pca", 3, 2, 8.0, 1e-3, Unit.PATIENT, 4, SMALL, SMALL)
    first = register().begin(setting, seeds=5)
    assert register("a copy").begin(setting, seeds=5) == first, "stopped, and gone on with: the same report"
    assert (first["times"], first["recipes"]) == (1, {first["recipe"]: 1})
    again = register()
    again.begin(setting, seeds=5)
    again.finish()
    at_epsilon_2 = register().begin(replace(setting, epsilon=2.0), seeds=5)
    assert (at_epsilon_2["times"], at_epsilon_2["recipes"]) == (2, {first["recipe"]: 2})
    longer = register().begin(replace(setting, student=replace(SMALL, steps=10)), seeds=5)
    assert longer["times"] == 3
    assert longer["recipes"] == {first["recipe"]: 2, longer["recipe"]: 1}
    assert Register(tmp_path / "register", data="hearts", names=names[:20]).reports == []


def test_two_reports_that_run_at_once_are_both_counted_and_both_finish(tmp_path: Path) -> None:
    one, other = (Register(tmp_path, data="tumours", names=["patient-1"]) for _ in range(2))
    setting = Setting("pca", 3, 2, 8.0, 1e-3, Unit.PATIENT, 4, SMALL, SMALL)
    one.begin(setting, seeds=5)
    assert other.begin(setting, seeds=1)["times"] == 2
    one.finish()
    assert [each["finished"] for each in other.reports] == [True, False]
    other.finish()
    assert [each["finished"] for each in one.reports] == [True, True]


def test_task01_is_dealt_to_eight_teachers_of_forty_eighty_students_and_eighty_four_tests(tmp_path: Path) -> None:
    """The paper divides Task01's 484 cases: 320 for teachers, 80 for the student and 84 for the test.

    It fits its codec on the label maps of the student's 80 cases.
    """
    grid = np.zeros((8, 8, 8), np.uint8)
    cases = []
    for number in range(484):
        label = grid.copy()
        label[2:5, 2:5, 2:4] = 1
        label.flat[number] ^= 1  # makes every scan different
        image, drawn = tmp_path / f"i{number}.nii", tmp_path / f"l{number}.nii"
        for path, array in ((image, label.astype(np.float32)), (drawn, label)):
            nib.save(nib.Nifti1Image(array, np.eye(4)), path)
        cases.append(Case(id=f"BRATS_{number:03d}", image=image, label=drawn))
    write_dataset(tmp_path / "set", name="Task01", labels=["background", "x"], channels=["c"], cases=cases)
    source = BenchData(tmp_path / "set", SplitCounts(8, public_images=80, label_maps=0), tested=84)
    dataset = source.read()
    one, other = (source.split(dataset, seed=seed) for seed in (0, 1))
    assert [len(part) for part in one.sites.values()] == [40] * 8
    assert (len(one.public_images), len(one.test)) == (80, 84)
    assert one.label_maps == one.public_images
    assert {case.id for case in one.test} != {case.id for case in other.test}
    placed = [case.id for part in (*one.sites.values(), one.public_images, one.test) for case in part]
    assert len(placed) == len(set(placed)) == 484


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
def test_table_and_json_compare_the_student_with_each_hospital_of_any_size(tmp_path: Path) -> None:
    """The hospital with one patient has one teacher instead of two, and none of its cases is held out."""
    source = replace(boxes(tmp_path), tested=4)
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
    assert all(name in text.getvalue() for name in ("left", "right", "HD95", "its own teacher", "own cases"))


def test_one_hospital_publishes_the_pairs_and_is_neither_party_nor_scored(tmp_path: Path) -> None:
    source = replace(boxes(tmp_path), paired_from="B")
    dataset, pairs = source.read(), set()
    for seed in range(5):
        split = source.split(dataset, seed=seed)
        assert {case.hospital for case in split.paired} == {"B"}
        assert len(split.paired) == COUNTS.paired
        others = (*split.test, *split.public_images, *split.label_maps, *(c for s in split.sites.values() for c in s))
        assert {case.hospital for case in others} == {"A", "C"} == set(split.sites)
        pairs.add(tuple(case.id for case in split.paired))
    assert len(pairs) > 1
    with pytest.raises(InvalidInput, match="only with --paired"):
        replace(source, counts=replace(COUNTS, paired=0)).split(dataset, seed=0)
    with pytest.raises(InvalidInput, match="cases of C"):
        replace(source, paired_from="C").split(dataset, seed=0)
