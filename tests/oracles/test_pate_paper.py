"""Tests the statements of Fay, Sjölund & Oechtering 2021 ("Private Learning for High-Dimensional Targets with
PATE").

Each proposition, equation and misprint is checked by means other than the paper's proof. Our accountants must agree
with the correct statements. The misprints are tested so that nobody copies them.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import optimize, stats

from common.codecs.ball import ball_activation, ball_radius
from common.privacy.accounting import delta_exact, epsilon_exact, epsilon_paper, epsilon_rdp
from common.privacy.calibration import calibrate, epsilon_of_plan
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Relation, Unit, radius_int
from common.privacy.quantise import clip, quantise

BUDGETS = [(0.1, 1e-3), (1.0, 1e-3), (8.0, 1e-3), (8.0, 1e-5), (20.0, 1e-6)]


def sigma_15(*, sensitivity: float, queries: int, epsilon: float, delta: float) -> float:
    """Return σ by eq (15) for any sensitivity S: σ = S·√N·(√(L + ε) + √L)/(√2·ε), L = log 1/δ."""
    log_term = math.log(1 / delta)
    return (
        sensitivity
        * math.sqrt(queries)
        * (math.sqrt(log_term + epsilon) + math.sqrt(log_term))
        / math.sqrt(2)
        / epsilon
    )


def phi_as_printed(o: np.ndarray) -> np.ndarray:
    """Return the bottleneck activation as the paper prints it, in the dtype of its input."""
    length = o.size - 1
    norm = np.sqrt(np.sum(o[1:] ** 2))
    scale = o.dtype.type(math.sqrt(8 / math.pi))
    return o[1:] / ((np.exp(-o[0] * scale) + o.dtype.type(1)) ** o.dtype.type(1 / length) * norm)


def max_over_cube(rows: np.ndarray) -> float:
    """Return max ‖A_l·ŷ‖ over ŷ ∈ [−1, 1]^d; a convex function's maximum is at a corner, so all corners are tried."""
    corners = np.array(list(itertools.product([-1.0, 1.0], repeat=rows.shape[1])))
    return float(np.sqrt(((corners @ rows.T) ** 2).sum(axis=1)).max())


# --- Propositions 1 and 2: the algorithms are (ε, δ)-DP at eq (15)'s noise, by the exact curve


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
@pytest.mark.parametrize("queries", [1, 80, 5000])
def test_propositions_1_and_2_hold_with_eq_15s_noise(epsilon: float, delta: float, queries: int) -> None:
    for sensitivity in (math.sqrt(300) / 8, 2 / 8):  # PCA: √d/K; autoencoder: 2/K
        sigma = sigma_15(sensitivity=sensitivity, queries=queries, epsilon=epsilon, delta=delta)
        assert delta_exact(sensitivity * math.sqrt(queries) / sigma, epsilon) < delta


def test_algorithm_2s_printed_noise_is_eq_15_at_sensitivity_two_over_k() -> None:
    hospitals, queries, epsilon, delta = 8, 80, 8.0, 1e-3
    log_term = math.log(1 / delta)
    printed = math.sqrt(2 * queries) * (math.sqrt(log_term + epsilon) + math.sqrt(log_term)) / (hospitals * epsilon)
    assert printed == pytest.approx(sigma_15(sensitivity=2 / hospitals, queries=queries, epsilon=epsilon, delta=delta))
    assert printed == pytest.approx(1.282564, abs=1e-6)


@pytest.mark.parametrize(("radius", "sensitivity"), [(1.0, 2.0), (16.0, 32.0)])
@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-3), (8.0, 1e-3), (8.0, 1e-5)])
def test_the_paper_accountants_noise_is_eq_15s_and_the_exact_one_says_what_it_wastes(
    radius: float, sensitivity: float, epsilon: float, delta: float
) -> None:
    """For K = 8, σ is on the mean of K codes: Algorithm 2 with S = 2/K; Algorithm 1 with S = √d/K, C = √d/2,
    d = 1024.
    """
    hospitals, queries, budget = 8, 80, Budget(epsilon, delta)
    protection = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
    radius_steps = radius_int(radius)
    noise_std = calibrate(
        budget=budget,
        accountant=AccountantName.PAPER,
        queries=queries,
        radius_int=radius_steps,
        voters_per_site=1,
        protection=protection,
    )
    expected = sigma_15(sensitivity=sensitivity / hospitals, queries=queries, epsilon=epsilon, delta=delta)
    mechanism = Mechanism(dimension=4, radius_int=radius_steps, voters_per_site=1, noise_std=noise_std)
    assert mechanism.mean_noise_std(voters=hospitals) == pytest.approx(expected, rel=1e-6)
    told = {
        name: epsilon_of_plan(mechanism, queries=queries, budget=budget, protection=protection, accountant=name).epsilon
        for name in AccountantName
    }
    assert told["paper"] == pytest.approx(epsilon, rel=1e-6)
    assert told["paper"] <= epsilon
    assert told["exact"] < told["rdp"] < told["paper"]


