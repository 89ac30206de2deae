"""Private strategies keep one contract; another takes one file and one line."""

from __future__ import annotations

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
