"""Attack: a hospital, or somebody with the gateway, sends messages as the server or as another hospital.

| attack | defence |
|---|---|
| a hospital pushes an offer to another's worker | a worker reads only messages that the server signed for its site |
| an offer for one hospital is sent to another | the signature covers the site's name |
| a hospital's reply replaces another's | the core reads only replies that the site's own ledger key signed |
| yesterday's reply is sent in answer to today's request | the signature covers the request |
| a malformed reply ends the core's run | an unreadable reply counts as this site's silence |
| an offer that a hospital declined is delivered again later | an offer states its time and expires soon |
| an offer's numbers make a hospital's ledger unusable | only the exact mechanism of the study is accepted |
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import grpc
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from client.app import call_worker
from client.declined import DECLINED
from client.operations.serve import serve
from client.worker import Worker
from common.canonical import sha256_bytes
from common.envelope import SIGNATURE_BYTES, body_of, open_reply, open_request, sign_reply, sign_request
from common.errors import InvalidInput, QuorumNotReached, Refused
from common.ledger.keys import public_hex
from common.messages import CodesRequest, Offer, OfferReply, decode, encode
from common.privacy.mechanism import QuerySpec
from consilium.in_process import Wire
from server.aggregation.exchange import Reply
from tests.federation import Federation, part
from tests.worlds import silent


@pytest.fixture
def fed(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path) as made:
        made.set_collection(patience_s=1.0, offer_deadline_s=1.0)
        yield made


def offer(fed: Federation) -> Offer:
    queries = fed.core().open_queries()
    return Offer(study=fed.study.id, ledger=fed.ledger.ledger_id, batch="b" * 64, queries=queries)


def nothing_charged(fed: Federation, site: str) -> bool:
    ledger = fed.site_ledgers[site]
    return ledger.spent().releases == 0 and ledger.facts("site").accepted == 0


# --- as the server


@pytest.mark.parametrize("who", ["another hospital", "nobody", "cut short"])
def test_an_offer_that_the_server_did_not_sign_is_not_read_and_charges_nothing(fed: Federation, who: str) -> None:
    body = encode(offer(fed))
    message = {
        "another hospital": sign_request(body, sign=fed.site_ledgers["site-0"].sign, site="site-1"),
        "nobody": bytes(SIGNATURE_BYTES) + body,
        "cut short": body[:40],
    }[who]
    with pytest.raises(Refused) as refused:
        fed.workers[101].answer(message)
    assert refused.value.reason == "unsigned"
    assert nothing_charged(fed, "site-1")


def test_an_offer_that_the_server_signed_for_one_hospital_is_not_anothers(fed: Federation) -> None:
    message = sign_request(encode(offer(fed)), sign=fed.ledger.sign, site="site-0")
    with pytest.raises(Refused) as refused:
        fed.workers[101].answer(message)
    assert refused.value.reason == "unsigned"
    assert nothing_charged(fed, "site-1")
    reply = open_reply(
        fed.workers[100].answer(message),
        key=Ed25519PublicKey.from_public_bytes(bytes.fromhex(fed.sites[0].answer_key)),
        site="site-0",
        request_sha256=sha256_bytes(message),
    )
    assert isinstance(decode(reply), OfferReply)


def test_what_arrives_unsigned_over_the_socket_is_answered_with_nothing(fed: Federation, tmp_path: Path) -> None:
    server = serve(fed.workers[101], socket=tmp_path / "w.sock")
    try:
        with pytest.raises(grpc.RpcError, match="refused"):
            call_worker(tmp_path / "w.sock", bytes(SIGNATURE_BYTES) + encode(offer(fed)), timeout_s=600)
    finally:
        server.stop(None).wait()
    assert nothing_charged(fed, "site-1")


def test_one_changed_bit_makes_a_signed_message_invalid(fed: Federation) -> None:
    message = bytearray(sign_request(encode(offer(fed)), sign=fed.ledger.sign, site="site-1"))
    keys = [Ed25519PrivateKey.generate().public_key(), fed.signing_key.public_key()]
    assert open_request(bytes(message), keys=keys, site="site-1") == body_of(bytes(message))
    for place in (0, SIGNATURE_BYTES - 1, SIGNATURE_BYTES, len(message) - 1):
        message[place] ^= 1
        with pytest.raises(Refused) as refused:
            open_request(bytes(message), keys=keys, site="site-1")
        assert refused.value.reason == "unsigned"
        message[place] ^= 1


# --- as the server of yesterday


def brought(fed: Federation, message: bytes, *, now: float) -> OfferReply:
    worker = fed.workers[101]
    worker._now = lambda: now
    reply = decode(body_of(worker.answer(message)))
    assert isinstance(reply, OfferReply)
    return reply


@pytest.mark.parametrize("later_s", [1.0, 3_600.0, 1e7])
def test_an_offer_that_was_declined_is_not_accepted_when_it_is_brought_again(fed: Federation, later_s: float) -> None:
    """Somebody who carries messages delivers the offer after the hospital's pause. If accepted, it would be charged."""
    issued = 1_800_000_000
    message = sign_request(encode(replace(offer(fed), issued=1000 * issued)), sign=fed.ledger.sign, site="site-1")
    ledger = fed.site_ledgers["site-1"]
    ledger.decide(fed.study.id, "pause")
    assert brought(fed, message, now=issued).reason == "paused"
    ledger.decide(fed.study.id, "resume")
    assert brought(fed, message, now=issued + later_s).reason == ("paused" if later_s < 60 else "stale")
    assert nothing_charged(fed, "site-1")
    again = sign_request(encode(replace(offer(fed), issued=1000 * issued + 1)), sign=fed.ledger.sign, site="site-1")
    assert brought(fed, again, now=issued).reason == "accepted"


