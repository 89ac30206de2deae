"""Writes docs/security-log.schema.json and docs/security-log.md's table: ``python -m tests.security_log_reference``.

It also provides a sink for tests that accepts only what this schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema

from common.security_log.events import KINDS, json_schema

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE, SCHEMA = DOCS / "security-log.md", DOCS / "security-log.schema.json"
_TABLE = re.compile(r"(?<=\|---\|---\|---\|---\|---\|\n)(\| `.*\n)*")


def table() -> str:
    """Return a row for each kind of event."""
    return "".join(
        f"| `{event}` | {kind.severity} | {', '.join(kind.parties)} | {kind.said} | "
        f"{', '.join(f'`{name}`' for name in kind.stated) or 'none'} |\n"
        for event, kind in KINDS.items()
    )


def page(text: str) -> str:
    """Return the page with a table of the present kinds."""
    return _TABLE.sub(lambda _: table(), text, count=1)


VALID = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))


class Kept:
    """Keeps every record that it gets, and fails while a test tells it to."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.away = False

    def send(self, record: Mapping[str, Any]) -> None:
        if self.away:
            raise ConnectionRefusedError
        VALID.validate(dict(record))
        self.records.append(dict(record))

    @property
    def events(self) -> list[str]:
        return [record["event"] for record in self.records]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    SCHEMA.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")
