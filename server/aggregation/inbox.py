"""Reads replies from SuperLink one by one, each within a time limit of its own.

The ServerApp uses it in place of Flower's ``pull_messages``, which reads all replies in one call. If one reply is
incomplete, that call fails or waits, for all sites. Flower splits a reply into objects. This module reads each reply
object by object without waiting. An object that has not arrived is requested again at the next poll, until
:data:`READ_S` seconds have passed since the reply was announced. A reply that cannot be read is reported as
``malformed`` and deleted at SuperLink.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from flwr.serverapp import Grid

from common.engine import (
    RUNTIME_CLIENT,
    ConfirmMessageReceivedRequest,
    MessageProto,
    Node,
    ObjectTree,
    PullAppMessagesRequest,
    PullObjectRequest,
    RunNotRunningException,
)
from common.errors import InvalidInput
from common.wire import KINDS, body_in, check_object

READ_S = 120.0
"""Seconds within which a reply must be complete after it was announced: enough for 64 MiB at 0.5 MiB/s."""

SERVER = Node(node_id=1)

log = logging.getLogger(__name__)


_Announced = tuple[MessageProto, ObjectTree]


class SuperLinkCalls(Protocol):
    """The three calls of SuperLink's runtime interface that are used here."""

    def PullMessages(self, request: PullAppMessagesRequest) -> Any: ...  # noqa: N802

    def PullObject(self, request: PullObjectRequest) -> Any: ...  # noqa: N802

    def ConfirmMessageReceived(self, request: ConfirmMessageReceivedRequest) -> Any: ...  # noqa: N802


def superlink_calls(grid: Grid) -> SuperLinkCalls:
    """Return the client of SuperLink's runtime interface that a ServerApp's Grid holds.

    Args:
        grid: Flower's Grid.

    Returns:
        The client, whose three calls :class:`SuperLinkCalls` names.

    Raises:
        InvalidInput: If the Grid has no such client, because Flower's version is not the supported one.
    """
    client = getattr(grid, RUNTIME_CLIENT, None)
    if client is None:
        raise InvalidInput(
            "Flower's Grid", value=type(grid).__name__, limit="the Grid of Flower 1.41", remedy="install Flower 1.41"
        )
    return cast(SuperLinkCalls, client)


@dataclass(slots=True)
class _Coming:
    """A reply that SuperLink has announced, with the part of it that has arrived so far.

    Attributes:
        node: Flower's id of the node that sent it.
        ids: Names of the objects that it consists of, the outermost first.
        until: Time at which it must be complete, by the inbox's clock.
        objects: The objects that have arrived.
    """

    node: int
    ids: tuple[str, ...]
    until: float
    objects: list[bytes] = field(default_factory=list)


