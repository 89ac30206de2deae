"""Attack: a malicious server or hospital signs malformed messages.

| attack | defence |
|---|---|
| a malformed message ends a worker, or a run of all sites | every field has limits; a bad reply counts as silence |
| a refused message still charges a budget | a message is checked as a whole before it has any effect |
| refused messages fill a site's disk with rows | one row a day for each study and reason; evidence has a quota |
| a short message becomes large in memory | its bytes and values are counted before it is parsed |

Messages are made from valid ones by changing their structure, or their bytes, by a seed that hypothesis chooses.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import logging
import os
import random
import re
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from client.app import _timeout_s
from client.ledger.site_codes import KEYS_A_CHARGE
from client.ledger.site_ledger import SiteLedger
from client.witnessing import Witnessing
from common.canonical import canonical_bytes
from common.codecs.codec import load_codec
from common.config import CollectionConfig
from common.envelope import body_of, sign_reply, sign_request
from common.errors import ConsiliumError, InvalidInput, QuorumNotReached
from common.events import EventLog
from common.ledger.rows import head_message
from common.masking import Member
from common.messages import (
    MAX_MESSAGE_BYTES,
    MAX_MESSAGE_VALUES,
    CodesReply,
    CodesRequest,
    Offer,
    OfferReply,
    Part,
    Receipts,
    ReceiptsReply,
    Several,
    WitnessRequest,
    decode,
    encode,
)
from common.peers import Peer
from common.protocols.frame import Frame
from common.witness.notes import origin_of
from consilium.in_process import Wire
from server.aggregation.exchange import Reply
from server.aggregation.witnessing import Witnesses
from tests.attacks.costs import peak_bytes
from tests.federation import Federation, make_study, part
from tests.worlds import receipts_of

pytestmark = pytest.mark.slow

HEADS = ("witness", "witness-reply")
KINDS = ("offer", "offer-reply", "codes", "codes-reply", "receipts", "receipts-reply", "several", *HEADS)
SEALED_KINDS = ("offer", "offer-reply", "codes", "codes-reply", "several", *HEADS)
"""The messages that differ in a sealed sum."""
CASES = [("open", kind) for kind in KINDS] + [("sealed", kind) for kind in SEALED_KINDS]

CAUSES = ("budget", "paused", "released-before")
"""Reasons for each of which a site's ledger may add one row a day, after any number of messages. In a sealed sum it
also adds some mask keys for each charge.
"""

THOROUGH = int(os.environ.get("CONSILIUM_FUZZ", "0"))
"""Messages of each kind; `make test-fuzz` sends 20,000."""

BATCH, FEW = 250, 40
"""Number of messages made from one seed, in the slow tests and in the fast ones."""

LONGEST = 1 << 17

SECONDS, BYTES_PER_SECOND = 0.5, 1 << 19
"""A message may take this many seconds of processor time, and a second more for each ``BYTES_PER_SECOND`` bytes."""

MEMORY_BYTES = 16 << 20
"""Largest peak of memory for a batch of messages."""

INTEGERS = [sign * (2**bits + near) for bits in (0, 8, 31, 32, 53, 63) for near in (-1, 0, 1) for sign in (1, -1)]
INTEGERS += [0, 500, 501, 10**6, 10**6 + 1, 604_800, 604_801, 10**40, 10**400]
TEXTS = ["", "\0", "a" * 63, "a" * 64, "0" * 64, "A" * 64, "g" * 64, "é" * 64, "\U0001f600", "../../x", "zero", "codec"]
TEXTS += ["accepted", "offer", "several", "1/1", "1/0", "-1/1", "7" * 4_200 + "/1", "1/" + "9" * 3_999, "x" * 100_000]
TEXTS += ["\\ud800", "=" * 8, "AAAA", '{"schema":1}', "[" * 2_000]
VALUES: list[Any] = [None, True, False, [], {}, [[]], [{}], 1.5, *INTEGERS, *TEXTS]


def deep(levels: int, *, mapping: bool) -> str:
    """Return a placeholder for lists or mappings nested this deep, which no encoder would write."""
    return f"<{'m' if mapping else 'l'}{levels}>"


def longer(document: Any, *, than: int) -> bool:
    """Return whether the document has more characters and values than a limit; stop counting there."""
    left, waiting = than, [document]
    while waiting and left >= 0:
        value = waiting.pop()
        left -= len(value) if isinstance(value, str | list | dict) else 1
        if left >= 0 and isinstance(value, list | dict):
            waiting.extend(value if isinstance(value, list) else (*value, *value.values()))
    return left < 0


def _deepened(found: re.Match[bytes]) -> bytes:
    levels = int(found[2])
    return b'{"a":' * levels + b"0" + b"}" * levels if found[1] == b"m" else b"[" * levels + b"]" * levels


@dataclass(frozen=True)
class Mutator:
    """Changes a valid message of one kind. Parts may be taken from the ``documents`` of other kinds."""

    kind: str
    documents: Mapping[str, dict[str, Any]]
    random: random.Random

    def message(self) -> bytes:
        """Return a message of at most :data:`LONGEST` bytes, because a longer one takes time by its length alone."""
        while (made := self._message()) is None or len(made) > LONGEST:
            pass
        return made

    def _message(self) -> bytes | None:
        """Return a changed message; None if it is too long to be written, as nested repetitions can be."""
        if self.random.random() < 0.25:
            return self.spoilt(self.written(self.documents[self.kind]))
        document: Any = copy.deepcopy(self.documents[self.kind])
        for _ in range(self.random.choice((1, 1, 1, 2, 5))):
            document = self.changed(document)
            if longer(document, than=8 * LONGEST):
                return None
        return self.written(document)

    def written(self, document: Any) -> bytes:
        """Encode as :func:`canonical_bytes` does, but also values that it refuses."""
        text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return re.sub(rb'"<([lm])(\d+)>"', _deepened, text.encode())

    def spoilt(self, data: bytes) -> bytes:
        """Cut or double the bytes, exchange some of them, or leave them as they are."""
        draw, spoilt = self.random, bytearray(data)
        match draw.randrange(6):
            case 0:
                return bytes(spoilt[: draw.randrange(len(spoilt))])
            case 1:
                return data + data
            case 2:
                return draw.randbytes(draw.choice((0, 1, 63, 1_000)))
            case 3:
                return draw.choice((b"[", b'{"a":', b"0", b'"', b"\xff")) * draw.choice((1, 2_000, 20_000))
            case 4:
                place = draw.randrange(len(spoilt))
                return (
                    data[:place] + draw.choice(("\U0001f600", "\0", "null", "-0", "1e9", "NaN")).encode() + data[place:]
                )
            case _:
                for _ in range(draw.choice((1, 1, 8))):
                    spoilt[draw.randrange(len(spoilt))] = draw.randrange(256)
                return bytes(spoilt)

    def changed(self, document: Any) -> Any:
        """Return the message with one change: another value, another key, or an item repeated."""
        draw = self.random
        holder, last = None, None
        inner = document
        while isinstance(inner, dict | list) and inner and (holder is None or draw.random() < 0.7):
            holder = inner
            last = draw.choice(list(holder)) if isinstance(holder, dict) else draw.randrange(len(holder))
            inner = holder[last]
        if holder is None or draw.random() < 0.02:
            return draw.choice(([document], copy.deepcopy(draw.choice(VALUES))))
        match draw.randrange(9):
            case 0 | 1 | 2 | 3:
                holder[last] = copy.deepcopy(draw.choice(VALUES))
            case 4:
                holder[last] = deep(draw.choice((10, 400, 700, 900)), mapping=draw.random() < 0.5)
            case 5 if isinstance(holder, list):
                holder.extend(holder[last : last + 1] * draw.choice((1, 2, 500, 3_000)))
            case 5:
                holder[draw.choice(("", "x", "kind", "schema", "parts"))] = copy.deepcopy(draw.choice(VALUES))
            case 6:
                del holder[last]
            case 7:
                holder[last] = [holder[last]] * draw.choice((0, 1, 2, 501))
            case _:
                holder[last] = copy.deepcopy(draw.choice(list(self.documents.values())))
        return document


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Switch logging off, because a log line for each message would take most of the time and memory."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class World:
    """Holds a federation that is attacked repeatedly, and valid messages of every kind to start from."""

    def __init__(self, root: Path, mode: str = "open", *, spare_draws: int = 2) -> None:
        sealed = mode == "sealed"
        terms = {"aggregation": "sealed-sum", "spare_draws": spare_draws} if sealed else {}
        study = make_study(quorum=3, collection=CollectionConfig(batch_size=3), **terms)
        self.fed = Federation(root, study=study)
        fed = self.fed
        for site in fed.sites:
            worker = fed.workers[site.node_id]
            worker._witness = Witnessing(
                root / site.name / "witnesses",
                site=site.name,
                ledger=fed.site_ledgers[site.name],
                server_keys=worker._config.server.signing_public_keys,
            )
        fed.core(fed.planned()[:2]).run(fed.transport)  # this makes receipts to start from
        open_queries = fed.core().open_queries()
        receipts = tuple(found.render() for found in receipts_of(fed.ledger, "site-1", after=0))
        head = receipts_of(fed.ledger, "site-1", after=0)[-1].head
        draw: dict[str, Any] = {}  # a sealed sum's second draw, so that the core must ask for a third
        if sealed:
            draw = {"draw": 2, "peers": tuple(Peer(site.name, site.answer_key) for site in fed.sites)}
        replies = {
            site.name: decode(fed.workers[site.node_id].handle(encode(fed.offer(open_queries[:2], **draw))))
            for site in fed.sites
            if sealed or site.name == "site-1"
        }
        reply, request = replies["site-1"], fed.request(open_queries[:2])
        assert isinstance(reply, OfferReply)
        assert reply.reason == "accepted"
        if sealed:
            own = ((name, said.mask) for name, said in replies.items() if isinstance(said, OfferReply))
            members = tuple(Member(name, mask) for name, mask in own if mask is not None)
            request = fed.request(open_queries[:2], draw=2, members=members)
        codes = decode(fed.workers[101].handle(encode(request)))
        assert isinstance(codes, CodesReply)
        parts = (Receipts(fed.ledger.ledger_id, receipts), request, fed.offer(open_queries, **draw))
        made = {
            "offer": parts[2],
            "offer-reply": reply,
            "codes": parts[1],
            "codes-reply": codes,
            "receipts": parts[0],
            "receipts-reply": ReceiptsReply(head.seq, head.hash),
            "several": Several(parts),
            **dict(zip(HEADS, self.heads_said(), strict=True)),
        }
        self.documents = {kind: json.loads(encode(message)) for kind, message in made.items()}

    def witnesses(self) -> Witnesses:
        """Return the server's half of a round of countersigning."""
        fed = self.fed
        events = EventLog(fed.events_file, study=fed.study.id)
        return Witnesses(fed.root / "witnesses", study=fed.study.id, ledger=fed.ledger, events=events)

    def heads_said(self) -> tuple[Part, Part]:
        """Return the requests about heads that site-1 gets at the end of a round, with its peers' heads, and its
        replies.
        """
        asked: list[tuple[Part, Part]] = []

        def heard(node: int, body: bytes, reply: bytes) -> bytes:
            if node == 101:
                asked.append((decode(body), decode(reply)))  # type: ignore[arg-type]
            return reply

        self.witnesses().ask(self.fed.sites, Wire(self.fed.workers, intercept=heard))
        return asked[-1]

    def messages(self, kind: str, seed: int, *, number: int = BATCH) -> list[bytes]:
        """Return a batch of changed messages; a seed always gives the same batch."""
        maker = Mutator(kind, self.documents, random.Random(seed))
        return [maker.message() for _ in range(number)]


