"""The mean of figures measured side by side, and how far it may be off: Student's t over cases or seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from scipy.special import stdtrit

CONFIDENCE = 0.95


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean of one value or more, and the half-width of its 95 % interval: t·s/√n, s over n - 1; None for one."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    spread = statistics.stdev(values, mean) / math.sqrt(len(values))
    return mean, float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * spread


def next_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of some values, and half the width of the 95 % interval for one more like them: t·s·√(1 + 1/n)."""
    mean, half = mean_interval(values)
    return mean, math.inf if half is None else half * math.sqrt(len(values) + 1)
