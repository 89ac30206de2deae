"""Computes ε from the Σμ² of a set of releases by four accountants, and decides whether a further release fits a
budget.

Called by the ledgers before every charge, and by everything that prints an ε. Every release adds Gaussian noise, so its
cost is the number μ² = (Δ/σ)², with the sensitivity Δ of the sum and the standard deviation σ of the noise. An adaptive
sequence of releases with costs μᵢ² has exactly the guarantee of one Gaussian mechanism with μ² = Σ μᵢ² (Dong, Roth & Su
2022, Corollary 3.3). Sums are kept as rationals. Every ε is rounded up and every limit on μ² is rounded down.

``exact``  the analytic Gaussian curve (Balle & Wang 2018, Theorem 8). No other accountant can be tighter.
``rdp``    Rényi DP, with the smallest ε over dp-accounting's orders α and two best orders (:func:`epsilon_rdp`).
``pld``    privacy loss distributions by dp-accounting, imported on first use: a second opinion on ``exact``.
``paper``  eq (14) of Fay et al. 2021, the closed form that the paper calibrates with.

The neighbouring relation is already part of Δ, and so of μ. It is not passed to any library, because libraries treat it
differently: for ``REPLACE_ONE`` dp-accounting's PLD accountant doubles a Gaussian's sensitivity and its RDP accountant
does not.

Refuses NaN, infinite, zero and negative parameters before they reach a library, because dp-accounting answers ε = 0 for
a NaN noise multiplier.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import inf, nextafter, sqrt
from typing import Any

import mpmath
import numpy as np

from common.canonical import check_integer, member
from common.errors import InvalidInput
from common.privacy.checks import check_delta, check_kind, check_number, check_rational
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection

MAX_POOL_COORDINATES = 1 << 24
"""Largest number of noisy coordinates in all releases of one pool. More could need more of δ than ``SAMPLER_DELTA``."""

MAX_EPSILON = 2000.0
"""Largest ε of a budget. Up to this ε, (1 + e^ε)·``MAX_POOL_COORDINATES``·``SAMPLER_TV`` is below ``SAMPLER_DELTA``."""

MAX_GUARANTEE_EPSILON = 2400.0
"""Largest ε of a guarantee. It is above :data:`MAX_EPSILON`, because looser accountants state a larger ε for a budget
that is spent by ``exact``. Up to this ε, the sampler and the shares of a sealed sum add less than ``SAMPLER_DELTA`` to
δ.
"""

MAX_PLD_EPSILON = 700.0
"""Largest ε that :func:`epsilon_pld` returns. From ε = 709 on, e^ε is beyond float64."""

MIN_PLD_DELTA = 2.0**-40
"""Smallest δ of :func:`epsilon_pld`; no budget has a smaller one. Below, the library's rounding errors dominate."""

MIN_MU, MAX_MU = 2.0**-40, 2.0**20
"""Range of μ that the accountants accept. A smaller μ reveals nearly nothing, a larger μ nearly everything."""

ACCOUNTANTS = ("exact", "rdp", "pld", "paper")

_LIBRARY_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *map(float, range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)
"""The default Rényi orders α of dp-accounting's RDP accountant."""

_LIMIT_BITS = 56  # significant bits of a limit on μ²: loses at most 2^-55 of a budget, keeps stored rationals short
_LIBRARY_ROUNDING = 1 + 2.0**-44  # outward rounding of a float64 library's ε, checked against mpmath in the tests
_PRECISION_BITS = 320
_ZERO_TAIL = 1000.0  # a standard normal variable exceeds 40 with a probability below float64's range


def delta_exact(mu: float, epsilon: float) -> float:
    """Return the smallest δ for which a μ-GDP Gaussian mechanism is (ε, δ)-DP.

    δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ), correct to float64, where Φ is the standard normal distribution function.

    Args:
        mu: The Gaussian DP parameter μ, from 2⁻⁴⁰ to 2²⁰.
        epsilon: ε, finite and at least 0.

    Returns:
        δ. At ε = 0 it is the total variation distance 2Φ(μ/2) − 1. A value below float64's range is returned as 0.0.

    Raises:
        InvalidInput: If an argument is outside its range.

    Source: Balle & Wang 2018, Theorem 8; Dong, Roth & Su 2022, Corollary 2.13.

    >>> round(c.delta_exact(1.0, 0.0), 4)
    0.3829
    """
    mu_squared = Fraction(check_number("mu", mu)) ** 2
    _check_mu_squared(mu_squared)
    check_number("epsilon", epsilon, zero=True)
    if epsilon / mu - mu / 2 > _ZERO_TAIL:
        return 0.0
    return float(_delta(_mp().mpf(mu), _mp().mpf(epsilon)))


