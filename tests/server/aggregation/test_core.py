"""Tests the core as a daemon; this file acts as the relay, and the workers run in this process."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.events import read_events
from common.process import ProcessGroup
from common.wording import declined_words
from server.aggregation import core
from server.aggregation.relay import FrameKind, RelayFrame, answers, connect, pack_nodes, receive, send
from server.ledger.server_ledger import Ledger
from server.operations.supervisor import core_daemon
from tests.dashboard_study import QUERIES, Recorded, make_study_directory
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel who connects")]


@dataclass
class Relay:
    """Stands in for the ServerApp, with workers in this process. ``before`` is called ahead of each
    question's answer.
    """

    study: Recorded
    before: Callable[[socket.socket, RelayFrame], None] = lambda _core, _frame: None
    seen: list[bytes] = field(default_factory=list)

    def run(self, number: int = 7) -> int:
        """Relay frames until the core ends the run; return the run's status. Raise EOFError if the core dies first."""
        bodies: dict[int, bytes] = {}
        replies: list[RelayFrame] = []
        with connect(self.study.workspace.relay_dir) as connection:
            connection.settimeout(60)
            send(connection, RelayFrame(FrameKind.RUN, number))
            while (asked := receive(connection)).kind is not FrameKind.END:
                self.before(connection, asked)
                self.seen.append(asked.body)
                match asked.kind:
                    case FrameKind.ONLINE:
                        send(connection, RelayFrame(FrameKind.NODES, body=pack_nodes(self.study.transport.online())))
                    case FrameKind.BODY:
                        bodies[asked.number] = asked.body
                    case FrameKind.PUSH:
                        heard = self.study.transport.exchange(bodies, timeout_s=1)
                        replies = [RelayFrame(FrameKind.REPLY, reply.node_id, reply.body or b"") for reply in heard]
                        bodies = {}
                        send(connection, RelayFrame(FrameKind.DONE))
                    case FrameKind.PULL:
                        for reply in replies:
                            send(connection, reply)
                        replies = []
                        send(connection, RelayFrame(FrameKind.DONE))
            return asked.number


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    """Yield a study that is ready to run and whose core runs."""
    made = make_study_directory(tmp_path_factory.mktemp("core"), steps=4)
    made.workspace.relay_dir.mkdir()
    with ProcessGroup() as group:
        group.start(core_daemon(made.workspace))
        yield made


def forked(study: Recorded) -> tuple[int, socket.socket]:
    """Run the core's half of a run in a forked process; return its number and a connection to it."""
    here, there = socket.socketpair()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest-xdist's thread holds no lock of the run's
        process = os.fork()
    if process == 0:
        status = 70
        try:
            here.close()
            status = core.run(study.workspace.root, there)
        except SystemExit as ended:
            status = int(str(ended.code))
        finally:
            os._exit(status)
    there.close()
    return process, here


def told(study: Recorded, *kinds: str) -> list[dict]:
    return [event for event in read_events(study.workspace.events_file) if event["event"] in kinds]


def endings(study: Recorded) -> list[dict]:
    return told(study, "run-finished", "run-failed")


def out_of_turn(connection: socket.socket, asked: RelayFrame) -> None:
    if asked.kind is FrameKind.ONLINE:
        send(connection, RelayFrame(FrameKind.DONE))


def half_a_number(connection: socket.socket, asked: RelayFrame) -> None:
    if asked.kind is FrameKind.ONLINE:
        send(connection, RelayFrame(FrameKind.NODES, body=b"1234567"))


def a_node_that_was_not_asked(connection: socket.socket, asked: RelayFrame) -> None:
    if asked.kind is FrameKind.PULL:
        send(connection, RelayFrame(FrameKind.REPLY, 99, b"x"))


def one_node_twice(connection: socket.socket, asked: RelayFrame) -> None:
    if asked.kind is FrameKind.PULL:
        for _ in range(2):
            send(connection, RelayFrame(FrameKind.REPLY, 100, b"x"))


def too_long(connection: socket.socket, asked: RelayFrame) -> None:
    if asked.kind is FrameKind.PULL:
        connection.sendall(struct.pack(">BQI", FrameKind.REPLY, 100, 2**32 - 1))


