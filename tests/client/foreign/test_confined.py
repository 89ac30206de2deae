"""A program the hospital brought can do what was declared and nothing else, whatever it tries."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from client.foreign import confined
from client.foreign.confined import Confinement, read_plain_file, run_confined
from common.errors import DaemonFailed, InvalidInput

pytestmark = pytest.mark.skipif(not confined.can_confine(), reason="needs Landlock and seccomp")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "given").write_text("given")
    (tmp_path / "patient").write_text("secret")
    return tmp_path


def run(folder: Path, code: str, *, timeout_s: int = 20) -> str:
    within = Confinement(
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
    "call(272 if os.uname().machine == 'x86_64' else 97, 0x10000000)",  # a user namespace
)

TRY = """
import ctypes, os, socket
def call(*numbers):
    if ctypes.CDLL(None).syscall(*numbers) < 0:
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


def test_what_was_not_declared_is_out_of_reach_however_it_is_tried(folder: Path) -> None:
    attempts = [attempt.format(folder=folder, parent=os.getpid()) for attempt in ATTEMPTS]
    assert run(folder, TRY.format(attempts=attempts)) == ""
    assert (folder / "patient").read_text() == "secret"
    assert (folder / "in" / "given").read_text() == "given"


def test_what_it_starts_is_as_confined_as_itself(folder: Path) -> None:
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
    with pytest.raises(DaemonFailed, match="ended after 1 s"):
        run(folder, code, timeout_s=1)
    assert time.monotonic() - started < 10
    child = int((folder / "log").read_text())
    for _ in range(50):
        if not Path(f"/proc/{child}").exists():
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("a child was left behind")


def test_a_kernel_that_cannot_confine_runs_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confined, "_landlock_version", lambda: 0)
    with pytest.raises(InvalidInput, match="to fix: add landlock"):
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
