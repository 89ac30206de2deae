"""What a set of releases costs: from Σμ² to ε at a δ, by four accountants, and the filter that stops a pool in time.

Every release adds Gaussian noise, so a release is the number μ² = (Δ/σ)², and any adaptive sequence of them is exactly
as revealing as one Gaussian mechanism with μ² = Σ μᵢ² (Dong, Roth & Su 2022, Corollary 3.3). Sums are kept as
rationals; every ε is rounded up and every limit on μ² down. Refuses NaN, infinite, zero and negative parameters before
anything reaches a library: dp-accounting answers ε = 0 to a NaN multiplier.

``exact``  the analytic Gaussian curve (Balle & Wang 2018, Theorem 8): no other accountant can be tighter.
``rdp``    Rényi DP at dp-accounting's orders and the best one in closed form, float by float as dp-accounting has it.
``pld``    privacy loss distributions by dp-accounting, loaded when asked: a second opinion on ``exact``.
``paper``  eq (14) of Fay et al. 2021: the closed form the paper calibrates with.

The neighbouring relation is inside Δ, hence inside μ, and no library is told about it: dp-accounting's RDP does not
double a Gaussian's sensitivity for its own ``REPLACE_ONE``, its PLD does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import expm1, inf, isfinite, log, log1p, nextafter, sqrt
from typing import Any

import mpmath
import numpy as np

from common.canonical import check_integer
from common.errors import InvalidInput
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection

MAX_COORDINATES = 1 << 24
"""Noisy coordinates a pool may release in all, so that the sampler's part of δ stays within ``SAMPLER_DELTA``."""

MAX_EPSILON = 2000.0
"""Largest ε of a budget: up to here (1 + e^ε)·``MAX_COORDINATES``·``SAMPLER_TV`` stays inside ``SAMPLER_DELTA``."""

MIN_MU, MAX_MU = 2.0**-40, 2.0**20
"""The μ the accountants answer for; outside, either nothing or everything is revealed."""

ACCOUNTANTS = ("exact", "rdp", "pld", "paper")

_LIBRARY_ORDERS = (
    *(1 + tenth / 10 for tenth in range(1, 100)),
    *map(float, range(11, 64)),
    128.0,
    256.0,
    512.0,
    1024.0,
)
"""dp-accounting's own."""

_LIMIT_BITS = 56  # significant bits of a limit on μ²: loses at most 2^-55 of a budget, keeps stored rationals short
_LIBRARY_ROUNDING = 1 + 2.0**-44  # outward rounding of a float64 library's ε, checked against mpmath in the tests
_PRECISION_BITS = 320


def delta_exact(mu: float, epsilon: float) -> float:
    """δ(ε) = Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ) of a μ-GDP Gaussian mechanism, correctly to float64.

    Guarantee: the smallest δ for which the mechanism is (ε, δ)-DP, no bound. Edge cases: ε = 0 gives the total
    variation distance 2Φ(μ/2) − 1; a δ below float64's range returns 0.0.
    Source: Balle & Wang 2018, Theorem 8; Dong, Roth & Su 2022, Corollary 2.13.
    """
    mu_squared = Fraction(_positive("mu", mu)) ** 2
    _check_mu_squared(mu_squared)
    if not _is_number(epsilon) or not isfinite(epsilon) or epsilon < 0:
        raise InvalidInput("epsilon", value=epsilon, limit="a finite number, 0 or above")
    return float(_delta(_mp().mpf(mu), _mp().mpf(epsilon)))


def epsilon_exact(mu_squared: Fraction | float, delta: float) -> float:
    """The smallest ε ≥ 0 with δ(ε) ≤ ``delta`` for a μ-GDP release sequence, rounded up to the next float64.

    log δ(ε) is concave (a log-concave density smoothed by (1 − e^−x)₊; Prékopa), so Newton's method from the right,
    here from eq (14), comes down to the root without crossing it; the returned float is checked to satisfy δ(ε) ≤ δ.
    Edge case: ``delta`` at or above 2Φ(μ/2) − 1 gives 0. Source: Balle & Wang 2018, Theorem 8.
    """
    return _epsilon_exact(_checked_mu_squared(mu_squared), _checked_delta(delta))


