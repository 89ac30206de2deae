from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.common.ledger.ledger_world import Hospital, World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World.create(tmp_path)
    yield world
    world.ledger.close()


@pytest.fixture
def site(tmp_path: Path, world: World) -> Iterator[Hospital]:
    hospital = Hospital(tmp_path / "site-ledger.sqlite", world.study)
    yield hospital
    hospital.ledger.close()
