"""Tests a hospital after any restore of its files: it refuses with a remedy, or keeps every promise to its patients.

After each restore a person looks at the status, starts the worker, trains (one voter dies the first time, exit 7),
trains with newcomers, and follows the remedy that a refusal names. Then no ε is printed below the truth, no withdrawn
patient votes or is trained on, no patient is in two served voters, and no step of a private training was drawn without
a charge.

Two things nobody can know here if ledger and standing are both older than the latest: what was served since, and, if
the journals are older too, what was drawn. The server's next receipt reveals such a machine (docs/ledger.md).
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, combinations
from pathlib import Path

import numpy as np
import pytest

from client.foreign.bring import remove
from client.ledger.site_teachers import KeepsTeachers
from client.operations.staff_decisions import decide, recover_own
from client.policy import load_site
from client.records.declared import has_foreign
from client.records.journal import TrainingJournal
from client.site import deals, status
from client.site.books import read_books
from client.training.private import charge
from common.errors import ConsiliumError, Refused
from common.ledger.site_teachers import TeacherBooks
from common.privacy.patient_guarantee import Trainings
from tests.restores.harness import Case, Moment, Part, cases, keep, look_at, unclassified
from tests.restores.training_life import Hospital, Truth, add_patients, make_hospital, refused

pytestmark = pytest.mark.slow

PARTS = (
    Part("ledger", ("site-ledger.sqlite*",)),
    Part("standing", ("site-ledger.standing",)),
    Part("slots", ("teachers/slots*.json", "teachers/scans*.json")),
    Part("journals", ("teachers/voter-*/journal-*",)),
    Part("checkpoints", ("teachers/voter-*/checkpoint.pt",)),
    Part("weights", ("teachers/voter-*/weights.pt", "teachers/voter-*/train.json")),
    Part("brought", ("teachers/voter-*/foreign.json",)),
    Part("site.toml", ("site.toml",)),
)
TEACHERS = tuple(part.name for part in PARTS if part.name not in ("ledger", "standing", "site.toml"))
LEAVING = (
    Part("leaving slots", ("adapted/trainings/slots.json", "adapted/trainings/scans.json")),
    Part("leaving journals", ("adapted/private/*/journal-*",)),
    Part("leaving networks", ("adapted/private/*/[ctw]*", "adapted/*-may-leave-*")),
)
"""Further parts of a hospital that adapts the student."""
HARMLESS = (
    "site-ledger.key",  # it never changes, and the ledger cannot be written without it
    "declined.json",  # an older one forgets a declined offer, which would be accepted within minutes and charged
    "study.toml",  # no worker starts with another study: tests/client/site
    "ca.crt",
    "node/keys/*",
    "teachers/.lock",
    "teachers/cases.json",  # cases that were left out; only the site reads it
    "student/*",  # compared with the server's signature: tests/client/adapting
)
ALL = os.environ.get("CONSILIUM_RESTORES") == "all"


@dataclass(frozen=True)
class Facts:
    """States what is true at a moment."""

    truth: Truth
    patients: int


@dataclass(frozen=True)
class Life:
    """Holds a finished life, and the folder in which its copies are examined."""

    name: str
    moments: list[Moment[Facts]]
    folder: Path

    @property
    def parts(self) -> tuple[Part, ...]:
        return (*PARTS, *(LEAVING if self.name == "leaving" else ()))


def of_patients(hospital: Hospital) -> Iterator[str]:
    """Yield the points of a life with private trainings in a study of unit patient, newcomers, a crash and a
    withdrawal.
    """
    hospital.train(die_after=1)
    yield "begun"
    hospital.train(die_after=2)
    yield "further"
    hospital.train()
    hospital.serve()
    yield "served"
    add_patients(hospital.site.parent / "set", range(8))
    hospital.train(again=True, crash=[1])
    yield "one voter crashed"
    hospital.train(again=True)
    hospital.serve()
    yield "newcomers"
    hospital.withdraw("p2")
    yield "withdrawn"
    add_patients(hospital.site.parent / "set", range(9))
    hospital.train(again=True)
    hospital.serve()
    yield "retrained"


def of_a_hospital(hospital: Hospital) -> Iterator[str]:
    """Yield the points of a life with a private training, a foreign teacher that is removed again, and a withdrawal."""
    hospital.train()
    hospital.serve()
    yield "served"
    hospital.bring(0)
    yield "brought"
    hospital.withdraw("p2")
    hospital.serve()
    yield "withdrawn"
    hospital.bring(0)
    hospital.serve()
    yield "brought again"


def of_a_network_that_may_leave(hospital: Hospital) -> Iterator[str]:
    """Yield the points of a life with private teachers and two private adaptations, one of them interrupted."""
    hospital.train()
    hospital.serve()
    yield "served"
    hospital.adapt(again=True, die_after=2)
    yield "begun"
    hospital.adapt(again=True)
    yield "adapted"
    hospital.train(again=True)
    hospital.serve()
    yield "trained again"


PATIENTS = {"one voter crashed": 8, "newcomers": 8, "withdrawn": 8, "retrained": 9}
"""Number of patients in the dataset at a moment, if it is larger than at first."""

LIVES = {"patient": of_patients, "hospital": of_a_hospital, "leaving": of_a_network_that_may_leave}


@pytest.fixture(scope="module", params=LIVES)
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Life:
    root = tmp_path_factory.mktemp(request.param)
    hospital = Hospital(make_hospital(root, unit="patient" if request.param == "leaving" else request.param))
    moments = []
    for name in LIVES[request.param](hospital):
        facts = Facts(deepcopy(hospital.truth), PATIENTS.get(name, 6))
        moments.append(keep(hospital.site, root / "moments" / name, name, facts))
        assert unclassified(hospital.site, (*PARTS, *LEAVING), HARMLESS) == []
    shutil.rmtree(hospital.site)
    return Life(request.param, moments, hospital.site)


class Person:
    """Acts as a person who does exactly what a refusal names as the remedy."""

    def __init__(self, hospital: Hospital, moments: list[Moment[Facts]]) -> None:
        self.hospital, self.first, self.again = hospital, moments[0].folder, False
        self.out: Path | None = None
        self.did: set[str] = set()

    def heeds(self, error: ConsiliumError) -> bool:
        """Follow the remedy in a refusal; return False if it names none that this person can follow."""
        text, site = str(error), self.hospital.site
        assert "to fix:" in text or isinstance(error, Refused), text
        if "slots*.json" in text:
            self.did.add("put a file back")
            (site / "teachers").mkdir(exist_ok=True)
            shutil.copy(self.first / "teachers" / "slots.json", site / "teachers" / "slots.json")
        elif "site.toml" in text and os.strerror(errno.ENOENT) in text:
            self.did.add("put a file back")
            shutil.copy(self.first / "site.toml", site / "site.toml")
        elif re.search("the site ledger .*missing.* standing|the site ledger of this patient pool is missing", text):
            self.did.add("put a file back")
            shutil.copy(self.first / "site-ledger.sqlite", site / "site-ledger.sqlite")
        elif "recover --own-ledger" in text:
            self.did.add("recovered the ledger")
            self.recovers()
        elif "site teacher remove" in text:
            self.did.add("removed a teacher")
            for voter in range(2):
                if has_foreign(site / "teachers", voter):
                    remove(site, voter)
        elif "--out" in text and self.out is None:
            self.did.add("chose another folder")
            self.out = site / "adapted" / "second"
        elif "--again" in text:
            self.did.add("paid again")
            self.again = True
        elif "site train" in text:
            self.did.add("trained")
            try:
                self.trains()
            except ConsiliumError as nested:
                return self.heeds(nested)
        elif "site teacher add" in text:
            self.did.add("brought it again")
            self.hospital.bring(0)
        elif "paused" in text or "budget" in text:
            return False
        else:
            raise AssertionError(f"nobody could do what this says: {text}")
        return True

    def recovers(self) -> None:
        site = self.hospital.site
        said = refused(lambda: recover_own(site, standing=None, charge_all=False))
        if said is not None:
            assert "--charge-all" in said
            recover_own(site, standing=None, charge_all=True)
        for patient in sorted(self.hospital.truth.withdrawn):
            said = refused(partial(self.hospital.withdraw, patient))
            assert said is None or any(
                known in said for known in (f"case: got {patient!r}", "`consilium site train`")
            ), said
        decide(site, "trial", "resume")

    def trains(self) -> None:
        self.hospital.train(again=self.again)

    def adapts(self) -> None:
        self.hospital.adapt(again=self.again, out=self.out)


def look(life: Life, case: Case, folder: Path, facts: Facts) -> str:
    hospital = Hospital(folder, deepcopy(facts.truth))
    hospital.asked, person = 1000, Person(hospital, life.moments)
    blind = case.older("ledger") and case.older("standing")
    if blind and case.older("slots"):  # no file shows a withdrawal until a person repeats it
        hospital.truth.withdrawn.clear()
        hospital.truth.doubtful.clear()

    def looks() -> None:
        journals = case.older("journals") or (bool(facts.truth.leaving) and case.older("leaving journals"))
        hospital.check(steps=not (blind and journals), served=not blind)

    def crashes() -> None:
        hospital.train(again=person.again, crash=[1])

    def grows() -> None:
        add_patients(folder.parent / "set", range(10))
        person.trains()

    add_patients(folder.parent / "set", range(facts.patients))
    acts = [hospital.serve, crashes, hospital.serve, person.trains, hospital.serve, grows, hospital.serve]
    if life.name == "leaving":
        acts[:0] = [person.adapts]
    for act in (looks, *chain.from_iterable((act, looks) for act in acts)):
        for _ in range(8):
            try:
                act()
            except ConsiliumError as error:
                if not person.heeds(error):
                    break
            else:
                break
        else:
            raise AssertionError("refused for good")
    if not (case.older("ledger") or case.older("standing")):
        with read_books(load_site(folder)) as ledger:
            trainings = ledger.trainings().private
        charged = [sum(one.event.steps for one in trainings if one.voter == voter and one.event) for voter in range(2)]
        most = max(charged) if len({one.deal for one in trainings}) == 1 else sum(charged)
        drawn = max(map(len, hospital.truth.steps.values()), default=0)
        assert drawn <= most, f"{drawn} steps were drawn where {most} are charged"
    return ", ".join(sorted(person.did)) or "went on"


def together(life: Life) -> Iterator[Case]:
    """Yield cases in which all of ``teachers/`` is older or newer, alone, with the ledger, or with the standing."""
    made = tuple(part.name for part in life.parts if part.name in TEACHERS or part in LEAVING)
    for parts in (made, (*made, "ledger"), (*made, "standing"), ("ledger", "standing")):
        for first, second in combinations(range(len(life.moments)), 2):
            yield Case(parts, first, second)
            yield Case(parts, second, first)


def some(found: Iterator[Case], count: int, *, seed: int) -> list[Case]:
    """Return ``count`` of the cases, the same ones for the same seed."""
    listed = list(found)
    chosen = np.random.default_rng(seed).permutation(len(listed))[:count]
    return [listed[number] for number in sorted(chosen)]


@pytest.mark.slow
def test_every_file_of_a_site_put_back_at_any_point_of_a_life_keeps_every_promise(life: Life) -> None:
    """If CONSILIUM_RESTORES is "all", every set of one or two parts is tried; otherwise a sample of single parts."""
    found = cases(life.parts, life.moments, most=2 if ALL else 1)
    tried(life, list(found) if ALL else some(found, 14, seed=3))


@pytest.mark.slow
def test_all_of_teachers_put_back_together_keeps_every_promise(life: Life) -> None:
    found = together(life)
    tried(life, list(found) if ALL else some(found, 8, seed=4))


def test_a_site_whose_ledger_and_standing_are_both_gone_is_told_what_to_put_back(life: Life) -> None:
    tried(life, [Case(("ledger", "standing"), None, 1)])


def test_some_files_of_a_site_put_back_keep_every_promise(life: Life) -> None:
    """This test tries a sample of the cases that the two tests above try completely."""
    tried(life, [*some(cases(life.parts, life.moments, most=1), 2, seed=1), *some(together(life), 1, seed=2)])


def tried(life: Life, listed: list[Case]) -> None:
    outcomes = look_at(listed, life.parts, life.moments, life.folder, partial(look, life))
    print(f"{sum(outcomes.values())} restores: {outcomes}")


def tried_often(life: Life, case: Case) -> None:
    """Try the case 24 times. New patients are assigned at random, so about every second time shows a break."""
    for _ in range(24):
        tried(life, [case])


def _no_figure_is_withheld(patch: pytest.MonkeyPatch) -> None:
    """Break 2: the figure is printed although a teacher has no private training on record."""
    whole = KeepsTeachers.trainings

    def trainings(
        self: KeepsTeachers, *, present: Iterable[Sequence[str]] = (), adapted_lost: bool = False
    ) -> Trainings:
        return replace(whole(self), untraced=False)

    patch.setattr(KeepsTeachers, "trainings", trainings)


def _a_journal_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Break 4: the site trusts the journal in its folder, and does not count a second teacher of one training."""
    whole = TeacherBooks.made
    patch.setattr(TeacherBooks, "made", lambda self, training_id: frozenset(sorted(whole(self, training_id))[:1]))
    patch.setattr(charge, "_why_not_resumed", lambda *given, **named: None)
    patch.setattr(TrainingJournal, "watched_by", lambda self, witness: None)


