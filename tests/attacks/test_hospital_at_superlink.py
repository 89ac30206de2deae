"""Attack: an admitted hospital misuses what it may announce, push and store at SuperLink.

| attack | defence |
|---|---|
| its reply names an object that it does not send, or is malformed | each reply is read by itself, strictly |
| it announces an object and never sends it | nobody waits; after two minutes the reply counts as malformed |
| it announces trees of thousands of objects repeatedly | one reply for each request, three objects for each reply |
| it fills SuperLink's disk | each node has a quota; the objects of a run are deleted after its end |
| it keeps the database busy | transactions run one after another, in the order of the requests |
"""

from __future__ import annotations

import contextlib
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.proto import fleet_pb2, message_pb2, node_pb2
from flwr.supercore import sql_mixin
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.grid.http_grid import HttpGrid
from flwr.superlink.servicer.fleet import fleet_handlers
from hypothesis import given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from common.errors import InvalidInput
from common.wire import KINDS, body_in, to_record
from server.aggregation.inbox import READ_S, Inbox, superlink_calls
from server.operations import storage
from tests.attacks.link import Link, Tree, chain, flower_object, named

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Link:
    return Link(tmp_path_factory.mktemp("link") / "superlink.db")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Link:
    """Return SuperLink as Flower ships it, without our quota."""
    return Link(tmp_path_factory.mktemp("bare") / "superlink.db", quota=False)


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "flwr")


# --- what is read of it


def inbox(link: Link, **settings: Any) -> Inbox:
    """Return an inbox for the replies to all requests since the last call."""
    sent, link.sent = link.sent, {}
    return Inbox(link, sent, **settings)


Objects = list[bytes]


def missing_child(link: Link, node: int, question: str) -> Objects:
    (root, *_) = link.objects(node, question, b"x")
    return [root]


def instead_of(place: int, made: Callable[[Objects], bytes]) -> Callable[[Link, int, str], Objects]:
    """Return an honest reply with another object at ``place``, and a root that names the changed objects."""

    def attack(link: Link, node: int, question: str) -> Objects:
        objects = link.objects(node, question, b"x")
        objects[place] = made(objects)
        for above in reversed(range(place)):
            _, _, body = objects[above].partition(b"\0")
            if above == 1:
                body = b'{"consilium": "%s"}' % named(objects[2]).encode()
            objects[above] = flower_object(KINDS[above], [named(objects[above + 1])], body)
        return objects

    return attack


def entries(count: int) -> bytes:
    """Return the body of a ConfigRecord with this many values."""
    return b"".join(b"\x0a\x0d\x0a\x07%07d\x12\x02\x10\x01" % number for number in range(count))


UNREADABLE: dict[str, Callable[[Link, int, str], Objects]] = {
    "a missing child": missing_child,
    "another kind below": instead_of(2, lambda objects: flower_object("Array", [], b"x")),
    "a kind nobody has": instead_of(2, lambda objects: flower_object("CustomDataClass", [], b"x")),
    "ten thousand values": instead_of(2, lambda objects: flower_object("ConfigRecord", [], entries(10_000))),
    "two values": instead_of(2, lambda objects: flower_object("ConfigRecord", [], entries(1) + entries(1))),
    "a value that is a number": instead_of(2, lambda objects: flower_object("ConfigRecord", [], entries(1))),
    "an empty record": instead_of(2, lambda objects: flower_object("ConfigRecord")),
    "a record of another name": instead_of(
        1,
        lambda objects: flower_object(
            "RecordDict", [named(objects[2])], b'{"other": "%s"}' % named(objects[2]).encode()
        ),
    ),
    "no JSON": instead_of(1, lambda objects: flower_object("RecordDict", [named(objects[2])], b"\xff" * 64)),
    "deep JSON": instead_of(1, lambda objects: flower_object("RecordDict", [named(objects[2])], b"[" * 900)),
    "a root that is no message": lambda link, node, question: link.objects(node, question, b"x")[1:],
    "a message with neither child nor error": lambda link, node, question: [flower_object("Message", [], b"")],
    "a message that is no protobuf": lambda link, node, question: [flower_object("Message", [], b"\xff" * 40)],
    "a message of a megabyte": instead_of(
        0, lambda objects: flower_object("Message", [named(objects[1])], bytes(1 << 20))
    ),
}


