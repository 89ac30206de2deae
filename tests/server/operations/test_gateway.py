"""Tests the gateway before a SuperLink that counts requests: only signed fleet traffic within its limits arrives."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from common.node_auth import FLOWER_KEY, FLOWER_SIGNATURE, FLOWER_TIME, AdmittedNode, signed_headers, write_admitted
from common.objects import ObjectStore
from common.pki import create_node_keys, load_node_key, read_node_public_key
from server.operations.fleet import DEFAULT_MAX_BODY_BYTES, MAX_BODY_BYTES, ROUTES
from server.operations.gateway import GatewayFiles, gateway_app

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


@dataclass
class Gateway:
    """Holds a gateway in this process, and asks it as a site would."""

    root: Path
    reached: list[httpx.Request] = field(default_factory=list)
    superlink_up: bool = True
    status: int = 200

    def __post_init__(self) -> None:
        self.store = ObjectStore(self.root / "objects")
        keys = create_node_keys(self.root / "north")
        self.key = load_node_key(keys.private)
        nodes = self.root / "nodes.json"
        write_admitted(nodes, (AdmittedNode(site="north", key=read_node_public_key(keys.public)),))
        self.files = GatewayFiles(objects=self.root / "objects", nodes=nodes, certificate=nodes, key=nodes)

    def _superlink(self, request: httpx.Request) -> httpx.Response:
        if not self.superlink_up:
            raise httpx.ConnectError("refused")
        self.reached.append(request)
        return httpx.Response(self.status, content=b"answer to " + request.content, headers={"x-internal": "secret"})

    def ask(
        self,
        method: str,
        path: str,
        *,
        signed: bool = True,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
        ago_s: float = 0.0,
    ) -> httpx.Response:
        sent = dict(headers or {})
        if signed:
            sent |= signed_headers(self.key, method=method, path=path, now=NOW - timedelta(seconds=ago_s))

        async def one() -> httpx.Response:
            upstream = httpx.AsyncClient(base_url="https://superlink", transport=httpx.MockTransport(self._superlink))
            app = gateway_app(self.files, upstream=upstream, hosts=lambda: ("gateway",), clock=lambda: NOW)
            transport = httpx.ASGITransport(app=app)
            async with upstream, httpx.AsyncClient(transport=transport, base_url="https://gateway") as http:
                return await http.request(method, path, headers=sent, content=body)

        return asyncio.run(one())


@pytest.fixture
def gateway(tmp_path: Path) -> Gateway:
    return Gateway(tmp_path)


# Tests/attacks has push-messages, which the gateway reads.
@pytest.mark.parametrize("route", sorted(set(ROUTES) - {"push-messages"}))
def test_fleet_traffic_passes_unchanged(gateway: Gateway, route: str) -> None:
    body = b"\x1a\x08protobuf"  # a field that names no sender
    reply = gateway.ask("POST", f"/v1/fleet/{route}", body=body, headers={"content-type": "application/x-p"})
    assert (reply.status_code, reply.content) == (200, b"answer to " + body)
    assert "x-internal" not in reply.headers
    (request,) = gateway.reached
    assert request.url == f"https://superlink/v1/fleet/{route}"
    assert request.headers["content-type"] == "application/x-p"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/control/start-run"),
        ("POST", "/v1/control/list-nodes"),
        ("POST", "/v1/runtime/acquire-task"),
        ("POST", "/v1/fleet/register-node"),
        ("POST", "/v1/fleet/unregister-node"),
        ("POST", "/v1/fleet/../control/start-run"),
        ("POST", "/v1/fleet/%2e%2e/control/start-run"),
        ("POST", "/v1//control/start-run"),
        ("GET", "/v1/fleet/get-run"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
        ("GET", "/health"),
        ("GET", "/"),
        ("GET", "/public/../nodes.json"),
        ("GET", "/public/..%2fnodes.json"),
        ("GET", "/nodes.json"),
    ],
)
def test_nothing_else_exists_even_for_an_admitted_site(gateway: Gateway, method: str, path: str) -> None:
    assert gateway.ask(method, path).status_code in (401, 404, 405)
    assert gateway.reached == []


@pytest.mark.parametrize("path", ["/v1/fleet/pull-messages", "/v1/control/start-run", "/public/" + "0" * 64, "/"])
def test_a_stranger_who_does_not_sign_learns_nothing(gateway: Gateway, path: str) -> None:
    reply = gateway.ask("POST", path, signed=False, body=b"x")
    assert (reply.status_code, reply.text) == (401, "unsigned\n")
    assert gateway.reached == []


def test_a_node_that_is_not_admitted_gets_flower_s_own_error(gateway: Gateway) -> None:
    reply = gateway.ask("POST", "/v1/fleet/activate-node", signed=False)
    assert reply.status_code == 412
    assert reply.json() == {"code": 2004, "detail": "refused: unsigned"}


def test_a_request_with_a_key_of_an_unknown_kind_is_answered_as_one_without(gateway: Gateway) -> None:
    """For an unknown algorithm the library raises an error that is no ValueError; the reply must not become a 500."""
    unknown = b64encode(bytes.fromhex("300b300506032a030403020000")).decode()  # a key of the algorithm 1.2.3.4
    pem = f"-----BEGIN PUBLIC KEY-----\n{unknown}\n-----END PUBLIC KEY-----\n"
    claimed = {FLOWER_KEY: b64encode(pem.encode()).decode(), FLOWER_TIME: "now", FLOWER_SIGNATURE: "AAAA"}
    reply = gateway.ask("POST", "/v1/fleet/activate-node", signed=False, headers=claimed)
    assert (reply.status_code, reply.json()) == (412, {"code": 2004, "detail": "refused: unsigned"})


@pytest.mark.parametrize("route", ["pull-messages", "push-object"])
def test_a_body_over_the_limit_never_reaches_superlink_and_the_log_says_so(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, route: str
) -> None:
    path = f"/v1/fleet/{route}"
    limit = MAX_BODY_BYTES.get(path, DEFAULT_MAX_BODY_BYTES)
    assert gateway.ask("POST", path, headers={"content-length": str(limit + 1)}, body=b"x").status_code == 413

    async def chunks():
        for _ in range(0, limit + 1, 1 << 20):
            yield b"x" * (1 << 20)
        yield b"x"

    assert gateway.ask("POST", path, body=chunks()).status_code == 413  # no length announced
    assert gateway.reached == []
    assert caplog.text.count(f"event=refused reason=too-large path={path} peer=127.0.0.1 more=0") == 2


def test_a_name_that_is_not_the_server_s_is_refused_and_the_log_says_so(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    path = "/v1/fleet/pull-messages"
    reply = gateway.ask("POST", path, headers={"host": "elsewhere"})
    assert (reply.status_code, reply.text) == (421, "unknown host\n")
    assert gateway.reached == []
    assert f"event=refused reason=unknown-host path={path} peer=127.0.0.1 more=0" in caplog.text


def test_a_server_that_restarts_asks_sites_to_try_again(gateway: Gateway) -> None:
    gateway.superlink_up = False
    assert gateway.ask("POST", "/v1/fleet/pull-messages").status_code == 503


def test_a_site_whose_request_was_signed_before_the_gateway_started_is_asked_to_try_again(gateway: Gateway) -> None:
    answer = gateway.ask("POST", "/v1/fleet/get-run", ago_s=2.0)
    assert (answer.status_code, answer.text, gateway.reached) == (503, "starting\n", [])


@pytest.mark.parametrize(("status", "passed_on"), [(412, 412), (403, 403), (500, 503), (502, 503), (504, 503)])
def test_a_fault_inside_never_ends_a_site_s_heartbeat(gateway: Gateway, status: int, passed_on: int) -> None:
    """The heartbeat of Flower 1.41 survives 502, 503 and 504, but ends on 500, which a busy database can cause."""
    gateway.status = status
    assert gateway.ask("POST", "/v1/fleet/send-node-heartbeat").status_code == passed_on


def test_a_list_of_nodes_that_cannot_be_read_turns_nobody_away_for_good(gateway: Gateway) -> None:
    gateway.files.nodes.write_text("{")
    assert gateway.ask("POST", "/v1/fleet/send-node-heartbeat").status_code == 503
    assert gateway.reached == []


def test_an_object_is_served_whole_or_from_where_a_download_stopped(gateway: Gateway) -> None:
    path = "/public/" + gateway.store.put(b"public bytes")
    whole, rest = gateway.ask("GET", path), gateway.ask("GET", path, headers={"range": "bytes=7-"})
    assert (whole.status_code, whole.content) == (200, b"public bytes")
    assert (rest.status_code, rest.content) == (206, b"bytes")
    assert "immutable" in whole.headers["cache-control"]
    assert gateway.ask("GET", path, headers={"range": "bytes=12-"}).status_code == 416
    assert gateway.ask("DELETE", path).status_code == 405
