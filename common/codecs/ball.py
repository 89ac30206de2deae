"""The activation φ: ℝ^(l+1) → unit ℓ2 ball of ℝ^l, an autoencoder's bottleneck whose codes need no clipping.

    φ(o₀, …, o_l) = (o₁, …, o_l) / ( (e^(−o₀·√(8/π)) + 1)^(1/l) · √(Σ_{i≥1} o_i²) )

(Fay, Sjölund & Oechtering 2021, "Activation function", appendix.) The last l inputs give a direction, the first one a
distance from the origin: U^(1/l) with U the logistic of slope √(8/π), which stands in for the normal distribution
function to within .0177, so standard normal inputs come out nearly uniform in the ball. Where the paper is silent or
wrong on a machine: a vanishing direction (0/0 as printed) is the zero code, and no norm passes 1 by rounding.
Refuses NaN, infinity, fewer than two inputs and dtypes other than float16, float32 and float64. Pure numpy.

Two formulas carry everything, each numerically stable in any floating-point type, so that a twin in a framework with
gradients is the same two lines:

* radius     ``exp(logsigmoid(√(8/π)·o₀) / l)``  with logsigmoid(x) = −log(1 + e^(−x)), never a power of a sum;
* direction  ``w / ‖w‖`` with ``w = v / max|v|``, so that no square over- or underflows.
"""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
from jaxtyping import Float

from common.canonical import check_integer
from common.errors import InvalidInput

SLOPE = sqrt(8 / pi)
"""The logistic of this slope has the standard normal's density at 0; the largest gap between the two is .0177."""

MAX_LENGTH = 1 << 20
_DTYPES = (np.float16, np.float32, np.float64)


def ball_activation(inputs: Float[np.ndarray, "*batch inputs"]) -> Float[np.ndarray, "*batch l"]:
    """φ of every row: ``inputs`` is o = (o₀, o₁, …, o_l) along the last axis, any batch before it.

    Guarantees: every row has ‖φ(o)‖₂ ≤ 1 as a real number, and also as computed in float64 by any order of summation;
    same dtype as ``inputs``; a new array; a row's value does not depend on the others. The work is done in float64
    and shortened towards zero, so each number is within one unit in the last place of φ's (float64: l + 32 units).
    Edge cases: o₁ = … = o_l = 0 → the zero code, whatever o₀; the dtype's largest and subnormal inputs are exact
    directions like any other; o₀ → ∞ tends to the sphere, o₀ → −∞ to 0; an empty batch stays empty. NaN, infinity,
    l < 1 or l > 2²⁰, or another dtype → InvalidInput.
    Source: Fay et al. 2021, appendix "Activation function"; Muller 1959 for the direction.
    """
    if not isinstance(inputs, np.ndarray) or inputs.dtype not in _DTYPES:
        raise InvalidInput(
            "activation inputs", value=type(inputs).__name__, limit="an array of float16, float32 or float64"
        )
    if inputs.ndim < 1 or not 2 <= inputs.shape[-1] <= MAX_LENGTH + 1:
        raise InvalidInput("shape of activation inputs", value=inputs.shape, limit="a last axis of 2 to 2^20 + 1")
    if not np.isfinite(inputs).all():
        raise InvalidInput("activation inputs", limit="finite numbers only")
    wide = inputs.astype(np.float64)
    length = wide.shape[-1] - 1
    peak = np.abs(wide[..., 1:]).max(axis=-1, keepdims=True)
    direction = wide[..., 1:] / np.where(peak > 0, peak, 1)
    norm = np.sqrt(np.square(direction).sum(axis=-1, keepdims=True))  # from 1 to √l, or 0 for the zero direction
    # Summation, root, quotient and products err by less than (l/2 + 8)·2⁻⁵³ in all, and so does whoever checks.
    room = 1 - (length + 16) * 2.0**-53
    scale = ball_radius(wide[..., :1], length=length) * room / np.where(norm > 0, norm, 1)
    return _towards_zero(direction * scale, inputs.dtype)


def ball_radius(first: Float[np.ndarray, "*shape"], *, length: int) -> Float[np.ndarray, "*shape"]:
    """‖φ(o)‖₂ as a function of o₀ and l: (1 + e^(−o₀·√(8/π)))^(−1/l), in float64.

    Guarantees: from 0 to 1, never decreasing in o₀; r^l is the logistic that stands in for the normal distribution
    function (Figure 1). Edge cases: any finite o₀, without overflow: −1e308 → 0, 1e308 → 1. NaN, infinity or a length
    outside 1 … 2²⁰ → InvalidInput. Source: Fay et al. 2021, appendix "Activation function".
    """
    check_integer("length of a code", length, least=1, most=MAX_LENGTH, limit="1 to 2^20")
    wide = np.asarray(first, dtype=np.float64)
    if not np.isfinite(wide).all():
        raise InvalidInput("activation inputs", limit="finite numbers only")
    with np.errstate(over="ignore"):  # beyond float64 the logistic is 0 or 1, which is what infinity gives
        log_sigmoid = -np.logaddexp(0.0, -SLOPE * wide)
    return np.minimum(np.exp(log_sigmoid / length), 1.0)


def _towards_zero(values: Float[np.ndarray, "*shape"], dtype: np.dtype) -> Float[np.ndarray, "*shape"]:
    """Shorten float64 to ``dtype`` so that no number grows in size, hence no norm does."""
    result = values.astype(dtype)
    grown = np.abs(result.astype(np.float64)) > np.abs(values)
    result[grown] = np.nextafter(result[grown], np.zeros((), dtype))
    return result
