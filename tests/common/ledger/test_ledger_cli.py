"""Tests ``consilium verify`` and ``consilium ledger``: their output and their documented exit codes."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.keys import public_hex
from consilium.cli.ledger import app, verify_app
from tests.commands import refusal_of, typed
from tests.common.ledger.ledger_world import Hospital, World, ledger_study, make_mechanism, make_query, run_batch
from tests.worlds import receipts_of

RUN = CliRunner()


def released(world: World) -> str:
    world.release([make_query(n, make_mechanism()) for n in range(3)])
    return str(world.path)


def test_verify_says_ok_with_epsilon_unit_relation_and_delta(world: World) -> None:
    result = typed(verify_app, released(world), "--public-key", public_hex(world.key))
    assert "OK" in result.stdout
    for word in ("ε = ", "δ = 0.001", "unit hospital", "relation replace-one", "(exact)", "(rdp)"):
        assert word in result.stdout
    assert "not anchored" not in result.stdout


def test_verify_says_when_it_has_no_key_to_check_against(world: World) -> None:
    result = typed(verify_app, released(world))
    assert "not anchored" in result.stdout


def test_verify_ends_with_5_and_names_the_first_bad_row(world: World) -> None:
    path = released(world)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("DROP TRIGGER rows_no_update")
    connection.execute("UPDATE rows SET time_utc = '1999-01-01T00:00:00.000000Z' WHERE seq = 7")
    connection.close()
    result = RUN.invoke(verify_app, [path, "--json"])
    assert result.exit_code == 5
    assert json.loads(result.stdout)["first_bad_row"] == 7
    text = RUN.invoke(verify_app, [path]).stdout
    assert "first bad row: 7;" in text
    assert "BAD: row 7" in text


def test_a_kept_head_or_receipt_is_compared(world: World, tmp_path: Path) -> None:
    path = released(world)
    head = tmp_path / "head.json"
    printed = typed(app, "head", path)
    head.write_text(printed.stdout)
    receipt = tmp_path / "receipt.json"
    receipt.write_text(receipts_of(world.ledger, "aachen")[0].render())
    result = typed(verify_app, path, "--head", head, "--head", receipt, "--json")
    assert json.loads(result.stdout)["witnesses"] == 2
    changed = {**json.loads(head.read_text()), "hash": "0" * 64}
    head.write_text(json.dumps(changed))
    assert RUN.invoke(verify_app, [path, "--head", str(head)]).exit_code == 5


def test_wrong_arguments_are_bad_input(world: World, tmp_path: Path) -> None:
    for arguments in ([str(tmp_path / "none.sqlite")], [released(world), "--public-key", "xyz"]):
        refused = refusal_of(verify_app, *arguments)
        assert refused.exit_code == 2


def test_log_lists_the_newest_rows(world: World) -> None:
    path = released(world)
    lines = RUN.invoke(app, ["log", path, "--last", "2"]).stdout.splitlines()
    assert len(lines) == 2
    assert lines[-1].split()[0] == "8"
    assert "release" in lines[-1]
    rows = [json.loads(line) for line in RUN.invoke(app, ["log", path, "--json"]).stdout.splitlines()]
    assert [row["seq"] for row in rows] == list(range(1, 9))


def test_a_row_that_cannot_be_read_is_named_in_either_form(world: World) -> None:
    path = released(world)
    with sqlite3.connect(path) as connection:
        for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            connection.execute(f"DROP TRIGGER {name}")
        connection.execute("UPDATE rows SET body = '{' WHERE seq = 8")
    for form in ([], ["--json"]):
        assert "row of a ledger: got 8" in str(refusal_of(app, "log", path, *form))


def test_two_sites_compare_what_they_were_shown(world: World, tmp_path: Path) -> None:
    hospital = Hospital(tmp_path / "site-ledger.sqlite", world.study)
    with hospital.ledger as ledger:
        for batch, number in (("b1", 1), ("b2", 2)):
            ledger.record_receipt(run_batch(world, hospital, batch, number), public_key=world.key.public_key())
    printed = typed(app, "receipts", hospital.path)
    ours, theirs = tmp_path / "ours.jsonl", tmp_path / "theirs.jsonl"
    ours.write_text(printed.stdout)
    theirs.write_text("\n".join(receipt.render() for receipt in receipts_of(world.ledger, "bergen")))
    key = public_hex(world.key)
    result = typed(app, "compare", ours, theirs, "--server-key", key)
    assert "OK: 2 and 2 receipts" in result.stdout
    stranger = public_hex(Ed25519PrivateKey.generate())
    result = RUN.invoke(app, ["compare", str(ours), str(theirs), "--server-key", stranger])
    assert isinstance(result.exception, LedgerCorrupt)


def test_receipts_without_a_common_ledger_are_never_reported_as_equal(world: World, tmp_path: Path) -> None:
    second = World.create(tmp_path / "second", study=world.study, key=world.key)  # shown to the other site alone
    other = World.create(tmp_path / "other", study=ledger_study("other"), key=world.key)
    files = {}
    for each in (world, second, other):
        released(each)
        files[each.path] = tmp_path / f"{each.ledger.ledger_id}.jsonl"
        files[each.path].write_text("\n".join(receipt.render() for receipt in receipts_of(each.ledger, "bergen")))
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    key = "--server-key", public_hex(world.key)
    forked = RUN.invoke(app, ["compare", str(files[world.path]), str(files[second.path]), *key]).exception
    assert isinstance(forked, LedgerCorrupt)
    assert f"different ledgers of study {world.study.id[:12]}" in str(forked)
    for nothing in (empty, files[other.path]):
        for pair in ((files[world.path], nothing), (nothing, files[world.path])):
            assert refusal_of(app, "compare", *pair, *key).exit_code == InvalidInput.exit_code
    second.ledger.close()
    other.ledger.close()
