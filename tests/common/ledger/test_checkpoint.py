"""A checkpoint spares the replay and changes nothing: what does not hold is ignored, and `verify` replays every row."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.canonical import canonical_bytes
from common.errors import LedgerCorrupt
from common.ledger.base_ledger import OpenLedger
from common.ledger.checkpoint import Checkpoint, checkpoint_path
from common.ledger.keys import public_hex
from common.ledger.server_state import Books
from server.ledger import server_file
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import SITES, World, make_mechanism, make_query, make_study

MECHANISM = make_mechanism(room_for=40)


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_file, "CHECKPOINT_ROWS", 1)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World.create(tmp_path)
    other = world.ledger.register_study(make_study("second"))
    for number in range(6):
        world.release([make_query(number, MECHANISM)], sites=SITES if number % 3 else SITES[:2], batch=f"b{number}")
    world.release([make_query(0, MECHANISM)], study=other, batch="again")
    world.ledger.note("a remark")
    yield world
    world.ledger.close()


def held(books: Books) -> dict[str, Any]:
    found = {name: value for name, value in vars(books).items() if name not in ("_undo", "_before", "_roster")}
    return found | {"releases": dict(books.releases.by_row()), "of_queries": list(books.releases.of_queries())}


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows that an opening replays."""
    rows: list[int] = []
    real = OpenLedger._catch_up

    def catch_up(ledger: Any) -> None:
        before = ledger._books.row_count
        real(ledger)
        rows.extend(range(before + 1, ledger._books.row_count + 1))

    monkeypatch.setattr(OpenLedger, "_catch_up", catch_up)
    return rows


def test_a_ledger_opened_from_its_checkpoint_knows_all_that_a_replay_knows(world: World, replayed: list[int]) -> None:
    world.ledger.close()
    with Ledger.open(world.path) as short:
        assert replayed == []
        checkpoint_path(world.path).unlink()
        with Ledger.open(world.path) as whole:
            assert replayed == list(range(1, whole.row_count + 1))
            assert held(short._books) == held(whole._books)
            assert (
                short.answers(world.study.id)[0].noisy_sum.tolist()
                == whole.answers(world.study.id)[0].noisy_sum.tolist()
            )
            assert short.head() == whole.head()
    pools = {id(short._books.spent(f"{site}-mri")) for site in SITES[:2]}
    assert len(pools) == 1, "pools that stand alike share one sum"


def test_rows_after_a_checkpoint_are_replayed_and_go_on_from_it(world: World, replayed: list[int]) -> None:
    world.ledger.close()
    before = checkpoint_path(world.path).read_bytes()
    with Ledger.open(world.path, signing_key=world.key) as ledger:
        world.ledger = ledger
        last = ledger.row_count
        receipts = ledger.site_receipts("aachen")
        world.release([make_query(7, MECHANISM)], batch="after")
        assert [one.before for one in ledger.site_receipts("aachen")] == [
            *(one.before for one in receipts),
            receipts[-1].after,
        ]
        spent = ledger.spent("aachen-mri")
    checkpoint_path(world.path).write_bytes(before)  # a stale one is as good, and more is replayed
    replayed.clear()
    with Ledger.open(world.path) as ledger:
        assert replayed == [last + 1]
        assert ledger.spent("aachen-mri") == spent
    assert verify(world.path).ok


def _changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path, World], None]:
    def forge(path: Path, world: World) -> None:
        document = json.loads(path.read_text())
        change(document)
        path.write_bytes(canonical_bytes(document))

    return forge


def _resigned(path: Path, world: World) -> None:
    """By a key of another's, with nothing spent."""
    Checkpoint.load(path)
    key = Ed25519PrivateKey.generate()
    found = Checkpoint.load(path)
    forged = replace(found, pools={}, studies={}, head=replace(found.head, public_key=public_hex(key)))
    forged.signed(key).save(path)


def _of_another_ledger(path: Path, world: World) -> None:
    """Of a ledger with the same key."""
    folder = path.parent / "other"
    folder.mkdir()
    other = World.create(folder)
    other.ledger.close()
    with Ledger.create(folder / "l.sqlite", signing_key=world.key) as ledger:
        ledger.note("nothing else")
    path.write_bytes(checkpoint_path(folder / "l.sqlite").read_bytes())


