"""Tests calibration errors: another formula agrees, cases add up, and certain background hides no error."""

from __future__ import annotations

import math

import numpy as np
import pytest

from common.calibration import BINS, NOTHING, binned, entropy, reliability


def test_the_error_of_two_cases_together_is_that_of_their_voxels_together() -> None:
    rng = np.random.default_rng(0)
    sure = rng.uniform(0, 1, 4000)
    right = rng.uniform(0, 1, 4000) < sure**2
    apart = binned(sure[:900], right[:900]) + binned(sure[900:], right[900:])
    expected = 0.0
    for low in np.arange(BINS) / BINS:  # as Guo et al. write it
        inside = (sure >= low) & (sure < low + 1 / BINS)
        expected += inside.mean() * abs(right[inside].mean() - sure[inside].mean())
    assert apart.error == pytest.approx(expected, abs=1e-9)
    assert binned(sure, right).error == pytest.approx(apart.error)
    assert [accuracy < confidence for confidence, accuracy in apart.points[3:-2]] == [True] * (BINS - 5)
    assert math.isnan(NOTHING.error)
    assert binned(np.ones(5, np.float32), np.ones(5, bool)).error == 0


def test_certain_background_neither_helps_nor_hides() -> None:
    truth = np.zeros((8, 8, 8), np.uint8)
    truth[:2, :2, :2] = 1
    wrong = np.stack([np.full(truth.shape, 0.9), np.full(truth.shape, 0.1)]).astype(np.float32)
    assert reliability(wrong, truth).count[13] == 8
    assert reliability(wrong, truth).error == pytest.approx(0.9, abs=1e-6)
    false_alarm = wrong[::-1].copy()
    assert sum(reliability(false_alarm, truth).count) == truth.size


def test_entropy_is_nothing_where_certain_and_log_k_where_lost() -> None:
    probabilities = np.stack([np.array([1.0, 1 / 3]), np.array([0.0, 1 / 3]), np.array([0.0, 1 / 3])])[..., None, None]
    np.testing.assert_allclose(entropy(probabilities).ravel(), [0, math.log(3)], atol=1e-12)