def test_algorithm_1_as_printed_breaks_its_promise_when_k_epsilon_is_below_one() -> None:
    """It divides by √(2Kε) where eq (15) divides by √2·K·ε, so the noise is too small exactly when Kε < 1."""
    queries, dimension, delta = 10, 64, 1e-5
    for hospitals, epsilon, enough in [(2, 0.05, False), (4, 0.02, False), (8, 0.125, True), (8, 1.0, True)]:
        sensitivity, log_term = math.sqrt(dimension) / hospitals, math.log(1 / delta)
        correct = sigma_15(sensitivity=sensitivity, queries=queries, epsilon=epsilon, delta=delta)
        numerator = math.sqrt(queries * dimension) * (math.sqrt(log_term + epsilon) + math.sqrt(log_term))
        printed = numerator / math.sqrt(2 * hospitals * epsilon)
        assert (printed >= correct * (1 - 1e-12)) is enough
        assert (epsilon_exact((sensitivity * math.sqrt(queries) / printed) ** 2, delta) <= epsilon) is enough


def test_eq_5_as_printed_misplaces_a_bracket_and_only_wastes_noise() -> None:
    for epsilon, delta in BUDGETS:
        log_term = math.log(1 / delta)
        assert 2 * math.sqrt(log_term) + epsilon > math.sqrt(log_term + epsilon) + math.sqrt(log_term)


# --- Eqs (3), (4), (8)–(10): sensitivity of the PCA aggregate


@pytest.mark.parametrize("components", [1, 2, 3])
def test_eq_3s_maximum_over_the_cube_is_at_most_eq_4s_bound_and_reaches_it(components: int) -> None:
    rng = np.random.default_rng(11)
    dimension = 10
    for _ in range(5):
        rows = np.linalg.qr(rng.normal(size=(dimension, components)))[0].T
        assert max_over_cube(rows) <= math.sqrt(dimension) * (1 + 1e-12)
    flat = np.full((1, dimension), 1 / math.sqrt(dimension))  # a component along the cube's diagonal
    assert max_over_cube(flat) == pytest.approx(math.sqrt(dimension))
    assert max_over_cube(np.eye(dimension)) == pytest.approx(math.sqrt(dimension))
    assert max_over_cube(np.eye(dimension)[:components]) == pytest.approx(math.sqrt(components))


def test_eq_9s_reduction_to_one_changed_teacher_is_the_whole_sum() -> None:
    rng = np.random.default_rng(12)
    rows = np.linalg.qr(rng.normal(size=(6, 2)))[0].T
    teachers = rng.uniform(size=(4, 6))
    changed = teachers.copy()
    changed[2] = rng.uniform(size=6)
    moved = rows @ (teachers.mean(axis=0) - changed.mean(axis=0))
    assert np.linalg.norm(moved) <= max_over_cube(rows) / 4
    assert moved == pytest.approx(rows @ (teachers[2] - changed[2]) / 4)


def test_logits_have_no_such_bound_and_are_clipped_here() -> None:
    logits = np.full(6, 50.0)
    rows = np.full((1, 6), 1 / math.sqrt(6))
    assert np.linalg.norm(rows @ logits) > math.sqrt(6)
    q = quantise(rows @ logits, radius_int=1 << 16)
    assert abs(int(q[0])) <= 1 << 16


