"""Tests ``verify``: every change is noticed, and the first bad row is named."""

from __future__ import annotations

import random
import shutil
import sqlite3
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.canonical import sha256_bytes
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.charges import ReleaseRecord
from common.ledger.records import parse_body
from common.ledger.releases import ExceededLimit
from common.ledger.rows import SignedHead
from common.privacy.mechanism import QuerySpec
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import (
    World,
    check,
    ledger_study,
    make_mechanism,
    make_query,
    roster_of,
    tampered,
)

MECHANISM = make_mechanism(room_for=10)
TABLES = {
    "rows": ("seq", "time_utc", "kind", "body", "prev_hash", "hash"),
    "heads": ("seq", "hash", "public_key", "signature"),
    "answers": ("query_id", "seq", "data"),
}


@pytest.fixture
def finished(world: World) -> World:
    """Return a closed ledger: two studies, ten releases in three batches, a refusal, a reuse, a rotated key, a note."""
    world.release([make_query(n, MECHANISM) for n in range(4)])
    world.release([make_query(n, MECHANISM) for n in range(4, 9)], batch="b2")
    second = ledger_study("second")
    world.ledger.register_study(second)
    world.release([make_query(2, MECHANISM), make_query(20, MECHANISM)], batch="b3", study=second.id)
    world.release([make_query(21, MECHANISM)], batch="b4", study=second.id)
    world.ledger.note("seen by the privacy officer")
    world.key = Ed25519PrivateKey.generate()
    world.ledger.rotate_key(world.key)
    world.ledger.note("by the new key")
    world.ledger.close()
    return world


def contents(path: Path) -> list[object]:
    """Return everything stored, or the error raised by reading it."""
    connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    try:
        return [
            connection.execute(f"SELECT {', '.join(columns)} FROM {table} ORDER BY seq").fetchall()
            for table, columns in TABLES.items()
        ]
    finally:
        connection.close()


def test_an_untouched_ledger_verifies(finished: World) -> None:
    report = check(finished)
    assert report.ok, report.problems
    assert report.anchored
    assert (report.rows, report.payloads, report.role) == (21, 10, "server")
    assert report.kinds["release"] == 10
    assert report.kinds["reuse"] == 1
    assert report.kinds["refusal"] == 1
    assert report.head is not None
    assert report.head.seq == 21
    connection = sqlite3.connect(finished.path)
    assert report.signatures == connection.execute("SELECT count(*) FROM heads").fetchone()[0]
    connection.close()


def test_verifying_writes_nothing(finished: World) -> None:
    before = finished.path.read_bytes()
    check(finished)
    assert finished.path.read_bytes() == before
    assert [path.name for path in finished.path.parent.iterdir() if path.suffix != ".standing"] == ["ledger.sqlite"]


def test_verifying_works_while_the_ledger_is_being_written(world: World) -> None:
    world.release([make_query(1, MECHANISM)])
    assert check(world).ok
    world.release([make_query(2, MECHANISM)], batch="b2")
    assert check(world).rows == 7


def test_totals_are_recomputed_by_hand(finished: World) -> None:
    """The oracle reads only the rows' JSON and shares no code with the ledger."""
    import json

    total: dict[str, Fraction] = {}
    connection = sqlite3.connect(finished.path)
    for (body,) in connection.execute("SELECT body FROM rows WHERE kind = 'release'"):
        release = json.loads(body)
        mechanism = release["query"]["mechanism"]
        top, bottom = (int(part) for part in mechanism["noise_std"].split("/"))
        for _site, pool in release["roster"]:
            ratio = Fraction(2 * mechanism["radius_int"] * mechanism["voters_per_site"] * bottom, top)
            total[pool] = total.get(pool, Fraction(0)) + ratio**2
    connection.close()
    with Ledger.open(finished.path) as ledger:
        assert {pool.pool: ledger.spent(pool.pool).mu_squared for pool in ledger.pools()} == total


