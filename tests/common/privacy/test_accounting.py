"""Tests what releases cost. Oracles: a 200-bit integral of the privacy loss, published figures, a second algorithm
(PLD).
"""

from __future__ import annotations

import math
from fractions import Fraction

import dp_accounting
import dp_accounting.pld
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import RdpAccountant
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.privacy import accounting
from common.privacy.accounting import (
    MAX_EPSILON,
    MAX_GUARANTEE_EPSILON,
    MAX_POOL_COORDINATES,
    Guarantee,
    admits,
    compose,
    delta_exact,
    epsilon_by,
    epsilon_exact,
    epsilon_paper,
    epsilon_pld,
    epsilon_rdp,
    group_mu_squared,
    guarantee,
    max_mu_squared,
)
from common.privacy.gaussian import SAMPLER_TV
from common.privacy.mechanism import (
    SAMPLER_DELTA,
    AccountantName,
    Budget,
    Mechanism,
    Protection,
    Relation,
    Unit,
)

HOSPITAL = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)

# c(ε, δ) = σ/(S·√N): computed apart from this code with dp-accounting 0.6 and scipy, and published in docs/privacy.md
TABLE = [
    (1, 1e-3, 3.846897, 2.901534, 2.574657),
    (2, 1e-3, 1.984441, 1.608261, 1.445239),
    (4, 1e-3, 1.048454, 0.904025, 0.823078),
    (8, 1e-3, 0.573580, 0.520052, 0.480014),
    (1, 1e-5, 4.900555, 4.045130, 3.730632),
    (2, 1e-5, 2.499291, 2.149108, 1.993812),
    (4, 1e-5, 1.296076, 1.157569, 1.081162),
    (8, 1e-5, 0.690350, 0.637651, 0.600229),
]


def hockey_stick(mu: float, epsilon: float) -> mpmath.mpf:
    """Return δ by its definition: ∫ (p(x) − e^ε·q(x))₊ dx for p = N(μ, 1), q = N(0, 1), integrated numerically."""
    with mpmath.workprec(200):
        m, e = mpmath.mpf(mu), mpmath.mpf(epsilon)
        weight = mpmath.exp(e)
        start = e / m + m / 2  # where the integrand turns positive
        peak = max(start, m)

        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(x, m, 1) - weight * mpmath.npdf(x, 0, 1)

        points = [start, *(start + (peak - start) * k / 4 for k in range(1, 5) if peak > start)]
        points += [points[-1] + k for k in (1, 2, 4, 8, 16, 32)]
        return mpmath.quad(integrand, points)


def invert(function: object, target: float, low: float, high: float) -> float:
    """Return the x in [low, high] where a decreasing function meets ``target``, by plain bisection."""
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) > target else (low, middle)  # type: ignore[operator]
    return high


@pytest.mark.parametrize(("epsilon", "delta", "paper", "rdp", "exact"), TABLE)
def test_the_published_calibration_factors_are_reproduced_to_six_digits(
    epsilon: float, delta: float, paper: float, rdp: float, exact: float
) -> None:
    factor = {
        name: invert(lambda c, name=name: epsilon_by(name, 1 / c**2, delta), epsilon, 0.01, 50)
        for name in ("exact", "rdp", "paper")
    }
    assert factor["exact"] == pytest.approx(exact, abs=6e-7)
    assert factor["paper"] == pytest.approx(paper, abs=6e-7)
    assert factor["rdp"] == pytest.approx(rdp, abs=6e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("epsilon", "delta", "_p", "_r", "exact"), TABLE)
def test_a_second_algorithm_agrees_with_the_exact_curve_to_a_millionth(
    epsilon: float, delta: float, _p: float, _r: float, exact: float
) -> None:
    mu_squared = 1 / exact**2
    assert epsilon_pld(mu_squared, delta) == pytest.approx(epsilon_exact(mu_squared, delta), abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mu", "epsilon"),
    [(1e-3, 0.0), (1e-3, 1e-3), (0.02, 0.05), (0.5, 1.0), (1.0, 0.0), (2.083, 8.0), (6.0, 30.0), (20.0, 260.0)],
)
def test_delta_equals_the_integral_that_defines_it(mu: float, epsilon: float) -> None:
    assert delta_exact(mu, epsilon) == pytest.approx(float(hockey_stick(mu, epsilon)), rel=1e-12, abs=0)


