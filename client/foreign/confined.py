"""Runs a program of the hospital so that it reads only declared files, writes only its own folder, and has no network.

Three mechanisms of the Linux kernel confine it, none of which needs a privilege or can be undone: Landlock (files by
path), seccomp (only the calls in :mod:`client.foreign.calls`), and resource limits. No call reaches another process of
the same user. The site's process adds up the processes, memory and files of the program and its children
(:mod:`client.foreign.watch`). If the sum exceeds a limit, or time is up, the whole process group is killed; no process
can leave the group. The module refuses to run a program on a kernel without Landlock or seccomp. Source: landlock(7),
seccomp(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from client.foreign.calls import MACHINES, call_filter
from client.foreign.watch import MAX_ENTRIES, ResourceUsage, measure, tasks_of_user
from common.errors import DaemonFailed, InvalidInput
from common.objects import read_regular
from common.process import base_env

SYSTEM = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/sys", "/proc/self", "/proc/sys"),
    *(f"/proc/{name}" for name in ("cpuinfo", "filesystems", "loadavg", "meminfo", "stat", "uptime", "version")),
)
"""Paths every program may read. Homes, /opt, /srv, /tmp, the site's directories and other processes are left out."""

_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_GPUS = "nvidia*"
MAX_FILE_BYTES = 1 << 31
MAX_PROCESSES = 64
MORE_TASKS = 1024
"""Number of processes and threads that a program may start in addition to those that its user runs when it starts. The
kernel does not apply this limit to root; for root, MAX_PROCESSES is the only limit.
"""
SCRATCH_BYTES = 256 << 20
"""Number of bytes that a program may always write, for its libraries' caches and the answers to small volumes."""
LOOK_EVERY_S = 0.1
_LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits on what a program and all its children may use together.

    Attributes:
        reads: Paths they may read.
        writes: Paths they may write; the first is their home.
        timeout_s: Longest run time, in seconds.
        memory_gib: Most memory, in GiB.
        disk_bytes: Most bytes of written files.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    timeout_s: int
    memory_gib: int
    disk_bytes: int = SCRATCH_BYTES

    @property
    def most(self) -> ResourceUsage:
        """The limits on processes, memory, bytes and number of files."""
        return ResourceUsage(MAX_PROCESSES, self.memory_gib << 30, self.disk_bytes, MAX_ENTRIES)


def run_confined(argv: Sequence[str], within: ResourceLimits, *, cwd: Path, log: Path) -> ResourceUsage:
    """Run a program until it ends, confined as the module's docstring describes.

    Args:
        argv: The command.
        within: The paths that the program may use, and the limits on what it may use.
        cwd: Working directory.
        log: File for its output, which the program itself cannot reach.

    Returns:
        The peak of each resource it used, measured every :data:`LOOK_EVERY_S` seconds and at its end.

    Raises:
        DaemonFailed: If the program ends with another status than 0, exceeds its time, or uses more than allowed. The
            message can contain the end of the program's output, so it must not leave the site.
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
        raise DaemonFailed(f"the teacher's program exceeded a limit and was killed: {over}; to fix: {_REMEDY}")
    if status is None:
        raise DaemonFailed(
            f"the teacher's program did not end within {within.timeout_s} s and was killed; to fix: allow more time "
            "with --timeout"
        )
    if status != 0:
        raise DaemonFailed(
            f"the teacher's program ended with status {status}; its last output: {_last_words(log)}; to fix: correct "
            "the program until it segments one volume when you run it by hand"
        )
    return used


_REMEDY = (
    "allow more memory with --memory; for another limit, change the program so that it uses fewer processes or writes "
    "less"
)


def _watched(
    process: subprocess.Popen[bytes], within: ResourceLimits, log: Path
) -> tuple[int | None, ResourceUsage, str]:
    """Return the exit status (None if time was up), the peak use of each resource, and which limit was exceeded."""
    written, most = [*map(Path, within.writes)], within.most
    deadline, peak = time.monotonic() + within.timeout_s, ResourceUsage()
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
    """Tell whether this kernel has Landlock and the machine is supported."""
    return sys.platform == "linux" and platform.machine() in MACHINES and _landlock_version() >= 1


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill every process of the program that is left; the group consists of this program only."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last_words(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4 * _LAST_WORDS))
        text = file.read().decode("utf-8", "replace")
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[-_LAST_WORDS:] or "none"


def read_plain_file(path: Path, *, most: int = MAX_FILE_BYTES) -> bytes:
    """Read a file that a confined program wrote.

    Args:
        path: The file.
        most: Largest size in bytes.

    Returns:
        Its content.

    Raises:
        InvalidInput: If it is missing, a link, a device or a pipe, or too large.
    """
    try:
        return read_regular(path, most_bytes=most, received=True)
    except (OSError, InvalidInput) as error:
        raise InvalidInput(
            "output of the teacher's program",
            value=path.name,
            limit=f"a regular file of at most {most} bytes, not a link",
        ) from error


# --- below: runs in the program's own process, before the program starts

_READ_FILE, _READ_DIR, _EXECUTE, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 0, 1 << 1
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_MOST_BY_VERSION = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1}
_READ = _READ_FILE | _READ_DIR | _EXECUTE
_FILE_RIGHTS = _READ_FILE | _WRITE_FILE | _EXECUTE | _TRUNCATE | _IOCTL
_NOT_MADE = 1 << 6 | 1 << 11  # devices
_CREATE, _ADD, _RESTRICT = 444, 445, 446


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _landlock_version() -> int:
    return int(_libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint(1)))


def _restrict_files(within: ResourceLimits) -> None:
    """Let Landlock forbid everything except reading ``reads`` and writing below ``writes``."""
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
    """Install a seccomp filter (:func:`client.foreign.calls.call_filter`)."""
    code = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    if _libc().prctl(22, 2, filters, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _drop_capabilities() -> None:
    """Drop all capabilities, even those of root; no_new_privs keeps the program from regaining them."""
    if _libc().capset(struct.pack("=Ii", 0x20080522, 0), struct.pack("=6I", *(0,) * 6)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _limit(within: ResourceLimits) -> None:
    memory, cpu = within.memory_gib << 30, within.timeout_s * (os.cpu_count() or 1)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: min(
            MAX_FILE_BYTES, within.disk_bytes + (1 << 20)
        ),  # above the quota, so that the check finds it
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
    """Confine this process, then replace it by the program: ``python -m client.foreign.confined ORDER``.

    ORDER is JSON with the command and its confinement.
    """
    order = json.loads(sys.argv[1])
    within, argv = ResourceLimits(**order["within"]), order["argv"]
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