def epsilon_exact(mu_squared: Fraction | float, delta: float) -> float:
    """Return the smallest ε of a μ-GDP sequence of releases at δ, by the analytic Gaussian curve.

    Newton's method starts at the larger ε of :func:`epsilon_paper`, right of the root, and approaches the root without
    crossing it, because log δ(ε) is concave (Prékopa). The returned value is checked to satisfy δ(ε) ≤ ``delta``.

    Args:
        mu_squared: Σμ² of the releases, from 2⁻⁸⁰ to 2⁴⁰.
        delta: δ, above 0 and below 1.

    Returns:
        ε rounded up to the next float64; 0 if ``delta`` is at least 2Φ(μ/2) − 1.

    Raises:
        InvalidInput: If an argument is outside its range.

    Source: Balle & Wang 2018, Theorem 8.

    >>> round(c.epsilon_exact(1.0, 1e-5), 4)
    4.3772
    """
    return _epsilon_exact(_checked_mu_squared(mu_squared), check_delta("delta", delta))


def epsilon_rdp(mu_squared: Fraction | float, delta: float) -> float:
    """Return an upper bound on ε at δ by Rényi DP: the best bound over a set of orders α, each with RDP(α) = α·μ²/2.

    The set has dp-accounting's orders and two more: the best order for Mironov's conversion of RDP to ε, 1 +
    √(2·log(1/δ))/μ (eq (12) of Fay et al. 2021), and the best order for the tighter conversion of Canonne, Kamath &
    Steinke. Every order gives a valid bound, and so does the best of them. For every μ, ``exact`` gives at most the ε
    of ``rdp``, and ``rdp`` at most that of ``paper``.

    Args:
        mu_squared: Σμ² of the releases, from 2⁻⁸⁰ to 2⁴⁰.
        delta: δ, above 0 and below 1.

    Returns:
        ε, rounded up.

    Raises:
        InvalidInput: If an argument is outside its range.

    Source: Mironov 2017; Canonne, Kamath & Steinke 2020, Proposition 12.

    >>> round(c.epsilon_rdp(1.0, 1e-5), 4)
    4.7284
    """
    return _epsilon_rdp(_checked_mu_squared(mu_squared), check_delta("delta", delta))


def epsilon_rdp_library(mu_squared: Fraction | float, delta: float) -> float:
    """Return ε by Rényi DP at dp-accounting's default orders alone.

    Other tools print this value. Consilium only displays it; no decision depends on it.

    Args:
        mu_squared: Σμ² of the releases, from 2⁻⁸⁰ to 2⁴⁰.
        delta: δ, above 0 and below 1.

    Returns:
        ε, at least that of :func:`epsilon_rdp`.

    Raises:
        InvalidInput: If an argument is outside its range.
    """
    return _best_order(_LIBRARY_ORDERS, sqrt(_checked_mu_squared(mu_squared)), check_delta("delta", delta), by=math)


