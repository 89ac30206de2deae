"""Describes the result of an adaptation: which network was chosen and why, its scores, and what they do not show.

A *way* is one method of making the hospital's network, from the student or from its own patients alone
(:mod:`client.adapting.methods`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from client.adapting.methods import LEAST_FOR_FOLDS, MANY_PATIENTS, TEACHERS, WORDS, Method, usual
from common.data.dataset import Problem
from common.plain import joined
from common.wording import many

SCHEMA = 1

Interval = tuple[float, float | None]
"""A mean and half of its 95 % interval; the half is None for one patient."""

SEEN = (
    "This network was trained on this hospital's patients and has no privacy guarantee. It must not leave the "
    "hospital: information about the patients could be extracted from it."
)

LESS = 0.0005
"""A warning is given if the network's Dice is below the student's or the own network's by more than this."""


@dataclass(frozen=True, slots=True)
class Figures:
    """The Dice of one network; each patient was scored by a network that had not seen that patient.

    Attributes:
        way: The way of making the network, or :data:`~client.adapting.methods.TEACHERS`.
        interval: Mean Dice over patients with half of its 95 % interval; None if no patient has a score.
        structures: Such an interval for each structure, by its name.
        patients: Number of patients with a score.
    """

    way: str
    interval: Interval | None
    structures: Mapping[str, Interval | None]
    patients: int

    @property
    def what(self) -> str:
        """The network in words. For the teachers it also states the number of patients, which may be smaller."""
        return WORDS[self.way] + (f" ({many(self.patients, 'patient')})" if self.way == TEACHERS else "")

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "way": str(self.way),
            "what": self.what,
            "patients": self.patients,
            "dice": _json(self.interval),
            "structures": {name: _json(one) for name, one in self.structures.items()},
        }


