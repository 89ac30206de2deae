"""Tests one hospital that fills SuperLink with unrequested replies and with names, beside honest hospitals.

SuperLink, its fleet routes and the gateway are the real daemons, and the ServerApp is the product's. The test replaces
core and nodes. Its core asks a site sixteen times without waiting, so that there are sixteen questions to reply to; a
study's core never does this. Without the quota, such replies took 1,084 MiB, and every node was refused because the
database was locked.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app import Message, RecordDict
from flwr.app.message import make_message
from flwr.common.serde import metadata_from_proto
from flwr.proto import message_pb2
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from common.config import CollectionConfig
from common.pki import load_node_key
from common.sockets import listen
from server.aggregation.relay import SOCKET, FrameKind, RelayFrame, receive, send
from server.operations import storage
from server.operations.supervisor import start_run
from server.study.workspace import Workspace
from tests.attacks.link import flower_object, named, reply_objects
from tests.attacks.rogue_node import Rogue, names, reply_metadata
from tests.e2e.daemons import running
from tests.e2e.road import build
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.slow]

REPLIES, REPLY_BYTES = 16, 60 << 20
NAMES = 14_000
"""Number of names of 64 characters that make a megabyte."""
TTL_S = 1_200
HONEST, FILLER = ("north", "south"), "delta"
HONEST_BYTES = 64 << 10


class Node(threading.Thread):
    """Connects as a site's node through the gateway with its own key. It keeps the text of every error."""

    def __init__(self, workspace: Workspace, directory: Path, behave: Callable[[Node, Rogue, Any], None]) -> None:
        super().__init__(daemon=True, name=directory.name)
        self.superlink, self.home, self.behave = workspace.endpoint().superlink, directory / "node", behave
        self.over = threading.Event()
        self.errors: list[str] = []
        self.questions: list[Message] = []
        self.answered, self.slowest = 0, 0.0

    def run(self) -> None:
        key = load_node_key(self.home / "keys" / "node")
        authority = (self.home / "ca.crt").read_bytes()
        try:
            with http_request_response(self.superlink, False, authority, (key, key.public_key())) as connection:
                self.behave(self, Rogue(connection, send=connection[2]), connection[1])
        except Exception as error:  # noqa: BLE001
            self.errors.append(f"{type(error).__name__}: {error}")

    def asked(self, rogue: Rogue, receive: Any) -> Message | None:
        """Return the next message after reading it completely and confirming it; None if there is none."""
        received = receive()
        if received is None:
            time.sleep(0.1)
            return None
        message, tree = received
        ids = names(tree)
        for name in ids:
            rogue.pull(message.metadata.run_id, name)
        rogue.confirm(message.metadata.run_id, ids[0])
        return message


def answers(node: Node, rogue: Rogue, receive: Any) -> None:
    """Answer every message until the end, as an honest node does."""
    while not node.over.is_set():
        try:
            started = time.monotonic()
            message = node.asked(rogue, receive)
            if message is not None:
                rogue.answer(message, reply_objects(reply_metadata(message), secrets.token_bytes(HONEST_BYTES)))
                node.answered += 1
                node.slowest = max(node.slowest, time.monotonic() - started)
        except Exception as error:  # noqa: BLE001
            node.errors.append(f"{type(error).__name__}: {error} {getattr(error, 'response', None)}")
            time.sleep(0.1)


class Filler:
    """Acts as the attacker; counts the bytes that SuperLink stored for it, and keeps the error of each refused push."""

    def __init__(self) -> None:
        self.stored, self.refused = 0, list[str]()
        self.done = threading.Event()

    def __call__(self, node: Node, rogue: Rogue, receive: Any) -> None:
        while len(node.questions) < REPLIES:
            if (message := node.asked(rogue, receive)) is not None:
                node.questions.append(message)
        for message in node.questions:
            self._names(rogue, message)
        for message in node.questions:
            self._bytes(rogue, message)
        self.done.set()
        node.over.wait(900)

    def _names(self, rogue: Rogue, message: Message) -> None:
        """Send two trees of names: one of a megabyte, and one with as many names as the gateway allows."""
        for count in (NAMES, 700):
            root = flower_object("Message", [], secrets.token_bytes(9))
            metadata = reply_metadata(message)
            metadata.message_id = named(root)
            tree = message_pb2.ObjectTree(object_id=named(root))
            tree.children.extend(message_pb2.ObjectTree(object_id=secrets.token_hex(32)) for _ in range(count))
            self._try(partial(rogue.send, _told(metadata), tree, 1.0))

    def _bytes(self, rogue: Rogue, message: Message) -> None:
        objects = reply_objects(reply_metadata(message), secrets.token_bytes(REPLY_BYTES))
        session = self._try(partial(rogue.announce, message, objects))
        for content in reversed(objects):
            before = self.stored
            self._try(partial(self._push, rogue, message, content, str(session)))
            if self.stored == before:
                break

    def _push(self, rogue: Rogue, message: Message, content: bytes, session: str) -> None:
        rogue.push_object(message.metadata.run_id, session, named(content), content)
        self.stored += len(content)

    def _try(self, act: Callable[[], Any]) -> Any:
        try:
            return act()
        except ObjectPushError:
            self.refused.append("object")
        except RunNotRunningException:  # what Flower's client makes of the gateway's 403
            self.refused.append("shape")
        except httpx.HTTPStatusError as error:
            self.refused.append(str(error.response.status_code))
        return None


