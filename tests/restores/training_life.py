"""Runs a hospital that trains, serves, withdraws and restores, and records the truth apart from its own files.

Its commands are the production ones; only the mathematics of a step is left out. A log that no restore touches records
what each step would have drawn: which patients it touched, and which of them each teacher was made of.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import erf, exp, sqrt
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from client.adapting import private as leaving
from client.operations.serve import open_worker
from client.operations.staff_decisions import consent, has_consented, withdraw_patient
from client.policy import load_site
from client.records.declared import DECLARED, ForeignKind, LabelOf, TeacherDeclaration
from client.records.journal import TrainingJournal
from client.records.served import trained_hash
from client.records.voter_files import voter_directory
from client.site.books import open_books
from client.site.status import site_status
from client.teachers.pulled_student import STUDENT_DIR
from client.training import command
from client.training.command import PrivateOptions, TrainOptions
from client.training.contract import TrainedVoter
from client.training.private import trainer
from client.training.task import Crash, OnProgress, VoterOutcome, VoterTask
from client.training.voter import train_voter
from common.canonical import sha256_bytes
from common.config import load_study
from common.data.msd import Case, write_dataset
from common.errors import ConsiliumError
from common.messages import CodesRequest, encode
from common.models.student_bundle import PRIVACY as BUNDLE_PRIVACY
from common.models.student_bundle import WEIGHTS
from common.models.unet import build_unet
from common.pki import create_authority, create_node_keys
from common.privacy.mechanism import QuerySpec
from common.study_mechanism import study_mechanism
from tests.worlds import site_toml, study_toml

STEPS = 4
PRIVACY = {"delta": 1e-5, "planned_queries": 64, "voters_per_site": 2, "unit": "UNIT"}
STUDY = study_toml("core", teacher="channels = [2, 4]\nsteps = 3", **PRIVACY)
LEDGER = "e" * 32
PRIVATE = PrivateOptions("dp-sgd", 1.0, 1e-3, sampling="fixed-partition", rate="1", steps=STEPS)
"""Every step touches every patient, so a patient's true ε follows from the number of steps alone."""


class Killed(BaseException):
    """Ends the training's process after a step."""


@dataclass
class Truth:
    """Holds the steps that really happened, counted apart from the hospital's files."""

    steps: dict[str, list[float]] = field(default_factory=dict)
    """By patient: the noise multiplier of every step that touched the patient."""
    leaving: dict[str, list[float]] = field(default_factory=dict)
    """The steps among them that were drawn for networks that may leave the hospital."""
    made_of: dict[str, frozenset[str]] = field(default_factory=dict)
    """By teacher's hash: the patients it was trained on."""
    private: set[str] = field(default_factory=set)
    """Teachers that a private training made."""
    withdrawn: set[str] = field(default_factory=set)
    brought: set[str] = field(default_factory=set)
    doubtful: set[str] = field(default_factory=set)
    """Foreign teachers that were added before a patient was withdrawn, and not again since."""
    served: list[tuple[str, ...]] = field(default_factory=list)

    def epsilon(self, *, delta: float, moved: int, leaving: bool = False) -> float:
        """Return the ε of all steps for the patient with the largest one, by the exact Gaussian curve."""
        drawn = self.leaving if leaving else self.steps
        worst = max((sum(1 / z**2 for z in steps) for steps in drawn.values()), default=0.0)
        mu = moved * sqrt(worst)
        if mu == 0:
            return 0.0
        low, high = 0.0, 500.0
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if _delta(middle, mu) > delta else (low, middle)
        return high


def _delta(epsilon: float, mu: float) -> float:
    def phi(x: float) -> float:
        return (1 + erf(x / sqrt(2))) / 2

    tail = phi(-mu / 2 - epsilon / mu)
    return phi(mu / 2 - epsilon / mu) - (exp(epsilon) * tail if tail > 0 else 0.0)


