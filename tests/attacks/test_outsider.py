"""Attack: an outsider, who is not admitted, sends mail, reaches the one port, or intercepts a site's messages.

| attack | defence |
|---|---|
| a join request has a path as its name, so that admitting it writes elsewhere | a name with a slash is refused first |
| a join request is exchanged for one with another name, pool or key | its fingerprint covers name, pool and key |
| the operator copies the right fingerprint from a refusal | no refusal prints the right fingerprint |
| a revoked site comes back under another name | a key belongs to one site for ever |
| two checks read a Host header or an escaped path differently | only one spelling and known hosts are accepted |
| idle and slow connections keep admitted sites out | connections of strangers have a limit and deadlines |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from base64 import b64encode
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
import uvicorn
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from typer.testing import CliRunner

from client.policy import load_site
from client.site.books import open_books
from client.site.enrolment import SiteKit
from common.admission import JoinRequest, SignedRequest, read_request
from common.canonical import canonical_bytes
from common.errors import DaemonFailed, InvalidInput
from common.node_auth import AdmittedNode, read_admitted, signed_headers, write_admitted
from common.pki import create_node_keys, load_node_key, read_node_public_key
from common.public_keys import is_fingerprint
from common.sockets import free_port
from consilium.cli.provision import provision_app
from server.operations import listener, provision
from server.operations.exact import CertificateHosts
from server.operations.gateway import GatewayFiles, gateway_app
from server.study.workspace import Workspace
from tests.attacks.door import Door, answers, door, status
from tests.commands import refusal_of
from tests.studies import ENDPOINT, approve, join, kit_folder, served_study

PATHS = (
    "../../../../tmp/x",
    "/etc/x",
    "a/b",
    "..",
    ".",
    "",
    ".ssh",
    "a\\b\0",
    "-oProxyCommand=x",
    "a b",
    "é",
    "x" * 65,
    "a\n",
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return served_study(tmp_path / "study")


def forged(path: Path, study: str, *, site: str, pool: str, node_key: str = "") -> Path:
    """Return a join request with any content, signed by its sender's own key."""
    keys = create_node_keys(path.parent / "keys")
    key = load_node_key(keys.private)
    fields = {"node_key": node_key or read_node_public_key(keys.public), "pool": pool, "site": site, "study": study}
    signature = key.sign(canonical_bytes({"join": 1, **fields}), ec.ECDSA(hashes.SHA384()))
    path.write_text(json.dumps({**fields, "signature": b64encode(signature).decode()}))
    return path


def tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("site", PATHS)
def test_a_name_that_is_a_path_is_refused_before_anything_is_written(
    workspace: Workspace, tmp_path: Path, site: str
) -> None:
    request = forged(tmp_path / "request.json", workspace.study().id, site=site, pool="north")
    before = tree(tmp_path)
    given = [
        "approve",
        str(workspace.root),
        str(request),
        "--site",
        site,
        "--pool",
        "north",
        "--fingerprint",
        "SHA256:x",
    ]
    done = CliRunner().invoke(provision_app, given)
    assert isinstance(done.exception, InvalidInput | SystemExit)
    with pytest.raises(InvalidInput, match=r"\bsite .*join request: got"):
        read_request(request)
    with pytest.raises(InvalidInput, match=r"^name .*site"):
        provision.make_kit(workspace, site, tmp_path / "kit")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("pool", ["../x", "/x", "a//b", "a/../b", "a/", "", "x" * 65, "a\x1b[31m"])
def test_a_pool_is_a_name_too(workspace: Workspace, tmp_path: Path, pool: str) -> None:
    request = forged(tmp_path / "request.json", workspace.study().id, site="north", pool=pool)
    with pytest.raises(InvalidInput, match=r"\bpool .*join request: got"):
        read_request(request)


def test_a_kit_gives_a_site_no_path_for_a_name(workspace: Workspace, tmp_path: Path) -> None:
    kit = kit_folder(workspace)
    record = json.loads((kit / "kit.json").read_text())
    (kit / "kit.json").write_text(json.dumps(record | {"site": "../../x"}))
    with pytest.raises(InvalidInput, match=r"\(site .*startup kit"):
        SiteKit.load(kit)


def test_a_fingerprint_covers_key_name_pool_and_study(workspace: Workspace, tmp_path: Path) -> None:
    honest = join(workspace, tmp_path / "a", "north")
    fields = {"study": honest.study, "site": "north", "pool": "north", "node_key": honest.node_key}
    others = {
        "study": "0" * 64,
        "site": "south",
        "pool": "south",
        "node_key": read_node_public_key(create_node_keys(tmp_path / "other").public),
    }
    for name, value in others.items():
        changed = JoinRequest(**{**fields, name: value})
        assert changed.fingerprint != honest.fingerprint, name
        assert not is_fingerprint(honest.fingerprint, changed.fingerprint)


