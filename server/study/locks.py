"""Provides files that one process holds exclusively while it works on a study; the kernel frees them when it ends.

The workspace and the supervisor use it. It refuses a file that another process holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConsiliumError
from common.locks import held, take


class StudyBusy(ConsiliumError):
    """Another process holds a lock of this study."""


@contextmanager
def held_alone(path: Path, *, busy: str) -> Iterator[None]:
    """Hold the file exclusively inside the block; it is created if missing.

    Args:
        path: The file.
        busy: Text of the error.

    Raises:
        StudyBusy: If another process holds it.
    """
    with path.open("a") as stream:
        if not take(stream):
            raise StudyBusy(busy)
        yield


def is_held(path: Path) -> bool | None:
    """Check whether a process holds a file exclusively. The check itself takes the lock only for a moment.

    Args:
        path: The file.

    Returns:
        True or False; None if this user cannot read the file.
    """
    try:
        with path.open("rb") as stream:
            return held(stream)
    except FileNotFoundError:
        return False
    except OSError:
        return None
