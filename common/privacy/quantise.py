"""Turns a code into integers with a proven norm bound: clips, truncates, and tests the bound in exact integers.

Called by sites before they send a code and by the server before it adds one. The privacy guarantee rests on one
inequality, Σq² ≤ R², for the integers q of a code and the clipping norm R in grid steps of 2⁻¹⁶. This module decides it
without floating point. Refuses NaN, infinity, wrong shapes and wrong types. Subclasses of ``numpy.ndarray`` are wrong
types, because their methods may hide values: the norm of a masked array leaves out the masked values, and its sum may
contain them. It never writes to its arguments, and its errors quote no code.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from common.canonical import check_integer
from common.errors import InvalidInput
from common.privacy.checks import check_number
from common.privacy.mechanism import GRID_BITS

_SHRINK = 1 - 2.0**-50
_INT64_ROOM = 1 << 62


def clip(code: Float[np.ndarray, "l"], *, radius: float) -> Float[np.ndarray, "l"]:
    """Project a code onto the closed ℓ2 ball of the given radius: code · min(1, radius / ‖code‖₂).

    A code inside the ball is returned unchanged, so the projection is idempotent. Values whose squares would overflow
    or underflow are scaled before squaring.

    Args:
        code: Float array of shape [l], of float16, float32 or float64.
        radius: Radius C of the ball, finite and above 0, in the code's units.

    Returns:
        New float64 array of shape [l] with ``np.linalg.norm(result)`` ≤ radius, for radii from 1e-140 to 1e150. For
        others the norm is computed with scaled squares, because numpy's own are inaccurate or overflow.

    Raises:
        InvalidInput: If the radius is outside its range, or the code is no vector of floats, is empty, or contains NaN
            or infinity.

    Source: Abadi et al. 2016, Algorithm 1.

    >>> c.clip(np.array([3.0, 4.0]), radius=1.0)
    array([0.6, 0.8])
    """
    check_number("clipping norm C", radius)
    result = _vector(code)
    norm = _norm(result)
    if norm <= radius:
        return result
    peak = float(np.max(np.abs(result)))
    direction = result / peak  # in two steps: radius / norm may underflow, and norm itself may be infinite
    result = direction * (radius / _norm(direction))
    while _norm(result) > radius:
        smaller = result * _SHRINK
        result = smaller if np.any(smaller != result) else np.nextafter(result, 0.0)  # the smallest floats round up
    return result


def quantise(code: Float[np.ndarray, "l"], *, radius_int: int) -> Int64[np.ndarray, "l"]:
    """Turn a voter's code into integers on the grid 2⁻¹⁶ whose norm is at most ``radius_int``.

    1. Clip to R·2⁻¹⁶ in float64.
    2. Scale by 2¹⁶, which is exact.
    3. Truncate towards zero, so no norm grows.
    4. Test Σq² ≤ R² for the resulting integers q, exactly. If it fails because of float64's rounding, which is possible
       for R above 2²⁶ only, multiply the code by 1 − 2⁻⁵⁰, truncate again, and repeat the test.

    Args:
        code: Float array of shape [l] in the code's units.
        radius_int: Norm bound R in grid steps of 2⁻¹⁶.

    Returns:
        Int64 array q of shape [l] with Σq² ≤ R², whatever the code is. The zero code stays zero.

    Raises:
        InvalidInput: If ``radius_int`` is not from 1 to 2⁴⁰ − 1, or the code is no vector of floats, is empty, or
            contains NaN or infinity.

    >>> c.quantise(np.array([3.0, 4.0]), radius_int=c.radius_int(1.0))
    array([39321, 52428])
    """
    check_integer("integer radius", radius_int, least=1, most=(1 << 40) - 1, limit="an integer from 1 to 2^40 - 1")
    scaled = clip(code, radius=radius_int * 2.0**-GRID_BITS) * 2.0**GRID_BITS
    result = np.trunc(scaled).astype(np.int64)
    while not within(result, bound_int=radius_int):
        scaled = scaled * _SHRINK
        result = np.trunc(scaled).astype(np.int64)
    return result


def within(code: Int64[np.ndarray, "l"], *, bound_int: int) -> bool:
    """Return whether ‖code‖₂ ≤ ``bound_int``, decided as Σq² ≤ bound² in exact integers.

    Args:
        code: Int64 array of shape [l].
        bound_int: Norm bound, at least 1.

    Returns:
        True if the code is within the bound. Every int64 value is judged correctly; nothing overflows.

    Raises:
        InvalidInput: If the bound is below 1, or the array is empty, not a vector, not int64 or a subclass of ndarray.

    >>> c.within(np.array([3, 4]), bound_int=5), c.within(np.array([3, 5]), bound_int=5)
    (True, False)
    """
    check_integer("norm bound", bound_int, least=1, limit="a positive integer")
    if type(code) is not np.ndarray or code.dtype != np.int64 or code.ndim != 1 or code.size == 0:
        raise InvalidInput("integer code", limit="a non-empty int64 vector, as a plain numpy array")
    peak = max(int(code.max()), -int(code.min()))
    if peak > bound_int:
        return False
    if code.size * peak * peak < _INT64_ROOM:
        return int(np.dot(code, code)) <= bound_int * bound_int
    total: int = sum(int(q) ** 2 for q in code)
    return total <= bound_int * bound_int


def _vector(code: object) -> Float[np.ndarray, "l"]:
    """Return a fresh float64 copy of a finite, non-empty floating-point vector; refuse anything else."""
    if type(code) is not np.ndarray or not np.issubdtype(code.dtype, np.floating):
        kind = code.dtype.name if type(code) is np.ndarray else type(code).__name__
        raise InvalidInput("code", value=kind, limit="a plain numpy vector of floats")
    if code.ndim != 1 or code.size == 0:
        raise InvalidInput("shape of code", value=code.shape, limit="a non-empty vector")
    with np.errstate(over="ignore"):  # longdouble beyond float64 becomes infinite and is refused below
        result = code.astype(np.float64)
    if not np.isfinite(result).all():
        raise InvalidInput("code", limit="finite numbers only")
    return result


def _norm(vector: Float[np.ndarray, "l"]) -> float:
    """Return a vector's norm in float64, possibly infinite.

    The values are scaled first, so that no square over- or underflows. Where numpy's own norm is accurate too, the
    larger of the two is returned.
    """
    peak = float(np.max(np.abs(vector)))
    if peak == 0:
        return 0.0
    scaled = vector / peak
    with np.errstate(over="ignore", under="ignore"):
        plain = float(np.linalg.norm(vector))
    exact = peak * float(np.linalg.norm(scaled))
    return max(plain, exact) if 1e-140 < exact < 1e150 else exact
