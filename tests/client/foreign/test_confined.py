"""Tests that a hospital's own program can do only what was declared for it."""

from __future__ import annotations

import os
import signal
import struct
import sys
import tempfile
import time
from pathlib import Path

import pytest

from client.foreign import calls, confined, teacher
from client.foreign.confined import ResourceLimits, read_plain_file, run_confined
from common.errors import DaemonFailed, InvalidInput

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not confined.can_confine(), reason="needs Landlock and seccomp")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "given").write_text("given")
    (tmp_path / "patient").write_text("secret")
    return tmp_path


def run(folder: Path, code: str, *, timeout_s: int = 20) -> str:
    within = ResourceLimits(
        reads=(sys.prefix, sys.base_prefix, str(folder / "in")),
        writes=(str(folder / "out"),),
        timeout_s=timeout_s,
        memory_gib=1,
    )
    argv = [sys.executable, "-I", "-S", "-c", code]
    run_confined(argv, within, cwd=folder / "out", log=folder / "log")
    return (folder / "log").read_text().strip()


def test_a_program_reads_what_was_declared_and_writes_its_own_folder(folder: Path) -> None:
    code = f"open('answer', 'w').write(open('{folder}/in/given').read() + '!'); print('done')"
    assert run(folder, code) == "done"
    assert (folder / "out" / "answer").read_text() == "given!"


ATTEMPTS = (
    "open('{folder}/patient').read()",
    "open('{folder}/new', 'w')",
    "open('{folder}/in/given', 'a')",
    "os.truncate('{folder}/patient', 0)",
    "os.link('{folder}/patient', 'mine'); open('mine').read()",
    "os.symlink('{folder}/patient', 'mine'); open('mine').read()",
    "os.rename('{folder}/patient', 'mine')",
    "os.listdir('{folder}')",
    "open('/proc/{parent}/environ').read()",
    "open('/proc/{parent}/mem', 'rb').read(1)",
    "open('/proc/{parent}/root{folder}/patient').read()",
    "open('/proc/self/root{folder}/patient').read()",
    "open('/dev/shm/left', 'w')",
    "socket.socket()",
    "socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)",
    "socket.socket(socket.AF_UNIX)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "os.setsid()",
    "os.setpgid(0, 0)",
    "os.kill({parent}, 0)",
    "bytearray(2 << 30)",
    "call(425, 8, 0)",  # io_uring
    "call(302 if X86 else 261, {parent}, 1, ctypes.byref((ctypes.c_uint64 * 2)(0, 0)), None)",  # prlimit of its parent
    "import resource; resource.prlimit({parent}, resource.RLIMIT_FSIZE)",
    "os.setpriority(os.PRIO_PROCESS, {parent}, 5)",
    "os.setpriority(os.PRIO_USER, 0, 5)",
    "os.setpriority(os.PRIO_PGRP, 0, 5)",
    "os.sched_setaffinity({parent}, [0])",
    "os.sched_setscheduler({parent}, os.SCHED_BATCH, os.sched_param(0))",
    "os.sched_setparam({parent}, os.sched_param(0))",
    "call(314 if X86 else 274, {parent}, (ctypes.c_uint32 * 12)(48), 0)",  # sched_setattr
    "call(251 if X86 else 30, 1, {parent}, (3 << 13))",  # ioprio_set
    *(f"call(56 if X86 else 220, {flag} | 17, 0, 0, 0, 0)" for flag in (0x20000, *(1 << bit for bit in range(25, 31)))),
    "call(56 if X86 else 220, 0x8000 | 17, 0, 0, 0, 0)",  # a child of its parent
    "call(435, (ctypes.c_uint64 * 11)(0x10000000, 0, 0, 0, 17), 88)",  # clone3
    "call(308 if X86 else 268, 0, 0)",  # setns
    "signal.pidfd_send_signal(os.pidfd_open({parent}), 0)",
    "call(129 if X86 else 138, {parent}, 0, (ctypes.c_uint64 * 16)())",  # rt_sigqueueinfo
    "call(234 if X86 else 131, {parent}, {parent}, 0)",  # tgkill
    "fcntl.fcntl(os.pipe()[0], fcntl.F_SETOWN, {parent})",
    "fcntl.fcntl(os.pipe()[0], 1031, 1 << 20)",  # a larger pipe, of the user's quota
    "call(1 if not X86 else 101, 16, {parent}, 0, 0)",  # ptrace
    "call(310 if X86 else 270, {parent}, 0, 0, 0, 0, 0)",  # process_vm_readv
    "call(312 if X86 else 272, os.getpid(), {parent}, 1, 0, 0)",  # kcmp
    "call(440, 0, 0, 0, 0, 0)",  # process_madvise
    "call(256 if X86 else 238, {parent}, 0, 0, 0)",  # migrate_pages
    "call(29 if X86 else 194, 1, 4096, 0o1600)",  # shmget
    "call(64 if X86 else 190, 1, 1, 0o1600)",  # semget
    "call(68 if X86 else 186, 1, 0o1600)",  # msgget
    "call(240 if X86 else 180, b'queue', 0o102, 0o600, None)",  # mq_open
    "call(250 if X86 else 219, 0, -3, 1)",  # keyctl
    "call(294 if X86 else 26, 0)",  # inotify_init1
    "call(319 if X86 else 279, b'x', 0)",  # memfd_create
    "call(161 if X86 else 51, b'/')",  # chroot
    "call(135 if X86 else 92, 0x0040000)",  # personality
    "call(157 if X86 else 167, 1, 0, 0, 0, 0)",  # prctl that lets it outlive the worker
    "call(157 if X86 else 167, 4, 0, 0, 0, 0)",  # prctl that hides it from the process count
    "call(500)",  # a number that no kernel uses yet
    "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
    "socket.socketpair()[0].bind('{folder}/out/socket')",
    "os.setresuid(0, 65534, 0)",
    "os.setgroups([])",
    "call(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)",  # a user namespace
)

