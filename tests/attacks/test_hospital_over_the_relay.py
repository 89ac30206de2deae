"""Tests one attacking hospital in a run of this process: real core, relay and workers over Flower's own
handlers.

There are no daemons. Whatever it replies, the run ends with the others' answers and names it.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.supercore.task_identity import TaskIdentity

from common.config import CollectionConfig
from common.envelope import body_of
from common.messages import CodesRequest
from common.wire import from_message
from server.aggregation.core import RelayTransport
from server.aggregation.relay import FrameKind, RelayFrame, send
from server.app import relay
from server.operations import storage
from tests.attacks.link import Link, chain, flower_object, named
from tests.federation import Federation, make_study, part

pytestmark = pytest.mark.slow

Attack = Callable[[Link, int, str, bytes], object]


def missing_child(link: Link, node: int, question: str, reply: bytes) -> None:
    link.reply(node, question, link.objects(node, question, reply)[:1])


def never_comes(link: Link, node: int, question: str, reply: bytes) -> None:
    link.reply(node, question, link.objects(node, question, reply), keep_back=1)


def another_kind(link: Link, node: int, question: str, reply: bytes) -> None:
    objects = link.objects(node, question, reply)
    objects[2] = flower_object("Array", [], secrets.token_bytes(99))
    objects[1] = flower_object("RecordDict", [named(objects[2])], b'{"consilium": "%s"}' % named(objects[2]).encode())
    objects[0] = flower_object("Message", [named(objects[1])], secrets.token_bytes(99))
    link.reply(node, question, objects)


def flood(link: Link, node: int, question: str, reply: bytes) -> None:
    for _ in range(16):
        link.reply(node, question, link.objects(node, question, secrets.token_bytes(60 << 10)))
    for number in range(50):
        root, *rest = f"{number + 1:064x}", secrets.token_hex(32), secrets.token_hex(32)
        metadata = link.metadata(node, question, message_id=root)
        link.announce(node, metadata, chain(root, *rest))


ATTACKS: tuple[Attack, ...] = (missing_child, never_comes, another_kind, flood)


class Nodes:
    """Stands in for Flower's Grid: every node answers at once, the first one as the attack defines."""

    def __init__(self, federation: Federation, link: Link, attack: Attack) -> None:
        self.federation, self.link, self.attack = federation, link, attack
        self.rogue = federation.sites[0].node_id

    def get_node_ids(self) -> list[int]:
        return list(self.federation.workers)

    def push_messages(self, messages: list[Any]) -> list[str]:
        return [self._asked(message) for message in messages]

    def _asked(self, message: Any) -> str:
        node, body = message.metadata.dst_node_id, from_message(message)
        question = self.link._pushed(message)
        reply = self.federation.workers[node].answer(body)
        if node == self.rogue and part(body_of(body), CodesRequest):
            self.attack(self.link, node, question, reply)
        else:
            assert all(self.link.reply(node, question, self.link.objects(node, question, reply)))
        return question


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    collection = CollectionConfig(batch_size=3, offer_deadline_s=600, deadline_s=600, patience_s=2)
    with Federation(tmp_path / "fed", study=replace(make_study(), collection=collection), sites=3) as made:
        yield made


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_run_ends_with_the_honest_answers_and_names_the_hospital(
    federation: Federation,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    attack: Attack,
) -> None:
    monkeypatch.setattr(storage, "MAX_BYTES", 200 << 10)
    caplog.set_level("WARNING", "flwr")
    link = Link(tmp_path / "superlink.db")
    nodes = {site.node_id: link.node(site.name) for site in federation.sites}
    federation.sites = tuple(replace(site, node_id=nodes[site.node_id]) for site in federation.sites)
    for old, new in nodes.items():
        federation.workers[new] = federation.workers.pop(old)
    monkeypatch.setattr(TaskIdentity, "_task_id", link.task.task_id)
    monkeypatch.setattr(TaskIdentity, "_run_id", link.run)
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    core, serverapp = socket.socketpair()
    grid: Any = Nodes(federation, link, attack)
    thread = threading.Thread(target=relay, args=(serverapp, grid, link), daemon=True)
    thread.start()
    started, empty = time.monotonic(), link.size()
    federation.core().run(RelayTransport(core))
    send(core, RelayFrame(FrameKind.END))
    thread.join(600)
    core.close()
    serverapp.close()
    answers = federation.core().answers()
    assert len(answers) == 6
    assert [len(answer.roster) for answer in answers] == [3, 3, 3, 2, 2, 2]  # the run waits for the rogue site once
    assert {(event["site"], event["reason"]) for event in federation.events("reply-missing")} == {
        ("site-0", "unsigned" if attack is flood else "malformed"),  # the flood arrives complete but unsigned
        ("site-0", "patience"),
    }
    assert {event["site"] for event in federation.events("reply-received")} == {"site-1", "site-2"}
    assert link.size() - empty < 8 << 20
    assert time.monotonic() - started < 120
