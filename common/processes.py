"""Reads the machine's processes from Linux's ``/proc``; on another system there are none to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """One process as the kernel describes it now.

    Attributes:
        pid: Process id.
        ended: True if it has ended and only its parent has not taken notice yet.
        parent: Process id of its parent.
        group: Id of its process group.
        session: Id of its session.
        threads: Number of its threads.
    """

    pid: int
    ended: bool
    parent: int
    group: int
    session: int
    threads: int

    @property
    def folder(self) -> Path:
        """The folder in which the kernel shows the process."""
        return Path("/proc", str(self.pid))


def process(pid: int) -> Process | None:
    """Read one process.

    Args:
        pid: Its process id.

    Returns:
        The process; None if it is gone.
    """
    try:
        stat = Path("/proc", str(pid), "stat").read_bytes()
        state, *numbers = stat[stat.rindex(b")") + 2 :].split(maxsplit=18)[:18]  # the program's name may hold spaces
        parent, group, session = map(int, numbers[:3])
        return Process(pid, state in (b"Z", b"X"), parent, group, session, threads=int(numbers[16]))
    except (OSError, ValueError, IndexError):
        return None


def processes() -> Iterator[Process]:
    """Yield all visible processes, one after the other."""
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.name.isdigit() and (found := process(int(entry.name))) is not None:
            yield found
