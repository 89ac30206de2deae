"""A program the hospital brought, run where it can read what was declared, write its own folder, and reach no network.

Three locks of the Linux kernel, none of which needs a privilege or can be taken off again: Landlock (files by path),
seccomp (no socket of any kind, no tracing, no mounts, no session of its own) and resource limits. A time limit ends the
whole process group, which nothing in it can leave. Refuses to run anything on a kernel that has not both.
Source: landlock(7), seccomp(2).
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
_LAST_WORDS = 400


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a program may do: paths to read, paths to write, seconds, and GiB of memory of its own."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    timeout_s: int
    memory_gib: int


def run_confined(argv: Sequence[str], within: Confinement, *, cwd: Path, log: Path) -> None:
    """Run ``argv`` to its end under ``within``, its words going to ``log``, which it cannot reach itself.

    DaemonFailed if it ends otherwise than with 0, or not in time; the message has the last of its words and is for the
    site's own eyes.
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
            status: int | None = process.wait(within.timeout_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_group(process)
    if status is None:
        raise DaemonFailed(f"the teacher's program was ended after {within.timeout_s} s; to fix: --timeout")
    if status != 0:
        raise DaemonFailed(f"the teacher's program ended with {status}: {_last_words(log)}")


def can_confine() -> bool:
    """Whether this kernel has what a confinement is made of."""
    return sys.platform == "linux" and platform.machine() in _CALLS and _landlock_version() >= 1


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

_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {"socket": 41, "ptrace": 101, "setpgid": 109, "setsid": 112, "pivot_root": 155, "mount": 165, "umount2": 166}
        | {"init_module": 175, "delete_module": 176, "kexec_load": 246, "add_key": 248, "request_key": 249}
        | {"keyctl": 250, "unshare": 272, "perf_event_open": 298, "open_by_handle_at": 304, "setns": 308}
        | {"process_vm_readv": 310, "process_vm_writev": 311, "finit_module": 313, "bpf": 321, "userfaultfd": 323}
        | {"truncate": 76, "~chmod": 90, "~fchmod": 91, "~chown": 92, "~fchown": 93, "~lchown": 94, "~utime": 132}
        | {"~setxattr": 188, "~lsetxattr": 189, "~fsetxattr": 190, "~removexattr": 197, "~lremovexattr": 198}
        | {"~fremovexattr": 199, "~utimes": 235, "~fchownat": 260, "~futimesat": 261, "~fchmodat": 268}
        | {"~utimensat": 280},
    ),
    "aarch64": (
        0xC00000B7,
        {"socket": 198, "ptrace": 117, "setpgid": 154, "setsid": 157, "pivot_root": 41, "mount": 40, "umount2": 39}
        | {"init_module": 105, "delete_module": 106, "kexec_load": 104, "add_key": 217, "request_key": 218}
        | {"keyctl": 219, "unshare": 97, "perf_event_open": 241, "open_by_handle_at": 265, "setns": 268}
        | {"process_vm_readv": 270, "process_vm_writev": 271, "finit_module": 273, "bpf": 280, "userfaultfd": 282}
        | {"truncate": 45, "~setxattr": 5, "~lsetxattr": 6, "~fsetxattr": 7, "~removexattr": 14, "~lremovexattr": 15}
        | {"~fremovexattr": 16, "~fchmod": 52, "~fchmodat": 53, "~fchownat": 54, "~fchown": 55, "~utimensat": 88},
    ),
}
"""Each machine's number and the calls that are refused. ``~``: said to be done and not done, since Landlock knows no
modes, owners or times and copying a file sets them."""
_NEWER = (*range(425, 434), 438, 442, 463, 466)  # io_uring, new mounts, pidfd_getfd, and attributes by another way
_NEWER_SILENT = (452,)  # fchmodat2


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


def _restrict_calls() -> None:
    """A seccomp filter: the calls of this machine's table, every later one by the same numbers, no other machine's."""
    machine, calls = _CALLS[platform.machine()]
    refused = {number for name, number in calls.items() if not name.startswith("~")} | set(_NEWER)
    if _landlock_version() >= 3:
        refused.discard(calls["truncate"])
    silent = {number for name, number in calls.items() if name.startswith("~")} | set(_NEWER_SILENT)
    load, equal, at_least, give = 0x20, 0x15, 0x35, 0x06
    kill, allow, fail = 0x80000000, 0x7FFF0000, 0x00050000
    program = [(load, 0, 0, 4), (equal, 1, 0, machine), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # x32: the same calls by other numbers
    for numbers, answer in ((refused, fail | 1), (silent, fail)):
        for number in sorted(numbers):
            program += [(equal, 0, 1, number), (give, 0, 0, answer)]
    program.append((give, 0, 0, allow))
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(code))
    if _libc().prctl(22, 2, filters, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def _limit(within: Confinement) -> None:
    memory, cpu = within.memory_gib << 30, within.timeout_s * (os.cpu_count() or 1)
    limits = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: cpu,
        resource.RLIMIT_DATA: memory,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: 1024,
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
        _restrict_files(within)
        _restrict_calls()
        os.execv(argv[0], argv)
    except OSError as error:
        sys.exit(f"cannot run {argv[0]} confined: {error}")


if __name__ == "__main__":
    main()
