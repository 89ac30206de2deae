"""Tests that all query protocols keep one contract; adding another takes one file and one line."""

from __future__ import annotations

import pytest

from tests.contracts.protocol_contract import ProtocolContract


class TestPerVolume(ProtocolContract):
    name, queries, volumes = "per-volume", 4, 4


class TestJoint(ProtocolContract):
    name, queries = "joint", 2
    rounds = 2


@pytest.mark.slow
class TestAppearance(ProtocolContract):
    name, queries = "appearance", 2
    protocol = "appearance"
