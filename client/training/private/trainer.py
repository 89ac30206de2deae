"""Runs private strategies as trainers of a site: a journal for each training, charged and resumed.

A training is identified by its voter's patients, recipe and settings. The content of the patients' files is not part of
the identity: a changed scan must not start a new training and spend again. Other patients, another recipe or another
plan make another training with a journal of its own, and the site's ledger adds its cost.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from client.policy import load_site
from client.records.journal import TrainingJournal
from client.site.books import open_books
from client.training.contract import TrainedVoter, VoterData
from client.training.private.settings import PrivateSettings
from client.training.private.teachers import train_privately
from client.training.private.witness import LedgerWitness
from client.training.task import VoterTask
from common.canonical import digest, sha256_file
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.ledger.teacher_records import TrainingRecord
from common.models.fit import OnStep
from common.objects import sync_directory
from common.privacy.patient_guarantee import ADAPTED


@dataclass(frozen=True, slots=True)
class PrivateTrainer:
    """A private strategy with its settings.

    Attributes:
        settings: The private settings.
        journal: File of the training's journal.
        identity: Hash that identifies the training (:func:`training_identity`).
        patients: Number of training slots n.
        start: File of public weights to begin from; None for random ones.
        site: Directory whose ledger counts every step; None without a ledger.
    """

    settings: PrivateSettings
    journal: Path
    identity: str
    patients: int
    start: Path | None = None
    site: Path | None = None

    def open(self) -> TrainingJournal:
        """Start or continue the training's journal.

        Returns:
            The journal.

        Raises:
            InvalidInput: If the stored journal has another plan or identity, or no noise keeps (ε, δ).
        """
        return TrainingJournal.open(self.journal, self.settings.plan(patients=self.patients), identity=self.identity)

    def set_aside(self) -> None:
        """Rename this journal and delete its checkpoint and record, so that a new training can begin.

        The old journal stays readable; its steps stay charged in the site's ledger.
        """
        folder = self.journal.parent
        aside = self.journal.with_suffix(f".{self.open().training_id[:12]}.old")
        for name in ("checkpoint.pt", "train.json"):
            (folder / name).unlink(missing_ok=True)
        self.journal.rename(aside)
        sync_directory(folder)

    def train(
        self, part: VoterData, recipe: TrainingConfig, *, seed: int, checkpoint: Path | None, on_step: OnStep | None
    ) -> TrainedVoter:
        """Train with the steps that the plan has left; the network after the last step is the teacher.

        Args:
            part: The voter's patients.
            recipe: The study's recipe of a teacher.
            seed: Seed of the first weights.
            checkpoint: File from which to resume; None to store none.
            on_step: Called after each step with its number, and nan in place of a loss.

        Raises:
            InvalidInput: If the plan, the start or the network is refused.
            Refused: If another run spends the same training.
        """
        journal = self.open()
        with ExitStack() as opened:
            if self.site is not None:
                ledger = opened.enter_context(open_books(load_site(self.site)))
                journal.watched_by(LedgerWitness(ledger, journal.training_id, steps=journal.plan.event.steps))
            return train_privately(
                part,
                recipe,
                self.settings,
                journal,
                seed=seed,
                start=self.start,
                checkpoint=checkpoint,
                on_step=on_step,
            )


def private_trainer(task: VoterTask) -> PrivateTrainer:
    """Return the trainer of one voter's task.

    Args:
        task: The task.

    Returns:
        The trainer.

    Raises:
        InvalidInput: If the task has no settings for its strategy, or the training is new and a setting is too large.
    """
    settings = task.private
    if settings is None or settings.strategy != task.trainer:
        raise InvalidInput(
            "strategy without settings of a private training",
            value=task.trainer,
            limit="a private strategy with an epsilon and a delta",
            remedy="give the budget, for example --epsilon 8",
        )
    names = tuple(name for name, _ in task.patients)
    start = None if task.start is None else sha256_file(task.start)
    identity = training_identity(settings, task.recipe, voter=task.voter, patients=names, deal=task.deal, start=start)
    journal = task.directory / f"journal-{identity[:16]}.jsonl"
    if not journal.exists():
        settings.check_new()
    return PrivateTrainer(
        settings=settings,
        journal=journal,
        identity=identity,
        patients=task.training_slots,
        start=task.start,
        site=task.site,
    )


def planned_charge(task: VoterTask) -> TrainingRecord:
    """Start or find the task's journal, and return what its training costs its patients. Nothing is trained.

    Args:
        task: The task.

    Returns:
        The charge, as the site's ledger records it before the first step.

    Raises:
        InvalidInput: For the reasons in :func:`private_trainer` and :meth:`PrivateTrainer.open`.
    """
    trainer = private_trainer(task)
    journal = trainer.open()
    strategy = f"{ADAPTED}{task.trainer}" if task.leaves else task.trainer
    return TrainingRecord(journal.training_id, task.voter, task.deal, strategy, (journal.plan.event,))


def training_identity(
    settings: PrivateSettings,
    recipe: TrainingConfig,
    *,
    voter: int,
    patients: tuple[str, ...],
    deal: str,
    start: str | None = None,
) -> str:
    """Return the hash that identifies a training by everything that decides its charge and its initial weights.

    Patients' files are not included. Settings that version 0.2.0 did not have are left out at their default, so
    trainings begun with that version keep their identity.

    Args:
        settings: The private settings.
        recipe: The study's recipe of a teacher.
        voter: The voter.
        patients: Names of its patients, in slot order.
        deal: Name of the assignment of patients to voters.
        start: Hash of the public weights to begin from; None for random ones.

    Returns:
        The hash.
    """
    facts = {"eta": 0.02, **settings.facts()}
    if not settings.per_layer:
        del facts["per_layer"]
    plain = json.dumps(facts, default=str, sort_keys=True)
    return digest(
        "private-training",
        {
            **({} if start is None else {"start": start}),
            "deal": deal,
            "patients": list(patients),
            "recipe": repr(recipe),
            "settings": plain,
            "voter": voter,
        },
    )
