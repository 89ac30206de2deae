"""Attack: a program that a hospital uses as a teacher, and that runs as the site's own user, is malicious.

| attack | defence |
|---|---|
| it limits, slows, signals or traces the worker of the same user | system calls that name another process are refused |
| it gets privileges in a new namespace | clone3, unshare, setns and the namespace flags of clone are refused |
| it starts so many processes that the site stops | all of them are killed if there are more than 64 |
| it fills the disk or the memory | its files, deleted ones too, and the memory of all its processes have limits |
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from client.foreign import confined
from client.foreign.confined import ResourceLimits, run_confined
from common.errors import DaemonFailed

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not confined.can_confine(), reason="needs Landlock and seccomp")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path


def run(folder: Path, code: str) -> str:
    reads, writes = (sys.prefix, sys.base_prefix), (str(folder / "out"),)
    within = ResourceLimits(reads=reads, writes=writes, timeout_s=600, memory_gib=1)
    run_confined([sys.executable, "-I", "-S", "-c", code], within, cwd=folder / "out", log=folder / "log")
    return (folder / "log").read_text().strip()


ON_ANOTHER = """
import ctypes, os, resource, signal
number = 302 if os.uname().machine == 'x86_64' else 261
nothing = ctypes.byref((ctypes.c_uint64 * 2)(0, 0))
for attempt in (
    lambda: resource.prlimit({victim}, resource.RLIMIT_FSIZE, (0, 0)),
    lambda: ctypes.CDLL(None).syscall(number, {victim}, 1, nothing, None) or print('prlimit64'),
    lambda: os.setpriority(os.PRIO_PROCESS, {victim}, 19),
    lambda: os.setpriority(os.PRIO_USER, {user}, 19),
    lambda: os.sched_setaffinity({victim}, [0]),
    lambda: os.sched_setscheduler({victim}, os.SCHED_IDLE, os.sched_param(0)),
    lambda: os.kill({victim}, signal.SIGSTOP),
    lambda: os.kill({victim}, signal.SIGKILL),
):
    try:
        attempt()
    except OSError:
        pass
"""


def test_another_process_of_the_same_user_is_as_it_was(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:

        def state() -> tuple[object, ...]:
            limits = [resource.prlimit(victim.pid, which) for which in range(16)]
            priority = os.getpriority(os.PRIO_PROCESS, victim.pid)
            return limits, priority, os.sched_getaffinity(victim.pid), os.sched_getscheduler(victim.pid)

        try:
            before = state()
            assert run(folder, ON_ANOTHER.format(victim=victim.pid, user=os.getuid())) == ""
            assert state() == before
            assert victim.poll() is None
            assert Path(f"/proc/{victim.pid}/stat").read_text().split()[2] != "T"
        finally:
            victim.kill()


SWARM = "import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(30)\ntime.sleep(30)"
FILLING = {
    "many files": "for n in range(30): open(str(n), 'wb').write(bytes(30 << 20))",
    "a file without a name": "import os\nwith open('a', 'wb') as f:\n    os.unlink('a')\n"
    "    [f.write(bytes(10 << 20)) for _ in range(90)]\n    import time; f.flush(); time.sleep(30)",
    "its words": "import sys\nfor _ in range(900): sys.stdout.write('x' * (1 << 20))",
    "nothing in each": "for n in range(30_000): open(str(n), 'wb').close()",
}


def test_a_swarm_of_processes_is_ended_together(folder: Path) -> None:
    with pytest.raises(DaemonFailed, match=r"killed: \d+ processes, allowed 64; to fix: "):
        run(folder, SWARM)


@pytest.mark.parametrize("how", FILLING)
def test_no_more_is_written_than_the_quota_however_it_is_written(folder: Path, how: str) -> None:
    with pytest.raises(DaemonFailed, match=r"files, allowed 256|folders, allowed \d+|File too large"):
        run(folder, FILLING[how])


def test_memory_of_all_its_processes_counts_together(folder: Path) -> None:
    code = "import os, time\nfor _ in range(4): os.fork()\nheld = bytearray(os.urandom(1 << 20) * 100); time.sleep(30)"
    with pytest.raises(DaemonFailed, match=r"MiB of memory, allowed 1024"):
        run(folder, code)
