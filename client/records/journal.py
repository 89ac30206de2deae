"""Records each step of a private training on disk before the batch of the step is used.

The trainers in ``client.training.private`` call it before each step. A step is *drawn* when the gradients of its random
batch are summed and noise is added. The journal is one text file: a header with the planned event, then one line for
each step, each flushed to disk.

* If a run dies within a step, the next run finds the step's line and counts the step as spent, so a training never
  draws more steps than planned.
* A line is written under the file's lock, and only by a run that knows every earlier line. Two runs together therefore
  never exceed the plan.
* A restored backup of the file may be older than the last step drawn. The site's ledger is therefore told of each step
  before it is drawn (:class:`Witness`), and a step that the ledger knows counts as spent even if the file lacks it.

It refuses to continue under another plan, on other data, or beside another run. Spent steps stay charged: a new
training needs its own directory and its own charge.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Protocol

from client.records.patient_deal import ANOTHER_DIRECTORY
from common.canonical import checked_fields
from common.errors import InvalidInput, Refused
from common.objects import sync_directory
from common.privacy.figures import epsilon_text
from common.privacy.training import Neighbours, Sampling, TrainingEvent, epsilon_of
from common.reading import lenient_json

JOURNAL_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a private training may spend.

    Attributes:
        event: The planned mechanism and number of steps.
        epsilon: Upper limit on the event's ε.
        delta: δ at which ε is computed.
        neighbours: Neighbouring relation of the guarantee.
        patients: Number of patient slots n, at least 1.

    Raises:
        InvalidInput: If ``patients`` is below 1 or below the number of fixed batches, or the event costs more than
            ``epsilon``.
    """

    event: TrainingEvent
    epsilon: float
    delta: float
    neighbours: Neighbours
    patients: int

    def __post_init__(self) -> None:
        if self.patients < 1:
            raise InvalidInput("patients of a private training", value=self.patients, limit="at least 1")
        if self.event.sampling is Sampling.FIXED_PARTITION and self.event.rate.denominator > self.patients:
            raise InvalidInput(
                "batches of a fixed partition",
                value=self.event.rate.denominator,
                limit=f"at most {self.patients}, the number of training patients of this teacher",
                remedy=f"give --rate 1/{self.patients} or a larger one, or --sampling poisson",
            )
        spent = epsilon_of(self.event, delta=self.delta, neighbours=self.neighbours)
        if not spent <= self.epsilon:
            raise InvalidInput(
                "epsilon of the planned training",
                value=epsilon_text(spent),
                limit=f"at most {epsilon_text(self.epsilon)}",
                remedy="plan fewer steps, a lower sampling rate or a larger noise multiplier",
            )

    def to_json(self) -> dict[str, object]:
        """Return the plan for the journal's header, with ε and δ as exact hexadecimal floats."""
        return {
            "delta": self.delta.hex(),
            "epsilon": float(self.epsilon).hex(),
            "event": self.event.to_json(),
            "patients": self.patients,
            "relation": str(self.neighbours),
        }


class Witness(Protocol):
    """Counts a training's drawn steps outside its journal, so that an old copy of the journal is noticed.

    It refuses a run that does not know all steps that another run has drawn.
    """

    @property
    def drawn(self) -> int:
        """The number of steps that count as drawn; this is never fewer than were really drawn."""
        ...

    def claim(self, steps: int) -> None:
        """Count all steps up to ``steps`` as drawn, on disk, before the last of them is drawn.

        Args:
            steps: Number of steps that count as drawn from now on.

        Raises:
            Refused: If another run has drawn steps that this one does not know.
        """
        ...


