"""Real Flower daemons on loopback with TLS and node keys, driven the way the demo and the server drive them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from client.daemons import SiteNode, expect_refused, supernode
from common.errors import DaemonFailed
from common.pki import create_authority, create_node_keys, issue_server_certificate
from common.process import Daemon, ProcessGroup, free_ports
from server.daemons import (
    FlowerServer,
    list_nodes,
    prepare,
    register_node,
    run_status,
    stop_run,
    submit,
    superexec,
    superlink,
    unregister_node,
    wait_for_run,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")

ECHO = {
    "pyproject.toml": """
[project]
name = "echo"
version = "1.0.0"
description = "echo"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "test"
fab-include = ["server/**/*.py", "client/**/*.py", "common/**/*.py"]
[tool.flwr.app.components]
serverapp = "server.app:app"
clientapp = "client.app:app"
[tool.flwr.app.config]
out = ""
nodes = 0
""",
    "common/__init__.py": "",
    "server/__init__.py": "",
    "client/__init__.py": "",
    "client/app.py": """
import json, os, sys
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
import common
app = ClientApp()
@app.query("echo")
def echo(message, context):
    facts = {"site": context.node_config["site"], "node": str(context.node_id), "pid": os.getpid(),
             "common": list(common.__path__)[0], "environment": sorted(os.environ),
             "echo": message.content["q"]["text"]}
    return Message(RecordDict({"r": ConfigRecord({"facts": json.dumps(facts)})}), reply_to=message)
