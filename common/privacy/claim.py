"""Computes a study's claim a second time for the audit: its own Δ, its own μ and its own ε.

An audit that asked the code under audit what it claims would find a wrong claim kept. So nothing here is shared with
``accounting``, ``calibration`` or ``mechanism``: plain names and numbers in, floats out, by other algorithms (bisection
in mpmath, Rényi orders minimised by scipy). Good to about 1e-12, which is far finer than any test against it. Refuses
NaN, infinite, zero and negative parameters, and unit ``patient`` with relation ``zero-out``.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import isfinite, log, sqrt

import mpmath

from common.errors import InvalidInput

_REACH = {
    ("hospital", "replace-one"): (2, 0),  # all m codes turn round: 2·m
    ("hospital", "zero-out"): (1, 0),  # all m codes against none: m
    ("patient", "replace-one"): (0, 2),  # one voter of m turns round
}
"""Δ/C as a·m + b."""


def claimed_reach(unit: str, relation: str, *, voters_per_site: int) -> int:
    """Δ in clipping norms: how many C one unit moves the sum by, m = ``voters_per_site``."""
    if (str(unit), str(relation)) not in _REACH:
        raise InvalidInput(
            "unit and relation",
            value=(str(unit), str(relation)),
            limit="patient with replace-one, hospital with either relation",
        )
    if isinstance(voters_per_site, bool) or not isinstance(voters_per_site, int) or voters_per_site < 1:
        raise InvalidInput("voters per site", value=voters_per_site, limit="an integer from 1")
    a_voter, in_all = _REACH[str(unit), str(relation)]
    return a_voter * voters_per_site + in_all


def claimed_mu(epsilon: float, delta: float, *, accountant: str = "exact") -> float:
    """The largest μ of a Gaussian mechanism for which ``accountant`` reads at most ``epsilon`` at ``delta``."""
    _check("epsilon", epsilon)
    _check_delta(delta)
    return _mu(float(epsilon), float(delta), str(accountant))


def claimed_epsilon(mu: float, delta: float, *, accountant: str = "exact") -> float:
    """The ε at ``delta`` of a Gaussian mechanism with this μ, by ``accountant``: the inverse of :func:`claimed_mu`."""
    _check("mu", mu)
    _check_delta(delta)
    return _epsilon(float(mu), float(delta), str(accountant))


def shares_carry(share: Fraction, noise_std: Fraction, *, sites: int, colluders: int) -> bool:
    """Whether the shares of a roster's honest sites carry σ: (K − t)·s² ≥ σ² with K − t ≥ 2, in integers alone."""
    for what, value, least in (("sites", sites, 1), ("colluders", colluders, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInput(what, value=value, limit=f"an integer from {least}")
    for what, std in (("share of the noise", share), ("noise", noise_std)):
        if not isinstance(std, Fraction) or std <= 0:
            raise InvalidInput(what, value=std, limit="a positive rational")
    ours, claimed = share.numerator * noise_std.denominator, noise_std.numerator * share.denominator
    return sites >= colluders + 2 and (sites - colluders) * ours * ours >= claimed * claimed


def _fits_exactly(mu: float, epsilon: float, delta: float) -> bool:
    """Whether Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) ≤ δ, Balle & Wang 2018, Theorem 8."""
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return bool(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m) <= delta)


def _exact(mu: float, delta: float) -> float:
    return 0.0 if _fits_exactly(mu, 0.0, delta) else _least(lambda epsilon: _fits_exactly(mu, epsilon, delta))


def _rdp(mu: float, delta: float) -> float:
    """Least over α of αμ²/2 + log(1 − 1/α) − log(αδ)/(α − 1): Canonne, Kamath & Steinke 2020, Proposition 12."""

    def at(log_order: float) -> float:
        beyond = mpmath.exp(log_order)  # α − 1
        alpha = 1 + beyond
        return float(alpha * mu * mu / 2 + mpmath.log(beyond / alpha) - (log(delta) + mpmath.log(alpha)) / beyond)

    from scipy.optimize import minimize_scalar  # half a second, and nobody who does not ask waits for it

    middle = log(sqrt(2 * log(1 / delta)) / mu)
    found = minimize_scalar(at, bounds=(middle - 8, middle + 8), method="bounded", options={"xatol": 1e-10})
    return max(0.0, float(found.fun))


def _paper(mu: float, delta: float) -> float:
    """Fay et al. 2021, eq (14)."""
    return mu * mu / 2 + sqrt(2 * mu * mu * log(1 / delta))


_EPSILON: dict[str, Callable[[float, float], float]] = {"exact": _exact, "rdp": _rdp, "paper": _paper}


@lru_cache(maxsize=256)
def _epsilon(mu: float, delta: float, accountant: str) -> float:
    return _EPSILON[_known(accountant)](mu, delta)


@lru_cache(maxsize=256)
def _mu(epsilon: float, delta: float, accountant: str) -> float:
    if _known(accountant) == "exact":
        return 1 / _least(lambda inverse: _fits_exactly(1 / inverse, epsilon, delta))
    reads = _EPSILON[accountant]
    return 1 / _least(lambda inverse: reads(1 / inverse, delta) <= epsilon)


def _least(holds: Callable[[float], bool]) -> float:
    """The least positive number for which ``holds``, which is false below and true above it; bisection to 2⁻⁵⁰."""
    high = 1.0
    while not holds(high):
        high *= 2
    while holds(high / 2) and high > 2.0**-60:
        high /= 2
    low = high / 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def _known(accountant: str) -> str:
    if str(accountant) not in _EPSILON:
        raise InvalidInput("accountant", value=str(accountant), limit=", ".join(_EPSILON))
    return str(accountant)


def _check(what: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise InvalidInput(what, value=value, limit="a finite number above 0")


def _check_delta(delta: float) -> None:
    if not isinstance(delta, float) or not 0 < delta < 1:
        raise InvalidInput("delta", value=delta, limit="above 0 and below 1")
