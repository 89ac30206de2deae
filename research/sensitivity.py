"""Computes corrected analytic sensitivities of DP-MAC's softplus layers. The ones that the paper prints are too small.

``mlp_strategies`` uses it. Under add-remove, one example changes a coefficient by at most these bounds; under
replace-one, by twice as much. The bounds hold for any coordinate z of the layer with ‖z‖ ≤ t and any layer input i with
‖i‖ ≤ t (bias entry included), where t is the norm bound.

T = ‖z − f(u)‖² is the layer's objective for one example, with the activation f and the pre-activation u. Its Taylor
expansion at the weights ŵ has the coefficients a = Σ[T − ŵ·∂T + ½ŵᵀ∂²Tŵ], b = Σ[∂T − ∂²Tŵ] and C = ½Σ∂²T, summed over
examples. Training releases the centred linear coefficient g = Σ∂T.

ŵ_h is column h of the weights, m_h = ‖ŵ_h‖·t bounds |u_h|, α = f(m) and β = f′(m). Maxima are over |u| ≤ m_h.

Derivations (f softplus: increasing, convex, 0 < f′ < 1, 0 < f″ ≤ 1/4):

* a1 = ‖z − f‖² ≤ (t + ‖α‖)², by the triangle inequality.
* a, as a function of u: Σ z² + z·(−2f + 2uf′ − u²f″) + (f² − 2uff′ + u²(f′² + ff″)); Cauchy–Schwarz on the middle term.
  Both functions of u are maximised on a grid. The derivative of the first is u²|f‴| < 0.6, of the second
  u²|3f′f″ + ff‴| ≤ u², which bounds the values between grid points.
* g = b1: ‖2(f − z)f′‖·‖i‖ ≤ 2t(t·max β + ‖αβ‖).
* b2 = ∂²Tŵ: entries 2[(f − z)f″ + f′²]·u·i, with |u f″| and |(f′² + ff″)u| maximised on the grid.
* C: ½|∂²T/∂u²|·‖i‖² with |z f″| ≤ t/4 and f′² + ff″ ≤ β² + α/4.

Output layer with binary cross-entropy, y in [0, 1]: from softplus(u) − yu and its derivatives. It refuses weights or a
norm bound that are not finite.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import numpy as np
from jaxtyping import Float

from common.errors import InvalidInput

_POINTS = 4001


@dataclass(frozen=True, slots=True)
class LayerBounds:
    """Sensitivities of one hidden layer's coefficients under add-remove.

    Attributes:
        a1: Sensitivity of the layer's objective T itself.
        a: Sensitivity of the constant of its Taylor expansion at the weights ŵ.
        b1: Sensitivity of the first derivative ∂T.
        b2: Sensitivity of the second derivative times the weights, ∂²Tŵ.
        b: Sensitivity of the linear coefficient ∂T − ∂²Tŵ.
        c: Sensitivity of the quadratic coefficient ½∂²T.
    """

    a1: float
    a: float
    b1: float
    b2: float
    b: float
    c: float

    @property
    def g(self) -> float:
        """Sensitivity of the centred linear coefficient, which training releases; equal to ``b1``."""
        return self.b1


@dataclass(frozen=True, slots=True)
class OutputBounds:
    """Sensitivities of the output layer's coefficients under binary cross-entropy and add-remove."""

    a: float
    b: float
    c: float
    g: float


def hidden_bounds(weights: Float[np.ndarray, "d h"], *, t: float) -> LayerBounds:
    """Return the corrected bounds of a hidden softplus layer.

    Args:
        weights: Weights ŵ of the layer, float [d, h], bias row included.
        t: Norm bound of coordinates and inputs, above 0.

    Raises:
        InvalidInput: If an argument is not finite or ``t`` is not positive.
    """
    m, alpha, beta = _checked(weights, t)
    norm = np.linalg.norm
    grids = [np.linspace(-limit, limit, _POINTS) for limit in m]
    step = 2 * m / (_POINTS - 1)
    linear = np.array([np.abs(_linear(u)).max() for u in grids]) + 0.6 * step / 2
    square = np.array([np.abs(_square(u)).max() for u in grids]) + m**2 * step / 2
    bend = np.array([np.abs(_f2(u) * u).max() for u in grids]) + step / 4
    whole = np.array([np.abs((_f1(u) ** 2 + _f(u) * _f2(u)) * u).max() for u in grids]) + step * (2 + m) / 2
    b1 = 2 * t * (t * beta.max() + norm(alpha * beta))
    b2 = 2 * t * (t * bend.max() + norm(whole))
    together = 2 * t * (t * (1 + m.max() / 4) + norm(alpha * beta + m * (beta**2 + alpha / 4)))
    return LayerBounds(
        a1=float((t + norm(alpha)) ** 2),
        a=float(t**2 + t * norm(linear) + square.sum()),
        b1=float(b1),
        b2=float(b2),
        b=float(min(together, b1 + b2)),
        c=float(t**2 * (t / 4 + norm(beta**2 + alpha / 4))),
    )


def output_bounds(weights: Float[np.ndarray, "d h"], *, t: float) -> OutputBounds:
    """Return the bounds of a binary cross-entropy output layer, with targets in [0, 1].

    Args:
        weights: Weights ŵ of the layer, float [d, h], bias row included.
        t: Norm bound of coordinates and inputs, above 0.

    Raises:
        InvalidInput: If an argument is not finite or ``t`` is not positive.
    """
    m, _, _ = _checked(weights, t)
    grids = [np.linspace(-limit, limit, _POINTS) for limit in m]
    step = 2 * m / (_POINTS - 1)
    # d/du of f − uf′ + ½u²f″ is ½u²f‴, below 0.3; the terms with y cancel in `a` (−u + u = 0)
    value = sum(
        np.abs(_f(u) - u * _f1(u) + u**2 * _f2(u) / 2).max() + 0.3 * gap / 2 for u, gap in zip(grids, step, strict=True)
    )
    units = weights.shape[1]
    return OutputBounds(
        a=float(value),
        b=float(t * np.linalg.norm(1 + m / 4)),
        c=float(sqrt(units) * t**2 / 8),
        g=float(t * sqrt(units)),
    )


def _checked(
    weights: Float[np.ndarray, "d h"], t: float
) -> tuple[Float[np.ndarray, "h"], Float[np.ndarray, "h"], Float[np.ndarray, "h"]]:
    if not np.isfinite(t) or t <= 0:
        raise InvalidInput("norm bound T of the coordinates", value=t, limit="a finite number above 0")
    if weights.ndim != 2 or not np.isfinite(weights).all():
        raise InvalidInput("weights of a layer", value=weights.shape, limit="a finite matrix")
    m = np.linalg.norm(weights.astype(np.float64), axis=0) * t
    return m, _f(m), _f1(m)


def _f(u: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.logaddexp(0.0, u)
    return result


def _f1(u: np.ndarray) -> np.ndarray:
    result: np.ndarray = np.exp(-np.logaddexp(0.0, -u))
    return result


def _f2(u: np.ndarray) -> np.ndarray:
    result: np.ndarray = _f1(u) * _f1(-u)
    return result


def _linear(u: np.ndarray) -> np.ndarray:
    result: np.ndarray = -2 * _f(u) + 2 * u * _f1(u) - u**2 * _f2(u)
    return result


def _square(u: np.ndarray) -> np.ndarray:
    result: np.ndarray = _f(u) ** 2 - 2 * u * _f(u) * _f1(u) + u**2 * (_f1(u) ** 2 + _f(u) * _f2(u))
    return result
