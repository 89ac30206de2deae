"""Tests how much noise a plan needs; the oracle asks the privacy filter, release by release, in exact rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.privacy.accounting import admits, max_mu_squared
from common.privacy.calibration import calibrate, epsilon_of_plan, noise_multiplier, queries_left
from common.privacy.mechanism import GRID_BITS, AccountantName, Budget, Mechanism, Protection, Relation, Unit

REPLACE = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
ZERO_OUT = Protection(Unit.HOSPITAL, Relation.ZERO_OUT)
PATIENT = Protection(Unit.PATIENT, Relation.REPLACE_ONE)
R = 1 << GRID_BITS


def plan(queries: int, accountant: AccountantName = AccountantName.EXACT, **changes: object) -> Mechanism:
    fields: dict[str, object] = {
        "budget": Budget(8.0, 1e-3),
        "radius_int": R,
        "voters_per_site": 1,
        "protection": REPLACE,
        **changes,
    }
    std = calibrate(accountant=accountant, queries=queries, **fields)  # type: ignore[arg-type]
    return Mechanism(8, int(fields["radius_int"]), int(fields["voters_per_site"]), std)  # type: ignore[call-overload]


def test_the_papers_headline_needs_the_published_noise() -> None:
    """For K = 8, N = 80, (8, 1e-3) and codes in the unit ball, noise on the mean is 1.073343 exact, 1.162872 by RDP."""
    per_mean = {name: float(plan(80, name).noise_std) / R / 8 for name in AccountantName}
    assert per_mean[AccountantName.EXACT] == pytest.approx(1.073343, abs=1e-6)
    assert per_mean[AccountantName.RDP] == pytest.approx(1.162872, abs=1e-6)
    log_term = math.log(1e3)
    eq15 = (2 / 8) * math.sqrt(80) * (math.sqrt(log_term + 8) + math.sqrt(log_term)) / (math.sqrt(2) * 8)
    assert eq15 == pytest.approx(1.282564, abs=1e-6)


@pytest.mark.parametrize("accountant", list(AccountantName))
@pytest.mark.parametrize("queries", [1, 2, 3, 7, 80, 999, 10_000])
def test_exactly_the_planned_queries_are_admitted_one_by_one(accountant: AccountantName, queries: int) -> None:
    mechanism = plan(queries, accountant)
    limit, cost, spent = max_mu_squared(accountant, Budget(8.0, 1e-3)), mechanism.mu_squared(REPLACE), Fraction(0)
    admitted = 0
    while admits(spent, cost, limit):
        spent += cost
        admitted += 1
        assert admitted <= queries
    assert admitted == queries


@pytest.mark.slow
def test_every_plan_from_one_to_ten_thousand_queries_admits_exactly_that_many() -> None:
    limit = max_mu_squared(AccountantName.EXACT, Budget(8.0, 1e-3))
    for queries in range(1, 10_001):
        cost = plan(queries).mu_squared(REPLACE)
        assert admits((queries - 1) * cost, cost, limit)
        assert not admits(queries * cost, cost, limit)


@settings(max_examples=60)
@given(
    queries=st.integers(1, 1_000_000),
    radius=st.integers(256, 1 << 24),
    voters=st.integers(1, 16),
    protection=st.sampled_from([REPLACE, ZERO_OUT, PATIENT]),
    epsilon=st.sampled_from([0.5, 1.0, 8.0]),
    accountant=st.sampled_from(list(AccountantName)),
)
def test_any_plan_is_admitted_exactly_under_its_own_protection(
    queries: int, radius: int, voters: int, protection: Protection, epsilon: float, accountant: AccountantName
) -> None:
    budget = Budget(epsilon, 1e-5)
    mechanism = plan(
        queries, accountant, budget=budget, radius_int=radius, voters_per_site=voters, protection=protection
    )
    limit = max_mu_squared(accountant, budget)
    assert queries_left(mechanism, protection=protection, spent=Fraction(0), limit=limit) == queries
    half = (queries // 2) * mechanism.mu_squared(protection)
    assert queries_left(mechanism, protection=protection, spent=half, limit=limit) == queries - queries // 2
    assert queries_left(mechanism, protection=protection, spent=2 * limit, limit=limit) == 0
    assert float(mechanism.noise_std) == mechanism.noise_std  # exact in float64
    assert epsilon_of_plan(
        mechanism, queries=queries, budget=budget, protection=protection, accountant=accountant
    ).epsilon == pytest.approx(epsilon, rel=1e-9)


def test_rounding_only_ever_adds_noise_and_hardly_any() -> None:
    budget = Budget(8.0, 1e-3)
    for queries in (1, 80, 10_000):
        variance = plan(queries).noise_std ** 2
        needed = Fraction(2 * R) ** 2 * queries / max_mu_squared(AccountantName.EXACT, budget)
        assert needed <= variance <= needed * (1 + Fraction(1, 2**45))


def test_sensitivity_enters_by_unit_and_relation() -> None:
    base = float(plan(80).noise_std)
    assert float(plan(80, protection=ZERO_OUT).noise_std) == pytest.approx(base / 2)
    assert float(plan(80, voters_per_site=4).noise_std) == pytest.approx(4 * base)
    assert float(plan(80, voters_per_site=4, protection=PATIENT).noise_std) == pytest.approx(base)
    assert noise_multiplier(plan(80), REPLACE) == pytest.approx(0.480014 * math.sqrt(80), rel=1e-6)
    assert noise_multiplier(plan(80), ZERO_OUT) == pytest.approx(2 * 0.480014 * math.sqrt(80), rel=1e-6)


def test_noise_the_sampler_cannot_draw_is_refused_at_planning() -> None:
    with pytest.raises(InvalidInput, match="clipping norm C"):
        plan(1, radius_int=1, budget=Budget(500.0, 0.5), protection=ZERO_OUT)
    with pytest.raises(InvalidInput, match="clipping norm C"):
        plan(1_000_000, radius_int=(1 << 40) - 1)
