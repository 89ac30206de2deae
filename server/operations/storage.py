"""Limits what a site may store at SuperLink, and queues access to SuperLink's database.

:func:`install` puts these rules into SuperLink's own process; :mod:`server.operations.superlink` calls it. Without
these rules, a node could fill SuperLink's disk: Flower 1.41 stores every object that a node announces, and stores it
again whenever the message is repeated. Flower deletes objects only when somebody asks about the run after its end.
SuperLink's threads also write to one SQLite file at the same time. A thread that has waited five seconds for the file
fails with ``database is locked``, and that ends a ServerApp.

1. A reply must be announced as the objects of one message: three objects nested in each other, or a single object. The
   outermost object must be named by ``message_id``. The announcement is stored as a whole or not at all.
2. An object is accepted only from the node that announced it, and only if its header states the announced kind and
   child.
3. What a node has announced and stored is counted before it may add more: :data:`MAX_OBJECTS`, :data:`MAX_BYTES`.
4. Replies that came too late to be fetched are deleted when their node announces another. All objects of a run are
   deleted within :data:`SWEEP_S` seconds of its end, provided that some node sends requests.
5. Transactions run one after another, in the order in which they were asked for.
6. If the server's clock was ahead for a while, nodes may be stored as online until a time far in the future. Flower
   would not let them connect before that time. All such nodes are marked as offline whenever a node connects.

A refusal looks like Flower's own answer to a rejected reply, so an honest SuperNode drops the reply and continues. If
an object of a reply is refused for its shape or its size, the stored reply is overwritten with bytes that cannot be
read. The run then reports the site at once and does not wait for the rest of its reply.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from logging import WARNING
from typing import Any

from sqlalchemy import text

from common.engine import (
    PushMessagesRequest,
    PushMessagesResponse,
    PushObjectRequest,
    PushObjectResponse,
    Reconnect,
    SqlMixin,
    fleet_handlers,
    int64_to_uint64,
    log,
    uint64_to_int64,
)
from common.errors import InvalidInput
from common.wire import KINDS, check_object
from server.aggregation.inbox import chain

MAX_BYTES = 192 << 20
"""Bytes that one node may store: its reply to the current request and two late replies, each at most 64 MiB."""
MAX_OBJECTS = 3_072
"""Objects that one node may announce, enough for a thousand replies. Names take space even without content."""
SWEEP_S = 10.0
"""Least number of seconds between two deletions of the objects of finished runs."""

_CREATE = (
    "CREATE TABLE IF NOT EXISTS consilium_stored (object_id VARCHAR NOT NULL, node_id BIGINT NOT NULL, "
    "kind INTEGER NOT NULL, child VARCHAR NOT NULL, root VARCHAR NOT NULL, PRIMARY KEY (object_id, node_id))"
)
_GONE = "DELETE FROM consilium_stored WHERE node_id = :node AND object_id NOT IN (SELECT object_id FROM objects)"
_ANNOUNCED = "SELECT kind, child, root FROM consilium_stored WHERE object_id = :id AND node_id = :node"
_HAS = (
    "SELECT COUNT(*), COALESCE(SUM(LENGTH(content)), 0) FROM consilium_stored JOIN objects USING (object_id) "
    "WHERE node_id = :node"
)
_LATE = (
    "SELECT r.message_id FROM message_res r LEFT JOIN message_ins i ON i.message_id = r.reply_to_message_id "
    "WHERE r.src_node_id = :node AND (i.message_id IS NULL OR i.created_at + i.ttl <= :now)"
)
_OVER = (
    "SELECT DISTINCT o.run_id FROM run_objects o JOIN run r ON r.run_id = o.run_id "
    "JOIN task t ON t.task_id = r.primary_task_id WHERE t.finished_at IS NOT NULL"
)
_FUTURE = "UPDATE node SET online_until = :now WHERE online_until > :now + 3 * heartbeat_interval"
"""Flower sets this time two intervals ahead. The third interval is a margin."""

State = Any
"""Flower's SqlLinkState: it gives database sessions and deletes runs and messages."""


class _NotStored(Exception):
    """Raised with a reason inside a database transaction: rolls it back and refuses the node's request."""


