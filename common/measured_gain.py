"""Compares a student with a reference network, and words the verdict in the same way for every text.

Called by evaluations, reports and the dashboard. For each case the difference is the student's Dice minus the
reference's. The gain is the mean of these differences, with Student's 95 % interval. The verdict is *proven* if the
whole interval is above 0, and *worse* if it is below 0. Otherwise, and with too few cases for an interval, the verdict
is *not proven*. An interval that contains 0 proves neither a gain nor that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import InvalidInput
from common.intervals import mean_interval

ONE_RUN = "The interval counts the cases of one run, not other draws of noise or other splits."


class GainVerdict(StrEnum):
    """A verdict: the cases prove a gain, prove that the student is worse, or prove neither."""

    PROVEN = "proven"
    NOT_PROVEN = "not proven"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Score:
    """Dice of a network's predictions against label maps.

    Attributes:
        per_class: Dice of each structure (structure 1 first), averaged over the volumes that have it in either map; nan
            if none does.
        mean: Mean over the structures.
        cases: For every volume with a structure in the truth, in the same order for all networks, its mean over
            structures. Comparisons of networks use these.
        hd95_mm: HD95 in mm of each structure, over the cases in which both maps contain it; empty if not computed.
    """

    per_class: tuple[float, ...]
    mean: float
    cases: tuple[float, ...] = ()
    hd95_mm: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class MeasuredGain:
    """A student compared with a reference.

    Attributes:
        student: Mean Dice of the student.
        other: Mean Dice of the reference.
        reference: Name of the reference in sentences.
        gain: Mean difference over the cases for which both have a figure.
        half_width: Half of the gain's 95 % interval; None for fewer than two cases.
        cases: Number of cases for which both have a figure.
        who: Name of the scored model in sentences: student or adapted network.

    Raises:
        InvalidInput: If a value is not finite.
    """

    student: float
    other: float
    reference: str
    gain: float
    half_width: float | None
    cases: int
    who: str = "student"

    def __post_init__(self) -> None:
        if not math.isfinite(self.gain) or not (self.half_width is None or 0 <= self.half_width < math.inf):
            raise InvalidInput(
                "gain", value=(self.gain, self.half_width), limit="a finite gain, and a finite half-width from 0"
            )

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the gain; None for fewer than two cases."""
        return None if self.half_width is None else (self.gain - self.half_width, self.gain + self.half_width)

    @property
    def word(self) -> GainVerdict:
        """The verdict: whether the gain is proven, not proven, or the student is worse. Every text prints this word."""
        low, high = self.interval or (-math.inf, math.inf)
        return GainVerdict.PROVEN if low > 0 else GainVerdict.WORSE if high < 0 else GainVerdict.NOT_PROVEN

    @property
    def figures(self) -> str:
        """Text with the gain, its interval, the student's mean Dice, and the reference's mean Dice."""
        if self.interval is None:
            within = "no interval, which needs at least two cases"
        else:
            within = f"95 % interval {self.interval[0]:+.3f} to {self.interval[1]:+.3f}, paired over {self.cases} cases"
        means = f"{self.who} {self.student:.3f}, {self.reference} {self.other:.3f}"
        return f"{self.gain:+.3f} Dice ({within}); {means}"

    @property
    def title(self) -> str:
        """The verdict as a heading, such as ``Gain proven over the control zero code``."""
        return {
            GainVerdict.PROVEN: f"Gain proven over {self.reference}",
            GainVerdict.NOT_PROVEN: f"Gain not proven over {self.reference}",
            GainVerdict.WORSE: f"Worse than {self.reference}",
        }[self.word]

    @property
    def sentence(self) -> str:
        """The verdict with its figures, as a sentence."""
        return f"{self.title}: {self.figures}."

    def to_json(self) -> dict[str, object]:
        """Return the comparison as plain JSON for machines."""
        return {
            "word": str(self.word),
            "gain": self.gain,
            "interval": None if self.interval is None else list(self.interval),
            "cases": self.cases,
            "student": self.student,
            "other": self.other,
            "reference": self.reference,
        }


def measured_gain(pairs: Sequence[tuple[float, float]], *, reference: str, who: str = "student") -> MeasuredGain | None:
    """Compare a student with a reference on the same cases.

    Args:
        pairs: (Dice of the student, Dice of the reference) of each case. Pairs with a figure that is not finite are
            left out.
        reference: Name of the reference in sentences.
        who: Name of the scored model in sentences.

    Returns:
        The comparison; None if no pair is left.
    """
    both = [(ours, theirs) for ours, theirs in pairs if math.isfinite(ours) and math.isfinite(theirs)]
    if not both:
        return None
    gain, half_width = mean_interval([ours - theirs for ours, theirs in both])
    student, other = (math.fsum(column) / len(both) for column in zip(*both, strict=True))
    return MeasuredGain(student, other, reference, gain, half_width, len(both), who)


def over_best(student: Score, controls: Mapping[str, Score | None]) -> MeasuredGain | None:
    """Compare a student with the best of its controls.

    The best control is the one that the student beats by least, measured case by case. It is chosen on the same cases,
    which biases the gain downwards, never upwards.

    Args:
        student: The student's Dice.
        controls: Dice of each control by name; None for one that was not scored.

    Returns:
        The comparison, without an interval where the cases cannot be paired; None if the student or every control has
        no mean.
    """
    found = [
        _over(student, one, f"the control {name.replace('_', ' ')}")
        for name, one in controls.items()
        if one is not None
    ]
    return min((one for one in found if one is not None), key=lambda one: one.gain, default=None)


def _over(student: Score, control: Score, name: str) -> MeasuredGain | None:
    ours, theirs = student.cases, control.cases
    pairs = list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else []
    if paired := measured_gain(pairs, reference=name):
        return paired
    gain = student.mean - control.mean
    return MeasuredGain(student.mean, control.mean, name, gain, None, 0) if math.isfinite(gain) else None


def case_mean(scored: Score) -> float:
    """Return a network's mean Dice over its cases. The gain is the difference of two such means over the same cases.

    The mean over structures, :attr:`Score.mean`, differs from this mean if a case lacks a structure.

    Args:
        scored: The network's Dice.

    Returns:
        The mean over the cases that have a figure; :attr:`Score.mean` if none has.
    """
    known = [case for case in scored.cases if math.isfinite(case)]
    return math.fsum(known) / len(known) if known else scored.mean
