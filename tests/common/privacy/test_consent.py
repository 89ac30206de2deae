"""Tests what a hospital reads before consent: the plain sentence, groups, and δ against the number of units."""

from __future__ import annotations

import re
from fractions import Fraction
from math import exp, sqrt

import mpmath
import numpy as np
import pytest
from scipy import integrate, optimize, stats

from common.privacy.accounting import max_mu_squared
from common.privacy.consent import (
    delta_rule,
    group_guarantees,
    group_sentence,
    guess_right_at_most,
    guess_sentence,
    spent_sentence,
    warn_about,
)
from common.privacy.mechanism import SAMPLER_DELTA, AccountantName, Budget, Protection, Relation, Unit

HOSPITAL = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
ZERO_OUT = Protection(Unit.HOSPITAL, Relation.ZERO_OUT)
PATIENT = Protection(Unit.PATIENT, Relation.REPLACE_ONE)
BUDGETS = [(8.0, 1e-3), (8.0, 1e-5), (1.0, 1e-5), (0.25, 1e-6)]


def mu_of(epsilon: float, delta: float) -> float:
    """Return the μ with δ(ε) = δ, from the curve in scipy's normal distribution."""

    def left(mu: float) -> float:
        high, low = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.cdf(-mu / 2 - epsilon / mu)
        return float(high - exp(epsilon) * low - delta)

    return float(optimize.brentq(left, 1e-3, 50, xtol=1e-14))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the ε with δ(ε) = δ, from scipy's logarithms of the normal distribution."""

    def left(epsilon: float) -> float:
        high, low = stats.norm.cdf(mu / 2 - epsilon / mu), stats.norm.logcdf(-mu / 2 - epsilon / mu)
        return float(high - exp(epsilon + low) - delta)

    return float(optimize.brentq(left, 0, 300, xtol=1e-12))


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_the_best_guess_is_what_integrating_both_densities_gives(epsilon: float, delta: float) -> None:
    mu = mu_of(epsilon, delta)
    overlap, _ = integrate.quad(
        lambda x: min(stats.norm.pdf(x), stats.norm.pdf(x - mu)), -12, 12 + mu, points=[mu / 2], epsabs=1e-13
    )
    found = guess_right_at_most(max_mu_squared(AccountantName.EXACT, Budget(epsilon, delta)))
    assert found == pytest.approx(1 - overlap / 2, abs=1e-6)
    assert found >= 1 - overlap / 2 - 1e-6


@pytest.mark.parametrize("mu_squared", [Fraction(1, 10**9), Fraction(1, 7), Fraction(3), Fraction(41, 3), Fraction(60)])
def test_the_odds_are_never_below_those_of_the_exact_formula_with_the_samplers_share(mu_squared: Fraction) -> None:
    """The oracle has fifty digits: Φ(μ/2), plus half the distance between the sampler and a Gaussian."""
    with mpmath.workdps(50):
        mu = mpmath.sqrt(mpmath.mpf(mu_squared.numerator) / mu_squared.denominator)
        exact = mpmath.ncdf(mu / 2) + mpmath.mpf(SAMPLER_DELTA.numerator) / SAMPLER_DELTA.denominator / 2
        found = mpmath.mpf(guess_right_at_most(mu_squared))
        assert exact <= found <= exact + mpmath.mpf(10) ** -9


def test_the_best_attacker_on_a_simulated_gaussian_reaches_the_bound_and_does_not_pass_it() -> None:
    mu_squared = max_mu_squared(AccountantName.EXACT, Budget(8.0, 1e-3))
    mu, draws = sqrt(mu_squared), 400_000
    rng = np.random.default_rng(5)
    right = (rng.normal(0, 1, draws) < mu / 2).mean() / 2 + (rng.normal(mu, 1, draws) > mu / 2).mean() / 2
    assert right == pytest.approx(guess_right_at_most(mu_squared), abs=4 * sqrt(0.25 / (2 * draws)))


def test_nothing_released_is_a_coin_toss_and_everything_released_is_certain() -> None:
    assert guess_right_at_most(Fraction(0)) == 0.5
    assert guess_right_at_most(Fraction(10_000)) == 1.0


