"""Tests that two neighbouring sums differ by at most R after they were rounded to the grid."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from client.training.private.clipped_sums import RADIUS_INT
from common.errors import InvalidInput
from research.grid import MAX_SUMMED_COORDINATES, SUMMED_NORM, grid_sum


def test_rounding_a_summed_release_keeps_a_neighbour_within_r() -> None:
    """Tries the worst case, in which every coordinate of both sums rounds outward."""
    d = MAX_SUMMED_COORDINATES
    assert sqrt(d) + RADIUS_INT * SUMMED_NORM <= RADIUS_INT
    before = np.full(d, 0.5 / RADIUS_INT) + 2.0**-30
    step = SUMMED_NORM / sqrt(d)
    moved = grid_sum(before, coordinates=d) - grid_sum(before - step, coordinates=d)
    assert np.abs(moved).max() < 2**20  # so that the squares' sum is exact
    assert int(np.square(moved).sum()) <= RADIUS_INT**2
    with pytest.raises(InvalidInput):
        grid_sum(before, coordinates=d + 1)
