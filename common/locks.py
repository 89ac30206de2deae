"""Locks a file for one holder, and lets others look whether it is locked.

Called by supervision and by studies. The kernel frees a lock when its holder dies. A look shares the lock for a moment.
Taking the lock waits for looks to end, and fails only if somebody holds it.
"""

from __future__ import annotations

import fcntl
import time
from typing import IO, Any

_LOOK_S = 0.01
"""Seconds between attempts. A look usually takes less."""
_LOOKS_S = 30.0
"""Seconds for which looks are waited for, however many there are."""


def take(stream: IO[Any]) -> bool:
    """Hold the lock of an open file until the file is closed.

    Args:
        stream: The open file.

    Returns:
        False if somebody else holds the lock.
    """
    until = time.monotonic() + _LOOKS_S
    while not _locked(stream, fcntl.LOCK_EX):
        if held(stream) or time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def held(stream: IO[Any]) -> bool:
    """Return whether somebody else holds the lock of an open file. The look never makes another holder's attempt fail.

    Args:
        stream: The open file; this process must not hold its lock.

    Returns:
        True if it is held.
    """
    if not _locked(stream, fcntl.LOCK_SH):
        return True
    fcntl.flock(stream, fcntl.LOCK_UN)
    return False


def _locked(stream: IO[Any], kind: int) -> bool:
    try:
        fcntl.flock(stream, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
