"""Carries frames between the core and the ServerApp over a Unix socket.

The ServerApp pushes and pulls what it is told: signed bodies that it cannot make and sealed ones that it cannot open.
Nothing here imports Flower, the ledger or a key. Refuses a frame of an unknown kind or over its limit.
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

from common import sockets
from common.errors import InvalidInput

SOCKET = "core.sock"
FOLDER = "CONSILIUM_RELAY"
"""Environment variable of the ServerApp: the folder in which the core's socket lies."""

MAX_BODY = 64 << 20
_HEAD = struct.Struct(">BQI")
_NODE = struct.Struct(">Q")


class Kind(IntEnum):
    """A frame's kind and, for a question, what is answered."""

    RUN = 1
    """The ServerApp's first word, with Flower's run id."""
    ONLINE = 2
    """Asks for one NODES."""
    NODES = 3
    BODY = 4
    """A body for the node of this number, to be sent with the next PUSH."""
    PUSH = 5
    """Sends the bodies, which live for so many milliseconds; asks for DONE. What was pushed before is forgotten."""
    PULL = 6
    """Asks for the replies that are there, each once, and DONE; with a number other than 0 for the last time, when what
    began to arrive and did not end is a PROBLEM."""
    REPLY = 7
    PROBLEM = 8
    """A node's reply is an error; the body is a word for it."""
    DONE = 9
    END = 10
    """The core's last word; 0 if the run ended well."""
    PING = 11
    """The first word of who only asks whether the core answers; it is answered by DONE."""
    FAILED = 12
    """The ServerApp's last word in place of an answer: what ended it, for the core's log."""


@dataclass(frozen=True, slots=True)
class RelayFrame:
    """One frame: its kind, the number that goes with it (a node, a run, milliseconds) and a body."""

    kind: Kind
    number: int = 0
    body: bytes = b""


def send(connection: socket.socket, frame: RelayFrame) -> None:
    """Write one frame."""
    connection.sendall(_HEAD.pack(frame.kind, frame.number, len(frame.body)) + frame.body)


def receive(connection: socket.socket) -> RelayFrame:
    """Read one frame. EOFError if the other end is gone, InvalidInput for what is no frame."""
    kind, number, length = _HEAD.unpack(_exactly(connection, _HEAD.size))
    if kind not in Kind.__members__.values() or length > MAX_BODY:
        raise InvalidInput("frame of the relay", value=(kind, length), limit=f"a known kind, {MAX_BODY} bytes")
    return RelayFrame(Kind(kind), number, _exactly(connection, length))


def pack_nodes(nodes: frozenset[int]) -> bytes:
    """Node ids, eight bytes each."""
    return b"".join(map(_NODE.pack, sorted(nodes)))


def unpack_nodes(body: bytes) -> frozenset[int]:
    """What :func:`pack_nodes` packed; InvalidInput for half a number."""
    if len(body) % _NODE.size:
        raise InvalidInput("node ids", value=len(body), limit=f"a multiple of {_NODE.size} bytes")
    return frozenset(node for (node,) in _NODE.iter_unpack(body))


@contextmanager
def lifeline(connection: socket.socket) -> Iterator[None]:
    """Inside, this process ends at once, as if killed, when the other end is gone: one run, two processes, one life."""
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
    """A connection to the core whose socket lies in ``folder``."""
    return sockets.connect(folder / SOCKET)


def answers(folder: Path) -> bool:
    """Whether the core whose socket lies in ``folder`` answers."""
    try:
        with connect(folder) as connection:
            connection.settimeout(2.0)
            send(connection, RelayFrame(Kind.PING))
            return receive(connection).kind is Kind.DONE
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
