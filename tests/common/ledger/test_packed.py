"""What ledgers' books keep of a query is small and is what its rows said: nothing else is found, and nothing lost."""

from __future__ import annotations

import hashlib
import random
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.canonical import sha256_bytes
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.packed import Column, Digests, Rows
from common.ledger.release_table import ReleaseTable, Terms
from common.ledger.releases import Answer
from common.ledger.rows import Row, body_digest, row_hash
from tests.common.ledger.ledger_world import (
    MECHANISM,
    Caps,
    Hospital,
    World,
    make_mechanism,
    make_study,
    queries,
    roster_of,
)

ROOM = make_mechanism(room_for=5_000)
CODE = np.array([3, -4, 0, 12], dtype=np.int64)
OPEN = Terms("study", "batch", MECHANISM, roster_of(), 3)


def hashed(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def answer(seq: int) -> Answer:
    return Answer(seq, hashed(-seq), hashed(-2 * seq))


# --- the tables, beside a dict


def test_a_table_of_hashes_finds_what_was_added_and_nothing_else() -> None:
    table, known, rng = Digests(), dict[str, int](), random.Random(5)
    for _ in range(3_000):
        if known and rng.random() < 0.3:
            del known[next(reversed(known))]
            table.drop_last()
        text = hashed(rng.randrange(1_500))
        assert table.add(text) == known.setdefault(text, len(known))
    assert len(table) == len(known) > 300
    assert [table[place] for place in range(len(table))] == list(known)
    assert all(table.find(hashed(number)) == known.get(hashed(number)) for number in range(1_500))


@pytest.mark.parametrize("other", [str.upper, lambda text: text[:-1], lambda text: f" {text[1:]}", lambda _: "none"])
def test_another_spelling_of_a_hash_is_not_found_and_not_added(other: Callable[[str], str]) -> None:
    table = Digests()
    table.add(hashed(1))
    assert table.find(other(hashed(1))) is None
    with pytest.raises(InvalidInput):
        table.add(other(hashed(1)))


def test_a_column_has_numbers_for_some_of_its_hashes() -> None:
    table = Digests()
    for number in range(9):
        table.add(hashed(number))
    column = Column(table)
    for number in (6, 2, 6):
        column[hashed(number)] = number + 1
    assert dict(column) == {hashed(2): 3, hashed(6): 7}
    assert len(column) == 2
    assert list(column.without()) == [hashed(number) for number in (0, 1, 3, 4, 5, 7, 8)]
    with pytest.raises(KeyError):
        column[hashed(9)] = 1


def test_charges_that_are_undone_leave_what_was_there_before() -> None:
    """Draws of a sealed sum, charged again and ended, with and without the undone ones."""
    table = ReleaseTable()
    for number in range(40):
        table.add(number + 1, hashed(number), OPEN._replace(draw=1), answer=None)
    table.end(hashed(3), answer(41))
    before = dict(table.by_row()), list(table.of_queries()), table.lost_in("study")
    table.mark()
    table.end(hashed(4), None)
    table.end(hashed(5), answer(42))
    for number in range(20, 60):
        table.add(number + 30, hashed(number), OPEN._replace(draw=2), answer=None)
    assert [table.row_of(hashed(20), draw) for draw in (None, 2, 1, 3)] == [50, 50, 21, None]
    assert table.last_draw(hashed(20)) == 2
    assert table.lost_in("study") == 1 + 20
    assert not table.answered(hashed(20))
    assert table.answered(hashed(5))
    table.undo()
    assert (dict(table.by_row()), list(table.of_queries()), table.lost_in("study")) == before
    assert [one.query_id for one in table.open_in("study")] == [hashed(n) for n in range(40) if n != 3]
    assert hashed(50) not in table


# --- what a query costs


def kept(work: Callable[[int], object], *, early: int, late: int) -> float:
    """Bytes that ``work`` leaves in memory for each item from the first count to the second."""
    tracemalloc.start()
    try:
        work(early)
        before = tracemalloc.get_traced_memory()[0]
        work(late)
        return (tracemalloc.get_traced_memory()[0] - before) / (late - early)
    finally:
        tracemalloc.stop()


def test_a_query_costs_the_servers_books_less_than_two_hundred_bytes(tmp_path: Path) -> None:
    world, asked = World.create(tmp_path, study=make_study(planned_queries=5_000)), 0
    world.ledger._chain._db.execute("PRAGMA synchronous = OFF")

    def ask(count: int) -> None:
        nonlocal asked
        while asked < count:
            done = world.release(queries(*range(asked, asked + 100), mechanism=ROOM), batch=f"b{asked}")
            assert not done.refused
            world.answers.drawn.clear()
            asked += 100

    with world.ledger:
        assert kept(ask, early=300, late=1_500) < 200


def test_a_query_costs_a_sites_books_less_than_a_hundred_and_fifty_bytes(tmp_path: Path) -> None:
    study = make_study(planned_queries=5_000)
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
        assert kept(ask, early=200, late=1_000) < 150


# --- what was charged stays so


def test_many_queries_are_answered_as_before_and_cost_nothing_a_second_time_also_after_a_restart(
    tmp_path: Path,
) -> None:
    world = World.create(tmp_path, study=make_study(planned_queries=5_000))
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
    """By somebody who can write the file: the payload is another, and the row says so with a hash of its own."""
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
    altered(world.path, row, "server", query_id=asked[1].id, data=data, old=old)
    spent = world.ledger.spent("aachen-mri")
    for ask in (lambda: world.ledger.answer(asked[1].id), lambda: world.release(asked, batch="again")):
        with pytest.raises(LedgerCorrupt):
            ask()
    assert world.ledger.spent("aachen-mri") == spent
    assert len(world.answers.drawn) == 4


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Hospital]:
    hospital = Hospital(tmp_path / "site-ledger.sqlite", make_study())
    yield hospital
    hospital.ledger.close()


def test_a_code_whose_row_was_altered_with_it_is_refused_while_the_ledger_is_open(site: Hospital) -> None:
    asked = queries(*range(4))
    site.ledger.reserve(site.study.id, asked)
    for query in asked:
        assert site.ledger.store_code(query.id, CODE)
    row = [row for row in site.ledger.rows() if row.kind == "code"][1]
    data = (CODE + 1).astype("<i8").tobytes()
    altered(site.path, row, "site", query_id=asked[1].id, data=data, old=sha256_bytes(CODE.astype("<i8").tobytes()))
    with pytest.raises(LedgerCorrupt, match="altered"):
        site.ledger.code(asked[1].id)
    other = site.ledger.code(asked[0].id)
    assert other is not None
    assert np.array_equal(other, CODE)
    with pytest.raises(LedgerCorrupt):
        site.ledger.store_code(asked[1].id, CODE + 1)


def test_a_row_is_known_by_its_number_and_its_hash() -> None:
    table = Digests()
    table.add(hashed(1))
    rows = Rows(table)
    entered, other = (Row(7, "", "code", "{}", hashed(0), hashed(number)) for number in (2, 3))
    rows.enter(hashed(1), entered)
    rows.check(hashed(1), entered)
    for wrong in (other, Row(8, "", "code", "{}", hashed(0), hashed(2))):
        with pytest.raises(LedgerCorrupt):
            rows.check(hashed(1), wrong)