TRY = """
import ctypes, fcntl, os, signal, socket
X86 = os.uname().machine == 'x86_64'
def call(*numbers):
    if ctypes.CDLL(None, use_errno=True).syscall(*numbers) < 0:
        raise OSError
for attempt in {attempts!r}:
    child = os.fork()
    if child == 0:
        try:
            exec(attempt)
        except (OSError, MemoryError):
            os._exit(0)
        os._exit(1)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
        print(attempt)
"""


def test_nothing_undeclared_can_be_reached_in_any_way(folder: Path) -> None:
    attempts = [attempt.format(folder=folder, parent=os.getpid()) for attempt in ATTEMPTS]
    assert run(folder, TRY.format(attempts=attempts)) == ""
    assert (folder / "patient").read_text() == "secret"
    assert (folder / "in" / "given").read_text() == "given"


def test_a_process_started_by_a_confined_program_is_confined_as_well(folder: Path) -> None:
    code = f"import subprocess; subprocess.run(['/bin/cat', '{folder}/patient'], check=True)"
    with pytest.raises(DaemonFailed, match="Permission denied"):
        run(folder, code)


def test_modes_and_times_are_left_as_they_are_and_copying_a_file_still_works(folder: Path) -> None:
    code = "import shutil; shutil.copy2('/bin/true', 'copy'); import os; os.chmod('copy', 0o6777)"
    run(folder, code)
    assert (folder / "out" / "copy").stat().st_mode & 0o7000 == 0


def test_a_program_that_takes_too_long_is_ended_with_all_it_started(folder: Path) -> None:
    code = "import subprocess as s, time; print(s.Popen(['/bin/sleep', '600']).pid, flush=True); time.sleep(600)"
    started = time.monotonic()
    with pytest.raises(DaemonFailed, match=r"within 1 s"):
        run(folder, code, timeout_s=1)
    assert time.monotonic() - started < 60  # of the 600 s that the program sleeps
    child = int((folder / "log").read_text())
    for _ in range(50):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("a child was left behind")


def test_folders_within_folders_do_not_outlive_the_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    code = "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')"
    with pytest.raises(DaemonFailed, match="files and folders"):
        run(folder, code)
    with teacher._scratch() as scratch:
        (folder / "out").rename(scratch / "out")
    assert not scratch.exists()


