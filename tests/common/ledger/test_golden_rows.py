"""Tests that rows, signatures, receipts and standings have the bytes of version 0.1.0, which made `golden.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.canonical import canonical_text
from common.ledger.records import KINDS, parse_record
from common.ledger.rollback_guard import KeptStanding, ServerStanding, SiteLedgerStanding
from common.ledger.row_text import row_text
from tests.common.ledger.golden_world import SINCE, live, named

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def test_the_same_life_gives_the_same_rows_to_the_last_byte(tmp_path: Path) -> None:
    lived = live(tmp_path)
    for name in ("server", "site"):
        assert [row[:2] for row in lived[name]] == [row[:2] for row in GOLDEN[name]]
        assert lived[name] == GOLDEN[name]


@pytest.mark.parametrize(("role", "kind"), [("server", ServerStanding), ("site", SiteLedgerStanding)])
def test_a_standing_of_0_1_0_is_read_and_a_newer_one_contains_the_same_fields(
    tmp_path: Path, role: str, kind: type[KeptStanding]
) -> None:
    (tmp_path / "old").write_text(GOLDEN[f"{role} standing"])
    old = kind.load(tmp_path / "old")
    assert old.marks == ()
    live(tmp_path)
    path = tmp_path / ("ledger.standing" if role == "server" else "site-ledger.standing")
    since = {
        "adapted",
        "books",
        "caps",
        "elsewhere",
        "head",
        "identity",
        "left",
        "marks",
        "notes",
        "patients",
        "sealing_keys",
        "signature",
    }  # the head is now that of the newest row, formerly that of the newest charge
    for name, value in json.loads(path.read_text()).items():
        if name not in since:
            assert value == json.loads(GOLDEN[f"{role} standing"])[name]


def test_rosters_named_by_hash_have_the_bytes_that_the_first_version_to_name_them_so_gave(tmp_path: Path) -> None:
    golden = json.loads(Path(__file__).with_name("golden_rosters.json").read_text())
    assert named(tmp_path) == golden
    for kind, body, _ in golden["server"]:
        assert canonical_text(parse_record("server", kind, body).to_json()) == body


@pytest.mark.parametrize("role", ["server", "site"])
def test_every_kind_of_row_is_read_and_written_back_to_the_last_byte(role: str) -> None:
    bodies = {kind: body for kind, body, _ in GOLDEN[role]}
    bodies.setdefault("key", next(body for kind, body, _ in GOLDEN["server"] if kind == "key"))
    if role == "site":
        bodies["superseded"] = bodies["receipt"]
    bodies |= {kind: canonical_text(body) for kind, body in SINCE[role].items()}
    assert bodies.keys() == KINDS[role].keys()
    for kind, body in bodies.items():
        assert canonical_text(parse_record(role, kind, body).to_json()) == body
        assert row_text(kind, json.loads(body)), "`ledger log` and the dashboard say what every row is about"
