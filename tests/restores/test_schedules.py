"""Tests random histories of a server and its sites: no restore of their ledgers leaves a charge below the noise
released.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.ledger.site_state import SiteBooks
from server.ledger.server_file import ServerFile
from tests.restores.schedules import Life

pytestmark = pytest.mark.slow

SEEDS = range(200 if os.environ.get("CONSILIUM_RESTORES") == "all" else 4)


@pytest.mark.parametrize("standings", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_no_life_ends_with_a_charge_below_what_was_drawn(tmp_path: Path, seed: int, standings: bool) -> None:
    """With ``standings`` the standings are restored, too, from the ledger's moment or another."""
    Life(tmp_path / "life", seed, standings=standings).live()


@pytest.mark.parametrize("standings", [False, True])
@pytest.mark.parametrize("seed", SEEDS[: len(SEEDS) // 2])
def test_no_life_with_two_servers_ends_with_a_charge_below_what_was_drawn(
    tmp_path: Path, seed: int, standings: bool
) -> None:
    """Each of two studies has a server with a ledger of its own; the hospitals' pools and ledgers are the same."""
    Life(tmp_path / "life", seed, standings=standings, servers=2).live()


def test_a_recovery_that_charges_receipts_alone_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ServerFile, "_charge_lost", lambda *_: None)
    with pytest.raises(AssertionError, match="server: 2 charged to aachen for 4 draws"):
        Life(tmp_path / "life", 1, standings=False).live(20)


def test_a_site_that_counts_no_release_of_a_receipt_that_it_did_not_accept_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SiteBooks, "_release_aside", lambda *_: None)
    with pytest.raises(AssertionError, match="cadiz: 5 charged for 6 draws"):
        Life(tmp_path / "life", 408, standings=True).live(20)
