"""Measures how well a network's confidence is calibrated: reliability in bins, expected calibration error, entropy
maps.

Of a segmentation only the voxels are counted that the answer or the truth gives to a structure: everywhere else nearly
every voxel is background and said to be so with certainty, and would hide the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

BINS = 15


@dataclass(frozen=True, slots=True)
class Reliability:
    """Answers in :data:`BINS` equal bins of confidence: how many, the sum of their confidences, how many are right.

    Cases add up; nothing of a voxel is kept.
    """

    count: tuple[int, ...] = (0,) * BINS
    confidence: tuple[float, ...] = (0.0,) * BINS
    right: tuple[int, ...] = (0,) * BINS

    def __add__(self, other: Reliability) -> Reliability:
        pairs = ((self.count, other.count), (self.confidence, other.confidence), (self.right, other.right))
        count, confidence, right = (tuple(a + b for a, b in zip(*pair, strict=True)) for pair in pairs)
        return Reliability(count, confidence, right)

    @property
    def error(self) -> float:
        """Expected calibration error: Σ share of a bin · |accuracy − mean confidence| (Guo et al. 2017)."""
        total = sum(self.count)
        gaps = (abs(right - sure) for right, sure in zip(self.right, self.confidence, strict=True))
        return math.fsum(gaps) / total if total else math.nan

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(mean confidence, accuracy) of every bin that holds anything: the reliability diagram."""
        bins = zip(self.count, self.confidence, self.right, strict=True)
        return tuple((sure / count, right / count) for count, sure, right in bins if count)


NOTHING = Reliability()
"""Of no answer: its error is nan."""


def binned(confidence: Float[np.ndarray, "n"], right: Bool[np.ndarray, "n"]) -> Reliability:
    """Answers with this confidence in [0, 1], right or wrong."""
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    count, good = (np.bincount(each, minlength=BINS).tolist() for each in (bins, bins[right]))
    sure = np.bincount(bins, weights=confidence.astype(np.float64), minlength=BINS).tolist()
    return Reliability(tuple(count), tuple(sure), tuple(good))


def reliability(probabilities: Float[np.ndarray, "k x y z"], truth: UInt8[np.ndarray, "x y z"]) -> Reliability:
    """The most probable label's confidence in the voxels of a structure, in the answer or in the truth."""
    found = probabilities.argmax(axis=0)
    counted = (found > 0) | (truth > 0)
    return binned(probabilities.max(axis=0)[counted], (found == truth)[counted])


def entropy(probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "x y z"]:
    """In nats, voxel by voxel; over log k it is 0 where the answer is certain and 1 where nothing is known."""
    result: np.ndarray = -sum(p * np.log(np.maximum(p, 1e-30)) for p in probabilities)
    return result
