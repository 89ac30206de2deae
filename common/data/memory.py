"""Reads how much memory this process may allocate, from its container and its machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_COUNTED: ContextVar[str] = ContextVar("field of /proc/meminfo that counts as free", default="MemAvailable")
_ASSUMED: ContextVar[int | None] = ContextVar("free memory to assume", default=None)


@contextmanager
def assuming_free(free: int | None) -> Iterator[None]:
    """Let :func:`free_memory_bytes` return a given number in this block.

    The memory that is free now also depends on the scans that other processes have opened.

    Args:
        free: What :func:`free_memory_bytes` returned earlier; None to measure anew at each call.
    """
    token = _ASSUMED.set(free)
    try:
        yield
    finally:
        _ASSUMED.reset(token)


@contextmanager
def ignoring_other_programs() -> Iterator[None]:
    """Let :func:`free_memory_bytes` ignore in this block what other programs of the machine use.

    The machine's whole memory then counts as free. The free memory of this process's container still limits the result.
    """
    token = _COUNTED.set("MemTotal")
    try:
        yield
    finally:
        _COUNTED.reset(token)


def free_memory_bytes(root: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return how much memory can still be allocated: the smaller of the container's and the machine's free memory.

    Args:
        root: Mount point of the control groups, of version 2 or 1.
        meminfo: The machine's ``/proc/meminfo``.

    Returns:
        Bytes; None if neither is known. Memory in which a container caches files counts as free. In a block of
        :func:`assuming_free`, the number given there.
    """
    if (known := _ASSUMED.get()) is not None:
        return known
    return _least(_machine(meminfo, _COUNTED.get()), *_container(root))


def _least(*found: int | None) -> int | None:
    return min((one for one in found if one is not None), default=None)


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
