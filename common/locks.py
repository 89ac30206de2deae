"""A file's lock: one holder, and others who only look whether it is held.

The kernel frees a lock when its holder dies, however it dies. A look shares the lock for a moment. Whoever takes the
lock waits for looks to end, and is refused only if somebody holds it.
"""

from __future__ import annotations

import fcntl
import time
from typing import IO, Any

_LOOK_S = 0.01
"""A look takes less, unless the machine is busy."""
_LOOKS_S = 30.0
"""How long looks are waited for, however many there are."""


def take(stream: IO[Any]) -> bool:
    """Hold the lock of an open file until it is closed; False, at once, if somebody else holds it."""
    until = time.monotonic() + _LOOKS_S
    while not _locked(stream, fcntl.LOCK_EX):
        if held(stream) or time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


def held(stream: IO[Any]) -> bool:
    """Whether somebody else holds the lock of an open file, which must not hold it itself; nobody is refused for it."""
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
