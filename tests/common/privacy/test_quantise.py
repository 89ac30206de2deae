"""Tests that norms never grow. The oracle computes with Python's unbounded integers and rationals."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.errors import InvalidInput
from common.privacy.mechanism import GRID_BITS
from common.privacy.quantise import clip, quantise, within

GRID = 1 << GRID_BITS

sizes = st.integers(1, 40)
dtypes = st.sampled_from([np.float16, np.float32, np.float64])


@st.composite
def codes(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(dtypes)
    width = 8 * np.dtype(dtype).itemsize
    elements = st.floats(allow_nan=False, allow_infinity=False, width=width)  # type: ignore[call-overload]
    return draw(hnp.arrays(dtype, draw(sizes), elements=elements))


def square(values: np.ndarray) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in values), start=Fraction(0))


@settings(max_examples=150)
@given(code=codes(), radius=st.floats(2.0**-16, 2.0**24))
@example(code=np.full(7, 1.7e308), radius=1.0)
@example(code=np.full(7, 5e-324), radius=2.0**-16)
@example(code=np.array([1.7e308, 5e-324]), radius=2.0**24)
@example(code=np.full(9, np.finfo(np.float32).max, dtype=np.float32), radius=1.0)
@example(code=np.full(9, np.finfo(np.float16).max, dtype=np.float16), radius=1.0)
def test_clip_lands_in_the_ball_is_idempotent_keeps_direction_and_writes_nothing(
    code: np.ndarray, radius: float
) -> None:
    before = code.copy()
    result = clip(code, radius=radius)
    assert np.array_equal(code, before)
    assert result.dtype == np.float64
    assert np.linalg.norm(result) <= radius
    assert square(result) <= (Fraction(radius) * (1 + Fraction(1, 2**45))) ** 2
    assert np.array_equal(clip(result, radius=radius), result)
    assert (result * np.sign(code.astype(np.float64)) >= 0).all()
    assert (np.abs(result) * (1 - 1e-12) <= np.abs(code.astype(np.float64))).all()
    if square(code) <= (Fraction(radius) * (1 - Fraction(1, 2**45))) ** 2:
        assert np.array_equal(result, code.astype(np.float64))


def test_a_code_on_the_sphere_is_unchanged() -> None:
    code = np.array([3.0, 4.0])
    assert np.array_equal(clip(code, radius=5.0), code)
    assert np.allclose(clip(code, radius=2.5), [1.5, 2.0], rtol=1e-15)
    assert np.array_equal(clip(np.zeros(3), radius=1.0), np.zeros(3))


def test_clip_never_returns_the_callers_array() -> None:
    code = np.array([0.1, 0.2])
    assert not np.shares_memory(clip(code, radius=1.0), code)


@settings(max_examples=150)
@given(code=codes(), radius_int=st.integers(1, (1 << 40) - 1))
def test_no_code_gets_past_the_integer_radius(code: np.ndarray, radius_int: int) -> None:
    q = quantise(code, radius_int=radius_int)
    assert q.dtype == np.int64
    assert sum(int(v) ** 2 for v in q) <= radius_int**2


@settings(max_examples=100)
@given(code=hnp.arrays(np.float64, sizes, elements=st.floats(-0.05, 0.05)))
def test_inside_the_ball_quantising_is_truncation_towards_zero(code: np.ndarray) -> None:
    q = quantise(code, radius_int=8 * GRID)
    assert [int(got) for got in q] == [math.trunc(Fraction(float(value)) * GRID) for value in code]


@settings(max_examples=150)
@given(code=codes(), radius_int=st.integers(1, (1 << 40) - 1))
def test_norms_never_grow_through_clip_and_quantisation(code: np.ndarray, radius_int: int) -> None:
    """In exact rationals, ‖q‖·2⁻¹⁶ ≤ ‖clip(x)‖ ≤ min(C, ‖x‖).

    ‖x‖ allows for float64's rounding of the norm; the radius allows for none.
    """
    clipped = clip(code, radius=radius_int / GRID)
    assert square(clipped) <= square(code) * (1 + Fraction(1, 2**44)) ** 2
    q = quantise(code, radius_int=radius_int)
    assert square(q) <= min(square(clipped) * GRID**2, Fraction(radius_int) ** 2)
    assert (np.abs(q) <= np.abs(clipped) * GRID).all()


def test_a_norm_that_float64_rounds_down_to_the_radius_is_still_brought_within_it() -> None:
    """The integer points lie so close outside the circle that their float64 norm equals R, so clip cannot
    notice them.
    """
    radius_int, found = 1 << 39, 0
    for b in range(10**11, 10**11 + 200_000):
        a = math.isqrt(radius_int**2 - b * b) + 1
        if a * a + b * b - radius_int**2 < 1 << 24:
            code = np.array([a, b], dtype=np.float64) / GRID
            assert np.array_equal(clip(code, radius=radius_int / GRID), code)
            q = quantise(code, radius_int=radius_int)
            assert int(q[0]) ** 2 + int(q[1]) ** 2 <= radius_int**2 < a * a + b * b
            found += 1
    assert found


def test_truncation_is_towards_zero_on_both_sides() -> None:
    code = np.array([1.9, -1.9, 0.9, -0.9]) / GRID
    assert quantise(code, radius_int=GRID).tolist() == [1, -1, 0, 0]


@settings(max_examples=150)
@given(size=st.integers(1, 30), radius_int=st.integers(1 << 26, (1 << 40) - 1), seed=st.integers(0, 2**32 - 1))
def test_rounding_of_large_norms_in_float64_cannot_pass_the_integer_radius(
    size: int, radius_int: int, seed: int
) -> None:
    """Above 2^26 float64 norms do not resolve single steps; the exact test must."""
    code = np.random.default_rng(seed).normal(size=size) * radius_int * 1e3
    q = quantise(code, radius_int=radius_int)
    total = sum(int(v) ** 2 for v in q)
    assert total <= radius_int**2
    assert total >= (radius_int * (1 - 1e-9) - math.sqrt(size) - 1) ** 2  # and hardly anything is lost


@settings(max_examples=150)
@given(
    code=hnp.arrays(np.int64, sizes, elements=st.integers(-(2**63), 2**63 - 1))
    | hnp.arrays(np.int64, sizes, elements=st.integers(-(2**32), 2**32)),
    bound=st.integers(1, 2**70),
)
@example(code=np.array([-(2**63)]), bound=2**63 - 1)
@example(code=np.array([-(2**63)]), bound=2**63)
@example(code=np.array([-(2**63), 5]), bound=2**31)  # |−2⁶³| is negative in int64, and its square wraps to zero
@example(code=np.full(4, 2**31), bound=1)  # Σq² = 2^64 wraps to 0 in int64
@example(code=np.full(2, 3037000500), bound=2**31)  # Σq² wraps negative
def test_within_decides_in_exact_integers_for_every_int64(code: np.ndarray, bound: int) -> None:
    assert within(code, bound_int=bound) is (sum(int(v) ** 2 for v in code) <= bound**2)


@settings(max_examples=100)
@given(code=hnp.arrays(np.int64, sizes, elements=st.integers(-(2**40), 2**40)))
def test_within_is_tight_at_the_integer_root(code: np.ndarray) -> None:
    root = math.isqrt(sum(int(v) ** 2 for v in code))
    if root >= 1:
        assert within(code, bound_int=root + 1)
        assert within(code, bound_int=root) is (root * root == sum(int(v) ** 2 for v in code))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_code_that_is_not_finite_is_refused_not_passed_through(bad: float, dtype: type) -> None:
    code = np.array([0.0, bad, 0.0], dtype=dtype)
    with pytest.raises(InvalidInput):
        clip(code, radius=1.0)
    with pytest.raises(InvalidInput):
        quantise(code, radius_int=GRID)


@pytest.mark.parametrize(
    "code", [np.zeros(0), np.zeros((2, 2)), np.zeros(2, dtype=np.int64), [1.0], None, np.zeros(2, dtype=complex)]
)
def test_codes_of_the_wrong_shape_or_type_are_refused(code: np.ndarray) -> None:
    with pytest.raises(InvalidInput):
        clip(code, radius=1.0)
    with pytest.raises(InvalidInput):
        quantise(code, radius_int=GRID)


@pytest.mark.parametrize(
    "code",
    [np.zeros(0, dtype=np.int64), np.zeros((1, 2), dtype=np.int64), np.zeros(2), np.zeros(2, dtype=np.int32), None],
)
def test_the_norm_test_judges_int64_vectors_only(code: np.ndarray) -> None:
    with pytest.raises(InvalidInput):
        within(code, bound_int=1)


class Subclass(np.ndarray):
    """Stands for an array whose methods may differ from numpy's."""


