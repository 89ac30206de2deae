"""Tests that the totals kept of each query need little memory and equal what the rows state."""

from __future__ import annotations

import gc
import hashlib
import sqlite3
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from common.canonical import sha256_bytes
from common.errors import LedgerCorrupt
from common.ledger import known_ledgers
from common.ledger.releases import AnswerRow, Release, Releases
from common.ledger.rows import Row, body_digest, row_hash
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import (
    MECHANISM,
    Caps,
    Hospital,
    World,
    ledger_study,
    make_mechanism,
    queries,
    roster_of,
)
from tests.worlds import receipts_of

ROOM = make_mechanism(room_for=5_000)
CODE = np.array([3, -4, 0, 12], dtype=np.int64)


def hashed(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def answer(seq: int) -> AnswerRow:
    return AnswerRow(seq, hashed(-seq), hashed(-2 * seq))


def draw(row: int, query: int, number: int) -> Release:
    return Release(row, "study", "batch", hashed(query), MECHANISM, roster_of(), 3, draw=number)


def test_charges_that_are_undone_leave_what_was_there_before() -> None:
    """Draws of a sealed sum are charged again and ended, with and without the charges that are undone."""
    books = Releases()
    for number in range(40):
        books.add(draw(number + 1, number, 1))
    books.end(hashed(3), answer(41))
    before = dict(books.by_row()), list(books.of_queries()), books.lost_in("study")
    books.mark()
    books.end(hashed(4), None)
    books.end(hashed(5), answer(42))
    for number in range(20, 60):
        books.add(draw(number + 30, number, 2))
    assert [books.row_of(hashed(20), drawn) for drawn in (None, 2, 1, 3)] == [50, 50, 21, None]
    assert books.last_draw(hashed(20)) == 2
    assert books.lost_in("study") == 1 + 20
    assert not books.answered(hashed(20))
    assert books.answered(hashed(5))
    assert books.at(50).query_id == hashed(20)
    with pytest.raises(KeyError):
        books.at(41)
    books.undo()
    assert (dict(books.by_row()), list(books.of_queries()), books.lost_in("study")) == before
    assert [one.query_id for one in books.open_in("study")] == [hashed(n) for n in range(40) if n != 3]
    assert hashed(50) not in books


# --- what a query costs


def kept(work: Callable[[int], object], *, early: int, late: int) -> float:
    """Return the bytes of memory that ``work`` keeps for each item between the two counts, without garbage."""
    sizes = []
    tracemalloc.start()
    try:
        for count in (early, late):
            work(count)
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return (sizes[1] - sizes[0]) / (late - early)


@pytest.mark.slow
def test_a_query_costs_the_servers_books_less_than_a_kilobyte(tmp_path: Path) -> None:
    world, asked = World.create(tmp_path, study=ledger_study(planned_queries=5_000)), 0
    world.ledger._chain._db.execute("PRAGMA synchronous = OFF")

    def ask(count: int) -> None:
        nonlocal asked
        while asked < count:
            done = world.release(queries(*range(asked, asked + 100), mechanism=ROOM), batch=f"b{asked}")
            assert not done.refused
            world.answers.drawn.clear()
            asked += 100

    with world.ledger:
        assert kept(ask, early=300, late=1_500) < 1_000


@pytest.mark.slow
def test_a_query_costs_a_sites_books_less_than_a_kilobyte(tmp_path: Path) -> None:
    study = ledger_study(planned_queries=5_000)
    site, asked = Hospital(tmp_path / "site-ledger.sqlite", study, caps=Caps(queries_per_day=5_000)), 0
    site.ledger._chain._db.execute("PRAGMA synchronous = OFF")

    def ask(count: int) -> None:
        nonlocal asked
        while asked < count:
            batch = queries(*range(asked, asked + 50), mechanism=ROOM)
            site.ledger.reserve(study.id, batch, ledger="e" * 32, sealing_key="b" * 64)
            for query in batch:
                site.ledger.store_code(query.id, CODE)
            asked += 50

    with site.ledger:
        assert kept(ask, early=200, late=1_000) < 1_000


@pytest.mark.slow
def test_old_receipts_cost_a_sites_books_no_more_than_the_queries_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_ledgers, "MAX_HELD", 10)
    study, asked = ledger_study(planned_queries=5_000), 0
    world = World.create(tmp_path / "world", study=study)
    site = Hospital(tmp_path / "site-ledger.sqlite", study, caps=Caps(queries_per_day=5_000))
    for ledger in (world.ledger, site.ledger):
        ledger._chain._db.execute("PRAGMA synchronous = OFF")

    def ask(count: int) -> None:
        nonlocal asked
        while asked < count:
            batch = queries(*range(asked, asked + 5), mechanism=ROOM)
            site.ledger.reserve(study.id, batch)
            assert not world.release(batch, batch=f"b{asked}").refused
            world.answers.drawn.clear()
            asked += 5

    with world.ledger, site.ledger:
        ask(600)
        receipts = receipts_of(world.ledger, "aachen")

        def accept(count: int) -> None:
            for receipt in receipts[:count]:  # receipts that it already has change nothing
                site.ledger.record_receipt(receipt, public_key=world.key.public_key())

        assert kept(accept, early=40, late=80) < 5 * 500


