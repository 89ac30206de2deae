"""Measures what a confined program and its children use together: processes, memory, files.

The kernel's own limits are per process or per user; a group of processes has none without a control group of its own,
which an ordinary user cannot make. So the parent counts. Files that were deleted and are still open count as well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

MAX_ENTRIES = 20_000
MAX_DEPTH = 32
_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Usage:
    """``entries`` are files and folders; bytes of memory are those no other program shares."""

    processes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    entries: int = 0

    def peak(self, other: Usage) -> Usage:
        """The larger of each."""
        return Usage(
            processes=max(self.processes, other.processes),
            memory_bytes=max(self.memory_bytes, other.memory_bytes),
            disk_bytes=max(self.disk_bytes, other.disk_bytes),
            entries=max(self.entries, other.entries),
        )

    def over(self, limit: Usage) -> str:
        """What of this passes ``limit``, in words with both figures; empty where nothing does."""
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


def measure(group: int, written: Sequence[Path], *, memory_limit: int) -> Usage:
    """What a process group uses, with everything below the folders ``written``, which it alone writes.

    Memory is counted exactly only where the quick count, which counts shared pages in every process, passes
    ``memory_limit``.
    """
    members = tuple(_members(group))
    memory = sum(map(_resident_bytes, members))
    if memory > memory_limit:
        memory = sum(map(_own_share_bytes, members))
    seen: set[tuple[int, int]] = set()
    counts = [_below(folder, seen) for folder in written]
    files, entries = sum(bytes_ for bytes_, _ in counts), sum(found for _, found in counts)
    files += sum(_deleted_bytes(member, seen) for member in members)
    return Usage(len(members), memory, files, entries)


def tasks_of_user() -> int:
    """Threads of this user's processes, as far as they can be seen."""
    own, total = os.getuid(), 0
    for entry in _processes():
        try:
            if os.stat(entry).st_uid == own:
                total += int(_fields(entry)[17])
        except (OSError, ValueError):
            continue
    return total


def _processes() -> Iterator[str]:
    return (entry.path for entry in os.scandir("/proc") if entry.name.isdigit())


def _fields(process: str) -> list[bytes]:
    """``/proc/PID/stat`` behind the program's name: state, parent, group, …"""
    text = Path(process, "stat").read_bytes()
    return text[text.rindex(b")") + 2 :].split()


def _members(group: int) -> Iterator[str]:
    for process in _processes():
        try:
            state, _, its_group = _fields(process)[:3]
        except (OSError, ValueError):
            continue
        if int(its_group) == group and state not in (b"Z", b"X"):
            yield process


def _kib(process: str, file: str, names: tuple[str, ...]) -> int:
    try:
        lines = Path(process, file).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines if line.partition(":")[0] in names)
    return sum(int(words[1]) for words in found if len(words) > 1)


def _resident_bytes(process: str) -> int:
    return _kib(process, "status", ("RssAnon", "RssShmem", "VmSwap")) << 10


def _own_share_bytes(process: str) -> int:
    return _kib(process, "smaps_rollup", ("Pss_Anon", "Pss_Shmem", "SwapPss")) << 10


def _below(folder: Path, seen: set[tuple[int, int]]) -> tuple[int, int]:
    """Bytes and entries below a folder, followed no further than the limits; a hard link counts once."""
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
        except OSError:  # gone meanwhile
            continue
    return total, entries


def _deleted_bytes(process: str, seen: set[tuple[int, int]]) -> int:
    """Of files that have no name any more and are held open or mapped."""
    total = 0
    for folder in ("fd", "map_files"):
        try:
            names = os.listdir(f"{process}/{folder}")
        except OSError:
            continue
        for name in names:
            try:
                about = os.stat(f"{process}/{folder}/{name}")
            except OSError:  # closed meanwhile, or of mappings that only root may look at
                continue
            if stat.S_ISREG(about.st_mode) and about.st_nlink == 0 and (about.st_dev, about.st_ino) not in seen:
                seen.add((about.st_dev, about.st_ino))
                total += about.st_blocks * _BLOCK
    return total
