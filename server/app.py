"""The Flower ServerApp: relays what the core says to sites and what they reply. It has no key and opens no ledger.

It reads nothing of a run's configuration; who starts it names the folder of the core's socket. It ends when the core
does, and the core's run when it does.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from common.errors import InvalidInput
from common.wire import MESSAGE_TYPE, from_message, to_record
from server.aggregation.relay import FOLDER, Frame, Kind, connect, lifeline, pack_nodes, receive, send

CORE_PATIENCE_S = 60.0
"""How long the core is waited for: its supervisor may be starting it again."""

PULLED_AT_ONCE = 64
"""Sites whose replies are in this process's memory at one time."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Relay for the core until it says that the run is over."""
    with _core(Path(os.environ[FOLDER])) as core, lifeline(core):
        send(core, Frame(Kind.RUN, context.run_id))
        status = relay(core, grid)
    if status:
        raise RuntimeError("the run failed; its events say why")


def relay(core: socket.socket, grid: Grid) -> int:
    """Answer the core's questions over Flower's Grid until it ends; its status."""
    bodies: dict[int, bytes] = {}
    nodes: dict[str, int] = {}
    while True:
        asked = receive(core)
        match asked.kind:
            case Kind.ONLINE:
                send(core, Frame(Kind.NODES, body=pack_nodes(frozenset(grid.get_node_ids()))))
            case Kind.BODY:
                bodies[asked.number] = asked.body
            case Kind.PUSH:
                nodes = _push(grid, bodies, ttl_s=asked.number / 1000)
                bodies = {}
                send(core, Frame(Kind.DONE))
            case Kind.PULL:
                for some in _by(PULLED_AT_ONCE, list(nodes)):
                    for message in grid.pull_messages(some):
                        node_id = nodes.pop(message.metadata.reply_to_message_id, None)
                        if node_id is not None:
                            send(core, _reply(node_id, message))
                send(core, Frame(Kind.DONE))
            case Kind.END:
                return asked.number
            case _:
                raise InvalidInput("question of the core", value=asked.kind)


def _by(size: int, items: list[str]) -> Iterator[list[str]]:
    return (items[at : at + size] for at in range(0, len(items), size))


def _push(grid: Grid, bodies: dict[int, bytes], *, ttl_s: float) -> dict[str, int]:
    """Send the bodies; the node of each message that went out."""
    messages = [
        Message(content=to_record(body), dst_node_id=node_id, message_type=MESSAGE_TYPE, ttl=ttl_s)
        for node_id, body in bodies.items()
    ]
    return dict(zip(grid.push_messages(messages), bodies, strict=True))


def _reply(node_id: int, message: Message) -> Frame:
    if message.has_error():
        return Frame(Kind.PROBLEM, node_id, f"flower-{message.error.code}".encode())
    try:
        return Frame(Kind.REPLY, node_id, from_message(message))
    except InvalidInput:
        return Frame(Kind.PROBLEM, node_id, b"malformed")


def _core(folder: Path) -> socket.socket:
    until = time.monotonic() + CORE_PATIENCE_S
    while True:
        try:
            return connect(folder)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