def epsilon_rdp(mu_squared: Fraction | float, delta: float) -> float:
    """ε by Rényi DP: RDP(α) = α·μ²/2, converted to (ε, δ) at the best of some orders, rounded up.

    dp-accounting's orders gain 1 + √(2·log(1/δ))/μ (eq (12) of Fay et al. 2021), the best order of the plain
    conversion, and the minimiser of the improved one; so exact ≤ rdp ≤ paper for every μ. The gate ``rdp`` is sound
    whichever orders are used: each gives a valid bound. Source: Mironov 2017; Canonne, Kamath & Steinke 2020,
    Proposition 12.
    """
    return _epsilon_rdp(_checked_mu_squared(mu_squared), _checked_delta(delta))


def epsilon_rdp_library(mu_squared: Fraction | float, delta: float) -> float:
    """ε by Rényi DP on dp-accounting's default orders alone: what other tools print. Shown, never gated on."""
    return _best_order(_LIBRARY_ORDERS, sqrt(_checked_mu_squared(mu_squared)), _checked_delta(delta))


def epsilon_pld(mu_squared: Fraction | float, delta: float) -> float:
    """ε by dp-accounting's privacy loss distribution, on a grid fine enough to agree with ``exact`` to about 1e-7·μ.

    A second opinion by another algorithm, not a gate. Takes tenths of a second. Refuses μ above 64, where the grid
    would not fit in memory. Source: Koskela et al. 2020; Doroshenko et al. 2022.
    """
    checked = _checked_mu_squared(mu_squared)
    if checked > 64**2:
        raise InvalidInput("mu for the pld accountant", value=sqrt(checked), limit="at most 64")
    return _epsilon_pld(checked, _checked_delta(delta))


def epsilon_paper(mu_squared: Fraction | float, delta: float) -> float:
    """ε = μ²/2 + √(2·μ²·log(1/δ)): eq (14) of Fay et al. 2021, with μ² for N·S²/σ²; rounded up. Valid but loose.

    It is Proposition 5's conversion at the best order (12). No edge case: positive for every μ.
    """
    return _epsilon_paper(_checked_mu_squared(mu_squared), _checked_delta(delta))


def epsilon_by(accountant: str, mu_squared: Fraction | float, delta: float) -> float:
    """ε by the accountant of that name (one of :data:`ACCOUNTANTS`); an unknown name is refused."""
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
    """Σ μᵢ² of a sequence of releases, exactly; no release gives 0.

    Valid for releases chosen adaptively, each on the answers before it (Dong, Roth & Su 2022, Corollary 3.3).
    """
    return sum((mechanism.mu_squared(protection) for mechanism in mechanisms), start=Fraction(0))


def max_mu_squared(accountant: AccountantName, budget: Budget) -> Fraction:
    """The largest Σμ² whose ε at the budget's δ is at most the budget's ε, by that accountant; rounded down.

    The accountant works at ``budget.analytic_delta`` = δ − 2⁻⁴⁰. What is set aside pays for the noise sampler: a
    mechanism within total variation τ of an (ε, δ')-DP one is (ε, δ' + (1 + e^ε)·τ)-DP, and τ is at most
    :data:`MAX_COORDINATES` times the bound per coordinate stated in :mod:`common.privacy.gaussian`; this stays under
    2⁻⁴⁰ for ε ≤ :data:`MAX_EPSILON`, and a larger ε is refused. The result is dyadic with 56 significant bits, and has
    been checked to satisfy ε(Σμ²) ≤ ε as it stands.
    """
    name = AccountantName(accountant)
    if budget.epsilon > MAX_EPSILON:
        raise InvalidInput(
            "epsilon of a budget",
            value=budget.epsilon,
            limit=f"at most {epsilon_text(MAX_EPSILON)}",
            remedy="such a budget protects nobody; choose an epsilon below 10",
        )
    return _max_mu_squared(name, float(budget.epsilon), budget.analytic_delta)


