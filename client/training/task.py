"""Defines the input and the result of one voter's training, as frozen values that pass between processes.

A task names its own patients only. No torch here: who plans, charges or reports a training need not load it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from client.records.voter_files import TRAIN_SCHEMA
from client.training.private.settings import PrivateSettings
from common.config import DataConfig, TrainingConfig
from common.data.dataset import Case, Problem

HELD_OUT_SHARE = 0.1
LEAST_SLOTS_TO_HOLD_OUT = 5


def held_out_count(slots: int) -> int:
    """How many of a voter's slots are kept for its own validation: a tenth, none where there are fewer than five."""
    return 0 if slots < LEAST_SLOTS_TO_HOLD_OUT else max(1, round(HELD_OUT_SHARE * slots))


@dataclass(frozen=True, slots=True)
class VoterTask:
    """All that one voter's training may read: its own patients' scans and public values, nothing of another voter's.

    ``patients`` are (name, ids of the scans) in slot order; ``cases`` and ``known`` (what the index says is wrong with
    a scan) are of these scans alone. ``deal`` names the dealing of patients to voters; ``private`` is what a private
    trainer may spend; ``start`` is a file of public weights that training begins from, None for random ones.
    ``paired``: the start learnt from public cases with their labels, so it knows more than few patients can teach, and
    the teacher stays near it (:func:`~common.models.fit.near`).
    ``absent``: channels of the study that the site has not. ``site``: the directory whose ledger is told of a private
    training's steps, None for a training that nobody's ledger knows of. ``leaves``: the network may leave the hospital.
    """

    voter: int
    patients: tuple[tuple[str, tuple[str, ...]], ...]
    cases: tuple[Case, ...]
    known: tuple[Problem, ...]
    directory: Path
    seed: int
    data: DataConfig
    recipe: TrainingConfig
    trainer: str
    deal: str
    private: PrivateSettings | None = None
    start: Path | None = None
    paired: bool = False
    absent: tuple[int, ...] = ()
    site: Path | None = None
    leaves: bool = False

    @property
    def steps(self) -> int:
        """Steps of the training when it is done."""
        return self.recipe.steps if self.private is None else self.private.steps

    @property
    def training_slots(self) -> int:
        """How many of the voter's patients are for training, whatever their files hold."""
        return len(self.patients) - held_out_count(len(self.patients))


@dataclass(frozen=True, slots=True)
class VoterReport:
    """One voter's training, as ``train.json`` holds it. ``dice`` is over its own held-out patients, one per structure.

    ``trained_on`` and ``held_out`` count patients. ``weights`` is the SHA-256 of weights.pt; None for a voter without a
    single usable case or whose training is impossible (``problem`` says why), never for a private one. ``guarantees``
    say what a patient of this training risks, under each relation; none for a training without differential privacy.
    """

    voter: int
    trained_on: int
    held_out: int
    empty_slots: int
    weights: str | None = None
    dice: tuple[float | None, ...] = ()
    mean_dice: float | None = None
    steps: int = 0
    loss: float | None = None
    seconds: float = 0.0
    reused: bool = False
    problem: str | None = None
    guarantees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VoterOutcome:
    """A voter's report, and what is wrong with scans of its own patients."""

    report: VoterReport
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Crash:
    """A voter whose training did not come to an end: nothing was recorded, and running it again goes on."""

    voter: int
    reason: str


@dataclass(frozen=True, slots=True)
class SiteReport:
    """What ``consilium site train`` did. Case ids in ``problems`` are for the site's own eyes.

    ``voters`` are those that came to their end; ``crashes`` the others.
    """

    voters: tuple[VoterReport, ...]
    problems: tuple[Problem, ...]
    crashes: tuple[Crash, ...] = ()

    def to_json(self) -> dict[str, object]:
        return {"schema": TRAIN_SCHEMA, **dataclasses.asdict(self)}


OnProgress = Callable[[int, int, float], None]
"""Called after every step with the voter, the steps it has done and the step's loss (nan for a voter kept)."""


RunVoters = Callable[[Sequence[VoterTask], OnProgress], list[VoterOutcome | Crash]]
"""Trains the tasks, in their order in the result; the progress callback is given a task's place in the sequence."""
