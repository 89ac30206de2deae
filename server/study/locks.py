"""Files that a process holds alone while it works on a study; the kernel frees them, however the process ends."""

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
    """Hold the file, which is made if need be; StudyBusy with the words ``busy`` while another process holds it."""
    with path.open("a") as stream:
        if not take(stream):
            raise StudyBusy(busy)
        yield


def is_held(path: Path) -> bool | None:
    """Whether a process holds the file; None where it cannot be read from here. It is only looked at for a moment."""
    try:
        with path.open("rb") as stream:
            return held(stream)
    except FileNotFoundError:
        return False
    except OSError:
        return None
