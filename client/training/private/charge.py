"""Records a site's trainings in its own ledger, and charges private ones before their first step.

`site train` and `site adapt` call it. Every training is recorded, with the hash of the teacher that it made and with
the assignment of patients to voters (the deal) that it used. Each teacher that answers queries can therefore be traced
to one training or to none. It refuses a private training without a ledger, a second private training on the same
patients unless ``again`` is given, and a training whose folder was restored from an older copy. The ledger counts each
step before it is taken, so that no step is taken twice for one charge.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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
from common.ledger.teacher_records import TrainingRecord
from common.privacy.patient_guarantee import Training, Trainings
from common.privacy.training import Neighbours


def record_trainings(
    site_dir: Path, tasks: Sequence[VoterTask], *, again: bool, identity: PatientIdentity | None = None
) -> None:
    """Record the trainings of all voters, and charge the private ones. A training already on record adds nothing.

    A directory without ``site.toml`` has no ledger, so its teachers have no training on record.

    Args:
        site_dir: The site's directory.
        tasks: The voters' tasks.
        again: True to train and charge again patients who were already charged for a private training.
        identity: What counts as one patient in the dataset; None to keep the definition on record.

    Raises:
        InvalidInput: If a private training has no ledger, or repeats one on the same patients without ``again``.
    """
    if not (site_dir / "site.toml").exists():
        if all(task.private is None for task in tasks):
            return
        raise InvalidInput(
            "a private training needs the site's ledger", value=str(site_dir), remedy="run `consilium site init` first"
        )
    _check_settings(tasks)
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
                ledger.record_training(TrainingRecord(_training_id(task), task.voter, task.deal, task.trainer, ()))


def charge_adapted(site_dir: Path, task: VoterTask, *, again: bool, identity: PatientIdentity) -> None:
    """Charge the training of a network that may leave the hospital, before its first step.

    The training uses all patients of the pool, so its cost adds to the cost of every other training of these patients.
    A training that is already on record adds nothing.

    Args:
        site_dir: The site's directory.
        task: The training.
        again: True to train and charge again patients who were already charged for a private training.
        identity: What counts as one patient in the dataset.

    Raises:
        InvalidInput: If the patients were charged for a private training already and ``again`` is False.
    """
    _check_settings([task])
    _, ledger = _ledger(site_dir)
    with ledger:
        ledger.state_identity(identity)
        _charge(ledger, ledger.trainings(), task, again=again)


def record_adapted(site_dir: Path, task: VoterTask) -> None:
    """Record the network that a private adaptation made, which may leave the hospital.

    Args:
        site_dir: The site's directory.
        task: The training.
    """
    _, ledger = _ledger(site_dir)
    with ledger:
        ledger.record_trained(_training_id(task), trained_hash(task.directory))


def record_trained(site_dir: Path, tasks: Sequence[VoterTask], report: SiteReport) -> None:
    """Record the teacher that each finished training made. A teacher that is already on record adds nothing.

    If the process dies before this call, the teacher has no training on record until the same command is run again. A
    teacher whose training began without a record has no training on record either.

    Args:
        site_dir: The site's directory.
        tasks: The voters' tasks.
        report: The result of the trainings.
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
            if served and (training_id := _training_id(task)) in ledger.books.teachers.trainings:
                ledger.record_trained(training_id, served, dealt=deal)


def _training_id(task: VoterTask) -> str:
    """Return the training's id in the ledger.

    Trainings without differential privacy have the same id if deal, strategy and voter are the same, because they need
    not be told apart.
    """
    from client.training.private.trainer import planned_charge

    if task.private is not None:
        return planned_charge(task).training_id
    return digest("plain-training", {"deal": task.deal, "strategy": task.trainer, "voter": task.voter})


def _check_settings(tasks: Sequence[VoterTask]) -> None:
    """Refuse settings of a private training before anything is recorded."""
    from client.training.private.trainer import private_trainer

    for task in tasks:
        if task.private is not None:
            private_trainer(task)


def _ledger(site_dir: Path) -> tuple[SiteConfig, SiteLedger]:
    config = load_site(site_dir)
    return config, open_books(config)


def _charge(ledger: SiteLedger, known: Trainings, task: VoterTask, *, again: bool) -> None:
    from client.training.private.trainer import planned_charge, private_trainer

    assert task.private is not None
    trainer = private_trainer(task)
    begun, charge = trainer.journal.exists(), planned_charge(task)
    spent, on_record = trainer.open().spent, charge.training_id in ledger.books.teachers.trainings
    if spent and not on_record:  # a step is charged before it is drawn: the row was lost
        ledger.record_training(charge)
        ledger.record_drawn(charge.training_id, charge.events[0].steps, after=0)
    if spent or on_record:
        older = _why_not_resumed(ledger, charge, task, spent=spent)
        if older is None:
            return
        if not again:
            raise InvalidInput(
                f"the private training of {_network_name(task)} cannot resume from this folder",
                value=older,
                limit="the newest copy of its folder, and the settings of the study's data with which it began",
                remedy=f"restore the newest copy of {task.directory}; or train again from the beginning with --again, "
                "which charges its patients once more",
            )
        task.private.check_new()
        trainer.set_aside()
        charge = planned_charge(task)
    earlier = [one for one in known.private if one.voter == charge.voter or one.deal != charge.deal]
    if earlier and not again:
        new = Training(charge.voter, charge.deal, charge.strategy, charge.event)
        total = Trainings((*earlier, new)).guarantee(delta=task.private.delta, neighbours=Neighbours.ADD_REMOVE)
        total = None if known.adapted_unknown else total
        if not begun:
            trainer.journal.unlink()
        raise InvalidInput(
            f"the patients of {_network_name(task)} were already charged for a private training",
            value=f"{'no guarantee' if total is None else total} in total with this training",
            remedy="keep the finished training; or give --again, which trains on these patients again and adds the "
            "cost to what they have spent",
        )
    ledger.record_training(charge)


def _network_name(task: VoterTask) -> str:
    return "the adapted network" if task.leaves else f"teacher {task.voter}"


def _why_not_resumed(ledger: SiteLedger, charge: TrainingRecord, task: VoterTask, *, spent: int) -> str | None:
    """Return the reason why a recorded training cannot continue in a voter's folder; None if it can.

    There are two kinds of reasons. The folder may be an older copy, which lacks some steps. These steps would then be
    trained twice but charged once. Or the training has finished with other settings of the study's data. It then has no
    step left to train a teacher with the present settings. ``spent`` is the number of steps in the folder's journal.
    """
    from client.training.voter import is_finished

    made, drawn = ledger.books.teachers.made(charge.training_id), ledger.drawn(charge.training_id)
    if made:
        if trained_hash(task.directory) not in made:
            return "the folder lacks the teacher that this training made"
        return None if is_finished(task) else "its teacher was made with other settings of the study's data"
    if spent < drawn and ledger.lost_rows_since(charge.training_id):
        return "the site's ledger was restored after this training began, so the number of drawn steps is unknown"
    (event,) = charge.events
    if drawn - spent >= steps_a_row(event.steps):
        return f"{drawn} of the training's {event.steps} steps were drawn, but this folder records only {spent}"
    return None
