"""Tests the audit's tests of noise on generated noise with known faults: what they accept, what they find,
how often.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import kstest

from consilium.audit.noise import (
    ALPHA,
    _coordinate_pairs,
    _lags,
    _vector_pairs,
    coincidences,
    noise_findings,
    repeated_stretches,
    smallest_fault,
    variance_finding,
)
from consilium.audit.run import DRAWS

STD = 125_000.0
SHAPE = (6, 4, 256)
Rng = np.random.Generator


def true(rng: Rng, shape: tuple[int, ...] = SHAPE, std: float = STD) -> np.ndarray:
    return np.rint(rng.normal(0, std, shape)).astype(np.int64)


def alarms(noise: np.ndarray, std: float = STD) -> set[str]:
    return {finding.test for finding in noise_findings(noise, std) if finding.alarm}


@pytest.mark.slow
@pytest.mark.parametrize("std", [60.0, 2000.0, STD, 2.0**40])
@pytest.mark.parametrize("shape", [SHAPE, (1, 1, 16), (40, 2, 2), (2, 30, 7)])
def test_noise_as_claimed_raises_no_alarm_at_any_size(std: float, shape: tuple[int, ...]) -> None:
    for seed in range(5):
        assert alarms(true(np.random.default_rng(seed), shape, std), std) == set()


def again(noise: np.ndarray, *, after: int) -> np.ndarray:
    vectors = noise.reshape(-1, noise.shape[-1]).copy()
    for place in range(after, len(vectors)):
        vectors[place] = vectors[place - after]
    return vectors.reshape(noise.shape)


def changed(noise: np.ndarray, where: object, factor: float) -> np.ndarray:
    result = noise.astype(float)
    result[where] *= factor
    return np.rint(result).astype(np.int64)


def mixed(noise: np.ndarray, other: np.ndarray, share: float) -> np.ndarray:
    return np.rint(noise * np.sqrt(1 - share**2) + other * share).astype(np.int64)


FAULTS: dict[str, tuple[Callable[[np.ndarray, Rng], np.ndarray], str]] = {
    "a tenth less": (lambda noise, _: changed(noise, ..., 0.9), "variance"),
    "a tenth more": (lambda noise, _: changed(noise, ..., 1.1), "variance"),
    "a third less in one run": (lambda noise, _: changed(noise, 3, 0.67), "variance by place"),
    "a third less in the last coordinates": (lambda n, _: changed(n, np.s_[..., -32:], 0.67), "variance by place"),
    "nothing in one coordinate": (lambda noise, _: changed(noise, np.s_[..., 77], 0.0), "variance by place"),
    "eight later": (lambda noise, _: again(noise, after=8), "noise used twice"),
    "another sign": (lambda noise, _: np.concatenate([noise[:3], -noise[:3]]), "noise used twice"),
    "a stretch of four once": (
        lambda noise, _: np.concatenate([noise[:5], np.roll(noise[:1], 3, axis=2)]),
        "noise used twice",
    ),
    "another order": (
        lambda noise, rng: np.array([[rng.permutation(run[0]) for _ in run] for run in noise]),
        "values dealt again",
    ),
    "two thirds of the one before": (
        lambda noise, _: mixed(noise, np.roll(noise, 1, axis=1), 0.67),
        "pairs of vectors at any shift",
    ),
    "the one before, three places on": (
        lambda noise, _: mixed(noise, np.roll(np.roll(noise, 1, axis=1), 3, axis=2), 0.67),
        "pairs of vectors at any shift",
    ),
    "two coordinates as one": (
        lambda noise, _: np.concatenate([noise[..., :1], -noise[..., :1], noise[..., 2:]], axis=2),
        "pairs of coordinates",
    ),
    "neighbours": (lambda noise, _: mixed(noise, np.roll(noise, 1, axis=2), 0.2), "neighbours in a vector"),
    "a common share": (
        lambda noise, rng: mixed(noise, np.repeat(true(rng, (6, 4, 1)), 256, axis=2), 0.4),
        "spectrum of the draws",
    ),
    "a shifted mean": (lambda noise, _: noise + int(STD / 10), "spectrum of the draws"),
    "every third bit pattern": (lambda noise, _: noise // 3 * 3, "remainders"),
    "only even ones": (lambda noise, _: noise // 2 * 2, "remainders"),
    "another shape": (
        lambda noise, rng: np.rint(rng.uniform(-STD * 3**0.5, STD * 3**0.5, noise.shape)).astype(np.int64),
        "noise distribution",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_seen_by_the_test_that_is_there_for_it(name: str) -> None:
    fault, test = FAULTS[name]
    for seed in range(5):
        rng = np.random.default_rng(seed)
        assert test in alarms(fault(true(rng, (40, 4, 256) if test.endswith("coordinates") else SHAPE), rng))


@pytest.mark.slow
def test_a_hundredth_less_is_seen_at_the_default_number_of_draws() -> None:
    """The audit states which fault 19 of 20 audits find; this fault must be less than a hundredth."""
    assert 0.990 < smallest_fault(DRAWS) < 0.991
    rng = np.random.default_rng(0)
    seen = [variance_finding(rng.normal(0, 0.99, (1, 1, DRAWS))).alarm for _ in range(40)]
    assert np.mean(seen) >= 0.9
    assert not any(variance_finding(rng.normal(0, 1, (1, 1, DRAWS))).alarm for _ in range(40))


@pytest.mark.parametrize("statistics", [_vector_pairs, lambda n: _coordinate_pairs(n[0]), lambda n: _lags(n[0])])
@pytest.mark.slow
def test_the_correlations_are_standard_normal_where_there_is_none(
    statistics: Callable[[np.ndarray], list[np.ndarray]],
) -> None:
    """With only nine coordinates no limit theorem helps, but the values must still be normal."""
    rng = np.random.default_rng(1)
    one_each = [
        np.concatenate([part.ravel() for part in statistics(rng.normal(size=(1, 6, 9)))])[3] for _ in range(4000)
    ]
    assert kstest(one_each, "norm").pvalue > 1e-3


@pytest.mark.slow
def test_false_alarms_of_the_exact_tests_come_at_their_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("consilium.audit.noise.ALPHA", 0.2)
    rng = np.random.default_rng(2)
    rate = np.mean([variance_finding(rng.normal(size=(1, 2, 50))).alarm for _ in range(2000)])
    assert 0.16 < rate < 0.24
    assert ALPHA == 1e-5


def test_a_repeated_stretch_is_counted_and_chance_ones_are_not() -> None:
    rng = np.random.default_rng(3)
    noise = true(rng, (20_000,))
    assert repeated_stretches(noise, STD).measured == 0
    noise[9_000:9_010] = -noise[100:110]
    assert repeated_stretches(noise, STD).measured >= 7
    assert repeated_stretches(true(rng, (20_000,), 20.0), 20.0).measured == 0


def test_pairs_of_equal_size_are_as_many_as_reckoned() -> None:
    """For the half-normal, Σp² is 1/(σ√π). The mean over many runs is compared with the formula behind the limit."""
    rng = np.random.default_rng(4)
    pairs = [coincidences(true(rng, (1, 1, 2000), 1000.0), 1000.0).measured for _ in range(100)]
    assert np.mean(pairs) == pytest.approx(2000**2 / 2 / (1000 * np.pi**0.5), rel=0.03)