FORGED = {
    "fewer releases spent": _changed(lambda d: d["pools"]["aachen-mri"].update(releases=0)),
    "nothing spent": _changed(lambda d: d.update(pools={}, studies={})),
    "a charge less": _changed(lambda d: d.update(charges=d["charges"][:-9], hashes=d["hashes"][:-192])),
    "another row": _changed(lambda d: d["head"].update(seq=d["head"]["seq"] - 1)),
    "a row that is not there": _changed(lambda d: d["head"].update(seq=d["head"]["seq"] + 9)),
    "a declaration less": _changed(lambda d: d.update(declared=d["declared"][:-1])),
    "no signature": _changed(lambda d: d.update(signature="")),
    "a later schema": _changed(lambda d: d.update(schema=2)),
    "columns that do not fit": _changed(lambda d: d["charges"].append(1)),
    "signed by another key": _resigned,
    "of another ledger": _of_another_ledger,
    "torn": lambda path, world: path.write_bytes(path.read_bytes()[:-20]),
    "empty": lambda path, world: path.write_bytes(b""),
    "not text": lambda path, world: path.write_bytes(b"\xff\x00"),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_checkpoint_that_does_not_hold_is_ignored_and_every_row_replayed(
    world: World, replayed: list[int], forged: str
) -> None:
    world.ledger.close()
    path = checkpoint_path(world.path)
    with Ledger.open(world.path) as ledger:
        spent, rows = {site: ledger.spent(f"{site}-mri") for site in SITES}, ledger.row_count
    FORGED[forged](path, world)
    replayed.clear()
    assert not verify(world.path).ok
    with Ledger.open(world.path) as ledger:
        assert replayed == list(range(1, rows + 1))
        assert {site: ledger.spent(f"{site}-mri") for site in SITES} == spent
    with Ledger.open(world.path, signing_key=world.key):
        pass
    assert verify(world.path).ok, "a writer replaces what did not hold"


def test_a_checkpoint_of_rows_that_a_restored_copy_has_lost_is_ignored_and_verify_finds_it(world: World) -> None:
    copy = sqlite3.connect(world.path.parent / "older.sqlite")
    source = sqlite3.connect(world.path)
    source.backup(copy)
    copy.close()
    source.close()
    world.release([make_query(8, MECHANISM)], batch="lost")
    world.ledger.close()
    for suffix in ("", "-wal", "-shm"):
        Path(f"{world.path}{suffix}").unlink(missing_ok=True)
    (world.path.parent / "older.sqlite").rename(world.path)
    assert any("cut off" in problem.what for problem in verify(world.path).problems)
    with pytest.raises(LedgerCorrupt, match="older copy"):
        Ledger.open(world.path, signing_key=world.key)
    with Ledger.open(world.path, signing_key=world.key, restored=True) as ledger:
        ledger.recover([])
        assert ledger.lost() != {}
    with Ledger.open(world.path, signing_key=world.key) as ledger:
        assert not checkpoint_path(world.path).exists(), "none is made of a recovered ledger"
    assert verify(world.path).ok


@pytest.mark.parametrize("column", ["body", "time_utc", "hash"])
def test_a_row_changed_behind_a_checkpoint_is_found_by_verify_and_when_it_is_read(world: World, column: str) -> None:
    """The totals are the signed ones: they do not follow the changed row."""
    with sqlite3.connect(world.path) as other:
        rows = [seq for (seq,) in other.execute("SELECT seq FROM rows WHERE kind = 'release' ORDER BY seq")]
    spent = world.ledger.spent("aachen-mri")
    world.ledger.close()
    with sqlite3.connect(world.path) as other:
        other.execute("DROP TRIGGER rows_no_update")
        other.execute(f"UPDATE rows SET {column} = replace({column}, '1', '2') WHERE seq = ?", (rows[2],))
    assert not verify(world.path).ok
    with Ledger.open(world.path, signing_key=world.key) as ledger:
        assert ledger.spent("aachen-mri") == spent
        with pytest.raises(LedgerCorrupt):
            ledger.answer(make_query(2, MECHANISM).id)
        with pytest.raises(LedgerCorrupt):
            ledger.site_receipts("aachen")


def test_a_pool_declared_otherwise_behind_a_checkpoint_refuses_the_ledger(world: World) -> None:
    world.ledger.close()
    with sqlite3.connect(world.path) as other:
        other.execute("DROP TRIGGER rows_no_update")
        other.execute("UPDATE rows SET body = replace(body, 'bergen-mri', 'bergen-mrx') WHERE kind = 'pool'")
    with pytest.raises(LedgerCorrupt):
        Ledger.open(world.path)


def test_a_checkpoint_survives_a_change_of_key_and_holds_no_answer(world: World, replayed: list[int]) -> None:
    world.ledger.close()
    text = checkpoint_path(world.path).read_text()
    new = Ed25519PrivateKey.generate()
    with Ledger.open(world.path, signing_key=world.key) as ledger:
        ledger.rotate_key(new)
        last = ledger.row_count
        assert not any(str(answer.noisy_sum.tobytes().hex()) in text for answer in ledger.answers(world.study.id))
    assert checkpoint_path(world.path).stat().st_mode & 0o077 == 0
    checkpoint_path(world.path).write_text(text)
    replayed.clear()
    with Ledger.open(world.path, signing_key=new):
        assert replayed == [last]
    assert verify(world.path).ok