def test_a_masked_array_cannot_hide_a_value_from_the_norm_test() -> None:
    hidden = [False, True]
    for code in (np.ma.array([1, 2**40], mask=hidden), np.array([1, 2**40]).view(Subclass)):
        with pytest.raises(InvalidInput, match="plain"):
            within(code, bound_int=5)
    for vector in (np.ma.array([0.5, 1e6], mask=hidden), np.array([0.5, 1e6]).view(Subclass)):
        with pytest.raises(InvalidInput, match="plain"):
            clip(vector, radius=1.0)
        with pytest.raises(InvalidInput, match="plain"):
            quantise(vector, radius_int=GRID)


@pytest.mark.parametrize("radius", [5e-324, 2.0**-1060])
def test_clipping_to_the_smallest_floats_ends(radius: float) -> None:
    """Formerly rounding up kept the norm above the radius, and the loop never ended."""
    assert np.linalg.norm(clip(np.ones(3), radius=radius)) <= radius


@pytest.mark.parametrize("radius", [2.27e-159, 1.11e-156, 2e154, 1e200, 1.7e308])
def test_clipping_to_radii_whose_squares_over_or_underflow_ends(radius: float) -> None:
    """Formerly numpy's norm was infinite or far too large, and the loop never ended."""
    clipped = clip(np.full(19, 1.7e308), radius=radius)
    assert np.linalg.norm(clipped / radius) == pytest.approx(1)


def test_a_refusal_never_quotes_the_code() -> None:
    with pytest.raises(InvalidInput) as refusal:
        quantise(np.array([0.123456, math.nan]), radius_int=GRID)
    assert "0.123" not in str(refusal.value)