@pytest.mark.slow
def test_every_change_to_any_stored_value_is_detected(finished: World) -> None:
    """Every column of every row of every table is changed in three ways: one bit, one character less, another row's
    value.
    """
    original, tried = contents(finished.path), 0
    connection = sqlite3.connect(finished.path)
    keys = {table: [seq for (seq,) in connection.execute(f"SELECT seq FROM {table}")] for table in TABLES}
    connection.close()
    for table, columns in TABLES.items():
        for column in columns:
            for seq in keys[table]:
                for change in ("flip", "cut", "swap"):
                    path = tampered(finished, lambda db, t=table, c=column, s=seq, h=change: _change(db, t, c, s, h))
                    if contents(path) == original:
                        continue  # two rows of a kind had the same value
                    report = check(finished, path)
                    assert not report.ok, (table, column, seq, change)
                    assert report.first_bad_row is not None
                    # A changed row number leaves a gap at the old one, or a surplus row beyond the end.
                    assert report.first_bad_row <= seq or column == "seq", (table, column, seq, change)
                    tried += 1
    print(f"{tried} changed values, all detected")
    assert tried > 450


def _change(db: sqlite3.Connection, table: str, column: str, seq: int, change: str) -> None:
    db.execute("PRAGMA foreign_keys = OFF")
    value = db.execute(f"SELECT {column} FROM {table} WHERE seq = ?", (seq,)).fetchone()[0]
    if change == "swap":
        other = db.execute(f"SELECT seq, {column} FROM {table} WHERE seq != ? ORDER BY seq LIMIT 1", (seq,)).fetchone()
        db.execute("PRAGMA writable_schema = OFF")
        unique = 9_999_999 if column == "seq" else (b"x" if column == "data" else "x" * 64)
        db.execute(f"UPDATE {table} SET {column} = ? WHERE seq = ?", (unique, seq))
        spot = 9_999_999 if column == "seq" else seq
        db.execute(f"UPDATE {table} SET {column} = ? WHERE seq = ?", (value, other[0]))
        db.execute(f"UPDATE {table} SET {column} = ? WHERE seq = ?", (other[1], spot))
        return
    new: object
    if column == "seq":
        new = value + 1000 if change == "flip" else -value
    elif column == "data":
        new = bytes([value[0] ^ 1]) + value[1:] if change == "flip" else value[:-1]
    else:
        at = len(value) // 2
        new = value[:at] + chr(ord(value[at]) ^ 1) + value[at + 1 :] if change == "flip" else value[:-1]
    db.execute(f"UPDATE {table} SET {column} = ? WHERE seq = ?", (new, seq))


def test_deleted_rows_are_detected_and_named(finished: World) -> None:
    for seq in range(1, 22):
        path = tampered(finished, "PRAGMA foreign_keys = OFF", f"DELETE FROM rows WHERE seq = {seq}")
        assert check(finished, path).first_bad_row == seq
        with pytest.raises(LedgerCorrupt):
            Ledger.open(path)


def test_a_deleted_and_renumbered_row_is_detected(finished: World) -> None:
    path = tampered(
        finished,
        "PRAGMA foreign_keys = OFF",
        "DELETE FROM rows WHERE seq = 8",
        "UPDATE rows SET seq = -(seq - 1) WHERE seq > 8",
        "UPDATE rows SET seq = -seq WHERE seq < 0",
    )
    assert check(finished, path).first_bad_row == 8


def test_swapped_rows_are_detected(finished: World) -> None:
    for first, second in ((6, 7), (9, 14)):
        path = tampered(
            finished,
            "PRAGMA foreign_keys = OFF",
            f"UPDATE rows SET seq = -1 WHERE seq = {first}",
            f"UPDATE rows SET seq = {first} WHERE seq = {second}",
            f"UPDATE rows SET seq = {second} WHERE seq = -1",
        )
        assert check(finished, path).first_bad_row == first


def test_swapped_answers_are_detected(finished: World) -> None:
    path = tampered(
        finished,
        "CREATE TEMP TABLE old AS SELECT * FROM answers",
        "UPDATE answers SET data = (SELECT data FROM old WHERE old.seq = 13 - answers.seq) WHERE seq IN (6, 7)",
    )
    assert check(finished, path).first_bad_row == 6


def test_a_missing_or_surplus_answer_is_detected(finished: World) -> None:
    assert check(finished, tampered(finished, "DELETE FROM answers WHERE seq = 9")).first_bad_row == 9
    path = tampered(finished, f"INSERT INTO answers VALUES ('{'0' * 64}', 2, x'00')")
    assert check(finished, path).first_bad_row == 2