def seeds(number: int) -> Callable[[Any], Any]:
    """Return this many seeds, each of which makes a batch of messages."""

    def decorate(test: Any) -> Any:
        quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
        limited = settings(
            max_examples=number,
            suppress_health_check=quiet,
            database=None,
            phases=[Phase.generate],
        )
        return limited(given(seed=st.integers(0, 2**32 - 1))(test))

    return decorate


# --- a malicious server at a worker


def attack_worker(world: World, kind: str, seed: int, *, number: int = BATCH) -> None:
    """Sign a batch of messages, let the worker answer them, and check its ledger, time and memory."""
    fed, site = world.fed, world.fed.site_ledgers["site-1"]
    rows = len(beside_mask_keys(site))
    for body in world.messages(kind, seed, number=number):
        message = sign_request(body, sign=fed.ledger.sign, site="site-1")
        before, started = site.spent(), time.thread_time()
        _timeout_s(message)  # the part that the launcher reads before the worker
        try:
            reply = fed.workers[101].answer(message)
        except ConsiliumError as error:
            reply, refusal = b"", str(error)
        except BaseException:
            note(f"{kind}: {body[:2_000]!r}")
            raise
        else:
            refusal = ""
        assert time.thread_time() - started < SECONDS + len(body) / BYTES_PER_SECOND, body[:500]
        assert len(refusal) < 2_000
        assert site.spent() == before, body[:500]
        if reply:
            decode(body_of(reply))
    memory = fed.workers[101]._witness.memory  # type: ignore[union-attr]
    # A false proof of a true head raises an alarm, and the site then reads nothing more.
    for origin in memory.conflicting():
        assert kind in ("witness", "several"), kind
        memory.forget(origin)
    assert len(beside_mask_keys(site)) - rows <= len(CAUSES)
    assert site.row_count - len(beside_mask_keys(site)) <= KEYS_A_CHARGE * site.spent().releases


