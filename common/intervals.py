"""Computes the mean of values, such as differences over cases or seeds, and its confidence interval by Student's t."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from scipy.special import stdtrit

CONFIDENCE = 0.95


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return a mean and the half-width of its 95 % interval, t·s/√n.

    Here n is the number of values, s their standard deviation, and t the 97.5 % quantile of Student's t distribution.

    Args:
        values: At least one value.

    Returns:
        The mean, and the half-width, or None for a single value.

    >>> mean_interval([1.0])
    (1.0, None)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None
    spread = statistics.stdev(values, mean) / math.sqrt(len(values))
    return mean, float(stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * spread


def known_interval(values: Iterable[float]) -> tuple[float, float | None] | None:
    """Return :func:`mean_interval` of the values that are not nan.

    Args:
        values: Numbers, some of them nan.

    Returns:
        The mean and the half-width; None if every value is nan.
    """
    known = [value for value in values if not math.isnan(value)]
    return mean_interval(known) if known else None


def next_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a mean and the half-width of the 95 % interval for one further value, t·s·√(1 + 1/n).

    Here n is the number of values, s their standard deviation, and t the 97.5 % quantile of Student's t distribution.

    Args:
        values: At least one value.

    Returns:
        The mean and the half-width; infinite for a single value.
    """
    mean, half = mean_interval(values)
    return mean, math.inf if half is None else half * math.sqrt(len(values) + 1)
