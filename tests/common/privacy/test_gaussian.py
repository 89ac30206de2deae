"""Tests that the sampler is an exact rounded Gaussian. Oracles: mpmath at 400 bits, and tests that reject a
wrong σ.

The random bits come from the operating system, so thresholds are set for one false alarm in a million or fewer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from scipy import stats
from scipy.special import ndtri

from common.privacy import gaussian
from common.privacy.gaussian import rounded_gaussian, sample

STDS = [
    Fraction(1, 16),
    Fraction(1, 4),
    Fraction(2, 3),
    Fraction(5),
    Fraction(2**17),
    Fraction(10**9, 7),
    Fraction(2**40),
]


def upper_tail(x: Fraction | mpmath.mpf) -> mpmath.mpf:
    value = mpmath.mpf(x.numerator) / x.denominator if isinstance(x, Fraction) else x
    return mpmath.erfc(value / mpmath.sqrt(2)) / 2


def probability(k: int, std: Fraction) -> mpmath.mpf:
    """Return P(round(N(0, σ²)) = k) at 400 bits."""
    with mpmath.workprec(400):
        return upper_tail((Fraction(k) - Fraction(1, 2)) / std) - upper_tail((Fraction(k) + Fraction(1, 2)) / std)


def feed(*chunks: bytes) -> Callable[[int], bytes]:
    """Return an entropy source that hands out these bytes and checks the requested amounts."""
    queue = list(chunks)

    def entropy(size: int) -> bytes:
        chunk = queue.pop(0)
        assert len(chunk) == size
        return chunk

    return entropy


@pytest.mark.parametrize("std", [Fraction(1, 4), Fraction(2, 3), Fraction(1), Fraction(3)])
def test_small_sigmas_have_exactly_the_rounded_gaussian_probabilities(std: Fraction) -> None:
    draws = rounded_gaussian(1_000_000, std)
    reach = 1
    while 1_000_000 * probability(reach + 1, std) > 20:
        reach += 1
    inner = [int((draws == k).sum()) for k in range(-reach, reach + 1)]
    observed = [int((draws < -reach).sum()), *inner, int((draws > reach).sum())]
    expected = [float(probability(k, std)) * draws.size for k in range(-reach, reach + 1)]
    edge = (draws.size - sum(expected)) / 2
    if edge < 5:  # merge the sparse tails into their neighbours
        observed = [observed[0] + observed[1], *observed[2:-2], observed[-2] + observed[-1]]
        expected = [expected[0] + edge, *expected[1:-1], expected[-1] + edge]
    else:
        expected = [edge, *expected, edge]
    assert stats.chisquare(observed, np.array(expected) * draws.size / sum(expected)).pvalue > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("std", [Fraction(1, 2), Fraction(3), Fraction(2**17)])
def test_moments_are_those_of_the_rounded_gaussian(std: Fraction) -> None:
    draws = rounded_gaussian(1_000_000, std).astype(np.float64)
    if std < 100:
        reach = range(-40, 41)
        variance = float(sum(probability(k, std) * k**2 for k in reach))
        fourth = float(sum(probability(k, std) * k**4 for k in reach))
    else:
        variance, fourth = float(std) ** 2 + 1 / 12, 3 * float(std) ** 4
    n = draws.size
    assert abs(draws.mean()) < 6 * math.sqrt(variance / n)
    assert abs((draws**2).mean() - variance) < 6 * math.sqrt((fourth - variance**2) / n)
    assert abs((draws**3).mean()) < 6 * math.sqrt(15 * variance**3 / n) * 2


def kolmogorov_distance(draws: np.ndarray, std: float) -> float:
    """Return sup |F_n − F| over the half-integers, where the rounded Gaussian's F is exactly Φ((k + ½)/σ)."""
    values, counts = np.unique(draws, return_counts=True)
    empirical = np.cumsum(counts) / draws.size
    above = np.abs(empirical - stats.norm.cdf((values + 0.5) / std))
    below = np.abs(empirical - counts / draws.size - stats.norm.cdf((values - 0.5) / std))
    return float(max(above.max(), below.max()))


@pytest.mark.slow
@pytest.mark.parametrize("std", [Fraction(3), Fraction(2**17), Fraction(2**28)])
def test_a_kolmogorov_test_accepts_sigma_and_rejects_three_per_cent_off(std: Fraction) -> None:
    draws = rounded_gaussian(600_000, std)  # with so many draws, σ that is 3 % off passes once in e^17 tests
    limit = math.sqrt(math.log(2 / 1e-6) / 2 / draws.size)  # Dvoretzky–Kiefer–Wolfowitz–Massart
    assert kolmogorov_distance(draws, float(std)) < limit
    assert kolmogorov_distance(draws, float(std) * 0.97) > limit
    assert kolmogorov_distance(draws, float(std) * 1.03) > limit
    assert kolmogorov_distance(rounded_gaussian(600_000, std * Fraction(97, 100)), float(std)) > limit


def test_draws_are_independent_between_coordinates_calls_and_signs() -> None:
    std = Fraction(2**17)
    first, second = rounded_gaussian(500_000, std) / 2**17, rounded_gaussian(500_000, std) / 2**17
    limit = 6 / math.sqrt(500_000)
    assert abs(float(np.mean(first * second))) < limit
    assert abs(float(np.mean(first[1:] * first[:-1]))) < limit
    assert abs(float(np.mean(first[gaussian._BLOCK :] * first[: -gaussian._BLOCK]))) < limit
    assert abs(float(np.mean(np.sign(first) * np.abs(first)))) < limit
    assert not np.array_equal(rounded_gaussian(16, std), rounded_gaussian(16, std))


