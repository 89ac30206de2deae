"""Carries frames between the core and the ServerApp over a Unix socket.

A *frame* is one unit of this connection: a kind, a number and bytes. The core tells the ServerApp which messages to
pass on. The ServerApp cannot forge the messages, because they are signed, and cannot read the codes in them, because
the codes are encrypted. This module imports neither Flower nor the ledger nor a key. It refuses a frame of an unknown
kind or over the size limit.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from common import __version__, sockets
from common.errors import InvalidInput

SOCKET = "core.sock"
FOLDER = "CONSILIUM_RELAY"
"""Environment variable that tells the ServerApp the folder of the core's socket."""

SAME_VERSION = f"install the same version of Consilium for the core and the ServerApp; {__version__} runs here"
"""Remedy in an error about an unexpected frame."""

MAX_BODY = 64 << 20
_HEAD = struct.Struct(">BQI")
_NODE = struct.Struct(">Q")


class FrameKind(IntEnum):
    """The kind of a frame. The text below each request's kind names the kinds that answer it."""

    RUN = 1
    """The ServerApp's first frame, with Flower's run id."""
    ONLINE = 2
    """The core asks which nodes are online; answered by NODES."""
    NODES = 3
    """Node ids, as :func:`pack_nodes` packs them."""
    BODY = 4
    """A message for the node whose id is the frame's number, to be sent with the next PUSH."""
    PUSH = 5
    """Send the messages, which expire after ``number`` milliseconds; answered by DONE. Earlier pushes are dropped."""
    PULL = 6
    """Fetch the replies that have arrived; answered by REPLY or PROBLEM for each, then DONE.

    A number other than 0 marks the last fetch, in which a reply that has arrived only in part is a PROBLEM.
    """
    REPLY = 7
    """A node's reply; the number is the node's id."""
    PROBLEM = 8
    """A node's reply is an error or unreadable; the body is a one-word reason, and the number is the node's id."""
    DONE = 9
    """The end of an answer."""
    END = 10
    """The core's last frame; its number is 0 if the run ended well."""
    PING = 11
    """Asks whether the core is alive, in place of RUN; answered by DONE."""
    FAILED = 12
    """The ServerApp's last frame, in place of an answer; its body is the error that ended the ServerApp."""


@dataclass(frozen=True, slots=True)
class RelayFrame:
    """One frame of the connection between the core and the ServerApp.

    Attributes:
        kind: The kind, which defines the meaning of number and body.
        number: A node id, a run id, milliseconds or a status, depending on the kind.
        body: The frame's content, at most :data:`MAX_BODY` bytes.
    """

    kind: FrameKind
    number: int = 0
    body: bytes = b""


def send(connection: socket.socket, frame: RelayFrame) -> None:
    """Write one frame to a socket.

    Args:
        connection: The connected socket.
        frame: The frame.

    Raises:
        OSError: If the socket fails.
    """
    connection.sendall(_HEAD.pack(frame.kind, frame.number, len(frame.body)) + frame.body)


def receive(connection: socket.socket) -> RelayFrame:
    """Read one frame from a socket.

    Args:
        connection: The connected socket.

    Returns:
        The frame.

    Raises:
        EOFError: If the other end has closed.
        InvalidInput: If the frame's kind is unknown, or its body is longer than :data:`MAX_BODY`.
        OSError: If the socket fails or its timeout passes.
    """
    kind, number, length = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if kind not in FrameKind.__members__.values() or length > MAX_BODY:
        raise InvalidInput(
            "kind and body length of a frame between core and ServerApp",
            value=(kind, length),
            limit=f"a known kind, and a body of at most {MAX_BODY} bytes",
        )
    return RelayFrame(FrameKind(kind), number, _exactly(connection, length))


def pack_nodes(nodes: frozenset[int]) -> bytes:
    """Pack node ids in ascending order, eight bytes each, big-endian.

    Args:
        nodes: Flower's node ids.

    Returns:
        The packed ids, for the body of a frame.

    >>> unpack_nodes(pack_nodes(frozenset({7, 3}))) == {3, 7}
    True
    """
    return b"".join(map(_NODE.pack, sorted(nodes)))


def unpack_nodes(body: bytes) -> frozenset[int]:
    """Return the node ids that :func:`pack_nodes` packed.

    Args:
        body: The packed ids.

    Returns:
        The node ids.

    Raises:
        InvalidInput: If the length is no multiple of eight bytes.
    """
    if len(body) % _NODE.size:
        raise InvalidInput("bytes of packed node ids", value=len(body), limit=f"a multiple of {_NODE.size}")
    return frozenset(node for (node,) in _NODE.iter_unpack(body))


@contextmanager
def lifeline(connection: socket.socket) -> Iterator[None]:
    """End this process at once, as if killed, if the other end of the connection closes inside the block.

    A run has two processes, the core's and the ServerApp's. Neither continues without the other.

    Args:
        connection: The connected socket.

    Yields:
        Nothing.
    """
    over = threading.Event()
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)

    def watch() -> None:
        poll.poll()
        if not over.is_set():
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def connect(folder: Path) -> socket.socket:
    """Connect to the core whose socket is in a folder.

    Args:
        folder: The folder of the socket :data:`SOCKET`.

    Returns:
        The connected socket.

    Raises:
        OSError: If no core listens there.
    """
    return sockets.connect(folder / SOCKET)


def answers(folder: Path) -> bool:
    """Return whether the core whose socket is in a folder answers within two seconds.

    Args:
        folder: The folder of the socket :data:`SOCKET`.

    Returns:
        True if it answers.
    """
    try:
        with connect(folder) as connection:
            connection.settimeout(2.0)
            send(connection, RelayFrame(FrameKind.PING))
            return receive(connection).kind is FrameKind.DONE
    except (OSError, EOFError, InvalidInput):
        return False


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the other end of the relay is gone")
        parts += part
    return bytes(parts)