def make_hospital(root: Path, *, unit: str = "patient", patients: int = 6) -> Path:
    """Make a hospital's directory below ``root``, in which nothing is trained."""
    add_patients(root / "set", range(patients))
    site = root / "site"
    site.mkdir()
    (site / "study.toml").write_text(STUDY.replace("UNIT", unit))
    (site / "site.toml").write_text(site_toml(data="../set", delta=1e-5, more=f'unit = "{unit}"\n'))
    shutil.copy(create_authority(root / "authority").certificate, site / "ca.crt")
    create_node_keys(site / "node" / "keys")
    return site


def add_patients(folder: Path, numbers: Sequence[int]) -> None:
    """Make a dataset of exactly these patients, with one scan of noise each."""
    source = folder.parent / "source"
    source.mkdir(exist_ok=True)
    cases = []
    for number in numbers:
        image, label = source / f"p{number}.nii.gz", source / f"l{number}.nii.gz"
        if not image.exists():
            nib.save(
                nib.Nifti1Image(np.random.default_rng(number).normal(size=(8, 8, 8)).astype(np.float32), np.eye(4)),
                image,
            )
            nib.save(nib.Nifti1Image(np.ones((8, 8, 8), np.uint8), np.eye(4)), label)
        cases.append(Case(f"p{number}", image, label))
    shutil.rmtree(folder, ignore_errors=True)
    write_dataset(folder, name="n", labels=("background", "core"), channels=("MRI",), cases=cases)