def group_mu_squared(mu_squared: Fraction | float, *, size: int) -> Fraction:
    """μ² of the same releases for ``size`` units that change together: (g·μ)², exactly.

    For whoever the plain guarantee does not cover: a patient known at g hospitals moves g voters, g hospitals that
    share data move together. Each moves the sum by at most Δ, so together they move it by at most g·Δ, in every
    release; as good as can be said, for the g movements may all point the same way. Edge cases: size 1 changes
    nothing; μ² outside the accountants' range, or a size that is not an integer from 1 to 2²⁰ → InvalidInput.
    Source: triangle inequality on Δ; Dong, Roth & Su 2022, Theorem 2.14 (a μ-GDP mechanism is g·μ-GDP for groups of g).
    """
    check_integer("size of a group", size, least=1, most=1 << 20, limit="an integer from 1 to 2^20")
    return _check_mu_squared(_checked_mu_squared(mu_squared) * size**2)


def admits(spent: Fraction, request: Fraction, limit: Fraction) -> bool:
    """Whether a release of μ² = ``request`` may follow ``spent`` under ``limit``: spent + request ≤ limit, exactly.

    Asked before every release, this is a valid privacy filter: however the releases are chosen, stopping before Σμ²
    passes the limit keeps the whole run within it (Smith & Thakurta 2022 for GDP; Feldman & Zrnic 2021 for RDP, whose
    curve αμ²/2 has the same one parameter). Refuses anything but rationals, a request or limit that is not positive.
    """
    if not isinstance(spent, Fraction) or spent.numerator < 0:
        raise InvalidInput("spent mu^2", value=spent, limit="a rational, 0 or above")
    for what, value in (("requested mu^2", request), ("limit on mu^2", limit)):
        if not isinstance(value, Fraction) or value.numerator <= 0:
            raise InvalidInput(what, value=value, limit="a positive rational")
    return spent + request <= limit


@dataclass(frozen=True, slots=True)
class Guarantee:
    """An ε that cannot be printed without what it means: accountant, δ, unit of privacy and neighbouring relation.

    ``group`` is the number of units hidden together, 1 for the usual guarantee; any other is printed too.
    """

    epsilon: float
    delta: float
    accountant: str
    protection: Protection
    group: int = 1

    def __post_init__(self) -> None:
        if not _is_number(self.epsilon) or not isfinite(self.epsilon) or self.epsilon < 0:
            raise InvalidInput("epsilon of a guarantee", value=self.epsilon, limit="a finite number, 0 or above")
        _checked_delta(self.delta)
        if self.accountant not in ACCOUNTANTS:
            raise InvalidInput("accountant", value=self.accountant, limit=", ".join(ACCOUNTANTS))
        check_integer("group of a guarantee", self.group, least=1)

    def __str__(self) -> str:
        together = "" if self.group == 1 else f", {self.group} units together"
        stated = f"ε = {epsilon_text(self.epsilon)} ({self.accountant}) at δ = {delta_text(self.delta)}"
        return f"{stated}, {self.protection}{together}"

    def to_json(self) -> dict[str, object]:
        """Plain JSON for machines; ε and δ as floats, so not canonical bytes. ``group`` appears where it is not 1."""
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
    """What releases of Σμ² cost, stated at the whole δ of ``budget`` and computed at its analytic part.

    Nothing released (μ² = 0) costs ε = 0. The unit and relation must be those ``mu_squared`` was composed under.
    ``group`` asks for the ε of that many units together (:func:`group_mu_squared`): a patient known at g hospitals.
    An ε for a group beyond :data:`MAX_EPSILON` is refused: the sampler's part of δ would not cover it.
    """
    if not isinstance(mu_squared, Fraction) or mu_squared < 0:
        raise InvalidInput("spent mu^2", value=mu_squared, limit="a rational, 0 or above")
    name = str(accountant)
    together = group_mu_squared(mu_squared or Fraction(1), size=group)
    epsilon = 0.0 if mu_squared == 0 else epsilon_by(name, together, budget.analytic_delta)
    if group > 1 and epsilon > MAX_EPSILON:
        raise InvalidInput("epsilon of a group", value=epsilon, limit=f"at most {epsilon_text(MAX_EPSILON)}")
    return Guarantee(epsilon=epsilon, delta=budget.delta, accountant=name, protection=protection, group=group)


