"""Tests whether the releases of a joint study match expectations; for the operator, at no privacy cost.

Everything here is made of stored noisy answers and public values, so it also works where the server never sees a single
code. What it can tell is bounded by the guarantee itself: noise that hides whether a hospital took its own part or
another's also hides whether it was honest. At unit hospital and μ, no test of the answers that accuses an honest study
with probability α finds one poisoned site more often than Φ(Φ⁻¹(α) + μ) (Dong, Roth & Su 2022, eq 6). This one finds
far less: docs/lab/utility-measured.md has the measured shares. Silence here is no proof; a site's own comparison is
the better look (:mod:`client.teachers.comparison`). Refuses nothing and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import gammainc, gammaincc

FALSE_ALARMS = 0.01
"""Of honest studies, at most: half of them for answers that are too weak, half for answers that are too large."""

HONEST = (0.25, 2.5)
"""How large honest offsets may be: their variance beside what frames expect, at least and at most. Frames expect the
same of every task, and what hospitals know beyond public data differs: measured were .5 to 1.1
(docs/lab/utility-measured.md)."""

CHANGED = 3.0
"""A structure's volume in the labels beyond this factor of its volume in the public mean shape is said."""

REMEDY = "Ask sites to run `consilium site evaluate` before anybody uses the student."


@dataclass(frozen=True, slots=True)
class Silence:
    """The share of what was expected that noise alone makes, summed over all numbers of the answers.

    ``shares``: Σ w, ``squares``: Σ w², with w = noise variance / (expected variance + noise variance) of each number.
    """

    shares: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, shares: Float[np.ndarray, "d"]) -> Silence:
        """From every number's own share."""
        return cls(float(shares.sum()), float(np.square(shares).sum()))

    def __add__(self, other: Silence) -> Silence:
        return Silence(self.shares + other.shares, self.squares + other.squares)


@dataclass(frozen=True, slots=True)
class Plausible:
    """``surprise``: :meth:`~common.protocols.frame.Frame.surprise` of all rounds together, of ``dimension``
    degrees of freedom, of which noise alone makes ``silence``. ``volumes``: each structure's voxels in the labels, as a
    share of those in the public mean shape."""

    surprise: float
    dimension: int
    silence: Silence = Silence()
    volumes: tuple[tuple[str, float], ...] = ()

    @property
    def chance(self) -> float:
        """How likely so small or so large a value is in an honest study, at most; two-sided.

        Honest offsets are ``c`` times as large as expected (in variance), with c in :data:`HONEST`. Small values are
        held against the least of these c, large ones against the most. For one c the value is a sum of scaled χ², whose
        law is taken as the gamma law of its mean and variance (Satterthwaite 1946).
        """
        least, most = HONEST
        shape, scale = self._law(least)
        low = float(gammainc(shape, self.surprise / scale))
        shape, scale = self._law(most)
        return min(1.0, 2 * min(low, float(gammaincc(shape, self.surprise / scale))))

    def _law(self, size: float) -> tuple[float, float]:
        """Shape and scale of the gamma law where offsets are ``size`` times as large as expected."""
        heard = self.dimension - self.silence.shares  # Σ (1 − w), and below it Σ (w + size (1 − w))²
        squares = self.silence.squares
        mean = self.silence.shares + size * heard
        crossed, others = self.silence.shares - squares, heard - self.silence.shares + squares
        variance = 2 * (squares + 2 * size * crossed + size**2 * others)
        return mean**2 / variance, variance / mean

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know, :data:`REMEDY` last; empty where nothing is out of the ordinary."""
        found = []
        if self.chance < FALSE_ALARMS:
            weak = self.surprise < self.dimension
            found.append(
                f"the sites' answers are {'weaker' if weak else 'larger'} together than expected (χ² = "
                f"{self.surprise:.0f} where {self.dimension} is expected; chance {self.chance:.2g}): "
                + (
                    "they contradict each other, know little beyond public data, or failed; poisoned sites do this too"
                    if weak
                    else "they know more than was planned for, or push in one direction; poisoned sites do this too"
                )
            )
        for name, share in self.volumes:
            if not 1 / CHANGED <= share <= CHANGED:
                found.append(f"{name} has {share:.2g} times the volume in the labels that public shapes give it")
        return (*found, REMEDY) if found else ()

    def event(self) -> dict[str, Any]:
        """The fields of an ``answers-weighed`` event."""
        return {
            "surprise": round(self.surprise, 3),
            "expected": self.dimension,
            "chance": self.chance,
            "volumes": [f"{name} {share:.3g}" for name, share in self.volumes],
            "warnings": list(self.warnings),
        }


def shares(names: Iterable[str], labels: Iterable[int], shapes: Iterable[float]) -> tuple[tuple[str, float], ...]:
    """Voxels of each structure in the label maps over those in as many public mean shapes; infinite where it has none.

    The mean shape's are sums of probabilities: a structure that is the likeliest nowhere in it still has its volume.
    """
    return tuple(
        (name, ours / mean if mean else (math.inf if ours else 1.0))
        for name, ours, mean in zip(names, labels, shapes, strict=True)
    )
