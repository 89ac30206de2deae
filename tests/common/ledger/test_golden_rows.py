"""Rows, signatures, receipts and standings have the bytes that version 0.1.0 gave them; it made `golden.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.canonical import canonical_text
from common.ledger.records import KINDS, parse_record
from tests.common.ledger.golden_world import live, named

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def test_the_same_life_gives_the_same_rows_to_the_last_byte(tmp_path: Path) -> None:
    lived = live(tmp_path)
    for name in ("server", "site"):
        assert [row[:2] for row in lived[name]] == [row[:2] for row in GOLDEN[name]]
    assert lived == GOLDEN


def test_rosters_named_by_hash_have_the_bytes_that_the_first_version_to_name_them_so_gave(tmp_path: Path) -> None:
    golden = json.loads(Path(__file__).with_name("golden_rosters.json").read_text())
    assert named(tmp_path) == golden
    for kind, body, _ in golden["server"]:
        assert canonical_text(parse_record("server", kind, body).to_json()) == body


A, B = "a" * 64, "b" * 64
SINCE: dict[str, dict[str, dict[str, object]]] = {
    "server": {
        "answer": {"answer_sha256": A, "draw": 1, "query_id": B},
        "roster": {"roster": [["north", "north-mri"], ["south", "south-mri"]]},
        "lost-draw": {"draw": 1, "query_ids": [A, B], "reason": "incomplete"},
    },
    "site": {
        "foreign": {"brought": "bundle", "served": A, "voter": 0},
        "peer": {"key": A, "site": "south", "study": B},
        "mask-key": {"batch": A, "draw": 1, "nonce": B, "study": A},
        "masked": {"draw": 1, "masks": A, "query_id": B, "share_std": "70000/3", "words_sha256": A},
    },
}
"""Kinds of row that no 0.1.0 ledger has."""


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