def epsilon_pld(mu_squared: Fraction | float, delta: float) -> float:
    """Return ε at δ by dp-accounting's privacy loss distribution, as a second opinion on ``exact``.

    It agrees with ``exact`` to about 5e-7·μ for δ of 1e-10 or more, and to 1e-4 down to 2⁻⁴⁰. It takes tenths of a
    second. No budget decision depends on it.

    Args:
        mu_squared: Σμ² of the releases, from 2⁻⁸⁰ to 64².
        delta: δ, from 2⁻⁴⁰ to below 1.

    Returns:
        ε.

    Raises:
        InvalidInput: If an argument is outside its range, or ε is above :data:`MAX_PLD_EPSILON`, where the library's
            e^ε leaves float64 and its ε is nearly 1 too large. Above μ = 64 the grid would not fit in memory.

    Source: Koskela et al. 2020; Doroshenko et al. 2022.

    >>> round(c.epsilon_pld(1.0, 1e-5), 4)
    4.3772
    """
    checked = _checked_mu_squared(mu_squared)
    if checked > 64**2:
        raise InvalidInput("mu for the pld accountant", value=sqrt(checked), limit="at most 64")
    if check_delta("delta", delta) < MIN_PLD_DELTA:
        raise InvalidInput("delta for the pld accountant", value=delta, limit="at least 2^-40")
    epsilon = _epsilon_pld(checked, delta)
    if epsilon > MAX_PLD_EPSILON:
        raise InvalidInput(
            "epsilon by the pld accountant",
            value=epsilon,
            limit=f"at most {epsilon_text(MAX_PLD_EPSILON)}",
            remedy="use the accountant exact, which has no such limit",
        )
    return epsilon


def epsilon_paper(mu_squared: Fraction | float, delta: float) -> float:
    """Return the bound ε = μ²/2 + √(2·μ²·log(1/δ)), eq (14) of Fay et al. 2021.

    The paper writes N·S²/σ² for μ²: N releases of sensitivity S with noise of standard deviation σ. The bound is valid
    and loose. It converts Rényi DP to ε by Proposition 5 of that paper, at the order of its eq (12).

    Args:
        mu_squared: Σμ² of the releases, from 2⁻⁸⁰ to 2⁴⁰.
        delta: δ, above 0 and below 1.

    Returns:
        ε rounded up to float64; positive for every μ.

    Raises:
        InvalidInput: If an argument is outside its range.

    >>> round(c.epsilon_paper(1.0, 1e-5), 4)
    5.2985
    """
    return _epsilon_paper(_checked_mu_squared(mu_squared), check_delta("delta", delta))


def epsilon_by(accountant: str, mu_squared: Fraction | float, delta: float) -> float:
    """Return ε at δ by the named accountant.

    Args:
        accountant: One of :data:`ACCOUNTANTS`.
        mu_squared: Σμ² of the releases.
        delta: δ, above 0 and below 1.

    Returns:
        ε, as the function of that accountant returns it, such as :func:`epsilon_exact`.

    Raises:
        InvalidInput: If the name is unknown or an argument is outside its range.
    """
    table: dict[str, Callable[[Fraction | float, float], float]] = {
        "exact": epsilon_exact,
        "rdp": epsilon_rdp,
        "pld": epsilon_pld,
        "paper": epsilon_paper,
    }
    if accountant not in table:
        raise InvalidInput("accountant", value=accountant, limit=", ".join(ACCOUNTANTS))
    return table[accountant](mu_squared, delta)


def compose(mechanisms: Iterable[Mechanism], protection: Protection) -> Fraction:
    """Return the total cost Σ μᵢ² of a sequence of releases, exactly; μᵢ² is the cost of release i.

    The sum is valid for releases that are chosen adaptively, each after the answers before it.

    Args:
        mechanisms: The mechanism of each release.
        protection: Unit and relation to account for.

    Returns:
        Σμ² as a rational; 0 without a release.

    Source: Dong, Roth & Su 2022, Corollary 3.3.

    >>> release = c.Mechanism(dimension=64, radius_int=65536, voters_per_site=1, noise_std=Fraction(131072))
    >>> c.compose([release, release], c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE))
    Fraction(2, 1)
    """
    if not isinstance(mechanisms, Iterable) or isinstance(mechanisms, np.ndarray):
        raise InvalidInput("mechanisms", value=type(mechanisms).__name__, limit="a list of mechanisms")
    each = (check_kind("mechanism of a release", mechanism, Mechanism) for mechanism in mechanisms)
    return sum((mechanism.mu_squared(protection) for mechanism in each), start=Fraction(0))


