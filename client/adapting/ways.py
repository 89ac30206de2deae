"""The ways in which a hospital can come from the student to a network of its own, and which of them to take.

With enough patients the way is chosen by cross-validation over them, with fewer by :data:`FEW`. Refuses to choose where
no patient has a figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum

from common.canonical import digest
from common.errors import InvalidInput


class Way(StrEnum):
    """From the simplest on: of two with the same figure the earlier one is taken."""

    STUDENT = "student"
    OWN = "own"
    TRAINED_ON = "trained-on"
    NEAR = "near"
    HALF_WAY = "half-way"
    AVERAGED = "averaged"


WORDS = {
    Way.STUDENT: "the student as it is",
    Way.OWN: "a network of the hospital's own, without the student",
    Way.TRAINED_ON: "the student, trained on",
    Way.NEAR: "the student, trained on and held near it",
    Way.HALF_WAY: "weights half way from the student to the one trained on",
    Way.AVERAGED: "the mean answer of the own network and the student trained on",
}

TRAININGS: dict[Way, tuple[Way, ...]] = {
    Way.STUDENT: (),
    Way.OWN: (Way.OWN,),
    Way.TRAINED_ON: (Way.TRAINED_ON,),
    Way.NEAR: (Way.NEAR,),
    Way.HALF_WAY: (Way.TRAINED_ON,),
    Way.AVERAGED: (Way.OWN, Way.TRAINED_ON),
}
"""What has to be trained for each."""

FEW = Way.HALF_WAY
"""What a hospital with fewer than :data:`LEAST_PATIENTS` patients gets; "Who gains" in docs/utility.md has why."""

LEAST_PATIENTS = 5
"""From this many patients on the way is chosen by cross-validation."""

FOLDS = 5

Dice = Sequence[float]
"""One patient's figure after the other."""


def fold_of(patients: Sequence[str], *, folds: int) -> tuple[int, ...]:
    """Deal patients into folds of nearly one size, by their names alone.

    Args:
        patients: Names, each once.
        folds: How many, from 2 to the number of patients.

    Returns:
        Each patient's fold, 0 and up. A patient's own scans stay together, whatever they hold.

    Raises:
        InvalidInput: If there are fewer patients than folds.
    """
    if not 2 <= folds <= len(patients):
        raise InvalidInput("folds", value=folds, limit=f"2 to the {len(patients)} patients")
    order = sorted(patients, key=lambda name: digest("fold", {"patient": name}))
    places = {name: place % folds for place, name in enumerate(order)}
    return tuple(places[name] for name in patients)


def choose(figures: Mapping[Way, Dice]) -> Way:
    """Take the way with the highest mean Dice over patients; of equals the simplest.

    Args:
        figures: Each way's Dice, patient by patient in one order; nan for a patient without a figure.

    Returns:
        The way.

    Raises:
        InvalidInput: If no patient has a figure.
    """
    means = {way: mean(figures[way]) for way in Way if way in figures}
    known = {way: value for way, value in means.items() if not math.isnan(value)}
    if not known:
        raise InvalidInput("cross-validation", limit="one patient with a structure that is drawn or found")
    return max(known, key=lambda way: known[way])


def by_choice(figures: Mapping[Way, Dice], folds: Sequence[int]) -> list[float]:
    """What choosing is worth: each patient's Dice by the way that the patients of the other folds would choose.

    The winner's own mean flatters it, since it was chosen on these figures; this one was not.
    """
    found = []
    for patient, fold in enumerate(folds):
        others = [place for place, other in enumerate(folds) if other != fold]
        way = choose({way: [dice[place] for place in others] for way, dice in figures.items()})
        found.append(figures[way][patient])
    return found


def mean(values: Dice) -> float:
    """The mean of the figures that are there; nan for none."""
    there = [value for value in values if not math.isnan(value)]
    return math.fsum(there) / len(there) if there else math.nan


def filled(rows: Mapping[Way, Sequence[float]]) -> dict[Way, tuple[float, ...]]:
    """One case's Dice by structure, made comparable between ways.

    A structure that nobody drew and one way found has Dice 0 there; a way that rightly found none of it then counts as
    1. Where no way found it either it stays nan.
    """
    told = [any(not math.isnan(value) for value in column) for column in zip(*rows.values(), strict=True)]
    return {
        way: tuple(1.0 if one and math.isnan(value) else value for one, value in zip(told, row, strict=True))
        for way, row in rows.items()
    }
