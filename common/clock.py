"""Provides the production clock. Every part that writes a time takes a clock as a parameter."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """Return the current time in UTC: the production clock."""
    return datetime.now(UTC)
