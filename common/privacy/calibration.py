"""How much noise a plan needs, and the inverses: queries left, and the ε of a plan.

The one direction that matters is rounding: noise is rounded up and limits down, so the promise "exactly N releases"
holds in exact rational arithmetic, the same arithmetic the filter decides in. Refuses plans the filter could not tell
apart and noise outside what the sampler draws.
"""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

from common.canonical import check_integer
from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, guarantee, max_mu_squared
from common.privacy.gaussian import MAX_NOISE_STD, MIN_NOISE_STD
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, sensitivity

MAX_QUERIES = 1_000_000
_STD_BITS = 48  # significant bits of a noise standard deviation: rounding up costs at most 2^-47 of utility


def calibrate(
    *,
    budget: Budget,
    accountant: AccountantName,
    queries: int,
    radius_int: int,
    voters_per_site: int,
    protection: Protection,
) -> Fraction:
    """Noise standard deviation σ on the integer sum for ``queries`` equal releases: Δ·√(N/μ²max), rounded up.

    Guarantee: with M the limit :func:`~common.privacy.accounting.max_mu_squared`, N·(Δ/σ)² ≤ M < (N + 1)·(Δ/σ)², so the
    filter admits exactly ``queries`` releases and refuses the next. σ is dyadic with at most 49 significant bits, hence
    exact in float64. Edge cases: N from 1 to 1,000,000; a σ the sampler refuses (below 2⁻⁴ or above 2⁴⁵ grid steps)
    is refused here. Source: composition of Gaussian mechanisms (Dong, Roth & Su 2022, Corollary 3.3); eq (15) of Fay et
    al. 2021 is the same plan by a looser accountant.
    """
    count = _checked_queries(queries)
    delta = sensitivity(
        radius_int=radius_int, voters_per_site=voters_per_site, unit=protection.unit, relation=protection.relation
    )
    limit = max_mu_squared(accountant, budget)
    noise_std = sqrt_up(Fraction(delta) ** 2 * count / limit)
    if not MIN_NOISE_STD <= noise_std <= MAX_NOISE_STD:
        raise InvalidInput(
            "noise standard deviation of the plan, in grid steps",
            value=float(noise_std),
            limit=f"{float(MIN_NOISE_STD):g} to {float(MAX_NOISE_STD):g}",
            remedy="change the clipping norm C (codec.radius)",
        )
    cost = Fraction(delta) ** 2 / noise_std**2
    if not count * cost <= limit < (count + 1) * cost:  # cannot happen: 2^-47 is far below 1/(2N)
        raise InvalidInput("plan", value=queries, limit="a number of queries the filter can tell from the next")
    return noise_std


def noise_multiplier(mechanism: Mechanism, protection: Protection) -> float:
    """z = σ/Δ of one release under ``protection``; z = 1/μ. For display: decisions use the exact μ²."""
    delta = sensitivity(
        radius_int=mechanism.radius_int,
        voters_per_site=mechanism.voters_per_site,
        unit=protection.unit,
        relation=protection.relation,
    )
    return float(mechanism.noise_std / delta)


def queries_left(mechanism: Mechanism, *, protection: Protection, spent: Fraction, limit: Fraction) -> int:
    """How many more releases of ``mechanism`` the filter admits after ``spent``: ⌊(limit − spent)/μ²⌋, at least 0."""
    if not isinstance(spent, Fraction) or spent < 0:
        raise InvalidInput("spent mu^2", value=spent, limit="a rational, 0 or above")
    if not isinstance(limit, Fraction) or limit <= 0:
        raise InvalidInput("limit on mu^2", value=limit, limit="a positive rational")
    return max(0, (limit - spent) // mechanism.mu_squared(protection))


def epsilon_of_plan(
    mechanism: Mechanism, *, queries: int, budget: Budget, protection: Protection, accountant: AccountantName | str
) -> Guarantee:
    """What ``queries`` releases of ``mechanism`` cost, at the δ of ``budget``: the inverse of :func:`calibrate`."""
    return guarantee(_checked_queries(queries) * mechanism.mu_squared(protection), budget, protection, accountant)


def _checked_queries(queries: int) -> int:
    check_integer("planned queries", queries, least=1, most=MAX_QUERIES, limit=f"an integer from 1 to {MAX_QUERIES}")
    return queries


def sqrt_up(value: Fraction) -> Fraction:
    """The square root of a positive rational, rounded up to 48 or 49 significant bits."""
    if not isinstance(value, Fraction) or value <= 0:
        raise InvalidInput("square of a standard deviation", value=value, limit="a positive rational")
    magnitude = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    shift = _STD_BITS - magnitude  # result = root / 2^shift
    scaled = value * Fraction(4) ** shift
    ceiling = -(-scaled.numerator // scaled.denominator)
    root = isqrt(ceiling - 1) + 1
    return Fraction(root) / Fraction(2) ** shift
