"""Trainings in the site's own ledger: on record before the first step, charged if private, and what each one made.

Every training is recorded, also one without a guarantee, and at its end the hash of the teacher it made: so that what a
worker serves is known by its bytes to come from one training or from none. Refuses a private training without a ledger
to charge, and a second training on patients who paid for one already, unless that is what was asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from client.ledger.site_ledger import SiteLedger
from client.training.task import SiteReport, VoterReport, VoterTask
from common.canonical import digest
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.privacy.patient_guarantee import Training, Trainings
from common.privacy.training import Neighbours


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
    with _ledger(site_dir) as ledger:
        if identity is not None:
            ledger.state_identity(identity)
        known = ledger.trainings()
        for task in tasks:
            if task.private is not None:
                _charge(ledger, known, task, again=again)
            else:
                ledger.record_training(
                    _training_id(task), voter=task.voter, deal=task.deal, strategy=task.trainer, event=None
                )


def record_trained(site_dir: Path, tasks: Sequence[VoterTask], report: SiteReport) -> None:
    """Put on record which teacher each training made that came to its end; what is there already adds nothing.

    Until then (a crash in between) the teacher comes from no training that the record knows, and so does one whose
    training was begun without a record. Running the same training again finishes it.
    """
    if not (site_dir / "site.toml").exists():
        return
    task_of = {task.voter: task for task in tasks}
    with _ledger(site_dir) as ledger:
        for voter in report.voters:
            task = task_of[voter.voter]
            served = _made(task, voter)
            if served is not None and ledger.has_training(training_id := _training_id(task)):
                ledger.record_trained(training_id, served)


def _made(task: VoterTask, report: VoterReport) -> str | None:
    """The hash of a voter's teacher as a worker will load it; None for a voter without one."""
    from client.teachers.teacher import served_hash

    if report.weights is None:
        return None
    posterior = json.loads((task.directory / "train.json").read_text(encoding="utf-8"))["posterior"]
    return served_hash(report.weights, posterior)


def _training_id(task: VoterTask) -> str:
    """What the ledger knows a training by; all of one voter that have no guarantee are one, since they count alike."""
    from client.training.private.trainer import planned_charge

    if task.private is not None:
        return planned_charge(task).training_id
    return digest("plain-training", {"deal": task.deal, "strategy": task.trainer, "voter": task.voter})


def _ledger(site_dir: Path) -> SiteLedger:
    from client.policy import load_site
    from client.site.books import open_books

    return open_books(load_site(site_dir))


def _charge(ledger: SiteLedger, known: Trainings, task: VoterTask, *, again: bool) -> None:
    from client.training.private.trainer import planned_charge

    charge = planned_charge(task)
    if ledger.has_training(charge.training_id):
        return
    earlier = [one for one in known.private if one.voter == charge.voter or one.deal != charge.deal]
    if earlier and not again:
        assert task.private is not None
        new = Training(charge.voter, charge.deal, charge.strategy, charge.event)
        total = Trainings((*earlier, new)).guarantee(delta=task.private.delta, neighbours=Neighbours.ADD_REMOVE)
        raise InvalidInput(
            f"patients of teacher {charge.voter} have paid for a training already",
            value="no guarantee in all" if total is None else str(total),
            remedy="--again if this training shall be added to what they paid",
        )
    ledger.record_training(
        charge.training_id, voter=charge.voter, deal=charge.deal, strategy=charge.strategy, event=charge.event
    )
