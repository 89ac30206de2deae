"""Measures the noise sampler: rounded Gaussians from the operating system's CSPRNG, beside numpy's, rounded
likewise.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from benchmarks.run import RATIO, Figure, cpu_s, figure, ratios
from common.privacy.gaussian import rounded_gaussian

SIZE, STD, REPEATS = 1_000_000, Fraction(10**6), 7


def figures() -> Iterator[Figure]:
    """Yield the ratio of both samplers' time, the samples a second, and the noise's deviation divided by σ."""
    rng = np.random.default_rng(0)
    ours, numpy = [], []
    for _ in range(REPEATS):  # in turn, so that other load affects both
        ours.append(cpu_s(lambda: rounded_gaussian(SIZE, STD)))
        numpy.append(cpu_s(lambda: np.rint(rng.normal(0, float(STD), SIZE)).astype(np.int64)))
    yield figure("noise beside numpy's", ratios(ours, numpy), RATIO)
    yield figure("samples a second", [SIZE / one for one in ours], "1/s", more_is_better=True)
    yield figure("deviation of the noise over σ", [float(rounded_gaussian(SIZE, STD).std() / float(STD))], RATIO)
