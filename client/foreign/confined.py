"""A program the hospital brought, run where it can read what was declared, write its own folder, and reach no network.

Three locks of the Linux kernel, none of which needs a privilege or can be taken off again: Landlock (files by path),
seccomp (the calls of :mod:`client.foreign.calls` and no others) and resource limits. No call reaches another process of
the same user. Processes, memory and files are counted together (:mod:`client.foreign.watch`); past a limit, or when the
time is up, the whole process group is ended, which nothing in it can leave. Refuses to run anything on a kernel that
has not both. Source: landlock(7), seccomp(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from client.foreign.calls import MACHINES, call_filter
from client.foreign.watch import MAX_ENTRIES, Usage, measure, tasks_of_user
from common.errors import DaemonFailed, InvalidInput
from common.process import base_env

SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/sys", "/proc/self", "/proc/sys"),
    *(f"/proc/{name}" for name in ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version")),
)
"""What every program may read. Homes, /opt, /srv, /tmp, the site's own directories and other processes are not."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPUS = "nvidia*"
MAX_FILE_BYTES = 1 << 31
MAX_PROCESSES = 64
MORE_TASKS = 1024
"""Threads that a program may have beside those its user has when it begins; root is held by MAX_PROCESSES alone."""
SCRATCH_BYTES = 256 << 20
"""What a program may write at least: caches of its libraries, and answers of small volumes."""
LOOK_EVERY_S = 0.1
_LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a program and all it starts may do together: paths to read, paths to write, seconds, GiB of memory, bytes
    of files."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    timeout_s: int
    memory_gib: int
    disk_bytes: int = SCRATCH_BYTES

    @property
    def most(self) -> Usage:
        """The limits on what is counted."""
        return Usage(MAX_PROCESSES, self.memory_gib << 30, self.disk_bytes, MAX_ENTRIES)


def run_confined(argv: Sequence[str], within: Confinement, *, cwd: Path, log: Path) -> Usage:
    """Run ``argv`` to its end under ``within``, its words going to ``log``, which it cannot reach itself.

    Returns:
        The most it was seen to use at once, looked at every :data:`LOOK_EVERY_S` seconds and at its end.

    Raises:
        DaemonFailed: If it ends otherwise than with 0, not in time, or used more than ``within`` allows. The message
            has the last of its words and is for the site's own eyes.
        InvalidInput: On a kernel that cannot confine a program.
    """
    if not can_confine():
        raise InvalidInput(
            "kernel that cannot confine a program",
            value=platform.release(),
            limit="Linux 5.13 or newer with Landlock and seccomp, on x86-64 or ARM64",
            remedy="add landlock to the kernel's lsm= list, or run the site on a newer kernel",
        )
    order = json.dumps({"argv": list(argv), "within": asdict(within)})
    home = within.writes[0]
    environment = base_env() | {"HOME": home, "TMPDIR": home, "XDG_CACHE_HOME": home, "PYTHONDONTWRITEBYTECODE": "1"}
    environment.pop("XDG_RUNTIME_DIR", None)
    with log.open("wb") as words:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "client.foreign.confined", order],
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=words,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status, used, over = _watched(process, within, log)
        finally:
            _end_group(process)
    if over:
        raise DaemonFailed(f"the teacher's program was ended: {over}; to fix: {_REMEDY}")
    if status is None:
        raise DaemonFailed(f"the teacher's program was ended after {within.timeout_s} s; to fix: --timeout")
    if status != 0:
        raise DaemonFailed(f"the teacher's program ended with {status}: {_last_words(log)}")
    return used


_REMEDY = "--memory for memory; else have it use fewer processes, write less and delete what it no longer needs"


