"""Computes how much noise a plan needs, how many queries are left, and the ε of a plan.

Called by the planner, by the code that sets a study's noise, and by the public Python interface. Noise is rounded up
and limits are rounded down. The promise that a budget pays for exactly the planned number of releases therefore holds
in exact rational arithmetic, which the budget filter uses too. Refuses plans in which rounding would allow one release
more, and noise outside the sampler's range.
"""

from __future__ import annotations

from fractions import Fraction
from math import isqrt, nextafter

from common.canonical import check_integer
from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, guarantee, max_mu_squared
from common.privacy.checks import check_kind, check_rational
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
    """Return the noise standard deviation σ with which a budget pays for exactly ``queries`` equal releases.

    σ = Δ·√(N/M), rounded up, for N releases of sensitivity Δ, where M is the largest Σμ² that the budget allows
    (:func:`~common.privacy.accounting.max_mu_squared`). Guarantee: N·(Δ/σ)² ≤ M < (N + 1)·(Δ/σ)², so the filter admits
    ``queries`` releases and refuses the next.

    Args:
        budget: ε and δ for all releases.
        accountant: The accountant that decides.
        queries: Number N of releases, from 1 to 1,000,000.
        radius_int: Norm bound R of one voter's code, in grid steps of 2⁻¹⁶.
        voters_per_site: Number m of voters of a site.
        protection: Unit and relation.

    Returns:
        σ on the integer sum, in the same steps: a dyadic rational with at most 49 significant bits, exact in float64.

    Raises:
        InvalidInput: If an argument is outside its range, or σ is outside the sampler's range (2⁻⁴ to 2⁴⁵ grid steps).

    Source: composition of Gaussian mechanisms (Dong, Roth & Su 2022, Corollary 3.3); eq (15) of Fay et al. 2021 is the
    same plan by a looser accountant.

    >>> noise_std = c.calibrate(
    ...     budget=c.Budget(epsilon=8.0, delta=1e-5),
    ...     accountant=c.AccountantName.EXACT,
    ...     queries=4,
    ...     radius_int=c.radius_int(1.0),
    ...     voters_per_site=5,
    ...     protection=c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE),
    ... )
    >>> round(float(noise_std) / 2**16, 3)
    2.401
    """
    count = _checked_queries(queries)
    check_kind("protection", protection, Protection)
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
        raise InvalidInput(
            "planned queries",
            value=queries,
            limit="a smaller number, because rounding the noise would admit one query more than planned",
        )
    return noise_std


def noise_multiplier(mechanism: Mechanism, protection: Protection) -> float:
    """Return the noise multiplier z = σ/Δ of one release, rounded down, for display only.

    It is the noise's standard deviation σ divided by the sensitivity Δ. Decisions use the exact μ² = 1/z².

    Args:
        mechanism: The release.
        protection: Unit and relation, which determine the sensitivity.

    Returns:
        z as a float.

    >>> release = c.Mechanism(dimension=64, radius_int=65536, voters_per_site=1, noise_std=Fraction(196608))
    >>> c.noise_multiplier(release, c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE))
    1.5
    """
    check_kind("mechanism", mechanism, Mechanism), check_kind("protection", protection, Protection)
    exact = mechanism.noise_std / mechanism.sensitivity(protection)
    nearest = float(exact)
    return nearest if Fraction(nearest) <= exact else nextafter(nearest, 0.0)


def queries_left(mechanism: Mechanism, *, protection: Protection, spent: Fraction, limit: Fraction) -> int:
    """Return how many more releases the budget filter admits: ⌊(limit − spent)/μ²⌋, at least 0.

    Args:
        mechanism: The release.
        protection: Unit and relation.
        spent: Σμ² so far.
        limit: The budget's Σμ².

    Returns:
        Number of releases.

    Raises:
        InvalidInput: If ``spent`` or ``limit`` is not a rational in its range.

    >>> release = c.Mechanism(dimension=64, radius_int=65536, voters_per_site=1, noise_std=Fraction(131072))
    >>> patient = c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE)
    >>> c.queries_left(release, protection=patient, spent=Fraction(1), limit=Fraction(7, 2))
    2
    """
    check_rational("spent mu^2", spent, zero=True)
    check_rational("limit on mu^2", limit)
    return max(0, (limit - spent) // check_kind("mechanism", mechanism, Mechanism).mu_squared(protection))


def epsilon_of_plan(
    mechanism: Mechanism, *, queries: int, budget: Budget, protection: Protection, accountant: AccountantName | str
) -> Guarantee:
    """Return the guarantee of ``queries`` equal releases, the inverse of :func:`calibrate`.

    Args:
        mechanism: One release.
        queries: Number of releases, from 1 to 1,000,000.
        budget: Its δ is used.
        protection: Unit and relation.
        accountant: Name of the accountant.

    Returns:
        The guarantee at the δ of ``budget``.

    Raises:
        InvalidInput: If an argument is outside its range.

    >>> release = c.Mechanism(dimension=64, radius_int=65536, voters_per_site=1, noise_std=Fraction(262144))
    >>> patient, budget = c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE), c.Budget(epsilon=8.0, delta=1e-5)
    >>> print(c.epsilon_of_plan(release, queries=4, budget=budget, protection=patient, accountant="exact"))
    ε = 4.378 (exact) at δ = 1e-05, unit patient, relation replace-one
    """
    cost = check_kind("mechanism", mechanism, Mechanism).mu_squared(protection)
    return guarantee(_checked_queries(queries) * cost, budget, protection, accountant)


def _checked_queries(queries: int) -> int:
    check_integer("planned queries", queries, least=1, most=MAX_QUERIES, limit=f"an integer from 1 to {MAX_QUERIES}")
    return queries


def sqrt_up(value: Fraction) -> Fraction:
    """Return the square root of a positive rational, rounded up to 48 or 49 significant bits.

    Args:
        value: A positive rational, such as a variance.

    Returns:
        A dyadic rational r with r² ≥ ``value``.

    Raises:
        InvalidInput: If ``value`` is not a positive rational.
    """
    check_rational("square of a standard deviation", value)
    magnitude = (value.numerator.bit_length() - value.denominator.bit_length()) // 2
    shift = _STD_BITS - magnitude  # result = root / 2^shift
    scaled = value * Fraction(4) ** shift
    ceiling = -(-scaled.numerator // scaled.denominator)
    root = isqrt(ceiling - 1) + 1
    return Fraction(root) / Fraction(2) ** shift