def beside_mask_keys(site: SiteLedger) -> list[str]:
    """Return the kinds of a ledger's rows without those of mask keys."""
    return [row.kind for row in site.rows() if row.kind != "mask-key"]


def spent_world(root: Path, mode: str) -> World:
    """Return a federation whose study is answered in full, so that no honest message can be charged any more."""
    made = World(root, mode)
    made.fed.core().run(made.fed.transport)
    assert made.fed.core().open_queries() == ()
    return made


@pytest.fixture(scope="module")
def spent_worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, World]]:
    """Yield one federation of each kind, made when first needed. Its study is over, so no message may charge it."""
    made: dict[str, World] = {}
    yield made
    for world in made.values():
        world.fed.close()


@pytest.fixture(params=["open", "sealed"])
def spent(
    request: pytest.FixtureRequest, spent_worlds: dict[str, World], tmp_path_factory: pytest.TempPathFactory
) -> World:
    mode = request.param
    if mode not in spent_worlds:
        spent_worlds[mode] = spent_world(tmp_path_factory.mktemp("spent"), mode)
    return spent_worlds[mode]


@pytest.mark.parametrize(("spent", "kind"), CASES, indirect=["spent"])
@seeds(2)
def test_nothing_that_a_server_signs_ends_a_worker_or_is_charged(spent: World, kind: str, seed: int) -> None:
    attack_worker(spent, kind, seed, number=FEW)


