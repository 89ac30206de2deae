"""Tests the activation into the unit ball. Oracles: the printed formula at 60 digits, and exact rationals for every
norm.
"""

from __future__ import annotations

import math
import subprocess
import sys
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from common.codecs.ball import MAX_LENGTH, ball_activation, ball_radius
from common.errors import InvalidInput
from common.privacy.quantise import clip

DTYPES = [np.float16, np.float32, np.float64]


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from(DTYPES))
    width = 8 * np.dtype(dtype).itemsize
    wide = st.floats(allow_nan=False, allow_infinity=False, width=width)  # type: ignore[call-overload]
    usual = st.floats(-16, 16, width=width)  # type: ignore[call-overload]
    shape = st.tuples(st.integers(1, 4), st.integers(2, 40))
    return draw(hnp.arrays(dtype, shape, elements=draw(st.sampled_from([wide, usual]))))


def square(values: np.ndarray) -> Fraction:
    return sum((Fraction(float(v)) ** 2 for v in values), start=Fraction(0))


def printed(o: np.ndarray) -> list[mpmath.mpf]:
    """Return φ as the paper prints it, at 60 digits."""
    with mpmath.workdps(60):
        first, *rest = (mpmath.mpf(float(v)) for v in o)
        below = (mpmath.exp(-first * mpmath.sqrt(8 / mpmath.pi)) + 1) ** (mpmath.mpf(1) / len(rest))
        norm = mpmath.sqrt(mpmath.fsum(v**2 for v in rest))
        return [v / (below * norm) for v in rest]


@settings(max_examples=120)
@given(batch=rows())
@example(batch=np.full((1, 9), np.finfo(np.float64).max))
@example(batch=np.full((1, 9), np.finfo(np.float32).max, dtype=np.float32))
@example(batch=np.full((1, 9), np.finfo(np.float16).max, dtype=np.float16))
@example(batch=np.full((1, 9), 5e-324))
@example(batch=np.array([[1e308, 1.7e308, 5e-324]]))
@example(batch=np.array([[3e4, 6e-8, -6e-8, 6e-8]], dtype=np.float16))
def test_no_norm_ever_passes_one_and_no_argument_is_written_to(batch: np.ndarray) -> None:
    before = batch.copy()
    codes = ball_activation(batch)
    assert np.array_equal(batch, before)
    assert codes.dtype == batch.dtype
    assert codes.shape == (batch.shape[0], batch.shape[1] - 1)
    for o, code in zip(batch, codes, strict=True):
        assert square(code) <= 1  # exactly, in rationals
        wide = code.astype(np.float64)
        assert np.linalg.norm(wide) <= 1
        assert np.array_equal(clip(code, radius=1.0), wide)  # a clip at C = 1 finds nothing to do
        assert (wide * np.sign(o[1:].astype(np.float64)) >= 0).all()


@settings(max_examples=60)
@given(batch=rows())
def test_every_number_is_the_printed_formulas_to_a_unit_in_the_last_place(batch: np.ndarray) -> None:
    for o, code in zip(batch, ball_activation(batch), strict=True):
        if not o[1:].any():
            assert not code.any()
            continue
        units = 1 if o.dtype != np.float64 else code.size + 32
        for value, exact in zip(code, printed(o), strict=True):
            unit = float(np.spacing(np.abs(np.asarray(float(exact), dtype=o.dtype))))
            slack = abs(float(exact)) * (code.size + 32) * 2.0**-53  # float64 rounding before the norm is shortened
            assert abs(mpmath.mpf(float(value)) - exact) <= units * unit + slack


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 2, 128, 20_000])
def test_a_code_pushed_to_the_sphere_stays_within_it_and_is_not_short(dtype: type, length: int) -> None:
    o = np.random.default_rng(3).normal(size=length + 1).astype(dtype)
    o[0] = np.finfo(dtype).max
    total = square(ball_activation(o))
    rounding = 2 * float(np.finfo(dtype).eps) + 2 * math.sqrt(length) * float(np.finfo(dtype).smallest_subnormal)
    assert 1 - rounding - (length + 32) * 2.0**-51 < total <= 1