""",
    "server/app.py": """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    while len(nodes := list(grid.get_node_ids())) < context.run_config["nodes"]:
        time.sleep(0.1)
    waiting = set(grid.push_messages([Message(content=RecordDict({"q": ConfigRecord({"text": "\u00fc \\" ok"})}),
        dst_node_id=node, message_type="query.echo", ttl=120.0) for node in nodes]))
    facts = []
    while waiting:
        for message in grid.pull_messages(list(waiting)):
            waiting.discard(message.metadata.reply_to_message_id)
            facts.append({"error": str(message.error)} if message.has_error()
                         else json.loads(message.content["r"]["facts"]))
        time.sleep(0.1)
    out = Path(context.run_config["out"])
    out.with_suffix(".part").write_text(json.dumps(facts))
    out.with_suffix(".part").rename(out)
""",
}


@dataclass(frozen=True)
class Federation:
    group: ProcessGroup
    server: FlowerServer
    root: Path
    ports: tuple[int, ...]

    def node(self, site: str, number: int) -> SiteNode:
        return SiteNode(
            site=site,
            folder=self.root / site,
            superlink=self.server.address,
            root_certificates=self.server.identity.authority,
            keys=create_node_keys(self.root / site / "keys"),
            socket=self.root / site / 'worker "1".sock',
            port=self.ports[number],
        )


def start(group: ProcessGroup, root: Path) -> Federation:
    identity = issue_server_certificate(create_authority(root / "ca"), root / "tls", names=["127.0.0.1"])
    port, *others = free_ports(6)
    server = FlowerServer(folder=root / "flower", port=port, identity=identity)
    prepare(server)
    group.start(superlink(server))
    return Federation(group, server, root, tuple(others))


def echo_app(folder: Path) -> Path:
    for name, text in ECHO.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def all_pids(daemons: tuple[Daemon, ...]) -> set[int]:
    return set().union(*(daemon.members() for daemon in daemons))


def test_a_registered_node_is_admitted_and_a_stranger_refused(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        federation = start(group, tmp_path)
        refusal = expect_refused(group, federation.node("stranger", 0))
        assert (refusal.exit_code, refusal.api_code) == (305, 2004)
        assert "Failed to activate SuperNode" in refusal.line

        site = federation.node("A", 1)
        node_id = register_node(federation.server, site.keys.public, name="A")
        group.start(supernode(site))
        assert [(node.node_id, node.status) for node in list_nodes(federation.server)] == [(node_id, "online")]
        pids = all_pids(group.daemons)
    assert len(pids) >= 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.slow
def test_a_key_is_good_for_one_node_until_it_is_withdrawn(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        federation = start(group, tmp_path)
        site = federation.node("A", 1)
        node_id = register_node(federation.server, site.keys.public, name="A")
        daemon = group.start(supernode(site))
        assert expect_refused(group, federation.node("A", 2)).api_code == 2004
        group.stop(daemon)
        with pytest.raises(DaemonFailed, match="admitted the node 'A'"):
            expect_refused(group, site)  # the check itself can fail

        unregister_node(federation.server, node_id)
        assert expect_refused(group, site).api_code == 2004


@pytest.mark.slow
def test_a_node_that_trusts_another_authority_never_gets_through(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        federation = start(group, tmp_path)
        right = federation.node("A", 1)
        register_node(federation.server, right.keys.public, name="A")
        wrong = replace(right, root_certificates=create_authority(tmp_path / "other").certificate)
        with pytest.raises(DaemonFailed, match=r"without an answer|neither admitted nor refused"):
            expect_refused(group, wrong, timeout_s=20)
        assert [node.status for node in list_nodes(federation.server)] == ["registered"]


@pytest.mark.slow
def test_an_app_reaches_every_site_and_only_their_sockets_are_told(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        federation = start(group, tmp_path)
        server = federation.server
        group.start(superexec(server))
        sites = [federation.node(name, number) for number, name in enumerate(("A", "B"))]
        ids = {str(register_node(server, site.keys.public, name=site.site)): site.site for site in sites}
        group.start_all([supernode(site) for site in sites])
        out = tmp_path / 'out "1".json'
        run = submit(server, echo_app(tmp_path / "app"), {"out": str(out), "nodes": 2})
        status = wait_for_run(server, run, timeout_s=120, watch=group.check, hint=out.exists)
        assert (status.status, status.outcome) == ("finished", "completed")
        facts = json.loads(out.read_text())
        assert {fact["node"]: fact["site"] for fact in facts} == ids
        assert {fact["echo"] for fact in facts} == {'\u00fc " ok'}
        for fact in facts:  # the bundle's code runs, not what is installed beside it
            assert fact["common"].startswith(str(tmp_path / fact["site"] / "flower" / "apps"))
            assert not any("DATA" in name or "TOKEN" in name or "KEY" in name for name in fact["environment"])
        assert not list(tmp_path.rglob("runtime-envs")), "dependencies were installed"
        for log in tmp_path.rglob("*.log"):
            assert "PRIVATE KEY" not in log.read_text(errors="replace")

        endless = submit(server, echo_app(tmp_path / "app"), {"out": str(out), "nodes": 99})
        while run_status(server, endless).status != "running":
            time.sleep(0.2)
        stop_run(server, endless)
        assert wait_for_run(server, endless, timeout_s=60).outcome == "stopped"
        assert len({daemon.pid for daemon in group.daemons}) == 4


CTRL_C = """
import signal, sys, time
from pathlib import Path
sys.path[:0] = [{root!r}, {here!r}]
signal.signal(signal.SIGINT, signal.default_int_handler)
from test_flower_daemons import echo_app, start
from client.daemons import supernode
from common.process import ProcessGroup
from server.daemons import register_node, submit, superexec
folder = Path({where!r})
with ProcessGroup() as group:
    federation = start(group, folder)
    group.start(superexec(federation.server))
    site = federation.node("A", 0)
    register_node(federation.server, site.keys.public, name="A")
    group.start(supernode(site))
    submit(federation.server, echo_app(folder / "app"), {{"out": str(folder / "out"), "nodes": 99}})
    (folder / "submitted").touch()
    time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_flower_process_outlives_its_parent(tmp_path: Path, signum: signal.Signals) -> None:
    root, here = str(Path(__file__).parents[2]), str(Path(__file__).parent)
    code = CTRL_C.format(root=root, here=here, where=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL) as parent:
        deadline = time.monotonic() + 60
        while not (tmp_path / "submitted").exists() or not any("serverapp" in line for line in commands(tmp_path)):
            assert time.monotonic() < deadline, "the federation did not start"
            time.sleep(0.1)
        assert len(commands(tmp_path)) >= 5  # superlink, superexec, supernode, its superexec, the ServerApp
        parent.send_signal(signum)
        parent.wait(30)
    if signum == signal.SIGKILL:  # nobody is left to wait for them: Flower's own shutdown takes its time
        deadline = time.monotonic() + 30
        while commands(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.1)
    assert commands(tmp_path) == []


def commands(folder: Path) -> list[str]:
    """Command lines of living processes whose environment names ``folder``: the kernel's word, not the code's."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            environment = Path("/proc", pid, "environ").read_bytes()
            if str(folder).encode() in environment:
                found.append(Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
