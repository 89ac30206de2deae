"""Reads files that others wrote, within limits, and rejects what is not valid.

Hospitals' reports and lines of the event log reach the pages only through it. Whatever the bytes are, only InvalidInput
is raised, so one bad line or file is reported and everything else continues.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from common.errors import InvalidInput
from common.events import EVENTS
from common.objects import read_regular

MAX_TEXT = 4_000
MAX_ITEMS = 2_000
MAX_NUMBER = 2**53
"""Largest integer up to which a browser's numbers and float64 are exact."""


def read_json(path: Path, *, most_bytes: int) -> Any:
    """Return the JSON in a regular file. It never waits: a pipe or a device is refused.

    Args:
        path: The file.
        most_bytes: Largest allowed size.

    Raises:
        InvalidInput: If it cannot be read, is too large, or is not valid.
    """
    try:
        return parse_json(read_regular(path, most_bytes=most_bytes))
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path.name} ({error.strerror})", remedy="check that it is there and readable"
        ) from error


def parse_json(content: bytes) -> Any:
    """Return the JSON in UTF-8 bytes.

    Raises:
        InvalidInput: For a number that is not finite, nesting deeper than Python can read, or half a surrogate pair,
            which JSON can express but no page could show in UTF-8.
    """
    try:
        text = content.decode()
        found = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
        return found
    except (ValueError, RecursionError) as error:
        raise InvalidInput(
            "the content is not JSON that can be read", limit="JSON in UTF-8 with finite numbers"
        ) from error


def check_event(event: Mapping[str, Any]) -> None:
    """Check that a line of the event log has every field that docs/events.md lists, with valid values.

    Of an unknown kind only the common fields are checked.

    Raises:
        InvalidInput: Otherwise.
    """
    kind, time = event.get("event"), event.get("time")
    if not isinstance(kind, str) or not isinstance(time, str) or len(kind) + len(time) > MAX_TEXT:
        raise InvalidInput("event", limit="a kind and a time")
    try:
        moment = datetime.fromisoformat(time)
    except ValueError as error:
        raise InvalidInput("time of an event", limit="ISO 8601") from error
    if moment.tzinfo is None:
        raise InvalidInput("time of an event", limit="ISO 8601 with its offset from UTC")
    for name in EVENTS.get(kind, ()):
        holds = _FIELDS.get((kind, name)) or _FIELDS.get(("", name), _text)
        if not holds(event.get(name)):
            raise InvalidInput(f"field {name} of a {kind} event", limit="what docs/events.md says")


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ITEMS and all(_text(item) for item in value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _amount(value: Any) -> bool:
    return _number(value) and isfinite(value) and value >= 0


_FIELDS: Mapping[tuple[str, str], Callable[[Any], bool]] = {
    ("offer-answered", "accepted"): _flag,
    ("batch-dispatched", "queries"): _count,
    ("draw-lost", "sites"): _texts,
    **{("", name): _flag for name in ("resumed",)},
    **{("", name): _texts for name in ("ledgers", "peers", "queries", "roster", "volumes", "warnings")},
    **{("", name): _number for name in ("loss",)},
    **{
        ("", name): _count
        for name in (
            *(
                "accepted",
                "attempt",
                "cases",
                "codes",
                "done",
                "draw",
                "expected",
                "ledger_row",
                "needed",
                "number",
                "pid",
                "sites",
                "size",
                "step",
            ),
            *("total", "voters"),
        )
    },
    **{
        ("", name): _amount
        for name in ("chance", "delta", "dice", "epsilon_exact", "epsilon_rdp", "seconds", "surprise")
    },
}
"""Check of each field, by kind and name or by name for all kinds; other fields must be texts."""


def _finite(digits: str) -> float:
    if not isfinite(value := float(digits)):
        raise ValueError(digits)
    return value


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
