"""Tests teachers, slots and journals from a backup: no figure is below the truth, and no withdrawn patient
comes back.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.operations.staff_decisions import recover_own
from client.policy import load_site
from client.site.books import open_books
from common.ledger.records import parse_body
from common.privacy.patient_guarantee import UNPROTECTED
from common.privacy.training import Neighbours
from consilium.cli.site import site_app
from tests.client.teachers.written import write_teacher
from tests.restores.training_life import STEPS, Hospital, Truth, add_patients, make_hospital, refused

pytestmark = pytest.mark.slow

Start = Callable[..., Hospital]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {unit: make_hospital(tmp_path_factory.mktemp(unit), unit=unit) for unit in ("patient", "hospital")}


@pytest.fixture
def start(made: dict[str, Path], tmp_path: Path) -> Start:
    def copied(unit: str = "patient") -> Hospital:
        shutil.copytree(made[unit].parent, tmp_path / unit)
        return Hospital(tmp_path / unit / "site")

    return copied


def copy(hospital: Hospital, *names: str) -> dict[str, bytes | None]:
    """Return the content of the files below the site's directory; for a folder, of all files in it."""
    files: dict[str, bytes | None] = {}
    for name in names:
        path = hospital.site / name
        found = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        files |= {str(file.relative_to(hospital.site)): file.read_bytes() for file in found if file.exists()}
    return files


def put_back(hospital: Hospital, files: dict[str, bytes | None], *names: str) -> None:
    """Delete everything under ``names``, and write these files."""
    for name in names:
        path = hospital.site / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for name, content in files.items():
        (hospital.site / name).parent.mkdir(parents=True, exist_ok=True)
        (hospital.site / name).write_bytes(content or b"")


def test_a_training_that_was_killed_goes_on_for_free(start: Start) -> None:
    hospital = start()
    for _ in range(3):
        hospital.train(die_after=1)
    hospital.train()
    hospital.serve()
    hospital.check()
    assert max(map(len, hospital.truth.steps.values())) == STEPS, "no step is drawn twice, and none too many"
    assert hospital.printed()[0] is not None


def test_teachers_restored_from_the_middle_of_a_training_draw_no_step_again_without_a_charge(start: Start) -> None:
    hospital = start()
    hospital.train(die_after=1)
    middle = copy(hospital, "teachers")
    hospital.train()
    hospital.serve()
    once = hospital.printed()
    put_back(hospital, middle, "teachers")
    said = refused(hospital.train)
    assert said is not None
    assert "--again" in said
    assert hospital.printed() == once
    hospital.check()
    for _ in range(3):  # three separate trainings
        hospital.train(again=True)
        hospital.check()
        put_back(hospital, middle, "teachers")
    both = hospital.printed()
    assert both[0]["epsilon"] > 1.3 * once[0]["epsilon"]  # type: ignore[index]


def test_a_training_that_was_set_aside_is_not_forgotten_with_a_ledger_and_standing_from_before_it(start: Start) -> None:
    hospital = start()
    hospital._agree()
    books = ("site-ledger.sqlite", "site-ledger.sqlite-wal", "site-ledger.sqlite-shm", "site-ledger.standing")
    before = copy(hospital, *books)
    hospital.train(die_after=1)
    middle = copy(hospital, "teachers")
    hospital.train()
    put_back(hospital, middle, "teachers")
    hospital.train(again=True)
    hospital.check()
    put_back(hospital, before, *books)  # teachers and journals stay as they are
    hospital.check()
    hospital.train(again=True)
    hospital.check()
    assert hospital.printed() == [None, None]


def test_a_journal_older_than_what_was_drawn_draws_no_step_again(start: Start) -> None:
    hospital = start()
    hospital.train(die_after=1)
    middle = copy(hospital, "teachers")
    hospital.train(die_after=2)  # an incomplete training leaves no hash of a teacher
    put_back(hospital, middle, "teachers")
    assert "2 of the training's" in str(refused(hospital.train)) or "3 of the training's" in str(
        refused(hospital.train)
    )
    hospital.train(again=True)
    hospital.serve()
    hospital.check()


def test_an_older_slots_file_moves_nobody_to_another_voter(start: Start) -> None:
    """If one voter's training crashes, a later patient must not end up in two voters that serve."""
    hospital = start()
    hospital.train(private=False)
    older = copy(hospital, "teachers/slots.json")
    add_patients(hospital.site.parent / "set", range(10))
    hospital.train(private=False)
    hospital.serve()
    for _ in range(4):  # assignment is random, so repeating it from an older file nearly always moves somebody
        put_back(hospital, older, "teachers/slots.json")
        refused(lambda: hospital.train(private=False, crash=[1]))
        refused(hospital.serve)


def test_a_withdrawn_patient_does_not_come_back_with_an_older_slots_file(start: Start) -> None:
    hospital = start()
    hospital.train(private=False)
    older = copy(hospital, "teachers/slots.json")
    whole = copy(hospital, "teachers")
    hospital.withdraw("p2")
    add_patients(hospital.site.parent / "set", range(8))
    for files, names in ((older, ["teachers/slots.json"]), (whole, ["teachers"])):
        put_back(hospital, files, *names)
        hospital.serve()
        hospital.train(private=False)
        assert len(hospital.serve()) == 2


