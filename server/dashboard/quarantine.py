"""Reads untrusted JSON within limits, and refuses invalid content.

Hospitals' reports and the lines of the event log are read with it before pages show them. For invalid content of any
kind, its functions raise InvalidInput, so the caller can report one bad line or file and continue with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from math import isfinite
from pathlib import Path
from typing import Any

from common import reading
from common.errors import InvalidInput
from common.events import EVENTS
from common.objects import read_regular

MAX_TEXT = 4_000
MAX_ITEMS = 2_000
MAX_NUMBER = 2**53
"""Largest number accepted; float64, which JavaScript uses for all numbers, represents integers up to it exactly."""


def read_json(path: Path, *, most_bytes: int) -> Any:
    """Read a JSON file. Pipes and devices are refused, so reading never blocks.

    Args:
        path: The file.
        most_bytes: Largest allowed size in bytes.

    Returns:
        The parsed JSON.

    Raises:
        InvalidInput: If the file cannot be read, is too large, or is not valid JSON.
    """
    try:
        return parse_json(read_regular(path, most_bytes=most_bytes))
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path.name} ({error.strerror})", remedy="check that it is there and readable"
        ) from error


def parse_json(content: bytes) -> Any:
    """Parse JSON in UTF-8.

    Args:
        content: The bytes.

    Returns:
        The parsed JSON.

    Raises:
        InvalidInput: If the bytes are not JSON in UTF-8, see :func:`common.reading.parse_json`.
    """
    return reading.parse_json(content, what="the content", limit="JSON in UTF-8 with finite numbers")


def check_event(event: Mapping[str, Any]) -> None:
    """Check that an event of the event log has every field that docs/events.md lists, with valid values.

    Args:
        event: The event; if its kind is unknown, only the kind and the time are checked.

    Raises:
        InvalidInput: If a field is missing or has an invalid value.
    """
    kind, time = event.get("event"), event.get("time")
    if not isinstance(kind, str) or not isinstance(time, str) or len(kind) + len(time) > MAX_TEXT:
        raise InvalidInput("event of the event log", limit="an object whose fields event and time are short texts")
    try:
        moment = datetime.fromisoformat(time)
    except ValueError as error:
        raise InvalidInput("time of an event", limit="a date and time in ISO 8601") from error
    if moment.tzinfo is None:
        raise InvalidInput("time of an event", limit="a date and time in ISO 8601 with the offset from UTC")
    for name in EVENTS.get(kind, ()):
        holds = _FIELDS.get((kind, name)) or _FIELDS.get(("", name), _text)
        if not holds(event.get(name)):
            raise InvalidInput(f"field {name} of a {kind} event", limit="a value as docs/events.md describes it")


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


_BY_NAME: Mapping[Callable[[Any], bool], tuple[str, ...]] = {
    _flag: ("resumed",),
    _texts: ("ledgers", "peers", "queries", "roster", "volumes", "warnings"),
    _number: ("loss",),
    _count: (
        "accepted", "attempt", "cases", "codes", "done", "draw", "expected", "ledger_row", "needed", "number", "pid",
        "sites", "size", "step", "total", "voters",
    ),
    _amount: ("chance", "delta", "dice", "epsilon_exact", "epsilon_rdp", "seconds", "surprise"),
}  # fmt: skip
_FIELDS: Mapping[tuple[str, str], Callable[[Any], bool]] = {
    ("offer-answered", "accepted"): _flag,
    ("batch-dispatched", "queries"): _count,
    ("draw-lost", "sites"): _texts,
    **{("", name): holds for holds, names in _BY_NAME.items() for name in names},
}
"""Function that checks a field of an event, by (kind, field), or by ("", field) for all kinds of events.

Fields that are not listed must be texts.
"""