def test_the_same_key_for_another_pool_or_name_has_another_fingerprint(workspace: Workspace, tmp_path: Path) -> None:
    honest = join(workspace, tmp_path / "a", "north")
    other = JoinRequest(study=honest.study, site="north", pool="south", node_key=honest.node_key)
    with pytest.raises(InvalidInput, match=r"^fingerprint"):
        approve(workspace, other, fingerprint=honest.fingerprint, pool="south")
    for whom in ({"site": "south"}, {"pool": "south"}):
        with pytest.raises(InvalidInput, match="join request") as refused:
            approve(workspace, honest, **whom)
        assert (refused.value.value, refused.value.limit) == ("north", "south")
    assert workspace.registered() == read_admitted(workspace.nodes_file) == ()
    assert not workspace.node_keys_dir.exists()


def test_a_wrong_fingerprint_never_prints_the_right_one(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path / "a", "north")
    right = request.fingerprint.removeprefix("SHA256:")
    wrong = (right[:-1], right + "A", right.lower(), right[::-1], "", "SHA256:", "SHA256:SHA256:" + right, "é" * 43)
    for given in (*wrong, *("SHA256:" + word for word in wrong)):
        with pytest.raises(InvalidInput, match=r"^fingerprint .*allowed: ") as refused:
            approve(workspace, request, fingerprint=given)
        if right not in given:
            assert right not in str(refused.value)
    assert workspace.registered() == ()


@pytest.mark.parametrize("prefix", ["SHA256:", "", "  SHA256:"])
def test_a_right_fingerprint_admits_with_and_without_its_prefix(
    workspace: Workspace, tmp_path: Path, prefix: str
) -> None:
    request = join(workspace, tmp_path / "a", "north")
    admitted = approve(workspace, request, fingerprint=prefix + request.fingerprint.removeprefix("SHA256:"))
    assert (admitted.name, admitted.pool) == ("north", "north")


@pytest.mark.parametrize("proof", ["none", "its own key's", "the other's, of another request", "junk"])
def test_nobody_bars_another_hospital_by_stating_its_ledger_key(
    workspace: Workspace, tmp_path: Path, proof: str
) -> None:
    """A study admits a key once. A site that states another site's key first would bar that site."""
    for name in ("evil", "honest"):
        (tmp_path / name).mkdir()
        join(workspace, tmp_path / name, name)
    honest = json.loads((tmp_path / "honest" / "site" / "request.json").read_text())
    site = tmp_path / "evil" / "site"
    asked = replace(
        read_request(site / "request.json"), books=read_request(tmp_path / "honest/site/request.json").books
    )
    with open_books(load_site(site)) as ledger:
        possession = {
            "none": None,
            "its own key's": ledger.sign(b"consilium/join-books/v1\0" + asked.statement()).hex(),
            "the other's, of another request": honest["possession"],
            "junk": "zz",
        }[proof]
    key = load_node_key(site / "node" / "keys" / "node")
    signature = b64encode(key.sign(asked.statement(), ec.ECDSA(hashes.SHA384()))).decode()
    (tmp_path / "claimed.json").write_text(json.dumps(SignedRequest(asked, signature, possession).to_json()))
    words = ["--site", "evil", "--pool", "evil", "--fingerprint", asked.fingerprint]
    refused = refusal_of(provision_app, "approve", workspace.root, tmp_path / "claimed.json", *words)
    assert "site request" in (refused.remedy or "")
    assert workspace.registered() == ()
    request = read_request(tmp_path / "honest" / "site" / "request.json", to_admit=True)
    assert approve(workspace, request, site="honest", pool="honest").name == "honest"


def test_a_revoked_key_comes_back_under_no_name(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path / "a", "north")
    approve(workspace, request)
    provision.revoke(workspace, "north", unregister=lambda _node: None)
    again = replace(request, site="south", pool="south")
    with pytest.raises(InvalidInput, match="registered already"):
        approve(workspace, again, site="south", pool="south")
    for spelled in (request.node_key + " comment", request.node_key + "\n", request.node_key.replace(" ", "  ")):
        with pytest.raises(InvalidInput, match="node key"):
            JoinRequest(study=request.study, site="south", pool="south", node_key=spelled)