def max_mu_squared(accountant: AccountantName, budget: Budget) -> Fraction:
    """Return the largest sum of the μ² of all releases that a budget allows, computed by an accountant, rounded down.

    The accountant uses ``budget.analytic_delta`` = δ − 2⁻⁴⁰ in place of δ. The 2⁻⁴⁰ cover the difference between the
    sampled noise and an exact Gaussian. Let τ be the total variation distance between the mechanism with sampled noise
    and the exact mechanism. If the exact mechanism is (ε, δ')-DP, the sampled one is (ε, δ' + (1 + e^ε)·τ)-DP. The
    distance τ is at most :data:`MAX_POOL_COORDINATES` times the bound for one coordinate that
    :mod:`common.privacy.gaussian` states. For ε ≤ :data:`MAX_EPSILON`, (1 + e^ε)·τ is therefore below 2⁻⁴⁰.

    Args:
        accountant: The accountant that decides.
        budget: ε and δ, with ε at most :data:`MAX_EPSILON`.

    Returns:
        Σμ² as a dyadic rational with 56 significant bits. The function checks that releases of this Σμ² cost at most
        the budget's ε.

    Raises:
        InvalidInput: If ε is above :data:`MAX_EPSILON`, or if the budget is so small that it allows no release, or so
            large that it allows every release.

    >>> limit = c.max_mu_squared(c.AccountantName.EXACT, c.Budget(epsilon=8.0, delta=1e-5))
    >>> round(float(limit), 3)
    2.776
    """
    name = member(AccountantName, accountant, what="accountant")
    if check_kind("budget", budget, Budget).epsilon > MAX_EPSILON:
        raise InvalidInput(
            "epsilon of a budget",
            value=budget.epsilon,
            limit=f"at most {epsilon_text(MAX_EPSILON)}",
            remedy="choose an epsilon below 10, since such a budget protects nobody",
        )
    return _max_mu_squared(name, float(budget.epsilon), budget.analytic_delta)


def group_mu_squared(mu_squared: Fraction | float, *, size: int) -> Fraction:
    """Return μ² of the same releases for ``size`` units that change together: (g·μ)², exactly.

    Use it for people whom the guarantee of one unit does not cover: a patient known at g hospitals changes g voters'
    codes, and g hospitals that share data change together. Each unit changes the sum by at most the sensitivity, so g
    units change it by at most g times as much in every release. The bound is tight, because all g changes may have the
    same direction.

    Args:
        mu_squared: Σμ² for one unit.
        size: Number g of units, from 1 to 2²⁰.

    Returns:
        (g·μ)² as a rational.

    Raises:
        InvalidInput: If the size is outside its range, or the result is outside the accountants' range.

    Source: triangle inequality; Dong, Roth & Su 2022, Theorem 2.14 (a μ-GDP mechanism is g·μ-GDP for groups of g).
    """
    check_integer("size of a group", size, least=1, most=1 << 20, limit="an integer from 1 to 2^20")
    return _check_mu_squared(_checked_mu_squared(mu_squared) * size**2)


def admits(spent: Fraction, request: Fraction, limit: Fraction) -> bool:
    """Return whether a release of cost ``request`` may follow: spent + request ≤ limit, in exact rationals.

    Asked before every release, this is a valid privacy filter: however the releases are chosen, the whole run stays
    within the limit.

    Args:
        spent: Σμ² so far, at least 0.
        request: μ² of the next release, above 0.
        limit: The budget's Σμ², above 0.

    Returns:
        True if the budget allows the release.

    Raises:
        InvalidInput: If an argument is not a rational in its range.

    Source: Smith & Thakurta 2022 for GDP; Feldman & Zrnic 2021 for RDP, whose curve αμ²/2 has the same one parameter.

    >>> c.admits(Fraction(3, 2), Fraction(1, 2), Fraction(2)), c.admits(Fraction(2), Fraction(1, 2), Fraction(2))
    (True, False)
    """
    check_rational("spent mu^2", spent, zero=True)
    check_rational("requested mu^2", request)
    check_rational("limit on mu^2", limit)
    return spent + request <= limit


