"""One admitted hospital: its key passes the door, and it means the others harm.

| threat | what stands against it |
|---|---|
| it floods the server with requests | eight at a time of one site, the rest waits or is told to come again |
| it begins large messages and never ends them | bytes of bodies under way are counted by site; silence ends one |
| it signs so much that remembering it slows or fills the server | constant work a request, a bound a key |
| it names itself twice, so that two readers see two names | a header that proves who asks stands once |
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from common import node_auth
from common.errors import Refused
from common.node_auth import AdmittedNode, Gatekeeper, signed_headers, write_admitted
from common.pki import create_node_keys, load_node_key, read_node_public_key
from server import gateway as gateway_module
from server import shares
from server.gateway import GatewayFiles, gateway_app
from server.shares import Shares
from tests.attacks.door import Door, answers, door, status

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
PUSH = "/v1/fleet/push-object"


# --- what it signs


@pytest.fixture
def gatekeeper(tmp_path: Path) -> Gatekeeper:
    keys = (create_node_keys(tmp_path / name).public for name in ("north", "south"))
    nodes = (AdmittedNode(site=name, key=read_node_public_key(key)) for name, key in zip("ns", keys, strict=True))
    write_admitted(tmp_path / "nodes.json", tuple(nodes))
    return Gatekeeper(tmp_path / "nodes.json")


def test_remembering_a_hundred_thousand_signatures_costs_a_request_nothing(
    gatekeeper: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_auth, "MAX_REMEMBERED", 200_000)
    for name in range(108_000):
        gatekeeper._once("key", name, 0.0)
    slowest = 0.0
    for name in range(108_000, 108_200):
        started = time.perf_counter()
        gatekeeper._once("key", name, 1.0)
        slowest = max(slowest, time.perf_counter() - started)
    assert slowest < 0.005  # 44 ms before, at every request
    with pytest.raises(Refused, match="replayed"):
        gatekeeper._once("key", 5, 359.0)


def test_what_is_remembered_of_one_key_is_bounded_and_forgets_nothing_early(
    gatekeeper: Gatekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_auth, "MAX_REMEMBERED", 100)
    for name in range(100):
        gatekeeper._once("north", name, name / 10)
    with pytest.raises(Refused, match="busy"):
        gatekeeper._once("north", 100, 10.0)
    for name in range(100):
        with pytest.raises(Refused, match="replayed"):
            gatekeeper._once("north", name, 10.0)
    gatekeeper._once("south", 0, 10.0)  # another site's memory is its own
    gatekeeper._once("north", 100, 360.05)
    with pytest.raises(Refused, match="replayed"):
        gatekeeper._once("north", 99, 360.05)


@pytest.mark.parametrize("name", ["consilium-key", "consilium-timestamp", "consilium-signature", "flwr-public-key"])
def test_a_header_that_proves_who_asks_stands_once(tmp_path: Path, name: str) -> None:
    key = load_node_key(create_node_keys(tmp_path / "north").private)
    write_admitted(
        tmp_path / "nodes.json",
        (AdmittedNode(site="north", key=read_node_public_key(tmp_path / "north" / "node.pub")),),
    )
    files = GatewayFiles(objects=tmp_path / "o", nodes=tmp_path / "nodes.json", certificate=tmp_path, key=tmp_path)
    reached: list[httpx.Request] = []

    def superlink(request: httpx.Request) -> httpx.Response:
        reached.append(request)
        return httpx.Response(200)

    async def ask() -> httpx.Response:
        signed = signed_headers(key, method="POST", path=PUSH, now=NOW)
        twice = [*signed.items(), (name, "other"), *([(name, "another")] if name not in signed else [])]
        async with httpx.AsyncClient(base_url="https://s", transport=httpx.MockTransport(superlink)) as upstream:
            app = gateway_app(files, upstream=upstream, hosts=lambda: ("gateway",), clock=lambda: NOW)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="https://gateway") as http:
                return await http.post(PUSH, headers=twice)

    reply = asyncio.run(ask())
    assert (reply.status_code, reply.text) == (401, "unsigned\n")
    assert reached == []


# --- its share


def test_a_site_has_its_turns_and_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "WAITING", 3)

    async def attack() -> None:
        all_of = Shares()
        north, south = all_of.of("north"), all_of.of("south")
        let_go = asyncio.Event()

        async def hold() -> None:
            async with north.turn():
                await let_go.wait()

        held = [asyncio.create_task(hold()) for _ in range(shares.AT_ONCE + 3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(Refused, match="busy"):
            async with north.turn():
                pass
        async with south.turn():
            pass
        let_go.set()
        await asyncio.gather(*held)
        async with north.turn():
            pass

    asyncio.run(attack())


def test_bytes_under_way_are_counted_by_site_and_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "SITE_BODY_BYTES", 10)
    monkeypatch.setattr(shares, "ALL_BODY_BYTES", 15)

    async def attack() -> None:
        all_of = Shares()
        north, south = all_of.of("north"), all_of.of("south")
        north.take(10)
        with pytest.raises(Refused, match="busy"):
            north.take(1)
        south.take(5)
        with pytest.raises(Refused, match="busy"):
            south.take(1)
        north.give_back(10)
        south.take(5)
        assert all_of.bytes == 10

    asyncio.run(attack())


@pytest.mark.parametrize("pause", [True, False])
def test_a_body_that_stalls_or_trickles_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause: bool) -> None:
    monkeypatch.setattr(gateway_module, "BODY_PAUSE_S", 0.2 if pause else 5.0)
    monkeypatch.setattr(gateway_module, "BODY_GRACE_S", 5.0 if pause else 0.4)
    key = load_node_key(create_node_keys(tmp_path / "north").private)
    node = AdmittedNode(site="north", key=read_node_public_key(tmp_path / "north" / "node.pub"))
    write_admitted(tmp_path / "nodes.json", (node,))
    files = GatewayFiles(objects=tmp_path / "o", nodes=tmp_path / "nodes.json", certificate=tmp_path, key=tmp_path)

    async def trickle():
        for _ in range(100):
            yield b"x"
            await asyncio.sleep(1.0 if pause else 0.05)

    async def ask() -> httpx.Response:
        signed = signed_headers(key, method="POST", path=PUSH, now=NOW)
        mock = httpx.MockTransport(lambda request: httpx.Response(200))
        async with httpx.AsyncClient(base_url="https://s", transport=mock) as upstream:
            app = gateway_app(files, upstream=upstream, hosts=lambda: ("gateway",), clock=lambda: NOW)
            scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": PUSH, "raw_path": PUSH.encode()}
            names = {"host": "gateway", **signed}
            scope |= {"headers": [(name.encode(), value.encode()) for name, value in names.items()], "root_path": ""}
            scope |= {"query_string": b"", "client": ("127.0.0.1", 1), "scheme": "https", "server": ("gateway", 1)}
            body, sent = trickle(), []

            async def receive() -> dict:
                return {"type": "http.request", "body": await anext(body), "more_body": True}

            async def send(message: dict) -> None:
                sent.append(message)

            await app(scope, receive, send)
            return sent

    started = time.monotonic()
    sent = asyncio.run(ask())
    assert time.monotonic() - started < 3.0
    assert (sent[0]["status"], sent[1]["body"]) == (408, b"too-slow\n")


@pytest.mark.slow
def test_a_flood_and_stalled_messages_leave_the_other_sites_their_server(tmp_path: Path) -> None:
    """Two floods of 64 connections at once and 24 stalled messages of 64 MiB, all signed by one site."""

    async def attack(gateway: Door) -> None:
        calm, slowest_calm = await answers(gateway, "south", 10)
        stop = time.monotonic() + 25
        flooded = 0
        async with contextlib.AsyncExitStack() as held:

            async def stall() -> None:
                with contextlib.suppress(OSError, TimeoutError):
                    _, writer = await held.enter_async_context(gateway.connect())
                    writer.write(gateway.head("north", "POST", PUSH, length=64 << 20))
                    for _ in range(63):
                        writer.write(b"x" * (1 << 20))
                        async with asyncio.timeout(3):
                            await writer.drain()

            async def flood() -> None:
                nonlocal flooded
                while time.monotonic() < stop:
                    with contextlib.suppress(OSError):
                        async with gateway.connect() as (reader, writer):
                            writer.write(gateway.head("north", "POST", "/v1/fleet/pull-messages"))
                            await status(reader)
                            flooded += 1

            tasks = [asyncio.create_task(stall()) for _ in range(24)]
            tasks += [asyncio.create_task(flood()) for _ in range(64)]
            await asyncio.sleep(5)
            attacked, slowest = await answers(gateway, "south", 20)
            memory = gateway.memory_mib()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        print(
            f"slowest of 10 in calm {slowest_calm:.3f} s, of 20 under attack {slowest:.3f} s, "
            f"{flooded} requests of the flood answered, gateway {memory:.0f} MiB"
        )
        assert calm == [200] * 10
        assert attacked == [200] * 20
        assert slowest < 5.0  # the flood's own client shares this machine's processors
        assert memory < 256

    with door(tmp_path) as gateway:
        asyncio.run(attack(gateway))


def test_a_replay_a_year_of_clock_away_changes_nothing(gatekeeper: Gatekeeper) -> None:
    start = NOW.timestamp()
    gatekeeper._once("north", 1, start)
    gatekeeper._once("north", 2, (NOW - timedelta(days=365)).timestamp())  # the clock was set back
    with pytest.raises(Refused, match="replayed"):
        gatekeeper._once("north", 1, start + 1)
