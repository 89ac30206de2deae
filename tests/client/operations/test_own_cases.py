"""Tests the cases on a hospital's own page: no withdrawn patient, all others, and no prediction from an older file."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from client.data.cases import record_cases
from client.operations import own_cases, staff_decisions
from client.operations.own_cases import ADAPTED, KEPT_CASES, OWN, STUDENT, OwnCases
from client.policy import load_site
from client.records.adapted_folder import FOLDER, NAME, SEEN_FILE
from client.site.books import open_books
from client.site.deals import deal_for_training, patients_seen
from client.teachers.pulled_student import STUDENT_DIR
from common.config import load_study
from common.data.dataset import Problem
from common.data.msd import read_dataset
from common.errors import InvalidInput
from common.models.bundle import SEEN_WEIGHTS
from common.models.student_bundle import WEIGHTS
from common.models.unet import build_unet, weights_to_bytes
from tests.own_site import make_own_site
from tests.trained_sites import train_site

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_own_site(tmp_path_factory.mktemp("trained"), "after-a-student").parent


@pytest.fixture
def site(trained: Path, tmp_path: Path) -> Path:
    """Return a copy of a site with all three networks, its data included."""
    shutil.copytree(trained, tmp_path / "root")
    text = (tmp_path / "root" / "site" / "site.toml").read_text()
    (tmp_path / "root" / "site" / "site.toml").write_text(text.replace(str(trained), str(tmp_path / "root")))
    return tmp_path / "root" / "site"


@pytest.fixture
def predicted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record which cases are predicted, in order."""
    seen: list[str] = []
    made = OwnCases._predicted

    def noted(self: OwnCases, case, networks):
        seen.append(case.id)
        return made(self, case, networks)

    monkeypatch.setattr(OwnCases, "_predicted", noted)
    return seen


def cases_of(site: Path) -> OwnCases:
    config = load_site(site)
    return OwnCases(site, config, load_study(site / "study.toml"))


def other_weights(seed: int) -> bytes:
    """Return weights of the student's network that give another label in every voxel."""
    return weights_to_bytes(build_unet((4, 8), in_channels=1, out_channels=3, seed=seed))


def ids(site: Path) -> list[str]:
    return [case.id for case in read_dataset(site.parent / "data").labelled]


def test_a_case_that_did_not_change_is_predicted_once(site: Path, predicted: list[str]) -> None:
    cases = cases_of(site)
    first = cases.shown(0)
    cases.listed()
    assert cases.shown(0) is first
    assert set(first.arrays) == {"image", "label", STUDENT, OWN, ADAPTED}
    assert predicted == ids(site)[:1]


@pytest.mark.parametrize("name", [STUDENT, ADAPTED])
def test_a_new_student_or_adapted_network_is_shown_without_a_restart(site: Path, name: str) -> None:
    """The new file has the older one's size, and its modification time is set back to the older one's."""
    places = {
        STUDENT: site / STUDENT_DIR / "bundle" / WEIGHTS,
        ADAPTED: site / FOLDER / f"{NAME}-north" / SEEN_WEIGHTS,
    }
    cases, path = cases_of(site), places[name]
    before, stat = cases.shown(0), path.stat()
    path.write_bytes(other_weights(seed=77))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert path.stat().st_size == stat.st_size
    after = cases.shown(0)
    assert not np.array_equal(before.arrays[name], after.arrays[name])
    assert all(np.array_equal(before.arrays[one], after.arrays[one]) for one in {STUDENT, ADAPTED, OWN} - {name})


def test_new_weights_of_the_own_teachers_are_shown_without_a_restart(site: Path) -> None:
    study, cases = load_study(site / "study.toml"), cases_of(site)
    before = cases.shown(0)
    recipe = replace(study.teacher, steps=9, learning_rate=0.05)
    train_site(read_dataset(site.parent / "data"), teachers=site / "teachers", data=study.data, recipe=recipe, voters=1)
    after = cases.shown(0)
    assert not np.array_equal(before.arrays[OWN], after.arrays[OWN])
    assert np.array_equal(before.arrays[STUDENT], after.arrays[STUDENT])


def test_a_network_that_was_deleted_is_noticed(site: Path) -> None:
    cases = cases_of(site)
    cases.shown(0)
    shutil.rmtree(site / FOLDER)
    assert set(cases.shown(0).arrays) == {"image", "label", STUDENT, OWN}
    shutil.rmtree(site / STUDENT_DIR)
    assert cases.networks() == {}


def test_a_scan_or_label_that_was_replaced_is_read_again(site: Path) -> None:
    cases, (one, other) = cases_of(site), read_dataset(site.parent / "data").labelled[:2]
    before = cases.shown(0)
    shutil.copy(other.image, one.image)
    assert not np.array_equal(before.arrays["image"], (now := cases.shown(0)).arrays["image"])
    shutil.copy(other.label, one.label)
    assert not np.array_equal(now.arrays["label"], cases.shown(0).arrays["label"])


def test_no_more_cases_stay_in_memory_than_are_said(
    site: Path, predicted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_cases, "KEPT_CASES", 2)
    cases = cases_of(site)
    for number in (0, 1, 0, 2, 0, 1):
        cases.shown(number)
        assert len(cases._kept) <= 2 < KEPT_CASES
    a, b, c, _ = ids(site)
    assert predicted == [a, b, c, b]  # the least recently shown case is dropped


