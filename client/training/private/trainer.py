"""The private trainers as a site runs them: one Trainer for each strategy, a journal per training, a posterior saved.

A training is identified by its voter's patients, recipe and settings, not by what their files hold: a scan that changed
does not start a new training, for that would spend again. Another set of patients, recipe or plan is another training
with its own journal beside the first, and the site's ledger adds it to what was spent.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from client.training.base import Part, Trained
from client.training.private.journal import Journal
from client.training.private.settings import PrivateSettings
from client.training.private.teachers import train_privately
from client.training.task import VoterTask
from common.canonical import digest, sha256_file
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.models.fit import OnStep
from common.privacy.training import TrainingEvent


@dataclass(frozen=True, slots=True)
class PrivateTrainer:
    """DP-SGD or DP-BBB at the given settings; ``journal`` is where this training's steps are kept.

    ``start``: a file of public weights to begin from, None for random ones.
    """

    settings: PrivateSettings
    journal: Path
    identity: str
    patients: int
    start: Path | None = None

    def open(self) -> Journal:
        """The training's journal, begun or continued."""
        return Journal.open(self.journal, self.settings.plan(patients=self.patients), identity=self.identity)

    def train(
        self, part: Part, recipe: TrainingConfig, *, seed: int, checkpoint: Path | None, on_step: OnStep | None
    ) -> Trained:
        """Spend what the plan has left; the last iterate is the teacher."""
        journal = self.open()
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
    return Charge(training_id(journal), task.voter, task.deal, task.trainer, journal.plan.event)


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

    No patient's file is in it. Trainings of 0.2.0 keep their names: ``eta`` stood in them, and no clip a layer.
    """
    facts = {"eta": 0.02, **dataclasses.asdict(settings)}
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


def training_id(journal: Journal) -> str:
    """What the site's ledger knows a training by: a hash of its journal's own key, so a new journal is a new charge."""
    return sha256(b"training\0" + journal.key).hexdigest()