def test_an_older_teacher_of_a_withdrawn_patient_is_silent(start: Start) -> None:
    """The teacher that served on the day of the withdrawal is silent, and so are earlier ones."""
    hospital = start("hospital")
    hospital.train(private=False)
    first = copy(hospital, "teachers/voter-000", "teachers/voter-001")
    add_patients(hospital.site.parent / "set", range(9))
    hospital.train(private=False)
    hospital.withdraw("p2")
    hospital.train(private=False)
    put_back(hospital, first)
    assert len([hash_ for hash_ in hospital.serve() if hash_]) == 1


def test_a_slots_file_that_is_lost_after_a_withdrawal_stops_the_deal_until_any_copy_is_back(start: Start) -> None:
    hospital = start()
    hospital.train(private=False)
    older = copy(hospital, "teachers/slots.json")
    hospital.withdraw("p2")
    (hospital.site / "teachers" / "slots.json").unlink()
    assert "slots*.json" in str(refused(lambda: hospital.train(private=False)))
    put_back(hospital, older, "teachers/slots.json")
    hospital.train(private=False)
    hospital.serve()


def test_a_directory_that_lost_its_site_toml_trains_nothing(start: Start) -> None:
    hospital = start()
    hospital.train(private=False)
    (hospital.site / "site.toml").unlink()
    text = str(refused(lambda: hospital.train(private=False)))
    assert "site.toml" in text
    assert os.strerror(errno.ENOENT) in text


Unprotected = Callable[[Hospital], None]


def brings_one(hospital: Hospital) -> None:
    hospital.bring(0)


def lays_one_in(hospital: Hospital) -> None:
    write_teacher(hospital.site / "teachers" / "voter-001", seed=99)


def trains_one_without_a_guarantee(hospital: Hospital) -> None:
    hospital.train(private=False, crash=[0])


def served_it_before(hospital: Hospital) -> None:
    """Put a foreign teacher in place, let it answer, then restore the earlier folder of teachers."""
    kept = copy(hospital, "teachers")
    lays_one_in(hospital)
    hospital.serve()
    put_back(hospital, kept, "teachers")


@pytest.mark.parametrize(
    "act", [brings_one, lays_one_in, trains_one_without_a_guarantee, served_it_before], ids=lambda act: act.__name__
)
def test_a_teacher_that_no_private_training_made_leaves_no_figure(start: Start, act: Unprotected) -> None:
    hospital = start("hospital")
    hospital.train()
    hospital.serve()
    assert None not in hospital.printed()
    act(hospital)
    assert hospital.printed() == [None, None], "before the worker is started again"
    hospital.serve()
    assert hospital.printed() == [None, None]
    shown = CliRunner().invoke(site_app, ["status", "--site-dir", str(hospital.site)]).stdout
    assert f"{UNPROTECTED}: no patient-level ε" in shown
    assert "all trainings composed" not in shown


def test_teachers_of_before_site_toml_leave_no_figure_while_one_of_them_is_there(start: Start) -> None:
    hospital = start("hospital")
    for voter in range(2):
        write_teacher(hospital.site / "teachers" / f"voter-{voter:03d}", seed=voter)
    hospital.train(crash=[1])  # exit 7: voter 1 keeps its earlier teacher
    assert hospital.printed() == [None, None]
    hospital.train()
    assert None not in hospital.printed()
    hospital.check()


def test_after_the_ledger_was_recovered_nobody_can_say_what_was_served(start: Start) -> None:
    hospital = start("hospital")
    hospital.train()
    hospital.serve()
    shutil.copy(hospital.site / "site-ledger.sqlite", hospital.site / "older.sqlite")
    hospital.serve()
    shutil.move(hospital.site / "older.sqlite", hospital.site / "site-ledger.sqlite")
    recover_own(hospital.site, standing=None, charge_all=False)
    assert hospital.printed() == [None, None]


def test_a_second_teacher_of_one_training_counts_its_charge_again(start: Start) -> None:
    """An earlier version, whose journals had no witness, left such a teacher."""
    hospital = start()
    hospital.train()
    with open_books(load_site(hospital.site)) as ledger:
        z = next(float(one.event.noise_multiplier) for one in ledger.trainings().private if one.event is not None)
        (first, *_) = [parse_body(row.body) for row in ledger.rows() if row.kind == "training"]
        once = ledger.trainings().guarantee(delta=1e-3, neighbours=Neighbours.ADD_REMOVE)
        ledger.record_trained(str(first["training"]), "d" * 64)
        twice = ledger.trainings().guarantee(delta=1e-3, neighbours=Neighbours.ADD_REMOVE)
    assert once is not None
    assert twice is not None
    assert once.epsilon == pytest.approx(1.0, abs=2e-3)
    truth = Truth({"p": [z] * 2 * STEPS})
    assert twice.epsilon == pytest.approx(truth.epsilon(delta=1e-3, moved=1), abs=1e-6)
    assert twice.epsilon > 1.4


def test_a_brought_teacher_is_silent_once_a_patient_left_until_it_is_brought_again(start: Start) -> None:
    hospital = start("hospital")
    hospital.train()
    hospital.bring(0)
    hospital.bring(1)
    assert all(hospital.serve())
    hospital.withdraw("p2")
    assert hospital.serve() == ("", ""), "whichever voter the patient sat in: nobody knows whom it has seen"
    hospital.bring(0)  # a person states that this teacher was not trained on the patient
    assert [bool(hash_) for hash_ in hospital.serve()] == [True, False]
