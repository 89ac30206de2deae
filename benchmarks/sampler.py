"""Measures the noise sampler: rounded Gaussians from the operating system's CSPRNG, beside numpy's, rounded
likewise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from benchmarks.run import RATIO, Figure, figure
from common.privacy.gaussian import rounded_gaussian

SIZE, STD, REPEATS = 1_000_000, Fraction(10**6), 7


def figures() -> Iterator[Figure]:
    """Yield the ratio of both samplers' time, the samples a second, and the noise's deviation divided by σ."""
    rng = np.random.default_rng(0)
    ours, numpy = [], []
    for _ in range(REPEATS):  # in turn, so that other load affects both
        ours.append(_cpu(lambda: rounded_gaussian(SIZE, STD)))
        numpy.append(_cpu(lambda: np.rint(rng.normal(0, float(STD), SIZE)).astype(np.int64)))
    yield figure("noise beside numpy's", [one / other for one, other in zip(ours, numpy, strict=True)], RATIO)
    yield figure("samples a second", [SIZE / one for one in ours], "1/s", more_is_better=True)
    yield figure("deviation of the noise over σ", [float(rounded_gaussian(SIZE, STD).std() / float(STD))], RATIO)


def _cpu(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started
