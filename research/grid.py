"""Sums that are cheaper as matrix products than vector by vector, rounded to the integer grid of private training."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from client.training.private.clipped_sums import RADIUS_INT
from common.errors import InvalidInput

SUMMED_NORM = 1 - 2.0**-13
"""The largest norm of a vector in such a sum."""
MAX_SUMMED_COORDINATES = 1 << 21


def grid_sum(total: Float[np.ndarray, "d"], *, coordinates: int) -> Int64[np.ndarray, "d"]:
    """Round a float64 sum of vectors, each of norm at most :data:`SUMMED_NORM`, to the grid 2⁻²⁴.

    Rounding two neighbouring sums adds at most 1 a coordinate to their distance, so √d + R·SUMMED_NORM ≤ R for all the
    ``coordinates`` d of a release up to 2²²; up to 2²¹ there is room for 600 steps of float64's error, which on a sum
    of n < 2¹⁸ vectors is at most n²·2⁻⁵³·R = 128.

    Raises:
        InvalidInput: If a release has more than 2²¹ coordinates, or none.
    """
    if not 1 <= coordinates <= MAX_SUMMED_COORDINATES:
        raise InvalidInput("coordinates of a summed release", value=coordinates, limit=f"1 to {MAX_SUMMED_COORDINATES}")
    result: np.ndarray = np.rint(total * RADIUS_INT).astype(np.int64)
    return result
