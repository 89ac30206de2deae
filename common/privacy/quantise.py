"""From a code to integers whose norm is proven: clip, truncate, and test in exact integers.

The privacy guarantee rests on one inequality, Σq² ≤ R², decided here without floating point. Refuses NaN, infinity,
wrong shapes and wrong types; never writes to its arguments; raises without quoting a code.
"""

from __future__ import annotations

from math import isfinite

import numpy as np
from jaxtyping import Float, Int64

from common.canonical import check_integer
from common.errors import InvalidInput
from common.privacy.mechanism import GRID_BITS

_SHRINK = 1 - 2.0**-50
_INT64_ROOM = 1 << 62


def clip(code: Float[np.ndarray, "l"], *, radius: float) -> Float[np.ndarray, "l"]:
    """Project a code onto the closed ℓ2 ball: c · min(1, radius / ‖c‖₂), in float64.

    Guarantees: ``np.linalg.norm(result)`` ≤ radius; idempotent; the result is a new array.
    Edge cases: zero → zero; ‖code‖₂ = radius → unchanged; float16 and float32 are widened first; values whose squares
    overflow or underflow are scaled before squaring; NaN, infinity, an empty or non-vector code → InvalidInput.
    Source: Abadi et al. 2016, Algorithm 1.
    """
    if not isinstance(radius, int | float) or isinstance(radius, bool) or not isfinite(radius) or radius <= 0:
        raise InvalidInput("clipping norm C", value=radius, limit="a finite number above 0")
    result = _vector(code)
    norm = _norm(result)
    if norm <= radius:
        return result
    peak = float(np.max(np.abs(result)))
    direction = result / peak  # in two steps: radius / norm may underflow, and norm itself may be infinite
    result = direction * (radius / _norm(direction))
    while _norm(result) > radius:
        result = result * _SHRINK
    return result


def quantise(code: Float[np.ndarray, "l"], *, radius_int: int) -> Int64[np.ndarray, "l"]:
    """Turn a voter's code into integers on the grid 2⁻¹⁶ with Σq² ≤ ``radius_int``², whatever the code is.

    In this order: clip to R·2⁻¹⁶ in float64, scale by 2¹⁶ (exact), truncate towards zero (|q_i| ≤ |x_i|, so no norm
    grows), and test Σq² ≤ R² in exact integers; should float64's rounding of the norm have let one step too many
    through (possible for R above 2²⁶ only), the code is shrunk by 2⁻⁵⁰ and truncated again.
    Edge cases: the zero code stays zero; NaN or infinity → InvalidInput.
    """
    check_integer("integer radius", radius_int, least=1, most=(1 << 40) - 1, limit="1 to 2^40")
    scaled = clip(code, radius=radius_int * 2.0**-GRID_BITS) * 2.0**GRID_BITS
    result = np.trunc(scaled).astype(np.int64)
    while not within(result, bound_int=radius_int):
        scaled = scaled * _SHRINK
        result = np.trunc(scaled).astype(np.int64)
    return result


def within(code: Int64[np.ndarray, "l"], *, bound_int: int) -> bool:
    """Whether ‖code‖₂ ≤ ``bound_int``, decided as Σq² ≤ bound² in exact integers.

    Never overflows: with b = max|q|, int64 is used only if l·b² < 2⁶², Python integers otherwise.
    Edge cases: int64's smallest value is handled (its absolute value is not an int64); an empty or non-vector array,
    or another dtype, is refused rather than judged.
    """
    check_integer("norm bound", bound_int, least=1, limit="a positive integer")
    if not isinstance(code, np.ndarray) or code.dtype != np.int64 or code.ndim != 1 or code.size == 0:
        raise InvalidInput("integer code", limit="a non-empty int64 vector")
    peak = max(int(code.max()), -int(code.min()))
    if peak > bound_int:
        return False
    if code.size * peak * peak < _INT64_ROOM:
        return int(np.dot(code, code)) <= bound_int * bound_int
    total: int = sum(int(q) ** 2 for q in code)
    return total <= bound_int * bound_int


def _vector(code: object) -> Float[np.ndarray, "l"]:
    """A fresh float64 copy of a finite, non-empty floating vector."""
    if not isinstance(code, np.ndarray) or not np.issubdtype(code.dtype, np.floating):
        raise InvalidInput("code", value=type(code).__name__, limit="a floating-point numpy vector")
    if code.ndim != 1 or code.size == 0:
        raise InvalidInput("shape of code", value=code.shape, limit="a non-empty vector")
    with np.errstate(over="ignore"):  # longdouble beyond float64 becomes infinite and is refused below
        result = code.astype(np.float64)
    if not np.isfinite(result).all():
        raise InvalidInput("code", limit="finite numbers only")
    return result


def _norm(vector: Float[np.ndarray, "l"]) -> float:
    """‖v‖₂ in float64, may be infinite: the larger of numpy's and one scaled so that no square over- or underflows."""
    peak = float(np.max(np.abs(vector)))
    if peak == 0:
        return 0.0
    scaled = vector / peak
    with np.errstate(over="ignore", under="ignore"):
        plain = float(np.linalg.norm(vector))
    return max(plain, peak * float(np.linalg.norm(scaled)))