def test_the_float_quantile_errs_by_less_than_a_thousandth_of_the_guard() -> None:
    """This is the fast path's only assumption. The test uses 400-bit quantiles from the far tail to the median."""
    rng = np.random.default_rng(5)
    words = np.concatenate(
        [
            rng.integers(gaussian._DEEP_TAIL, 2**63, size=400, dtype=np.uint64),
            np.geomspace(gaussian._DEEP_TAIL, 2**63 - 1, 400).astype(np.uint64),
            np.uint64(2**63) - np.geomspace(1, 2**60, 200).astype(np.uint64),
            (np.array([0.135335283, 0.13533529, 0.02425, 0.25, 0.375, 3e-7]) * 2**64).astype(np.uint64),
        ]
    )
    arguments = (words.astype(np.float64) + 0.5) * 2.0**-64
    worst = 0.0
    with mpmath.workprec(400):
        for p, z in zip(arguments.tolist(), -ndtri(arguments), strict=True):
            # one Newton step at 400 bits from a 15-digit root leaves an error of about z³·1e-30
            density = mpmath.npdf(mpmath.mpf(float(z)))
            error = (upper_tail(mpmath.mpf(float(z))) - mpmath.mpf(p)) / density
            worst = max(worst, float(abs(error)) / (gaussian._GUARD * (1 + float(z))))
    assert worst < 1e-3


@pytest.mark.parametrize("std", STDS)
def test_the_fast_and_the_exact_path_give_the_same_number_for_the_same_bits(std: Fraction) -> None:
    words = np.random.default_rng(7).integers(0, 2**64, size=200, dtype=np.uint64)
    fast = gaussian._block(words, std, os.urandom)
    exact = [gaussian._settle(int(w) >> 1, std, os.urandom) * (-1 if int(w) & 1 else 1) for w in words]
    differing = int((fast != exact).sum())
    # Each path draws its own bits beyond the 64th. They may differ if a boundary lies inside an interval (σ = 2^40).
    assert differing == 0 if std <= 2**20 else differing <= 2


@pytest.mark.parametrize(
    ("std", "k"), [(s, k) for s in STDS if s < 2**30 for k in (0, 1, 7, 100_000) if (k + 1) / s <= 8 or k == 0]
)
def test_bits_on_either_side_of_a_boundary_round_to_either_side(std: Fraction, k: int) -> None:
    """The test writes the exact probability between k and k + 1 in bits, and steps just above and just below it."""
    with mpmath.workprec(600):
        boundary = int(mpmath.floor(upper_tail((Fraction(k) + Fraction(1, 2)) / std) * mpmath.mpf(2) ** 192))
    for step, expected in ((1, k), (-1, k + 1)):
        bits = boundary + step * 2**32  # 160 bits equal the boundary's
        head, middle, last = bits >> 128, bits >> 64 & (2**64 - 1), bits & (2**64 - 1)
        for negative in (0, 1):
            source = feed(*((word % 2**64).to_bytes(8, "little") for word in (head << 1 | negative, middle, last)))
            value = int(sample(1, std, entropy=source)[0])
            assert value == (-expected if negative else expected)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "std"), [(2, 100), (2, 2**30), (15, 100), (16, 2**30), (18, 100)])
def test_a_string_of_zero_bits_reaches_far_into_the_tail_instead_of_failing(words: int, std: int) -> None:
    """From 16 words on, this is beyond what float64 can hold: P lies in [1, 2]·2^−64(words + 1)."""
    zeros, one = bytes(8), (1).to_bytes(8, "little")
    source = feed(*[zeros] * words, one, *(os.urandom(8) for _ in range(3)))
    value = int(sample(1, Fraction(std), entropy=source)[0])
    with mpmath.workprec(64 * words + 400):
        low, high = (upper_tail(mpmath.mpf(x) / std) for x in (value + 0.5, value - 0.5))
        assert low < mpmath.mpf(2) ** (1 - 64 * (words + 1))
        assert high > mpmath.mpf(2) ** (-64 * (words + 1))


def test_sizes_beyond_one_block_are_filled_from_fresh_bytes() -> None:
    asked: list[int] = []

    def entropy(size: int) -> bytes:
        asked.append(size)
        return os.urandom(size)

    draws = sample(gaussian._BLOCK + 3, Fraction(2**17), entropy=entropy)
    assert draws.dtype == np.int64
    assert draws.shape == (gaussian._BLOCK + 3,)
    assert asked[0] == 8 * gaussian._BLOCK
    assert sum(size for size in asked if size > 8) == 8 * (gaussian._BLOCK + 3)


def test_production_noise_comes_from_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = os.urandom

    def spy(size: int) -> bytes:
        calls.append(size)
        return real(size)

    monkeypatch.setattr(os, "urandom", spy)
    state = np.random.get_state()[1].copy()  # noqa: NPY002 - shows the global generator is untouched
    rounded_gaussian(1000, Fraction(2**17))
    assert calls
    assert calls[0] == 8000
    assert np.array_equal(np.random.get_state()[1], state)  # noqa: NPY002
