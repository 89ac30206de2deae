"""Computes a study's claimed guarantee a second time, for the audit, without the code that is audited.

An audit that took the claim from the code under audit could not find a wrong claim. This module shares no code with
``accounting``, ``calibration`` and ``mechanism``. It takes plain names and numbers, and uses other algorithms
(bisection in mpmath, Rényi orders minimised by scipy). Results are accurate to about 1e-12, which is far more than the
tests need. Refuses NaN, infinite, zero and negative parameters, and unit ``patient`` with relation ``zero-out``.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from math import isfinite, log, sqrt

import mpmath

from common.errors import InvalidInput

_REACH = {
    ("hospital", "replace-one"): (2, 0),  # all m codes are reversed: 2·m
    ("hospital", "zero-out"): (1, 0),  # all m codes become zero: m
    ("patient", "replace-one"): (0, 2),  # one voter's code is reversed: 2
}
"""Sensitivity by unit and relation, as a pair (a, b): Δ/C = a·m + b for m voters at each site."""


def claimed_reach(unit: str, relation: str, *, voters_per_site: int) -> int:
    """Return the sensitivity Δ in units of the clipping norm C: the largest change of the sum by one unit.

    Args:
        unit: ``hospital`` or ``patient``.
        relation: ``replace-one`` or ``zero-out``.
        voters_per_site: Number m of voters of a site, at least 1.

    Returns:
        Δ/C as an integer.

    Raises:
        InvalidInput: For ``patient`` with ``zero-out``, an unknown name, or m below 1.

    >>> claimed_reach("hospital", "zero-out", voters_per_site=5)
    5
    """
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
    """Return the largest μ of a Gaussian mechanism whose ε at ``delta`` is at most ``epsilon``.

    Args:
        epsilon: ε, above 0.
        delta: δ, above 0 and below 1.
        accountant: ``exact``, ``rdp`` or ``paper``.

    Returns:
        μ, to about 1e-12.

    Raises:
        InvalidInput: If an argument is outside its range.
    """
    _check("epsilon", epsilon)
    _check_delta(delta)
    return _mu(float(epsilon), float(delta), str(accountant))


def claimed_epsilon(mu: float, delta: float, *, accountant: str = "exact") -> float:
    """Return the ε at ``delta`` of a Gaussian mechanism with a given μ, the inverse of :func:`claimed_mu`.

    Args:
        mu: μ, above 0.
        delta: δ, above 0 and below 1.
        accountant: ``exact``, ``rdp`` or ``paper``.

    Returns:
        ε, to about 1e-12.

    Raises:
        InvalidInput: If an argument is outside its range.
    """
    _check("mu", mu)
    _check_delta(delta)
    return _epsilon(float(mu), float(delta), str(accountant))


def shares_carry(share: Fraction, noise_std: Fraction, *, sites: int, colluders: int) -> bool:
    """Return whether the noise shares of a roster's honest sites together have the claimed standard deviation, or more.

    The test is (K − t)·s² ≥ σ² with K − t ≥ 2, in exact integers.

    Args:
        share: Standard deviation s of one site's share, in grid steps of 2⁻¹⁶.
        noise_std: The claimed standard deviation σ, in the same steps.
        sites: Number K of sites on the roster.
        colluders: Number t of sites that may collude with the server.

    Returns:
        True if the shares suffice.

    Raises:
        InvalidInput: If a count is below its range or a standard deviation is not a positive rational.
    """
    for what, value, least in (("sites", sites, 1), ("colluders", colluders, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidInput(what, value=value, limit=f"an integer from {least}")
    for what, std in (("share of the noise", share), ("noise", noise_std)):
        if not isinstance(std, Fraction) or std <= 0:
            raise InvalidInput(what, value=std, limit="a positive rational")
    ours, claimed = share.numerator * noise_std.denominator, noise_std.numerator * share.denominator
    return sites >= colluders + 2 and (sites - colluders) * ours * ours >= claimed * claimed


def _fits_exactly(mu: float, epsilon: float, delta: float) -> bool:
    """Return whether Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) ≤ δ (Balle & Wang 2018, Theorem 8).

    Φ is the standard normal distribution function.
    """
    with mpmath.workdps(60):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        return bool(mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m) <= delta)


def _exact(mu: float, delta: float) -> float:
    return 0.0 if _fits_exactly(mu, 0.0, delta) else _least(lambda epsilon: _fits_exactly(mu, epsilon, delta))


def _rdp(mu: float, delta: float) -> float:
    """Return ε by Rényi DP: the minimum of αμ²/2 + log(1 − 1/α) − log(αδ)/(α − 1) over the orders α > 1 (Canonne,
    Kamath & Steinke 2020, Proposition 12).
    """

    def at(log_order: float) -> float:
        beyond = mpmath.exp(log_order)  # α − 1
        alpha = 1 + beyond
        return float(alpha * mu * mu / 2 + mpmath.log(beyond / alpha) - (log(delta) + mpmath.log(alpha)) / beyond)

    from scipy.optimize import minimize_scalar  # importing takes half a second, so it happens on first use

    middle = log(sqrt(2 * log(1 / delta)) / mu)
    found = minimize_scalar(at, bounds=(middle - 8, middle + 8), method="bounded", options={"xatol": 1e-10})
    return max(0.0, float(found.fun))


def _paper(mu: float, delta: float) -> float:
    """Return ε by eq (14) of Fay et al. 2021."""
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
    """Return the least positive number for which ``holds`` is true, by bisection to 2⁻⁵⁰; ``holds`` must
    be monotone.
    """
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