# --- Propositions 3–5


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [1.1, 2.0, 7.5])
@pytest.mark.parametrize("ratio", [0.1, 1.0, 3.0])
def test_proposition_3_agrees_with_the_integrated_renyi_divergence(alpha: float, ratio: float) -> None:
    with mpmath.workdps(30):

        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(x, ratio, 1) ** alpha * mpmath.npdf(x, 0, 1) ** (1 - alpha)

        centre = alpha * ratio
        moment = mpmath.quad(integrand, [centre - 40, centre - 5, centre, centre + 5, centre + 40])
        assert float(mpmath.log(moment) / (alpha - 1)) == pytest.approx(alpha * ratio**2 / 2, rel=1e-9)


@pytest.mark.slow
def test_proposition_4_agrees_with_the_integral_over_two_independent_releases() -> None:
    alpha, first, second = 3.0, 0.7, 0.4
    x = np.linspace(-12, 14, 2001)
    grids = []
    for shift in (first, second):
        grids.append(stats.norm.pdf(x, shift) ** alpha * stats.norm.pdf(x) ** (1 - alpha))
    joint = np.trapezoid(np.trapezoid(np.outer(grids[0], grids[1]), x, axis=0), x)
    assert math.log(joint) / (alpha - 1) == pytest.approx(alpha * (first**2 + second**2) / 2, rel=1e-9)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_proposition_5_is_sound_at_every_order_by_the_exact_curve(mu: float, delta: float) -> None:
    for alpha in (1.05, 1.5, 2.0, 5.0, 32.0, 500.0):
        assert delta_exact(mu, alpha * mu**2 / 2 + math.log(1 / delta) / (alpha - 1)) <= delta


# --- Eqs (11)–(15)


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_eqs_11_to_14_agree_with_numerical_minimisation_over_the_order(mu: float, delta: float) -> None:
    a, b = mu**2 / 2, math.log(1 / delta)

    def eq_11(log_order: float) -> float:
        alpha = 1 + math.exp(log_order)
        return alpha * a + b / (alpha - 1)

    best = optimize.minimize_scalar(eq_11, bounds=(-12, 12), method="bounded", options={"xatol": 1e-10})
    assert 1 + math.exp(best.x) == pytest.approx(1 + math.sqrt(b / a), rel=1e-4)  # (12)
    assert best.fun == pytest.approx(a + 2 * math.sqrt(a * b), rel=1e-9)  # (13)
    assert epsilon_paper(mu**2, delta) == pytest.approx(best.fun, rel=1e-9)  # (14)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_eq_15_is_the_inverse_of_eq_14(epsilon: float, delta: float) -> None:
    sigma = sigma_15(sensitivity=1.0, queries=1, epsilon=epsilon, delta=delta)
    assert epsilon_paper(1 / sigma**2, delta) == pytest.approx(epsilon, rel=1e-12)
    root = optimize.brentq(lambda s: 1 / (2 * s * s) + math.sqrt(2 * math.log(1 / delta)) / s - epsilon, 1e-3, 1e3)
    assert sigma == pytest.approx(root, rel=1e-9)


@pytest.mark.parametrize(("epsilon", "delta"), BUDGETS)
def test_eq_15_is_sound_but_spends_a_seventh_to_a_half_too_much_noise(epsilon: float, delta: float) -> None:
    mu_squared = 1 / sigma_15(sensitivity=1.0, queries=1, epsilon=epsilon, delta=delta) ** 2
    assert epsilon_exact(mu_squared, delta) < epsilon_rdp(mu_squared, delta) < epsilon


# --- The activation φ, Figures 1 and 2: the production function, and what the printed formula does instead


@pytest.mark.parametrize("length", [1, 3, 128])
def test_figure_1_the_radius_stands_in_for_the_normal_to_within_0177(length: int) -> None:
    o = np.linspace(-8, 8, 400_001)
    gap = np.abs(ball_radius(o, length=length) ** length - stats.norm.cdf(o))
    assert gap.max() == pytest.approx(0.0177, abs=5e-5)