def restarted(fed: Federation) -> None:
    """Start the worker of site-1 again in the same folder."""
    fed.site_ledgers["site-1"].close()
    fed.hospitals.open(fed.sites[1])


@pytest.mark.parametrize("file", ["kept", "damaged"])
def test_an_offer_that_was_declined_before_a_restart_is_not_accepted_after_it(fed: Federation, file: str) -> None:
    """The age of the offer alone does not protect a restarted worker, because it may be longer than the study's
    deadlines.
    """
    issued = time.time_ns() // 1_000_000 - 1000
    messages = [
        sign_request(encode(replace(offer(fed), issued=issued - late)), sign=fed.ledger.sign, site="site-1")
        for late in (0, 1)
    ]
    fed.site_ledgers["site-1"].decide(fed.study.id, "pause")
    for message in reversed(messages):
        assert brought(fed, message, now=issued / 1000).reason == "paused"
    fed.site_ledgers["site-1"].decide(fed.study.id, "resume")
    if file == "damaged":
        (fed.root / "site-1" / DECLINED).write_bytes(b"{")
    restarted(fed)
    found = [brought(fed, message, now=issued / 1000).reason for message in messages]
    assert found == (["paused", "stale"] if file == "kept" else ["stale", "stale"])
    assert nothing_charged(fed, "site-1")
    newer = issued + 60_000
    again = sign_request(encode(replace(offer(fed), issued=newer)), sign=fed.ledger.sign, site="site-1")
    assert brought(fed, again, now=newer / 1000).reason == "accepted"


