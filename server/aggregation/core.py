"""Runs the core: the daemon that alone opens a study's keys and ledger, and talks to sites through a ServerApp.

``supervisor.core_daemon`` starts it. It listens on a Unix socket in the study's folder ``relay/``. For each ServerApp
that connects, one at a time, it starts a process that runs or resumes the study. If this process or the ServerApp ends,
the other ends too.

It accepts connections only from processes of its own user, or of the group that ``relay/`` belongs to. A ServerApp can
withhold or replace messages, as any network can. It cannot forge them, because they are signed, and it cannot read the
codes in them, because these are encrypted to the core's key.
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
from server.aggregation.relay import SAME_VERSION, FrameKind, RelayFrame, lifeline, receive, send, unpack_nodes
from server.study.workspace import Workspace

POLL_S = 0.3
TTL_MARGIN_S = 30.0
HELLO_S = 30.0
PATIENCE_S = 600.0
"""Seconds to wait for the ServerApp's answer. The wait is long because the ServerApp itself waits while SuperLink is
down.
"""

MAX_SAID = 4_000
"""Largest number of characters of a ServerApp's error that are logged."""

_OF_SUPERLINK = {"flower-3": "deadline", "flower-4": "deadline", "flower-5": "offline"}
"""The errors of Flower that SuperLink reports without a reply from the node: message or reply expired, node gone."""

log = logging.getLogger(__name__)


class RelayTransport:
    """The core's transport over a ServerApp: pushes messages once, then polls until all replies are in or time is up.

    If the ServerApp disconnects, does not answer or breaks the protocol, this process exits with status 1 (SystemExit),
    without a last message to the ServerApp. The next run resumes the study.

    Args:
        connection: Connected socket of the ServerApp.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        connection.settimeout(PATIENCE_S)

    def online(self) -> frozenset[int]:
        """Return the ids of the nodes that are connected now."""
        with _relay_needed():
            send(self._connection, RelayFrame(FrameKind.ONLINE))
            return unpack_nodes(_only(FrameKind.NODES, self._receive(), what="the ServerApp's answer to ONLINE").body)

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        """Send one body to each node, and yield exactly one reply for each node, in the order of arrival.

        Args:
            bodies: Signed bytes by node id.
            timeout_s: After this time in seconds, every missing reply is yielded without a body.

        Yields:
            One reply for each node.

        Raises:
            SystemExit: If the ServerApp disconnects, stays silent or breaks the protocol.
        """
        until = time.monotonic() + timeout_s
        with _relay_needed():
            for node_id, body in bodies.items():
                send(self._connection, RelayFrame(FrameKind.BODY, node_id, body))
            send(self._connection, RelayFrame(FrameKind.PUSH, round((timeout_s + TTL_MARGIN_S) * 1000)))
            _only(FrameKind.DONE, self._receive(), what="the ServerApp's answer to PUSH")
        waiting, last = set(bodies), False
        while waiting and not last:
            last = time.monotonic() >= until
            with contextlib.closing(self._replies(frozenset(waiting), last=last)) as replies:
                for reply in replies:
                    waiting.discard(reply.node_id)
                    yield reply
            if waiting and not last:
                time.sleep(POLL_S)
        for node_id in waiting:
            yield Reply(node_id=node_id, body=None, problem="deadline")

    def _receive(self) -> RelayFrame:
        frame = receive(self._connection)
        if frame.kind is FrameKind.FAILED:
            said = frame.body[-MAX_SAID:].decode("utf-8", "replace")
            log.error("event=relay-failed said=%s", ascii(said))
            raise EOFError("the relay has failed")
        return frame

    def _replies(self, nodes: frozenset[int], *, last: bool) -> Generator[Reply, None, None]:
        """Yield the replies that have arrived, at most one for each of ``nodes``.

        With ``last``, a reply that has arrived only in part is reported as ``malformed``.
        """
        left = set(nodes)
        with _relay_needed():
            send(self._connection, RelayFrame(FrameKind.PULL, int(last)))
            while (frame := self._receive()).kind is not FrameKind.DONE:
                if frame.kind not in (FrameKind.REPLY, FrameKind.PROBLEM) or frame.number not in left:
                    raise InvalidInput(
                        "kind of the ServerApp's answer to PULL",
                        value=frame.kind,
                        limit="REPLY or PROBLEM, at most once for each node, then DONE",
                        remedy=SAME_VERSION,
                    )
                left.discard(frame.number)
                try:
                    yield _reply(frame)
                except GeneratorExit:  # the caller stopped reading: read the rest, so that the next frame is in turn
                    while self._receive().kind is not FrameKind.DONE:
                        pass
                    raise


def _only(kind: FrameKind, frame: RelayFrame, *, what: str) -> RelayFrame:
    """Return a frame of the given kind; raise InvalidInput for another kind. The error calls the frame ``what``."""
    if frame.kind is not kind:
        raise InvalidInput(f"kind of {what}", value=frame.kind, limit=kind.name, remedy=SAME_VERSION)
    return frame


def _reply(frame: RelayFrame) -> Reply:
    if frame.kind is FrameKind.REPLY:
        return Reply(node_id=frame.number, body=frame.body)
    word = frame.body[:32].decode("ascii", "replace")
    problem = _OF_SUPERLINK.get(word, word if re.fullmatch(r"flower-[0-9]{1,6}", word) else "malformed")
    return Reply(node_id=frame.number, body=None, problem=problem)


@contextlib.contextmanager
def _relay_needed() -> Iterator[None]:
    """End this process with status 1 if the connection to the ServerApp fails inside the block."""
    try:
        yield
    except (OSError, EOFError, InvalidInput) as error:
        log.warning("event=relay-lost cause=%s", type(error).__name__)
        raise SystemExit(1) from error


def run(study: Path, connection: socket.socket) -> int:
    """Run the study for the ServerApp at the other end of a connection.

    Args:
        study: The study's directory.
        connection: Connected socket of the ServerApp. This function closes it at the end.

    Returns:
        0 if the run ended well, 1 if it ended with an error, which is logged.
    """
    status = 0
    with connection:
        connection.settimeout(HELLO_S)
        with lifeline(connection):
            with _relay_needed():
                hello = _only(FrameKind.RUN, receive(connection), what="what the ServerApp sends first")
            try:
                run_study(Workspace(study), RelayTransport(connection), run=str(hello.number))
            except ConsiliumError as error:
                log.error("event=run-failed cause=%s", error)
                status = 1
            with contextlib.suppress(OSError):
                send(connection, RelayFrame(FrameKind.END, status))
        connection.settimeout(HELLO_S)
        with contextlib.suppress(OSError, EOFError, InvalidInput):
            receive(connection)  # wait until the ServerApp has closed, so that it never finds the core gone
    return status


def serve(study: Path, path: Path) -> None:
    """Accept ServerApps at a Unix socket until a signal ends this process.

    Each ServerApp's run has a process of its own. The next run starts after that process has ended. A connection that
    only asks whether the core is alive is answered at any time.

    Args:
        study: The study's directory.
        path: The socket.
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
    """Return whether the connecting process runs as this user, or as the group that the folder belongs to."""
    _, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    admitted = uid == os.geteuid() or (shared(folder) and gid == folder.stat().st_gid)
    if not admitted:
        log.warning("event=connection-refused uid=%d gid=%d", uid, gid)
    return admitted