@pytest.mark.parametrize("attack", UNREADABLE)
def test_an_unreadable_reply_counts_against_its_site_only_and_the_others_are_read(bare: Link, attack: str) -> None:
    north, south, east = (bare.node(name) for name in ("north", "south", "east"))
    questions = {node: bare.ask(node) for node in (north, south, east)}
    for node in (north, east):
        bare.reply(node, questions[node], bare.objects(node, questions[node], b"%d" % node))
    assert all(bare.reply(south, questions[south], UNREADABLE[attack](bare, south, questions[south])))
    box = inbox(bare)
    heard = dict(box.arrived())
    assert heard == {north: b"%d" % north, east: b"%d" % east, south: "malformed"}
    assert list(box.arrived()) == []


def test_flowers_own_reader_fails_at_a_missing_child_and_reads_no_reply(bare: Link) -> None:
    """This shows that the attack works: without the inbox it ends the ServerApp."""
    north, south = bare.node("north"), bare.node("south")
    question, other = bare.ask(north), bare.ask(south)
    bare.reply(south, other, bare.objects(south, other, b"honest"))
    bare.reply(north, question, missing_child(bare, north, question))
    grid = HttpGrid(token="t")
    grid._client, grid._run = bare, SimpleNamespace(run_id=bare.run)  # type: ignore[assignment]
    assert superlink_calls(grid) is bare
    with pytest.raises(KeyError):
        grid.pull_messages([question, other])
    bare.sent.clear()


@pytest.mark.parametrize("kept_back", [1, 2, 3])
def test_an_object_that_never_comes_delays_nobody_and_is_malformed_in_the_end(bare: Link, kept_back: int) -> None:
    clock = [0.0]
    north, south = bare.node("north"), bare.node("south")
    question, other = bare.ask(north), bare.ask(south)
    objects = bare.objects(north, question, b"of this test alone %d" % kept_back)
    bare.reply(north, question, objects, keep_back=kept_back)
    box = inbox(bare, clock=lambda: clock[0])
    started = time.monotonic()
    assert list(box.arrived()) == []
    bare.reply(south, other, bare.objects(south, other, b"honest"))
    clock[0] = READ_S - 1
    assert list(box.arrived()) == [(south, b"honest")]
    assert time.monotonic() - started < 30.0  # 187 s before
    clock[0] = READ_S
    assert list(box.arrived()) == [(north, "malformed")]
    assert list(box.arrived()) == []


def test_an_incomplete_reply_is_malformed_when_it_is_asked_for_the_last_time(bare: Link) -> None:
    north, south = bare.node("north"), bare.node("south")
    question, _ = bare.ask(north), bare.ask(south)
    bare.reply(north, question, bare.objects(north, question, secrets.token_bytes(9)), keep_back=1)
    box = inbox(bare)
    assert list(box.arrived()) == []
    assert list(box.arrived(last=True)) == [(north, "malformed")]  # the other site is only known to be silent


@pytest.mark.parametrize("turns", [0, 1])
def test_a_reply_of_which_superlink_refused_an_object_is_malformed_at_once(link: Link, turns: int) -> None:
    """The number of objects already read makes no difference."""
    north = link.node("north")
    question = link.ask(north)
    objects = link.objects(north, question, secrets.token_bytes(9))
    objects[2] = flower_object("Array", [], secrets.token_bytes(9))
    objects[1] = flower_object("RecordDict", [named(objects[2])], b'{"consilium": "%s"}' % named(objects[2]).encode())
    objects[0] = flower_object("Message", [named(objects[1])], secrets.token_bytes(9))
    session = link.announce(
        north, link.metadata(north, question, message_id=named(objects[0])), chain(*map(named, objects))
    )
    box = Inbox(link, {question: north})
    for _ in range(turns):
        assert list(box.arrived()) == []
        assert all(link.put(north, content, session=session.session_id) for content in objects[:2])
        assert list(box.arrived()) == []
    assert not link.put(north, objects[2], session=session.session_id)
    assert list(box.arrived()) == [(north, "malformed")]


