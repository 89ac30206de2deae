"""The private trainers as a site runs them: one Trainer for each strategy, a journal per training, a posterior saved.

A training is identified by its voter's patients, recipe and settings, not by what their files hold: a scan that changed
does not start a new training, for that would spend again. Another set of patients, recipe or plan is another training
with its own journal beside the first, and the site's ledger adds it to what was spent.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from client.records.journal import TrainingJournal, training_id_of
from client.training.contract import Part, Trained
from client.training.private.settings import PrivateSettings
from client.training.private.teachers import train_privately
from client.training.private.witness import witness_of
from client.training.task import VoterTask
from common.canonical import digest, sha256_file
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.ledger.keys import sync_directory
from common.models.fit import OnStep
from common.privacy.patient_guarantee import ADAPTED
from common.privacy.training import TrainingEvent


@dataclass(frozen=True, slots=True)
class PrivateTrainer:
    """A private strategy at the given settings; ``journal`` is where this training's steps are kept.

    ``start``: a file of public weights to begin from, None for random ones. ``site``: the directory whose ledger has
    the training on record and is told of every step, None for none.
    """

    settings: PrivateSettings
    journal: Path
    identity: str
    patients: int
    start: Path | None = None
    site: Path | None = None

    def open(self) -> TrainingJournal:
        """The training's journal, begun or continued."""
        return TrainingJournal.open(self.journal, self.settings.plan(patients=self.patients), identity=self.identity)

    def set_aside(self) -> None:
        """Take this journal, and what was made of its steps, out of the way of a training that begins anew.

        The journal stays readable beside the new one; its steps stay charged in the site's ledger.
        """
        folder = self.journal.parent
        aside = self.journal.with_suffix(f".{training_id(self.open())[:12]}.old")
        for name in ("checkpoint.pt", "train.json"):
            (folder / name).unlink(missing_ok=True)
        self.journal.rename(aside)
        sync_directory(folder)

    def train(
        self, part: Part, recipe: TrainingConfig, *, seed: int, checkpoint: Path | None, on_step: OnStep | None
    ) -> Trained:
        """Spend what the plan has left; the last iterate is the teacher."""
        journal = self.open()
        with ExitStack() as opened:
            if self.site is not None:
                steps = journal.plan.event.steps
                journal.watched_by(opened.enter_context(witness_of(self.site, training_id(journal), steps=steps)))
            done = train_privately(
                part,
                recipe,
                self.settings,
                journal,
                seed=seed,
                start=self.start,
                checkpoint=checkpoint,
                on_step=on_step,
            )
        return Trained(
            model=done.model,
            steps=done.applied,
            loss=None,
            seconds=done.seconds,
            event=done.event,
            deviations=done.deviations,
        )


def private_trainer(task: VoterTask) -> PrivateTrainer:
    """The trainer of one voter's task; InvalidInput if the task has no settings for its strategy."""
    settings = task.private
    if settings is None or settings.strategy != task.trainer:
        raise InvalidInput(
            "settings of a private training", value=task.trainer, limit="an epsilon and a delta", remedy="--epsilon 8"
        )
    names = tuple(name for name, _ in task.patients)
    start = None if task.start is None else sha256_file(task.start)
    identity = training_identity(settings, task.recipe, voter=task.voter, patients=names, deal=task.deal, start=start)
    return PrivateTrainer(
        settings=settings,
        journal=task.directory / f"journal-{identity[:16]}.jsonl",
        identity=identity,
        patients=task.training_slots,
        start=task.start,
        site=task.site,
    )


@dataclass(frozen=True, slots=True)
class Charge:
    """What a voter's training costs its patients, as the site's ledger records it before the first step."""

    training_id: str
    voter: int
    deal: str
    strategy: str
    event: TrainingEvent


def planned_charge(task: VoterTask) -> Charge:
    """Begin (or find) the task's journal and say what it may spend; trains nothing."""
    trainer = private_trainer(task)
    journal = trainer.open()
    strategy = f"{ADAPTED}{task.trainer}" if task.leaves else task.trainer
    return Charge(training_id(journal), task.voter, task.deal, strategy, journal.plan.event)


def training_identity(
    settings: PrivateSettings,
    recipe: TrainingConfig,
    *,
    voter: int,
    patients: tuple[str, ...],
    deal: str,
    start: str | None = None,
) -> str:
    """Names a training by what decides its charge and its first weights (``start``: the hash of public ones).

    No patient's file is in it. Trainings of 0.2.0 keep their names: ``eta`` stood in them, and no clip a layer. What
    only dp-mac reads stands in its own names alone.
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


def training_id(journal: TrainingJournal) -> str:
    """What the site's ledger knows a journal's training by."""
    return training_id_of(journal.key)