def test_a_vanishing_direction_is_the_zero_code_whatever_the_distance() -> None:
    for dtype in DTYPES:
        for first in (0.0, 1.0, -1.0, float(np.finfo(dtype).max)):
            o = np.array([first, 0.0, -0.0, 0.0], dtype=dtype)
            code = ball_activation(o)
            assert code.dtype == dtype
            assert not code.any()


def test_rows_of_a_batch_do_not_touch_each_other() -> None:
    batch = np.random.default_rng(4).normal(size=(3, 5, 8))
    codes = ball_activation(batch)
    assert codes.shape == (3, 5, 7)
    for index in np.ndindex(3, 5):
        assert np.array_equal(codes[index], ball_activation(batch[index]))
    assert ball_activation(np.zeros((0, 4), dtype=np.float32)).shape == (0, 3)


@settings(max_examples=50)
@given(o=hnp.arrays(np.float64, 6, elements=st.floats(-30, 30)), power=st.integers(-900, 900))
def test_the_direction_alone_decides_the_direction(o: np.ndarray, power: int) -> None:
    if np.abs(o[1:]).min() < 1e-12:
        return
    scaled = o.copy()
    scaled[1:] *= 2.0**power
    assert np.array_equal(ball_activation(scaled), ball_activation(o))


def test_one_input_of_direction_is_a_sign() -> None:
    assert ball_activation(np.array([0.0, 3.0])) == pytest.approx([0.5])
    assert ball_activation(np.array([0.0, -1e-300])) == pytest.approx([-0.5])


@pytest.mark.parametrize("length", [1, 3, 512, MAX_LENGTH])
def test_the_radius_rises_from_nothing_to_one_without_overflow(length: int) -> None:
    first = np.concatenate([[-1.7e308, -1e6], np.linspace(-800, 800, 4001), [1e6, 1.7e308]])
    radius = ball_radius(first, length=length)
    assert (np.diff(radius) >= 0).all()
    assert (radius[0], radius[-1]) == (0.0, 1.0)
    assert ball_radius(np.zeros(1), length=length) == pytest.approx(0.5 ** (1 / length), rel=1e-15)
    with mpmath.workdps(40):
        for o in (-700.0, -3.0, 0.25, 12.0, 30.0):
            exact = (mpmath.exp(-o * mpmath.sqrt(8 / mpmath.pi)) + 1) ** (-mpmath.mpf(1) / length)
            assert float(ball_radius(np.array(o), length=length)) == pytest.approx(float(exact), rel=1e-12)


def test_a_framework_twin_is_the_two_documented_lines() -> None:
    torch = pytest.importorskip("torch")
    o = torch.tensor(np.random.default_rng(5).normal(size=(64, 17)), requires_grad=True)
    radius = torch.exp(torch.nn.functional.logsigmoid(math.sqrt(8 / math.pi) * o[:, :1]) / 16)
    w = o[:, 1:] / o[:, 1:].abs().amax(dim=1, keepdim=True)
    twin = radius * w / w.norm(dim=1, keepdim=True)
    np.testing.assert_allclose(ball_activation(o.detach().numpy()), twin.detach().numpy(), rtol=1e-13)
    twin.sum().backward()
    assert torch.isfinite(o.grad).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 2])
def test_what_is_not_finite_is_refused_without_being_quoted(bad: float, dtype: type, place: int) -> None:
    o = np.full(4, 0.123456, dtype=dtype)
    o[place] = bad
    with pytest.raises(InvalidInput) as refusal:
        ball_activation(o)
    assert "0.123" not in str(refusal.value)
    with pytest.raises(InvalidInput):
        ball_radius(np.array([bad]), length=3)


@pytest.mark.parametrize(
    "bad", [np.zeros(1), np.zeros((3, 0)), np.float64(1.0), np.zeros(4, dtype=int), [1.0, 2.0], None, np.zeros(4, "g")]
)
def test_inputs_of_another_shape_or_type_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(InvalidInput):
        ball_activation(bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, math.nan, None, MAX_LENGTH + 1])
def test_nonsense_lengths_are_refused(bad: int) -> None:
    with pytest.raises(InvalidInput):
        ball_radius(np.zeros(2), length=bad)


@pytest.mark.slow
def test_it_needs_no_torch() -> None:
    code = "import sys, common.codecs.ball; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
