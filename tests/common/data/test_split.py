"""Tests the split: every case has one role, public cases share no patient, hospitals stay together, all is recorded."""

from __future__ import annotations

import errno
import gzip
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from common.canonical import sha256_file
from common.data.msd import Case, Dataset, read_dataset, write_dataset
from common.data.split import Split, SplitCounts, plan_split, private_label_hashes, with_sites, write_split
from common.data.synthetic import write_phantoms
from common.errors import InvalidInput
from consilium.cli.data import app

COUNTS = SplitCounts(hospitals=3, public_images=5, label_maps=4, validation=2, test=3)


def make(folder: Path, *, hospitals: int = 0, count: int = 26) -> Dataset:
    cases = []
    (folder / "raw" / "labels").mkdir(parents=True)
    for i in range(count):
        paths = [folder / "raw" / f"p{i:02d}.nii.gz", folder / "raw" / "labels" / f"p{i:02d}.nii.gz"]
        image = np.arange(i, i + 27, dtype=np.uint8)
        for path, array in zip(paths, (image, np.where(image == 26, 1, 0).astype(np.uint8)), strict=True):
            nib.save(nib.Nifti1Image(array.reshape(3, 3, 3), np.eye(4)), path)
        cases.append(Case(f"p{i:02d}", *paths, hospital=f"h{i % hospitals}" if hospitals else None))
    return write_dataset(folder / "set", name="all", labels=["background", "core"], channels=["MRI"], cases=cases)


def places(split: Split) -> list[tuple[Case, ...]]:
    return [*split.sites.values(), split.public_images, split.label_maps, split.validation, split.test]