def test_a_cut_tail_with_signed_rows_left_over_is_detected(finished: World) -> None:
    path = tampered(finished, "PRAGMA foreign_keys = OFF", "DELETE FROM rows WHERE seq > 12")
    assert check(finished, path).first_bad_row == 13


def test_a_tail_cut_with_its_signatures_is_only_seen_by_who_kept_a_head(finished: World) -> None:
    head = check(finished).head
    assert head is not None
    path = tampered(
        finished,
        "PRAGMA foreign_keys = OFF",
        *(f"DELETE FROM {table} WHERE seq > 18" for table in ("rows", "heads", "answers")),
    )
    assert verify(path).ok, "nothing inside the file can show it"
    report = verify(path, witnesses=[head])
    assert not report.ok
    assert report.first_bad_row == 19


def test_a_kept_head_of_a_forked_or_other_ledger_is_detected(finished: World, tmp_path: Path) -> None:
    head = check(finished).head
    assert head is not None
    assert verify(finished.path, witnesses=[head]).witnesses == 1
    forged = SignedHead.from_json({**head.to_json(), "hash": "0" * 64})
    assert not verify(finished.path, witnesses=[forged]).ok
    (tmp_path / "other").mkdir()
    with World.create(tmp_path / "other").ledger as other:
        assert not verify(finished.path, witnesses=[other.head()]).ok


def test_unsigned_rows_at_the_end_are_detected(finished: World) -> None:
    path = tampered(finished, "PRAGMA foreign_keys = OFF", "DELETE FROM heads WHERE seq = 21")
    assert check(finished, path).first_bad_row == 21


def test_a_ledger_rewritten_under_another_key_fails_against_the_key_one_knows(tmp_path: Path) -> None:
    world = World.create(tmp_path)
    world.ledger.close()
    assert verify(world.path).ok
    assert not verify(world.path).anchored
    report = verify(world.path, public_key=Ed25519PrivateKey.generate().public_key())
    assert not report.ok
    assert report.first_bad_row == 1


@pytest.mark.parametrize("deleted", ["seq = {0}", "seq <= {0}"])
def test_a_key_that_the_key_before_did_not_introduce_is_named(world: World, deleted: str) -> None:
    """Otherwise anybody could introduce a key of their own and sign all later rows, even of a ledger made up whole."""
    world.ledger.rotate_key(Ed25519PrivateKey.generate())
    row = world.ledger.row_count
    world.ledger.note("signed by the new key")
    world.ledger.close()
    path = tampered(world, f"DELETE FROM heads WHERE {deleted.format(row)}")
    report = verify(path, public_key=world.key.public_key())
    assert report.first_bad_row == row
    with pytest.raises(LedgerCorrupt, match=f"row {row}: "):
        Ledger.open(path)


def test_a_key_the_ledger_was_rotated_from_still_anchors_it(world: World) -> None:
    old = world.key.public_key()
    world.ledger.rotate_key(Ed25519PrivateKey.generate())
    assert verify(world.path, public_key=old).ok


def test_a_row_signed_by_the_right_key_that_passes_the_budget_is_named(world: World) -> None:
    """A dishonest server has the key, so chain and signatures are valid; only the sums reveal the row."""
    world.release([make_query(n, MECHANISM) for n in range(10)])
    head = _append_release(world, make_query(10, MECHANISM))
    report = verify(world.path, public_key=world.key.public_key())
    assert report.first_bad_row == head
    assert "pool-budget" in str(report.problems[0])
    with pytest.raises(LedgerCorrupt, match="pool-budget"):
        world.reopen()


def test_a_charge_with_less_than_the_mechanism_costs_is_named(world: World) -> None:
    seq = _append_release(world, make_query(1, MECHANISM), event={"mu_squared": "1/1000"})
    assert check(world).first_bad_row == seq


def test_a_release_below_quorum_or_by_unknown_sites_is_named(world: World) -> None:
    seq = _append_release(world, make_query(1, MECHANISM), sites=("aachen",))
    assert check(world).first_bad_row == seq


def test_a_release_of_an_undeclared_pool_is_named(world: World) -> None:
    seq = _append_release(world, make_query(1, MECHANISM), sites=("aachen", "dublin"))
    assert check(world).first_bad_row == seq


