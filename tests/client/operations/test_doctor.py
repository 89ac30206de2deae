"""Tests the doctor: a verdict on every case, patients' names only on the terminal, pictures, and an exit code."""

from __future__ import annotations

import gzip
import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from typer.testing import CliRunner

from client.data.layouts import DatasetSettings
from client.operations.doctor import check_data
from client.operations.findings import State
from common.config import DataConfig
from common.data.dataset import PatientIdentity
from common.privacy.mechanism import Unit
from consilium.cli.site import site_app
from tests.common.data.corpus import NAME, ONE, RULES
from tests.dicom_files import write_series
from tests.worlds import make_privacy, study_toml

pytestmark = pytest.mark.slow

SEEN = {
    "dtype-uint16": "ok",
    "nifti-2": "ok",
    "label-in-another-axis-order": "note",
    "gzip-under-a-plain-name": "note",
    "label-empty": "note",
    "voxel-nan": "fail",
    "label-moved-by-five-mm": "fail",
    "gzip-cut": "fail",
    "constant": "fail",
}

OF_ONE_SCAN = [name for name, state in SEEN.items() if state != "fail"] + ["label-moved-by-five-mm"]

STUDY = study_toml("core", "rim")


def table(root: Path, rules: list[str]) -> Path:
    rows = ["case_id,patient_id,image,label"]
    for position, name in enumerate(rules):
        folder = root / f"{position}"
        folder.mkdir(parents=True)
        case = RULES[name]().write(folder)
        if name in OF_ONE_SCAN:  # the corpus has one scan, so give every case another patient
            content = case.image.read_bytes()
            packed = content[:2] == b"\x1f\x8b"
            content = (gzip.decompress(content) if packed else content)[:-2] + struct.pack("<h", 60 + position)
            case.image.write_bytes(gzip.compress(content) if packed else content)
        paths = [path.relative_to(root) for path in (case.image, case.label) if path is not None]
        rows.append(f"{NAME}-{position:02d},{NAME}-p{position},{paths[0]},{paths[1]}")
    (root / "cases.csv").write_text("\n".join(rows) + "\n")
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = table(tmp_path_factory.mktemp("doctor"), list(SEEN))
    (root / "study.toml").write_text(STUDY)
    return root


def test_every_case_gets_the_corpus_own_verdict_and_the_odd_ones_say_why(root: Path) -> None:
    findings = check_data(root, ONE, DatasetSettings())
    cases = {finding.number: finding for finding in findings if finding.check == "case"}
    for number, (rule, state) in enumerate(SEEN.items(), start=1):
        assert (cases[number].state if number in cases else "ok") == state, rule
        if state == "fail":
            assert cases[number].remedy
        if number in cases:
            assert cases[number].text
            assert cases[number].subject == f"{NAME}-{number - 1:02d}"
    summary = next(finding for finding in findings if finding.check == "cases")
    assert re.findall(r"\d+", summary.text)[:4] == ["9", "2", "3", "4"]  # all, good, odd and used, left out
    assert "site evaluate" in summary.text
    assert summary.state is State.OK


def test_the_terminal_names_cases_and_the_report_does_not(root: Path, tmp_path: Path) -> None:
    (tmp_path / "out/pictures").mkdir(parents=True)
    (tmp_path / "out/pictures/case-0099.png").write_bytes(b"of an earlier look")
    arguments = ["doctor", "--data", str(root), "--study", str(root / "study.toml"), "--report", str(tmp_path / "out")]
    done = CliRunner().invoke(site_app, arguments, catch_exceptions=False, env={"COLUMNS": "400"})
    assert done.exit_code == 8
    assert f"{NAME}-05" in done.stdout
    page = (tmp_path / "out/doctor.html").read_text()
    record = (tmp_path / "out/doctor.json").read_text()
    for text in (page, record):
        assert "Jane" not in text
        assert "NaN or infinite" in text
    pictures = sorted(path.name for path in (tmp_path / "out/pictures").iterdir())
    assert pictures == ["case-0003.png", "case-0004.png", "case-0005.png", "case-0007.png"]
    assert all(f"pictures/{name}" in page for name in pictures)
    for path in ((tmp_path / "out/pictures"), *(tmp_path / "out/pictures").iterdir()):
        assert path.stat().st_mode & 0o077 == 0  # they show patients
    states = re.findall(r'class="chip (\w+)"', page)
    assert states == ["fail"] * 4 + ["note"] * 3 + ["ok"] * 2  # failures come first
    assert json.loads(record)["counts"] == {"ok": 2, "note": 3, "fail": 4}