@pytest.mark.parametrize("length", [1, 2, 16])
def test_figure_2_phi_fills_the_ball_nearly_uniformly_for_normal_inputs(length: int) -> None:
    """‖φ‖^l would be uniform on [0, 1]; its distribution deviates by at most the logistic's .0177."""
    rng = np.random.default_rng(13)
    draws = ball_activation(rng.normal(size=(40_000, length + 1)))
    volume = np.linalg.norm(draws, axis=1) ** length
    distance = stats.kstest(volume, "uniform").statistic
    noise = math.sqrt(math.log(2 / 1e-6) / 2 / draws.shape[0])
    assert 0.0177 - noise < distance < 0.0177 + noise
    if length > 1:  # directions: first moments vanish, second moments are 1/l
        unit = draws / np.linalg.norm(draws, axis=1)[:, None]
        assert np.abs(unit.mean(axis=0)).max() < 6 / math.sqrt(40_000)
        assert np.abs(unit.T @ unit / 40_000 - np.eye(length) / length).max() < 6 / math.sqrt(40_000)


def test_figure_2s_map_of_the_disc_is_uniform_cell_by_cell() -> None:
    """For l = 2, as in the figure, cells of equal area hold equal shares, up to the logistic's .0177 at a
    ring's edge.
    """
    draws = ball_activation(np.random.default_rng(16).normal(size=(200_000, 3)))
    ring = np.minimum((4 * (draws**2).sum(axis=1)).astype(int), 3)
    sector = ((np.arctan2(draws[:, 1], draws[:, 0]) / (2 * np.pi) % 1) * 8).astype(int) % 8
    shares = np.bincount(8 * ring + sector, minlength=32) / draws.shape[0]
    noise = 6 * math.sqrt(1 / 32 / draws.shape[0])
    assert np.abs(shares - 1 / 32).max() < 2 * 0.0177 / 8 + noise


def test_phi_of_zero_is_undefined_as_printed_and_the_zero_code_here() -> None:
    with np.errstate(invalid="ignore"):
        assert np.isnan(phi_as_printed(np.zeros(5))).all()
    assert ball_activation(np.zeros(5)).tolist() == [0.0] * 4


@pytest.mark.parametrize(("dtype", "excess"), [(np.float32, 2e-6), (np.float16, 5e-3)])
def test_printed_phi_leaves_the_unit_ball_in_short_floats_and_ours_never_does(dtype: type, excess: float) -> None:
    rng = np.random.default_rng(14)
    largest, least = float(np.finfo(dtype).max), float(np.finfo(dtype).smallest_subnormal)
    worst = 0.0
    inputs = [np.concatenate([[12.0], rng.normal(size=9)]).astype(dtype) for _ in range(500)]
    with np.errstate(over="ignore", invalid="ignore"):
        for o in inputs:
            worst = max(worst, float(np.linalg.norm(phi_as_printed(o).astype(np.float64))) - 1)
        assert not phi_as_printed(np.array([0, largest, largest, 0], dtype=dtype)).any()  # its norm overflows
    assert 0 < worst < excess
    inputs += [np.array([largest, 1, -1, 2], dtype=dtype), np.array([-largest, 1, -1, 2], dtype=dtype)]
    inputs += [np.full(4, largest, dtype=dtype), np.array([0, largest, largest, 0], dtype=dtype)]
    inputs += [np.full(4, least, dtype=dtype), np.array([largest, least, largest, -least], dtype=dtype)]
    for o in inputs:
        code = ball_activation(o)
        assert code.dtype == dtype
        assert sum(Fraction(float(v)) ** 2 for v in code) <= 1
        assert np.array_equal(clip(code, radius=1.0), code.astype(np.float64))
        assert sum(int(v) ** 2 for v in quantise(code, radius_int=1 << 16)) <= 1 << 32
    assert ball_activation(np.array([0, largest, largest, 0], dtype=dtype)).tolist() == pytest.approx(
        [0.5 ** (1 / 3) / math.sqrt(2)] * 2 + [0], rel=2 * float(np.finfo(dtype).eps)
    )


# --- Formulas from elsewhere that must not be used


def test_the_classic_gaussian_formula_is_unsound_above_epsilon_one() -> None:
    """At δ = 1e-3, σ = √(2·ln(1.25/δ))/ε promises 8 and gives 8.18, and promises 20 and gives 29.6."""
    for promised, true in [(8.0, 8.18), (20.0, 29.6)]:
        sigma = math.sqrt(2 * math.log(1.25 / 1e-3)) / promised
        assert epsilon_exact(1 / sigma**2, 1e-3) == pytest.approx(true, rel=1e-3)