def _told(metadata: message_pb2.Metadata) -> Message:
    return make_message(metadata_from_proto(metadata), RecordDict())


class Core:
    """Stands in for the core: it asks nodes through the product's ServerApp."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        assert receive(connection).kind is FrameKind.RUN

    def ask(self, *nodes: int, body: bytes) -> None:
        for node in nodes:
            send(self.connection, RelayFrame(FrameKind.BODY, node, body))
        send(self.connection, RelayFrame(FrameKind.PUSH, TTL_S * 1000))
        assert receive(self.connection).kind is FrameKind.DONE

    def heard(self, *nodes: int, timeout_s: float = 120.0) -> None:
        """Check that each of these nodes has replied in time."""
        waiting, until = set(nodes), time.monotonic() + timeout_s
        while waiting:
            assert time.monotonic() < until, waiting
            send(self.connection, RelayFrame(FrameKind.PULL, 0))
            while (frame := receive(self.connection)).kind is not FrameKind.DONE:
                if frame.number in waiting:
                    assert (frame.kind, len(frame.body)) == (FrameKind.REPLY, HONEST_BYTES)
                    waiting.discard(frame.number)
            time.sleep(0.1)

    def end(self) -> None:
        send(self.connection, RelayFrame(FrameKind.END, 0))


@contextlib.contextmanager
def core(workspace: Workspace) -> Iterator[Core]:
    listener = listen(workspace.relay_dir / SOCKET)
    try:
        start_run(workspace)
        listener.settimeout(120)
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(300)
            yield Core(connection)
    finally:
        listener.close()


def on_disk(workspace: Workspace) -> int:
    return sum(path.stat().st_size for path in (workspace.root / "flower").glob("superlink.db*"))


def kept(workspace: Workspace) -> tuple[int, int]:
    """Return how many objects SuperLink's database holds, and their number of bytes."""
    with contextlib.closing(sqlite3.connect(workspace.root / "flower" / "superlink.db", timeout=60)) as database:
        count, size = database.execute("SELECT COUNT(*), COALESCE(SUM(LENGTH(content)), 0) FROM objects").fetchone()
    return int(count), int(size)


def test_sixteen_replies_of_sixty_mebibytes_stop_at_the_quota_and_nobody_else_is_told_of_a_lock(tmp_path: Path) -> None:
    workspace, sites = build(tmp_path / "road", [*HONEST, FILLER], collection=CollectionConfig())
    with running(workspace, sites) as federation:
        group = federation.group
        for daemon in [d for d in group.daemons if d.spec.name in sites or d.spec.role == "core"]:
            group.stop(daemon)
        of = {site.name: site.node_id for site in workspace.registered()}
        honest, filler = [of[name] for name in HONEST], Filler()
        nodes = [Node(workspace, sites[name], answers) for name in HONEST]
        attacker = Node(workspace, sites[FILLER], filler)
        for node in (*nodes, attacker):
            node.start()
        with core(workspace) as asking:
            for number in range(REPLIES):
                asking.ask(of[FILLER], *honest, body=b"question %d" % number)
                asking.heard(*honest)
            before, names_before = on_disk(workspace), kept(workspace)[0]
            rounds, largest, most, started = 0, before, 0, time.monotonic()
            while not filler.done.is_set():
                assert time.monotonic() - started < 900, (filler.stored, filler.refused)
                assert attacker.is_alive(), attacker.errors
                asking.ask(*honest, body=b"under attack %d" % rounds)
                asking.heard(*honest)
                rounds += 1
                largest, most = max(largest, on_disk(workspace)), max(most, kept(workspace)[0])
            took, (_, held) = time.monotonic() - started, kept(workspace)
            asking.end()
        print(
            f"{filler.stored >> 20} MiB of {REPLIES * REPLY_BYTES >> 20} stored, {len(filler.refused)} refusals, "
            f"{rounds} rounds of honest replies meanwhile in {took:.0f} s, "
            f"slowest {max(node.slowest for node in nodes):.1f} s, "
            f"database from {before >> 20} to {largest >> 20} MiB with what is written ahead, at most {most} objects"
        )
        assert [node.errors for node in nodes] == [[], []]
        assert rounds >= 3
        assert all(node.answered >= REPLIES + rounds for node in nodes)
        assert REPLY_BYTES < filler.stored <= storage.MAX_BYTES
        assert held <= storage.MAX_BYTES + (8 << 20)
        assert (
            largest < 2 * storage.MAX_BYTES + (64 << 20) < REPLIES * REPLY_BYTES
        )  # SQLite writes each byte to its log first
        assert filler.refused.count("413") == REPLIES  # the trees of a megabyte of names
        assert filler.refused.count("shape") == REPLIES  # the trees of as many names as fit
        assert most - names_before < 3 * (REPLIES + 2 * len(HONEST)) + 10  # SuperLink stored no name of those trees
        # After the run, a node's next heartbeat deletes its objects.
        until(lambda: not kept(workspace)[0], lambda: kept(workspace), timeout_s=120, pause_s=1.0)
        for node in (*nodes, attacker):
            node.over.set()
    logs = "".join(path.read_text(errors="replace") for path in (workspace.root / "flower" / "logs").glob("*.log"))
    assert "database is locked" not in logs
    assert "reason=quota" in logs
