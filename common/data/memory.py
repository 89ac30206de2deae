"""Reads how much memory this process may allocate, now or at all, from its container and its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEASURED: ContextVar[int | None] = ContextVar("free memory that was measured before", default=None)


@contextmanager
def measured_before(free: int | None) -> Iterator[None]:
    """Let :func:`free_memory_bytes` return an earlier result, or all memory there is, in this block.

    The memory that is free now also depends on the scans that other processes have opened.

    Args:
        free: What :func:`free_memory_bytes` returned earlier, or what :func:`whole_memory_bytes` returns; None to
            measure anew at each call.
    """
    token = _MEASURED.set(free)
    try:
        yield
    finally:
        _MEASURED.reset(token)


def free_memory_bytes(root: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return how much memory can still be allocated: the smaller of the container's and the machine's free memory.

    Args:
        root: Mount point of the control groups, of version 2 or 1.
        meminfo: The machine's ``/proc/meminfo``.

    Returns:
        Bytes; None if neither is known. Memory in which a container caches files counts as free. In a block of
        :func:`measured_before`, the earlier result.
    """
    if (known := _MEASURED.get()) is not None:
        return known
    found = [free for free in (_machine(meminfo, "MemAvailable"), *_container(root)) if free is not None]
    return min(found) if found else None


def whole_memory_bytes(root: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return how much memory this process may allocate if nothing else uses any: the smaller of the container's and the
    machine's memory.

    Args:
        root: Mount point of the control groups, of version 2 or 1.
        meminfo: The machine's ``/proc/meminfo``.

    Returns:
        Bytes; None if neither is known.
    """
    found = [_machine(meminfo, "MemTotal")]
    for file in (root / "memory.max", root / "memory" / "memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # not mounted, or no limit: "max"
            found.append(int(file.read_text()))
    known = [one for one in found if one is not None]
    return min(known) if known else None


def _container(root: Path) -> list[int | None]:
    pairs = (
        (root / "memory.max", root / "memory.current", root / "memory.stat"),
        *((root / "memory" / f"memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),),
    )
    return [_left(*map(Path, files)) for files in pairs]


def _left(limit: Path, used: Path, stat: Path) -> int | None:
    try:
        most, now = int(limit.read_text()), int(used.read_text())
        files = dict(line.split() for line in stat.read_text().splitlines())
        return max(0, most - now + int(files.get("inactive_file", files.get("total_inactive_file", 0))))
    except (OSError, ValueError):  # not mounted, or no limit: "max"
        return None


def _machine(meminfo: Path, what: str) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == what:
                return int(rest.split()[0]) << 10
    except (OSError, ValueError):
        pass
    return None
