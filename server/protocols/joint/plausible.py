"""Whether the releases of a joint study look like what was expected of them: for the operator, free of privacy cost.

Everything here is made of stored noisy answers and public values, so it also works where the server never sees a single
code. What it can tell is bounded by the guarantee itself: noise that hides whether a hospital took its own part or
another's also hides whether it was honest. At unit hospital and μ, no test of the answers that accuses an honest study
with probability α finds one poisoned site more often than Φ(Φ⁻¹(α) + μ) (Dong, Roth & Su 2022, eq 6). This one finds
far less: docs/utility.md has the measured shares. Silence here is no proof; a site's own comparison is the better look
(:mod:`client.teachers.comparison`). Refuses nothing and decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from scipy.special import chdtr, chdtrc

FALSE_ALARMS = 0.05
"""Of honest releases whose offsets are as large as their frames expect."""

CHANGED = 2.0
"""A structure's volume in the labels beyond this factor of its volume by the public start is said."""

REMEDY = "Ask sites to run `consilium site evaluate` before anybody uses the student."


@dataclass(frozen=True, slots=True)
class Plausible:
    """``surprise``: :meth:`~common.protocols.joint.frame.Frame.surprise` of all rounds together, of ``dimension``
    degrees of freedom. ``volumes``: each structure's voxels in the decoded labels, as a share of the public start's."""

    surprise: float
    dimension: int
    volumes: tuple[tuple[str, float], ...] = ()

    @property
    def chance(self) -> float:
        """How likely so small or so large a value is where all is as expected; two-sided."""
        tails = chdtr(self.dimension, self.surprise), chdtrc(self.dimension, self.surprise)
        return min(1.0, 2 * float(min(tails)))

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
                found.append(f"{name} has {share:.2g} times the volume in the labels that public data alone gives it")
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


def shares(names: Iterable[str], labels: Iterable[int], public: Iterable[int]) -> tuple[tuple[str, float], ...]:
    """Voxels of each structure in the labels over those by the public start; infinite where the start has none."""
    return tuple(
        (name, ours / start if start else (math.inf if ours else 1.0))
        for name, ours, start in zip(names, labels, public, strict=True)
    )