@pytest.mark.parametrize("machine", calls.MACHINES)
@pytest.mark.parametrize("scoped", [True, False])
def test_every_call_is_decided_as_its_list_says(machine: str, scoped: bool) -> None:
    """The oracle interprets the filter's instructions: no system call gets the answer meant for another one."""
    known = calls.known_calls(machine)
    program = calls.call_filter(machine, scoped_signals=scoped, group=77)
    every = [*known.allowed.values(), *known.pretended.values(), *known.checked.values()]
    assert len(every) == len(set(every))
    for number in range(600):
        answer = decide(program, known.machine, number, (99, 99, 99, 99, 99, 99))
        if number in known.allowed.values():
            assert answer == ALLOW, number
        elif number in known.pretended.values():
            assert answer == 0x50000, number
        elif number not in known.checked.values():
            assert answer in (0x50001, 0x50026), number
    for name, number in known.checked.items():
        answers = {decide(program, known.machine, number, arguments) for arguments in ARGUMENTS[name][0]}
        assert answers <= {ALLOW}, name
        answers = {decide(program, known.machine, number, arguments) for arguments in ARGUMENTS[name][1 + (not scoped)]}
        assert ALLOW not in answers, name
    assert decide(program, 0x40000003, 1, (0,) * 6) == 0x80000000  # system calls of another architecture
    assert decide(program, known.machine, 0x40000001, (0,) * 6) == 0x80000000


ALLOW = 0x7FFF0000
ARGUMENTS: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    name: (good, bad, bad if unscoped is None else unscoped)
    for name, good, bad, unscoped in (
        ("clone", [(0x3D0F00,), (17,), (0x01200011,)], [(0x10000011,), (0x20000,), (0x8011,), (0x40000000,)], None),
        ("clone3", [], [(0, 88)], None),
        ("prlimit64", [(0, 7), (1 << 32, 7)], [(1,), (99,)], None),
        ("sched_setaffinity", [(0,)], [(99,)], None),
        ("setpriority", [(0, 0, 5)], [(0, 99, 5), (1, 0, 5), (2, 0, 5)], None),
        ("kill", [(0, 9), (77, 9), (0xFFFFFFB3, 9)], [], [(1, 9), (0xFFFFFFFF, 9), (76, 9)]),
        ("tkill", [(77, 6)], [], [(1, 9)]),
        ("tgkill", [(77, 77, 6)], [], [(1, 1, 9)]),
        ("fcntl", [(3, 1), (3, 1030)], [(3, 8), (3, 10), (3, 15), (3, 1024), (3, 1026), (3, 1031)], None),
        ("ioctl", [(3, 0x5401)], [(0, 0x5412), (0, 0x541C), (3, 0x8901)], None),
        ("prctl", [(15,), (38, 1)], [(1,), (4, 0), (36, 1), (62,), (24, 1)], None),
        ("socketpair", [(1, 1), (1, 0x80801), (1, 5)], [(1, 2), (2, 1), (1, 3), (16, 1)], None),
        ("sendto", [(3, 5, 5, 0, 0)], [(3, 5, 5, 0, 1 << 40), (3, 5, 5, 0, 8)], None),
    )
}


def decide(program: bytes, machine: int, number: int, arguments: tuple[int, ...]) -> int:
    """Return the answer of a classic BPF program to one system call, interpreted as bpf(4) defines it."""
    padded = (*arguments, *(0,) * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number, machine, 0, *padded)
    lines = list(struct.iter_unpack("=HBBI", program))
    place, held = 0, 0
    while True:
        code, true, false, value = lines[place]
        place += 1
        if code == 0x20:
            (held,) = struct.unpack_from("<I", data, value)
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: held == value, 0x35: held >= value, 0x45: bool(held & value)}[code]
            place += true if holds else false


def test_a_kernel_that_cannot_confine_runs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "_landlock_version", lambda: 0)
    with pytest.raises(InvalidInput, match=r"landlock.*lsm="):
        run(folder, "open('answer', 'w')")
    assert list((folder / "out").iterdir()) == []


def test_an_output_that_is_no_plain_file_is_not_read(folder: Path) -> None:
    (folder / "out" / "link").symlink_to(folder / "patient")
    os.mkfifo(folder / "out" / "pipe")
    (folder / "out" / "large").write_bytes(b"12345")
    for name in ("link", "pipe", "absent", "large"):
        with pytest.raises(InvalidInput):
            read_plain_file(folder / "out" / name, most=4)
    assert read_plain_file(folder / "out" / "large", most=5) == b"12345"