@pytest.mark.slow
@pytest.mark.parametrize(("spent", "kind"), CASES, indirect=["spent"])
@seeds((THOROUGH or 1_000) // BATCH)
def test_many_messages_end_no_worker_and_charge_nothing(spent: World, kind: str, seed: int) -> None:
    attack_worker(spent, kind, seed)


@pytest.mark.parametrize("mode", ["open", "sealed"])
@pytest.mark.parametrize("kind", ["offer", "codes", "several"])
def test_what_is_charged_is_at_most_what_the_study_plans_at_its_full_price(
    tmp_path: Path, kind: str, mode: str
) -> None:
    """At first, a site may accept a changed offer within its consent, such as one about another volume."""
    world = World(tmp_path, mode)
    site, price = world.fed.site_ledgers["site-1"], world.fed.planned()[0].mechanism
    for body in world.messages(kind, seed=1, number=2 * FEW):
        with contextlib.suppress(ConsiliumError):
            world.fed.workers[101].answer(sign_request(body, sign=world.fed.ledger.sign, site="site-1"))
    spend = site.spent()
    assert spend.releases <= world.fed.study.privacy.planned_queries
    assert spend.mu_squared == spend.releases * price.mu_squared(world.fed.study.privacy.protection)
    world.fed.close()


@pytest.mark.slow
def test_a_batch_of_messages_needs_no_more_memory_than_their_size_explains(spent: World) -> None:
    messages = {kind: spent.messages(kind, seed=7) for kind in KINDS}
    for bodies in messages.values():

        def handle(bodies: list[bytes] = bodies) -> None:
            for body in bodies:
                with contextlib.suppress(ConsiliumError):
                    spent.fed.workers[101].answer(sign_request(body, sign=spent.fed.ledger.sign, site="site-1"))

        assert peak_bytes(handle) < MEMORY_BYTES


@pytest.mark.slow
def test_sixty_megabytes_of_nothing_are_counted_and_not_read() -> None:
    for piece in (b"[],", b"{},", b'"",', b"0,", b"[" * 50):
        data = b"[" + piece * ((60 << 20) // len(piece)) + b"0]"

        def read(data: bytes = data) -> None:
            with pytest.raises(InvalidInput, match=f"at most {MAX_MESSAGE_VALUES}"):
                decode(data)

        assert peak_bytes(read) < 1 << 20
    with pytest.raises(InvalidInput, match="ASCII"):
        decode('"\U0001f600"'.encode())
    with pytest.raises(InvalidInput, match="at most 67108864 bytes"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))


def signed_receipts(world: World, seed: int) -> list[bytes]:
    """Return receipts that the server signed about charges that it never made."""
    (text, *_) = world.documents["receipts"]["receipts"]
    document = json.loads(text)
    maker = Mutator("receipt", {"receipt": document}, random.Random(seed))
    made = []
    for _ in range(BATCH):
        changed = maker.message()
        with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError, InvalidInput):
            receipt = json.loads(changed)
            del receipt["signature"]
            head = receipt["head"]
            head["hash"] = maker.random.randbytes(32).hex()
            signed = head_message(head["role"], ledger_id=head["ledger_id"], seq=head["seq"], row_hash=head["hash"])
            head["signature"] = world.fed.signing_key.sign(signed).hex()
            signature = world.fed.signing_key.sign(b"consilium/receipt/v1\0" + canonical_bytes(receipt)).hex()
            changed = canonical_bytes({**receipt, "signature": signature})
        with contextlib.suppress(UnicodeDecodeError):
            made.append(encode(Receipts(world.fed.ledger.ledger_id, (changed.decode(),))))
    return made


