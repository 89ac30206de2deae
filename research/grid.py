"""Rounds sums of many vectors to the integer grid of private training, where matrix products compute the sums faster.

The strategies of fully connected networks and the private PCA use it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from client.training.private.clipped_sums import RADIUS_INT
from common.errors import InvalidInput

SUMMED_NORM = 1 - 2.0**-13
"""Largest norm of a vector in a sum that :func:`grid_sum` rounds; the rest up to 1 is room for rounding."""
MAX_SUMMED_COORDINATES = 1 << 21


def grid_sum(total: Float[np.ndarray, "d"], *, coordinates: int) -> Int64[np.ndarray, "d"]:
    """Round a float64 sum of vectors, each of norm at most :data:`SUMMED_NORM`, to the grid 2⁻²⁴.

    Rounding two neighbouring sums of d coordinates increases their distance by at most one step per coordinate, so the
    sensitivity stays below R, the number of steps in norm 1, if √d + R·SUMMED_NORM ≤ R. This holds for all d up to 2²².
    Up to 2²¹ coordinates there is room for a float64 error of 600 grid steps, and the float64 error of a sum of n < 2¹⁸
    vectors is at most n²·2⁻⁵³·R = 128. This assumes that the vectors themselves, computed in float32, do not change
    with the others of a batch.

    Args:
        total: The sum, float64 [d].
        coordinates: Number of coordinates of the whole release.

    Returns:
        Int64 array [d].

    Raises:
        InvalidInput: If a release has more than 2²¹ coordinates, or none.
    """
    if not 1 <= coordinates <= MAX_SUMMED_COORDINATES:
        raise InvalidInput("coordinates of a summed release", value=coordinates, limit=f"1 to {MAX_SUMMED_COORDINATES}")
    result: np.ndarray = np.rint(total * RADIUS_INT).astype(np.int64)
    return result
