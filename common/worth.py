"""Compares a student with something else, in one word and one wording for every text.

The gain is the mean of the paired differences in Dice over cases, with Student's 95 % interval. It is *proven* where
the whole interval lies above 0, *worse* where it lies below, and *not proven* otherwise: also where there are too few
cases for an interval. An interval that holds 0 proves neither a gain nor that there is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from common.errors import InvalidInput
from common.intervals import mean_interval

ONE_RUN = "The interval counts the cases of one run, not other draws of noise or other splits."


class GainWord(StrEnum):
    """What cases say of a gain."""

    PROVEN = "proven"
    NOT_PROVEN = "not proven"
    WORSE = "worse"


@dataclass(frozen=True, slots=True)
class Worth:
    """Mean Dice of a student and of a reference, and the gain over ``cases`` that both have a figure of.

    ``half_width`` is of the gain's 95 % interval, None for fewer than two cases.
    """

    student: float
    other: float
    reference: str
    gain: float
    half_width: float | None
    cases: int

    def __post_init__(self) -> None:
        if not math.isfinite(self.gain) or not (self.half_width is None or 0 <= self.half_width < math.inf):
            raise InvalidInput("gain", value=(self.gain, self.half_width), limit="finite numbers")

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the gain."""
        return None if self.half_width is None else (self.gain - self.half_width, self.gain + self.half_width)

    @property
    def word(self) -> GainWord:
        """The verdict; every text that judges a gain prints this word."""
        low, high = self.interval or (-math.inf, math.inf)
        return GainWord.PROVEN if low > 0 else GainWord.WORSE if high < 0 else GainWord.NOT_PROVEN

    @property
    def figures(self) -> str:
        """The gain with its interval, then both means."""
        if self.interval is None:
            within = "no interval: it takes two cases"
        else:
            within = f"95 % interval {self.interval[0]:+.3f} to {self.interval[1]:+.3f}, paired over {self.cases} cases"
        means = f"student {self.student:.3f}, {self.reference} {self.other:.3f}"
        return f"{self.gain:+.3f} Dice ({within}); {means}"

    @property
    def title(self) -> str:
        """The verdict as a heading."""
        return {
            GainWord.PROVEN: f"Gain proven over {self.reference}",
            GainWord.NOT_PROVEN: f"Gain not proven over {self.reference}",
            GainWord.WORSE: f"Worse than {self.reference}",
        }[self.word]

    @property
    def sentence(self) -> str:
        """The verdict with its figures."""
        return f"{self.title}: {self.figures}."

    def to_json(self) -> dict[str, object]:
        """The same for machines."""
        return {
            "word": str(self.word),
            "gain": round(self.gain, 5),
            "interval": None if self.interval is None else [round(end, 5) for end in self.interval],
            "cases": self.cases,
            "student": round(self.student, 5),
            "other": round(self.other, 5),
            "reference": self.reference,
        }


def worth(pairs: Sequence[tuple[float, float]], *, reference: str) -> Worth | None:
    """What the student's Dice is worth beside a reference's on the same cases; None where no case has both.

    A pair with a figure that is not finite counts for nothing.
    """
    both = [(ours, theirs) for ours, theirs in pairs if math.isfinite(ours) and math.isfinite(theirs)]
    if not both:
        return None
    gain, half_width = mean_interval([ours - theirs for ours, theirs in both])
    student, other = (math.fsum(column) / len(both) for column in zip(*both, strict=True))
    return Worth(student, other, reference, gain, half_width, len(both))


def of_means(student: float, other: float, *, reference: str) -> Worth:
    """The same where only means are known: there is no interval, so nothing is proven."""
    return Worth(student, other, reference, student - other, None, 0)


def over_best(
    student: Sequence[float], controls: Mapping[str, Sequence[float]], *, means: Mapping[str, float] | None = None
) -> Worth | None:
    """The student's worth over the best of its controls, by name; None without one that has a figure.

    The best is the one with the highest mean, by ``means`` where they are given. It is chosen on these very cases,
    which can only make the gain look smaller.
    """
    known = means or {name: math.fsum(each) / len(each) for name, each in controls.items() if each}
    known = {name: mean for name, mean in known.items() if math.isfinite(mean)}
    if not known:
        return None
    best = max(known, key=lambda name: known[name])
    return worth(list(zip(student, controls[best], strict=True)), reference=control_name(best))


def control_name(name: str) -> str:
    """A control as texts call it: ``zero_code`` → ``the control zero code``."""
    return f"the control {name.replace('_', ' ')}"