def test_a_reply_that_comes_in_pieces_is_read_once_it_is_whole(bare: Link) -> None:
    north = bare.node("north")
    question = bare.ask(north)
    objects = bare.objects(north, question, b"late")
    box = inbox(bare)
    answer = bare.announce(
        north, bare.metadata(north, question, message_id=named(objects[0])), chain(*map(named, objects))
    )
    for content in objects:
        assert list(box.arrived()) == []
        assert bare.put(north, content, session=answer.session_id)
    assert list(box.arrived()) == [(north, b"late")]
    assert all(named(content) not in bare.store for content in objects)


def test_flowers_error_for_a_node_that_left_is_reported_by_its_code(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    north = link.node("north")
    question = link.ask(north)
    link.state.deactivate_node(north)
    assert list(Inbox(link, {question: north}).arrived()) in ([], [(north, "flower-5")])


class Failing:
    """Stands in for a SuperLink that answers 500 to any request for the replies to these messages."""

    def __init__(self, link: Link, *questions: str) -> None:
        self.link, self.questions = link, questions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.link, name)

    def PullMessages(self, request: Any) -> Any:  # noqa: N802
        if set(request.message_ids) & set(self.questions):
            raise httpx.HTTPStatusError("500", request=httpx.Request("POST", "https://s"), response=httpx.Response(500))
        return self.link.PullMessages(request)


def test_a_reply_that_superlink_cannot_deliver_is_malformed_for_its_site_only(bare: Link) -> None:
    north, south = bare.node("north"), bare.node("south")
    question, other = bare.ask(north), bare.ask(south)
    bare.reply(south, other, bare.objects(south, other, b"honest"))
    assert sorted(Inbox(Failing(bare, question), {question: north, other: south}).arrived(), key=str) == sorted(
        [(south, b"honest"), (north, "malformed")], key=str
    )


def test_an_error_of_superlink_itself_is_blamed_on_no_site(bare: Link) -> None:
    north = bare.node("north")
    question = bare.ask(north)
    bare.reply(north, question, bare.objects(north, question, b"honest"))
    post = Failing(bare, question)
    box = Inbox(post, {question: north})
    assert list(box.arrived()) == []
    post.questions = ()
    assert list(box.arrived()) == [(north, b"honest")]


@given(st.binary(max_size=400))
def test_a_body_that_flower_wrote_is_read_back(body: bytes) -> None:
    objects = [content.deflate() for content in get_all_nested_objects(to_record(body)).values()]
    config, record = objects
    root = flower_object("Message", [named(record)], b"x")
    assert body_in([root, record, config], [named(root), named(record), named(config)]) == body


@settings(max_examples=100)
@given(st.binary(max_size=300), st.sampled_from(KINDS), st.integers(0, 2))
def test_any_other_bytes_in_place_of_an_object_are_refused(junk: bytes, kind: str, place: int) -> None:
    config, record = (content.deflate() for content in get_all_nested_objects(to_record(b"x")).values())
    objects = [flower_object("Message", [named(record)], b"x"), record, config]
    objects[place] = flower_object(kind, [], junk) if len(junk) % 2 else junk
    with pytest.raises(InvalidInput):
        body_in(objects, [named(content) for content in objects])


# --- what it may announce


def names(count: int) -> list[str]:
    return [f"{number:064x}" for number in range(1, count + 1)]


def stored(link: Link) -> int:
    return len(link.store)


TREES: dict[str, Callable[[str], list[Tree]]] = {
    "fourteen thousand names": lambda root: [Tree(object_id=root, children=[Tree(object_id=n) for n in names(14_000)])],
    "a row of four": lambda root: [chain(root, *names(3))],
    "a row of two": lambda root: [chain(root, *names(1))],
    "a row of ninety": lambda root: [chain(root, *names(89))],
    "two records": lambda root: [
        Tree(object_id=root, children=[Tree(object_id=names(1)[0], children=[Tree(object_id=n) for n in names(3)[1:]])])
    ],
    "the same name twice": lambda root: [chain(root, names(1)[0], names(1)[0])],
    "another root": lambda root: [chain(*names(3))],
    "two trees": lambda root: [chain(root, *names(2)), chain(*names(3))],
    "no tree": lambda root: [],
}


