"""A mechanism is numbers that every reader can hold."""

from __future__ import annotations

from fractions import Fraction

import pytest

from common.errors import InvalidInput
from common.privacy.mechanism import Mechanism

UNWRITABLE = [Fraction(10**40), Fraction(2**60 + 1), Fraction(1, 2**128), Fraction(3**90, 2**100)]


@pytest.mark.parametrize("noise_std", UNWRITABLE)
def test_noise_whose_cost_could_not_be_written_down_is_refused_where_it_is_read(noise_std: Fraction) -> None:
    with pytest.raises(InvalidInput, match="noise standard deviation"):
        Mechanism(4, 65536, 1, noise_std)
