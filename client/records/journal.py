"""A training's own memory of what it has spent: a step is on disk before anything it draws is used.

One text file: a header with the planned event, then a line a step, each flushed to disk. A run that died in the middle
of a step finds the step written and counts it as spent, and never runs more steps than planned. Every line is written
under the file's lock by a run that knew all lines before it, so two runs never spend more than the plan together.
Refuses to go on under another plan or on other data, and beside another run: what was spent stays spent, so a new
training needs its own directory and its own charge.

The file may come back from a backup, older than what was drawn. So a ``witness`` outside of it, the site's ledger, is
told of every step before it is drawn (:class:`Witness`), and what it knows counts as spent even where the file says
less.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from client.records.patient_deal import ANOTHER_DIRECTORY
from common.canonical import checked_fields
from common.errors import InvalidInput, Refused
from common.ledger.keys import sync_directory
from common.privacy.figures import epsilon_text
from common.privacy.training import Neighbours, TrainingEvent, epsilon_of

JOURNAL_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a training may spend: (ε, δ) under a relation, the event that fits it, and n, the patients' slots."""

    event: TrainingEvent
    epsilon: float
    delta: float
    neighbours: Neighbours
    patients: int

    def __post_init__(self) -> None:
        if self.patients < 1:
            raise InvalidInput("patients of a private training", value=self.patients, limit="at least 1")
        spent = epsilon_of(self.event, delta=self.delta, neighbours=self.neighbours)
        if not spent <= self.epsilon:
            raise InvalidInput(
                "epsilon of the planned training",
                value=epsilon_text(spent),
                limit=f"at most {epsilon_text(self.epsilon)}",
            )

    def to_json(self) -> dict[str, object]:
        return {
            "delta": self.delta.hex(),
            "epsilon": float(self.epsilon).hex(),
            "event": self.event.to_json(),
            "patients": self.patients,
            "relation": str(self.neighbours),
        }


class Witness(Protocol):
    """Keeps how far a training got, outside of its journal. Refuses a run that does not know what another has drawn."""

    @property
    def drawn(self) -> int:
        """Steps that count as drawn, never fewer than were."""
        ...

    def claim(self, steps: int) -> None:
        """Count steps up to this one as drawn, durably, before the last of them is."""
        ...


@dataclass(slots=True)
class TrainingJournal:
    """Steps spent under a plan; ``path`` None keeps them in memory (benchmarks on public data)."""

    plan: TrainingPlan
    path: Path | None = None
    identity: str = ""
    spent: int = 0
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    witness: Witness | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path, plan: TrainingPlan, *, identity: str) -> TrainingJournal:
        """Start a journal, or continue the one at ``path``: same plan and same ``identity`` (data, recipe, trainer)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as descriptor:
            text = _read(descriptor).decode(errors="replace")
            if not text:  # nothing was ever spent under a header that did not come to the disk
                journal = cls(plan, path, identity)
                header = {
                    "identity": identity,
                    "key": journal.key.hex(),
                    "plan": plan.to_json(),
                    "schema": JOURNAL_SCHEMA,
                }
                _append(descriptor, json.dumps(header, sort_keys=True) + "\n")
                sync_directory(path.parent)
                return journal
            first, whole, steps = text.partition("\n")
            remedy = f"what this training spent stays charged; for another one {ANOTHER_DIRECTORY}"
            try:
                header = checked_fields(json.loads(first), {"identity": str, "key": str, "plan": dict, "schema": int})
                key = bytes.fromhex(str(header["key"]))
            except (ValueError, InvalidInput) as error:
                raise InvalidInput("training journal cannot be read", value=path.name, remedy=remedy) from error
            if (
                not whole
                or header["schema"] != JOURNAL_SCHEMA
                or header["plan"] != plan.to_json()
                or header["identity"] != identity
            ):
                raise InvalidInput(
                    "a private training under another plan, or on other data, was started here",
                    value=path.name,
                    remedy=remedy,
                )
            if steps and not steps.endswith("\n"):  # a torn line is a step that may have been drawn: it counts
                _append(descriptor, "\n")
                steps += "\n"
            return cls(plan, path, identity, spent=steps.count("\n"), key=key)

    @property
    def left(self) -> int:
        return self.plan.event.steps - self.spent

    def spend(self) -> int:
        """Charge one step, on disk and with the witness before this returns; gives the step's number.

        Refused past the plan, and where another run has spent steps of it since this one read the journal.
        """
        if self.left <= 0:
            raise Refused(
                "training-plan-spent", f"all {self.plan.event.steps} planned steps of this training are spent"
            )
        if self.path is not None:
            with _locked(self.path) as descriptor:
                self._refuse_another_run(descriptor)
                _append(descriptor, f"{self.spent}\n")
        if self.witness is not None and self.witness.drawn <= self.spent:
            self.witness.claim(self.spent + 1)
        self.spent += 1
        return self.spent - 1

    def watched_by(self, witness: Witness) -> None:
        """Tell a witness of every step from now on, and count what it knows as spent."""
        self.witness = witness
        self.catch_up(witness.drawn)

    def catch_up(self, spent: int) -> None:
        """Count the steps that something else proves were drawn: a checkpoint is younger than a restored journal."""
        while self.spent < min(spent, self.plan.event.steps):
            self.spend()

    def _refuse_another_run(self, descriptor: int) -> None:
        text = _read(descriptor)
        if text.count(b"\n") != 1 + self.spent or not text.endswith(b"\n"):
            raise Refused(
                "training-busy",
                "another run is spending the steps of this training; to fix: wait for it, then run the command again",
            )

    @property
    def event(self) -> TrainingEvent:
        """What was spent so far: the plan's event with the steps drawn; releases are charged from the start."""
        plan = self.plan.event
        return TrainingEvent(plan.sampling, plan.rate, plan.noise_multiplier, self.spent, plan.releases)


def training_id_of(key: bytes) -> str:
    """What the site's ledger knows a training by: a hash of its journal's own key, so a new journal is a new charge."""
    return sha256(b"training\0" + key).hexdigest()


def begun_trainings(directory: Path) -> tuple[str, ...]:
    """The ids of the trainings whose journals in a voter's directory have spent a step.

    A journal that cannot be read has an id that no training has.
    """
    found = []
    for path in sorted(directory.glob("journal-*.jsonl")):
        first, _, steps = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        try:
            key = bytes.fromhex(json.loads(first)["key"])
        except (ValueError, KeyError, TypeError):
            key = b""
        if steps or not key:
            found.append(training_id_of(key))
    return tuple(found)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The file, made where there is none, with its lock held: the kernel frees it when the process dies."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _append(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode())
    os.fsync(descriptor)
