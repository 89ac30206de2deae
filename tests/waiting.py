"""Waiting in a test until something holds."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(
    true: Callable[[], object],
    what: object = "it did not come to that",
    *,
    timeout_s: float = 600.0,
    pause_s: float = 0.05,
) -> None:
    """Look again and again; what is waited for stands in the error. A function as ``what`` is asked for it then."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, f"not within {timeout_s:g} s: {what() if callable(what) else what}"
        time.sleep(pause_s)
