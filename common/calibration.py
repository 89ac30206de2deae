"""Measures how well a network's confidence is calibrated: reliability in bins, expected calibration error, entropy
maps.

Called by predictions and evaluations. In a segmentation, only voxels that belong to a structure in the prediction or in
the truth are counted. Nearly all other voxels are background predicted with certainty; they would dominate the average.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

BINS = 15


@dataclass(frozen=True, slots=True)
class Reliability:
    """Predictions grouped into :data:`BINS` equal bins of confidence. Each bin has the number of predictions, the sum
    of their confidences, and the number of correct ones.

    Reliabilities of several cases are added with ``+``. No information about a single voxel is kept.
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
        """Expected calibration error (Guo et al. 2017): the mean over bins of |accuracy − mean confidence|, weighted
        with the share of predictions in the bin; nan without predictions.
        """
        total = sum(self.count)
        gaps = (abs(right - sure) for right, sure in zip(self.right, self.confidence, strict=True))
        return math.fsum(gaps) / total if total else math.nan

    @property
    def points(self) -> tuple[tuple[float, float], ...]:
        """(mean confidence, accuracy) of every bin that is not empty: the reliability diagram."""
        bins = zip(self.count, self.confidence, self.right, strict=True)
        return tuple((sure / count, right / count) for count, sure, right in bins if count)


NOTHING = Reliability()
"""A reliability that counts no prediction; its error is nan. Results of cases can be added to it."""


def binned(confidence: Float[np.ndarray, "n"], right: Bool[np.ndarray, "n"]) -> Reliability:
    """Group predictions into bins of confidence, and return their reliability.

    Args:
        confidence: Confidences in [0, 1], [n].
        right: Whether each prediction is right, [n].

    Returns:
        The reliability.
    """
    bins = np.minimum((confidence * BINS).astype(int), BINS - 1)
    count, good = (np.bincount(each, minlength=BINS).tolist() for each in (bins, bins[right]))
    sure = np.bincount(bins, weights=confidence.astype(np.float64), minlength=BINS).tolist()
    return Reliability(tuple(count), tuple(sure), tuple(good))


def reliability(probabilities: Float[np.ndarray, "k x y z"], truth: UInt8[np.ndarray, "x y z"]) -> Reliability:
    """Return the reliability of a segmentation, in the voxels that belong to a structure in prediction or truth.

    Args:
        probabilities: Class probabilities, [k, x, y, z].
        truth: Label map, [x, y, z].

    Returns:
        The reliability of the most probable label.
    """
    found = probabilities.argmax(axis=0)
    counted = (found > 0) | (truth > 0)
    return binned(probabilities.max(axis=0)[counted], (found == truth)[counted])


def entropy(probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "x y z"]:
    """Return the entropy of each voxel's probabilities in nats.

    It lies between 0 (certain) and the logarithm of the number of classes (nothing known).

    Args:
        probabilities: Class probabilities, [k, x, y, z].

    Returns:
        Array of shape [x, y, z].
    """
    result: np.ndarray = -sum(p * np.log(np.maximum(p, 1e-30)) for p in probabilities)
    return result