def _watched(process: subprocess.Popen[bytes], within: Confinement, log: Path) -> tuple[int | None, Usage, str]:
    """Its exit status (None: not in time), the most it used, and what was too much."""
    written, most = [*map(Path, within.writes)], within.most
    deadline, peak = time.monotonic() + within.timeout_s, Usage()
    while True:
        try:
            status: int | None = process.wait(min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            status = None
        used = measure(process.pid, written, memory_limit=most.memory_bytes)
        words = log.stat().st_blocks * 512
        used = replace(used, disk_bytes=used.disk_bytes + words)
        peak = peak.peak(used)
        if (over := used.over(most)) or status is not None or time.monotonic() >= deadline:
            return status, peak, over


def can_confine() -> bool:
    """Whether this kernel has what a confinement is made of."""
    return sys.platform == "linux" and platform.machine() in MACHINES and _landlock_version() >= 1


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the program; its group is a session's first and nobody else's."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * _LAST_WORDS))
        text = file.read().decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[-_LAST_WORDS:] or "it said nothing"


def read_plain_file(path: Path, *, most: int = MAX_FILE_BYTES) -> bytes:
    """A file that a confined program wrote: no link, no device, no pipe, and not larger than ``most`` bytes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidInput("output of the teacher's program", value=path.name, limit="a file it wrote") from error
    with open(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise InvalidInput("output of the teacher's program", value=path.name, limit=f"a file of {most} bytes")
        return file.read(most + 1)


# --- in the program's own process, before it begins

_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 0, 1 << 1
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_MOST_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_READ = _READ_FILE | _READ_DIR | _EXECUTE
_FILE_RIGHTS = _READ_FILE | _WRITE_FILE | _EXECUTE | _TRUNCATE | _IOCTL
_NOT_MADE = 1 << 6 | 1 << 11  # devices
_CREATE, _ADD, _RESTRICT = 444, 445, 446


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _landlock_version() -> int:
    return int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def _restrict_files(within: Confinement) -> None:
    """Everything that Landlock can forbid, but reading ``reads`` and whatever is below ``writes``."""
    libc, version = _libc(), _landlock_version()
    most = _MOST_BY_VERSION.get(version, (1 << 16) - 1)
    words = [most, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]  # TCP; abstract sockets and signals
    attributes = struct.pack(f"={len(words)}Q", *words)
    ruleset = libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0))
    if ruleset < 0:
        raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
    gpus = [str(path) for path in Path("/dev").glob(_GPUS)]
    for paths, rights in (
        ((*SYSTEM, *within.reads), _READ),
        (within.writes, most & ~_NOT_MADE & ~_IOCTL),
        ((*_DEVICES, *gpus), _READ_FILE | _WRITE_FILE | _READ_DIR | _IOCTL),
    ):
        for path in paths:
            if not os.path.exists(path):
                continue
            beneath = os.open(path, os.O_PATH | os.O_CLOEXEC)
            own = rights & most & (~0 if os.path.isdir(path) else _FILE_RIGHTS)
            rule = struct.pack("=Qi", own, beneath)
            if libc.syscall(_ADD, ruleset, ctypes.c_int(1), rule, ctypes.c_uint(0)) != 0:
                raise OSError(ctypes.get_errno(), f"landlock_add_rule for {path}")
            os.close(beneath)
    if libc.syscall(_RESTRICT, ruleset, ctypes.c_uint(0)) != 0:
        raise OSError(ctypes.get_errno(), "landlock_restrict_self")
    os.close(ruleset)


def _restrict_calls(program: bytes) -> None:
    """Let the kernel hold every call against ``program`` (:func:`client.foreign.calls.call_filter`)."""
    code = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if _libc().prctl(22, 2, filters, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _drop_capabilities() -> None:
    """Of a site that runs as root, too, the program has no privilege; no_new_privs keeps it from getting one again."""
    if _libc().capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *(0,) * 6)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _limit(within: Confinement) -> None:
    memory, cpu = within.memory_gib << 30, within.timeout_s * (os.cpu_count() or 1)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: min(MAX_FILE_BYTES, within.disk_bytes + (1 << 20)),  # more than the quota: to be seen
        resource.RLIMIT_NOFILE: 1024,
        resource.RLIMIT_NPROC: tasks_of_user() + MORE_TASKS,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NICE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_SIGPENDING: MORE_TASKS,
    }
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (least, least))


def main() -> None:
    """``python -m client.foreign.confined ORDER``: lock this process in and become the program."""
    order = json.loads(sys.argv[1])
    within, argv = Confinement(**order["within"]), order["argv"]
    libc = _libc()
    if libc.prctl(1, int(signal.SIGKILL), 0, 0, 0) != 0 or libc.prctl(38, 1, 0, 0, 0) != 0:
        sys.exit("prctl failed")
    try:
        _limit(within)
        program = call_filter(platform.machine(), scoped_signals=_landlock_version() >= 6, group=os.getpid())
        _restrict_files(within)
        _drop_capabilities()
        _restrict_calls(program)
        os.execv(argv[0], argv)
    except OSError as error:
        sys.exit(f"cannot run {argv[0]} confined: {error}")


if __name__ == "__main__":
    main()