def install() -> None:
    """Replace Flower's handlers in this process by handlers that apply the rules of this module.

    Raises:
        AttributeError: If a later Flower has moved a handler.
    """
    storage = Storage(fleet_handlers.push_messages, fleet_handlers.push_object)
    heartbeat, activate = fleet_handlers.send_node_heartbeat, fleet_handlers.activate_node

    def activate_node(request: Any, state: State) -> Any:
        forget_future(state)
        return activate(request, state)

    def send_node_heartbeat(request: Any, state: State) -> Any:
        storage.sweep(state)
        return heartbeat(request, state)

    fleet_handlers.push_messages = storage.push_messages
    fleet_handlers.push_object = storage.push_object
    fleet_handlers.activate_node = activate_node
    fleet_handlers.send_node_heartbeat = send_node_heartbeat
    SqlMixin.session = in_turn(SqlMixin.session, Turns())


def forget_future(state: State) -> None:
    """Mark nodes as offline whose ``online_until`` was stored while the server's clock was ahead (rule 6).

    Args:
        state: Flower's database.
    """
    with state.session() as session:
        session.execute(text(_FUTURE), {"now": time.time()})


class Storage:
    """The two handlers by which a node stores something, wrapped around Flower's own.

    Args:
        push_messages: Flower's handler of announcements.
        push_object: Flower's handler of objects.
    """

    def __init__(
        self,
        push_messages: Callable[[PushMessagesRequest, State], PushMessagesResponse],
        push_object: Callable[[PushObjectRequest, State], PushObjectResponse],
    ) -> None:
        self._push_messages, self._push_object = push_messages, push_object
        self._swept = 0.0
        self._said: dict[tuple[int, str], float] = {}

    def push_messages(self, request: PushMessagesRequest, state: State) -> PushMessagesResponse:
        """Announce one reply as Flower does, after checking its shape and the node's quota (rules 1, 3 and 4).

        Args:
            request: The node's announcement.
            state: Flower's database.

        Returns:
            Flower's answer, or the answer that makes a SuperNode drop the reply.
        """
        self.sweep(state)
        node = request.node.node_id
        objects = announced(request)
        if objects is None:
            return self._refused(request, node, "shape")
        self._drop_late(state, node)
        try:
            with state.session() as session:
                held, size = self._count_stored(session, node)
                if held + len(objects) > MAX_OBJECTS or size >= MAX_BYTES:
                    return self._refused(request, node, "quota")
                answer = self._push_messages(request, state)
                row = {"id": objects[0], "node": uint64_to_int64(node)}
                if not session.execute(
                    text("SELECT 1 FROM message_res WHERE message_id = :id AND src_node_id = :node"), row
                ).first():
                    raise _NotStored("no-question")
                for place, (name, child) in enumerate(zip(objects, (*objects[1:], ""), strict=True)):
                    session.execute(
                        text("INSERT OR REPLACE INTO consilium_stored VALUES (:id, :node, :kind, :child, :root)"),
                        row | {"id": name, "kind": place, "child": child, "root": objects[0]},
                    )
                return answer
        except _NotStored as error:
            return self._refused(request, node, str(error))

    def push_object(self, request: PushObjectRequest, state: State) -> PushObjectResponse:
        """Store one object as Flower does, if this node announced it and its quota allows (rules 2 and 3).

        Args:
            request: The object, the node and the session.
            state: Flower's database.

        Returns:
            Flower's answer; ``stored`` is False for a refused object.
        """
        node, content = request.node.node_id, request.object_content
        row = {"id": request.object_id, "node": uint64_to_int64(node)}
        try:
            with state.session() as session:
                self._prepare(session)
                place = session.execute(text(_ANNOUNCED), row).first()
                if place is None or not request.session_id:
                    raise _NotStored("not-announced")
                if self._count_stored(session, node)[1] + len(content) > MAX_BYTES:
                    raise _NotStored("quota")
                try:
                    check_object(content, kind=KINDS[place.kind], child=place.child)
                except InvalidInput as error:
                    raise _NotStored("shape") from error
                answer = self._push_object(request, state)
                if not answer.stored:
                    raise _NotStored("content")
                return answer
        except _NotStored as error:
            reason = str(error)
            self._say(node, reason)
        if reason in ("shape", "quota"):
            self._spoil(state, place.root)
        return PushObjectResponse(stored=False)

    def _spoil(self, state: State, root: str) -> None:
        """Make a reply unreadable, so that the run does not wait for the rest of it.

        Its root object contains the id of the node that sent it, so no other node's reply can have the same root.
        """
        with state.session() as session:
            session.execute(
                text("UPDATE objects SET content = :refused, is_available = 1 WHERE object_id = :root"),
                {"refused": b"refused", "root": root},
            )

    def sweep(self, state: State) -> None:
        """Delete the objects of finished runs, at most once every :data:`SWEEP_S` seconds."""
        if (now := time.monotonic()) - self._swept < SWEEP_S:
            return
        self._swept = now
        with state.session() as session:
            over = [int64_to_uint64(run) for (run,) in session.execute(text(_OVER))]
        for run in over:
            state.cleanup_run(run)

    def _drop_late(self, state: State, node: int) -> None:
        """Delete a node's replies whose request has expired or is gone (rule 4)."""
        with state.session() as session:
            row = {"node": uint64_to_int64(node), "now": time.time()}
            late = [name for (name,) in session.execute(text(_LATE), row)]
            for name in late:
                state.object_store.delete(name)
                session.execute(text("DELETE FROM message_res WHERE message_id = :id"), {"id": name})

    def _count_stored(self, session: Any, node: int) -> tuple[int, int]:
        """Return the number and the bytes of the objects that a node has announced and that are not deleted yet."""
        self._prepare(session)
        row = {"node": uint64_to_int64(node)}
        session.execute(text(_GONE), row)
        held, size = session.execute(text(_HAS), row).one()
        return int(held), int(size)

    def _prepare(self, session: Any) -> None:
        session.execute(text(_CREATE))

    def _refused(self, request: PushMessagesRequest, node: int, reason: str) -> PushMessagesResponse:
        self._say(node, reason)
        names = [message.metadata.message_id for message in request.messages_list[:1]]
        return PushMessagesResponse(reconnect=Reconnect(reconnect=5), results=dict.fromkeys(names, 0))

    def _say(self, node: int, reason: str) -> None:
        """Log a refusal, at most once a second for each node and reason, so that no node can fill the disk."""
        if (now := time.monotonic()) - self._said.get((node, reason), -1.0) >= 1.0:
            self._said[node, reason] = now
            log(WARNING, "event=not-stored node=%d reason=%s", node, reason)


