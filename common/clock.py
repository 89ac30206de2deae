"""Provides the production clock; every part that writes a time takes a clock as a parameter."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The production clock."""
    return datetime.now(UTC)
