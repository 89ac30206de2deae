"""Tests that a mechanism's numbers fit every program that reads them."""

from __future__ import annotations

from fractions import Fraction

import pytest

from common.errors import InvalidInput
from common.privacy.mechanism import Mechanism, radius_int

UNWRITABLE = [Fraction(10**40), Fraction(2**60 + 1), Fraction(1, 2**128), Fraction(3**90, 2**100)]


@pytest.mark.parametrize("noise_std", UNWRITABLE)
def test_noise_whose_cost_could_not_be_written_down_is_refused_where_it_is_read(noise_std: Fraction) -> None:
    with pytest.raises(InvalidInput, match="noise standard deviation"):
        Mechanism(4, 65536, 1, noise_std)


@pytest.mark.parametrize(
    ("radius", "steps"),
    [(1.0, 65_536), (1.00001, 65_536), (0.99999, 65_535), (1.5, 98_304), (2.0**-16, 1), (1.9999 * 2.0**-16, 1)],
)
def test_a_clipping_norm_between_two_grid_steps_is_the_lower_one(radius: float, steps: int) -> None:
    """A code clipped to the grid's radius is never longer than the agreed norm C."""
    assert radius_int(radius) == steps
    assert Fraction(steps, 2**16) <= Fraction(radius)
