"""Tests that the dashboard reads every event's fields as docs/events.md defines them."""

from __future__ import annotations

import re
from pathlib import Path

from common.errors import InvalidInput
from common.event_kinds import EVENTS, check_event

TABLE = Path(__file__).parents[3] / "docs" / "events.md"
HOLDS = {"text": "a", "integer": 3, "number": 0.5, "flag": True, "list": ["a"]}


def test_no_event_as_it_is_documented_counts_as_damage() -> None:
    damaged, kinds = [], set()
    for kind, fields in re.findall(r"^\| `([\w-]+)` \| ([^|]*)\|", TABLE.read_text(encoding="utf-8"), re.MULTILINE):
        if kind not in EVENTS:
            continue
        kinds.add(kind)
        said = {name: HOLDS[what] for name, what in re.findall(r"`(\w+)` (\w+)", fields)}
        try:
            check_event({"event": kind, "time": "2026-11-22T23:12:30+00:00", **said})
        except InvalidInput as error:
            damaged.append(str(error))
    assert kinds == set(EVENTS)
    assert damaged == []