def test_no_case_of_a_withdrawn_patient_is_shown_and_the_training_agrees(site: Path) -> None:
    cases, (_, gone, *_) = cases_of(site), ids(site)
    assert cases.listed().numbers == (0, 1, 2, 3)
    cases.shown(1)
    staff_decisions.withdraw_patient(site, gone)
    with pytest.raises(InvalidInput, match="case: got 2"):
        cases.shown(1)  # before any page was loaded again
    found = cases.listed()
    assert (found.numbers, found.withdrawn, found.left_out, found.problem) == ((0, 2, 3), 1, 0, "")
    assert deal_for_training(load_site(site), ids(site)) == {gone}


def test_a_withdrawal_leaves_nothing_of_the_patient_in_memory_and_silences_the_teacher(site: Path) -> None:
    cases = cases_of(site)
    assert OWN in cases.shown(0).arrays
    cases.shown(1)
    staff_decisions.withdraw_patient(site, ids(site)[1])
    assert OWN not in cases.shown(0).arrays  # its one voter was trained on the patient
    assert len(cases._kept) == 1


def test_an_adapted_network_that_saw_a_withdrawn_patient_is_no_longer_shown(site: Path) -> None:
    """A network trained anew on the remaining patients is shown. A bundle that does not list its patients is not."""
    bundle, books = site / FOLDER / f"{NAME}-north", load_site(site).books_dir
    _, gone, *_ = everybody = ids(site)
    (bundle / SEEN_FILE).write_text(json.dumps(patients_seen(books, everybody)))
    cases = cases_of(site)
    assert ADAPTED in cases.shown(0).arrays
    assert cases.outdated() is None
    staff_decisions.withdraw_patient(site, gone)
    assert ADAPTED not in cases.shown(0).arrays
    assert cases.outdated() == bundle
    (bundle / SEEN_FILE).write_text(json.dumps(patients_seen(books, set(everybody) - {gone})))
    assert ADAPTED in cases.shown(0).arrays
    (bundle / SEEN_FILE).unlink()
    assert ADAPTED not in cases.shown(0).arrays


def test_the_page_counts_the_cases_that_trained_the_adapted_network(site: Path) -> None:
    """`site adapt --data` can train on other patients than those the page shows."""
    bundle, books = site / FOLDER / f"{NAME}-north", load_site(site).books_dir
    cases, everybody = cases_of(site), ids(site)
    cases.listed()
    for seen, count in ((everybody, len(everybody)), (everybody[:1], 1), (["somebody-else"], 0)):
        (bundle / SEEN_FILE).write_text(json.dumps(patients_seen(books, seen)))
        assert cases.adapted_on() == count


@pytest.mark.parametrize("forgets", ["slots", "ledger"])
def test_one_of_slots_file_and_ledger_is_enough_to_know_who_was_withdrawn(site: Path, forgets: str) -> None:
    slots, config = site / "teachers" / "slots.json", load_site(site)
    older = slots.read_bytes()
    staff_decisions.withdraw_patient(site, ids(site)[1])
    if forgets == "slots":
        slots.write_bytes(older)
    else:
        for path in site.glob(f"{config.ledger_file.name.partition('.')[0]}.*"):
            path.unlink()
    assert cases_of(site).listed().numbers == (0, 2, 3)


def test_nothing_is_shown_if_the_withdrawn_patients_are_unknown(site: Path) -> None:
    cases = cases_of(site)
    staff_decisions.withdraw_patient(site, ids(site)[1])
    cases.shown(0)
    (site / "teachers" / "slots.json").unlink()
    with pytest.raises(InvalidInput, match=r"slots\*\.json"):
        cases.shown(0)
    found = cases.listed()
    assert found.numbers == ()
    assert "slots file" in found.problem
    assert not cases._kept


def test_nothing_is_shown_by_an_older_copy_of_the_ledger(site: Path) -> None:
    ledger = load_site(site).ledger_file
    older, slots = ledger.read_bytes(), (site / "teachers" / "slots.json").read_bytes()
    staff_decisions.withdraw_patient(site, ids(site)[1])
    with open_books(load_site(site)):
        pass
    ledger.write_bytes(older)
    (site / "teachers" / "slots.json").write_bytes(slots)
    found = cases_of(site).listed()
    assert (found.numbers, found.withdrawn) == ((), 0)
    assert "recover --own-ledger" in found.problem


def test_cases_that_the_site_leaves_out_are_not_shown_and_counted(site: Path) -> None:
    cases, dataset = cases_of(site), read_dataset(site.parent / "data")
    a, b, *_ = ids(site)
    cases.listed()
    record_cases(site / "teachers", dataset, [Problem(a, "blurred"), Problem("not-listed", "elsewhere")])
    with pytest.raises(InvalidInput, match="case: got 1"):
        cases.shown(0)
    found = cases.listed()
    assert (found.numbers, found.left_out, found.withdrawn) == ((1, 2, 3), 1, 0)
    staff_decisions.withdraw_patient(site, a)
    found = cases.listed()
    assert (found.numbers, found.left_out, found.withdrawn) == ((1, 2, 3), 0, 1)
    (site / "teachers" / "cases.json").write_text(json.dumps({"schema": 1}))
    assert "site train" in cases.listed().problem
    (site / "teachers" / "cases.json").unlink()
    next((site.parent / "data").rglob(f"labelsTr/{b}*")).unlink()
    assert cases.listed().left_out == 1  # the dataset's index still lists the case
