"""The terms of a demo: who adds the noise, and how many hospitals must answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.errors import InvalidInput
from consilium.demo.options import DemoOptions, Places
from consilium.demo.run import terms


@pytest.mark.parametrize(
    ("hospitals", "aggregation", "sealed", "quorum"),
    [(2, None, False, 2), (3, None, True, 3), (4, None, True, 3), (8, None, True, 5), (3, "open", False, 2)],
)
def test_a_demo_of_three_hospitals_or_more_trusts_no_operator_unless_it_says_so(
    hospitals: int, aggregation: str | None, sealed: bool, quorum: int
) -> None:
    privacy = terms(DemoOptions(aggregation=aggregation), Places(Path()), [], [15] * hospitals).privacy
    assert (privacy.sealed, privacy.quorum) == (sealed, quorum)


def test_a_sealed_demo_has_two_hospitals_beside_its_colluders() -> None:
    with pytest.raises(InvalidInput, match="hospitals of a sealed sum"):
        terms(DemoOptions(colluders=2), Places(Path()), [], [15] * 3)
