"""Tests the one release function: exact sums, a repeated norm test, and fresh noise every time."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import InvalidInput
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import Mechanism
from common.privacy.quantise import quantise
from common.privacy.release import CodeSum, noisy_sum
from tests.worlds import silent

R = 1 << 16


def mechanism(
    dimension: int = 4, *, radius_int: int = R, voters: int = 1, std: Fraction = Fraction(10**6)
) -> Mechanism:
    return Mechanism(dimension, radius_int, voters, std)


@settings(max_examples=100)
@given(
    rows=hnp.arrays(np.int64, st.tuples(st.integers(1, 9), st.integers(1, 12)), elements=st.integers(-(2**30), 2**30)),
    voters=st.integers(1, 4),
)
def test_sums_are_exact(rows: np.ndarray, voters: int) -> None:
    m = mechanism(rows.shape[1], radius_int=2**33, voters=voters)
    total = noisy_sum(list(rows), m, sampler=silent)
    assert [int(v) for v in total] == [sum(int(v) for v in column) for column in rows.T]


@settings(max_examples=50)
@given(
    rows=hnp.arrays(np.int64, st.tuples(st.integers(1, 9), st.integers(1, 8)), elements=st.integers(-(2**30), 2**30)),
    order=st.randoms(use_true_random=False),
    silent_sites=st.integers(0, 3),
)
def test_a_running_sum_is_the_sum_in_any_order_and_keeps_no_code(
    rows: np.ndarray, order: Any, silent_sites: int
) -> None:
    m, shuffled = mechanism(rows.shape[1], radius_int=2**33), list(rows)
    order.shuffle(shuffled)
    running = CodeSum(m)
    for code in shuffled:
        running.add(code)
    zeros = [np.zeros(rows.shape[1], dtype=np.int64)] * silent_sites
    released = running.released(sites=len(rows) + silent_sites, sampler=silent)
    assert np.array_equal(released, noisy_sum([*rows, *zeros], m, sampler=silent))
    kept = [value for value in vars(running).values() if isinstance(value, np.ndarray)]
    assert sum(value.size for value in kept) == rows.shape[1]


def test_a_code_that_is_refused_leaves_a_running_sum_as_it_was() -> None:
    running, code = CodeSum(mechanism()), np.array([1, 2, 3, 4])
    running.add(code)
    for wrong in (np.array([2 * R, 0, 0, 0]), np.zeros(3, dtype=np.int64), np.zeros(4), None):
        with pytest.raises(InvalidInput):
            running.add(wrong)
    assert running.released(sites=2, sampler=silent).tolist() == code.tolist()
    for sites in (0, -1):
        with pytest.raises(InvalidInput):
            running.released(sites=sites, sampler=silent)


def test_sums_that_could_leave_int64_are_refused_whatever_the_codes_hold() -> None:
    m = mechanism(2, radius_int=2**50, voters=2**10)
    code = np.zeros(2, dtype=np.int64)
    assert noisy_sum([code] * 3, m, sampler=silent).tolist() == [0, 0]
    with pytest.raises(InvalidInput, match="sum of codes"):
        noisy_sum([code] * 4, m, sampler=silent)


def test_the_noise_is_added_once_to_the_sum_with_the_mechanisms_own_sigma() -> None:
    asked: list[tuple[int, Fraction]] = []

    def sampler(size: int, noise_std: Fraction) -> np.ndarray:
        asked.append((size, noise_std))
        return np.arange(size, dtype=np.int64)

    m = mechanism(3, std=Fraction(12345, 7))
    code = np.array([1, 2, 3], dtype=np.int64)
    assert noisy_sum([code, code, -code], m, sampler=sampler).tolist() == [1, 3, 5]
    assert asked == [(3, Fraction(12345, 7))]


def test_the_default_is_the_production_sampler_and_never_repeats() -> None:
    assert noisy_sum.__kwdefaults__ == {"sampler": rounded_gaussian}
    code = np.zeros(64, dtype=np.int64)
    first, second = (noisy_sum([code], mechanism(64)) for _ in range(2))
    assert not np.array_equal(first, second)
    assert np.unique(np.concatenate([first, second])).size > 100


def test_a_sites_sum_is_bounded_by_its_voters_times_the_radius() -> None:
    inside = np.array([3 * R, 0, 0, 0])
    assert noisy_sum([inside], mechanism(voters=3), sampler=silent).tolist() == inside.tolist()
    for beyond in (np.array([3 * R + 1, 0, 0, 0]), np.array([3 * R, 1, 0, 0])):
        with pytest.raises(InvalidInput, match="norm"):
            noisy_sum([np.zeros(4, dtype=np.int64), beyond], mechanism(voters=3), sampler=silent)


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), voters=st.integers(1, 6), scale=st.sampled_from([0.01, 1.0, 1e6]))
def test_whatever_sites_quantise_the_server_accepts(seed: int, voters: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    voter_codes = [quantise(scale * rng.normal(size=5), radius_int=R) for _ in range(voters)]
    site = np.sum(voter_codes, axis=0)
    assert np.array_equal(noisy_sum([site], mechanism(5, voters=voters), sampler=silent), site)


@pytest.mark.parametrize(
    "code",
    [
        np.zeros(3, dtype=np.int64),
        np.zeros(4),
        np.zeros(4, dtype=np.int32),
        np.zeros(4, dtype=np.uint64),
        np.zeros((1, 4), dtype=np.int64),
        [0, 0, 0, 0],
        None,
        np.full(4, -(2**63), dtype=np.int64),
        np.full(4, 2**31, dtype=np.int64),  # Σq² is 2^64, which wraps to zero
        np.ma.array([2**40, 0, 0, 0], mask=[True, False, False, False]),  # the norm leaves out the masked value
    ],
)
def test_codes_of_another_type_shape_or_size_are_refused_and_nothing_is_drawn(code: np.ndarray) -> None:
    def never(size: int, noise_std: Fraction) -> np.ndarray:
        raise AssertionError("noise drawn for a refused release")

    with pytest.raises(InvalidInput):
        noisy_sum([np.zeros(4, dtype=np.int64), code], mechanism(), sampler=never)


def test_no_codes_are_refused() -> None:
    with pytest.raises(InvalidInput):
        noisy_sum([], mechanism())


@pytest.mark.parametrize(
    "noise",
    [
        np.zeros(4),
        np.zeros(3, dtype=np.int64),
        None,
        np.full(4, 2**62, dtype=np.int64),
        [0, 0, 0, 0],
        np.ma.zeros(4, dtype=np.int64),
    ],
)
def test_noise_of_the_wrong_kind_releases_nothing(noise: np.ndarray) -> None:
    with pytest.raises(InvalidInput):
        noisy_sum([np.zeros(4, dtype=np.int64)], mechanism(), sampler=lambda size, std: noise)


def test_arguments_are_untouched_nothing_is_logged_and_refusals_quote_no_code(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    code = np.array([54321, 0, 0, 0])
    noisy_sum([code], mechanism())
    assert code.tolist() == [54321, 0, 0, 0]
    with pytest.raises(InvalidInput) as refusal:
        noisy_sum([code], mechanism(radius_int=100))
    assert "54321" not in str(refusal.value)
    assert not caplog.records


def test_rounding_commutes_with_the_integer_sum() -> None:
    """The analytic curve holds because round(x + s) = round(x) + s for every integer s, on the same Gaussian draw."""
    rng = np.random.default_rng(3)
    x, shift = rng.normal(size=1000) * 50, rng.integers(-1000, 1000, size=1000)
    assert np.array_equal(np.floor(x + shift + 0.5), np.floor(x + 0.5) + shift)