@pytest.mark.parametrize("trees", TREES)
def test_superlink_registers_one_tree_of_one_shape_a_reply_and_nothing_of_any_other(link: Link, trees: str) -> None:
    north = link.node("north")
    question = link.ask(north)
    before = stored(link)
    root = "f" * 64
    request = fleet_pb2.PushMessagesRequest(
        node=node_pb2.Node(node_id=north),
        messages_list=[message_pb2.Message(metadata=link.metadata(north, question, message_id=root))],
        message_object_trees=TREES[trees](root),
    )
    answer = link.push_messages(request, link.state)
    assert (list(answer.objects_to_push), answer.session_id) == ([], "")
    assert stored(link) == before


def test_one_question_has_one_reply_however_often_it_is_announced(link: Link) -> None:
    """Flower alone accepts a reply that is announced again, with other objects. Consilium refuses it."""
    north = link.node("north")
    question = link.ask(north)
    objects = link.objects(north, question, b"x")
    assert all(link.reply(north, question, objects))
    before, rows = stored(link), sessions(link)
    for number in range(10):
        metadata = link.metadata(north, question, message_id=named(objects[0]))
        with pytest.raises(ValueError):
            link.announce(
                north, metadata, chain(named(objects[0]), *(f"{2 * number + extra:064x}" for extra in (1, 2)))
            )
        other = link.metadata(north, question, message_id=f"{number:064x}")
        assert not link.announce(north, other, chain(f"{number:064x}", *names(2))).session_id
    assert (stored(link), sessions(link)) == (before, rows)


def sessions(link: Link) -> int:
    with sqlite3.connect(link.path) as database:
        return int(database.execute("SELECT COUNT(*) FROM object_push_sessions").fetchone()[0])


def test_a_node_pushes_what_it_announced_and_nothing_of_another_kind_or_child(link: Link) -> None:
    north, south = link.node("north"), link.node("south")
    question = link.ask(north)
    wrong = [
        flower_object("Message", [named(b"elsewhere")], b"x"),
        flower_object("RecordDict", [], b"{}"),
        b"ConfigRecord " + b"," * 100_000 + b" 0\0",
    ]
    assert link.reply(north, question, wrong) == [False, False, False]
    other = link.ask(north, b"again")
    objects = link.objects(north, other, b"of this test alone")
    metadata = link.metadata(north, other, message_id=named(objects[0]))
    session = link.announce(north, metadata, chain(*map(named, objects))).session_id
    assert not link.put(south, objects[2], session=session)  # another node that learned the session's id
    assert not link.put(north, objects[2], session="")
    assert not link.put(north, b"ConfigRecord  1\0y", session=session, name=named(objects[2]))
    assert [link.put(north, content, session=session) for content in objects] == [True, True, True]


# --- what it may keep