CHARGES = given(log_mu=st.floats(math.log(1e-3), math.log(20)), delta=st.sampled_from([1e-2, 1e-3, 1e-5, 1e-9]))


def inverts_the_defining_integral(log_mu: float, delta: float) -> None:
    mu = math.exp(log_mu)
    epsilon = epsilon_exact(mu * mu, delta)
    if epsilon == 0:
        assert hockey_stick(mu, 0.0) <= delta * (1 + 1e-12)
        return
    assert hockey_stick(mu, epsilon * (1 + 1e-9)) < delta < hockey_stick(mu, epsilon * (1 - 1e-9))


@pytest.mark.slow
@settings(max_examples=8)
@CHARGES
def test_epsilon_exact_inverts_the_defining_integral_to_a_billionth(log_mu: float, delta: float) -> None:
    inverts_the_defining_integral(log_mu, delta)


@pytest.mark.slow
@settings(max_examples=25)
@CHARGES
def test_epsilon_exact_inverts_the_defining_integral_at_more_charges(log_mu: float, delta: float) -> None:
    inverts_the_defining_integral(log_mu, delta)


@pytest.mark.slow
@settings(max_examples=60)
@given(
    logs=st.lists(st.floats(math.log(1e-3), math.log(20)), min_size=1, max_size=9),
    delta=st.sampled_from([1e-2, 1e-3, 1e-5, 1e-9]),
)
def test_exact_is_below_rdp_is_below_the_paper_on_random_heterogeneous_charges(logs: list[float], delta: float) -> None:
    mechanisms = [Mechanism(1, 65536, 1, Fraction(2 * 65536 / math.exp(x))) for x in logs]
    total = compose(mechanisms, HOSPITAL)
    assert float(total) == pytest.approx(math.fsum(math.exp(2 * x) for x in logs), rel=1e-12)
    assert epsilon_exact(total, delta) <= epsilon_rdp(total, delta) <= epsilon_paper(total, delta)


@pytest.mark.parametrize("mu", [1e-6, 1e-4, 1e-3, 0.1, 1.0, 20.0, 50.0, 300.0, 1000.0, 1e5])
def test_the_order_of_the_accountants_holds_at_the_ends_where_fixed_orders_break_it(mu: float) -> None:
    for delta in (1e-2, 1e-5, 1e-10):
        assert epsilon_exact(mu * mu, delta) <= epsilon_rdp(mu * mu, delta) <= epsilon_paper(mu * mu, delta)


def test_rdp_is_the_minimum_over_orders_of_the_improved_conversion() -> None:
    """The oracle minimises αμ²/2 + log(1 − 1/α) − log(δα)/(α − 1) with 40 digits."""
    for mu, delta in [(0.05, 1e-5), (1.0, 1e-3), (2.0833, 1e-3), (12.0, 1e-6)]:
        with mpmath.workdps(40):

            def curve(log_a: mpmath.mpf, mu: float = mu, delta: float = delta) -> mpmath.mpf:
                a = 1 + mpmath.exp(log_a)
                return a * mpmath.mpf(mu) ** 2 / 2 + mpmath.log(1 - 1 / a) - mpmath.log(delta * a) / (a - 1)

            best = mpmath.findroot(lambda x: mpmath.diff(curve, x), mpmath.log(math.sqrt(-2 * math.log(delta)) / mu))
            oracle = float(curve(best))
        assert oracle <= epsilon_rdp(mu * mu, delta) <= oracle * (1 + 1e-9)


@settings(max_examples=100)
@given(log_mu=st.floats(math.log(1e-6), math.log(1e4)), delta=st.sampled_from([0.5, 1e-2, 1e-5, 1e-9, 1e-15]))
def test_rdp_at_the_librarys_orders_is_dp_accountings_to_the_last_bit(log_mu: float, delta: float) -> None:
    mu = math.sqrt(math.exp(2 * log_mu))
    accountant = RdpAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(1 / mu))
    assert accounting.epsilon_rdp_library(mu * mu, delta) == accountant.get_epsilon(delta)
    orders = accounting._orders(mu, delta)
    ours = RdpAccountant(orders=[*DEFAULT_RDP_ORDERS, *orders])
    ours.compose(dp_accounting.GaussianDpEvent(1 / mu))
    both = (*accounting._LIBRARY_ORDERS, *orders)
    assert accounting._best_order(both, mu, delta, by=math) == ours.get_epsilon(delta)


