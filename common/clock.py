"""Provides the system clock in UTC. Code that records a time takes a clock as a parameter, which tests can replace."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

Clock = Callable[[], datetime]

CLOCKS_DIFFER = timedelta(minutes=15)
"""Largest tolerated difference between the clocks of two machines, for times in files that a hospital signed."""


def utc_now() -> datetime:
    """Return the current time in UTC."""
    return datetime.now(UTC)