def no_such_kind(connection: socket.socket, _asked: RelayFrame) -> None:
    connection.sendall(struct.pack(">BQI", 77, 0, 0))


WRONG = (out_of_turn, half_a_number, a_node_that_was_not_asked, one_node_twice, too_long, no_such_kind)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_relay_that_sends_any_other_frame_ends_its_run_and_nothing_is_charged(
    study: Recorded, wrong: Callable[[socket.socket, RelayFrame], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first case the daemon runs the core. In the others a fork of this process does, which need not import
    again.
    """
    process = 0
    if wrong is not WRONG[0]:
        process, connection = forked(study)
        monkeypatch.setitem(globals(), "connect", lambda _folder: connection)
    runs = len(told(study, "run-started"))
    with pytest.raises((EOFError, OSError)):
        Relay(study, wrong).run()
    if process:
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert len(told(study, "run-started")) == runs + 1
    assert endings(study) == []
    with Ledger.open(study.workspace.ledger_file) as ledger:
        assert ledger.answers(study.workspace.study().id) == ()
    assert not study.workspace.busy()


@pytest.mark.slow
def test_a_run_ends_with_its_relay_and_the_next_goes_on_without_a_key_in_sight(study: Recorded) -> None:
    def leave(connection: socket.socket, _asked: RelayFrame) -> None:
        if told(study, "released"):
            raise ConnectionAbortedError

    first = Relay(study, leave)
    with pytest.raises(ConnectionAbortedError):
        first.run(1)
    until(lambda: not study.workspace.busy(), "the run ends with its relay")
    assert endings(study) == []
    second = Relay(study)
    assert second.run(2**64 - 1) == 0
    assert [event["run"] for event in endings(study)] == [str(2**64 - 1)]
    with Ledger.open(study.workspace.ledger_file) as ledger:
        assert len({answer.query.id for answer in ledger.answers(study.workspace.study().id)}) == QUERIES
    keys = [path.read_bytes() for path in (study.workspace.root / "keys").glob("*.key")]
    assert len(keys) == 2
    assert not any(key.strip() in body for key in keys for body in first.seen + second.seen)


@pytest.mark.slow
def test_the_core_takes_its_own_user_and_the_group_that_its_folder_was_given_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = socket.socketpair()
    with here, there:
        assert core._admitted(here, tmp_path)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not core._admitted(here, tmp_path)
        os.chown(tmp_path, -1, os.getgid())
        tmp_path.chmod(0o2750)
        assert core._admitted(here, tmp_path)
        monkeypatch.setattr(core, "shared", lambda _folder: False)
        assert not core._admitted(here, tmp_path)


def check_server(study: Path) -> None:
    """Ask the server as the container's health check does."""
    health = Path(__file__).parents[3] / "docker" / "health.py"
    code = f"import runpy, pathlib; runpy.run_path({str(health)!r})['check_server'](pathlib.Path({str(study)!r}))"
    if subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode:
        raise OSError


@pytest.mark.slow
def test_the_core_answers_who_asks_whether_it_is_there_while_a_run_goes_on(study: Recorded) -> None:
    asked: list[bool] = []

    def ask(connection: socket.socket, _frame: RelayFrame) -> None:
        asked.append(answers(study.workspace.relay_dir))
        check_server(study.workspace.root)
        connection.close()  # and end this run

    with pytest.raises((EOFError, OSError)):
        Relay(study, ask).run()
    assert asked == [True]
    empty = study.workspace.root / "empty"
    (empty / "relay").mkdir(parents=True)
    with pytest.raises(OSError):
        check_server(empty)


@pytest.mark.parametrize(
    ("said", "problem"),
    [(b"flower-3", "deadline"), (b"flower-4", "deadline"), (b"flower-5", "offline"), (b"flower-2", "flower-2")],
)
def test_a_site_that_goes_offline_during_an_offer_is_called_offline_and_not_one_that_declines(
    said: bytes, problem: str
) -> None:
    """The numbers are Flower's `ErrorCode`. SuperLink reports 3, 4 and 5; a site's SuperNode reports 2."""
    assert core._reply(RelayFrame(FrameKind.PROBLEM, 7, said)).problem == problem
    assert "Flower" in declined_words("flower-2")
