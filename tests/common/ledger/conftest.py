from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common.ledger.ledger_world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World.create(tmp_path)
    yield world
    world.ledger.close()
