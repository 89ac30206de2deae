"""The Flower ServerApp: relays the core's messages to the sites and the sites' replies to the core.

The *core* is the daemon that alone holds the study's keys and ledger. Flower's SuperExec starts a ServerApp for each
run and names the folder of the core's socket in an environment variable. The ServerApp holds no key, opens no ledger
and ignores the run's configuration. It ends when the core ends, and when the ServerApp ends the core's run ends too.
Each site's reply is read separately (:mod:`server.aggregation.inbox`), so a reply that is unreadable or incomplete
delays no other site. Everything that the core asks of the ServerApp has a kind
(:class:`~server.aggregation.relay.FrameKind`); an unknown kind is refused.
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
from server.aggregation.inbox import Inbox, SuperLinkCalls, superlink_calls
from server.aggregation.relay import (
    FOLDER,
    SAME_VERSION,
    FrameKind,
    RelayFrame,
    connect,
    lifeline,
    pack_nodes,
    receive,
    send,
)

CORE_PATIENCE_S = 60.0
"""Seconds to wait for the core's socket, because the core is possibly restarting."""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Relay between the core and Flower's Grid until the core ends the run.

    Args:
        grid: Flower's Grid, which pushes messages to nodes and pulls their replies.
        context: Flower's context; only its run id is used.

    Raises:
        RuntimeError: If the core ended the run with an error, so that Flower records the run as failed.
    """
    with _core(Path(os.environ[FOLDER])) as core, lifeline(core):
        send(core, RelayFrame(FrameKind.RUN, context.run_id))
        try:
            status = relay(core, grid, superlink_calls(grid))
        except Exception:  # Flower keeps no log of a ServerApp, so the core logs the error
            with contextlib.suppress(OSError):
                send(core, RelayFrame(FrameKind.FAILED, body=traceback.format_exc()[-4_000:].encode()))
            raise
    if status:
        raise RuntimeError("the run failed; the study's event log states the reason")


def relay(core: socket.socket, grid: Grid, post: SuperLinkCalls) -> int:
    """Answer the core's questions over Flower's Grid until the core ends the run.

    Args:
        core: Connected socket to the core.
        grid: Flower's Grid.
        post: SuperLink's runtime interface, from which replies are fetched.

    Returns:
        The run's exit status as the core reports it; 0 is success.

    Raises:
        InvalidInput: If the core asks for something of an unknown kind.
    """
    bodies: dict[int, bytes] = {}
    inbox = Inbox(post, {})
    while True:
        asked = receive(core)
        match asked.kind:
            case FrameKind.ONLINE:
                send(core, RelayFrame(FrameKind.NODES, body=pack_nodes(frozenset(grid.get_node_ids()))))
            case FrameKind.BODY:
                bodies[asked.number] = asked.body
            case FrameKind.PUSH:
                inbox.close()
                inbox = Inbox(post, _push(grid, bodies, ttl_s=asked.number / 1000))
                bodies = {}
                send(core, RelayFrame(FrameKind.DONE))
            case FrameKind.PULL:
                for node_id, reply in inbox.arrived(last=asked.number > 0):
                    kind, body = (
                        (FrameKind.REPLY, reply) if isinstance(reply, bytes) else (FrameKind.PROBLEM, reply.encode())
                    )
                    send(core, RelayFrame(kind, node_id, body))
                send(core, RelayFrame(FrameKind.DONE))
            case FrameKind.END:
                return asked.number
            case _:
                raise InvalidInput(
                    "kind of what the core asks of the ServerApp",
                    value=asked.kind,
                    limit="ONLINE, BODY, PUSH, PULL, END",
                    remedy=SAME_VERSION,
                )


def _push(grid: Grid, bodies: dict[int, bytes], *, ttl_s: float) -> dict[str, int]:
    """Send each body to its node; return a dict from the id of each message that Flower accepted to its node's id."""
    messages = [
        Message(content=to_record(body), dst_node_id=node_id, message_type=MESSAGE_TYPE, ttl=ttl_s)
        for node_id, body in bodies.items()
    ]
    return {sent: node for sent, node in zip(grid.push_messages(messages), bodies, strict=True) if sent}


def _core(folder: Path) -> socket.socket:
    """Connect to the core's socket, trying again for up to :data:`CORE_PATIENCE_S`."""
    until = time.monotonic() + CORE_PATIENCE_S
    while True:
        try:
            return connect(folder)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)