def test_every_case_goes_to_exactly_one_place(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    split = plan_split(dataset, COUNTS, seed=1)
    assert sorted(case.id for place in places(split) for case in place) == [case.id for case in dataset.cases]
    assert [len(place) for place in places(split)] == [4, 4, 4, 5, 4, 2, 3]


def test_a_case_that_cannot_be_read_is_in_no_part_and_named(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    whole = dataset.cases[3].image.read_bytes()
    dataset.cases[3].image.write_bytes(whole[: len(whole) // 2])
    assert dataset.cases[7].label is not None
    dataset.cases[7].label.write_bytes(b"")
    split = plan_split(dataset, COUNTS, seed=1)
    assert not {case.id for place in places(split) for case in place} & {"p03", "p07"}
    assert [problem.case for problem in split.problems] == ["p03", "p07"]


def test_a_scan_compressed_in_another_way_is_not_public_and_private_at_once(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    first, other = dataset.cases[3].image, dataset.cases[7].image
    other.write_bytes(gzip.compress(gzip.decompress(first.read_bytes()), compresslevel=1, mtime=1))
    assert other.read_bytes() != first.read_bytes()
    split = plan_split(dataset, COUNTS, seed=1)
    assert "p07" not in {case.id for place in places(split) for case in place}
    assert "the same scan as p03" in split.problems[0].reason


def test_the_seed_decides_and_the_order_of_files_does_not(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    turned = Dataset(dataset.name, dataset.labels, dataset.channels, dataset.cases[::-1])
    assert plan_split(dataset, COUNTS, seed=1) == plan_split(turned, COUNTS, seed=1)
    assert plan_split(dataset, COUNTS, seed=1) != plan_split(dataset, COUNTS, seed=2)


def test_cases_of_a_hospital_stay_with_its_site_and_all_give_to_the_public(tmp_path: Path) -> None:
    dataset = make(tmp_path, hospitals=3)
    split = plan_split(dataset, SplitCounts(public_images=6, label_maps=3, validation=3, test=3), seed=1)
    assert sorted(split.sites) == ["h0", "h1", "h2"]
    for name, cases in split.sites.items():
        assert {case.hospital for case in cases} == {name}
    assert {case.hospital for case in split.public_images} == {"h0", "h1", "h2"}
    with pytest.raises(InvalidInput, match=r"remove sites.csv and the key hospitals of dataset\.json"):
        plan_split(dataset, COUNTS.__class__(hospitals=4), seed=1)


def test_all_scans_of_a_patient_go_to_one_place(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    whose = {case.id: f"patient-{i // 3}" for i, case in enumerate(dataset.cases)}
    cases = tuple(replace(case, patient=whose[case.id]) for case in dataset.cases)
    split = plan_split(replace(dataset, cases=cases), replace(COUNTS, label_maps=3), seed=1)
    homes = [{whose[case.id] for case in place} for place in places(split)]
    assert sum(map(len, homes)) == len(set().union(*homes)) == 9
    assert sorted(case.id for place in places(split) for case in place) == [case.id for case in cases]
    assert len(split.public_images) >= 5
    assert len(split.test) >= 3


def test_the_directories_hold_what_the_record_says_and_the_public_has_no_pair(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    out = tmp_path / "out"
    record = write_split(plan_split(dataset, COUNTS, seed=1), dataset, out)
    assert json.loads((out / "split.json").read_text()) == record
    images = {path.name for path in (out / "public" / "images").iterdir()}
    maps = {path.name for path in (out / "public" / "label-maps").iterdir()}
    assert (len(images), len(maps)) == (5, 4)
    assert not images & maps
    for entry in record["public_images"]:  # type: ignore[attr-defined]
        assert sha256_file(out / "public" / "images" / f"{entry['case']}.nii.gz") == entry["image"]
    for name, size in (("sites/hospital-01", 4), ("validation", 2), ("test", 3)):
        assert len(read_dataset(out / name).labelled) == size
    assert sorted(path.name for path in (out / "sites").iterdir()) == ["hospital-01", "hospital-02", "hospital-03"]
    with pytest.raises(InvalidInput, match="not empty"):
        write_split(plan_split(dataset, COUNTS, seed=1), dataset, out)


def test_a_scan_under_two_names_is_used_once_and_reported(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    dataset.cases[7].image.write_bytes(dataset.cases[2].image.read_bytes())
    split = plan_split(dataset, COUNTS, seed=1)
    (problem,) = split.problems
    assert problem.case == "p07"
    assert " p02; to fix: " in problem.reason
    assert "p07" not in {case.id for place in places(split) for case in place}


def test_counts_that_cannot_be_filled_are_refused_with_the_numbers(tmp_path: Path) -> None:
    dataset = make(tmp_path, count=16)
    with pytest.raises(InvalidInput, match=r"got 16.*\b14 .*3 hospitals"):
        plan_split(dataset, COUNTS, seed=1)
    with pytest.raises(InvalidInput, match="hospitals is missing"):
        plan_split(dataset, SplitCounts(test=1), seed=1)
    for bad in ({"test": -1}, {"hospitals": 0}):
        with pytest.raises(InvalidInput):
            SplitCounts(**bad)


def test_the_command_splits_and_a_missing_case_is_named(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    dataset.cases[0].image.unlink()
    counts = ["--hospitals", "2", "--public-images", "4", "--label-maps", "4", "--validation", "2", "--test", "3"]
    arguments = ["split", "--data", str(tmp_path / "set"), "--out", str(tmp_path / "out"), "--seed", "1", *counts]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert "hospital-01 6, hospital-02 6" in result.stdout
    assert re.search("left out p00: .*image", result.stdout)


def test_a_case_that_no_site_could_use_is_dealt_to_nobody_and_one_without_a_label_is_named(tmp_path: Path) -> None:
    """The unusable cases here are a time series, and a label map with another shape than its image."""
    made, out = tmp_path / "made", tmp_path / "out"
    cases = write_phantoms(made, cases=7, seed=1).cases
    scan, label = nib.load(cases[0].image), nib.load(cases[1].label)
    nib.save(nib.Nifti1Image(np.stack([np.asanyarray(scan.dataobj)] * 2, -1), scan.affine), cases[0].image)
    nib.save(nib.Nifti1Image(np.asanyarray(label.dataobj)[4:], label.affine), cases[1].label)
    index = json.loads((made / "dataset.json").read_text())
    index["test"] = [index["training"].pop()["image"]]
    (made / "dataset.json").write_text(json.dumps(index))
    counts = ["--public-images", "1", "--label-maps", "1", "--validation", "0", "--test", "0", "--hospitals", "2"]
    arguments = ["split", "--data", str(made), "--out", str(out), "--seed", "1", *counts]
    said = CliRunner().invoke(app, arguments, catch_exceptions=False).stdout
    assert "cases: 4 used, 2 left out" in said
    assert re.search("left out phantom_0000: .*time series", said)
    assert re.search("left out phantom_0001: .*different shapes", said)
    assert "not used, because they have no label map: phantom_0006" in said


def test_data_that_were_just_made_can_be_split_among_more_hospitals_than_they_name(tmp_path: Path) -> None:
    """By default, `data synth` names one hospital in all cases. Such a name does not divide the cases, and the
    split does not write it.
    """
    made, out = tmp_path / "made", tmp_path / "out"
    runner = CliRunner()
    runner.invoke(app, ["synth", "--out", str(made), "--cases", "6", "--seed", "1"], catch_exceptions=False)
    counts = ["--public-images", "1", "--label-maps", "1", "--validation", "0", "--test", "0", "--hospitals", "2"]
    arguments = ["split", "--data", str(made), "--out", str(out), "--seed", "1", *counts]
    assert "hospital-01 2, hospital-02 2;" in runner.invoke(app, arguments, catch_exceptions=False).stdout
    cases = [case for site in (out / "sites").iterdir() for case in read_dataset(site).cases]
    assert {case.hospital for case in cases} == {None}


def test_paired_cases_are_public_with_both_and_the_record_says_so(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    out = tmp_path / "out"
    record = write_split(plan_split(dataset, replace(COUNTS, paired=3), seed=1), dataset, out)
    paired = read_dataset(out / "public" / "paired").labelled
    assert [case.id for case in paired] == sorted(entry["case"] for entry in record["paired"])  # type: ignore[attr-defined]
    assert len(paired) == 3
    assert "paired" not in write_split(plan_split(dataset, COUNTS, seed=1), dataset, tmp_path / "none")
    others = [case.id for part in places(plan_split(dataset, replace(COUNTS, paired=3), seed=1)) for case in part]
    assert not {case.id for case in paired} & set(others)


def test_uneven_hospitals_give_in_proportion_and_one_patient_stays(tmp_path: Path) -> None:
    dataset = make(tmp_path, count=30)
    rows = [f"{case.id},{'small' if i == 29 else 'big' if i % 3 else 'middle'}" for i, case in enumerate(dataset.cases)]
    (tmp_path / "sites.csv").write_text("\n".join(["case_id,site", *rows]))
    named = with_sites(dataset, tmp_path / "sites.csv")
    split = plan_split(named, SplitCounts(public_images=6, label_maps=6, validation=3, test=3), seed=1)
    assert {name: len(cases) for name, cases in split.sites.items()} == {"big": 7, "middle": 4, "small": 1}
    with pytest.raises(InvalidInput, match=r"got 30; allowed: .*\b28 .*3 hospitals"):
        plan_split(named, SplitCounts(public_images=20, label_maps=4, validation=2, test=2), seed=1)


def test_a_table_of_sites_in_the_datasets_folder_is_used_or_the_count_is_refused(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    rows = [f"{case.id},{('north', 'south')[i % 2]}" for i, case in enumerate(dataset.cases)]
    (tmp_path / "set" / "sites.csv").write_text("\n".join(["case_id,site", *rows]))
    counts = ["--public-images", "4", "--label-maps", "4", "--validation", "2", "--test", "3", "--seed", "1"]
    for number, asked in enumerate(([], ["--hospitals", "2"], ["--hospitals", "3"])):
        out = tmp_path / f"out{number}"
        done = CliRunner().invoke(app, ["split", "--data", str(tmp_path / "set"), "--out", str(out), *counts, *asked])
        if asked and asked[1] == "3":
            assert isinstance(done.exception, InvalidInput)
            assert "north, south" in done.exception.limit
            assert not out.exists()
        else:
            assert sorted(path.name for path in (out / "sites").iterdir()) == ["north", "south"]


def test_another_layout_becomes_one_file_a_case_in_the_datasets_own_numbers(tmp_path: Path) -> None:
    """Each case has two files, one for each channel, and a table names its labels 0 and 7."""
    lines, rng = ["image_T1,image_FLAIR,label,patient_id,case_id"], np.random.default_rng(0)
    for i in range(9):
        files = {name: f"{name}-{i}.nii.gz" for name in ("T1", "FLAIR", "label")}
        for name, file in files.items():
            array = rng.integers(0, 2, (4, 4, 4)) * 7 if name == "label" else np.full((4, 4, 4), i + 10 * len(name))
            array.flat[0] = 0  # an image with only one value is refused
            nib.save(nib.Nifti1Image(array.astype(np.uint8), np.eye(4)), tmp_path / file)
        lines.append(f"{files['T1']},{files['FLAIR']},{files['label']},patient-{i},case-{i}")
    (tmp_path / "cases.csv").write_text("\n".join(lines))
    (tmp_path / "labels.tsv").write_text("index\tname\n0\tbackground\n7\tcore\n")
    counts = [
        "--hospitals",
        "2",
        "--public-images",
        "1",
        "--label-maps",
        "1",
        "--paired",
        "1",
        "--validation",
        "1",
        "--test",
        "1",
    ]
    arguments = ["split", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--seed", "1", *counts]
    assert CliRunner().invoke(app, [*arguments, "--channels", "FLAIR,T1"], catch_exceptions=False).exit_code == 0
    (case,) = read_dataset(tmp_path / "out" / "public" / "paired").labelled
    number = int(case.id.removeprefix("case-"))
    image = np.asanyarray(nib.load(case.image).dataobj)
    assert (image[1:, ..., 0] == number + 50).all()
    assert (image[1:, ..., 1] == number + 20).all()
    drawn = np.asanyarray(nib.load(tmp_path / f"label-{number}.nii.gz").dataobj)
    assert case.label is not None
    np.testing.assert_array_equal(np.asanyarray(nib.load(case.label).dataobj), drawn == 7)


@pytest.mark.parametrize("spoilt", ["image", "label"])
def test_a_file_that_cannot_be_converted_is_refused_with_its_case(spoilt: str, tmp_path: Path) -> None:
    dataset = make(tmp_path)
    case = dataset.cases[0]
    channels = (("MRI", case.image), ("T2", case.image))
    changed = replace(case, channel_files=channels, label_map=((0, 0),))
    dataset = replace(dataset, cases=(changed, *dataset.cases[1:]))
    split = plan_split(dataset, replace(COUNTS, public_images=0, label_maps=0), seed=1)
    file = case.image if spoilt == "image" else case.label
    assert file is not None
    file.write_bytes(b"hello")
    with pytest.raises(InvalidInput, match=f"files of {case.id} cannot be read.*to fix: "):
        write_split(split, dataset, tmp_path / "out")


def test_the_record_names_every_label_map_that_may_not_shape_a_codec(tmp_path: Path) -> None:
    dataset = make(tmp_path)
    split = plan_split(dataset, COUNTS, seed=1)
    write_split(split, dataset, tmp_path / "out")
    private = private_label_hashes(tmp_path / "out" / "split.json")
    assert len(private) == 12 + 2 + 3
    maps = {sha256_file(path) for path in (tmp_path / "out/public/label-maps").iterdir()}
    assert len(maps) == 4
    assert not maps & private
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InvalidInput, match="split"):
        private_label_hashes(tmp_path / "other.json")


@pytest.mark.parametrize("how", ["copied", "converted"])
def test_a_split_that_finds_no_room_names_its_folder_and_leaves_nothing_in_it(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the error named the file that was read, on another disk, and the same command was then refused."""
    dataset = make(tmp_path)
    if how == "converted":
        dataset = replace(dataset, cases=tuple(replace(one, label_map=((0, 0), (1, 1))) for one in dataset.cases))
    plan, out = plan_split(dataset, COUNTS, seed=1), tmp_path / "split"

    def full(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    with monkeypatch.context() as patched:
        patched.setattr("shutil.copyfile", full)
        patched.setattr("nibabel.save", full)
        with pytest.raises(OSError, match=f"No space left on device: '{out}'$"):
            write_split(plan, dataset, out)
    assert not out.exists()
    write_split(plan, dataset, out)
    assert sorted(path.name for path in out.iterdir()) == ["public", "sites", "split.json", "test", "validation"]
