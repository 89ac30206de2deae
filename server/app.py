"""The Flower ServerApp: a thin loop of push and pull around the Flower-free core.

It reads one thing from its run configuration, the study's directory. A second run on the same study is refused by the
study's lock; a run after a crash goes on from the ledger.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from common.errors import InvalidInput
from common.wire import MESSAGE_TYPE, pack, unpack
from server.aggregation.aggregator import Reply
from server.aggregation.pipeline import run_study
from server.study.workspace import Workspace

POLL_S = 0.3
TTL_MARGIN_S = 30.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the study whose directory stands in the run configuration."""
    workspace = str(context.run_config["workspace"])
    if not workspace:
        raise InvalidInput("run configuration 'workspace'", value="", limit="the study's directory")
    run_study(Workspace(Path(workspace)), GridTransport(grid), run=str(context.run_id))


class GridTransport:
    """The core's transport over Flower's Grid: pushes once, polls until every reply is in or the time is up."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def online(self) -> frozenset[int]:
        return frozenset(self._grid.get_node_ids())

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        messages = [
            Message(
                content=pack(body),
                dst_node_id=node_id,
                message_type=MESSAGE_TYPE,
                ttl=timeout_s + TTL_MARGIN_S,
            )
            for node_id, body in bodies.items()
        ]
        nodes = dict(zip(self._grid.push_messages(messages), bodies, strict=True))
        until = time.monotonic() + timeout_s
        while nodes and time.monotonic() < until:
            for message in self._grid.pull_messages(list(nodes)):
                node_id = nodes.pop(message.metadata.reply_to_message_id, None)
                if node_id is not None:
                    yield _reply(node_id, message)
            if nodes:
                time.sleep(POLL_S)
        for node_id in nodes.values():
            yield Reply(node_id=node_id, body=None, problem="deadline")


def _reply(node_id: int, message: Message) -> Reply:
    if message.has_error():
        return Reply(node_id=node_id, body=None, problem=f"flower-{message.error.code}")
    try:
        return Reply(node_id=node_id, body=unpack(message))
    except InvalidInput:
        return Reply(node_id=node_id, body=None, problem="malformed")