@dataclass(frozen=True, slots=True)
class Guarantee:
    """An ε together with its accountant, δ, unit of privacy and neighbouring relation, so that it is never printed
    alone.

    Attributes:
        epsilon: ε, finite and at least 0.
        delta: δ, above 0 and below 1.
        accountant: One of ``exact``, ``rdp``, ``pld``, ``paper``.
        protection: Unit and relation.
        group: Number of units that are protected together; 1 for the usual guarantee. Any other number is printed.

    >>> print(c.Guarantee(8.0, 1e-5, "exact", c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE)))
    ε = 8 (exact) at δ = 1e-05, unit patient, relation replace-one
    """

    epsilon: float
    delta: float
    accountant: str
    protection: Protection
    group: int = 1

    def __post_init__(self) -> None:
        check_number("epsilon of a guarantee", self.epsilon, zero=True)
        check_delta("delta", self.delta)
        if check_kind("accountant", self.accountant, str) not in ACCOUNTANTS:
            raise InvalidInput("accountant", value=self.accountant, limit=", ".join(ACCOUNTANTS))
        check_kind("protection", self.protection, Protection)
        check_integer("group of a guarantee", self.group, least=1)

    def __str__(self) -> str:
        together = "" if self.group == 1 else f", {self.group} units together"
        stated = f"ε = {epsilon_text(self.epsilon)} ({self.accountant}) at δ = {delta_text(self.delta)}"
        return f"{stated}, {self.protection}{together}"

    def to_json(self) -> dict[str, object]:
        """Return the guarantee as plain JSON for machines.

        Returns:
            ``accountant``, ``delta``, ``epsilon``, ``relation`` and ``unit``, and ``group`` if it is not 1. ε and δ are
            floats, so the result is no canonical JSON.
        """
        facts: dict[str, object] = {
            "accountant": self.accountant,
            "delta": self.delta,
            "epsilon": self.epsilon,
            "relation": str(self.protection.relation),
            "unit": str(self.protection.unit),
        }
        return facts if self.group == 1 else {**facts, "group": self.group}


def guarantee(
    mu_squared: Fraction,
    budget: Budget,
    protection: Protection,
    accountant: AccountantName | str,
    *,
    group: int = 1,
) -> Guarantee:
    """Return the guarantee of releases that cost Σμ².

    The guarantee is stated at the whole δ of the budget. ε is computed at δ − 2⁻⁴⁰, because 2⁻⁴⁰ is set aside for the
    noise sampler.

    Args:
        mu_squared: Σμ² of the releases, composed under ``protection``; 0 gives ε = 0.
        budget: Its δ is used.
        protection: Unit and relation under which ``mu_squared`` was composed.
        accountant: Name of the accountant.
        group: Number of units that are protected together, such as a patient known at g hospitals.

    Returns:
        The guarantee, with ε rounded up.

    Raises:
        InvalidInput: If an argument is outside its range, or if ε is above :data:`MAX_GUARANTEE_EPSILON`. For a group
            of several units the limit is :data:`MAX_EPSILON`. Above these limits the part of δ that is set aside would
            not cover the sampler.

    >>> patient, budget = c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE), c.Budget(epsilon=8.0, delta=1e-5)
    >>> print(c.guarantee(Fraction(1), budget, patient, "exact"))
    ε = 4.378 (exact) at δ = 1e-05, unit patient, relation replace-one
    """
    check_rational("spent mu^2", mu_squared, zero=True)
    check_kind("budget", budget, Budget)
    name = str(check_kind("accountant", accountant, str))
    together = group_mu_squared(mu_squared or Fraction(1), size=group)
    epsilon = 0.0 if mu_squared == 0 else epsilon_by(name, together, budget.analytic_delta)
    if epsilon > (MAX_EPSILON if group > 1 else MAX_GUARANTEE_EPSILON):
        raise InvalidInput(
            "epsilon of a group" if group > 1 else "epsilon of a guarantee",
            value=epsilon,
            limit=f"at most {epsilon_text(MAX_EPSILON if group > 1 else MAX_GUARANTEE_EPSILON)}",
            remedy="choose a smaller group" if group > 1 else "use more noise or fewer releases",
        )
    return Guarantee(epsilon=epsilon, delta=budget.delta, accountant=name, protection=protection, group=group)


# ---- helpers ---------------------------------------------------------------------------------------------------------

_contexts = threading.local()


def _mp() -> Any:
    """Return this thread's own mpmath context, because threads share the precision of the global context."""
    if not hasattr(_contexts, "mp"):
        context = mpmath.MPContext()
        context.prec = _PRECISION_BITS
        _contexts.mp = context
    return _contexts.mp