def test_a_node_stores_no_more_than_its_quota_and_the_others_go_on(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen replies of 60 KiB are sent, with a quota of 200 KiB. At full size, the attack stored 1,084 MiB."""
    monkeypatch.setattr(storage, "MAX_BYTES", 200 << 10)
    north, south = link.node("north"), link.node("south")
    empty = link.size()
    taken = 0
    for number in range(16):
        question = link.ask(north, b"%d" % number)
        taken += all(
            link.reply(north, question, link.objects(north, question, secrets.token_bytes(60 << 10))) or [False]
        )
    assert taken == 3
    assert link.size() - empty < 4 << 20  # including SQLite's write-ahead log
    question = link.ask(south)
    assert all(link.reply(south, question, link.objects(south, question, b"y" * (60 << 10))))


def test_names_alone_are_counted_too(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "MAX_OBJECTS", 30)
    north = link.node("north")
    announced = 0
    for number in range(30):
        question = link.ask(north, b"%d" % number)
        root, *rest = (f"{3 * number + extra:064x}" for extra in (1, 2, 3))
        metadata = link.metadata(north, question, message_id=root)
        announced += bool(link.announce(north, metadata, chain(root, *rest)).session_id)
    assert announced == 10


def test_objects_that_were_read_or_came_too_late_do_not_count_against_the_quota(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_BYTES", 100 << 10)
    north = link.node("north")
    for number in range(5):
        question = link.ask(north, b"%d" % number)
        assert all(link.reply(north, question, link.objects(north, question, secrets.token_bytes(60 << 10))))
        assert [len(body) for _, body in Inbox(link, {question: north}).arrived()] == [60 << 10]
    for number in range(3):
        question = link.ask(north, b"late %d" % number)
        objects = link.objects(north, question, secrets.token_bytes(60 << 10))
        metadata = link.metadata(north, question, message_id=named(objects[0]))
        session = link.announce(north, metadata, chain(*map(named, objects))).session_id
        assert all(link.put(north, content, session=session) for content in objects)
        link.expire(question)


def test_a_runs_objects_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SWEEP_S", 0.0)
    link = Link(tmp_path / "superlink.db")
    north = link.node("north")
    question = link.ask(north)
    assert all(link.reply(north, question, link.objects(north, question, b"x" * 1000)))
    link.handlers.sweep(link.state)
    assert stored(link) == 6
    link.end_run()
    link.handlers.sweep(link.state)
    assert stored(link) == 0
    link.run = link.start_run()
    question = link.ask(north)
    assert all(link.reply(north, question, link.objects(north, question, b"x" * 1000)))


@pytest.mark.parametrize("in_turn", [True, False], ids=["ours", "flowers"])
def test_nobody_is_told_that_the_database_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_turn: bool
) -> None:
    """One transaction takes longer than SQLite lets another wait: 5 s in production, 50 ms here."""
    pragmas = [("busy_timeout", "50"), *sql_mixin.SQLITE_PRAGMAS[1:]]
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", pragmas)
    if in_turn:
        session = storage.in_turn(SqlMixin.session, storage.Turns())
        monkeypatch.setattr(SqlMixin, "session", session)
    link = Link(tmp_path / "superlink.db")
    north, south = link.node("north"), link.node("south")
    writing, over = threading.Event(), threading.Event()

    def write() -> None:
        with link.state.session():
            link.state.acknowledge_node_heartbeat(north, 30.0)
            writing.set()
            over.wait(600)

    thread = threading.Thread(target=write)
    thread.start()
    assert writing.wait(600)
    threading.Timer(0.5, over.set).start()
    with contextlib.nullcontext() if in_turn else pytest.raises(OperationalError, match="database is locked"):
        assert link.state.acknowledge_node_heartbeat(south, 30.0)
    over.set()
    thread.join()


def test_transactions_run_in_the_order_of_their_requests() -> None:
    turns = storage.Turns()
    order: list[int] = []

    def work(number: int) -> None:
        with turns.turn():
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    with turns.turn():
        for number, thread in enumerate(threads):
            thread.start()
            while len(turns._waiting) < number + 2:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join()
    assert order == list(range(8))


# --- the server's clock


@pytest.mark.parametrize("ahead_s", [0.0, 3600.0, 2 * 365 * 86400.0])
def test_a_node_that_was_killed_while_the_clock_was_ahead_connects_after_the_clock_is_right(
    link: Link, monkeypatch: pytest.MonkeyPatch, ahead_s: float
) -> None:
    key = secrets.token_bytes(32)
    node = link.state.create_node("a", "a", key, 30.0)
    request = fleet_pb2.ActivateNodeRequest(public_key=key, heartbeat_interval=30.0)
    installed = SimpleNamespace(**vars(fleet_handlers))
    monkeypatch.setattr(storage, "fleet_handlers", installed)
    monkeypatch.setattr(storage, "SqlMixin", SimpleNamespace(session=None))
    storage.install()
    installed.activate_node(request, link.state)
    with link.state.session() as session:
        row = {"ahead": ahead_s, "node": uint64_to_int64(node)}
        session.execute(text("UPDATE node SET online_until = online_until + :ahead WHERE node_id = :node"), row)
    if ahead_s:
        assert installed.activate_node(request, link.state).node_id == node
    with pytest.raises(FlowerError, match="could not be activated"):  # a second node with this key is still refused
        installed.activate_node(request, link.state)