class Hospital:
    """Does what a hospital's staff do. :meth:`check` checks every promise about a refusal."""

    def __init__(self, site: Path, truth: Truth | None = None) -> None:
        self.site, self.truth, self.asked = site, truth or Truth(), 0
        self.deal_with: dict[str, frozenset[str]] = {}

    def train(
        self,
        *,
        private: bool = True,
        again: bool = False,
        die_after: int | None = None,
        crash: Sequence[int] = (),
        epsilon: float = 1.0,
    ) -> None:
        """Run ``site train``. The whole process dies after ``die_after`` steps; voters in ``crash`` fail alone."""
        left = [10**6 if die_after is None else die_after]
        options = replace(PRIVATE, epsilon=epsilon) if private else PrivateOptions()
        self._agree()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(command, "side_by_side", self._run(left, tuple(crash)))
            try:
                command.train(
                    TrainOptions(self.site, private=options, again=again),
                    progress=lambda voters, steps: _silent(),
                    on_warning=lambda text: None,
                )
            except Killed:
                return

    def _run(self, left: list[int], crash: tuple[int, ...]) -> Callable[..., list[VoterOutcome | Crash]]:
        def run(tasks: Sequence[VoterTask], on_progress: OnProgress, *, jobs: int) -> list[VoterOutcome | Crash]:
            return [
                Crash(task.voter, "killed") if task.voter in crash else self._voter(task, left, on_progress)
                for task in tasks
            ]

        return run

    def _voter(self, task: VoterTask, left: list[int], on_progress: OnProgress) -> VoterOutcome:
        patients = frozenset(name for name, _ in task.patients)
        assert not patients & self.truth.withdrawn, "a withdrawn patient is trained on"

        def steps(
            part: object, recipe: Any, settings: object, journal: TrainingJournal, *, checkpoint: Path, **_: object
        ) -> TrainedVoter:
            drawn: list[str] = []
            if checkpoint.exists():
                saved = json.loads(checkpoint.read_text())
                if saved["journal"] == journal.key.hex():
                    journal.catch_up(saved["spent"])
                    drawn = saved["drawn"]
            while journal.left:
                journal.spend()
                if left[0] == 0:
                    raise Killed
                left[0] -= 1
                for name in patients:
                    for drawn_for in (self.truth.steps, *((self.truth.leaving,) if task.leaves else ())):
                        drawn_for.setdefault(name, []).append(float(journal.plan.event.noise_multiplier))
                drawn.append(os.urandom(8).hex())
                state = {"journal": journal.key.hex(), "spent": journal.spent, "drawn": drawn}
                checkpoint.write_text(json.dumps(state))
                if left[0] == 0:
                    raise Killed
            seed = int(hashlib.sha256(f"{task.seed} {drawn}".encode()).hexdigest()[:8], 16)
            torch.manual_seed(seed)
            model = build_unet(recipe.channels, network=recipe.network, in_channels=1, out_channels=2, seed=seed)
            return TrainedVoter(model, len(drawn), None, 0.0, journal.event)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trainer, "train_privately", steps)
            outcome = train_voter(task, on_step=lambda step, loss: None)
        assert outcome.report.weights is not None, outcome.report.problem
        if not outcome.report.reused:
            self.truth.made_of[outcome.report.weights] = patients
            if task.private is not None:
                self.truth.private.add(outcome.report.weights)
        return outcome

    def adapt(self, *, again: bool = False, die_after: int | None = None, out: Path | None = None) -> None:
        """Run ``site adapt --strategy``. A stub stands for the signed student."""
        left = [10**6 if die_after is None else die_after]
        self._agree()
        start = self.site / STUDENT_DIR / "bundle" / WEIGHTS
        start.parent.mkdir(parents=True, exist_ok=True)
        start.write_bytes(b"a student")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leaving, "signed_student", lambda site: (None, {BUNDLE_PRIVACY: b"{}"}))
            patch.setattr(leaving.BundlePrivacy, "from_json", lambda facts: _Cost())
            patch.setattr(leaving, "check_pulled", lambda site: None)
            patch.setattr(leaving, "check_network", lambda recipe, settings, data: None)
            patch.setattr(leaving, "student_of", lambda folder, study: None)
            patch.setattr(leaving, "recipe_of", lambda bundle, study: study.teacher)
            patch.setattr(leaving, "train_voter", lambda task, on_step: self._voter(task, left, on_step))
            patch.setattr(leaving, "_write", _bundle)
            try:
                leaving.adapt_privately(
                    self.site, PRIVATE, again=again, out=out, progress=lambda steps: _shown(), on_warning=print
                )
            except Killed:
                return

    def withdraw(self, patient: str) -> None:
        """Run ``site withdraw-patient``."""
        withdraw_patient(self.site, patient)
        if patient not in self.truth.withdrawn:  # a repeated withdrawal is already known
            self.truth.withdrawn.add(patient)
            self.truth.doubtful |= self.truth.brought

    def bring(self, voter: int) -> None:
        """Run ``site teacher add`` for a command, without its trial run, which needs a kernel that confines it."""
        labels = (LabelOf(0, "background"), LabelOf(1, "core"))
        declared = TeacherDeclaration(ForeignKind.COMMAND, labels, ("MRI",), {}, 1, 1, command=("true", str(voter)))
        with open_books(load_site(self.site)) as ledger:
            ledger.record_foreign(voter, declared.served, brought="command")
        folder = voter_directory(self.site / "teachers", voter)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / DECLARED).write_text(json.dumps(declared.to_json()))
        self.truth.brought.add(declared.served)
        self.truth.doubtful.discard(declared.served)

    def _agree(self) -> None:
        """Run ``site consent``, again if the ledger is a copy from before the consent."""
        if not has_consented(self.site):
            consent(self.site, by="Ada", sheet="")

    def serve(self, *, answers: int = 1) -> tuple[str, ...]:
        """Start a worker, which must keep every promise or refuse, and let it answer; return the served teachers."""
        self._agree()
        worker = open_worker(self.site, sleep=lambda _: None)
        try:
            stated = worker._ledger.books.teachers.newest
            assert stated is not None
            served = tuple(hash_ for hash_, _ in stated.voters)
            voting = [self.truth.made_of.get(hash_, frozenset()) for hash_ in served if hash_]
            assert not frozenset().union(*voting) & self.truth.withdrawn, "a withdrawn patient votes"
            assert not self.truth.doubtful & set(served), "a brought teacher may hold a withdrawn patient"
            if 'unit = "patient"' in (self.site / "study.toml").read_text():
                assert all(hash_ in self.truth.made_of for hash_ in served if hash_)
                assert sum(map(len, voting)) == len(frozenset().union(*voting)), "a patient is in two voters"
            self.truth.served.append(served)
            for _ in range(answers):
                self._answer(worker)
        finally:
            worker._ledger.close()
        return served

    def _answer(self, worker: Any) -> None:
        self.asked += 1
        study = load_study(self.site / "study.toml")
        query = QuerySpec(
            edition=1,
            codec="c" * 64,
            volumes=(sha256_bytes(b"%d" % self.asked),),
            round=1,
            centre="zero",
            weights="codec",
            mechanism=study_mechanism(study, dimension=4),
        )
        worker._fetch = _away
        key = worker._config.server.sealing_key
        worker._ledger.reserve(study.id, [query], ledger=LEDGER, sealing_key=key)
        worker.handle(encode(CodesRequest(study.id, LEDGER, "b" * 64, 1, 60, (query.id,))))

    def printed(self) -> list[dict[str, Any] | None]:
        """Return what `site status` states as the cost of a patient's trainings, by relation; empty if it states
        nothing.
        """
        trainings: Any = site_status(self.site)["trainings"]
        return list(trainings["guarantees"]) if trainings["count"] else []

    def check(self, *, steps: bool = True, served: bool = True) -> None:
        """Check that no figure is below the truth, and that none is given for teachers without a private training.

        Without ``steps`` or ``served``, no file has a trace of the earlier steps or of the earlier served teachers.
        """
        seen = [*(self.truth.served if served else ()), self.present()]
        unprotected = any(hash_ and hash_ not in self.truth.private for hashes in seen for hash_ in hashes)
        for found in self.printed():
            if found is None:
                continue
            assert not unprotected, "a figure is printed beside an unprotected teacher"
            if not steps:
                continue
            moved = 2 if found["relation"] == "replace-one" else 1
            true = self.truth.epsilon(delta=found["delta"], moved=moved)
            assert found["epsilon"] >= true - 1e-6, f"printed {found['epsilon']}, true {true}"
        trainings: Any = site_status(self.site)["trainings"]
        if steps and not trainings.get("adapted_unknown"):
            found = trainings.get("adapted", {"epsilon": 0.0, "delta": 1e-5})
            true = self.truth.epsilon(delta=found["delta"], moved=2, leaving=True)
            assert found["epsilon"] >= true - 1e-6, f"printed {found['epsilon']} of what may leave, true {true}"

    def present(self) -> tuple[str, ...]:
        """Return the hash of every complete teacher on disk, computed here from the files alone."""
        found = []
        for folder in sorted((self.site / "teachers").glob("voter-*")):
            if (folder / DECLARED).exists():
                found.append("brought")
                continue
            try:
                record = json.loads((folder / "train.json").read_text())
                hash_ = hashlib.sha256((folder / "weights.pt").read_bytes()).hexdigest()
                if record["report"]["weights"] == hash_ and record["identity"] != "withdrawn":
                    found.append(hash_)
            except (OSError, ValueError, KeyError):
                continue
        return tuple(found)


def refused(act: Callable[[], object]) -> str | None:
    """Return the text with which an act is refused, which names a remedy; None if the act succeeds."""
    try:
        act()
    except ConsiliumError as error:
        text = str(error)
        assert "to fix:" in text, text
        return text
    return None


@contextmanager
def _silent() -> Iterator[OnProgress]:
    yield lambda voter, step, loss: None


@contextmanager
def _shown() -> Iterator[Callable[[int, int], None]]:
    yield lambda done, total: None


class _Cost:
    """Stands in for a student's cost, which these tests do not read."""

    def sentence(self) -> str:
        return "nothing"


def _bundle(target: Path, task: VoterTask, result: object, study: object, site: str) -> None:
    privacy = target / BUNDLE_PRIVACY
    privacy.parent.mkdir(parents=True, exist_ok=True)
    privacy.write_text(json.dumps({"may_leave": True, "weights": trained_hash(task.directory)}))


def _away(_: str) -> bytes:
    raise OSError("no public object here")
