"""Attack: somebody controls the gateway, with its process, its files and its socket to SuperLink.

| attack | defence |
|---|---|
| it submits an app that reads the keys or the ledger | the socket leads to SuperLink's ten fleet routes only |
| it knows SuperLink's address and CA, and shares its network | SuperLink listens on loopback and requires a secret |
| it reads files beside its own | it runs in a folder of sockets, and gets paths of public files only |
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import httpx
import pytest

from common.process import ProcessGroup
from common.sockets import free_ports
from server.operations import fleet, provision
from server.operations.daemons import FlowerServer, superexec, superlink
from server.operations.supervisor import fleet_daemon, flower_server, gateway_daemon
from server.study.workspace import Endpoint, Workspace
from tests.attacks.thief import Attacker, described_routes
from tests.studies import served_study

PROTOBUF = {"content-type": "application/protobuf", "accept": "application/protobuf"}


@dataclass(frozen=True)
class Stolen:
    """Holds a real SuperLink, SuperExec and fleet proxy, and the gateway's socket to them."""

    workspace: Workspace
    server: FlowerServer
    socket: Path

    def ask(self, path: str, *, method: str = "POST", body: bytes = b"") -> httpx.Response:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket)), base_url="http://superlink") as client:
            return client.request(method, path, content=body, headers=PROTOBUF)


@pytest.fixture(scope="module")
def stolen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stolen]:
    workspace = served_study(tmp_path_factory.mktemp("g") / "study", endpoint=Endpoint("localhost", *free_ports(2)))
    server = flower_server(workspace)
    with ProcessGroup() as group:
        group.start_all([superlink(server), fleet_daemon(workspace)])
        group.start(superexec(server, relay=workspace.relay_dir))
        yield Stolen(workspace, server, workspace.fleet_dir / "fleet.sock")


@pytest.mark.slow
def test_of_superlink_a_stolen_gateway_reaches_the_ten_fleet_routes(stolen: Stolen) -> None:
    routes = described_routes(stolen.server)
    assert {"/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/register-node"} <= set(routes)
    more = ("/docs", "/openapi.json", "/health", "/", "/v1/fleet/../control/start-run", "/v1/fleet/%2e%2e/control/list")
    more += ("//v1/control/start-run", "/v1/fleet/pull-messages/../../control/list-nodes", "/v1/fleet/get-run?x=1")
    reached = set()
    for path in (*routes, *more):
        for method in ("POST", "GET", "PUT"):
            answer = stolen.ask(path, method=method)
            if answer.status_code not in (404, 405):
                reached.add((method, path))
    assert reached == {("POST", path) for path in fleet.PATHS}
    assert stolen.ask("/v1/control/start-run").text in ("Not Found", "no such path\n")


@pytest.mark.slow
def test_with_address_and_authority_a_stolen_gateway_submits_nothing(stolen: Stolen, tmp_path: Path) -> None:
    """The gateway lacks the secret, even on SuperLink's loopback network."""
    out = tmp_path / "stolen"
    said = Attacker.make(stolen.server, tmp_path / "attacker").submit(stolen.workspace.root, out)
    assert "Authentication failed" in said
    time.sleep(3)
    assert not out.exists()


@pytest.mark.slow
def test_superlink_listens_on_loopback_alone(stolen: Stolen) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; says which address of this machine others see
        if (own := probe.getsockname()[0]) != "127.0.0.1":
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((own, stolen.server.port), timeout=2)
    socket.create_connection(("127.0.0.1", stolen.server.port), timeout=2).close()


@pytest.mark.slow
def test_a_body_over_its_routes_limit_ends_at_the_fleet_routes(stolen: Stolen) -> None:
    assert stolen.ask("/v1/fleet/get-run", body=bytes(fleet.DEFAULT_MAX_BODY_BYTES + 1)).status_code == 413


def test_the_gateway_is_told_of_no_key_but_its_own_and_of_no_address(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path / "study")
    provision.set_up_server(workspace, Endpoint(host="localhost", port=8443, internal_port=8000))
    spec = gateway_daemon(workspace, bind="127.0.0.1")
    given = {name: value for name, value in pairwise(spec.argv) if name.startswith("--")}
    assert {name for name, value in given.items() if workspace.root.name in value} == {
        *("--objects", "--nodes", "--certificate", "--key")
    }
    assert all(Path(given[name]).parent == workspace.gateway_dir for name in ("--nodes", "--certificate", "--key"))
    assert "8000" not in " ".join(spec.argv)
    assert spec.cwd == workspace.fleet_dir


@pytest.mark.parametrize("length", [None, fleet.DEFAULT_MAX_BODY_BYTES + 1])
def test_a_body_over_the_limit_is_not_passed_on_whatever_length_it_announces(length: int | None) -> None:
    reached = []

    async def count(request: httpx.Request) -> httpx.Response:
        reached.append(await request.aread())
        return httpx.Response(200)

    async def ask() -> int:
        upstream = httpx.AsyncClient(base_url="https://superlink", transport=httpx.MockTransport(count))
        transport = httpx.ASGITransport(app=fleet.fleet_app(upstream))

        async def chunks():
            for _ in range(3):
                yield bytes(fleet.DEFAULT_MAX_BODY_BYTES // 2)

        async with upstream, httpx.AsyncClient(transport=transport, base_url="http://superlink") as client:
            headers = {} if length is None else {"content-length": str(length)}
            return (await client.post("/v1/fleet/get-run", content=chunks(), headers=headers)).status_code

    assert asyncio.run(ask()) == 413
    assert reached == []
