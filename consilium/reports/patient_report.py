"""Words what one patient of a hospital risks, for the report and the certificate: trainings, releases, and both.

Reads what ``consilium site status --json`` says of a site's trainings and decides nothing itself: the rule is
:func:`common.privacy.patient_guarantee.combine`.
"""

from __future__ import annotations

from typing import Any

from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.privacy.accounting import Guarantee
from common.privacy.mechanism import Protection, Relation, Unit
from common.privacy.patient_guarantee import EXCHANGED, UNPROTECTED, Combined, combine
from common.privacy.training import Neighbours, TrainingGuarantee

PRINTED = "what `consilium site status --json` prints"


def release_guarantee(spent: dict[str, Any]) -> Guarantee:
    """A pool's spent ε as the site or the server prints it in JSON."""
    return Guarantee(
        epsilon=spent["epsilon"],
        delta=spent["delta"],
        accountant=spent["accountant"],
        protection=Protection(unit=Unit(spent["unit"]), relation=Relation(spent["relation"])),
    )


def patient_lines(trainings: dict[str, Any] | None, release: Guarantee) -> list[str]:
    """One line for each ε of the trainings, and one for what holds in all; none for a site that trained none privately.

    ``trainings`` is the part of a site's status of that name, None from a site that does not report it.
    """
    if not trainings or not trainings["count"]:
        return []
    try:
        found = [_guarantee(one) for one in trainings["guarantees"] if one is not None]
        covers = bool(trainings["covers_every_release"])
        adapted = _guarantee(trainings["adapted"]) if "adapted" in trainings else None
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput("trainings of a site's status", value=type(error).__name__, limit=PRINTED) from error
    left = [] if adapted is None else [f"networks adapted here that may leave: {adapted}"]
    lines = [str(one) for one in found] or [f"{UNPROTECTED}: no patient-level ε of training"]
    try:
        both = str(combined(found, release, covers=covers, adapted=adapted))
    except InvalidInput:  # zero-out releases whose ε, for a patient exchanged, is beyond any use
        both = f"nothing of use for {EXCHANGED}"
    return [*lines, *left, f"with all releases: {both}"]


def identity_lines(rows: list[dict[str, Any]] | None) -> list[str]:
    """What counts as one patient of a pool, one line for each row of the site's ledger that says so, in their order.

    ``rows`` is ``patient_identity`` of a site's status, None or empty from a site whose ledger does not say.
    """
    try:
        found = [(int(row["row"]), PatientIdentity(row["identity"])) for row in rows or ()]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidInput("patient identity of a site's status", value=type(error).__name__, limit=PRINTED) from error
    if not found:
        return ["its ledger does not say what counts as one patient"]
    return [f"from row {row} of its ledger on, {identity.sentence}" for row, identity in found]


def combined(
    found: list[TrainingGuarantee], release: Guarantee, *, covers: bool, adapted: TrainingGuarantee | None = None
) -> Combined:
    """The rule applied to the training's ε for a patient exchanged, or to what there is."""
    same = [one for one in found if str(one.neighbours) == EXCHANGED.relation]
    training = next(iter(same or found), None)
    return combine(training, release, every_release_used_it=covers, adapted=adapted)


def _guarantee(data: dict[str, Any]) -> TrainingGuarantee:
    return TrainingGuarantee(float(data["epsilon"]), float(data["delta"]), Neighbours(data["relation"]))
