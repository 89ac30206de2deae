"""Measures what a confined program and its children use together: processes, memory and files.

``client.foreign.confined`` calls it. The kernel limits single processes or users; it limits a group of processes only
by a control group, which an ordinary user cannot create. The parent process therefore measures the group itself.
Deleted files that are still open count as well.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from common.process import processes

MAX_ENTRIES = 20_000
MAX_DEPTH = 32
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class ResourceUsage:
    """What a group of processes uses.

    Attributes:
        processes: Number of processes.
        memory_bytes: Memory with swap, in bytes. Pages that only mirror a file do not count.
        disk_bytes: Bytes of files on disk.
        entries: Number of files and folders.
    """

    processes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    entries: int = 0

    def peak(self, other: ResourceUsage) -> ResourceUsage:
        """Return the larger of two measurements for each resource.

        Args:
            other: Another measurement.

        Returns:
            The maximum.
        """
        return ResourceUsage(*map(max, astuple(self), astuple(other)))

    def over(self, limit: ResourceUsage) -> str:
        """Describe the first resource (processes, memory, bytes of files, number of files) used beyond its limit.

        Args:
            limit: The limit of each resource.

        Returns:
            The use and its limit in words; empty if no limit is exceeded.
        """
        for what, used, most in (
            ("processes", self.processes, limit.processes),
            ("MiB of memory", self.memory_bytes >> 20, limit.memory_bytes >> 20),
            ("MiB of files", self.disk_bytes >> 20, limit.disk_bytes >> 20),
            ("files and folders", self.entries, limit.entries),
        ):
            if used > most:
                return f"{used} {what}, allowed {most}"
        return ""

    def __str__(self) -> str:
        mib = f"{self.memory_bytes >> 20} MiB of memory, {self.disk_bytes >> 20} MiB of files"
        return f"{self.processes} process{'' if self.processes == 1 else 'es'}, {mib}"


def measure(group: int, written: Sequence[Path], *, memory_limit: int) -> ResourceUsage:
    """Measure what a process group uses.

    At first a page that several processes share is counted for each of them, which is quick. If this sum exceeds the
    limit, the memory is measured again and each page counts once, which is slow.

    Args:
        group: Id of the process group.
        written: Folders that only this group writes.
        memory_limit: Limit on memory, in bytes.

    Returns:
        What the processes of the group use together now.
    """
    members = [one.folder for one in processes() if one.group == group and not one.ended]
    memory = sum(map(_resident_bytes, members))
    if memory > memory_limit:
        memory = sum(map(_own_share_bytes, members))
    seen: set[tuple[int, int]] = set()
    counts = [_below(folder, seen) for folder in written]
    files, entries = sum(bytes_ for bytes_, _ in counts), sum(found for _, found in counts)
    files += sum(_deleted_bytes(member, seen) for member in members)
    return ResourceUsage(len(members), memory, files, entries)


def tasks_of_user() -> int:
    """Count the threads of this user's processes, as far as they are visible.

    Returns:
        Number of threads.
    """
    own, total = os.getuid(), 0
    for one in processes():
        with contextlib.suppress(OSError):
            total += one.threads if one.folder.stat().st_uid == own else 0
    return total


def _kib(process: Path, file: str, names: tuple[str, ...]) -> int:
    try:
        lines = (process / file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines if line.partition(":")[0] in names)
    return sum(int(words[1]) for words in found if len(words) > 1)


def _resident_bytes(process: Path) -> int:
    return _kib(process, "status", ("RssAnon", "RssShmem", "VmSwap")) << 10


def _own_share_bytes(process: Path) -> int:
    return _kib(process, "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss")) << 10


def _below(folder: Path, seen: set[tuple[int, int]]) -> tuple[int, int]:
    """Count bytes and entries below a folder, up to the limits of number and depth; hard links count once."""
    total, entries, waiting = 0, 0, [(str(folder), 0)]
    while waiting:
        path, depth = waiting.pop()
        try:
            with os.scandir(path) as found:
                for entry in found:
                    entries += 1
                    if entries > MAX_ENTRIES or depth >= MAX_DEPTH:
                        return total, MAX_ENTRIES + 1
                    about = entry.stat(follow_symlinks=False)
                    if (about.st_dev, about.st_ino) not in seen:
                        seen.add((about.st_dev, about.st_ino))
                        total += about.st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append((entry.path, depth + 1))
        except OSError:  # deleted in the meantime
            continue
    return total, entries


def _deleted_bytes(process: Path, seen: set[tuple[int, int]]) -> int:
    """Count the bytes of deleted files that are still open or mapped."""
    total = 0
    for folder in ("fd", "map_files"):
        try:
            names = os.listdir(process / folder)
        except OSError:
            continue
        for name in names:
            try:
                about = (process / folder / name).stat()
            except OSError:  # closed in the meantime, or a mapping that only root may read
                continue
            if stat.S_ISREG(about.st_mode) and about.st_nlink == 0 and (about.st_dev, about.st_ino) not in seen:
                seen.add((about.st_dev, about.st_ino))
                total += about.st_blocks * _BLOCK
    return total
