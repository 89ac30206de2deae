"""Random lives of a server and its sites: however their ledgers are put back, no charge is below the noise released."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.ledger.server_file import ServerFile
from tests.restores.schedules import Life

pytestmark = pytest.mark.slow

SEEDS = range(200 if os.environ.get("CONSILIUM_RESTORES") == "all" else 4)


@pytest.mark.parametrize("standings", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_life_ends_with_a_charge_below_what_was_drawn(tmp_path: Path, seed: int, standings: bool) -> None:
    """With ``standings`` these are put back too, from the ledger's moment or another."""
    Life(tmp_path / "life", seed, standings=standings).live()


def test_a_recovery_that_charges_receipts_alone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerFile, "_charge_lost", lambda *_: None)
    with pytest.raises(AssertionError, match="server: 4 charged to aachen for 6 draws"):
        Life(tmp_path / "life", 0, standings=False).live()