def announced(request: PushMessagesRequest) -> tuple[str, ...] | None:
    """Return the object names of the single reply that a request announces.

    Args:
        request: A node's announcement.

    Returns:
        Names from the root object to the innermost; None unless the request announces exactly one message of a shape
        that rule 1 allows.
    """
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return None
    names = chain(request.message_object_trees[0])
    return names if names and names[0] == request.messages_list[0].metadata.message_id else None


class Turns:
    """A lock that threads get in the order in which they asked for it."""

    def __init__(self) -> None:
        self._waiting: deque[threading.Event] = deque()
        self._guard = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the lock, and hold it until the block ends."""
        mine = threading.Event()
        with self._guard:
            self._waiting.append(mine)
            if self._waiting[0] is mine:
                mine.set()
        mine.wait()
        try:
            yield
        finally:
            with self._guard:
                self._waiting.popleft()
                if self._waiting:
                    self._waiting[0].set()


def in_turn(session: Callable[[Any], Any], turns: Turns) -> Callable[[Any], Any]:
    """Wrap ``SqlMixin.session`` so that outermost sessions run one after the other.

    Args:
        session: Flower's context manager of a database session.
        turns: The lock that an outermost session holds; a session nested within another does not wait for it.

    Returns:
        The wrapped context manager.
    """
    inside: ContextVar[bool] = ContextVar("inside", default=False)

    @contextmanager
    def waiting(self: Any) -> Iterator[Any]:
        if inside.get():
            with session(self) as found:
                yield found
            return
        with turns.turn():
            token = inside.set(True)
            try:
                with session(self) as found:
                    yield found
            finally:
                inside.reset(token)

    return waiting