@dataclass(frozen=True, slots=True)
class Adapted:
    """The result of an adaptation.

    Attributes:
        site: Name of the site.
        way: The way of making the network that was chosen.
        forced: True if a person named the way.
        patients: Number of patients.
        cases: Number of cases.
        public: Number of public volumes that were read; 0 if no training needed them.
        folds: Folds of the cross-validation; 0 with too few patients.
        figures: Scores of every way, and of the site's own teachers; empty without cross-validation.
        by_choice: Dice of the selection procedure: each patient is scored by the way chosen on the other folds. The
            chosen way's own mean is biased upwards, because it was chosen on these scores. None if a person named the
            way.
        ahead: How far the chosen way's Dice is above that of each of three networks, as mean paired differences over
            patients: the student, the network trained on the hospital's patients alone, and the hospital's teachers.
        student: SHA-256 of the student's weights.
        bundle: The bundle's folder.
        report: The report's folder.
        structures: Names of the structures.
        steps: Steps of each training.
        recipe_steps: Steps of the study's recipe for its student.
        unfit: The finding that the cases do not fit this site's models, if a person accepted it; else empty.
        no_teachers: Why the site's own teachers are not among the figures; empty if they are.
        problems: Cases left out.
        pictures: File names of the pictures.
    """

    site: str
    way: Method
    forced: bool
    patients: int
    cases: int
    public: int
    folds: int
    figures: tuple[Figures, ...]
    by_choice: Interval | None
    ahead: Mapping[str, Interval | None]
    student: str
    bundle: Path
    report: Path
    structures: tuple[str, ...]
    steps: int
    recipe_steps: int
    unfit: str = ""
    no_teachers: str = ""
    problems: tuple[Problem, ...] = ()
    pictures: Mapping[str, str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """The reason why this way of making the network was chosen, in words."""
        if self.forced:
            return "named by --way"
        default = usual(self.patients, public=bool(self.public))
        if self.way is not default:
            return f"cross-validation over {self.patients} patients proves it better than the default, {default}"
        unproven = "; cross-validation proves no other way better" if self.folds else ""
        few = f"fewer than {MANY_PATIENTS}" if self.patients < MANY_PATIENTS else f"{MANY_PATIENTS} or more"
        return f"the default for {few} patients and {self.public or 'no'} public volumes{unproven}"

    @property
    def length(self) -> str:
        """The number of steps of each training and of the study's recipe, as a sentence."""
        return f"Each training had {self.steps} steps; the study's recipe has {self.recipe_steps}."

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons not to use the network or not to believe its scores."""
        found = []
        if self.unfit:
            found.append(f"UNFIT: {self.unfit}; the network was trained because --even-if-unfit was given")
        if self.steps < self.recipe_steps:
            found.append(
                "SHORT: the hospital's own network and the adapted networks were trained shorter than the study's "
                f"recipe ({self.steps} of {self.recipe_steps} steps). A gain over the own network may not hold at full "
                "length"
            )
        if not self.folds:
            found.append(
                f"NOT CHECKED: {many(self.patients, 'patient')} {'is' if self.patients == 1 else 'are'} too few to "
                "tell whether this network is better here than "
                f"the student or a network of your own; cross-validation needs at least {LEAST_FOR_FOLDS}"
            )
        for other, difference in self.ahead.items():
            if difference is not None and difference[0] < -LESS:
                found.append(
                    f"LESS: the Dice of {WORDS[self.way]} is {-difference[0]:.3f} below that of {WORDS[other]}"
                )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "schema": SCHEMA,
            "site": self.site,
            "way": str(self.way),
            "what": WORDS[self.way],
            "why": self.why,
            "forced": self.forced,
            "patients": self.patients,
            "cases": self.cases,
            "public": self.public,
            "folds": self.folds,
            "figures": [one.to_json() for one in self.figures],
            "by_choice": _json(self.by_choice),
            "ahead": {str(way): _json(one) for way, one in self.ahead.items()},
            "no_teachers": self.no_teachers,
            "steps": self.steps,
            "recipe_steps": self.recipe_steps,
            "even_if_unfit": bool(self.unfit),
            "warnings": list(self.warnings),
            "student": self.student,
            "bundle": str(self.bundle),
            "report": str(self.report),
            "statement": SEEN,
            "problems": [problem.to_json() for problem in self.problems],
        }


def _json(interval: Interval | None) -> dict[str, float | None] | None:
    if interval is None:
        return None
    value, half = interval
    return {"mean": value, "half_width": half}


def shown(interval: Interval | None, *, sign: bool = False) -> str:
    """Format a mean with its interval.

    Args:
        interval: The mean and half of its interval; None gives a dash.
        sign: Show the sign.

    Returns:
        The text.
    """
    if interval is None:
        return "–"
    value, half = interval
    return f"{value:{'+' if sign else ''}.3f}" + ("" if half is None else f" ± {half:.3f}")


def text(result: Adapted) -> str:
    """Format the result for a person: the Dice of each way of making the network, the chosen way, and the warnings.

    Args:
        result: The adaptation.

    Returns:
        The text.
    """
    lines = []
    if result.figures:
        lines.append(f"Dice over {many(result.patients, 'patient')}, each by networks trained without the patient:")
        for one in result.figures:
            structures = ", ".join(f"{name} {shown(each)}" for name, each in one.structures.items())
            mark = "*" if one.way == result.way else " "
            lines.append(f"{mark} {one.way:<12} {shown(one.interval):<15} {structures}   {one.what}")
        if result.no_teachers:
            lines.append(f"not compared with this site's own teachers: {result.no_teachers}")
    lines.append(f"chosen: {WORDS[result.way]} ({result.way}); {result.why}")
    lines.append(result.length)
    for other, difference in result.ahead.items():
        if other != result.way:
            lines.append(f"gain in Dice over {WORDS[other]}: {shown(difference, sign=True)}, paired over patients")
    if result.by_choice is not None:
        lines.append(f"Dice if the way is chosen without the patient it is scored on: {shown(result.by_choice)}")
    lines += result.warnings
    if result.problems:
        lines.append(f"{many(len(result.problems), 'case')} left out:")
        lines += [f"  {problem.case}: {problem.reason}" for problem in result.problems]
    return joined([*lines, SEEN])
