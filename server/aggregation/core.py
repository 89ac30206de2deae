"""The core as a daemon: it alone opens the study's keys and ledger, and speaks to sites through a ServerApp.

Listens on a Unix socket in the study's folder ``relay/``. A ServerApp that connects starts or resumes the study, in a
process of its own that ends with the ServerApp, as the ServerApp does with it; one at a time. Refuses connections of
any other user than this one and the group that ``relay/`` was given to. What a ServerApp may do is keep bodies back or
bring wrong ones, as any network: bodies are signed and sealed from the core to a site's worker and back.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

from common.errors import ConsiliumError, InvalidInput
from common.objects import shared
from common.plain import log_to_stderr
from common.sockets import listen
from server.aggregation.exchange import Reply
from server.aggregation.pipeline import run_study
from server.aggregation.relay import Kind, RelayFrame, lifeline, receive, send, unpack_nodes
from server.study.workspace import Workspace

POLL_S = 0.3
TTL_MARGIN_S = 30.0
HELLO_S = 30.0
PATIENCE_S = 600.0
"""What an answer of the ServerApp's may take: Flower's own calls wait for a SuperLink that is away."""

MAX_SAID = 4_000
"""Longest text of a ServerApp's error that is kept."""

log = logging.getLogger(__name__)


class RelayTransport:
    """The core's transport over a ServerApp: pushes once, polls until every reply is in or the time is up.

    A ServerApp that is gone, silent or out of turn ends this process (SystemExit), with no ending told: the run is
    resumed by the next.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(PATIENCE_S)

    def online(self) -> frozenset[int]:
        with _relay_needed():
            send(self._connection, RelayFrame(Kind.ONLINE))
            answer = self._receive()
            if answer.kind is not Kind.NODES:
                raise InvalidInput("answer of the relay", value=answer.kind, limit="nodes")
            return unpack_nodes(answer.body)

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        until = time.monotonic() + timeout_s
        with _relay_needed():
            for node_id, body in bodies.items():
                send(self._connection, RelayFrame(Kind.BODY, node_id, body))
            send(self._connection, RelayFrame(Kind.PUSH, round((timeout_s + TTL_MARGIN_S) * 1000)))
            if (answer := self._receive()).kind is not Kind.DONE:
                raise InvalidInput("answer of the relay", value=answer.kind, limit="done")
        waiting = set(bodies)
        while waiting and time.monotonic() < until:
            with contextlib.closing(self._replies(frozenset(waiting))) as replies:
                for reply in replies:
                    waiting.discard(reply.node_id)
                    yield reply
            if waiting:
                time.sleep(POLL_S)
        if waiting:
            with contextlib.closing(self._replies(frozenset(waiting), last=True)) as replies:
                for reply in replies:
                    waiting.discard(reply.node_id)
                    yield reply
        for node_id in waiting:
            yield Reply(node_id=node_id, body=None, problem="deadline")

    def _receive(self) -> RelayFrame:
        frame = receive(self._connection)
        if frame.kind is Kind.FAILED:
            said = frame.body[-MAX_SAID:].decode("utf-8", "replace")
            log.error("event=relay-failed said=%s", ascii(said))
            raise EOFError("the relay has failed")
        return frame

    def _replies(self, nodes: frozenset[int], *, last: bool = False) -> Generator[Reply, None, None]:
        """The replies that are there, at most one of each of ``nodes``, each as it comes.

        The ``last`` time, one that began to arrive and did not end is ``malformed``.
        """
        left = set(nodes)
        with _relay_needed():
            send(self._connection, RelayFrame(Kind.PULL, int(last)))
            while (frame := self._receive()).kind is not Kind.DONE:
                if frame.kind not in (Kind.REPLY, Kind.PROBLEM) or frame.number not in left:
                    raise InvalidInput("answer of the relay", value=frame.kind, limit="one reply a node, then done")
                left.discard(frame.number)
                try:
                    yield _reply(frame)
                except GeneratorExit:  # nobody listens any more: what was asked for is read to its end
                    while self._receive().kind is not Kind.DONE:
                        pass
                    raise


def _reply(frame: RelayFrame) -> Reply:
    if frame.kind is Kind.REPLY:
        return Reply(node_id=frame.number, body=frame.body)
    word = frame.body[:32].decode("ascii", "replace")
    return Reply(
        node_id=frame.number, body=None, problem=word if re.fullmatch(r"flower-[0-9]{1,6}", word) else "malformed"
    )


@contextlib.contextmanager
def _relay_needed() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, InvalidInput) as error:
        log.warning("event=relay-lost cause=%s", type(error).__name__)
        raise SystemExit(1) from error


def run(study: Path, connection: socket.socket) -> int:
    """Run the study for the ServerApp at the other end; 0 if it ended well."""
    status = 0
    with connection:
        connection.settimeout(HELLO_S)
        with lifeline(connection):
            with _relay_needed():
                hello = receive(connection)
                if hello.kind is not Kind.RUN:
                    raise InvalidInput("first word of the relay", value=hello.kind, limit="its run")
            try:
                run_study(Workspace(study), RelayTransport(connection), run=str(hello.number))
            except ConsiliumError as error:
                log.error("event=run-failed cause=%s", error)
                status = 1
            with contextlib.suppress(OSError):
                send(connection, RelayFrame(Kind.END, status))
        connection.settimeout(HELLO_S)
        with contextlib.suppress(OSError, EOFError, InvalidInput):
            receive(connection)  # the other end closes first, so that it never finds this one gone
    return status


def serve(study: Path, path: Path) -> None:
    """Take ServerApps at the socket ``path`` one after the other, each into a process of its own, until a signal.

    Who only asks whether the core is here is answered at any time.
    """
    command = [sys.executable, "-P", "-m", "server.aggregation.core", "--study", str(study), "--run"]
    running: subprocess.Popen[bytes] | None = None
    waiting: list[socket.socket] = []
    with contextlib.closing(listen(path)) as listener:
        listener.settimeout(POLL_S)
        log.info("event=ready")
        try:
            while True:
                if waiting and (running is None or running.poll() is not None):
                    with waiting.pop(0) as connection:
                        running = subprocess.Popen(command, stdin=connection.fileno())
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    if _admitted(connection, path.parent) and not _answered(connection):
                        waiting.append(connection)
                    else:
                        connection.close()
        finally:
            if running is not None:
                running.kill()
                running.wait()


def _admitted(connection: socket.socket, folder: Path) -> bool:
    """Whether who connected is this user, or runs as the group that the folder was given to."""
    _, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    admitted = uid == os.geteuid() or (shared(folder) and gid == folder.stat().st_gid)
    if not admitted:
        log.warning("event=connection-refused uid=%d gid=%d", uid, gid)
    return admitted


def _answered(connection: socket.socket) -> bool:
    """Whether who connected only asked if anybody is here, or has gone again; a run's first word is left unread."""
    connection.settimeout(HELLO_S)
    try:
        first = connection.recv(1, socket.MSG_PEEK)
        if first == bytes([Kind.PING]):
            receive(connection)
            send(connection, RelayFrame(Kind.DONE))
    except (OSError, EOFError, InvalidInput):
        return True
    connection.settimeout(None)
    return first in (b"", bytes([Kind.PING]))


def main() -> None:
    """``python -m server.aggregation.core --study DIR --socket PATH``: serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="The core: keys, ledger and releases of one study")
    parser.add_argument("--study", type=Path, required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--socket", type=Path, help="where ServerApps connect")
    what.add_argument("--run", action="store_true", help="run the study once, for the ServerApp at the end of stdin")
    given = parser.parse_args()
    log_to_stderr()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        if not given.run:
            serve(given.study, given.socket)
        connection = socket.socket(fileno=os.dup(0))
        with open(os.devnull) as nothing:  # what a run starts must not hold the connection open
            os.dup2(nothing.fileno(), 0)
        sys.exit(run(given.study, connection))


if __name__ == "__main__":
    main()
