"""Locks files, so that only one process at a time works on a study. The kernel frees a lock when its process ends.

The workspace and the supervisor use it. Locking a file that another process has locked is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import ConsiliumError, Refused
from common.locks import held, take


class StudyBusy(ConsiliumError):
    """Another process holds a lock of this study, so the command is refused."""

    exit_code = Refused.exit_code


@contextmanager
def held_alone(path: Path, *, busy: str) -> Iterator[None]:
    """Hold an exclusive lock on a file inside the block; the file is created if it is missing.

    Args:
        path: The file.
        busy: Text of the error if another process holds the file.

    Raises:
        StudyBusy: If another process holds the file.
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
