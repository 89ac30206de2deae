"""Locks a file for one process, and lets other processes test whether it is locked.

Called by supervision, studies and sites. The kernel frees a lock when its holder dies. A test takes a shared lock for a
moment. :func:`take` waits while others test the lock, and fails if another process holds it. :func:`exclusively` waits
for that process, too.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_LOOK_S = 0.01
"""Seconds between two attempts to take the lock. A test by another process usually takes less."""
_LOOKS_S = 30.0
"""Total seconds to wait for tests of other processes to end."""


def take(stream: IO[Any]) -> bool:
    """Hold the lock of an open file until the file is closed.

    Args:
        stream: The open file.

    Returns:
        True if this process now holds the lock; False if another process holds it.
    """
    until = time.monotonic() + _LOOKS_S
    while not _locked(stream, fcntl.LOCK_EX):
        if held(stream) or time.monotonic() > until:
            return False
        time.sleep(_LOOK_S)
    return True


@contextmanager
def exclusively(path: Path, *, mode: int = 0o666) -> Iterator[None]:
    """Hold the lock of a file inside the block. Wait as long as another process holds it.

    Args:
        path: The file, in an existing folder. It is created if it is missing.
        mode: Permissions of a new file, before the umask.

    Yields:
        Nothing.
    """
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode), "a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def held(stream: IO[Any]) -> bool:
    """Return whether another process holds the lock of an open file. No attempt to take the lock fails because of this
    test.

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