def test_no_receipt_that_a_server_signs_ends_a_worker_charges_a_site_or_fills_its_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path)
    site, worker = world.fed.site_ledgers["site-1"], world.fed.workers[101]
    monkeypatch.setattr("client.ledger.site_receipts.MAX_EVIDENCE_BYTES_A_DAY", 20_000)
    before, size = site.spent(), sum(len(row.body) for row in site.rows())
    for seed in range(2):
        for body in signed_receipts(world, seed):
            message = sign_request(body, sign=world.fed.ledger.sign, site="site-1")
            with contextlib.suppress(ConsiliumError):
                worker.answer(message)
    assert site.spent() == before
    assert site.alarms()  # some receipts contradicted the ledger, so the site sends nothing more
    assert sum(len(row.body) for row in site.rows()) - size < 20_000 + 10_000
    world.fed.close()


# --- a malicious hospital at the core


class Flood(Wire):
    """Delivers a batch of messages signed by site-1 as its replies, before the honest replies of all sites.

    ``phase`` is the kind of request that site-1 no longer answers honestly; with None it always does in the end. With
    ``aimed`` the messages name the batch that the request is about.
    """

    fed: Federation
    bodies: list[bytes]
    phase: type[Part] | None = None
    aimed: bool = False

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        if 101 in bodies:
            request = bodies[101]
            asks = part(body_of(request), Offer) or part(body_of(request), CodesRequest)
            about = asks.batch.encode() if self.aimed and asks is not None else b"b" * 64
            for body in (body.replace(b"b" * 64, about) for body in self.bodies):
                reply = sign_reply(body, sign=self.fed.site_ledgers["site-1"].sign, site="site-1", request=request)
                yield Reply(101, reply)
                yield Reply(101, body)  # unsigned
        silent = self.phase is not None and 101 in bodies and part(body_of(bodies[101]), self.phase) is not None
        for reply in super().exchange(bodies, timeout_s=timeout_s):
            yield Reply(101, b"") if silent and reply.node_id == 101 else reply


