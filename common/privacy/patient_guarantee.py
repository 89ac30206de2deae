"""Computes the ε of one patient from the private trainings of its site and the releases of the federation.

Called before a private training, for a site's status, and for reports on patients. Codes from privately trained
teachers are post-processing of those trainings. A patient's ε is then the smaller of the trainings' and the releases'
ε, but only under three conditions:

1. Trainings and releases have the same relation and the same δ.
2. Every release used only teachers that were trained privately.
3. All trainings that ever used the patient's data are composed.

Otherwise both ε are printed. If trainings and releases have the same relation, the sum of both ε is printed too. This
sum always holds, at the sum of both δ.

A teacher never leaves its hospital. A hospital may also fine-tune (adapt) the student to its own patients under
differential privacy, and such an adapted network may leave. Once such a training has begun, every statement about a
patient includes it: the ε of the trainings can be stated alone, the ε of the releases cannot.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import inf, nextafter

from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, guarantee, max_mu_squared
from common.privacy.checks import check_delta, check_number
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.privacy.training import Neighbours, TrainingEvent, TrainingGuarantee, epsilon_of_all

ADAPTED = "adapted-"
"""Prefix of the names of those training strategies whose trained network may leave the hospital (`site adapt
--strategy`).
"""

UNPROTECTED = "a teacher that computes codes comes from no finished private training on record"
"""The reason printed if a site has no patient-level ε for its trainings."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training recorded in a site's ledger.

    Attributes:
        voter: Number of the voter whose patients it used.
        deal: Id of the assignment of patients to voters.
        strategy: Name of the training strategy.
        event: The privacy facts that were charged; None for a training without a guarantee.
        served: True if a teacher of this training computed a code, or would compute the next one.
        finished: False if it has made no teacher yet.
    """

    voter: int
    deal: str
    strategy: str
    event: TrainingEvent | None
    served: bool = False
    finished: bool = field(default=True, compare=False)


@dataclass(frozen=True, slots=True)
class Trainings:
    """All trainings of a site.

    A patient belongs to one voter of a deal, so the trainings of different voters of one deal do not add up.

    Attributes:
        all: The trainings in the order of their rows; a private training occurs once for each teacher that it made.
        every_code_traced: True if codes are recorded, and each names the training of every teacher that computed it.
        untraced: True if a teacher that computed a code, or would compute the next one, comes from no recorded and
            finished training.
        adapted_unknown: True if trainings of networks that may leave the hospital may be missing.
    """

    all: tuple[Training, ...]
    every_code_traced: bool = False
    untraced: bool = False
    adapted_unknown: bool = False

    @property
    def private(self) -> tuple[Training, ...]:
        """The trainings that were charged, including unfinished ones and those whose teacher never computed a code."""
        return tuple(training for training in self.all if training.event is not None)

    def adapted(self, *, delta: float, neighbours: Neighbours) -> TrainingGuarantee | None:
        """Return the patient-level ε of all adapted networks that may leave the hospital, composed.

        Args:
            delta: δ at which ε is stated.
            neighbours: The relation.

        Returns:
            The guarantee, or None if no such training was begun.
        """
        left = (one.event for one in self.private if one.strategy.startswith(ADAPTED))
        events = tuple(event for event in left if event is not None)
        if not events:
            return None
        return TrainingGuarantee(epsilon_of_all(events, delta=delta, neighbours=neighbours), delta, neighbours)

    def guarantee(self, *, delta: float, neighbours: Neighbours) -> TrainingGuarantee | None:
        """Return the patient-level ε of every private training composed, for the voter with the largest ε.

        If patients were assigned to voters more than once, a patient may have been with any voter, so all trainings are
        composed. A training whose teacher never computed a code releases nothing, so it needs no guarantee.

        Args:
            delta: δ at which ε is stated.
            neighbours: The relation.

        Returns:
            The guarantee. None if there is no private training, or a teacher that computed a code comes from no
            recorded and finished private training.
        """
        if not self.private or self.untraced or any(one.served and one.event is None for one in self.all):
            return None
        groups: dict[int, list[TrainingEvent]] = {}
        one_deal = len({training.deal for training in self.private}) == 1
        for training in self.private:
            assert training.event is not None
            groups.setdefault(training.voter if one_deal else 0, []).append(training.event)
        composed = {tuple(events) for events in groups.values()}
        worst = max(epsilon_of_all(events, delta=delta, neighbours=neighbours) for events in composed)
        return TrainingGuarantee(worst, delta, neighbours)

    @property
    def covers_every_release(self) -> bool:
        """True if every code was computed by teachers that are known to come from finished private trainings."""
        served = [training for training in self.all if training.served]
        protected = not self.untraced and all(one.event is not None for one in served)
        return self.every_code_traced and bool(self.private) and protected


EXCHANGED = Protection(Unit.PATIENT, Relation.REPLACE_ONE)
"""Unit and relation of every patient's guarantee. Replace-one is the only sound relation for unit patient."""


@dataclass(frozen=True, slots=True)
class PatientGuarantee:
    """The guarantee of one patient under replace-one, and how it was derived.

    Attributes:
        epsilon: ε, finite and at least 0.
        delta: δ, above 0 and below 1.
        protection: Always :data:`EXCHANGED`: unit patient, relation replace-one.
        rule: How the figure was computed from the trainings and the releases, in words.
        reasons: The conditions that are not met; the module lists all conditions. The smaller of the trainings' ε and
            the releases' ε may be stated only if all are met.

    Raises:
        InvalidInput: If a value is outside its range, or ``protection`` is not :data:`EXCHANGED`.
    """

    epsilon: float
    delta: float
    protection: Protection
    rule: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.protection != EXCHANGED:
            raise InvalidInput("unit and relation of one patient", value=str(self.protection), limit=str(EXCHANGED))
        check_number("epsilon of one patient", self.epsilon, zero=True)
        check_delta("delta of one patient", self.delta)

    def __str__(self) -> str:
        why = f"; not the smaller of the two, because {', and '.join(self.reasons)}" if self.reasons else ""
        stated = f"ε = {epsilon_text(self.epsilon)} at δ = {delta_text(self.delta)}, {self.protection}"
        return f"{stated} ({self.rule}{why})"


