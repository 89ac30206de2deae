"""One writer at a time in a site's teachers: whoever trains them or takes a patient out holds the directory's lock.

Refuses a second one at once, whatever the first is doing. The kernel frees the lock when its holder dies, however.
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
    """Hold the lock of a site's ``teachers`` directory, which is made where there is none; Refused if another does."""
    teachers.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(teachers / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)  # not inherited by what this starts
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refused(
                "busy",
                f"another `site train` or `site withdraw-patient` is writing in {teachers}; to fix: wait for it",
            ) from error
        yield
    finally:
        os.close(descriptor)
