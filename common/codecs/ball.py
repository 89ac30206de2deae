"""Computes the activation φ: ℝ^(l+1) → unit ℓ2 ball of ℝ^l. An autoencoder with this bottleneck needs no clipping.

Its l + 1 inputs o₀, …, o_l become a code of length l:

    φ(o₀, …, o_l) = (o₁, …, o_l) / ( (e^(−o₀·√(8/π)) + 1)^(1/l) · √(Σ_{i≥1} o_i²) )

(Fay, Sjölund & Oechtering 2021, "Activation function", appendix.) The last l inputs give a direction. The first input
gives a distance from the origin, U^(1/l), where U is the logistic function of slope √(8/π). This logistic function
approximates the normal distribution function to within .0177, so standard normal inputs come out nearly uniform in the
ball.

The module decides two cases that the paper leaves open: a vanishing direction (0/0 in the paper's formula) gives the
zero code, and rounding never lifts a norm above 1. :mod:`common.codecs.ball_autoencoder` calls it. NaN, infinity, fewer
than two inputs, and dtypes other than float16, float32 and float64 are refused.

The code is computed by two formulas. Both are numerically stable in any floating-point type, so the version with
gradients (:func:`common.codecs.ball_autoencoder.activation`) uses them too:

* radius     ``exp(logsigmoid(√(8/π)·o₀) / l)``  with logsigmoid(x) = −log(1 + e^(−x)), because the sum 1 + e^(−x)
  could overflow;
* direction  ``w / ‖w‖`` with ``w = v / max|v|``, so that no square over- or underflows.
"""

from __future__ import annotations

from math import pi, sqrt

import numpy as np
from jaxtyping import Float

from common.canonical import check_integer
from common.errors import InvalidInput

SLOPE = sqrt(8 / pi)
"""Slope of the logistic function in φ. At 0 its derivative equals the standard normal density. It differs from the
normal distribution function by at most .0177."""

MAX_LENGTH = 1 << 20
_DTYPES = (np.float16, np.float32, np.float64)


def ball_activation(inputs: Float[np.ndarray, "*batch inputs"]) -> Float[np.ndarray, "*batch l"]:
    """Apply the activation φ, which maps into the unit ball, to every row of an array.

    Guarantees: every row has ‖φ(o)‖₂ ≤ 1 as a real number, and also as computed in float64 by any order of summation. A
    row's value does not depend on the others. The results are computed in float64 and rounded towards zero. Each number
    is therefore within one unit in the last place of the exact value; for a float64 array, within l + 32 units.

    Args:
        inputs: Float array of shape [*batch, l + 1]: o = (o₀, o₁, …, o_l) along the last axis, with 1 ≤ l ≤ 2²⁰.

    Returns:
        A new array of shape [*batch, l] and the same dtype. o₁ = … = o_l = 0 gives the zero code for any o₀. As o₀ → ∞
        the code tends to the sphere, as o₀ → −∞ to 0. An empty batch stays empty.

    Raises:
        InvalidInput: For NaN, infinity, l outside its range, or another dtype.

    Source: Fay et al. 2021, appendix "Activation function"; Muller 1959 for the direction.

    >>> ball_activation(np.array([0.0, 3.0, 4.0])).round(3)
    array([0.424, 0.566])
    """
    if type(inputs) is not np.ndarray or inputs.dtype not in _DTYPES:
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
    # Sum, root, quotient and products err by less than (l/2 + 8)·2⁻⁵³ in all; a checker's own norm errs as much.
    room = 1 - (length + 16) * 2.0**-53
    scale = ball_radius(wide[..., :1], length=length) * room / np.where(norm > 0, norm, 1)
    return _towards_zero(direction * scale, inputs.dtype)


def ball_radius(first: Float[np.ndarray, "*shape"], *, length: int) -> Float[np.ndarray, "*shape"]:
    """Return the norm of the activation, ‖φ(o)‖₂ = (1 + e^(−o₀·√(8/π)))^(−1/l).

    It depends only on the first input o₀ and the length l of a code.

    Guarantees: the result is from 0 to 1 and never decreases in o₀. Its l-th power is the logistic function that
    approximates the normal distribution function (Figure 1 of the paper).

    Args:
        first: First inputs o₀, a float array of any shape. Any finite value is computed without overflow.
        length: Length l of a code, from 1 to 2²⁰.

    Returns:
        Float64 array of the same shape.

    Raises:
        InvalidInput: For NaN, infinity, or a length outside its range.

    Source: Fay et al. 2021, appendix "Activation function".
    """
    check_integer("length of a code", length, least=1, most=MAX_LENGTH, limit="1 to 2^20")
    wide = np.asarray(first, dtype=np.float64)
    if not np.isfinite(wide).all():
        raise InvalidInput("activation inputs", limit="finite numbers only")
    with np.errstate(over="ignore"):  # beyond float64 the logistic is 0 or 1, which is what infinity gives
        log_sigmoid = -np.logaddexp(0.0, -SLOPE * wide)
    return np.minimum(np.exp(log_sigmoid / length), 1.0)


def _towards_zero(values: Float[np.ndarray, "*shape"], dtype: np.dtype) -> Float[np.ndarray, "*shape"]:
    """Convert float64 to ``dtype``, rounding towards zero, so that no absolute value and no norm increases."""
    result = values.astype(dtype)
    grown = np.abs(result.astype(np.float64)) > np.abs(values)
    result[grown] = np.nextafter(result[grown], np.zeros((), dtype))
    return result