@pytest.mark.parametrize(
    ("protection", "said"),
    [
        (HOSPITAL, "any other hospital's"),
        (ZERO_OUT, "left out"),
        (PATIENT, "any other patient's"),
    ],
)
@pytest.mark.parametrize("yours", [True, False])
def test_the_plain_sentence_names_the_exchange_the_attacker_and_the_coin(
    protection: Protection, said: str, yours: bool
) -> None:
    limit = max_mu_squared(AccountantName.EXACT, Budget(8.0, 1e-3))
    sentence = guess_sentence(protection, limit, colluders=None, yours=yours)
    assert said in sentence
    assert "85.2 %" in sentence  # Φ(2.0832/2) = 0.85121
    assert "knows everything else" in sentence
    assert "50 %" in sentence
    assert ("your hospital" in sentence) is yours


@pytest.mark.parametrize(
    ("colluders", "unknown"),
    [
        (None, "except the noise."),
        (0, "except the hospitals' noise."),
        (1, "one hospital's share)."),
        (2, "2 hospitals' shares)."),
    ],
)
def test_of_a_sealed_sum_the_sentence_names_the_noise_that_must_not_be_known(
    colluders: int | None, unknown: str
) -> None:
    assert unknown in guess_sentence(HOSPITAL, Fraction(4), colluders=colluders)
    spent = spent_sentence(Fraction(4), sealed=colluders is not None)
    assert ("unlimited computing power" in spent) is (colluders is None)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
@pytest.mark.parametrize("protection", [HOSPITAL, ZERO_OUT, PATIENT])
def test_groups_of_one_to_five_cost_what_g_times_mu_costs(epsilon: float, delta: float, protection: Protection) -> None:
    budget = Budget(epsilon, delta)
    groups = group_guarantees(max_mu_squared(AccountantName.EXACT, budget), budget, protection, "exact")
    assert [one.group for one in groups] == [1, 2, 3, 4, 5]
    mu = mu_of(epsilon, delta)
    for one in groups:
        assert one.epsilon == pytest.approx(epsilon_of(one.group * mu, delta), rel=1e-5)
        assert (one.delta, one.protection) == (delta, protection)


def test_a_group_beyond_any_use_is_said_to_be_and_not_left_out_silently() -> None:
    budget = Budget(500.0, 1e-5)
    groups = group_guarantees(max_mu_squared(AccountantName.EXACT, budget), budget, HOSPITAL, "exact")
    assert 1 <= len(groups) < 5
    assert f"more than {len(groups)} nothing useful" in group_sentence(groups)
    whole = group_guarantees(
        max_mu_squared(AccountantName.EXACT, Budget(8.0, 1e-3)), Budget(8.0, 1e-3), HOSPITAL, "rdp"
    )
    assert "nothing useful" not in group_sentence(whole)
    assert re.search(
        r"ε = [\d.]+ for 1, [\d.]+ for 2, .* for 5 \(rdp accountant, δ = 0.001, unit", group_sentence(whole)
    )


@pytest.mark.parametrize(
    ("delta", "unit", "units", "warned"),
    [
        (1e-3, Unit.HOSPITAL, 8, False),  # 1e-3 < 1/80: no alarm for the usual hospital budget
        (1e-3, Unit.HOSPITAL, 100, False),
        (1e-3, Unit.HOSPITAL, 101, True),
        (0.05, Unit.HOSPITAL, 3, True),
        (1e-4, Unit.PATIENT, 160, False),
        (1e-3, Unit.PATIENT, 160, True),
        (1e-5, Unit.PATIENT, 10_001, True),
    ],
)
def test_a_delta_above_a_tenth_of_one_unit_is_warned_about_at_either_unit(
    delta: float, unit: Unit, units: int, warned: bool
) -> None:
    found = warn_about(delta, unit=unit, units=units)
    assert (found is not None) is warned
    assert found is None or f"{units} {unit}s" in found


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 3e-4, 0.05, 0.1])
@pytest.mark.parametrize("unit", Unit)
def test_the_rule_names_the_largest_number_that_is_not_warned_about(delta: float, unit: Unit) -> None:
    most = int(re.findall(r"up to ([\d,]+) ", delta_rule(delta, unit=unit))[0].replace(",", ""))
    assert warn_about(delta, unit=unit, units=most) is None
    assert warn_about(delta, unit=unit, units=most + 1) is not None


def test_a_delta_that_suits_no_number_of_units_is_said_to() -> None:
    assert "no number" in delta_rule(0.2, unit=Unit.PATIENT)