# --- charges stay


def test_many_queries_are_answered_as_before_and_cost_nothing_a_second_time_also_after_a_restart(
    tmp_path: Path,
) -> None:
    world = World.create(tmp_path, study=ledger_study(planned_queries=5_000))
    asked = queries(*range(300), mechanism=ROOM)
    first = [world.release(asked[at : at + 50], batch=f"b{at}").answers for at in range(0, 300, 50)]
    spent, rows = world.ledger.spent("aachen-mri"), world.ledger.row_count
    for _ in range(2):
        again = [world.release(asked[at : at + 50], batch="again").answers for at in range(0, 300, 50)]
        assert [one.noisy_sum.tolist() for batch in again for one in batch] == [
            one.noisy_sum.tolist() for batch in first for one in batch
        ]
        assert [one.row_hash for batch in again for one in batch] == [one.row_hash for batch in first for one in batch]
        assert (world.ledger.spent("aachen-mri"), world.ledger.row_count) == (spent, rows)
        assert len(world.answers.drawn) == 300
        world.reopen()
    world.ledger.close()


# --- a file that is altered under an open ledger


def altered(path: Path, row: Row, role: str, *, query_id: str, data: bytes, old: str) -> None:
    """Replace a payload as somebody who can write the file could, with a matching row and hash."""
    body = row.body.replace(old, sha256_bytes(data))
    assert body != row.body
    own = row_hash(
        role,
        seq=row.seq,
        time_utc=row.time_utc,
        kind=row.kind,
        body_sha256=body_digest(body),
        prev_hash=row.prev_hash,
    )
    table = {"server": "answers", "site": "codes"}[role]
    other = sqlite3.connect(path, isolation_level=None)
    for name in ("rows_no_update", f"{table}_no_update"):
        other.execute(f"DROP TRIGGER {name}")
    other.execute("UPDATE rows SET body = ?, hash = ? WHERE seq = ?", (body, own, row.seq))
    other.execute(f"UPDATE {table} SET data = ? WHERE query_id = ?", (data, query_id))
    other.close()


def test_an_answer_whose_row_was_altered_with_it_is_refused_while_the_ledger_is_open(world: World) -> None:
    asked = queries(*range(4))
    done = world.release(asked)
    row = next(row for row in world.ledger.rows() if row.seq == done.answers[1].seq)
    old = sha256_bytes(done.answers[1].noisy_sum.astype("<i8").tobytes())
    data = np.arange(4, dtype="<i8").tobytes()
    rows = len(list(world.ledger.rows()))
    altered(world.path, row, "server", query_id=asked[1].id, data=data, old=old)
    for ask in (lambda: world.ledger.answer(asked[1].id), lambda: world.release(asked, batch="again")):
        with pytest.raises(LedgerCorrupt):
            ask()
    assert len(list(world.ledger.rows())) == rows  # nothing was charged
    assert len(world.answers.drawn) == 4


def test_a_code_whose_row_was_altered_with_it_is_refused_while_the_ledger_is_open(site: Hospital) -> None:
    asked = queries(*range(4))
    site.ledger.reserve(site.study.id, asked)
    for query in asked:
        assert site.ledger.store_code(query.id, CODE)
    row = [row for row in site.ledger.rows() if row.kind == "code"][1]
    data = (CODE + 1).astype("<i8").tobytes()
    altered(site.path, row, "site", query_id=asked[1].id, data=data, old=sha256_bytes(CODE.astype("<i8").tobytes()))
    for query in (asked[1], asked[0]):  # other codes are refused too, because the file has changed
        with pytest.raises(LedgerCorrupt):
            site.ledger.code(query.id)
    with pytest.raises(LedgerCorrupt):
        site.ledger.store_code(asked[1].id, CODE + 1)


# --- a checkpoint, as versions before 0.3.0 wrote them


@pytest.mark.parametrize("content", [b"", b"not one", b'{"checkpoint":1,"head":{"seq":99}}'])
def test_a_ledger_with_a_checkpoint_of_an_earlier_version_opens_verifies_and_goes_on(
    world: World, content: bytes
) -> None:
    first = world.release(queries(0, 1))
    spent = world.ledger.spent("aachen-mri")
    world.ledger.close()
    beside = world.path.with_suffix(".checkpoint")
    beside.write_bytes(content)
    assert verify(world.path).ok
    with Ledger.open(world.path) as reader:
        assert reader.spent("aachen-mri") == spent
    assert beside.exists()  # a reader removes nothing
    world.reopen()
    assert not beside.exists()
    assert world.ledger.spent("aachen-mri") == spent
    assert [one.row_hash for one in world.release(queries(0, 1)).answers] == [one.row_hash for one in first.answers]
    world.release(queries(2), batch="b2")
    assert verify(world.path).ok