SMALLER, SUM, APART = "the smaller of training and releases", "training and releases composed", "releases alone"
TRAINED = "all trainings composed, because a network from one of them may leave the hospital"
WITH_ADAPTED = "releases composed with the network that may leave the hospital"


def of_each_patient(release: Guarantee) -> Guarantee:
    """Return the guarantee of releases for one patient under replace-one.

    * Unit patient: the same guarantee.
    * Unit hospital under replace-one: the same, because a hospital with one patient exchanged is another hospital.
    * Unit hospital under zero-out: replacing a patient equals two steps, to the zero code and from it. Each step
      changes a release by at most its sensitivity, so μ doubles, and ε is that of 4·Σμ² by the same accountant at the
      same δ. Σμ² is recovered from ``release`` as the largest value that its ε allows, times 1 + 2⁻⁴⁰ for rounding.

    Args:
        release: The guarantee of the releases, for a group of 1.

    Returns:
        The guarantee for unit patient, relation replace-one.

    Raises:
        InvalidInput: If ``release`` is the guarantee of a group, if its accountant may not decide on a budget
            (``pld``), or if its ε is too large.

    Source: triangle inequality on the sensitivity; Dong, Roth & Su 2022, Theorem 2.14.
    """
    if release.group != 1:
        raise InvalidInput("group of a guarantee", value=release.group, limit="1: one patient")
    if release.protection.relation is Relation.REPLACE_ONE or release.epsilon == 0:
        return replace(release, protection=EXCHANGED)
    budget = Budget(release.epsilon, release.delta)
    most = max_mu_squared(AccountantName(release.accountant), budget) * (1 + Fraction(1, 2**40))
    return replace(
        guarantee(most, budget, release.protection, release.accountant, group=2), protection=EXCHANGED, group=1
    )


def combine(
    training: TrainingGuarantee | None,
    release: Guarantee,
    *,
    every_release_used_it: bool,
    adapted: TrainingGuarantee | None = None,
) -> PatientGuarantee:
    """Return one patient's guarantee from its site's trainings and the federation's releases.

    If trainings and releases have the same relation, the sum of their ε at the sum of their δ always holds (basic
    composition). Without a training under replace-one, the releases' guarantee is returned; this guarantee holds
    however the teachers were trained.

    Args:
        training: The guarantee of all trainings that used the patient's data, composed; None if some teacher has none.
        release: The releases' guarantee; it is converted by :func:`of_each_patient`.
        every_release_used_it: True if every release used only teachers from the trainings that ``training`` composes.
        adapted: The guarantee, under replace-one, of the trainings of networks that may leave the hospital; None if
            there are none. If it is given, the releases' ε alone is never returned, because it does not cover these
            networks.

    Returns:
        The guarantee and the rule that gave it.

    Raises:
        InvalidInput: If ``adapted`` has another relation, or ``release`` cannot be converted.
    """
    alone = of_each_patient(release)
    relation = str(EXCHANGED.relation)
    if adapted is not None and str(adapted.neighbours) != relation:
        raise InvalidInput("relation of an adapted network's training", value=adapted.neighbours, limit=relation)
    if training is None:
        return _apart(alone, adapted, ("not every teacher was trained with a guarantee",))
    reasons = tuple(
        text
        for holds, text in (
            (str(training.neighbours) == relation, "training and releases differ in relation"),
            (training.delta == alone.delta, "training and releases differ in δ"),
            (every_release_used_it, "not every release used these trainings alone"),
        )
        if not holds
    )
    if not reasons and adapted is not None:
        return PatientGuarantee(training.epsilon, training.delta, EXCHANGED, TRAINED)
    if not reasons:
        return PatientGuarantee(min(training.epsilon, alone.epsilon), alone.delta, EXCHANGED, SMALLER)
    both = _sum_up(training.epsilon, alone.epsilon), _sum_up(training.delta, alone.delta)
    if str(training.neighbours) != relation or both[1] >= 1:
        return _apart(alone, adapted, reasons)
    return PatientGuarantee(*both, EXCHANGED, SUM, reasons)


def _apart(alone: Guarantee, adapted: TrainingGuarantee | None, reasons: tuple[str, ...]) -> PatientGuarantee:
    """Return the releases' guarantee, which holds however the teachers were trained.

    If networks may leave the hospital, the guarantee of their trainings (``adapted``) is added to it.
    """
    if adapted is None:
        return PatientGuarantee(alone.epsilon, alone.delta, EXCHANGED, APART, reasons)
    both = _sum_up(adapted.epsilon, alone.epsilon), _sum_up(adapted.delta, alone.delta)
    return PatientGuarantee(*both, EXCHANGED, WITH_ADAPTED, reasons)


def worst(sites: Collection[PatientGuarantee]) -> PatientGuarantee:
    """Return the guarantee of the site whose patients are protected least.

    Args:
        sites: At least one site's guarantee.

    Returns:
        The one with the largest ε, then the largest δ.
    """
    return max(sites, key=lambda site: (site.epsilon, site.delta))


def _sum_up(first: float, second: float) -> float:
    """Return the smallest float64 that is not below the exact sum."""
    total = first + second
    return total if Fraction(total) >= Fraction(first) + Fraction(second) else nextafter(total, inf)