def _mpf(value: Fraction | float) -> Any:
    mp = _mp()
    return mp.mpf(value.numerator) / value.denominator if isinstance(value, Fraction) else mp.mpf(value)


def _upper_tail(x: Any) -> Any:
    mp = _mp()
    return mp.erfc(x / mp.sqrt(2)) / 2


def _delta(mu: Any, epsilon: Any) -> Any:
    """Compute δ(ε) with 320 bits of precision. At most about 2·log2(ε/μ + μ) + log2(1/μ) < 200 bits are lost by
    cancellation.
    """
    mp = _mp()
    low, high = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    return _upper_tail(low) - mp.exp(epsilon) * _upper_tail(high)


@lru_cache(maxsize=4096)
def _epsilon_exact(mu_squared: Fraction, delta: float) -> float:
    mp = _mp()
    mu, target = mp.sqrt(_mpf(mu_squared)), mp.mpf(delta)
    if _delta(mu, mp.mpf(0)) <= target:
        return 0.0
    epsilon = mp.mpf(_epsilon_paper(mu_squared, delta))  # right of the root, since eq (14) is a valid bound
    for _ in range(200):
        value = _delta(mu, epsilon)
        slope = mp.exp(epsilon) * _upper_tail(epsilon / mu + mu / 2) / value  # −d log δ / dε > 0
        step = (mp.log(target) - mp.log(value)) / slope
        epsilon -= step
        if step <= epsilon * mp.mpf(2) ** -70:
            break
    answer = float(epsilon)
    while _delta(mu, mp.mpf(answer)) > target:
        answer = nextafter(answer, inf)
    return answer


@lru_cache(maxsize=4096)
def _epsilon_paper(mu_squared: Fraction, delta: float) -> float:
    mu2 = _mpf(mu_squared)
    mp = _mp()
    exact = mu2 / 2 + mp.sqrt(2 * mu2 * mp.log(1 / mp.mpf(delta)))
    answer = float(exact)
    return answer if mp.mpf(answer) >= exact else nextafter(answer, inf)


class _Rounded:
    """Functions of :mod:`math`, rounded to the nearest float64.

    Results of ``math`` and numpy can differ in the last bit between processors and between C libraries. The server and
    the sites each compute a study's limit, and must get the same value.
    """

    @staticmethod
    @lru_cache(maxsize=4096)
    def log(x: float) -> float:
        return float(_mp().log(x))

    @staticmethod
    @lru_cache(maxsize=4096)
    def log1p(x: float) -> float:
        return float(_mp().log1p(x))

    @staticmethod
    def expm1(x: float) -> float:
        return float(_mp().expm1(x))

    @staticmethod
    def pow(x: float, power: float) -> float:
        return float(_mp().power(x, power))


def _orders(mu: float, delta: float) -> list[float]:
    """Return the two best orders that :func:`epsilon_rdp` adds to those of dp-accounting.

    The first is the closed form of eq (12) of Fay et al. 2021. The second is found numerically.
    """
    mp, log = _mp(), _Rounded.log
    closed = 1 + sqrt(2 * log(1 / delta)) / mu
    low, high = log(1e-3 * (closed - 1)), log(1e3 * (closed - 1))

    def bound(log_order: float) -> Any:
        order = 1 + mp.exp(log_order)
        return order * mp.mpf(mu) ** 2 / 2 + mp.log1p(-1 / order) - mp.log(delta * order) / (order - 1)

    # Minimise α ↦ αμ²/2 + log(1 − 1/α) − log(δα)/(α − 1) on a log grid that is refined four times. The derivative
    # μ²/2 + log(δα)/(α − 1)² changes sign once, so there is one minimum.
    for _ in range(4):
        step = (high - low) / 64
        grid = [*(at * step + low for at in range(64)), high]
        best = _lowest(grid, bound)
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, 64)]
    return [closed, 1 + float(mp.exp(grid[best]))]


def _lowest(grid: list[float], value: Callable[[float], Any]) -> int:
    """Return the index of the grid point at which a function is smallest.

    The function must first fall and then rise. Bisection evaluates it at few points, because it is slow.
    """
    return bisect_left(range(len(grid) - 1), True, key=lambda at: bool(value(grid[at]) <= value(grid[at + 1])))