# ---- helpers ---------------------------------------------------------------------------------------------------------

_contexts = threading.local()


def _mp() -> Any:
    """This thread's own mpmath context: the global one's precision is shared mutable state."""
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
    """δ(ε) at 320 bits. Cancellation costs at most about 2·log2(ε/μ + μ) + log2(1/μ) < 200 of them."""
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


def _orders(mu: float, delta: float) -> list[float]:
    """The closed-form optimum (12) of the plain conversion, and the improved conversion's minimiser near it."""
    closed = 1 + sqrt(2 * log(1 / delta)) / mu
    low, high = log(1e-3 * (closed - 1)), log(1e3 * (closed - 1))
    # minimise α ↦ αμ²/2 + log(1 − 1/α) − log(δα)/(α − 1) on a log grid, refined four times
    for _ in range(4):
        grid = np.linspace(low, high, 65)
        alpha = 1 + np.exp(grid)
        value = alpha * mu * mu / 2 + np.log(np.exp(grid) / alpha) - np.log(delta * alpha) / (alpha - 1)
        best = int(np.argmin(value))
        low, high = float(grid[max(best - 1, 0)]), float(grid[min(best + 1, 64)])
    return [closed, float(alpha[best])]


def _best_order(orders: tuple[float, ...], mu: float, delta: float) -> float:
    """The least ε of these orders, by the operations of dp-accounting's ``RdpAccountant`` in their order."""
    values = []
    for order in orders:
        rdp = order / (2 * (1 / mu) ** 2)
        if delta**2 + expm1(-rdp) > 0:  # δ ≤ √(1 − e^−KL)
            values.append(0.0)
        elif order > 1.01:
            values.append(rdp + log1p(-1 / order) - log(delta * order) / (order - 1))
    return max(0.0, min(values))


@lru_cache(maxsize=4096)
def _epsilon_rdp(mu_squared: Fraction, delta: float) -> float:
    mu = sqrt(mu_squared)
    value = _best_order((*_LIBRARY_ORDERS, *_orders(mu, delta)), mu, delta)
    if not value >= 0:  # also catches NaN
        raise InvalidInput("epsilon by rdp", value=value, limit="a number, 0 or above")
    # Proposition 5 at the closed-form order is RDP too, and covers μ where the library drops orders up to 1.01.
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
        raise InvalidInput("budget", value=(epsilon, delta), limit="one that admits some release")
    high = low
    while fits(high):
        low, high = high, high * 4
        if high > Fraction(MAX_MU) ** 2:
            raise InvalidInput("budget", value=(epsilon, delta), limit="one that refuses some release")
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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _positive(what: str, value: float) -> float:
    if not _is_number(value) or not isfinite(value) or value <= 0:
        raise InvalidInput(what, value=value, limit="a finite number above 0")
    return value


def _check_mu_squared(value: Fraction) -> Fraction:
    if not Fraction(MIN_MU) ** 2 <= value <= Fraction(MAX_MU) ** 2:
        raise InvalidInput("mu^2", value=float(value), limit="2^-80 to 2^40")
    return value


def _checked_mu_squared(value: Fraction | float) -> Fraction:
    if not isinstance(value, Fraction):
        value = Fraction(_positive("mu^2", value))
    return _check_mu_squared(value)


def _checked_delta(delta: float) -> float:
    if not isinstance(delta, float) or not isfinite(delta) or not 0 < delta < 1:
        raise InvalidInput("delta", value=delta, limit="above 0 and below 1")
    return delta
