"""Attack: an admitted hospital attacks the server and the other hospitals with requests that its key signs.

| attack | defence |
|---|---|
| it floods the server with requests | eight requests of a site are served at a time; others wait or are refused |
| it begins large messages and never ends them | bytes in transit are limited by site; a stalled body is ended |
| it signs so many requests that the memory of signatures slows or fills the server | a limit for each key |
| it states its name twice, so that two parsers read two names | a repeated header of authentication is refused |
| it pushes a message as another hospital, or to another hospital | a node may push its own replies to the server only |
| it announces many objects | a message has one tree of three objects, each in the one before |
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest
from flwr.proto import fab_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2, run_pb2
from google.protobuf.message import DecodeError
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common import node_auth
from common.errors import Refused
from common.node_auth import AdmittedNode, RequestAdmission, signed_headers, write_admitted
from common.pki import create_node_keys, load_node_key, read_node_public_key
from server.operations import gateway as gateway_module
from server.operations import shares
from server.operations.gateway import GatewayFiles, gateway_app
from server.operations.sender import check_sender
from server.operations.shares import Shares
from tests.attacks.door import Door, answers, attacking, door, status

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
PUSH = "/v1/fleet/push-object"


# --- what it signs


@pytest.fixture
def gatekeeper(tmp_path: Path) -> RequestAdmission:
    keys = (create_node_keys(tmp_path / name).public for name in ("north", "south"))
    nodes = (AdmittedNode(site=name, key=read_node_public_key(key)) for name, key in zip("ns", keys, strict=True))
    write_admitted(tmp_path / "nodes.json", tuple(nodes))
    return RequestAdmission(tmp_path / "nodes.json")


def test_remembering_a_hundred_thousand_signatures_costs_a_request_nothing(
    gatekeeper: RequestAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_auth, "MAX_REMEMBERED", 200_000)
    for name in range(108_000):
        gatekeeper._once("key", name, 0.0)
    seconds = []
    for name in range(108_000, 108_200):
        started = time.process_time()
        gatekeeper._once("key", name, 1.0)
        seconds.append(time.process_time() - started)
    assert statistics.median(seconds) < 0.005  # 44 ms before, at every request
    with pytest.raises(Refused, match="replayed"):
        gatekeeper._once("key", 5, 359.0)


def test_the_remembered_requests_of_one_key_are_bounded_and_none_is_forgotten_early(
    gatekeeper: RequestAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_auth, "MAX_REMEMBERED", 100)
    for name in range(100):
        gatekeeper._once("north", name, name / 10)
    with pytest.raises(Refused, match="busy"):
        gatekeeper._once("north", 100, 10.0)
    for name in range(100):
        with pytest.raises(Refused, match="replayed"):
            gatekeeper._once("north", name, 10.0)
    gatekeeper._once("south", 0, 10.0)  # requests are remembered by site
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


# --- its share of the gateway


def test_a_site_is_served_a_bounded_number_at_a_time_and_few_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_body_that_stalls_or_trickles_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, pause: bool
) -> None:
    monkeypatch.setattr(gateway_module, "BODY_PAUSE_S", 0.2 if pause else 60.0)
    monkeypatch.setattr(gateway_module, "BODY_GRACE_S", 60.0 if pause else 0.4)
    key = load_node_key(create_node_keys(tmp_path / "north").private)
    node = AdmittedNode(site="north", key=read_node_public_key(tmp_path / "north" / "node.pub"))
    write_admitted(tmp_path / "nodes.json", (node,))
    files = GatewayFiles(objects=tmp_path / "o", nodes=tmp_path / "nodes.json", certificate=tmp_path, key=tmp_path)

    async def trickle():
        for _ in range(1000):
            yield b"x"
            await asyncio.sleep(30.0 if pause else 0.05)

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
    assert time.monotonic() - started < 20.0
    assert (sent[0]["status"], sent[1]["body"]) == (408, b"too-slow\n")
    assert f"event=refused reason=too-slow path={PUSH}" in caplog.text


@pytest.mark.slow
def test_a_flood_and_stalled_messages_leave_the_other_sites_their_server(tmp_path: Path) -> None:
    """Two floods of 64 connections at once and 24 stalled messages of 64 MiB, all signed by one site."""

    async def attack(gateway: Door) -> None:
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
                while True:
                    with contextlib.suppress(OSError):
                        async with gateway.connect() as (reader, writer):
                            writer.write(gateway.head("north", "POST", "/v1/fleet/pull-messages"))
                            if await status(reader):
                                flooded.value += 1

            await asyncio.gather(*(stall() for _ in range(24)), *(flood() for _ in range(64)))

    flooded = multiprocessing.get_context("fork").Value("i")
    with door(tmp_path) as gateway:
        calm, seconds_calm = asyncio.run(answers(gateway, "south", 10))
        with attacking(attack(gateway)):
            while flooded.value < 64:
                time.sleep(0.1)
            attacked, seconds = asyncio.run(answers(gateway, "south", 20))
            memory, served = gateway.memory_mib(), flooded.value
    print(
        f"median of 10 in calm {seconds_calm:.3f} s, of 20 under attack {seconds:.3f} s, "
        f"{served} requests of the flood answered, gateway {memory:.0f} MiB"
    )
    assert calm == [200] * 10
    assert attacked == [200] * 20
    assert seconds < 2.0
    assert memory < 256


def test_a_replay_a_year_of_clock_away_changes_nothing(gatekeeper: RequestAdmission) -> None:
    start = NOW.timestamp()
    gatekeeper._once("north", 1, start)
    gatekeeper._once("north", 2, (NOW - timedelta(days=365)).timestamp())  # the clock was set back
    with pytest.raises(Refused, match="replayed"):
        gatekeeper._once("north", 1, start + 1)


def test_a_request_is_good_once_also_after_the_clock_was_ahead_and_is_set_back(gatekeeper: RequestAdmission) -> None:
    start, ahead = NOW.timestamp(), (NOW + timedelta(minutes=6)).timestamp()
    gatekeeper._once("north", 1, ahead)
    gatekeeper._once("north", 2, ahead + node_auth.MAX_AGE_S + node_auth.MAX_LEAD_S)
    with pytest.raises(Refused, match="replayed"):
        gatekeeper._once("north", 1, start)


def test_a_site_is_not_shut_out_for_what_it_asked_while_clocks_were_a_day_ahead(
    gatekeeper: RequestAdmission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_auth, "MAX_REMEMBERED", 100)
    start = NOW.timestamp()
    gatekeeper._once("north", 0, (NOW + timedelta(days=1)).timestamp())
    for number in range(1, 1000):  # fewer than a hundred in any six minutes
        gatekeeper._once("north", number, start + 10 * number)
    for number in (0, 999):
        with pytest.raises(Refused, match="replayed"):
            gatekeeper._once("north", number, start + 10_000)


# --- as whom it pushes

NORTH, SOUTH, SERVER = 2**63 + 11, 7, 1
FLEET = "/v1/fleet/"


def metadata(**changes: object) -> message_pb2.Metadata:
    """Return the metadata of an honest reply of hospital north, with ``changes``."""
    facts = {"run_id": 5, "message_id": "a" * 64, "src_node_id": NORTH, "dst_node_id": SERVER}
    return message_pb2.Metadata(**facts | {"reply_to_message_id": "b" * 64, "ttl": 600.0} | changes)


def row(*names: str) -> message_pb2.ObjectTree:
    """Return a tree in which each object is the only child of the one before."""
    *above, last = names
    tree = message_pb2.ObjectTree(object_id=last)
    for name in reversed(above):
        tree = message_pb2.ObjectTree(object_id=name, children=[tree])
    return tree


def pushed(*metadatas: message_pb2.Metadata, node: int = NORTH) -> bytes:
    """Return the body with which a SuperNode pushes messages."""
    trees = [row("a" * 64, "c" * 64, "d" * 64)]
    messages = [message_pb2.Message(metadata=each) for each in metadatas]
    return fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=node),
        messages_list=messages,
        message_object_trees=trees,
        clientapp_runtime_list=[1.5],
    ).SerializeToString()


def said_to_superlink(tmp_path: Path, body: bytes, *, route: str = "push-messages", known: bool = True):
    """Return the status of the answer to hospital north, and the bodies that reach SuperLink."""
    key = load_node_key(create_node_keys(tmp_path / "north").private)
    public = read_node_public_key(tmp_path / "north" / "node.pub")
    write_admitted(tmp_path / "nodes.json", (AdmittedNode(site="north", key=public, node_id=NORTH if known else 0),))
    files = GatewayFiles(objects=tmp_path / "o", nodes=tmp_path / "nodes.json", certificate=tmp_path, key=tmp_path)
    reached: list[bytes] = []

    def superlink(request: httpx.Request) -> httpx.Response:
        reached.append(request.content)
        return httpx.Response(200)

    async def ask() -> int:
        async with httpx.AsyncClient(base_url="https://s", transport=httpx.MockTransport(superlink)) as upstream:
            app = gateway_app(files, upstream=upstream, hosts=lambda: ("gateway",), clock=lambda: NOW)
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="https://gateway") as http:
                signed = signed_headers(key, method="POST", path=FLEET + route, now=NOW)
                return (await http.post(FLEET + route, content=body, headers=signed)).status_code

    return asyncio.run(ask()), reached


@pytest.mark.parametrize("known", [True, False])
def test_a_sites_own_reply_reaches_superlink_byte_for_byte(tmp_path: Path, known: bool) -> None:
    body = pushed(metadata())
    assert said_to_superlink(tmp_path, body, known=known) == (200, [body])


FORGED = {
    "from another hospital": pushed(metadata(src_node_id=SOUTH)),
    "from the server": pushed(metadata(src_node_id=SERVER)),
    "from nobody": pushed(metadata(src_node_id=0)),
    "to another hospital": pushed(metadata(dst_node_id=SOUTH)),
    "to nobody": pushed(metadata(dst_node_id=0)),
    "no reply": pushed(metadata(reply_to_message_id="")),
    "the second of two": pushed(metadata(), metadata(src_node_id=SOUTH)),
    "without metadata": fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=NORTH), messages_list=[message_pb2.Message()]
    ).SerializeToString(),
    "as another node": pushed(metadata(src_node_id=SOUTH), node=SOUTH),
    "as no node": pushed(metadata(src_node_id=0), node=0),
}


@pytest.mark.parametrize("forged", FORGED)
def test_a_hospital_pushes_nothing_but_its_own_replies_to_the_server(tmp_path: Path, forged: str) -> None:
    assert said_to_superlink(tmp_path, FORGED[forged]) == (403, [])


@pytest.mark.parametrize("forged", [name for name in FORGED if name != "as another node"])
def test_a_hospital_pushes_nothing_else_if_an_earlier_versions_list_lacks_its_node(tmp_path: Path, forged: str) -> None:
    """SuperLink then refuses ``as another node``, because it knows whose key signed the request."""
    assert said_to_superlink(tmp_path, FORGED[forged], known=False) == (403, [])


def announced(*trees: message_pb2.ObjectTree, messages: int = 1) -> bytes:
    """Return an honest message with these trees of objects."""
    return fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=NORTH),
        messages_list=[message_pb2.Message(metadata=metadata())] * messages,
        message_object_trees=trees,
    ).SerializeToString()


ROOT, NAMES = "a" * 64, [f"{number:064x}" for number in range(900)]
OTHER_SHAPES = {
    "names by the thousand": announced(
        message_pb2.ObjectTree(object_id=ROOT, children=[message_pb2.ObjectTree(object_id=name) for name in NAMES])
    ),
    "a row of two": announced(row(ROOT, "c" * 64)),
    "a row of four": announced(row(ROOT, "c" * 64, "d" * 64, "e" * 64)),
    "a row of ninety": announced(row(ROOT, *NAMES[:90])),
    "two records": announced(
        message_pb2.ObjectTree(
            object_id=ROOT,
            children=[message_pb2.ObjectTree(object_id=NAMES[1], children=[row(NAMES[2]), row(NAMES[3])])],
        )
    ),
    "another root": announced(row(*NAMES[:3])),
    "one name twice": announced(row(ROOT, "c" * 64, "c" * 64)),
    "a name that is no hash": announced(row(ROOT, "c" * 64, "../../etc/passwd")),
    "two trees": announced(row(ROOT, *NAMES[:2]), row(ROOT, *NAMES[:2])),
    "no tree": announced(),
    "two messages": announced(row(ROOT, *NAMES[:2]), messages=2),
    "no message": announced(row(ROOT, *NAMES[:2]), messages=0),
}


@pytest.mark.parametrize("shape", OTHER_SHAPES)
def test_a_reply_is_one_message_with_one_tree_of_one_shape(tmp_path: Path, shape: str) -> None:
    assert said_to_superlink(tmp_path, OTHER_SHAPES[shape]) == (403, [])


def test_a_node_may_report_an_error_as_a_message_without_further_objects(tmp_path: Path) -> None:
    body = announced(row(ROOT))
    assert said_to_superlink(tmp_path, body) == (200, [body])


def test_an_announcement_has_no_room_for_a_megabyte_of_names(tmp_path: Path) -> None:
    body = pushed(metadata(group_id="x" * (1 << 20)))
    assert said_to_superlink(tmp_path, body) == (413, [])


def field(number: int, content: bytes) -> bytes:
    """Return a protobuf field of fewer than 128 bytes."""
    return bytes([number << 3 | 2, len(content)]) + content


AMBIGUOUS = {
    "a second node": pushed(metadata()) + field(1, node_pb2.Node(node_id=SOUTH).SerializeToString()),
    "a second metadata": field(1, node_pb2.Node(node_id=NORTH).SerializeToString())
    + field(2, field(1, metadata(message_id="").SerializeToString()) + field(1, b"\x18\x07")),
    "a second source": field(1, node_pb2.Node(node_id=NORTH).SerializeToString())
    + field(2, field(1, metadata(message_id="").SerializeToString() + b"\x18\x07")),
    "a source that is text": field(1, node_pb2.Node(node_id=NORTH).SerializeToString())
    + field(2, field(1, metadata(message_id="", src_node_id=0).SerializeToString() + field(3, b"7"))),
    "a node that is a number": b"\x08\x07" + pushed(metadata())[12:],
    "cut": pushed(metadata())[:-3],
    "a group": pushed(metadata()) + b"\x0b\x0c",
    "field 0": pushed(metadata()) + b"\x02\x00",
    "a number of 70 bits": pushed(metadata()) + b"\x28" + b"\xff" * 9 + b"\x7f",
    "a number without an end": pushed(metadata()) + b"\x28" + b"\xff" * 20,
    "a length beyond the end": pushed(metadata()) + b"\x2a\x7fx",
    "thousands of fields": pushed(metadata()) + b"\x28\x01" * 30_000,
}


@pytest.mark.parametrize("body", AMBIGUOUS)
def test_a_push_that_two_parsers_could_read_differently_is_refused(tmp_path: Path, body: str) -> None:
    started = time.process_time()
    assert said_to_superlink(tmp_path, AMBIGUOUS[body]) == (403, [])
    assert time.process_time() - started < 2.0


NODE = node_pb2.Node
NAMED = {
    "pull-messages": lambda node: fleet_pb2.PullMessagesRequest(node=NODE(node_id=node), message_ids=["x", "y"]),
    "send-node-heartbeat": lambda node: heartbeat_pb2.SendNodeHeartbeatRequest(
        node=NODE(node_id=node), heartbeat_interval=30.0
    ),
    "deactivate-node": lambda node: fleet_pb2.DeactivateNodeRequest(node_id=node),
    "get-run": lambda node: run_pb2.GetRunRequest(node=NODE(node_id=node), run_id=5),
    "get-fab": lambda node: fab_pb2.GetFabRequest(node=NODE(node_id=node), hash_str="h", run_id=5),
    "pull-object": lambda node: message_pb2.PullObjectRequest(node=NODE(node_id=node), run_id=5, object_id="o"),
    "confirm-message-received": lambda node: message_pb2.ConfirmMessageReceivedRequest(
        node=NODE(node_id=node), run_id=5, message_object_id="o"
    ),
}


@pytest.mark.parametrize("route", NAMED)
def test_a_hospital_asks_as_its_own_node_alone(tmp_path: Path, route: str) -> None:
    own, other = (NAMED[route](node).SerializeToString() for node in (NORTH, SOUTH))
    assert said_to_superlink(tmp_path, own, route=route) == (200, [own])
    assert said_to_superlink(tmp_path, other, route=route) == (403, [])


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 400))
@example(b" \x00\xaa\x00\x18\x00\x00", 0)  # these bytes swallow the node's name, and a nameless push is refused
def test_a_push_that_passes_means_the_same_to_flower_and_to_the_gateway(noise: bytes, place: int) -> None:
    """Flower's own parser reads every request that passes. Random bytes in an honest push change no sender."""
    honest = pushed(metadata())
    body = honest[:place] + noise + honest[place:]
    with contextlib.suppress(Refused):
        check_sender("push-messages", body, node_id=NORTH)
        try:
            read = fleet_pb2.PushMessagesRequest.FromString(body)
        except DecodeError:  # Flower refuses it
            return
        assert read.node.node_id == NORTH or (read.node.node_id == 0 and not read.messages_list)
        for message in read.messages_list:
            assert message.metadata.src_node_id == NORTH
            assert (message.metadata.dst_node_id, bool(message.metadata.reply_to_message_id)) == (SERVER, True)
        assert (len(read.messages_list), len(read.message_object_trees)) == (1, 1)
        tree, names = read.message_object_trees[0], []
        while True:
            names.append(tree.object_id)
            if not tree.children:
                break
            (tree,) = tree.children
        assert len(names) in (1, 3)
        assert names[0] == read.messages_list[0].metadata.message_id
