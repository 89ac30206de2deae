"""Tests that ε, δ and chances are rounded up when written, by less than one unit of the last digit."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import InvalidInput
from common.privacy.accounting import Guarantee
from common.privacy.calibration import calibrate, noise_multiplier
from common.privacy.figures import delta_text, epsilon_text, noise_text, percent_text, spent_text
from common.privacy.mechanism import Budget, Mechanism, Protection, Relation, Unit
from common.privacy.training import Neighbours, TrainingGuarantee

POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
USUAL = st.floats(min_value=1e-6, max_value=3000)
SHORT = st.builds(lambda number, power: float(f"{number}e{power}"), st.integers(1, 99_999), st.integers(-8, 3))
BESIDE_A_SHORT_DECIMAL = st.builds(lambda short, steps: short + steps * math.ulp(short), SHORT, st.integers(-3, 3))


def unit_of_the_last_digit(value: Fraction, digits: int) -> Fraction:
    """Return 10^(e − digits + 1) for 10^e ≤ value < 10^(e+1), by integers alone."""
    exponent = len(str(value.numerator)) - len(str(value.denominator))
    while Fraction(10) ** exponent > value:
        exponent -= 1
    while Fraction(10) ** (exponent + 1) <= value:
        exponent += 1
    return Fraction(10) ** (exponent - digits + 1)


@given(POSITIVE | USUAL, st.integers(1, 9))
@example(8.00000005, 4)
@example(9.9999, 4)
@example(0.1, 4)
@example(5e-324, 4)
@example(1.7976931348623157e308, 4)
def test_a_written_epsilon_is_never_below_the_true_one_and_no_further_above_than_its_last_digit(
    epsilon: float, digits: int
) -> None:
    text = epsilon_text(epsilon, digits)
    assert float(text) >= epsilon
    written, true = Fraction(text), Fraction(repr(epsilon))  # the shortest decimal that names the float64
    step = unit_of_the_last_digit(true, digits)
    assert written >= true
    assert written - step < true  # no smaller multiple of the last digit is an upper bound
    assert (written / step).denominator == 1


@given(POSITIVE | USUAL | BESIDE_A_SHORT_DECIMAL, st.integers(1, 15))
@example(1.1, 4)
@example(math.nextafter(1.1, 2.0), 4)
@example(math.nextafter(1.1, 1.0), 4)
@example(2.675, 3)
@example(5e-324, 1)
def test_a_written_epsilon_is_what_was_typed_or_not_below_the_exact_value_of_the_float(
    epsilon: float, digits: int
) -> None:
    """As rationals, 1.1 prints as it was typed. Its two neighbours, which nobody types, are rounded up exactly."""
    written, true, typed = Fraction(epsilon_text(epsilon, digits)), Fraction(epsilon), Decimal(repr(epsilon))
    if len(typed.normalize().as_tuple().digits) <= digits:
        assert written == Fraction(typed)
        return
    step = unit_of_the_last_digit(true, digits)
    assert written - step < true <= written
    assert (written / step).denominator == 1


@pytest.mark.parametrize(
    ("epsilon", "text"),
    [
        (8.0, "8"),
        (8, "8"),
        (8.00000005, "8.001"),
        (math.nextafter(8.0, 9.0), "8.001"),
        (3.30134, "3.302"),
        (7.9999, "8"),
        (7.999, "7.999"),
        (0.0123451, "0.01235"),
        (1234.2, "1235"),
        (20000.0, "20000"),
        (123456.0, "123500"),
        (0.0, "0"),
        (math.inf, "∞"),
        (1.1, "1.1"),
        (0.1, "0.1"),
        (1e-9, "1e-9"),
        (1e300, "1e+300"),
    ],
)
def test_epsilons_read_as_people_write_them(epsilon: float, text: str) -> None:
    assert epsilon_text(epsilon) == text


@pytest.mark.parametrize("write", [epsilon_text, delta_text, percent_text, noise_text])
@pytest.mark.parametrize("value", [math.nan, -1.0, -math.inf, True, "8", None])
def test_what_is_no_loss_of_privacy_is_not_written(write: object, value: object) -> None:
    with pytest.raises(InvalidInput):
        write(value)  # type: ignore[operator]


@given(st.floats(min_value=0, max_value=1, exclude_min=True))
@example(1e-5)
@example(1.0000001e-5)
@example(0.1)
def test_a_written_delta_reads_back_as_no_smaller_a_number(delta: float) -> None:
    text = delta_text(delta)
    assert float(text) >= delta
    assert Fraction(text) - unit_of_the_last_digit(Fraction(delta), 3) < Fraction(delta)


def test_deltas_read_as_they_were_typed() -> None:
    assert [delta_text(value) for value in (1e-3, 1e-5, 2.5e-6, 0.05)] == ["0.001", "1e-05", "2.5e-06", "0.05"]
    assert [delta_text(value) for value in (1.0001e-5, 0.0010001)] == ["1.01e-05", "0.00101"]


@given(POSITIVE | USUAL | st.fractions(min_value=Fraction(1, 10**9), max_value=10**9), st.integers(1, 9))
@example(0.1, 4)
@example(1.2005499, 5)
@example(8.0, 4)
@example(5e-324, 4)
@example(Fraction(2, 3), 6)
def test_written_noise_is_never_above_what_is_drawn_and_no_further_below_than_its_last_digit(
    noise: float | Fraction, digits: int
) -> None:
    """Floats and rationals are taken exactly: 0.1 as a float64 is above a tenth, 0.3 below three tenths."""
    written, true = Fraction(noise_text(noise, digits)), Fraction(noise)
    step = unit_of_the_last_digit(true, digits)
    assert written <= true < written + step
    assert (written / step).denominator == 1


def test_noise_reads_as_people_write_it() -> None:
    said = [noise_text(value, 5) for value in (1.2005499, 0.5, 3.0, 0.82307877, 123456.0, 0.3)]
    assert said == ["1.2005", "0.5", "3", "0.82307", "123450", "0.29999"]
    with pytest.raises(InvalidInput):
        noise_text(math.inf)


def test_a_studys_noise_multiplier_is_never_more_than_its_sigma_over_delta() -> None:
    """In rationals, σ is on the integer sum, and Δ = 2·m·R if one hospital may be replaced by any other."""
    for epsilon, queries, voters in product((0.5, 1.1, 3.3, 8.0), (1, 7, 80), (1, 3)):
        protection = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
        noise_std = calibrate(
            budget=Budget(epsilon=epsilon, delta=1e-5),
            accountant="exact",
            queries=queries,
            radius_int=65_536,
            voters_per_site=voters,
            protection=protection,
        )
        z = noise_multiplier(Mechanism(4, 65_536, voters, noise_std), protection)
        assert Fraction(noise_text(z, 15)) <= Fraction(z) <= noise_std / (2 * voters * 65_536)


@given(st.floats(min_value=0, max_value=1))
@example(0.9999999)
@example(0.99994)
@example(0.5)
def test_a_chance_is_never_written_below_what_it_is(share: float) -> None:
    written = Fraction(percent_text(share).removesuffix(" %"))
    assert Fraction(100) >= written >= 100 * Fraction(share)
    assert written - 100 * Fraction(share) < Fraction(1, 10)


def test_chances_near_certainty_keep_the_digits_that_tell_them_from_it() -> None:
    shares = (0.5, 0.85121, 0.99989, 0.999989, 1 - 1e-9)
    assert [percent_text(share) for share in shares] == ["50 %", "85.2 %", "99.99 %", "99.999 %", "100 %"]
    with pytest.raises(InvalidInput):
        percent_text(1.01)


@given(USUAL)
def test_every_guarantee_says_its_epsilon_rounded_up(epsilon: float) -> None:
    for said in (
        Guarantee(epsilon, 1e-5, "exact", Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)),
        TrainingGuarantee(epsilon, 1e-5, Neighbours.ADD_REMOVE),
    ):
        assert Fraction(str(said).split()[2]) >= Fraction(repr(epsilon))


@given(st.floats(min_value=0, max_value=1e6, allow_nan=False))
@example(0.27501)
@example(1.5325)
def test_a_written_share_of_a_budget_is_never_below_the_true_one_also_past_the_budget(share: float) -> None:
    text = spent_text(share)
    written = Fraction(text.removesuffix(" %"))
    assert 0 <= written - 100 * Fraction(share) < Fraction(1, 100)
