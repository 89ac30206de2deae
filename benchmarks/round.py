"""Measures a round of four real sites beside plain Flower's, and the processor time of idle daemons.

Plain Flower is its own SuperLink and four SuperNodes with default settings, without TLS, and an app that sends every
node a byte and gets it back. Its programs poll as often as ours: for a node's task five times a second, for replies
every 0.3 s. The same app over our own daemons, whose workers refuse it, shows which part of our round is Flower's.
Linux only.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from benchmarks.run import RATIO, Figure, figure, process_cpu_s, ratios
from client.app import POLL_S as TASK_POLL_S
from common.config import CollectionConfig
from common.engine import flower_env
from common.events import read_events
from common.pki import create_authority, issue_server_certificate
from common.process import Daemon, DaemonSpec, ProcessGroup, executable
from common.sockets import accepts, free_ports
from server.aggregation.core import POLL_S as REPLY_POLL_S
from server.operations.daemons import HOST, FlowerServer, run_status, submit
from server.operations.supervisor import flower_server, request_stop, start_run
from server.study.workspace import Workspace
from tests.e2e.daemons import running
from tests.e2e.road import build
from tests.worlds import make_privacy

SITES, TURNS, ROUNDS = 4, 2, 4
IDLE_S = 25.0
PATIENCE_S = 1200.0
APP = {
    "pyproject.toml": """
[project]
name = "nothing"
version = "1.0.0"
description = "does nothing"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "benchmark"
fab-include = ["*.py"]
[tool.flwr.app.components]
serverapp = "serverapp:app"
clientapp = "clientapp:app"
[tool.flwr.app.config]
out = "{out}"
nodes = {nodes}
rounds = {rounds}
poll = {poll}
""",
    "clientapp.py": """
from flwr.app import Message
from flwr.clientapp import ClientApp
app = ClientApp()
@app.query("nothing")
def nothing(message, context):
    return Message(message.content, reply_to=message)
""",
    "serverapp.py": """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    config = context.run_config
    while len(nodes := list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.1)
    ends = []
    for _ in range(config["rounds"]):
        content = RecordDict({"nothing": ConfigRecord({"body": b"x"})})
        waiting = set(grid.push_messages([Message(content=content, dst_node_id=node, message_type="query.nothing",
            ttl=120.0) for node in nodes]))
        while waiting:
            for reply in grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
            if waiting:
                time.sleep(config["poll"])
        ends.append(time.time())
    out = Path(config["out"])
    out.with_suffix(".part").write_text(json.dumps(ends))
    out.with_suffix(".part").rename(out)
""",
}


def figures() -> Iterator[Figure]:
    """Yield the load of idle daemons, then rounds of our study, of plain Flower and of the empty app, in turn."""
    with tempfile.TemporaryDirectory(prefix="round-") as folder:
        root = Path(folder)
        app, ends = _app(root / "app", root / "ends"), root / "ends"
        planned = make_privacy(planned_queries=TURNS * (ROUNDS + 2), quorum=SITES)
        workspace, sites = build(
            root, [f"site-{k}" for k in range(SITES)], collection=CollectionConfig(batch_size=1), privacy=planned
        )
        with running(workspace, sites) as federation, _bare(root / "bare") as bare:
            yield from _idle(federation.group.daemons)
            ways: dict[str, Callable[[], list[float]]] = {
                "ours": lambda: run_for(workspace, ROUNDS),
                "bare": lambda: _empty(bare, app, ends),
                "empty": lambda: _empty(flower_server(workspace), app, ends),
            }
            rounds: dict[str, list[list[float]]] = {name: [] for name in ways}
            for _ in range(TURNS):
                for name, way in ways.items():
                    rounds[name].append(way())
    middle = {name: [statistics.median(each) for each in turns] for name, turns in rounds.items()}
    yield figure("a round beside bare Flower's", ratios(middle["ours"], middle["bare"]), RATIO, aim="≤ 1.05 ×")
    yield figure("a round beside an empty app's over our daemons", ratios(middle["ours"], middle["empty"]), RATIO)
    for name, words in (("ours", "a round"), ("bare", "bare Flower's round"), ("empty", "the empty app's round")):
        yield figure(words, [one for turn in rounds[name] for one in turn], "s")


def _idle(daemons: tuple[Daemon, ...]) -> Iterator[Figure]:
    """Yield each kind of daemon's share of a core while no run is active."""
    before = {daemon: cpu_s(daemon) for daemon in daemons}
    time.sleep(IDLE_S)
    took: dict[str, list[float]] = {}
    for daemon in daemons:
        took.setdefault(daemon.spec.role, []).append(100 * (cpu_s(daemon) - before[daemon]) / IDLE_S)
    for role, shares in took.items():
        yield figure(f"idle: {role}", shares, "% of a core")


