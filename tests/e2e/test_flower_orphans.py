"""Tests that Flower's daemons and their processes end with the process that started them, however it ends.

The processes are found in ``/proc``. No test of this file may hold a ``ProcessGroup`` meanwhile, which adopts orphans.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")]

CTRL_C = """
import signal, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
signal.signal(signal.SIGINT, signal.default_int_handler)
from test_flower_daemons import foreign_app, start
from client.operations.daemons import launcher, supernode
from common.process import ProcessGroup
from server.operations.daemons import register_node, submit, superexec
folder = Path({where!r})
with ProcessGroup() as group:
    federation = start(group, folder)
    group.start(superexec(federation.server, relay=folder))
    site = federation.node("A", 0)
    register_node(federation.server, site.keys.public, name="A")
    group.start_all([supernode(site), launcher(site)])
    submit(federation.server, foreign_app(folder / "app", out=folder / "out", nodes=99))
    (folder / "submitted").touch()
    time.sleep(300)
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_flower_process_outlives_its_parent(tmp_path: Path, signum: signal.Signals) -> None:
    root, here = str(Path(__file__).parents[2]), str(Path(__file__).parent)
    code = CTRL_C.format(root=root, here=here, where=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL) as parent:
        submitted = (tmp_path / "submitted").exists
        until(lambda: submitted() and any("serverapp" in line for line in commands(tmp_path)), "the federation")
        assert len(commands(tmp_path)) >= 5  # superlink, superexec, supernode, launcher, the ServerApp
        parent.send_signal(signum)
        parent.wait(600)
    if signum == signal.SIGKILL:  # the parent no longer waits for Flower's shutdown
        until(lambda: not commands(tmp_path), lambda: commands(tmp_path))
    assert commands(tmp_path) == []


def commands(folder: Path) -> list[str]:
    """Return the command lines, as the kernel states them, of processes whose environment contains ``folder``."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path("/proc", pid, "environ").read_bytes()
            if str(folder).encode() in environment:
                found.append(Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
