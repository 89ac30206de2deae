"""Trainings in the site's own ledger: on record before the first step, charged if private, and what each one made.

Every training is recorded, also one without a guarantee, and at its end the hash of the teacher it made: so that what a
worker serves is known by its bytes to come from one training or from none. With it goes the deal of the patients.
Refuses a private training without a ledger to charge, and a second training on patients who paid for one already,
unless that is what was asked for. Where teachers came back from a backup it refuses likewise: the ledger knows how far
a training got, and steps that were drawn are not drawn again for the same charge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from client.ledger.site_ledger import SiteLedger
from client.policy import SiteConfig, load_site
from client.records.served import trained_hash
from client.site.books import open_books
from client.site.deals import dealt, record_deal
from client.training.private.witness import steps_a_row
from client.training.task import SiteReport, VoterTask
from common.canonical import digest
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.privacy.patient_guarantee import Training, Trainings
from common.privacy.training import Neighbours

if TYPE_CHECKING:
    from client.training.private.trainer import Charge


def record_trainings(
    site_dir: Path, tasks: Sequence[VoterTask], *, again: bool, identity: PatientIdentity | None = None
) -> None:
    """Put these trainings on record, and ``identity``, what a patient of theirs is; what is there already adds nothing.

    A directory without site.toml has no record: its teachers' training will count as none. InvalidInput if a private
    training has no ledger, or would be another one on the same voter's patients without ``again``.
    """
    if not (site_dir / "site.toml").exists():
        if all(task.private is None for task in tasks):
            return
        raise InvalidInput(
            "a private training needs the site's ledger", value=str(site_dir), remedy="`consilium site init` first"
        )
    config, ledger = _ledger(site_dir)
    with ledger:
        if identity is not None:
            ledger.state_identity(identity)
        record_deal(config, ledger)
        known = ledger.trainings()
        for task in tasks:
            if task.private is not None:
                _charge(ledger, known, task, again=again)
            else:
                ledger.record_training(
                    _training_id(task), voter=task.voter, deal=task.deal, strategy=task.trainer, event=None
                )


def charge_adapted(site_dir: Path, task: VoterTask, *, again: bool, identity: PatientIdentity) -> None:
    """Charge the training of a network that may leave, before its first step; what is there already adds nothing.

    It is of no voter and no deal: it counts beside every other training of the pool's patients. InvalidInput if they
    have paid for a private training already, without ``again``.
    """
    _, ledger = _ledger(site_dir)
    with ledger:
        ledger.state_identity(identity)
        _charge(ledger, ledger.trainings(), task, again=again)


def record_adapted(site_dir: Path, task: VoterTask) -> None:
    """Put on record which network the training made that may leave."""
    _, ledger = _ledger(site_dir)
    with ledger:
        ledger.record_trained(_training_id(task), trained_hash(task.directory))


def record_trained(site_dir: Path, tasks: Sequence[VoterTask], report: SiteReport) -> None:
    """Put on record which teacher each training made that came to its end; what is there already adds nothing.

    Until then (a crash in between) the teacher comes from no training that the record knows, and so does one whose
    training was begun without a record. Running the same training again finishes it.
    """
    if not (site_dir / "site.toml").exists():
        return
    task_of = {task.voter: task for task in tasks}
    config, ledger = _ledger(site_dir)
    with ledger:
        deal = dealt(config)
        for voter in report.voters:
            task = task_of[voter.voter]
            served = trained_hash(task.directory) if voter.weights is not None else ""
            if served and ledger.has_training(training_id := _training_id(task)):
                ledger.record_trained(training_id, served, dealt=deal)


def _training_id(task: VoterTask) -> str:
    """What the ledger knows a training by; all of one voter that have no guarantee are one, since they count alike."""
    from client.training.private.trainer import planned_charge

    if task.private is not None:
        return planned_charge(task).training_id
    return digest("plain-training", {"deal": task.deal, "strategy": task.trainer, "voter": task.voter})


def _ledger(site_dir: Path) -> tuple[SiteConfig, SiteLedger]:
    config = load_site(site_dir)
    return config, open_books(config)


def _charge(ledger: SiteLedger, known: Trainings, task: VoterTask, *, again: bool) -> None:
    from client.training.private.trainer import planned_charge, private_trainer

    charge, trainer = planned_charge(task), private_trainer(task)
    spent = trainer.open().spent
    if spent and not ledger.has_training(charge.training_id):  # charged before its first step: that row is lost
        _record(ledger, charge)
        ledger.record_drawn(charge.training_id, charge.event.steps, after=0)
    if ledger.has_training(charge.training_id):
        older = _older_copy(ledger, charge, task, spent=spent)
        if older is None:
            return
        if not again:
            raise InvalidInput(
                f"private training of {_whose(task)} cannot resume from this folder",
                value=older,
                limit="the newest copy of its folder",
                remedy=f"put {task.directory} back as it was last; or --again trains it anew, which its patients pay "
                "for as for another training",
            )
        trainer.set_aside()
        charge = planned_charge(task)
    earlier = [one for one in known.private if one.voter == charge.voter or one.deal != charge.deal]
    if earlier and not again:
        assert task.private is not None
        new = Training(charge.voter, charge.deal, charge.strategy, charge.event)
        total = Trainings((*earlier, new)).guarantee(delta=task.private.delta, neighbours=Neighbours.ADD_REMOVE)
        raise InvalidInput(
            f"patients of {_whose(task)} were already charged for a private training",
            value="no guarantee in all" if total is None else str(total),
            remedy="--again trains once more and adds its cost to theirs",
        )
    _record(ledger, charge)


def _whose(task: VoterTask) -> str:
    return "the adapted network" if task.leaves else f"teacher {task.voter}"


def _record(ledger: SiteLedger, charge: Charge) -> None:
    ledger.record_training(
        charge.training_id, voter=charge.voter, deal=charge.deal, strategy=charge.strategy, event=charge.event
    )


def _older_copy(ledger: SiteLedger, charge: Charge, task: VoterTask, *, spent: int) -> str | None:
    """What shows that a voter's folder is older than the training on record, so that going on would draw steps again;
    None if nothing does. ``spent`` are the steps its journal has."""
    made, drawn = ledger.made(charge.training_id), ledger.drawn(charge.training_id)
    if made:
        return None if trained_hash(task.directory) in made else "the teacher it made is not there"
    if spent < drawn and ledger.lost_rows_since(charge.training_id):
        return "the site's ledger was restored since it began, and nobody can say how far it got"
    if drawn - spent >= steps_a_row(charge.event.steps):
        return f"{drawn} of its {charge.event.steps} steps were drawn, and this folder knows of {spent}"
    return None
