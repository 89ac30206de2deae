"""The Flower ServerApp: relays what the core says to sites and what they reply. It has no key and opens no ledger.

It reads nothing of a run's configuration; who starts it names the folder of the core's socket. It ends when the core
does, and the core's run when it does. Each site's reply is read by itself (:mod:`server.aggregation.inbox`): one that
cannot be read, or does not come to its end, is that site's and delays nobody else's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import traceback
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from common.errors import InvalidInput
from common.wire import MESSAGE_TYPE, to_record
from server.aggregation.inbox import Inbox, Post, post_of
from server.aggregation.relay import FOLDER, Kind, RelayFrame, connect, lifeline, pack_nodes, receive, send

CORE_PATIENCE_S = 60.0
"""How long the core is waited for: its supervisor may be starting it again."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Relay for the core until it says that the run is over."""
    with _core(Path(os.environ[FOLDER])) as core, lifeline(core):
        send(core, RelayFrame(Kind.RUN, context.run_id))
        try:
            status = relay(core, grid, post_of(grid))
        except Exception:  # Flower keeps no log of a ServerApp's: the core does
            with contextlib.suppress(OSError):
                send(core, RelayFrame(Kind.FAILED, body=traceback.format_exc()[-4_000:].encode()))
            raise
    if status:
        raise RuntimeError("the run failed; its events say why")


def relay(core: socket.socket, grid: Grid, post: Post) -> int:
    """Answer the core's questions over Flower's Grid until it ends; its status."""
    bodies: dict[int, bytes] = {}
    inbox = Inbox(post, {})
    while True:
        asked = receive(core)
        match asked.kind:
            case Kind.ONLINE:
                send(core, RelayFrame(Kind.NODES, body=pack_nodes(frozenset(grid.get_node_ids()))))
            case Kind.BODY:
                bodies[asked.number] = asked.body
            case Kind.PUSH:
                inbox.close()
                inbox = Inbox(post, _push(grid, bodies, ttl_s=asked.number / 1000))
                bodies = {}
                send(core, RelayFrame(Kind.DONE))
            case Kind.PULL:
                for node_id, reply in inbox.arrived(last=asked.number > 0):
                    kind, body = (Kind.REPLY, reply) if isinstance(reply, bytes) else (Kind.PROBLEM, reply.encode())
                    send(core, RelayFrame(kind, node_id, body))
                send(core, RelayFrame(Kind.DONE))
            case Kind.END:
                return asked.number
            case _:
                raise InvalidInput(
                    "question of the core", value=asked.kind, remedy="install one version for core and ServerApp"
                )


def _push(grid: Grid, bodies: dict[int, bytes], *, ttl_s: float) -> dict[str, int]:
    """Send the bodies; the node of each message that went out."""
    messages = [
        Message(content=to_record(body), dst_node_id=node_id, message_type=MESSAGE_TYPE, ttl=ttl_s)
        for node_id, body in bodies.items()
    ]
    return {sent: node for sent, node in zip(grid.push_messages(messages), bodies, strict=True) if sent}


def _core(folder: Path) -> socket.socket:
    until = time.monotonic() + CORE_PATIENCE_S
    while True:
        try:
            return connect(folder)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