def _answered(connection: socket.socket) -> bool:
    """Answer a connection that only asks whether the core is alive.

    Returns:
        True if the other end only asked this, or closed the connection. False if it is a ServerApp that starts a run;
        its first frame is then still unread.
    """
    connection.settimeout(HELLO_S)
    try:
        first = connection.recv(1, socket.MSG_PEEK)
        if first == bytes([FrameKind.PING]):
            receive(connection)
            send(connection, RelayFrame(FrameKind.DONE))
    except (OSError, EOFError, InvalidInput):
        return True
    connection.settimeout(None)
    return first in (b"", bytes([FrameKind.PING]))


def main() -> None:
    """Run the core until SIGTERM or SIGINT: ``python -m server.aggregation.core --study DIR --socket PATH``."""
    parser = argparse.ArgumentParser(description="Hold one study's keys and ledger, and release its answers")
    parser.add_argument("--study", type=Path, required=True, help="the study's directory")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--socket", type=Path, help="Unix socket at which ServerApps connect")
    what.add_argument("--run", action="store_true", help="run the study once, for the ServerApp connected to stdin")
    given = parser.parse_args()
    log_to_stderr()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt):
        if not given.run:
            serve(given.study, given.socket)
        connection = socket.socket(fileno=os.dup(0))
        with open(os.devnull) as nothing:  # child processes of the run must not inherit the connection
            os.dup2(nothing.fileno(), 0)
        sys.exit(run(given.study, connection))


if __name__ == "__main__":
    main()