def test_machines_get_json_without_names_and_the_same_exit_code(root: Path) -> None:
    arguments = ["doctor", "--data", str(root), "--study", str(root / "study.toml"), "--json"]
    done = CliRunner().invoke(site_app, arguments, catch_exceptions=False)
    assert done.exit_code == 8
    assert json.loads(done.stdout)["counts"]["fail"] == 4
    assert "Jane" not in done.stdout


def make_good(root: Path, count: int, *, small: int | None = None, copy: tuple[int, int] | None = None) -> Path:
    rows = ["case_id,image,label"]
    for i in range(count):
        labels = np.zeros((8, 8, 8), dtype=np.uint8)
        labels[1:7, 1:7, 1:4] = 1
        labels[1:7, 1:7, 4:7] = 2
        if i == small:
            labels[labels == 2] = 0
            labels[3, 3, 5] = 2
        seed = copy[0] if copy and i == copy[1] else i
        image = np.random.default_rng(seed).integers(10, 99, (8, 8, 8)).astype(np.int16)
        root.mkdir(exist_ok=True)
        for kind, array in (("image", image), ("label", labels)):
            stored = nib.Nifti1Image(array, np.eye(4))
            stored.header["descrip"] = f"file {i}"  # so that no two files are the same bytes
            nib.save(stored, root / f"{i}-{kind}.nii.gz")
        rows.append(f"c{i},{i}-image.nii.gz,{i}-label.nii.gz")
    (root / "cases.csv").write_text("\n".join(rows) + "\n")
    return root


