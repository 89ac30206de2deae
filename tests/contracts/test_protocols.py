"""All query protocols keep one contract; another takes one file and one line."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.protocols import base
from common.protocols.base import Halves
from tests.contracts.protocol_contract import ProtocolContract
from tests.dashboard_study import QUERIES


class TestPerVolume(ProtocolContract):
    name, queries = "per-volume", QUERIES


class TestJoint(ProtocolContract):
    name, queries = "joint", 2
    rounds = 2


class TestAppearance(ProtocolContract):
    name, queries = "appearance", 2
    protocol = "appearance"


class TestAToyProtocolTakesOneFileAndOneLine(ProtocolContract):
    name, queries = "pairs", QUERIES // 2
    protocol = "pairs"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _registered(cls) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            toy = Halves("tests.contracts.toy_protocol:PairsSite", "tests.contracts.toy_protocol:Pairs")
            patch.setattr(base, "PROTOCOLS", {**base.PROTOCOLS, "pairs": toy})
            yield
