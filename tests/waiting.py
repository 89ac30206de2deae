"""Waits in a test until a condition holds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from common.events import read_events

T = TypeVar("T")


def until(
    true: Callable[[], T],
    what: object = "it did not come to that",
    *,
    timeout_s: float = 600.0,
    pause_s: float = 0.05,
    alive: Callable[[], object] = lambda: True,
) -> T:
    """Call ``true`` until its result is true, and return the result.

    After ``timeout_s``, or if ``alive`` returns a false value, raise AssertionError with the text ``what``, which may
    be a function that returns the text.
    """
    end = time.monotonic() + timeout_s
    while not (found := true()):
        lives = alive()
        if not lives or time.monotonic() >= end:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {timeout_s:g} s: {said}" if lives else f"it ended before: {said}")
        time.sleep(pause_s)
    return found


def events_of(file: Path, kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind in an event log."""
    return [event for event in read_events(file) if event["event"] == kind]
