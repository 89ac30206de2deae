"""States in words what one patient of a hospital risks: by trainings, by releases, and by both.

The report and the certificate call it. It reads a site's status (``consilium site status --json``); the rule that
combines both is :func:`common.privacy.patient_guarantee.combine`. Refuses a status of another form.
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
    """Read a pool's spent ε from the JSON of a site or the server.

    Args:
        spent: The JSON values.

    Returns:
        The guarantee.
    """
    return Guarantee(
        epsilon=spent["epsilon"],
        delta=spent["delta"],
        accountant=spent["accountant"],
        protection=Protection(unit=Unit(spent["unit"]), relation=Relation(spent["relation"])),
    )


def patient_lines(trainings: dict[str, Any] | None, release: Guarantee) -> list[str]:
    """Describe a patient's risk: one line for each ε of the trainings, and one for everything together.

    Args:
        trainings: ``trainings`` of a site's status; None if the site does not report it.
        release: The guarantee of the releases.

    Returns:
        The lines; empty if the site has no training.

    Raises:
        InvalidInput: If the status has another form.
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
    except InvalidInput:  # zero-out releases: ε for an exchanged patient is too large to be useful
        both = f"nothing of use for {EXCHANGED}"
    return [*lines, *left, f"with all releases: {both}"]


def identity_lines(rows: list[dict[str, Any]] | None) -> list[str]:
    """Describe what counts as one patient of a pool: one line for each row of the site's ledger that states it.

    Args:
        rows: ``patient_identity`` of a site's status; None or empty if the ledger does not state it.

    Returns:
        The lines.

    Raises:
        InvalidInput: If the status has another form.
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
    """Combine the trainings' ε for an exchanged patient, or the first one there is, with the releases.

    Args:
        found: Guarantees of the trainings.
        release: The guarantee of the releases.
        covers: Every release used these trainings.
        adapted: Guarantee of networks that may leave; None without any.

    Returns:
        The combined guarantee.
    """
    same = [one for one in found if str(one.neighbours) == EXCHANGED.relation]
    training = next(iter(same or found), None)
    return combine(training, release, every_release_used_it=covers, adapted=adapted)


def _guarantee(data: dict[str, Any]) -> TrainingGuarantee:
    return TrainingGuarantee(float(data["epsilon"]), float(data["delta"]), Neighbours(data["relation"]))