def test_a_site_that_superlink_did_not_take_can_be_admitted_later(workspace: Workspace, tmp_path: Path) -> None:
    request = join(workspace, tmp_path / "a", "north")

    def away(_key: Path, _name: str) -> int:
        raise DaemonFailed("SuperLink is not running")

    with pytest.raises(DaemonFailed):
        provision.approve(
            workspace, request, site="north", pool="north", fingerprint=request.fingerprint, register=away
        )
    assert tree(workspace.node_keys_dir) == set()
    assert approve(workspace, request).name == "north"


def test_a_request_of_any_size_and_depth_ends_as_a_refusal(tmp_path: Path) -> None:
    for content in (b"[" * 60_000, b"x" * (1 << 20), b"{}", b"\xff", b"[]", b"1" * 5000):
        (tmp_path / "request.json").write_bytes(content)
        with pytest.raises(InvalidInput):
            read_request(tmp_path / "request.json")


# --- one spelling

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
ROUTE = "/v1/fleet/get-run"
HOSTS = [
    b"x/v1/control/start-run?",
    b"gateway/v1/control/start-run#",
    b"gateway@evil.example",
    b"evil.example",
    b"gateway:8443:1",
    b"gateway.",
    b" gateway",
    b"",
    b"gateway\x00",
    b"[::1]]",
    b"xn--gteway-fya",
]


