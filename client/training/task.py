"""Defines the input and the result of one voter's training, as frozen values that pass between processes.

A task contains its own voter's patients only. The module does not import torch, so planning, charging and reporting
need not load it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from client.records.voter_files import TRAIN_SCHEMA
from client.training.private.settings import PrivateSettings
from common.config import DataConfig, TrainingConfig
from common.data.dataset import Case, Problem

HELD_OUT_SHARE = 0.1
LEAST_SLOTS_TO_HOLD_OUT = 5


def held_out_count(slots: int) -> int:
    """Return how many of a voter's slots are kept for its own validation.

    Args:
        slots: Number of the voter's slots.

    Returns:
        A tenth, at least one; 0 below five slots.
    """
    return 0 if slots < LEAST_SLOTS_TO_HOLD_OUT else max(1, round(HELD_OUT_SHARE * slots))


@dataclass(frozen=True, slots=True)
class VoterTask:
    """Everything one voter's training may read: its own patients' scans, and public values.

    Attributes:
        voter: The voter's number.
        patients: Name and scan ids of each patient, in slot order.
        cases: The dataset's entries of these scans.
        known: Problems of these scans that the dataset's index already shows.
        directory: Where the teacher and its record are written.
        seed: Seed of the training.
        data: The study's labels, channels and grid.
        recipe: The study's recipe of a teacher.
        trainer: Name of the trainer.
        deal: The ledger's name of the assignment of patients to voters.
        private: What a private training may spend; None for the standard trainer.
        start: File of public weights to begin from; None for random ones.
        paired: True if the start was trained on labelled public cases. Such a start knows more than a few patients can
            teach, so the teacher is kept near the start (:func:`~common.models.fit.average_with_start`).
        absent: The study's channels that the site does not have.
        site: Directory whose ledger counts a private training's steps; None without a ledger.
        leaves: True if the trained network may leave the hospital.
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
        """Steps of the complete training."""
        return self.recipe.steps if self.private is None else self.private.steps

    @property
    def training_slots(self) -> int:
        """Number of the voter's slots used for training, whether or not their files are usable."""
        return len(self.patients) - held_out_count(len(self.patients))


@dataclass(frozen=True, slots=True)
class VoterReport:
    """One voter's training, as stored in ``train.json``.

    Attributes:
        voter: The voter's number.
        trained_on: Patients with a usable scan used for training.
        held_out: Patients with a usable scan kept for validation.
        empty_slots: Slots without a usable scan.
        weights: SHA-256 of ``weights.pt``. None for a voter without a usable case, or whose training is impossible;
            never None for a private training.
        dice: Mean Dice of each structure on the held-out patients; None for a structure that is absent from all.
        mean_dice: Mean over the structures.
        steps: Steps that moved the weights.
        lost_steps: Steps of a private training that were charged and lost to interruptions.
        loss: Last loss; None for a private training.
        seconds: Duration.
        reused: True if the teacher of an earlier run was kept.
        problem: Why training is impossible; None otherwise.
        guarantees: The ε of one patient of this training, in words, for each relation; empty without differential
            privacy.
    """

    voter: int
    trained_on: int
    held_out: int
    empty_slots: int
    weights: str | None = None
    dice: tuple[float | None, ...] = ()
    mean_dice: float | None = None
    steps: int = 0
    lost_steps: int = 0
    loss: float | None = None
    seconds: float = 0.0
    reused: bool = False
    problem: str | None = None
    guarantees: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VoterOutcome:
    """A voter's report, and the problems of its own patients' scans."""

    report: VoterReport
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Crash:
    """A voter whose training ended early. No teacher was recorded; the same command continues the training."""

    voter: int
    reason: str


@dataclass(frozen=True, slots=True)
class SiteReport:
    """The report of ``consilium site train``.

    Attributes:
        voters: The voters that finished.
        problems: Problems of scans. Case ids in them must not leave the site.
        crashes: The voters that did not finish.
    """

    voters: tuple[VoterReport, ...]
    problems: tuple[Problem, ...]
    crashes: tuple[Crash, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return the report as plain values for JSON."""
        return {"schema": TRAIN_SCHEMA, **dataclasses.asdict(self)}


OnProgress = Callable[[int, int, float], None]
"""Called after every step with the position of the voter's task, the number of its steps done, and the step's loss.

The loss is nan if an earlier teacher is kept."""
