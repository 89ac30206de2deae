"""What a patient of a site risks in all: its site's private trainings, the federation's releases, and both together.

A release of codes from privately trained teachers is post-processing of those trainings, so a patient is covered by the
smaller of the two ε, but only if (1) both stand under one relation and one δ, (2) every release used only teachers
trained that way, and (3) all trainings that ever saw the patient are composed. Otherwise both are printed, with
what holds in any case: under one relation, their sum at the sum of the δ.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from common.privacy.accounting import Guarantee
from common.privacy.mechanism import Relation, Unit
from common.privacy.training import Neighbours, TrainingEvent, TrainingGuarantee, epsilon_of_all


@dataclass(frozen=True, slots=True)
class Training:
    """One training on a site's record; ``before_releases``: it began before the site accepted its first query."""

    voter: int
    deal: str
    strategy: str
    event: TrainingEvent | None
    before_releases: bool


@dataclass(frozen=True, slots=True)
class Trainings:
    """All trainings of a site. A patient belongs to one voter of a deal, so voters of one deal do not add up."""

    all: tuple[Training, ...]

    def guarantee(self, *, delta: float, neighbours: Neighbours) -> TrainingGuarantee | None:
        """The patient-level ε of every training composed, for the worst voter; None if any gives no guarantee.

        With patients dealt more than once nobody can say which voters a patient met: then everything is composed.
        """
        if not self.all or any(training.event is None for training in self.all):
            return None
        groups: dict[int, list[TrainingEvent]] = {}
        one_deal = len({training.deal for training in self.all}) == 1
        for training in self.all:
            assert training.event is not None
            groups.setdefault(training.voter if one_deal else 0, []).append(training.event)
        composed = {tuple(events) for events in groups.values()}
        worst = max(epsilon_of_all(events, delta=delta, neighbours=neighbours) for events in composed)
        return TrainingGuarantee(worst, delta, neighbours)

    def covers_every_release(self, *, voters: int) -> bool:
        """Whether no release can have used a teacher without a guarantee: each voter was trained privately before the
        first acceptance, and never without afterwards."""
        private = all(training.event is not None for training in self.all)
        early = {training.voter for training in self.all if training.before_releases}
        return private and early >= set(range(voters))

    def to_json(self, *, delta: float) -> dict[str, object]:
        """Counts, strategies and the patient-level ε under both relations, or null where there is none."""
        return {
            "count": len(self.all),
            "strategies": sorted({training.strategy for training in self.all}),
            "guarantees": [
                None if found is None else found.to_json()
                for neighbours in Neighbours
                if self.all
                for found in [self.guarantee(delta=delta, neighbours=neighbours)]
            ],
        }


@dataclass(frozen=True, slots=True)
class Combined:
    """What holds for one patient: ``epsilon`` at ``delta`` under ``relation``, and why it is that one."""

    epsilon: float
    delta: float
    relation: str
    rule: str
    reasons: tuple[str, ...] = ()

    def __str__(self) -> str:
        why = f"; not the smaller of the two, because {', and '.join(self.reasons)}" if self.reasons else ""
        what = f"unit {Unit.PATIENT}, relation {self.relation}"
        return f"ε = {self.epsilon:.4g} at δ = {self.delta:.3g}, {what} ({self.rule}{why})"


SMALLER, SUM, APART = "the smaller of training and releases", "training and releases composed", "releases alone"


def combine(
    training: TrainingGuarantee | None, release: Guarantee, *, every_release_used_it: bool, all_composed: bool = True
) -> Combined:
    """One patient's guarantee from its site's trainings and the federation's releases.

    ``release`` is for unit patient, or for unit hospital, which covers each of its patients as well. Under one relation
    ε_training + ε_release at δ + δ always holds (basic composition). Without a training under the release's relation
    the releases stand alone: they protect the patient whatever the training was.
    """
    relation = str(release.protection.relation)
    if training is None:
        reason = "not every teacher was trained with a guarantee"
        return Combined(release.epsilon, release.delta, relation, APART, (reason,))
    reasons = [
        text
        for holds, text in (
            (str(training.neighbours) == relation == Relation.REPLACE_ONE, "training and releases differ in relation"),
            (training.delta == release.delta, "training and releases differ in δ"),
            (every_release_used_it, "not every release used these trainings alone"),
            (all_composed, "not all trainings are composed"),
        )
        if not holds
    ]
    if not reasons:
        return Combined(min(training.epsilon, release.epsilon), release.delta, relation, SMALLER)
    if str(training.neighbours) != relation:
        return Combined(release.epsilon, release.delta, relation, APART, tuple(reasons))
    both = training.epsilon + release.epsilon, training.delta + release.delta
    return Combined(*both, relation, SUM, tuple(reasons))


def worst(sites: Collection[Combined]) -> Combined:
    """The site whose patients are protected least."""
    return max(sites, key=lambda site: (site.epsilon, site.delta))
