"""Tests real Flower daemons on loopback with TLS and node keys, run as the demo and the server run them."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import pytest

from client.operations.daemons import SiteNode, expect_refused, launcher, supernode
from common.errors import DaemonFailed
from common.pki import create_authority, create_node_keys, issue_server_certificate
from common.process import Daemon, ProcessGroup, executable
from common.sockets import free_ports
from common.worker_api import HANDLE, SERVICE
from server.operations.daemons import (
    FlowerServer,
    RunStatus,
    list_nodes,
    prepare,
    register_node,
    run_status,
    stop_run,
    submit,
    superexec,
    superlink,
    unregister_node,
)
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts processes in /proc")

FOREIGN = {
    "pyproject.toml": """
[project]
name = "foreign"
version = "1.0.0"
description = "not ours"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "test"
fab-include = ["server/**/*.py", "client/**/*.py", "common/**/*.py"]
[tool.flwr.app.components]
serverapp = "server.app:app"
clientapp = "client.app:app"
[tool.flwr.app.config]
out = {out}
nodes = {nodes}
""",
    "common/__init__.py": "",
    "server/__init__.py": "",
    "client/__init__.py": "",
    "client/app.py": """
from pathlib import Path
here = Path(os.environ["FLWR_HOME"])
(here / "foreign-code-ran").touch()
from flwr.clientapp import ClientApp
app = ClientApp()
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
    waiting = {}
    for kind, name in (("query.consilium", "consilium"), ("train", "consilium"), ("query.other", "weights")):
        sent = grid.push_messages([Message(content=RecordDict({name: ConfigRecord({"body": b"asked"})}),
            dst_node_id=node, message_type=kind, ttl=120.0) for node in nodes])
        waiting |= {message: (node, name) for message, node in zip(sent, nodes)}
    facts = []
    while waiting:
        for message in grid.pull_messages(list(waiting)):
            node, name = waiting.pop(message.metadata.reply_to_message_id)
            facts.append((str(node), name, message.error.reason if message.has_error()
                          else message.content["consilium"]["body"].decode()))
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
    sockets: Path

    def node(self, site: str, number: int) -> SiteNode:
        return SiteNode(
            site=site,
            folder=self.root / site,
            superlink=self.server.address,
            root_certificates=self.server.identity.authority,
            keys=create_node_keys(self.root / site / "keys"),
            socket=self.sockets / f"{site}.sock",
            port=self.ports[number],
        )


def start(group: ProcessGroup, root: Path) -> Federation:
    identity = issue_server_certificate(create_authority(root / "ca"), root / "tls", names=["127.0.0.1"])
    port, *others = free_ports(6)
    server = FlowerServer(folder=root / "flower", client=root / "client", port=port, identity=identity)
    prepare(server)
    group.start(superlink(server))
    return Federation(group, server, root, tuple(others), Path(tempfile.mkdtemp(prefix="c-")))


def foreign_app(folder: Path, *, out: Path, nodes: int) -> Path:
    for name, text in FOREIGN.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    table = (folder / "pyproject.toml").read_text(encoding="utf-8")
    table = table.replace("{out}", json.dumps(str(out))).replace("{nodes}", str(nodes))
    (folder / "pyproject.toml").write_text(table, encoding="utf-8")
    return folder


def finished(group: ProcessGroup, server: FlowerServer, run: int, *, timeout_s: float = 600.0) -> RunStatus:
    """Wait until a run has ended, and return how it ended."""

    def ended() -> RunStatus | None:
        group.check()
        status = run_status(server, run)
        return status if status.finished else None

    return until(ended, "the run's end", timeout_s=timeout_s, pause_s=1.0)


def all_pids(daemons: tuple[Daemon, ...]) -> set[int]:
    return set().union(*(daemon.members() for daemon in daemons))


