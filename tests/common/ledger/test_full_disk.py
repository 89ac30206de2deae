"""Tests a full disk: it is reported as full, nothing is charged, and the ledger can be used afterwards."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from common.errors import InvalidInput, LedgerCorrupt, StorageFailed
from common.ledger.keys import create_signing_key
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.common.ledger.full_disk import leave_log, no_byte_more
from tests.common.ledger.ledger_world import World, make_mechanism, make_query


def one_more(world: World, number: int) -> None:
    world.release([make_query(number, make_mechanism(room_for=100, dimension=512))], batch=f"b{number}")


def test_opening_a_ledger_on_a_full_disk_names_the_disk_and_the_remedy(world: World) -> None:
    path, key = world.path, world.key
    world.ledger.close()
    with (
        no_byte_more(),
        pytest.raises(StorageFailed, match=rf"ledger {path} .*disk is full.*nothing was charged.*free space"),
    ):
        Ledger.open(path, signing_key=key)
    with Ledger.open(path, signing_key=key):
        pass


def test_a_ledger_that_nobody_has_open_can_be_read_on_a_full_disk(world: World) -> None:
    path, rows = world.path, world.ledger.row_count
    world.ledger.close()
    with no_byte_more(), Ledger.open(path) as read:
        assert read.row_count == rows
    assert verify(path).ok


def test_a_ledger_whose_newest_rows_are_in_its_log_is_refused_on_a_full_disk_with_the_remedy(world: World) -> None:
    world.ledger.close()
    leave_log(world.path)
    with no_byte_more(), pytest.raises(StorageFailed, match=rf"ledger {world.path} .*disk is full.*free space"):
        Ledger.open(world.path)


def test_a_charge_that_finds_no_room_charges_nothing_and_goes_through_later(world: World) -> None:
    rows = world.ledger.row_count
    with no_byte_more(), pytest.raises(StorageFailed, match=f"ledger {world.path} .*free space"):
        one_more(world, 1)
    assert world.ledger.row_count == rows
    one_more(world, 1)
    assert world.ledger.row_count > rows
    assert verify(world.path).ok


def test_a_database_that_is_full_is_not_damaged_either(world: World) -> None:
    database = world.ledger._chain._db
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")

    def fill() -> None:
        for number in range(1, 60):
            one_more(world, number)

    with pytest.raises(StorageFailed, match="disk is full"):
        fill()
    database.execute("PRAGMA max_page_count = 1073741823")
    assert verify(world.path).ok


def test_a_damaged_file_is_still_called_damaged_and_one_out_of_reach_is_not(tmp_path: Path, world: World) -> None:
    world.ledger.close()
    torn = tmp_path / "torn.sqlite"
    torn.write_bytes(b"not a database at all" * 1000)
    with pytest.raises(LedgerCorrupt, match=f"{torn}.*damaged"):
        Ledger.open(torn)
    with pytest.raises(InvalidInput, match="does not exist"):
        Ledger.open(tmp_path / "none.sqlite")


def test_a_backup_that_finds_no_room_names_the_copys_disk_and_not_the_ledgers(world: World, tmp_path: Path) -> None:
    out = tmp_path / "elsewhere" / "copy.sqlite"
    out.parent.mkdir()
    with no_byte_more(), pytest.raises(StorageFailed, match=f"ledger {out} cannot be.*disk is full"):
        backup(world.path, out)
    assert not list(out.parent.iterdir())
    assert backup(world.path, out).ok


def test_a_key_that_finds_no_room_is_an_error_of_the_disk_that_names_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formerly the remedy was to check whether the user may write to the folder."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'$"):
        create_signing_key(tmp_path / "ledger.key")
    assert not list(tmp_path.iterdir())
