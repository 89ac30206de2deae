"""Trainings in the site's own ledger: charged before the first step, and what counts as a patient beside them.

Refuses a private training without a ledger to charge, and a second training on patients who paid for one already,
unless that is what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from common.canonical import digest
from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.ledger.site import SiteLedger
from common.privacy.patients import Training, Trainings
from common.privacy.training import Neighbours

if TYPE_CHECKING:
    from client.training.site import VoterTask


def record_trainings(
    site_dir: Path, tasks: Sequence[VoterTask], *, again: bool, identity: PatientIdentity | None = None
) -> None:
    """Put these trainings on record, and ``identity``, what a patient of theirs is; what is there already adds nothing.

    A training without a guarantee is recorded only beside private ones, since it ends what they promised. InvalidInput
    if a private training has no ledger, or would be another one on the same voter's patients without ``again``.
    """
    from client.policy import load_site

    private = [task for task in tasks if task.private is not None]
    path = site_dir / "site-ledger.sqlite"
    if not private and not path.exists():
        return
    if not (site_dir / "site.toml").exists():
        if not private:
            return
        raise InvalidInput(
            "a private training needs the site's ledger", value=str(site_dir), remedy="`consilium site init` first"
        )
    config = load_site(site_dir)
    with SiteLedger.open(path, config.pool, caps=config.caps, site=config.site) as ledger:
        if identity is not None:
            ledger.state_identity(identity)
        known = ledger.trainings()
        for task in private:
            _charge(ledger, known, task, again=again)
        if not private and known.all:
            for task in tasks:
                plain = digest("plain-training", {"deal": task.deal, "row": ledger.head().seq, "voter": task.voter})
                ledger.record_training(plain, voter=task.voter, deal=task.deal, strategy=task.trainer, event=None)


def _charge(ledger: SiteLedger, known: Trainings, task: VoterTask, *, again: bool) -> None:
    from client.training.private.trainer import charge_of

    charge = charge_of(task)
    if ledger.has_training(charge.training_id):
        return
    earlier = [one for one in known.all if one.voter == charge.voter or one.deal != charge.deal]
    if earlier and not again:
        assert task.private is not None
        new = Training(charge.voter, charge.deal, charge.strategy, charge.event, before_releases=False)
        total = Trainings((*earlier, new)).guarantee(delta=task.private.delta, neighbours=Neighbours.ADD_REMOVE)
        raise InvalidInput(
            f"patients of teacher {charge.voter} have paid for a training already",
            value="no guarantee in all" if total is None else str(total),
            remedy="--again if this training shall be added to what they paid",
        )
    ledger.record_training(
        charge.training_id, voter=charge.voter, deal=charge.deal, strategy=charge.strategy, event=charge.event
    )