RDP_LIMITS = {  # computed by release 0.2.0 on an x86-64 machine with AVX-512; existing studies depend on them
    (8.0, 1e-5): Fraction(177220540159313135, 2**56),
    (3.0, 1e-6): Fraction(13335687446391493, 2**55),
    (0.5, 1e-3): Fraction(10408002300794277, 2**58),
}


def test_a_budgets_limit_does_not_depend_on_the_machines_math_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last bit of log and exp differs between processors and C libraries, so here each is off by one bit."""
    for module, names in ((math, ("log", "log1p", "expm1")), (np, ("log", "exp"))):
        for name in names:
            exact = getattr(module, name)
            changed = accounting if module is math else np
            monkeypatch.setattr(changed, name, lambda x, exact=exact: np.nextafter(exact(x), 0), raising=False)
    accounting._epsilon_rdp.cache_clear()
    for (epsilon, delta), limit in RDP_LIMITS.items():
        assert accounting._max_mu_squared.__wrapped__(AccountantName.RDP, epsilon, delta) == limit
    accounting._epsilon_rdp.cache_clear()


def test_the_library_is_never_told_a_neighbouring_relation(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[tuple[object, ...], dict[str, object]]] = []
    real = dp_accounting.pld.PLDAccountant

    def spy(*args: object, **kwargs: object) -> object:
        seen.append((args, kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(dp_accounting.pld, "PLDAccountant", spy)
    epsilon_pld(1.2345, 1e-4)
    assert len(seen) == 1
    assert all("neighboring_relation" not in kwargs and not args for args, kwargs in seen)


@pytest.mark.parametrize("relation", list(Relation))
def test_the_relation_doubles_mu_and_nothing_else(relation: Relation) -> None:
    mechanism = Mechanism(4, 1000, 3, Fraction(7000))
    delta = {Relation.REPLACE_ONE: 6000, Relation.ZERO_OUT: 3000}[relation]
    assert compose([mechanism] * 5, Protection(Unit.HOSPITAL, relation)) == 5 * Fraction(delta, 7000) ** 2


def test_zero_out_epsilons_are_far_larger_under_replace_one() -> None:
    """At δ = 1e-3, published pairs are 1, 2, 4, 8 under zero-out and 2.30, 4.71, 9.82, 20.8 under replace-one."""
    for zero_out, replace_one in [(1, 2.30), (2, 4.71), (4, 9.82), (8, 20.8)]:
        mu = invert(lambda c, e=zero_out: epsilon_exact(1 / c**2, 1e-3), zero_out, 0.01, 50) ** -1
        assert epsilon_exact(4 * mu * mu, 1e-3) == pytest.approx(replace_one, rel=5e-3)


@pytest.mark.parametrize("accountant", list(AccountantName))
@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-5), (1.0, 1e-3), (8.0, 1e-3), (8.0, 1e-9), (50.0, 1e-6)])
def test_the_limit_is_the_largest_mu_that_fits_the_budget(
    accountant: AccountantName, epsilon: float, delta: float
) -> None:
    budget = Budget(epsilon, delta)
    limit = max_mu_squared(accountant, budget)
    by = {
        AccountantName.EXACT: epsilon_exact,
        AccountantName.RDP: epsilon_rdp,
        AccountantName.PAPER: epsilon_paper,
    }[accountant]
    assert by(limit, budget.analytic_delta) <= epsilon
    assert by(limit * (1 + Fraction(1, 10**9)), budget.analytic_delta) > epsilon


def test_the_limit_is_kept_within_the_budget_by_an_independent_integral() -> None:
    budget = Budget(8.0, 1e-3)
    mu = math.sqrt(max_mu_squared(AccountantName.EXACT, budget))
    assert hockey_stick(mu * (1 - 1e-15), 8.0) + float(SAMPLER_DELTA) < 1e-3
    assert hockey_stick(mu * (1 + 1e-9), 8.0) + float(SAMPLER_DELTA) > 1e-3


def test_the_samplers_share_of_delta_covers_every_allowed_release_at_every_allowed_epsilon() -> None:
    """A total variation of τ adds (1 + e^ε)·τ to δ; e < 2.7182818285."""
    factor = 1 + Fraction(27182818285, 10**10) ** int(MAX_GUARANTEE_EPSILON)
    assert factor * MAX_POOL_COORDINATES * SAMPLER_TV <= SAMPLER_DELTA
    with pytest.raises(InvalidInput, match=r"^epsilon .*got"):
        max_mu_squared(AccountantName.EXACT, Budget(MAX_EPSILON + 1, 1e-3))


def test_the_filter_admits_up_to_the_limit_and_not_a_hair_beyond() -> None:
    limit, hair = Fraction(1), Fraction(1, 10**30)
    assert admits(Fraction(0), limit, limit)
    assert admits(Fraction(1, 3), Fraction(2, 3), limit)
    assert not admits(Fraction(1, 3), Fraction(2, 3) + hair, limit)
    assert not admits(limit, hair, limit)


@pytest.mark.parametrize("bad", [Fraction(-1), Fraction(0), 0.5, 1, float("nan"), None])
def test_the_filter_refuses_requests_and_limits_that_are_not_positive_rationals(bad: object) -> None:
    with pytest.raises(InvalidInput):
        admits(Fraction(0), bad, Fraction(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        admits(Fraction(0), Fraction(1), bad)  # type: ignore[arg-type]
    if bad != 0:
        with pytest.raises(InvalidInput):
            admits(bad, Fraction(1), Fraction(1))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("mu", [1.0, 16.0, 32.0])
def test_the_second_algorithm_is_as_near_as_its_document_says(mu: float) -> None:
    assert epsilon_pld(mu**2, 1e-5) == pytest.approx(epsilon_exact(mu**2, 1e-5), abs=5e-7 * max(mu, 1))


@pytest.mark.parametrize("mu", [36.0, 64.0])
@pytest.mark.slow
def test_the_second_algorithm_answers_nothing_where_the_library_is_off_by_nearly_one(mu: float) -> None:
    with pytest.raises(InvalidInput, match=r"at most 700.*accountant exact"):
        epsilon_pld(mu**2, 1e-5)


def test_the_second_algorithm_is_near_the_curve_down_to_the_smallest_delta_of_a_budget() -> None:
    smallest = Budget(8.0, 2.0**-39 * (1 + 2.0**-20)).analytic_delta
    assert epsilon_pld(0.25, smallest) == pytest.approx(epsilon_exact(0.25, smallest), abs=1e-4)
    with pytest.raises(InvalidInput, match="delta for the pld"):
        epsilon_pld(0.25, 1e-13)


def test_no_guarantee_is_stated_beyond_the_epsilon_up_to_which_the_sampler_is_covered() -> None:
    budget = Budget(MAX_EPSILON, 1e-5)
    largest = max_mu_squared(AccountantName.EXACT, budget)
    assert all(guarantee(largest, budget, HOSPITAL, name).epsilon > 1999 for name in ("exact", "rdp", "paper"))
    with pytest.raises(InvalidInput, match=r"epsilon of a guarantee.*at most 2400"):
        guarantee(2 * largest, budget, HOSPITAL, "exact")


@pytest.mark.parametrize("huge", [10**400, Fraction(10**500, 3), Fraction(1, 10**500)])
@pytest.mark.parametrize("function", [epsilon_exact, epsilon_rdp, epsilon_pld, epsilon_paper])
def test_numbers_beyond_every_float_are_refused_and_raise_no_overflow(function: object, huge: object) -> None:
    with pytest.raises(InvalidInput):
        function(huge, 1e-5)  # type: ignore[operator]


def test_a_delta_far_below_every_float_is_zero() -> None:
    assert delta_exact(1.0, 1e308) == 0.0


def test_a_guarantee_always_says_accountant_delta_unit_and_relation() -> None:
    budget = Budget(8.0, 1e-3)
    text = str(guarantee(max_mu_squared(AccountantName.EXACT, budget), budget, HOSPITAL, AccountantName.EXACT))
    assert text == "ε = 8 (exact) at δ = 0.001, unit hospital, relation replace-one"
    patient = guarantee(Fraction(1), budget, Protection(Unit.PATIENT, Relation.REPLACE_ONE), "rdp")
    assert all(word in str(patient) for word in ("rdp", "0.001", "patient", "replace-one"))
    assert patient.to_json().keys() == {"epsilon", "delta", "accountant", "unit", "relation"}


def test_a_patient_known_at_g_sites_moves_the_sum_g_times_as_far() -> None:
    """Brute force on whole-number codes: the largest distance between two worlds is exactly g·Δ."""
    radius, sites = 2, 3
    ball = [np.array(p) for p in np.ndindex(5, 5) if (p[0] - 2) ** 2 + (p[1] - 2) ** 2 <= radius**2]
    ball = [p - 2 for p in ball]
    one = Mechanism(2, radius, 1, Fraction(7)).mu_squared(Protection(Unit.PATIENT, Relation.REPLACE_ONE)) * 49  # Δ²
    steps = {tuple(a - b) for a in ball for b in ball}
    reach = {(0, 0)}
    for group in range(1, sites + 1):
        reach = {(x + u, y + v) for x, y in reach for u, v in steps}
        farthest = max(x * x + y * y for x, y in reach)
        assert farthest == group_mu_squared(one, size=group) == (group * 2 * radius) ** 2


@pytest.mark.parametrize(("group", "epsilon"), [(1, 8.0), (2, 20.8), (8, 189.0)])
def test_group_privacy_costs_the_published_epsilons(group: int, epsilon: float) -> None:
    """At (8, 1e-3), two units together have 20.8, and eight (a site's eight voters that share anything) have 189."""
    budget = Budget(8.0, 1e-3)
    spent = max_mu_squared(AccountantName.EXACT, budget)
    promise = guarantee(spent, budget, Protection(Unit.PATIENT, Relation.REPLACE_ONE), "exact", group=group)
    assert promise.epsilon == pytest.approx(epsilon, rel=3e-3)
    assert promise.group == group
    mu = group * math.sqrt(spent)
    assert hockey_stick(mu, promise.epsilon) == pytest.approx(budget.analytic_delta, rel=1e-6)


def test_every_printed_guarantee_of_a_group_states_the_number_of_its_units() -> None:
    one, two = (guarantee(Fraction(1), Budget(8.0, 1e-3), HOSPITAL, "exact", group=g) for g in (1, 2))
    assert "together" not in str(one)
    assert "2 units together" in str(two)
    assert ("group" in one.to_json(), two.to_json()["group"]) == (False, 2)
    assert two.epsilon > 2 * one.epsilon  # worse than proportional
    assert guarantee(Fraction(0), Budget(8.0, 1e-3), HOSPITAL, "exact", group=9).epsilon == 0
    with pytest.raises(InvalidInput, match=r"epsilon .*group"):
        guarantee(Fraction(50), Budget(80.0, 1e-3), HOSPITAL, "exact", group=20)


def test_nothing_released_costs_nothing() -> None:
    assert compose([], HOSPITAL) == 0
    for name in accounting.ACCOUNTANTS:
        assert guarantee(Fraction(0), Budget(1.0, 1e-5), HOSPITAL, name).epsilon == 0


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf"), None])
def test_a_guarantee_without_a_finite_epsilon_cannot_be_built(bad: float) -> None:
    with pytest.raises(InvalidInput):
        Guarantee(epsilon=bad, delta=1e-3, accountant="exact", protection=HOSPITAL)


def test_an_unknown_accountant_is_refused() -> None:
    with pytest.raises(InvalidInput):
        epsilon_by("moments", 1.0, 1e-3)
    with pytest.raises(InvalidInput):
        Guarantee(epsilon=1.0, delta=1e-3, accountant="moments", protection=HOSPITAL)


def test_epsilon_is_monotone_in_what_was_released() -> None:
    mu_squared = np.geomspace(1e-6, 400, 60)
    for function in (epsilon_exact, epsilon_rdp, epsilon_paper):
        values = [function(float(m), 1e-4) for m in mu_squared]
        assert values == sorted(values)
