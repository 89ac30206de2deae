"""Private strategies keep one contract; another takes one file and one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from client.training.private.settings import STRATEGIES
from tests.contracts.strategy_contract import StrategyContract


class TestDpSgd(StrategyContract):
    name = "dp-sgd"


class TestDpSgdWithAClipALayer(StrategyContract):
    name = "dp-sgd"
    per_layer = True


class TestDpBbbWithAClipALayer(StrategyContract):
    name = "dp-bbb"
    per_layer = True


class TestDpBbb(StrategyContract):
    name = "dp-bbb"


class TestAToyStrategyTakesOneFileAndOneLine(StrategyContract):
    name = "plain"

    @pytest.fixture(autouse=True)
    def _registered(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(STRATEGIES, "plain", "tests.contracts.toy_strategy:plain")
            yield