def _best_order(orders: tuple[float, ...], mu: float, delta: float, *, by: Any = _Rounded) -> float:
    """Return the smallest ε over these orders, with the float operations of dp-accounting's ``RdpAccountant``.

    With :mod:`math` as ``by``, ε equals the library's to the last bit. With :class:`_Rounded`, ε is the same on every
    machine.
    """
    scale = 2 * by.pow(1 / mu, 2)
    costs = {order: order / scale for order in orders}
    if by.pow(delta, 2) + by.expm1(-min(costs.values())) > 0:  # δ ≤ √(1 − e^−KL)
        return 0.0
    values = (
        cost + by.log1p(-1 / order) - by.log(delta * order) / (order - 1)
        for order, cost in costs.items()
        if order > 1.01
    )
    return max(0.0, float(min(values)))


@lru_cache(maxsize=4096)
def _epsilon_rdp(mu_squared: Fraction, delta: float) -> float:
    mu = sqrt(mu_squared)
    value = _best_order((*_LIBRARY_ORDERS, *_orders(mu, delta)), mu, delta)
    if not value >= 0:  # also catches NaN
        raise InvalidInput("epsilon by rdp", value=value, limit="a number, 0 or above")
    # Proposition 5 at the closed-form order is an RDP bound too, also where dp-accounting ignores orders up to 1.01.
    return min(value * _LIBRARY_ROUNDING, _epsilon_paper(mu_squared, delta))


@lru_cache(maxsize=256)
def _epsilon_pld(mu_squared: Fraction, delta: float) -> float:
    import dp_accounting
    from dp_accounting.pld import PLDAccountant

    mu = sqrt(mu_squared)
    accountant = PLDAccountant(value_discretization_interval=2e-4 * mu)
    accountant.compose(dp_accounting.GaussianDpEvent(1 / mu))
    value = float(accountant.get_epsilon(delta))
    if not value >= 0:
        raise InvalidInput("epsilon by pld", value=value, limit="a number, 0 or above")
    return value


@lru_cache(maxsize=256)
def _max_mu_squared(name: AccountantName, epsilon: float, delta: float) -> Fraction:
    if name is AccountantName.EXACT:
        target, eps = _mp().mpf(delta), _mp().mpf(epsilon)

        def fits(mu_squared: Fraction) -> bool:
            return bool(_delta(_mp().sqrt(_mpf(mu_squared)), eps) <= target)
    else:

        def fits(mu_squared: Fraction) -> bool:
            return epsilon_by(name, mu_squared, delta) <= epsilon

    low = Fraction(1, 2**78)  # below MIN_MU²: replaced by the first power of two that fits
    if not fits(low):
        raise InvalidInput(
            "budget", value=(epsilon, delta), limit="a larger epsilon or delta, because this budget allows no release"
        )
    high = low
    while fits(high):
        low, high = high, high * 4
        if high > Fraction(MAX_MU) ** 2:
            raise InvalidInput(
                "budget",
                value=(epsilon, delta),
                limit="a smaller epsilon or delta, because this budget would allow any release",
            )
    # Largest fitting multiple of 2^-56 of the bracket; fits() is monotone in μ².
    step = low / 2**_LIMIT_BITS
    first, last = 2**_LIMIT_BITS, 4 * 2**_LIMIT_BITS
    while last - first > 1:
        middle = (first + last) // 2
        if fits(step * middle):
            first = middle
        else:
            last = middle
    limit: Fraction = step * first
    return limit


def _check_mu_squared(value: Fraction) -> Fraction:
    if not Fraction(MIN_MU) ** 2 <= value <= Fraction(MAX_MU) ** 2:
        shown = float(value) if value < 2**1000 else "a number above 2^1000"
        raise InvalidInput("mu^2", value=shown, limit="2^-80 to 2^40")
    return value


def _checked_mu_squared(value: Fraction | float) -> Fraction:
    if not isinstance(value, Fraction):
        value = Fraction(check_number("mu^2", value))
    return _check_mu_squared(value)
