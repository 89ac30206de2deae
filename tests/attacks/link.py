"""Runs Flower's own SuperLink in this process without HTTP: its handlers over a database file, behind our
quota.

A test acts as a ServerApp that asks nodes, and as any node, which may announce and push anything.
"""

from __future__ import annotations

import atexit
import secrets
import shutil
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.app.message import make_message
from flwr.common.constant import SubStatus
from flwr.common.serde import message_to_proto, metadata_from_proto
from flwr.proto import fleet_pb2, message_pb2, node_pb2, recorddict_pb2, runtime_pb2
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_id,
    get_object_tree,
)
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import text

from common.wire import MESSAGE_TYPE, to_record
from server.operations.storage import Storage

Tree = message_pb2.ObjectTree


def flower_object(kind: str, children: Sequence[str] = (), body: bytes = b"") -> bytes:
    """Return an object as Flower stores it."""
    return f"{kind} {','.join(children)} {len(body)}\0".encode() + body


def named(content: bytes) -> str:
    """Return an object's name."""
    return str(get_object_id(content))


@dataclass
class Link:
    """Runs SuperLink with one active run; with ``quota`` false it is SuperLink as Flower ships it."""

    path: Path
    quota: bool = True
    sent: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.exists():
            shutil.copy(_empty(), self.path)
        self.state: Any = _state(self.path)
        self.store = self.state.object_store
        self.handlers = Storage(fleet_handlers.push_messages, fleet_handlers.push_object)
        self.push_messages = self.handlers.push_messages if self.quota else fleet_handlers.push_messages
        self.push_object = self.handlers.push_object if self.quota else fleet_handlers.push_object
        self.run = self.start_run()

    def start_run(self) -> int:
        run = self.state.create_run("f", "1", "h", {}, NOOP_FEDERATION_ID, None, "a", TaskType.SERVER_APP)
        self.task = self.state.get_tasks(run_ids=[run])[0]
        assert self.state.claim_task(self.task.task_id)
        assert self.state.activate_task(self.task.task_id)
        return int(run)

    def end_run(self) -> None:
        assert self.state.finish_task(self.task.task_id, SubStatus.COMPLETED, "")

    def node(self, name: str) -> int:
        """Return a new node's id; two nodes may have the same name."""
        node = self.state.create_node("a", "a", f"{name} {secrets.token_hex(8)}".encode(), 30.0)
        self.state.activate_node(node, 30.0)
        return int(node)

    def ask(self, node: int, body: bytes = b"?") -> str:
        """Send a question from the ServerApp to a node, and return the question's id."""
        metadata = message_pb2.Metadata(
            run_id=self.run,
            src_node_id=1,
            dst_node_id=node,
            ttl=600.0,
            message_type=MESSAGE_TYPE,
            created_at=time.time(),
        )
        return self._pushed(make_message(metadata_from_proto(metadata), to_record(body)))

    def _pushed(self, message: FlowerMessage) -> str:
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = get_all_nested_objects(message)
        answer = runtime_handlers.push_messages(
            runtime_pb2.PushAppMessagesRequest(
                messages_list=[message_to_proto(message)], message_object_trees=[get_object_tree(message)]
            ),
            self.state,
            self.task,
        )
        for name in answer.objects_to_push:
            content = objects[name].deflate()
            assert self.state.store_object(self.run, answer.session_id, name, content)
        self.sent[message.object_id] = message.metadata.dst_node_id
        return str(message.object_id)

    def expire(self, question: str) -> None:
        """Age a question to twice its time limit."""
        with self.state.session() as session:
            aged = text("UPDATE message_ins SET created_at = created_at - 2 * ttl WHERE message_id = :id")
            assert session.execute(aged, {"id": question}).rowcount == 1

    # --- a node

    def metadata(self, node: int, question: str, **changes: object) -> message_pb2.Metadata:
        facts = {"run_id": self.run, "src_node_id": node, "dst_node_id": 1, "reply_to_message_id": question}
        facts |= {"ttl": 20.0, "message_type": MESSAGE_TYPE, "created_at": time.time()}
        return message_pb2.Metadata(**facts | changes)

    def announce(self, node: int, metadata: message_pb2.Metadata, tree: Tree) -> fleet_pb2.PushMessagesResponse:
        request = fleet_pb2.PushMessagesRequest(
            node=node_pb2.Node(node_id=node),
            messages_list=[message_pb2.Message(metadata=metadata, content=recorddict_pb2.RecordDict())],
            message_object_trees=[tree],
            clientapp_runtime_list=[1.0],
        )
        return self.push_messages(request, self.state)

    def put(self, node: int, content: bytes, *, session: str, name: str = "") -> bool:
        request = message_pb2.PushObjectRequest(
            node=node_pb2.Node(node_id=node),
            run_id=self.run,
            object_id=name or named(content),
            object_content=content,
            session_id=session,
        )
        return bool(self.push_object(request, self.state).stored)

    def reply(
        self, node: int, question: str, contents: Sequence[bytes], *, keep_back: int = 0, announce: int | None = None
    ) -> list[bool]:
        """Announce objects in a row, the root first, and push all but the last ``keep_back``; return which of them are
        stored.

        If ``announce`` is given, only that many objects are announced, as if there were no more.
        """
        root = contents[0]
        metadata = self.metadata(node, question, message_id=named(root))
        tree = chain(*map(named, contents[:announce]))
        answer = self.announce(node, metadata, tree)
        pushed = contents[: len(contents) - keep_back]
        wanted = set(answer.objects_to_push) if answer.session_id else set(map(named, pushed))
        return [
            named(content) not in wanted or self.put(node, content, session=answer.session_id)
            for content in reversed(pushed)
        ]

    def objects(self, node: int, question: str, body: bytes) -> list[bytes]:
        """Return an honest reply's three objects: message, record dictionary, record."""
        return reply_objects(self.metadata(node, question), body)

    # --- the ServerApp's three calls

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        return runtime_handlers.pull_messages(request, self.state, self.task)

    def PullObject(self, request: Any) -> Any:  # noqa: N802
        return runtime_handlers.pull_object(request, self.state, self.task)

    def ConfirmMessageReceived(self, request: Any) -> Any:  # noqa: N802
        return runtime_handlers.confirm_message_received(request, self.state, self.task)

    def size(self) -> int:
        """Return the bytes of the database and of its write-ahead log."""
        return sum(path.stat().st_size for path in self.path.parent.glob(f"{self.path.name}*"))