@dataclass(slots=True)
class TrainingJournal:
    """The file that records which steps of a private training are spent, and the plan that limits them.

    Attributes:
        plan: What the training may spend.
        path: The journal's file; None keeps the steps in memory (for benchmarks on public data).
        identity: Hash of data, recipe and trainer; a journal is continued only under the same one.
        spent: Steps spent so far.
        key: 32 random bytes from which the training's id in the ledger is derived.
        witness: Counts the steps outside this file as well; None to count them only here.
    """

    plan: TrainingPlan
    path: Path | None = None
    identity: str = ""
    spent: int = 0
    key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    witness: Witness | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(cls, path: Path, plan: TrainingPlan, *, identity: str) -> TrainingJournal:
        """Start a journal, or continue the one that already exists.

        Args:
            path: The journal's file.
            plan: What the training may spend.
            identity: Hash of data, recipe and trainer.

        Returns:
            The journal with the steps already spent. A last line that was only partly written counts as a spent step.

        Raises:
            InvalidInput: If the file cannot be read, or was started under another plan or identity.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path) as descriptor:
            text = _read(descriptor).decode(errors="replace")
            if not text:  # the header is flushed before any step, so without a header nothing was spent
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
            try:
                header = checked_fields(lenient_json(first), {"identity": str, "key": str, "plan": dict, "schema": int})
                key = bytes.fromhex(str(header["key"]))
            except (ValueError, InvalidInput) as error:
                raise InvalidInput(
                    "training journal cannot be read",
                    value=path.name,
                    remedy="restore the newest copy of the folder of this training, which stays charged; "
                    f"or, for another training, {ANOTHER_DIRECTORY}",
                ) from error
            if (
                not whole
                or header["schema"] != JOURNAL_SCHEMA
                or header["plan"] != plan.to_json()
                or header["identity"] != identity
            ):
                raise InvalidInput(
                    "the private training in this folder was started with another plan or other data",
                    value=path.name,
                    remedy="continue the training, which stays charged, with its own plan and data; "
                    f"or, for another training, {ANOTHER_DIRECTORY}",
                )
            if steps and not steps.endswith("\n"):  # the step of an incomplete line may have been drawn: count it
                _append(descriptor, "\n")
                steps += "\n"
            return cls(plan, path, identity, spent=steps.count("\n"), key=key)

    @property
    def left(self) -> int:
        """Steps of the plan that are not spent yet."""
        return self.plan.event.steps - self.spent

    def spend(self) -> int:
        """Charge one step before it is drawn: in the journal's file, and with the witness that counts steps elsewhere.

        Returns:
            The step's number, from 0.

        Raises:
            Refused: ``training-plan-spent`` if the plan has no step left; ``training-busy`` if another run has spent
                steps since this one read the journal.
        """
        if self.left <= 0:
            raise Refused(
                "training-plan-spent",
                f"all {self.plan.event.steps} planned steps of this training are spent; to fix: begin another "
                "training, which is charged too",
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
        """Report every later step to a witness, and count the steps as spent that the witness already knows.

        Args:
            witness: Counts the steps outside this file, for example in the site's ledger.
        """
        self.witness = witness
        self.catch_up(witness.drawn)

    def catch_up(self, spent: int) -> None:
        """Count steps as spent that a checkpoint or a witness proves were drawn.

        A journal restored from a backup can be older than the checkpoint.

        Args:
            spent: Number of steps known to be drawn; more than the plan counts as the whole plan.
        """
        while self.spent < min(spent, self.plan.event.steps):
            self.spend()

    def _refuse_another_run(self, descriptor: int) -> None:
        text = _read(descriptor)
        if text.count(b"\n") != 1 + self.spent or not text.endswith(b"\n"):
            raise Refused(
                "training-busy",
                "another run is working on the same training; to fix: wait until it ends, then run the command again",
            )

    @property
    def event(self) -> TrainingEvent:
        """The privacy event so far: the planned event, but with the number of steps already drawn.

        All of the plan's other releases (``releases``) are included, even before they are made.
        """
        return replace(self.plan.event, steps=self.spent)

    @property
    def training_id(self) -> str:
        """The id of this training in the site's ledger."""
        return _training_id(self.key)


def _training_id(key: bytes) -> str:
    """Return a training's id from its journal's random key. A new journal has a new key, so it is charged anew."""
    return sha256(b"training\0" + key).hexdigest()


def begun_trainings(directory: Path) -> tuple[str, ...]:
    """Return the ids of the trainings whose journals lie in a folder and record at least one step.

    Args:
        directory: The folder of a voter or of an adaptation.

    Returns:
        The ids. Journals that were set aside count. A journal without a readable header gives an id that belongs to no
        training on record.
    """
    found = []
    for path in sorted(directory.glob("journal-*")):
        first, _, steps = path.read_text(encoding="utf-8", errors="replace").partition("\n")
        try:
            key = bytes.fromhex(lenient_json(first)["key"])
        except (ValueError, KeyError, TypeError):
            key = b""
        if steps or not key:
            found.append(_training_id(key))
    return tuple(found)


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open the file, create it if missing, and hold its exclusive lock.

    The kernel releases the lock when the process dies.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


def _read(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)


def _append(descriptor: int, text: str) -> None:
    data = text.encode()
    while data:  # on a nearly full disk, write() stores only a part and raises nothing
        data = data[os.write(descriptor, data) :]
    os.fsync(descriptor)