def test_a_query_answered_twice_is_named(world: World) -> None:
    world.release([make_query(1, MECHANISM)])
    connection = sqlite3.connect(world.path, isolation_level=None)
    for name in ("answers_no_update", "answers_once"):
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute("UPDATE answers SET query_id = 'moved'")
    connection.close()
    seq = _append_release(world, make_query(1, MECHANISM))
    assert seq in [problem.row for problem in check(world).problems]


def _append_release(
    world: World,
    query: QuerySpec,
    *,
    sites: tuple[str, ...] = ("aachen", "bergen"),
    event: dict[str, object] | None = None,
) -> int:
    """Append a release past all rules, with valid hashes, key and answer; return its row number."""
    chain, study = world.ledger._chain, world.ledger._books.studies[world.study.id]
    data = np.zeros(query.mechanism.dimension, dtype="<i8").tobytes()
    with chain.transaction():
        for _ in chain.new_rows():
            raise AssertionError
        record = ReleaseRecord.of(study, "lie", query, query.id, roster_of(sites), sha256_bytes(data))
        body = record.to_json()
        if event is not None:
            body["event"] = {**record.event, **event}
        return chain.append("release", body, payload=(query.id, data)).seq


def test_missing_altered_and_added_triggers_are_detected(finished: World) -> None:
    for statement in (
        "DROP TRIGGER rows_no_update",
        "CREATE TRIGGER extra AFTER INSERT ON rows BEGIN SELECT 1; END",
        "CREATE INDEX extra ON rows (kind)",
        "CREATE TABLE extra (a)",
    ):
        path = finished.path.with_name("schema.sqlite")
        shutil.copy(finished.path, path)
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute(statement)
        connection.close()
        assert not check(finished, path).ok, statement


@pytest.mark.slow
def test_flipped_bytes_change_nothing_or_are_detected(finished: World) -> None:
    _flip_bytes(finished, samples=100)


@pytest.mark.slow
def test_five_thousand_flipped_bytes_change_nothing_or_are_detected(finished: World) -> None:
    _flip_bytes(finished, samples=5_000)


def test_a_signature_has_one_spelling(finished: World) -> None:
    """Hex in capitals spells the same signature, but would be a changed value."""
    path = tampered(finished, "UPDATE heads SET signature = upper(signature) WHERE seq = 1")
    assert check(finished, path).first_bad_row == 1


def _flip_bytes(world: World, *, samples: int) -> None:
    """Flip one bit of the file; ``verify`` must fail, or every stored value must read as before, in order."""
    data = world.path.read_bytes()
    rng = random.Random(20250301)
    positions = rng.sample(range(len(data)), samples)
    original, clean = contents(world.path), check(world)
    path = world.path.with_name("flipped.sqlite")
    detected = harmless = 0
    path.write_bytes(data)
    last: int | None = None
    for position in positions:
        with path.open("r+b") as stream:
            if last is not None:
                stream.seek(last)
                stream.write(data[last : last + 1])
            stream.seek(position)
            stream.write(bytes([data[position] ^ 1 << rng.randrange(8)]))
        last = position
        report = check(world, path)
        if not report.ok:
            detected += 1
            continue
        assert contents(path) == original, position
        assert report.to_json() == {**clean.to_json(), "path": str(path)}, position
        harmless += 1
    print(f"{detected} flips detected, {harmless} changed no stored value (free space, counters)")
    assert detected > harmless / 4


def test_a_truncated_file_is_detected(finished: World) -> None:
    data = finished.path.read_bytes()
    path = finished.path.with_name("short.sqlite")
    for size in (0, 50, 100, 4096, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        assert not check(finished, path).ok, size


@pytest.mark.parametrize(
    "text",
    [
        '{"a":1.0}',
        '{"a":1e3}',
        '{"a":NaN}',
        '{"a":Infinity}',
        '{"a":-Infinity}',
        '{"b":1,"a":2}',
        '{"a": 1}',
        '{"a":1,"a":1}',
        "[]",
        "1",
        "",
        '{"a":"\\u0041"}',
    ],
)
def test_a_body_with_floats_or_a_second_spelling_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_body(text)


def test_the_totals_refuse_a_plan_that_a_fresh_replay_would_refuse(world: World) -> None:
    world.release([make_query(n, MECHANISM) for n in range(10)])
    planned = world.ledger._books.plan(MECHANISM, study_id=world.study.id, roster=roster_of())
    assert isinstance(planned, ExceededLimit)
    assert planned.requested > planned.remaining >= 0