def test_an_offer_is_declined_where_the_disk_is_full(fed: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("client.declined.write_atomically", full)
    issued = 1_800_000_000_000
    message = sign_request(encode(replace(offer(fed), issued=issued)), sign=fed.ledger.sign, site="site-1")
    fed.site_ledgers["site-1"].decide(fed.study.id, "pause")
    assert brought(fed, message, now=issued / 1000).reason == "paused"
    fed.site_ledgers["site-1"].decide(fed.study.id, "resume")
    assert brought(fed, message, now=issued / 1000).reason == "paused"


def test_an_offer_from_a_clock_of_tomorrow_is_stale(fed: Federation) -> None:
    message = sign_request(encode(replace(offer(fed), issued=1_800_086_400_000)), sign=fed.ledger.sign, site="site-1")
    assert brought(fed, message, now=1_800_000_000).reason == "stale"
    assert nothing_charged(fed, "site-1")


def test_an_offer_declined_while_both_clocks_were_a_year_ahead_does_not_stop_the_site_for_a_year(
    fed: Federation,
) -> None:
    right, year = 1_800_000_000, 365 * 86_400
    ledger = fed.site_ledgers["site-1"]
    ledger.decide(fed.study.id, "pause")

    def offered(at: int) -> str:
        message = sign_request(encode(replace(offer(fed), issued=1000 * at)), sign=fed.ledger.sign, site="site-1")
        return brought(fed, message, now=at).reason

    assert offered(right + year) == "paused"
    ledger.decide(fed.study.id, "resume")
    assert offered(right) == "stale", "it may have been declined before the clocks were set right"
    assert offered(right + 60) == "accepted"


def test_an_offer_of_the_core_states_its_time(fed: Federation) -> None:
    for worker in fed.workers.values():
        worker._now = lambda: 1.0
    with pytest.raises(QuorumNotReached):
        fed.core().run(fed.transport)
    assert {event["reason"] for event in fed.events("offer-answered")} == {"stale"}


# --- as another hospital


class Forged(Wire):
    """Delivers ``forge``'s version of a site's signed reply."""

    forge: staticmethod

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        for reply in super().exchange(bodies, timeout_s=timeout_s):
            body = None if reply.body is None else self.forge(reply.node_id, bodies[reply.node_id], reply.body)
            yield Reply(reply.node_id, body, reply.problem)


def run_with(fed: Federation, forge: object) -> None:
    transport = Forged(fed.workers)
    transport.forge = forge  # type: ignore[assignment]
    fed.core().run(transport)


def releases_of(fed: Federation) -> set[tuple[str, ...]]:
    return {tuple(entry.site for entry in found.roster) for found in fed.ledger.answers(fed.study.id)}


def test_a_reply_signed_by_another_hospital_is_not_the_sites(fed: Federation) -> None:
    def forge(node: int, request: bytes, reply: bytes) -> bytes:
        if node != 101:
            return reply
        return sign_reply(body_of(reply), sign=fed.site_ledgers["site-0"].sign, site="site-1", request=request)

    run_with(fed, forge)
    assert releases_of(fed) == {("site-0", "site-2")}
    assert {e["reason"] for e in fed.events("offer-answered") if e["site"] == "site-1"} == {"unsigned"}


def test_a_veto_is_not_turned_into_consent_on_the_way(fed: Federation) -> None:
    fed.site_ledgers["site-1"].decide(fed.study.id, "pause")

    def forge(node: int, request: bytes, reply: bytes) -> bytes:
        said = decode(body_of(reply))
        if node != 101 or not isinstance(said, OfferReply):
            return reply
        return reply[:SIGNATURE_BYTES] + encode(replace(said, reason="accepted"))

    run_with(fed, forge)
    assert releases_of(fed) == {("site-0", "site-2")}


@pytest.mark.slow
def test_a_reply_to_another_request_is_not_the_answer_to_this_one(fed: Federation) -> None:
    kept: dict[int, bytes] = {}

    def forge(node: int, request: bytes, reply: bytes) -> bytes:
        return kept.setdefault(node, reply) if node == 101 else reply

    run_with(fed, forge)
    assert {e["reason"] for e in fed.events("reply-missing")} == {"unsigned", "patience"}
    for found in fed.ledger.answers(fed.study.id):
        honest = [fed.site_ledgers[s].code(found.query.id) for s in ("site-0", "site-2")]
        assert all(code is not None for code in honest)


def test_a_site_without_a_key_for_its_replies_takes_part_in_nothing(fed: Federation) -> None:
    fed.sites = tuple(replace(site, answer_key="") for site in fed.sites)
    with pytest.raises(QuorumNotReached):
        fed.core().run(fed.transport)
    assert {e["reason"] for e in fed.events("offer-answered")} == {"unsigned"}
    assert fed.ledger.answers(fed.study.id) == ()


NONSENSE = [
    b"",
    b"[" * 100_000,
    b'{"kind":"several","parts":[],"schema":99999999999999999999}',
    b'{"batch":"'
    + b"b" * 64
    + b'","kind":"offer-reply","ledger_head":"'
    + b"0" * 64
    + b'","ledger_row":9223372036854775808,"reason":"accepted","schema":3}',
    bytes(range(256)),
]


@pytest.mark.parametrize("said", range(len(NONSENSE)))
def test_nothing_a_hospital_signs_ends_a_run(fed: Federation, said: int) -> None:
    def forge(node: int, request: bytes, reply: bytes) -> bytes:
        if node != 101:
            return reply
        return sign_reply(NONSENSE[said], sign=fed.site_ledgers["site-1"].sign, site="site-1", request=request)

    run_with(fed, forge)
    assert releases_of(fed) == {("site-0", "site-2")}
    assert {e["reason"] for e in fed.events("offer-answered") if e["site"] == "site-1"} == {"unreadable"}


# --- figures that make a ledger unusable


def priced(query: QuerySpec, noise_std: str) -> bytes:
    """Return an offer's bytes with another σ, which no honest server writes."""
    body = encode(Offer(study="s" * 64, ledger="f" * 32, batch="b" * 64, queries=(query,)))
    own = f"{query.mechanism.noise_std.numerator}/{query.mechanism.noise_std.denominator}".encode()
    assert own in body
    return body.replace(own, noise_std.encode())


@pytest.mark.parametrize(
    "noise_std", ["7" * 4_200 + "/1", "1/" + "7" * 4_200, "1" + "0" * 40 + "/1", "7" * 3_000 + "/1"]
)
def test_no_figure_in_an_offer_makes_a_ledger_unusable_or_is_charged(fed: Federation, noise_std: str) -> None:
    query = fed.core().open_queries()[0]
    body = priced(query, noise_std).replace(b"s" * 64, fed.study.id.encode())
    body = body.replace(b'"' + b"f" * 32 + b'"', f'"{fed.ledger.ledger_id}"'.encode())
    message = sign_request(body, sign=fed.ledger.sign, site="site-1")
    with pytest.raises(InvalidInput, match=r"noise standard deviation|rational"):
        fed.workers[101].answer(message)
    assert nothing_charged(fed, "site-1")
    fed.core().run(fed.transport)
    assert releases_of(fed) == {("site-0", "site-1", "site-2")}
    assert fed.site_ledgers["site-1"].facts("site-1").accepted == 6


def test_a_server_that_asks_with_more_noise_gets_no_code_for_free(fed: Federation) -> None:
    query = fed.core().open_queries()[0]
    loud = replace(query, mechanism=replace(query.mechanism, noise_std=Fraction(10**15)))
    message = sign_request(encode(replace(offer(fed), queries=(loud,))), sign=fed.ledger.sign, site="site-1")
    reply = decode(body_of(fed.workers[101].answer(message)))
    assert isinstance(reply, OfferReply)
    assert reply.reason == "wrong-mechanism"
    request = CodesRequest(fed.study.id, fed.ledger.ledger_id, "b" * 64, 1, 60, (loud.id,))
    with pytest.raises(Refused):
        fed.workers[101].answer(sign_request(encode(request), sign=fed.ledger.sign, site="site-1"))


@pytest.mark.slow
def test_a_lost_site_costs_its_own_codes_and_no_others(fed: Federation) -> None:
    """If the third site falls silent, the sum of the other two sites' codes and its zero code is released."""

    def forge(node: int, request: bytes, reply: bytes) -> bytes:
        return b"" if node == 101 and part(body_of(request), CodesRequest) else reply

    fed.sampler = silent
    run_with(fed, forge)
    assert releases_of(fed) == {("site-0", "site-1", "site-2")}
    for found in fed.ledger.answers(fed.study.id):
        codes = [fed.site_ledgers[name].code(found.query.id) for name in ("site-0", "site-2")]
        assert np.array_equal(found.noisy_sum, sum(codes))


def test_workers_hold_the_servers_old_and_new_key_while_it_changes(fed: Federation) -> None:
    worker: Worker = fed.workers[101]
    body = encode(offer(fed))
    new = Ed25519PrivateKey.generate()
    with pytest.raises(Refused):
        worker.open_request(sign_request(body, sign=new.sign, site="site-1"))
    server = replace(worker._config.server, more_signing_keys=(public_hex(new),))
    worker._config = replace(worker._config, server=server)
    assert worker.open_request(sign_request(body, sign=new.sign, site="site-1")) == body
    assert worker.open_request(sign_request(body, sign=fed.ledger.sign, site="site-1")) == body
