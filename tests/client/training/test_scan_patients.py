"""Tests that a scan stays with its patient: a table lost or corrected after the deal moves nobody to another voter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from client.records.patient_deal import Slots, load_or_deal, load_slots, save_slots
from client.records.scan_patients import check_scans, record_scans
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput

TABLE, FILE, SUBJECT = PatientIdentity.TABLE, PatientIdentity.FILE, PatientIdentity.SUBJECT
SCANS = {"P0": ("scan0", "scan1"), "P1": ("scan2", "scan3"), "M\u00fcller": ("scan4",)}
ALONE = {scan: (scan,) for ids in SCANS.values() for scan in ids}


def train(path: Path, scans: Mapping[str, tuple[str, ...]], identity: PatientIdentity = TABLE) -> Slots:
    """Deal patients to voters as a training does."""
    check_scans(path, scans, identity=identity)
    slots = load_or_deal(path, scans, voters=2)
    record_scans(path, slots, scans, identity=identity)
    return slots


@pytest.fixture
def path(tmp_path: Path) -> Path:
    train(tmp_path / "slots.json", SCANS)
    return tmp_path / "slots.json"


def test_a_table_of_patients_that_is_lost_gives_nobody_a_second_slot_and_can_be_put_back(path: Path) -> None:
    before = {file: file.read_bytes() for file in path.parent.iterdir()}
    with pytest.raises(InvalidInput, match="put the table of patients"):
        train(path, ALONE, FILE)
    assert {file: file.read_bytes() for file in path.parent.iterdir()} == before
    assert train(path, SCANS) == load_slots(path)


def test_a_scan_of_one_patient_is_never_another_patients(path: Path) -> None:
    moved = SCANS | {"P1": ("scan2",), "P2": ("scan3",)}
    before = path.read_bytes()
    with pytest.raises(InvalidInput, match=r"\['scan3'\].*as before, or leave") as caught:
        train(path, moved)
    assert "P1" not in str(caught.value)
    assert path.read_bytes() == before
    train(path, moved | {"P2": ()})  # the remedy
    with pytest.raises(InvalidInput, match="scan3"):  # also after a training without the scan
        train(path, moved)


def test_a_withdrawn_patients_scan_does_not_come_back_under_another_name(path: Path) -> None:
    save_slots(path, load_slots(path).without("P0"))
    with pytest.raises(InvalidInput, match="scan0"):
        train(path, SCANS | {"P0": (), "P9": ("scan0",)})


def test_new_scans_and_new_patients_and_another_spelling_of_a_scan_are_allowed(path: Path) -> None:
    more = SCANS | {"P0": ("scan0", "scan1", "u\u0308"), "new": ("scan9",)}
    assert train(path, more).order[:3] == load_slots(path).order[:3]
    assert train(path, more | {"P0": ("scan0", "\u00fc")}).order == load_slots(path).order


def test_a_table_that_is_added_later_must_leave_each_known_scan_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "slots.json"
    train(path, ALONE, FILE)
    with pytest.raises(InvalidInput, match="another patient"):
        train(path, SCANS, TABLE)
    train(path, ALONE | {"new": ("a", "b")}, TABLE)


def test_patients_named_in_another_way_without_a_known_scan_are_refused(path: Path) -> None:
    with pytest.raises(InvalidInput, match="another way"):
        train(path, {"sub-1": ("sub-1",)}, SUBJECT)


def test_the_record_of_scans_names_nobody_and_holds_for_one_deal_only(path: Path) -> None:
    record = path.with_name("scans.json")
    assert not any(name in record.read_text() for name in ("scan0", "P0", "ller"))
    assert record.stat().st_mode & 0o777 == 0o600
    path.unlink()
    train(path, ALONE, FILE)  # dealt anew, under a new key


def test_a_damaged_record_is_refused(path: Path) -> None:
    path.with_name("scans.json").write_text(json.dumps({"schema": 1}))
    with pytest.raises(InvalidInput, match=r"cannot be read.*backup"):
        train(path, SCANS)
