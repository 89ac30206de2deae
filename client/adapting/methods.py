"""Defines the methods to make a network of the hospital's own from the student, and chooses one of them.

``client.adapting.adapt`` calls it. The choice is the usual method for this number of patients (:func:`usual`), unless
cross-validation proves another method better. It refuses to choose if no patient has a score.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from common.canonical import digest
from common.errors import InvalidInput
from common.intervals import known_interval


class Method(StrEnum):
    """A method to make the hospital's own network.

    The methods are listed from the simplest to the most complex. Of two with the same score the simpler one is chosen.
    :data:`WORDS` describes each.
    """

    STUDENT = "student"
    OWN = "own"
    TRAINED_ON = "trained-on"
    NEAR = "near"
    HALF_WAY = "half-way"
    MERGED = "merged"
    AVERAGED = "averaged"
    AVERAGED_REHEARSED = "averaged-rehearsed"


TEACHERS = "own-teachers"
"""Name of this site's own teachers in the comparison. They cannot be chosen: they answer the study's queries."""

WORDS: dict[str, str] = {
    Method.STUDENT: "the student, unchanged",
    Method.OWN: "a network of the hospital's own, without the student",
    Method.TRAINED_ON: "the student, trained further",
    Method.NEAR: "the student, trained further but kept near its weights",
    Method.HALF_WAY: "the mean of the student's weights before and after further training",
    Method.MERGED: "the mean weights of the half-way network before and after more training on own and public cases",
    Method.AVERAGED: "the mean prediction of the own network and the student trained further",
    Method.AVERAGED_REHEARSED: "the mean prediction of the own network and the half-way one after that training",
    TEACHERS: "this site's own teachers of the study, without the one that the patient trained",
}


class HomeTraining(StrEnum):
    """A training on the hospital's cases. :data:`TRAININGS` states which trainings each method needs.

    ``rehearsed`` begins at the network of :data:`Method.HALF_WAY`. It trains on the hospital's cases and on public
    volumes with the labels that this network predicts (self-training).
    """

    OWN = "own"
    TRAINED_ON = "trained-on"
    NEAR = "near"
    REHEARSED = "rehearsed"


TRAININGS: dict[Method, tuple[HomeTraining, ...]] = {
    Method.STUDENT: (),
    Method.OWN: (HomeTraining.OWN,),
    Method.TRAINED_ON: (HomeTraining.TRAINED_ON,),
    Method.NEAR: (HomeTraining.NEAR,),
    Method.HALF_WAY: (HomeTraining.TRAINED_ON,),
    Method.MERGED: (HomeTraining.TRAINED_ON, HomeTraining.REHEARSED),
    Method.AVERAGED: (HomeTraining.OWN, HomeTraining.TRAINED_ON),
    Method.AVERAGED_REHEARSED: (HomeTraining.OWN, HomeTraining.TRAINED_ON, HomeTraining.REHEARSED),
}
"""The trainings that each method needs."""

LEAST_FOR_FOLDS = 5
"""Least number of patients for a cross-validation."""

MANY_PATIENTS = 7
"""From this number of patients on, the default method averages the predictions of two networks, one of which the
hospital trained without the student (evidence: docs/lab/utility-measured.md).
"""

FOLDS = 5
"""Largest number of folds of a cross-validation."""

Dice = Sequence[float]
"""Dice of each patient."""


def ways_with(*, public: bool) -> tuple[Method, ...]:
    """Return the methods that a site can use to make its own network. Some methods need public volumes at the site.

    Args:
        public: True if the site has public volumes.

    Returns:
        The methods, in the order of :class:`Method`.
    """
    return tuple(way for way in Method if public or HomeTraining.REHEARSED not in TRAININGS[way])


def needs_public(way: Method | None, *, patients: int) -> bool:
    """Tell whether an adaptation needs public volumes, if there are any.

    It needs them if its method trains on them, or if all methods are compared by cross-validation.

    Args:
        way: The method that a person named; None if it is to be chosen.
        patients: Number of patients.

    Returns:
        True if it needs them.

    >>> needs_public(Way.HALF_WAY, patients=1), needs_public(None, patients=1), needs_public(Way.HALF_WAY, patients=5)
    (False, True, True)
    """
    return folds_for(patients) > 0 or HomeTraining.REHEARSED in TRAININGS[way or usual(patients, public=True)]


def usual(patients: int, *, public: bool) -> Method:
    """Return the method that is taken unless cross-validation proves another method better.

    Args:
        patients: Number of patients.
        public: True if the site has public volumes.

    Returns:
        The way.

    >>> print(usual(6, public=True), usual(7, public=True), usual(7, public=False))
    merged averaged-rehearsed averaged
    """
    if patients < MANY_PATIENTS:
        return Method.MERGED if public else Method.HALF_WAY
    return Method.AVERAGED_REHEARSED if public else Method.AVERAGED


def folds_for(patients: int) -> int:
    """Return the number of folds of a cross-validation; 0 if the patients are too few for one.

    Args:
        patients: Number of patients.

    Returns:
        The number.

    >>> folds_for(4), folds_for(30)
    (0, 5)
    """
    return min(FOLDS, patients) if patients >= LEAST_FOR_FOLDS else 0


def fold_of(patients: Sequence[str], *, folds: int) -> tuple[int, ...]:
    """Divide patients into folds of nearly equal size, by their names only.

    Args:
        patients: Names, each once.
        folds: Number of folds, from 2 to the number of patients.

    Returns:
        Each patient's fold, from 0. A patient's scans stay together.

    Raises:
        InvalidInput: If ``folds`` is out of range.
    """
    if not 2 <= folds <= len(patients):
        raise InvalidInput("folds", value=folds, limit=f"2 to {len(patients)}, the number of patients")
    order = sorted(patients, key=lambda name: digest("fold", {"patient": name}))
    places = {name: place % folds for place, name in enumerate(order)}
    return tuple(places[name] for name in patients)


def choose(figures: Mapping[str, Dice], *, default: Method) -> Method:
    """Choose the way with the highest mean Dice if its lead over the default way is proven, else the default way.

    A lead is proven if the 95 % interval (Student's t) of the differences over patients with both scores lies above 0.
    Without this rule the choice among eight ways on a dozen patients is mostly chance.

    Args:
        figures: Each way's Dice, patient by patient in one order; nan for a patient without a score. Other networks
            are not chosen.
        default: The way to prefer; one of the ways in ``figures``.

    Returns:
        The way. If several ways have the highest mean, the one that :class:`Method` lists first is compared with the
        default.

    Raises:
        InvalidInput: If no patient has a score.
    """
    present = {way: [dice for dice in figures[way] if not math.isnan(dice)] for way in Method if way in figures}
    means = {way: math.fsum(dice) / len(dice) for way, dice in present.items() if dice}
    if not means:
        raise InvalidInput(
            "cross-validation gave no patient a score",
            limit="at least one patient with a structure in the label map or in the prediction",
        )
    best = max(means, key=lambda way: means[way])
    return best if _proven(figures[best], figures[default]) else default


def _proven(ours: Dice, theirs: Dice) -> bool:
    """Tell whether the first Dice values are higher than the second, with an interval that excludes 0."""
    lead, half = known_interval(one - other for one, other in zip(ours, theirs, strict=True)) or (0.0, None)
    return half is not None and lead > half


def by_choice(figures: Mapping[str, Dice], folds: Sequence[int], *, default: Method) -> list[float]:
    """Estimate, without a bias, the Dice of the network that :func:`choose` chooses.

    The mean Dice of the method chosen on all patients is biased upwards, because the same scores decided the choice.
    Here each patient is scored with the method that :func:`choose` chooses on the patients of all other folds.

    Args:
        figures: Each method's Dice by patient.
        folds: Fold of each patient.
        default: The method to prefer.

    Returns:
        Dice of each patient.
    """
    found = []
    for patient, fold in enumerate(folds):
        others = [place for place, other in enumerate(folds) if other != fold]
        way = choose({way: [dice[place] for place in others] for way, dice in figures.items()}, default=default)
        found.append(figures[way][patient])
    return found


def filled(rows: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, ...]]:
    """Fill in missing Dice values (nan) of one case, so that the methods of adapting can be compared on it.

    The Dice of a structure is nan if neither the truth nor the prediction contains the structure, and 0 if only the
    prediction does. If the truth lacks a structure and at least one method predicts it, the nan of every other method
    becomes 1, because that method is right. If no method predicts it, all values stay nan.

    Args:
        rows: Dice of each structure, by method.

    Returns:
        The rows with the missing values filled in.
    """
    told = [any(not math.isnan(value) for value in column) for column in zip(*rows.values(), strict=True)]
    return {
        way: tuple(1.0 if one and math.isnan(value) else value for one, value in zip(told, row, strict=True))
        for way, row in rows.items()
    }
