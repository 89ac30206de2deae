"""Lets only one process at a time change a site's teachers, by a lock on their directory.

Every command that trains, adds, adapts or withdraws holds the lock while it works. If another process holds it, the
command is refused at once. The kernel releases the lock when its holder exits or dies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import Refused

LOCK_NAME = ".lock"


@contextmanager
def writing(teachers: Path) -> Iterator[None]:
    """Hold the lock of a site's directory of teachers.

    Args:
        teachers: The directory; it is created, closed to other users, if it does not exist.

    Raises:
        Refused: ``busy`` if another process holds the lock.
    """
    teachers.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(teachers / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)  # child processes do not inherit it
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                "busy",
                f"another command that trains, adds, adapts or withdraws is changing {teachers}; to fix: wait until it "
                "ends",
            ) from error
        yield
    finally:
        os.close(descriptor)