def attack_core(world: World, kind: str, seed: int, *, phase: type[Part], number: int = BATCH) -> None:
    """Answer a message of ``phase`` with a batch of replies, and check that the unanswered study stays unchanged."""
    fed = world.fed
    sealed = fed.study.privacy.sealed
    before = fed.ledger.remaining("pool-1"), len(fed.ledger.answers(fed.study.id))
    rows, events = fed.ledger.row_count, fed.events_file.stat().st_size
    flood = Flood(fed.workers)
    flood.fed, flood.bodies, flood.phase, flood.aimed = fed, world.messages(kind, seed, number=number), phase, sealed
    started = time.thread_time()
    time_of_core = count()
    core = fed.core(clock=lambda: float(next(time_of_core)) * 100, retry_pause_s=0)
    with contextlib.suppress(QuorumNotReached):
        core.run(flood)
    assert len(fed.ledger.answers(fed.study.id)) == before[1]
    grown = [row.kind for row in fed.ledger.rows()][rows:]
    if sealed and phase is CodesRequest:  # a site that accepts and is then silent costs one draw, which is lost or open
        waits = fed.ledger.open_draws(fed.study.id)
        # Such as a note that the server accepted a site's statement.
        charged = [kind for kind in grown if kind != "note"]
        assert charged == ["release"] * charged.count("release") + ["lost-draw"] * (not waits), grown
        assert len(charged) <= fed.study.collection.batch_size + 1, grown
        assert grown.count("note") <= len(fed.workers), grown
        for draw in waits:  # the next attack starts without an open draw
            fed.ledger.lose_draw(draw, "incomplete")
    else:
        # Notes on an accepted statement and on a draw that is offered again.
        most = 2 if sealed and phase is Offer else 0
        assert (fed.ledger.remaining("pool-1"), set(grown) - {"note"}) == (before[0], set())
        assert len(grown) <= most, grown
    size = sum(map(len, flood.bodies))
    assert time.thread_time() - started < 20 * (SECONDS + size / BYTES_PER_SECOND)
    assert fed.events_file.stat().st_size - events < 4_000 * number


@pytest.fixture(scope="module")
def asking_worlds() -> Iterator[dict[str, World]]:
    """Yield one federation of each kind. After all attacks, its study is run honestly."""
    worlds: dict[str, World] = {}
    yield worlds
    for made in worlds.values():
        flood = Flood(made.fed.workers)
        flood.fed, flood.bodies = made.fed, [body for kind in KINDS for body in made.messages(kind, seed=3)[:20]]
        made.fed.core().run(flood)  # honest replies after the flood complete the study with all three sites
        assert {tuple(e.site for e in found.roster) for found in made.fed.ledger.answers(made.fed.study.id)} == {
            ("site-0", "site-1", "site-2")
        }
        assert len(made.fed.ledger.answers(made.fed.study.id)) == made.fed.study.privacy.planned_queries
        made.fed.close()