def cpu_s(daemon: Daemon) -> float:
    """Return the processor seconds so far of a daemon and its child processes."""
    return sum(map(process_cpu_s, daemon.members()))


def run_for(workspace: Workspace, rounds: int, *, meanwhile: Callable[[int], None] = lambda _: None) -> list[float]:
    """Run a study until it has made this many releases, stop it, and return the seconds between releases.

    Args:
        workspace: The study.
        rounds: Number of releases.
        meanwhile: Called after the run was submitted, with the number of releases before it.
    """
    before = len(releases(workspace))
    start_run(workspace)
    meanwhile(before)
    until(lambda: len(releases(workspace)) >= before + rounds)
    request_stop(workspace)
    until(lambda: not workspace.busy())
    return _between(releases(workspace)[before : before + rounds])


def releases(workspace: Workspace) -> list[float]:
    """Return the times of all releases so far."""
    events = read_events(workspace.events_file) if workspace.events_file.exists() else iter(())
    return [datetime.fromisoformat(event["time"]).timestamp() for event in events if event["event"] == "released"]


def _empty(server: FlowerServer, app: Path, out: Path) -> list[float]:
    """Return the seconds between rounds of the app that does nothing."""
    out.unlink(missing_ok=True)
    run = submit(server, app)
    until(out.exists)
    until(lambda: run_status(server, run).finished)
    return _between(json.loads(out.read_text()))


def _between(ends: Sequence[float]) -> list[float]:
    return [one - other for one, other in zip(ends[1:], ends, strict=False)]


@contextmanager
def _bare(folder: Path) -> Iterator[FlowerServer]:
    """Run Flower's own SuperLink and SuperNodes, without any of our code."""
    port, *others = free_ports(SITES + 1)
    identity = issue_server_certificate(create_authority(folder / "ca"), folder / "tls", names=[HOST])  # not used
    server = FlowerServer(folder=folder / "flower", client=folder / "client", port=port, identity=identity)
    environment = flower_env(server.home) | {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(TASK_POLL_S)}

    def program(role: str, name: str, number: int, *arguments: str) -> DaemonSpec:
        return DaemonSpec(
            role=f"bare-{role}",
            name=name,
            argv=(executable(f"flower-{role}"), "--insecure", "--host", HOST, "--port", str(number), *arguments),
            env=environment,
            cwd=folder,
            log=folder / f"{name}.log",
            ready=lambda: accepts(HOST, number),
        )

    for needed in (server.home, server.client):
        needed.mkdir(parents=True)
    connection = (
        f'[superlink]\ndefault = "consilium"\n\n[superlink.consilium]\naddress = "{server.address}"\ninsecure = true\n'
    )
    (server.client / "config.toml").write_text(connection)
    with ProcessGroup() as group:
        group.start(program("superlink", "superlink", port))
        nodes = [
            program("supernode", f"bare-{number}", other, "--superlink", server.address)
            for number, other in enumerate(others)
        ]
        group.start_all(nodes)
        yield server


def _app(folder: Path, out: Path) -> Path:
    folder.mkdir()
    config = APP["pyproject.toml"].format(out=out, nodes=SITES, rounds=ROUNDS, poll=REPLY_POLL_S)
    for name, text in (APP | {"pyproject.toml": config}).items():
        (folder / name).write_text(text)
    return folder


def until(done: Callable[[], bool]) -> None:
    """Wait until ``done`` returns True; end the benchmark after :data:`PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise SystemExit("the round did not end")
        time.sleep(0.1)
