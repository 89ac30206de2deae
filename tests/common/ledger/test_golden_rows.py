"""Rows, signatures, receipts and standings have the bytes that version 0.1.0 gave them; it made `golden.json`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.ledger.records import parse_record
from tests.common.ledger.golden_world import live

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def test_the_same_life_gives_the_same_rows_to_the_last_byte(tmp_path: Path) -> None:
    lived = live(tmp_path)
    for name in ("server", "site"):
        assert [row[:2] for row in lived[name]] == [row[:2] for row in GOLDEN[name]]
    assert lived == GOLDEN


@pytest.mark.parametrize("role", ["server", "site"])
def test_every_golden_row_is_read(role: str) -> None:
    for kind, body, _ in GOLDEN[role]:
        parse_record(role, kind, body)