class Inbox:
    """The replies to the messages that were sent to the nodes in one push (one request to SuperLink).

    Args:
        calls: SuperLink's runtime interface.
        nodes: A mapping from the id of each message that was sent to the id of the node that it was sent to.
        clock: Returns seconds.
    """

    def __init__(
        self, calls: SuperLinkCalls, nodes: Mapping[str, int], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._calls, self._waiting, self._clock = calls, dict(nodes), clock
        self._coming: list[_Coming] = []

    def arrived(self, *, last: bool = False) -> Iterator[tuple[int, bytes | str]]:
        """Yield each reply that is complete now, once for each node.

        Args:
            last: True to report a reply of which only a part has arrived as malformed.

        Yields:
            Node id and the reply's body as bytes; for an unusable reply, a one-word reason as str in place of the body.
        """
        announced, unreadable = self._announced()
        for node in unreadable:
            yield node, "malformed"
        for message, tree in announced:
            if (node_id := self._waiting.pop(message.metadata.reply_to_message_id, None)) is None:
                continue
            ids = chain(tree)
            if ids is None or ids[0] != message.metadata.message_id:
                self._delete(tree.object_id)
                yield node_id, "malformed"
                continue
            self._coming.append(_Coming(node_id, ids, self._clock() + READ_S))
        for reply in list(self._coming):
            found = self._read(reply, until=self._clock() if last else reply.until)
            if found is not None:
                self._coming.remove(reply)
                self._delete(reply.ids[0])
                yield reply.node, found

    def close(self) -> None:
        """Delete the replies that are still incomplete, and accept no more."""
        for reply in self._coming:
            self._delete(reply.ids[0])
        self._coming, self._waiting = [], {}

    def _announced(self) -> tuple[list[_Announced], list[int]]:
        """Return the replies announced since the last call, and the nodes whose announcement cannot be read.

        One request asks for the replies to all messages. If it fails, one request is made for each message, to find the
        node whose announcement cannot be read.
        """
        asked = list(self._waiting)
        if not asked:
            return [], []
        try:
            return self._pull_announced(asked), []
        except RunNotRunningException:
            raise
        except Exception as error:  # noqa: BLE001 - only asking for each message shows which one is at fault
            log.warning("event=unreadable-replies cause=%s", type(error).__name__)
        found: list[_Announced] = []
        failed = []
        for sent in asked:
            try:
                found += self._pull_announced([sent])
            except RunNotRunningException:
                raise
            except Exception:  # noqa: BLE001
                failed.append(sent)
        if len(failed) == len(asked):  # SuperLink itself has failed: ask again at the next poll
            return [], []
        return found, [self._waiting.pop(sent) for sent in failed]

    def _pull_announced(self, sent: list[str]) -> list[_Announced]:
        told = self._calls.PullMessages(PullAppMessagesRequest(message_ids=sent))
        return list(zip(told.messages_list, told.message_object_trees, strict=True))

    def _read(self, reply: _Coming, *, until: float) -> bytes | str | None:
        """Read the objects of a reply that have arrived since the last call.

        Args:
            reply: The reply.
            until: Time, by the inbox's clock, after which a missing object makes the reply unusable.

        Returns:
            The body as bytes once it is complete; a one-word reason as str if the reply is unusable; None if an object
            is missing and ``until`` has not passed.
        """
        try:
            while len(reply.objects) < len(reply.ids):
                at = len(reply.objects)
                found = self._object(reply.ids[at])
                if found.object_found and not found.object_available and self._clock() < until:
                    if reply.objects and self._object(reply.ids[0]).object_content != reply.objects[0]:
                        raise InvalidInput(
                            "reply that changed while it was read", limit="the bytes that SuperLink stored first"
                        )
                    return None
                if not found.object_available:
                    raise InvalidInput("Flower message that lacks an object", limit="a message with all its objects")
                child = reply.ids[at + 1] if at + 1 < len(reply.ids) else ""
                check_object(found.object_content, kind=KINDS[at], child=child)
                reply.objects.append(found.object_content)
            return body_in(reply.objects, reply.ids) if len(reply.ids) == len(KINDS) else _error(reply.objects[0])
        except RunNotRunningException:  # the run was stopped: no site's fault
            raise
        except Exception as error:  # noqa: BLE001 - any error here is a fault of that reply
            log.warning("event=unreadable-reply node=%d cause=%s", reply.node, type(error).__name__)
            return "malformed"

    def _object(self, name: str) -> Any:
        return self._calls.PullObject(PullObjectRequest(node=SERVER, object_id=name))

    def _delete(self, root: str) -> None:
        try:
            self._calls.ConfirmMessageReceived(ConfirmMessageReceivedRequest(node=SERVER, message_object_id=root))
        except RunNotRunningException:
            raise
        except Exception as error:  # noqa: BLE001 - SuperLink deletes it at the end of the run
            log.warning("event=not-deleted cause=%s", type(error).__name__)


def chain(tree: ObjectTree) -> tuple[str, ...] | None:
    """Return the ids of the nested objects that a Flower message consists of.

    Args:
        tree: The tree of objects that a node announced.

    Returns:
        The ids, the outermost first; None unless the tree is one object (an error message), or three objects nested in
        each other (a reply).
    """
    ids = [tree.object_id]
    while len(tree.children) == 1 and len(ids) <= len(KINDS):
        tree = tree.children[0]
        ids.append(tree.object_id)
    return tuple(ids) if len(ids) in (1, len(KINDS)) and not tree.children and len(set(ids)) == len(ids) else None


def _error(content: bytes) -> str:
    """Return ``flower-CODE`` for a Flower message that reports an error, or ``malformed`` if it reports none."""
    message = MessageProto.FromString(check_object(content, kind=KINDS[0], child=""))
    return f"flower-{message.error.code}" if message.HasField("error") else "malformed"