def reply_objects(metadata: message_pb2.Metadata, body: bytes) -> list[bytes]:
    """Return a reply's three objects as Flower makes them: message, record dictionary, record."""
    record = to_record(body)
    (config,) = record.children.values()
    told = metadata.SerializeToString()
    return [
        flower_object("Message", [record.object_id], b"\x0a" + _length(told) + told),
        record.deflate(),
        config.deflate(),
    ]


def _state(path: Path) -> Any:
    with warnings.catch_warnings():  # Flower's alembic configuration has an old form
        warnings.simplefilter("ignore", DeprecationWarning)
        return LinkStateFactory(str(path), NoOpFederationManager(), ObjectStoreFactory(str(path))).state()


@cache
def _empty() -> Path:
    """Return a new database that Flower made once, because making one takes half a second."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "superlink.db"
    _state(path)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def chain(*names: str) -> Tree:
    """Return a tree of these names, each the only child of the one before."""
    tree = Tree(object_id=names[-1])
    for name in reversed(names[:-1]):
        tree = Tree(object_id=name, children=[tree])
    return tree


def _length(data: bytes) -> bytes:
    assert len(data) < 1 << 14
    return bytes([len(data)]) if len(data) < 128 else bytes([len(data) & 0x7F | 0x80, len(data) >> 7])
