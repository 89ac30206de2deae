"""Computes the total risk of one patient: private trainings of the site, releases of the federation, and both.

A release of codes from privately trained teachers is post-processing of those trainings, so a patient is covered by the
smaller of the two ε, but only if (1) both stand under one relation and one δ, (2) every release used only teachers
trained that way, and (3) all trainings that ever saw the patient are composed. Otherwise both are printed, with
what holds in any case: under one relation, their sum at the sum of the δ.

A network that a hospital adapted privately may leave it, which no teacher does. Whatever is stated of a patient then
covers that training too: the smaller of the two is only the trainings' own ε, and releases never stand alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf, nextafter

from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, guarantee, max_mu_squared
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.privacy.training import Neighbours, TrainingEvent, TrainingGuarantee, epsilon_of_all

ADAPTED = "adapted-"
"""Before the strategy of a training whose network may leave the hospital (`site adapt --strategy`)."""

UNPROTECTED = "a teacher is served that no finished private training on record made"
"""Why a site has no patient-level ε of its trainings."""


@dataclass(frozen=True, slots=True)
class Training:
    """One training on a site's record; ``served``: a teacher it made computed a code, or would compute the next."""

    voter: int
    deal: str
    strategy: str
    event: TrainingEvent | None
    served: bool = False


@dataclass(frozen=True, slots=True)
class Trainings:
    """All trainings of a site. A patient belongs to one voter of a deal, so voters of one deal do not add up.

    ``every_code_traced``: there are codes on record, and each names the training of every teacher that computed it.
    ``untraced``: a teacher was served, or would be, that comes from no finished training on record.
    """

    all: tuple[Training, ...]
    every_code_traced: bool = False
    untraced: bool = False

    @property
    def private(self) -> tuple[Training, ...]:
        """Those that were charged: begun or finished, served or not, all count."""
        return tuple(training for training in self.all if training.event is not None)

    def adapted(self, *, delta: float, neighbours: Neighbours) -> TrainingGuarantee | None:
        """The patient-level ε of the networks that may leave, all composed; None where none was begun."""
        left = (one.event for one in self.private if one.strategy.startswith(ADAPTED))
        events = tuple(event for event in left if event is not None)
        if not events:
            return None
        return TrainingGuarantee(epsilon_of_all(events, delta=delta, neighbours=neighbours), delta, neighbours)

    def guarantee(self, *, delta: float, neighbours: Neighbours) -> TrainingGuarantee | None:
        """The patient-level ε of every private training composed, for the worst voter; None if there is none, or if a
        teacher was served that no finished private training on record made. One that never was says nothing to anybody.

        With patients dealt more than once nobody can say which voters a patient met: then everything is composed.
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
        """Whether no release used a teacher without a guarantee: every code was computed with teachers whose bytes are
        known to come from finished private trainings, whatever else was trained and never served."""
        served = [training for training in self.all if training.served]
        protected = not self.untraced and all(one.event is not None for one in served)
        return self.every_code_traced and bool(self.private) and protected

    def to_json(self, *, delta: float) -> dict[str, object]:
        """Counts, strategies and the patient-level ε under both relations, or null where there is none.

        ``adapted``, the ε of networks that may leave, is left out where there is none.
        """
        left = self.adapted(delta=delta, neighbours=Neighbours(EXCHANGED.relation))
        return {
            "count": len(self.private),
            "strategies": sorted({one.strategy for one in self.all if one.served or one.event is not None}),
            "guarantees": [
                None if found is None else found.to_json()
                for neighbours in Neighbours
                if self.all
                for found in [self.guarantee(delta=delta, neighbours=neighbours)]
            ],
            **({} if left is None else {"adapted": left.to_json()}),
        }


EXCHANGED = Protection(Unit.PATIENT, Relation.REPLACE_ONE)
"""What a patient is promised by releases: exchanged for any other, the one relation that is sound for this unit."""


@dataclass(frozen=True, slots=True)
class Combined:
    """What holds for one patient: ``epsilon`` at ``delta``, always exchanged for any other, and why it is that one.

    Another unit or relation is refused: see :data:`EXCHANGED`.
    """

    epsilon: float
    delta: float
    protection: Protection
    rule: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.protection != EXCHANGED:
            raise InvalidInput("unit and relation of one patient", value=str(self.protection), limit=str(EXCHANGED))
        if not 0 <= self.epsilon < inf:
            raise InvalidInput("epsilon of one patient", value=self.epsilon, limit="a finite number, 0 or above")
        if not 0 < self.delta < 1:
            raise InvalidInput("delta of one patient", value=self.delta, limit="above 0 and below 1")

    def __str__(self) -> str:
        why = f"; not the smaller of the two, because {', and '.join(self.reasons)}" if self.reasons else ""
        stated = f"ε = {epsilon_text(self.epsilon)} at δ = {delta_text(self.delta)}, {self.protection}"
        return f"{stated} ({self.rule}{why})"


SMALLER, SUM, APART = "the smaller of training and releases", "training and releases composed", "releases alone"
TRAINED = "all trainings composed, since a network of them may leave"
WITH_ADAPTED = "releases and the network that may leave composed"


def of_each_patient(release: Guarantee) -> Guarantee:
    """What releases that cost ``release`` cost one patient who is exchanged for any other.

    Unit patient: the same. Unit hospital under replace-one: the same, for a hospital with one patient exchanged is
    another hospital. Unit hospital under zero-out: from one patient's data to another's by way of the zero code is two
    steps of Δ = m·R, so every release moves by at most 2m·R: μ doubles, and ε is that of 4·Σμ² by the same accountant
    at the same δ. Σμ² is bounded by the largest that ``release`` allows, which is it up to a part in 2⁴⁰.
    InvalidInput for a group's guarantee, for an accountant that gates nothing, and for an ε beyond any use.
    Source: triangle inequality on Δ; Dong, Roth & Su 2022, Theorem 2.14.
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
    all_composed: bool = True,
    adapted: TrainingGuarantee | None = None,
) -> Combined:
    """One patient's guarantee from its site's trainings and the federation's releases.

    ``release`` is taken for one patient (:func:`of_each_patient`). Under one relation ε_training + ε_release at δ + δ
    always holds (basic composition). Without a training under the releases' relation, replace-one, the releases stand
    alone: they protect the patient whatever the training was.

    ``adapted``: the networks that may leave, among the trainings; under replace-one. With them neither the releases'
    smaller ε nor the releases alone covers a patient.
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
            (all_composed, "not all trainings are composed"),
        )
        if not holds
    )
    if not reasons and adapted is not None:
        return Combined(training.epsilon, training.delta, EXCHANGED, TRAINED)
    if not reasons:
        return Combined(min(training.epsilon, alone.epsilon), alone.delta, EXCHANGED, SMALLER)
    both = _sum_up(training.epsilon, alone.epsilon), _sum_up(training.delta, alone.delta)
    if str(training.neighbours) != relation or both[1] >= 1:
        return _apart(alone, adapted, reasons)
    return Combined(*both, EXCHANGED, SUM, reasons)


def _apart(alone: Guarantee, adapted: TrainingGuarantee | None, reasons: tuple[str, ...]) -> Combined:
    """The releases without the teachers' trainings, and what may leave beside them."""
    if adapted is None:
        return Combined(alone.epsilon, alone.delta, EXCHANGED, APART, reasons)
    both = _sum_up(adapted.epsilon, alone.epsilon), _sum_up(adapted.delta, alone.delta)
    return Combined(*both, EXCHANGED, WITH_ADAPTED, reasons)


def worst(sites: Collection[Combined]) -> Combined:
    """The site whose patients are protected least."""
    return max(sites, key=lambda site: (site.epsilon, site.delta))


def _sum_up(first: float, second: float) -> float:
    """The least float64 that is not below the sum."""
    total = first + second
    return total if Fraction(total) >= Fraction(first) + Fraction(second) else nextafter(total, inf)