@pytest.fixture(params=["open", "sealed"])
def asking(
    request: pytest.FixtureRequest, asking_worlds: dict[str, World], tmp_path_factory: pytest.TempPathFactory
) -> World:
    """Return a federation in the middle of its study, whose quorum is all three sites."""
    mode = request.param
    if mode not in asking_worlds:
        made = asking_worlds[mode] = World(tmp_path_factory.mktemp("asking"), mode, spare_draws=1_000)
        made.fed.workers[101]._fetch = made.fed.objects.get
    return asking_worlds[mode]


@seeds(2)
def test_nothing_that_a_hospital_says_of_heads_ends_the_round_or_costs_others_their_countersignature(
    asking: World, seed: int
) -> None:
    """To each request of the round, site-1 sends a batch of changed replies and then its honest one."""
    fed = asking.fed
    before = fed.ledger.row_count, len(list((fed.root / "witnesses").iterdir()))
    flood = Flood(fed.workers)
    flood.fed, flood.bodies = fed, asking.messages("witness-reply", seed, number=FEW)
    asking.witnesses().ask(fed.sites, flood, timeout_s=5)
    flood.phase = WitnessRequest  # now without any honest reply
    asking.witnesses().ask(fed.sites, flood, timeout_s=5)
    assert (fed.ledger.row_count, len(list((fed.root / "witnesses").iterdir()))) == before
    note = asking.witnesses().memory.note(origin_of("server", fed.ledger.ledger_id))
    assert note is not None
    assert {"consilium/site/site-0", "consilium/site/site-2"} <= {one.name for one in note.signatures}


PHASES: dict[str, type[Part]] = {"offers": Offer, "codes": CodesRequest}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("asking", "kind"), CASES, indirect=["asking"])
@seeds(1)
def test_nothing_that_a_hospital_signs_ends_the_cores_run_or_is_charged(
    asking: World, kind: str, phase: str, seed: int
) -> None:
    attack_core(asking, kind, seed, phase=PHASES[phase], number=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("asking", "kind"), CASES, indirect=["asking"])
@seeds((THOROUGH or 1_000) // 2 // BATCH)
def test_many_replies_end_no_run_and_charge_nothing(asking: World, kind: str, phase: str, seed: int) -> None:
    attack_core(asking, kind, seed, phase=PHASES[phase])


# --- public objects that a server made


def shared_members(count: int) -> bytes:
    """Return an uncompressed archive of arrays whose members share bytes: each contains all later ones."""
    contents, headers = [npy(bytes(100))], []
    for number in reversed(range(count)):
        info = zipfile.ZipInfo(f"{number}.npy")
        info.file_size = info.compress_size = len(contents[-1])
        info.CRC = zlib.crc32(contents[-1])
        headers.append((info, info.FileHeader(zip64=False)))
        contents.append(npy(headers[-1][1] + contents[-1]) if number else headers[-1][1] + contents[-1])
    whole = contents.pop()
    directory = b""
    for (info, header), content in zip(headers, contents, strict=True):
        name, place = info.filename.encode(), len(whole) - len(content) - len(header)
        sizes = (info.CRC, info.compress_size, info.file_size, len(name), 0, 0, 0, 0, 0, place)
        directory += struct.pack(zipfile.structCentralDir, zipfile.stringCentralDir, 20, 3, 20, 0, 0, 0, 0, 33, *sizes)
        directory += name
    ends = (0, 0, count, count, len(directory), len(whole), 0)
    return whole + directory + struct.pack(zipfile.structEndArchive, zipfile.stringEndArchive, *ends)


def npy(data: bytes) -> bytes:
    """Return ``data`` as the file of an array of bytes."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.frombuffer(data, dtype=np.uint8), version=(1, 0))
    return stream.getvalue()


def test_an_object_whose_members_share_their_bytes_is_refused_before_they_are_read() -> None:
    data = shared_members(300)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        assert sum(info.file_size for info in archive.infolist()) > 50 * len(data)

    def read() -> None:
        for reader in (Frame.from_bytes, load_codec):
            with pytest.raises(InvalidInput, match="one after another"):
                reader(data)

    assert peak_bytes(read) < 10 * len(data)
