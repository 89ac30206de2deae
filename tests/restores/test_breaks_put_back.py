"""Tests that the restores find each former fault of a ledger's standing, when it is put back into the code."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from client.ledger.site_file import SiteFile
from common.ledger.base_ledger import OpenLedger
from common.ledger.rollback_guard import kept_standing
from common.ledger.rows import START, Position
from server.ledger.server_file import ServerFile
from tests.restores import server_life, site_life
from tests.restores.harness import Case, look_at

pytestmark = pytest.mark.slow

Patch = pytest.MonkeyPatch


def the_difference_now(patch: Patch) -> None:
    """Break: a recovery charges the present difference of the totals, and ignores what both drew since the fork."""

    def fork(ledger: Any, _standing: object) -> Position:
        last = ledger._chain.last
        return START if last is None else Position(last.seq, last.hash)

    patch.setattr(OpenLedger, "_fork", fork)


def charges_only(patch: Patch) -> None:
    """Break: the standing is written after charges, and after no other row."""
    kept = OpenLedger._keep_standing

    def keep(ledger: Any) -> None:
        books = ledger._books
        now = books.spent() if isinstance(ledger, SiteFile) else books.all_spent()
        if getattr(ledger, "charged", ()) != now:
            ledger.charged = now
            kept(ledger)

    def good(ledger: Any) -> None:
        if kept_standing(ledger._chain.path) is None:
            kept(ledger)
        ledger.charged = ledger._books.spent() if isinstance(ledger, SiteFile) else ledger._books.all_spent()

    patch.setattr(OpenLedger, "_keep_standing", keep)
    patch.setattr(OpenLedger, "_make_good_standing", good)


def withdrawals_forgotten(patch: Patch) -> None:
    patch.setattr(SiteFile, "_repeat", lambda *_: None)


def no_standing_is_no_matter(patch: Patch) -> None:
    for kind in (SiteFile, ServerFile):
        patch.setattr(kind, "forgotten", lambda ledger, known=kind.forgotten: _unless_missing(known(ledger)))


def _unless_missing(problem: str | None) -> str | None:
    return None if problem and "missing" in problem else problem


def any_ledger_is_the_newest(patch: Patch) -> None:
    patch.setattr(OpenLedger, "covers", lambda *_: True)


def a_status_is_sure(patch: Patch) -> None:
    """Break: a status does not say ``at least`` although the ledger is in doubt."""
    patch.setattr(SiteFile, "doubt", lambda _: None)


def server(folder: Path, *chosen: Case) -> None:
    moments = server_life.live(folder)
    look = partial(server_life.look, folder / "again", moments)
    look_at(iter(chosen), server_life.PARTS, moments, folder / "again" / "study", look)


def site(folder: Path, *chosen: Case) -> None:
    world, moments = site_life.live(folder)
    look = partial(site_life.look, folder / "again", world, moments)
    look_at(iter(chosen), site_life.PARTS, moments, folder / "again" / "site", look)


MACHINE = ("ledger", "standing")


@pytest.mark.parametrize(
    ("put_back", "live", "case", "says"),
    [
        (the_difference_now, server, Case(MACHINE, 1, 2), "charged"),
        (the_difference_now, site, Case(MACHINE, 1, 2), "less is charged"),
        (charges_only, site, Case(("ledger",), 2, 3), "a veto vanished"),
        (charges_only, site, Case(("ledger",), 3, 4), "a patient came back"),
        (charges_only, site, Case(("ledger",), 6, 7), "a veto vanished"),
        (withdrawals_forgotten, site, Case(("ledger",), 2, 4), "a patient came back"),
        (no_standing_is_no_matter, server, Case(("ledger",), 1, 2, ("standing",)), "are known of"),
        (no_standing_is_no_matter, site, Case(("ledger",), 1, 2, ("standing",)), "site status prints less"),
        (any_ledger_is_the_newest, server, Case(("ledger",), 1, 2), "charged"),
        (any_ledger_is_the_newest, site, Case(("ledger",), 1, 2), "site status prints less"),
        (a_status_is_sure, site, Case(("ledger",), 1, 2), "site status prints less"),
        (a_status_is_sure, site, Case(MACHINE, 1, 6), "site status prints less"),
    ],
)
def test_a_former_fault_that_is_put_back_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put_back: Any, live: Any, case: Case, says: str
) -> None:
    (tmp_path / "sound").mkdir()
    (tmp_path / "broken").mkdir()
    live(tmp_path / "sound", case)
    put_back(monkeypatch)
    with pytest.raises(AssertionError, match=says):
        live(tmp_path / "broken", case)