class Asked:
    """Holds a gateway in this process, which gets ASGI scopes as a server would make them from arbitrary bytes."""

    def __init__(self, root: Path) -> None:
        self.key = load_node_key(create_node_keys(root / "north").private)
        node = read_node_public_key(root / "north" / "node.pub")
        write_admitted(root / "nodes.json", (AdmittedNode(site="north", key=node),))
        self.files = GatewayFiles(
            objects=root / "objects", nodes=root / "nodes.json", certificate=root / "none", key=root / "none"
        )
        self.reached: list[str] = []

    def _superlink(self, request: httpx.Request) -> httpx.Response:
        self.reached.append(request.url.path)
        return httpx.Response(200, content=b"ok")

    def ask(
        self,
        path: str,
        *,
        raw: bytes = b"",
        hosts: tuple[bytes, ...] = (b"gateway",),
        query: bytes = b"",
        more: tuple[tuple[bytes, bytes], ...] = (),
    ) -> int:
        """Return the status of a POST that an admitted site signed for ``path``. The bytes ``raw`` are sent as its
        path, and ``more`` are further headers.
        """
        raw = raw or path.encode()
        signed = signed_headers(self.key, method="POST", path=raw.decode(), now=NOW)
        headers = [(b"host", host) for host in hosts]
        headers += [(name.encode(), value.encode()) for name, value in signed.items()] + list(more)
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "https", "path": path}
        scope |= {"raw_path": raw, "query_string": query, "root_path": "", "headers": headers}
        scope |= {"client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8443)}
        statuses: list[int] = []

        async def one() -> None:
            async def receive() -> dict:
                return {"type": "http.request", "body": b"", "more_body": False}

            async def send(message: dict) -> None:
                statuses.append(message.get("status", 0))

            transport = httpx.MockTransport(self._superlink)
            async with httpx.AsyncClient(base_url="https://superlink", transport=transport) as upstream:
                app = gateway_app(self.files, upstream=upstream, hosts=lambda: ("gateway",), clock=lambda: NOW)
                await app(scope, receive, send)

        asyncio.run(one())
        return statuses[0]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


def test_the_honest_spelling_passes(asked: Asked) -> None:
    for host in (b"gateway", b"GATEWAY:8443", b"127.0.0.1:8443", b"localhost", b"[::1]:1"):
        assert asked.ask(ROUTE, hosts=(host,)) == 200
    assert asked.reached == [ROUTE] * 5


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_header_reaches_no_other_route(asked: Asked, host: bytes) -> None:
    assert asked.ask(ROUTE, hosts=(host,)) == 421
    assert asked.ask("/", hosts=(host,)) == 421
    assert asked.reached == []


TWO_LENGTHS = (
    ((b"content-length", b"0"), (b"transfer-encoding", b"chunked")),
    ((b"transfer-encoding", b"chunked"), (b"content-length", b"5")),
    ((b"content-length", b"0"), (b"content-length", b"0")),
    ((b"transfer-encoding", b"chunked"), (b"transfer-encoding", b"identity")),
)


@pytest.mark.parametrize("lengths", TWO_LENGTHS)
def test_a_body_that_says_its_length_in_two_ways_is_refused_without_a_traceback(
    asked: Asked, lengths: tuple[tuple[bytes, bytes], ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert asked.ask(ROUTE, more=lengths) == 400
    assert asked.ask(ROUTE, more=lengths[:1]) == 200
    assert asked.reached == [ROUTE]
    assert "Traceback" not in caplog.text


def test_no_host_and_two_hosts_are_refused(asked: Asked) -> None:
    assert asked.ask(ROUTE, hosts=()) == 421
    assert asked.ask(ROUTE, hosts=(b"gateway", b"gateway")) == 421
    assert asked.reached == []


@pytest.mark.parametrize(
    ("path", "raw"),
    [
        (ROUTE, b"/v1/fleet/get%2drun"),
        (ROUTE, b"/v1/fleet%2fget-run"),
        (ROUTE, b"//v1/fleet/get-run"),
        (ROUTE, b"https://superlink/v1/fleet/get-run"),
        (ROUTE, b"/v1/fleet/./get-run"),
        (ROUTE, b"/v1/control/../fleet/get-run"),
        (ROUTE, b"/v1/fleet/get-run/"),
        (ROUTE, b"/v1/fleet/get-run;x"),
        ("/v1/fleet//get-run", b""),
        ("/v1/fleet/../control/start-run", b""),
        ("/v1/control/start-run", b"/v1/fleet/get-run"),
        ("https://superlink/v1/control/start-run", b""),
        ("", b"/"),
        ("*", b""),
    ],
)
def test_a_path_with_two_readings_reaches_nothing(asked: Asked, path: str, raw: bytes) -> None:
    assert asked.ask(path, raw=raw) == 404
    assert asked.reached == []


def test_a_query_is_no_part_of_any_route(asked: Asked) -> None:
    assert asked.ask(ROUTE, query=b"x=1") == 404
    assert asked.reached == []


def test_a_gateway_is_called_by_the_names_in_its_certificate(workspace: Workspace) -> None:
    hosts = CertificateHosts(workspace.gateway_dir / "server.crt")
    assert "localhost" in hosts()
    provision.set_up_server(workspace, ENDPOINT, more_names=["pate.example.org", "::1"])
    assert {"pate.example.org", "[::1]"} <= set(hosts())
    (workspace.gateway_dir / "server.crt").write_text("half")
    assert "pate.example.org" in hosts()


# --- many open connections


@contextlib.asynccontextmanager
async def listening(app: object, *, host: str = "127.0.0.1", port: int = 0):
    """Run a listener with its limits and without TLS in this process; return its port."""
    config = uvicorn.Config(
        app, host=host, port=port, http=listener.GuardedProtocol, ws="none", lifespan="off", log_level="critical"
    )
    server = listener.Listener(config)
    config.load()
    server.lifespan = config.lifespan_class(config)
    await server.startup()
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        await server.shutdown()


async def answer(scope: dict, receive, send) -> None:
    if scope["path"] == "/signed":
        scope["state"]["connection"].admitted("north")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})


def test_the_ipv6_wildcard_serves_ipv4_sites_too() -> None:
    """With ``--bind ::``, asyncio alone would serve IPv6 only."""

    async def reached() -> None:
        async with listening(answer, host="::", port=free_port()) as port:
            for address in ("127.0.0.1", "::1"):
                _reader, writer = await asyncio.open_connection(address, port)
                writer.close()

    asyncio.run(reached())


async def opened(held: contextlib.AsyncExitStack, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection that is closed together with ``held``."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)

    async def close() -> None:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    held.push_async_callback(close)
    return reader, writer


def request(path: str) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode()


async def closed_after(reader: asyncio.StreamReader) -> float:
    started = time.monotonic()
    with contextlib.suppress(OSError):
        async with asyncio.timeout(5):
            while await reader.read(4096):
                pass
    return time.monotonic() - started


@pytest.mark.slow
def test_a_client_that_sends_its_head_slowly_is_cut_off_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HEAD_S", 0.5)

    async def attack() -> None:
        async with listening(answer) as port, contextlib.AsyncExitStack() as held:
            silent, _ = await opened(held, port)
            drops, writer = await opened(held, port)
            after, again = await opened(held, port)
            again.write(request("/signed"))
            assert await status(after) == 200
            again.write(b"POST / HTTP/1.1\r\nx: ")  # a second head that never ends

            async def drip() -> None:
                with contextlib.suppress(OSError):
                    for byte in b"POST / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 200:
                        writer.write(bytes([byte]))
                        await writer.drain()
                        await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            took = await asyncio.gather(*(closed_after(reader) for reader in (silent, drops, after)))
            dripping.cancel()
            assert max(took) < 2.0

    asyncio.run(attack())


def test_a_crowd_of_strangers_loses_its_oldest_and_never_an_admitted_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "MAX_STRANGERS", 8)
    monkeypatch.setattr(listener, "MAX_PER_SITE", 2)

    async def attack() -> None:
        async with listening(answer) as port, contextlib.AsyncExitStack() as held:
            reader, writer = await opened(held, port)
            writer.write(request("/signed"))
            assert await status(reader) == 200
            crowd = [await opened(held, port) for _ in range(20)]
            assert await closed_after(crowd[0][0]) < 2.0
            assert await closed_after(crowd[11][0]) < 2.0
            crowd[12][1].write(request("/"))
            assert await status(crowd[12][0]) == 200  # the newest eight connections are still open
            while not (await reader.readline()).startswith(b"\r\n"):
                pass
            writer.write(request("/signed"))
            assert await status(reader) == 200
            more = [await opened(held, port) for _ in range(2)]
            for _, other in more:
                other.write(request("/signed"))
            assert await closed_after(reader) < 2.0  # a third connection of one site ends its oldest

    asyncio.run(attack())


@pytest.mark.slow
def test_an_answer_that_nobody_reads_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "STALLED_S", 0.3)
    gone = asyncio.Event()

    async def endless(scope: dict, receive, send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

        writing = asyncio.create_task(write())
        while (await receive())["type"] != "http.disconnect":
            pass
        writing.cancel()
        gone.set()

    async def attack() -> None:
        async with listening(endless) as port, contextlib.AsyncExitStack() as held:
            _, writer = await opened(held, port)
            writer.write(request("/"))
            async with asyncio.timeout(5):
                await gone.wait()

    asyncio.run(attack())


@pytest.mark.slow
def test_invalid_requests_fill_no_log(tmp_path: Path) -> None:
    """The requests come from a stranger without a key. Logs are rotated only when a daemon starts."""
    tricks = (
        b"content-length: -2",
        b"content-length: 0x2",
        b"transfer-encoding: xchunked",
        b"upgrade: h2c\r\nconnection: upgrade",
    )

    async def ask(gateway: Door, number: int) -> None:
        async with asyncio.timeout(600), gateway.connect() as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: localhost\r\n" + tricks[number % len(tricks)] + b"\r\n\r\n")
            assert await status(reader) in (400, 401)

    async def attack(gateway: Door) -> float:
        started = time.monotonic()
        for number in range(120):
            await ask(gateway, number)
        return time.monotonic() - started

    with door(tmp_path) as gateway:
        seconds = asyncio.run(attack(gateway))
        lines = gateway.gateway.spec.log.read_text().splitlines()
    assert len(lines) < 5 * (seconds + 2)
    assert "Invalid HTTP request" in "".join(lines)  # the log still states the cause


@pytest.mark.slow
def test_six_hundred_idle_connections_and_two_hundred_slow_ones_keep_no_site_out(tmp_path: Path) -> None:
    async def attack(gateway: Door) -> None:
        calm, seconds_calm = await answers(gateway, "north", 10)
        async with contextlib.AsyncExitStack() as held:

            async def hold() -> asyncio.StreamWriter | None:
                with contextlib.suppress(OSError, TimeoutError):
                    return (await held.enter_async_context(gateway.connect()))[1]
                return None

            async def drip(writer: asyncio.StreamWriter | None) -> None:
                with contextlib.suppress(OSError):
                    while writer is not None and not writer.is_closing():
                        writer.write(b"P")
                        await asyncio.sleep(1.0)

            idle = [writer for _ in range(15) for writer in await asyncio.gather(*(hold() for _ in range(40)))]
            slow = [writer for _ in range(5) for writer in await asyncio.gather(*(hold() for _ in range(40)))]
            assert sum(writer is not None for writer in idle) == 600
            dripping = [asyncio.create_task(drip(writer)) for writer in slow]
            attacked, seconds = await answers(gateway, "north", 20)
            memory = gateway.memory_mib()
            for task in dripping:
                task.cancel()
        print(f"median of 10 in calm {seconds_calm:.3f} s, of 20 under attack {seconds:.3f} s, {memory:.0f} MiB")
        assert calm == [200] * 10
        assert attacked == [200] * 20
        assert seconds < 2.0
        assert memory < 256

    with door(tmp_path) as gateway:
        asyncio.run(attack(gateway))
