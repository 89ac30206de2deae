"""Tests whether a study's released answers are as large as expected, to warn the operator, at no privacy cost.

The protocols compute the test, and the dashboard shows its result. The test uses only stored noisy answers and public
values, so it also works if the server never sees a single code. The privacy guarantee itself limits the test's power:
noise that hides one hospital's data also hides whether that hospital was honest. Consider a study whose unit is the
hospital, and any test that uses only the released answers and has false-alarm probability α. Such a test detects one
poisoned site with probability at most Φ(Φ⁻¹(α) + μ), where Φ is the standard normal distribution function and μ² the
sum of the μ² of all releases (Dong, Roth & Su 2022, eq 6). The test in this module stays far below that
bound (docs/lab/utility-measured.md). The absence of a warning does not prove honesty. The comparison that each site
makes with its own teachers (:mod:`client.teachers.comparison`) detects more poisoned sites. The test only warns: it
stops nothing.
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
"""Largest share of honest studies that get a warning: half of it for answers too small, half for answers too large."""

HONEST = (0.25, 2.5)
"""Range of the ratio between the true variance of honest hospitals' codes and the variance that the test expects.

The expected variance is computed from public data, but how much hospitals know beyond public data differs from task to
task. Measured ratios were .5 to 1.1 (docs/lab/utility-measured.md).
"""

CHANGED = 3.0
"""Operators are warned if a structure's volume in the labels differs from that in the public mean shape by more than
this factor.
"""

REMEDY = "Ask sites to run `consilium site evaluate` before anybody uses the student."


@dataclass(frozen=True, slots=True)
class NoiseShare:
    """The noise's share of the variance that the test expects, summed over all coordinates of all answers.

    The expected variance of a coordinate is the variance of the mean code, predicted from public data, plus that of the
    noise. The noise's share of this sum is called w.

    Attributes:
        shares: Sum of w over all coordinates: the mean of :attr:`PlausibilityTest.surprise` if answers were only noise.
        squares: Sum of w² over all coordinates.
    """

    shares: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, shares: Float[np.ndarray, "d"]) -> NoiseShare:
        """Sum the noise's shares w of an answer's coordinates, and their squares.

        Args:
            shares: The shares w of d coordinates, float array [d].

        Returns:
            The two sums.
        """
        return cls(float(shares.sum()), float(np.square(shares).sum()))

    def __add__(self, other: NoiseShare) -> NoiseShare:
        return NoiseShare(self.shares + other.shares, self.squares + other.squares)


@dataclass(frozen=True, slots=True)
class PlausibilityTest:
    """The result of testing whether one study's answers are as large as expected.

    Attributes:
        surprise: Sum over all coordinates of the squared answer divided by its expected variance
            (:meth:`~common.protocols.frame.Frame.surprise`). For honest sites it has about a χ² distribution.
        dimension: Number of coordinates, which is the number of degrees of freedom.
        noise_share: The noise's share of the expected variance.
        volumes: Each structure's name, and its number of voxels in the labels divided by that in the public mean shape.
    """

    surprise: float
    dimension: int
    noise_share: NoiseShare = NoiseShare()
    volumes: tuple[tuple[str, float], ...] = ()

    @property
    def chance(self) -> float:
        """Upper bound on the probability that an honest study has a value as extreme as ``surprise``, two-sided.

        The codes of honest hospitals have c times the expected variance, for some c in the range :data:`HONEST`. The
        lower tail is computed with the smallest c, the upper tail with the largest. For a given c, ``surprise`` is a
        sum of scaled χ² variables. Its distribution is approximated by the gamma distribution of the same mean and
        variance (Satterthwaite 1946).
        """
        least, most = HONEST
        shape, scale = self._law(least)
        low = float(gammainc(shape, self.surprise / scale))
        shape, scale = self._law(most)
        return min(1.0, 2 * min(low, float(gammaincc(shape, self.surprise / scale))))

    def _law(self, size: float) -> tuple[float, float]:
        """Return shape and scale of the gamma distribution for codes with ``size`` times the expected variance."""
        signal = self.dimension - self.noise_share.shares  # Σ (1 − w), and below it Σ (w + size (1 − w))²
        squares = self.noise_share.squares
        mean = self.noise_share.shares + size * signal
        crossed, others = self.noise_share.shares - squares, signal - self.noise_share.shares + squares
        variance = 2 * (squares + 2 * size * crossed + size**2 * others)
        return mean**2 / variance, variance / mean

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for an operator, with :data:`REMEDY` last; empty if nothing is unusual."""
        found = []
        if self.chance < FALSE_ALARMS:
            weak = self.surprise < self.dimension
            found.append(
                f"all sites' answers together are {'smaller' if weak else 'larger'} than expected (χ² = "
                f"{self.surprise:.0f}, expected {self.dimension}; probability in an honest study at most "
                f"{self.chance:.2g}). Possible causes: "
                + (
                    "the teachers contradict each other or know little beyond public data, sites failed, or a site is "
                    "dishonest"
                    if weak
                    else "the teachers know more than was planned for, or a site is dishonest"
                )
            )
        for name, share in self.volumes:
            if not 1 / CHANGED <= share <= CHANGED:
                found.append(f"{name} has {share:.2g} times the volume in the labels that it has in public shapes")
        return (*found, REMEDY) if found else ()

    def event(self) -> dict[str, Any]:
        """Return the fields of an ``answers-weighed`` event."""
        return {
            "surprise": round(self.surprise, 3),
            "expected": self.dimension,
            "chance": self.chance,
            "volumes": [f"{name} {share:.3g}" for name, share in self.volumes],
            "warnings": list(self.warnings),
        }


def shares(names: Iterable[str], labels: Iterable[int], shapes: Iterable[float]) -> tuple[tuple[str, float], ...]:
    """Return each structure's volume in the label maps, divided by its volume in the public mean shape.

    Args:
        names: Names of the structures.
        labels: For each structure, the number of its voxels in all label maps together.
        shapes: For each structure, the sum of its probabilities in the mean shape, counted once for each label map. It
            is above 0 even if the structure is the most probable one in no voxel.

    Returns:
        Name and ratio; the ratio is infinite if only the label maps contain the structure.

    >>> shares(["ventricle"], [200], [100.0])
    (('ventricle', 2.0),)
    """
    return tuple(
        (name, ours / mean if mean else (math.inf if ours else 1.0))
        for name, ours, mean in zip(names, labels, shapes, strict=True)
    )