def test_a_good_dataset_needs_no_repair_and_says_what_counts_as_a_patient(tmp_path: Path) -> None:
    findings = check_data(make_good(tmp_path / "set", 9), ONE, DatasetSettings())
    assert {finding.state for finding in findings} == {State.NOTE, State.OK}
    assert PatientIdentity.FILE.sentence in findings[0].text
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    arguments = ["doctor", "--data", str(tmp_path / "set"), "--study", str(study)]
    assert CliRunner().invoke(site_app, arguments, catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize(
    ("named", "mapped", "found"),
    [("CT", False, True), ("CT", True, False), ("T1", False, False), ("MRI", False, False)],
)
def test_a_dataset_of_another_modality_than_the_studys_is_a_failure(
    tmp_path: Path, named: str, mapped: bool, found: bool
) -> None:
    root = make_good(tmp_path / "set", 3)
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir()
    for i in range(3):
        (root / f"{i}-image.nii.gz").rename(root / "imagesTr" / f"c{i}_0000.nii.gz")
        (root / f"{i}-label.nii.gz").rename(root / "labelsTr" / f"c{i}.nii.gz")
    (root / "cases.csv").unlink()
    labels = {name: value for value, name in enumerate(ONE.labels)}
    index = {"channel_names": {"0": named}, "labels": labels, "numTraining": 3, "file_ending": ".nii.gz"}
    (root / "dataset.json").write_text(json.dumps(index))
    settings = DatasetSettings(channels={named: ONE.channels[0]} if mapped else {})
    (one,) = [one for one in check_data(root, ONE, settings) if one.check == "modality"] or [None]
    assert (one is not None) == found
    assert one is None or (one.state, one.subject) == (State.FAIL, "CT")


def with_images(root: Path, count: int, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """Write a good dataset and change the first ``count`` images."""
    make_good(root, 3)
    for i in range(count):
        image = nib.load(root / f"{i}-image.nii.gz")
        nib.save(nib.Nifti1Image(change(np.asarray(image.dataobj)), np.eye(4)), root / f"{i}-image.nii.gz")
    return root


def in_hounsfield(image: np.ndarray) -> np.ndarray:
    image[:2], image[2:4] = -1000, -image[2:4]
    return image


def modality_findings(root: Path, data: DataConfig = ONE) -> list[State]:
    return [one.state for one in check_data(root, data, DatasetSettings()) if one.check == "modality"]


@pytest.mark.parametrize(("count", "found"), [(3, [State.FAIL]), (1, [State.NOTE]), (0, [])])
def test_scans_in_hounsfield_units_cannot_be_those_of_an_mri_study(
    tmp_path: Path, count: int, found: list[State]
) -> None:
    root = with_images(tmp_path / "set", count, in_hounsfield)
    assert modality_findings(root) == found
    assert modality_findings(root, replace(ONE, channels=("CT",))) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda image: image.astype(np.float32) - 950.25,  # without its mean
        lambda image: image.astype(np.float32) / 99,
        lambda image: (image.astype(np.int16) - 50) * 80,  # as a phase: on both sides of -1000
    ],
)
def test_no_mri_is_taken_for_ct_by_its_values(tmp_path: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    assert modality_findings(with_images(tmp_path / "set", 3, change)) == []


@pytest.mark.parametrize(("modality", "found"), [("CT", [State.FAIL]), ("MR", [])])
def test_a_dicom_series_of_another_modality_than_the_studys_is_a_failure(
    tmp_path: Path, modality: str, found: list[State]
) -> None:
    root, rows = tmp_path / "set", ["case_id,image"]
    for i in range(2):
        scan = np.random.default_rng(i).integers(10, 99, (8, 8, 8)).astype(np.uint16)
        write_series(root / f"series-{i}", scan, uid=f"1.2.3.{i + 1}", modality=modality)
        rows.append(f"c{i},series-{i}")
    (root / "cases.csv").write_text("\n".join(rows) + "\n")
    assert modality_findings(root) == found


def test_a_delta_that_is_large_for_the_sites_own_patients_is_noted_at_unit_patient(tmp_path: Path) -> None:
    data = make_good(tmp_path / "set", 9)
    for unit, delta, noted in (("patient", 0.02, True), ("patient", 0.01, False), ("hospital", 0.02, False)):
        stated = make_privacy(delta=delta, unit=Unit(unit))
        found = [one for one in check_data(data, ONE, DatasetSettings(), stated=stated) if one.check == "delta"]
        assert [one.state for one in found] == ([State.NOTE] if noted else [])
        assert all("1/(10 · 9 patients)" in one.text for one in found)


def test_a_structure_of_unusual_size_is_shown_to_a_person_and_still_used(tmp_path: Path) -> None:
    findings = check_data(make_good(tmp_path / "set", 9, small=4), ONE, DatasetSettings())
    case = next(finding for finding in findings if finding.check == "case")
    assert (case.number, case.state) == (5, State.NOTE)
    assert re.search(r"rim .*0\.001 ml, 108 times", case.text)


def test_one_scan_stored_twice_in_different_bytes_is_found(tmp_path: Path) -> None:
    findings = check_data(make_good(tmp_path / "set", 4, copy=(0, 2)), ONE, DatasetSettings())
    case = next(finding for finding in findings if finding.check == "case")
    assert (case.number, case.state) == (3, State.FAIL)
    assert "case 1," in case.text


def test_patients_whose_names_look_alike_are_named_to_a_person_and_stay_two(tmp_path: Path) -> None:
    root = make_good(tmp_path / "set", 5)
    names = ["pat\u20131", "pat-1", "p\u0430t-1", "pat-2", "pat-20"]  # an en dash, a hyphen, a Cyrillic letter
    (root / "patients.csv").write_text("\n".join(["case_id,patient_id", *(f"c{i},{n}" for i, n in enumerate(names))]))
    counted, alike = (one for one in check_data(root, ONE, DatasetSettings()) if one.check == "patients")
    assert counted.text.startswith("5 patients")
    assert (alike.state, alike.text[:28]) == (State.NOTE, "3 names of patients look lik")
    assert alike.subject == r"'pat-1', 'pat\u20131', 'p\u0430t-1'"
    assert "pat-" not in alike.text + alike.remedy


def test_a_dataset_that_cannot_be_used_is_one_failure_with_its_names_off_the_report(tmp_path: Path) -> None:
    root = make_good(tmp_path / "set", 3)
    (root / "patients.csv").write_text("case_id,patient_id\nc0,a\n")
    (finding,) = check_data(root, ONE, DatasetSettings())
    assert (finding.check, finding.state) == ("dataset", State.FAIL)
    assert "c1" in finding.subject
    assert "c1" not in finding.text + finding.remedy
    other = DataConfig(labels=("background", "liver"), spacing_mm=(1, 1, 1), grid=(8, 8, 8))
    (root / "labels.tsv").write_text("index\tname\n1\tcore\n")
    (root / "patients.csv").unlink()
    (finding,) = check_data(root, other, DatasetSettings())
    assert "--label-map" in finding.remedy
