"""Tests that no daemon, and no helper of a daemon, outlives its parent, however the parent ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common import process, sockets
from common.errors import DaemonFailed, InvalidInput
from common.process import DaemonSpec, ProcessGroup, Terminated, base_env, executable, plain_text
from common.sockets import accepts, answers_http, free_port, free_ports, listen

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

# A daemon whose helper has its own session and ignores SIGINT and SIGTERM, as helpers of Flower's daemons do.
STUBBORN = """
import os, signal, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-S", "-c",
    "import signal,time; signal.signal(2, signal.SIG_IGN); signal.signal(15, signal.SIG_IGN); "
    "open(__import__('sys').argv[1], 'w').write('up'); time.sleep(300)", sys.argv[1] + ".up"], start_new_session=True)
while not os.path.exists(sys.argv[1] + ".up"):
    time.sleep(0.01)
open(sys.argv[1] + ".tmp", "w").write(f"{os.getpid()} {helper.pid}")
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
time.sleep(300)
"""


def spec(
    tmp_path: Path, code: str, *arguments: str, name: str = "one", role: str = "test", **more: object
) -> DaemonSpec:
    return DaemonSpec(
        role=role,
        name=name,
        argv=(sys.executable, "-S", "-c", code, *arguments),
        env=base_env(),
        cwd=tmp_path,
        log=tmp_path / f"{name}.log",
        **more,  # type: ignore[arg-type]
    )


def stubborn(tmp_path: Path, name: str = "one") -> tuple[DaemonSpec, Path]:
    pids = tmp_path / f"{name}.pids"
    return spec(tmp_path, STUBBORN, str(pids), name=name, ready=pids.exists, grace_s=0.3), pids


def living(pid: int) -> bool:
    """Return whether the kernel lists the process as alive; this oracle does not use the tested code."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] not in "ZX"