@pytest.mark.slow
def test_a_registered_node_is_admitted_and_a_stranger_refused(tmp_path: Path) -> None:
    with ProcessGroup() as group:
        federation = start(group, tmp_path)
        refusal = expect_refused(group, federation.node("stranger", 0))
        assert refusal.startswith("[code: 2004]")
        assert "Failed to activate SuperNode" in refusal

        site = federation.node("A", 1)
        node_id = register_node(federation.server, site.keys.public, name="A")
        group.start(supernode(site))
        assert [(node.node_id, node.status) for node in list_nodes(federation.server)] == [(node_id, "online")]
        pids = all_pids(group.daemons)
    assert len(pids) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a running SuperLink to which every test admits nodes of its own."""
    with ProcessGroup() as group:
        yield start(group, tmp_path_factory.mktemp("shared"))


@pytest.mark.slow
def test_a_key_is_good_for_one_node_until_it_is_withdrawn(federation: Federation) -> None:
    group, server = federation.group, federation.server
    site = federation.node("A", 1)
    node_id = register_node(server, site.keys.public, name="A")
    daemon = group.start(supernode(site))
    assert "[code: 2004]" in expect_refused(group, federation.node("A", 2))
    group.stop(daemon)
    with pytest.raises(DaemonFailed, match="admitted the node 'A'"):
        expect_refused(group, site)  # so the check itself can fail

    unregister_node(server, node_id)
    assert "[code: 2004]" in expect_refused(group, site)


@pytest.mark.slow
def test_keys_that_superlink_knows_already_keep_the_nodes_they_have_unless_they_were_withdrawn(
    federation: Federation, tmp_path: Path
) -> None:
    server = federation.server
    keys = {name: create_node_keys(tmp_path / name).public for name in ("B", "C")}
    # An interrupted command may end here.
    given = {name: register_node(server, key, name=name) for name, key in keys.items()}
    assert {name: register_node(server, key, name=name) for name, key in keys.items()} == given
    unregister_node(server, given["B"])
    with pytest.raises(DaemonFailed, match="already in use"):
        register_node(server, keys["B"], name="B")
    assert register_node(server, keys["C"], name="C") == given["C"]


@pytest.mark.slow
def test_a_node_that_trusts_another_authority_never_gets_through(federation: Federation, tmp_path: Path) -> None:
    right = federation.node("D", 3)
    node_id = register_node(federation.server, right.keys.public, name="D")
    wrong = replace(right, root_certificates=create_authority(tmp_path / "other").certificate)
    with pytest.raises(DaemonFailed, match=r"without an answer|neither admitted"):
        expect_refused(federation.group, wrong, timeout_s=600)
    assert [node.status for node in list_nodes(federation.server) if node.node_id == node_id] == ["registered"]


@contextlib.contextmanager
def echo_worker(node: SiteNode) -> Iterator[list[bytes]]:
    """Run a worker that answers each message with its site's name; yield the messages that it received."""
    asked: list[bytes] = []

    def handle(body: bytes, _context: object) -> bytes:
        asked.append(body)
        return f"{node.site} {body.decode()}".encode()

    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {HANDLE.rsplit("/", 1)[1]: grpc.unary_unary_rpc_method_handler(handle)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"unix:{node.socket}")
    server.start()
    yield asked
    server.stop(None).wait()


@pytest.mark.slow
def test_a_foreign_bundle_meets_the_worker_s_policy_and_none_of_its_code_runs(tmp_path: Path) -> None:
    with ProcessGroup() as group, contextlib.ExitStack() as workers:
        federation = start(group, tmp_path)
        server = federation.server
        group.start(superexec(server, relay=server.folder))
        sites = [federation.node(name, number) for number, name in enumerate(("A", "B"))]
        ids = {str(register_node(server, site.keys.public, name=site.site)): site.site for site in sites}
        asked = [workers.enter_context(echo_worker(site)) for site in sites]
        group.start_all([*map(supernode, sites), *map(launcher, sites)])
        out = tmp_path / 'out "1".json'
        run = submit(server, foreign_app(tmp_path / "app", out=out, nodes=2))
        status = finished(group, server, run)
        assert (status.status, status.outcome) == ("finished", "completed")
        facts = json.loads(out.read_text())
        # Bodies of messages of every type go to the worker; a message without a body gets an empty answer.
        assert sorted(map(tuple, facts)) == sorted(
            (node, name, answer)
            for node, site in ids.items()
            for name, answer in (("consilium", f"{site} asked"), ("consilium", f"{site} asked"), ("weights", ""))
        )
        assert asked == [[b"asked", b"asked"]] * 2
        assert not list(tmp_path.rglob("foreign-code-ran"))
        for site in sites:
            assert not (site.folder / "flower" / "apps").exists(), "a bundle was unpacked at a site"
        assert not list(tmp_path.rglob("runtime-envs")), "dependencies were installed"
        for log in tmp_path.rglob("*.log"):
            assert "PRIVATE KEY" not in log.read_text(errors="replace")

        endless = submit(server, foreign_app(tmp_path / "app", out=out, nodes=99))
        while run_status(server, endless).status != "running":
            time.sleep(0.2)
        stop_run(server, endless)
        assert finished(group, server, endless).outcome == "stopped"
        assert len({daemon.pid for daemon in group.daemons}) == 6


@pytest.mark.slow
def test_nobody_without_the_node_s_secret_is_handed_its_messages(tmp_path: Path) -> None:
    """A stock SuperExec on the same machine, which would run the bundle, is refused."""
    with ProcessGroup() as group:
        federation = start(group, tmp_path)
        server = federation.server
        group.start(superexec(server, relay=server.folder))
        site = federation.node("A", 0)
        register_node(server, site.keys.public, name="A")
        node = supernode(site)
        group.start(node)
        argv = (executable("flower-superexec"), "--runtime-api-address", f"127.0.0.1:{site.port}", "--insecure")
        log = tmp_path / "intruder.log"
        intruder = group.begin(replace(node, role="intruder", argv=argv, log=log, ready=None))
        submit(server, foreign_app(tmp_path / "app", out=tmp_path / "out", nodes=1))
        while "Receiving" not in site.log.read_text():
            time.sleep(0.2)
        assert intruder.wait(600) is not None, log.read_text()
        assert not list(tmp_path.rglob("foreign-code-ran"))
