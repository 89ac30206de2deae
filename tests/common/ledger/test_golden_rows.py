"""Rows, signatures, receipts and standings have the bytes that version 0.1.0 gave them; it made `golden.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.canonical import canonical_text
from common.ledger.records import KINDS, parse_record
from tests.common.ledger.golden_world import live

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def test_the_same_life_gives_the_same_rows_to_the_last_byte(tmp_path: Path) -> None:
    lived = live(tmp_path)
    for name in ("server", "site"):
        assert [row[:2] for row in lived[name]] == [row[:2] for row in GOLDEN[name]]
    assert lived == GOLDEN


@pytest.mark.parametrize("role", ["server", "site"])
def test_every_kind_of_row_is_read_and_written_back_to_the_last_byte(role: str) -> None:
    bodies = {kind: body for kind, body, _ in GOLDEN[role]}
    bodies.setdefault("key", next(body for kind, body, _ in GOLDEN["server"] if kind == "key"))
    if role == "site":
        bodies["superseded"] = bodies["receipt"]
        bodies["peer"] = f'{{"key":"{"a" * 64}","site":"south","study":"{"b" * 64}"}}'  # of no 0.1.0 ledger
    assert bodies.keys() == KINDS[role].keys()
    for kind, body in bodies.items():
        assert canonical_text(parse_record(role, kind, body).to_json()) == body