def test_the_kernel_rather_kills_a_daemon_that_is_short_of_memory_than_what_starts_it_again(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        daemon = group.start(spec(tmp_path, "import time; time.sleep(300)"))
        scores = [int(Path(f"/proc/{pid}/oom_score").read_text()) for pid in (daemon.pid, os.getpid())]
        assert scores[0] > scores[1]


def eventually(condition: Callable[[], bool], timeout_s: float = 600.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return condition()


@pytest.mark.slow
def test_no_process_is_left_after_the_block(tmp_path: Path) -> None:
    one, pids = stubborn(tmp_path)
    with ProcessGroup() as group:
        daemon = group.start(one)
        both = [int(pid) for pid in pids.read_text().split()]
        assert both[0] == daemon.pid
        assert set(both) <= daemon.members()
        assert os.getsid(daemon.pid) == daemon.pid != os.getsid(0)
        assert os.getsid(both[1]) != daemon.pid
    assert not any(map(living, both))


@pytest.mark.slow
def test_the_block_waits_for_a_killed_process_that_has_given_up_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = stubborn(tmp_path)
    answers = [True, True]
    with ProcessGroup() as group:
        group.start(one)
        monkeypatch.setattr("common.process._dying", lambda pids: bool(pids) and bool(answers) and answers.pop())
    assert not answers


@pytest.mark.slow
def test_no_process_is_left_after_an_exception(tmp_path: Path) -> None:
    one, pids = stubborn(tmp_path)
    with pytest.raises(ZeroDivisionError), ProcessGroup() as group:  # noqa: PT012  (the block is what is tested)
        group.start(one)
        1 / 0  # noqa: B018
    assert not any(living(int(pid)) for pid in pids.read_text().split())


PARENT = """
import sys, time, signal
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
signal.signal(signal.SIGINT, signal.default_int_handler)
from test_process import stubborn
from common.process import ProcessGroup, Terminated
where = Path({where!r})
try:
    with ProcessGroup() as group:
        group.start(stubborn(where, "a")[0])
        group.start(stubborn(where, "b")[0])
        (where / "started").touch()
        time.sleep(300)
except Terminated as error:
    sys.exit(128 + error.signum)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -9)],
    ids=["ctrl-c", "terminate", "hang-up", "kill -9"],
)
@pytest.mark.slow
def test_a_signal_to_the_parent_leaves_no_process(tmp_path: Path, signum: signal.Signals, status: int) -> None:
    root = str(Path(__file__).parents[2])
    code = PARENT.format(root=root, here=str(Path(__file__).parent), where=str(tmp_path))
    if signum == signal.SIGKILL:  # after SIGKILL the kernel ends direct children only
        code = code.replace("stubborn(where", "plain(where").replace("import stubborn", "import plain")
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, start_new_session=True) as parent:
        assert eventually((tmp_path / "started").exists), "the parent did not start its daemons"
        parent.send_signal(signum)
        assert parent.wait(600) == status
    pids = [int(pid) for file in tmp_path.glob("*.pids") for pid in file.read_text().split()]
    assert len(pids) == (2 if signum == signal.SIGKILL else 4)
    assert eventually(lambda: not any(map(living, pids)), 5.0)


def plain(tmp_path: Path, name: str) -> tuple[DaemonSpec, Path]:
    pids = tmp_path / f"{name}.pids"
    code = "import os,sys,time; f=open(sys.argv[1],'w'); f.write(str(os.getpid())); f.close(); time.sleep(300)"
    return spec(tmp_path, code, str(pids), name=name, ready=lambda: pids.exists() and pids.stat().st_size > 0), pids


@pytest.mark.slow
def test_a_daemon_killed_with_9_takes_its_helpers_along(tmp_path: Path) -> None:
    one, pids = stubborn(tmp_path)
    with ProcessGroup() as group:
        daemon = group.start(one)
        os.kill(daemon.pid, signal.SIGKILL)
        assert eventually(lambda: not daemon.alive)
        with pytest.raises(DaemonFailed, match="ended by SIGKILL"):
            group.check()
        assert living(int(pids.read_text().split()[1]))
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.read_text().split()), "not even a zombie"


@pytest.mark.slow
def test_daemons_stop_last_started_first(tmp_path: Path) -> None:
    order = tmp_path / "order"
    code = (
        "import signal,sys,time\n"
        "def leave(*_):\n open(sys.argv[1],'a').write(sys.argv[2]); sys.exit(0)\n"
        "signal.signal(2, leave); open(sys.argv[3],'w').close(); time.sleep(300)"
    )
    with ProcessGroup() as group:
        for name, role in (("L", "link"), ("E", "exec"), ("n", "node"), ("n2", "node")):
            up = tmp_path / f"{name}.up"
            group.start(spec(tmp_path, code, str(order), name[0], str(up), name=name, role=role, ready=up.exists))
    assert order.read_text() == "nnEL"
    assert all(daemon.returncode == 0 for daemon in group.daemons)


@pytest.mark.slow
def test_daemons_that_were_stopped_together_may_be_stopped_again(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        daemons = [group.start(stubborn(tmp_path / name)[0]) for name in ("first", "second")]
        group.stop(daemons[0])
        group.stop(*daemons)
        assert group.daemons == ()
        assert not any(daemon.alive for daemon in daemons)


def test_a_daemon_that_dies_at_start_is_reported_with_its_last_words(tmp_path: Path) -> None:
    code = "import sys; print('\\033[31mno such\\x07 certificate\\033[0m'); sys.exit(3)"
    with ProcessGroup() as group, pytest.raises(DaemonFailed) as caught:
        group.start(spec(tmp_path, code, ready=lambda: False))
    assert re.search("test one .*status 3", str(caught.value))
    assert "no such certificate" in str(caught.value)
    assert str(tmp_path / "one.log") in str(caught.value)


def test_a_site_log_is_never_quoted(tmp_path: Path) -> None:
    with ProcessGroup() as group, pytest.raises(DaemonFailed) as caught:
        group.start(spec(tmp_path, "print('case-of-mrs-x'); raise SystemExit(1)", ready=lambda: False, show_log=False))
    assert "mrs" not in str(caught.value)


@pytest.mark.slow
def test_a_silent_daemon_is_not_called_started(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        with pytest.raises(DaemonFailed, match=r"not ready after 0\.3 s"):
            group.start(spec(tmp_path, "import time; time.sleep(300)", ready=lambda: False, ready_timeout_s=0.3))
        assert not group.daemons[0].alive


def test_a_missing_program_is_one_clear_error(tmp_path: Path) -> None:
    missing = DaemonSpec(
        role="x", name="x", argv=("/nonexistent/program",), env={}, cwd=tmp_path, log=tmp_path / "x.log"
    )
    with ProcessGroup() as group, pytest.raises(DaemonFailed, match="cannot run /nonexistent/program"):
        group.start(missing)
    with pytest.raises(DaemonFailed, match="not installed"):
        executable("no-such-command-at-all")
    with pytest.raises(InvalidInput, match="absolute path"):
        DaemonSpec(role="x", name="x", argv=("sh",), env={}, cwd=tmp_path, log=tmp_path / "x.log")


def test_a_program_that_a_busy_machine_starts_late_is_not_ready_before_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = DaemonSpec(role="x", name="x", argv=("/nonexistent",), env={}, cwd=tmp_path, log=tmp_path / "x.log")
    monkeypatch.setattr(process, "_LAUNCH", f"import time; time.sleep(1)\n{process._LAUNCH}")
    with ProcessGroup() as group, pytest.raises(DaemonFailed, match="cannot run /nonexistent"):
        group.start(missing)


def test_credentials_of_the_parent_do_not_reach_a_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_TOKEN", "hush")
    environment = base_env(EXTRA="1")
    assert "SOME_API_TOKEN" not in environment
    assert environment["EXTRA"] == "1"
    assert environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    with ProcessGroup() as group:
        one = spec(tmp_path, "import time; time.sleep(300)")
        assert b"hush" not in Path(f"/proc/{group.start(one).pid}/environ").read_bytes()


def test_signal_handlers_are_put_back() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(Terminated), ProcessGroup():
        signal.raise_signal(signal.SIGTERM)
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_free_ports_are_distinct_and_no_outgoing_connection_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise another process's connection could take the port before the daemon listens on it."""
    linux_takes_from = 32_768
    ports = free_ports(20)
    assert len(set(ports)) == 20
    assert all(1024 < port < linux_takes_from for port in (*ports, free_port()))
    monkeypatch.setattr(sockets, "PORTS", ports[:2])
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", ports[0]))
        assert free_ports(1) == (ports[1],)
        with pytest.raises(OSError, match="fewer than 2 "):
            free_ports(2)
    with pytest.raises(OSError, match="assign"):
        free_ports(1, host="192.0.2.1")


def test_a_log_tail_is_bounded(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text("\n".join(f"line {number}" for number in range(10_000)))
    assert plain_text(log, max_bytes=29) == "line 9997\nline 9998\nline 9999"
    assert plain_text(log, since=log.stat().st_size - 10) == "line 9999"
    assert plain_text(log, since=log.stat().st_size + 1, max_bytes=10) == "line 9999"  # the log was rotated meanwhile
    assert plain_text(tmp_path / "none.log") == ""


def test_a_listener_is_seen_by_name_by_any_address_and_by_path(tmp_path: Path) -> None:
    for family, bound, asked in (
        (socket.AF_INET, "127.0.0.1", ("127.0.0.1", "localhost", "0.0.0.0")),
        (socket.AF_INET6, "::1", ("::1", "::")),
    ):
        with socket.socket(family) as listener:
            listener.bind((bound, 0))
            port = listener.getsockname()[1]
            assert not any(accepts(where, port) for where in asked)
            listener.listen()
            assert all(accepts(where, port) for where in asked)
    assert not accepts(tmp_path / "none.sock")
    assert not accepts("no-such-host.invalid", 1)


def test_a_unix_socket_is_made_found_and_asked_in_a_folder_of_any_length(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    path = folder / "fleet.sock"
    assert not accepts(path)
    assert not answers_http(path)

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1024)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\n\r\n")

    with listen(path) as listener:
        assert path.stat().st_mode & 0o777 == 0o600
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert answers_http(path)
        thread.join(600)
        assert accepts(path)
    assert not accepts(path)


def test_a_daemon_reads_names_of_files_in_the_encoding_of_the_command_that_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a patient's name with an umlaut would mean different patients to the worker and to the training."""
    monkeypatch.setenv("PYTHONUTF8", "0")
    monkeypatch.setenv("LC_ALL", "C")
    monkeypatch.setenv("PYTHONCOERCECLOCALE", "0")
    asked = "import sys; print(sys.getfilesystemencoding())"
    here, daemon = (
        subprocess.run([sys.executable, "-c", asked], env=env, capture_output=True, text=True, check=True).stdout
        for env in (dict(os.environ), base_env())
    )
    assert here == daemon == "ascii\n"