def _a_slots_file_is_believed(patch: pytest.MonkeyPatch) -> None:
    """Break 5: the site trusts the slots file on which patient has which slot."""
    patch.setattr(deals, "as_on_record", lambda stored, ledger, names: stored)
    patch.setattr(charge, "record_deal", lambda config, ledger: None)
    patch.setattr(charge, "dealt", lambda config: None)

    def was_trained(self: KeepsTeachers, voter: int, served: str, *, deal: str) -> bool:
        known = self._books.teachers
        made = (known.trainings[training][1] for training, hash_ in known.trained if hash_ == served)
        return any(training.voter == voter and training.deal == deal for training in made)

    patch.setattr(KeepsTeachers, "was_trained", was_trained)


def _the_slots_file_alone_knows_who_left(patch: pytest.MonkeyPatch) -> None:
    """Break 6: only the slots file, and the weights on the day of a withdrawal, show that a patient was withdrawn."""
    _a_slots_file_is_believed(patch)
    patch.setattr(deals, "withdrawn", lambda books, ledger, patients: frozenset())
    patch.setattr(TeacherBooks, "may_vote", lambda self, voter, served, deal: True)


def _a_brought_teacher_stays(patch: pytest.MonkeyPatch) -> None:
    """Break 6: a foreign teacher keeps its vote after a withdrawal."""
    patch.setattr(TeacherBooks, "brought", lambda self, voter, served: (voter, served) in self.foreign)


def _a_lost_adaptation_is_not_missed(patch: pytest.MonkeyPatch) -> None:
    """Break 7: a private training that only a journal shows, and not the ledger, is overlooked."""
    patch.setattr(status, "lost_adaptation", lambda config, ledger: False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "broken", "case", "found"),
    [
        (
            "hospital",
            _no_figure_is_withheld,
            Case(("brought",), 1, 0),
            "a figure is printed beside an unprotected teacher",
        ),
        ("patient", _a_journal_is_believed, Case(TEACHERS, 0, 1), "printed [0-9.]+, true"),
        ("patient", _a_slots_file_is_believed, Case(("slots",), 0, 4), "a patient is in two voters"),
        ("patient", _the_slots_file_alone_knows_who_left, Case(("slots",), 5, 3), "a withdrawn patient votes"),
        (
            "hospital",
            _a_brought_teacher_stays,
            Case(("brought",), 1, 2),
            "a brought teacher may hold a withdrawn patient",
        ),
        (
            "leaving",
            _a_lost_adaptation_is_not_missed,
            Case(("ledger", "standing"), 0, 2),
            "printed [0-9.]+, true",
        ),
    ],
    ids=lambda value: value.__name__.strip("_") if callable(value) else "",
)
def test_each_former_fault_that_is_put_back_is_found(
    life: Life,
    name: str,
    broken: Callable[[pytest.MonkeyPatch], None],
    case: Case,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each break is tried with the restore that reveals it. The tests above try this restore too."""
    if life.name != name:
        pytest.skip("the break shows in the other life")
    tried(life, [case])
    broken(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        tried_often(life, case)
