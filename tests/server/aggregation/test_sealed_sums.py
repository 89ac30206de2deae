"""Tests the promises of the sealed sum with real workers, ledgers and core; only transport and teachers are stubs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from threading import RLock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from client.ledger.site_ledger import SiteLedger
from common.errors import InvalidInput, LedgerCorrupt, QuorumNotReached, ReceiptContradiction, Refused
from common.ledger.charges import StudyTerms
from common.ledger.keys import public_hex
from common.ledger.receipts import check_arithmetic
from common.masking import DrawId, MaskKey, Member, _statement, mask_private_key, signed_mask_key
from common.messages import CodesReply, CodesRequest, Offer, OfferReply, Receipts, Several, decode, encode
from common.peers import Peer
from common.privacy.shares import share_std
from consilium.reports.certificate import _history
from server.dashboard.ledger_fold import LedgerFold
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.federation import Federation, make_study, part
from tests.oracles import curve25519
from tests.worlds import HURRIED, silent

pytestmark = pytest.mark.slow

SITES = 4


def sealed_study(*, patience_s: int = 1, **privacy: object):  # type: ignore[no-untyped-def]
    terms = {"quorum": 3, "planned_queries": 3, "aggregation": "sealed-sum", "spare_draws": 2} | privacy
    return make_study(collection=replace(HURRIED, patience_s=patience_s), **terms)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Federation]:
    with Federation(tmp_path, study=sealed_study(), sites=SITES) as federation:
        yield federation


def open_codes(world: Federation, index: int) -> np.ndarray:
    """Return the sum of the codes on the sites' own disks, which only a test may read."""
    query = world.planned()[index]
    return np.sum([ledger.code(query.id) for ledger in world.site_ledgers.values()], axis=0)


def test_the_answer_is_the_sum_of_the_codes_and_of_the_noise_that_each_site_drew(tmp_path: Path) -> None:
    drawn: list[np.ndarray] = []

    def remembered(size: int, std: Fraction) -> np.ndarray:
        noise = np.random.default_rng(len(drawn)).integers(-int(std), int(std), size)
        drawn.append(noise)
        return noise

    world = Federation(tmp_path, study=sealed_study(), sites=SITES, share_sampler=remembered)
    world.core().run(world.transport)
    answers = world.core().answers()
    assert len(answers) == 3
    noise = np.sum(drawn, axis=0)
    total = np.sum([answer.noisy_sum - open_codes(world, i) for i, answer in enumerate(answers)], axis=0)
    assert np.array_equal(total, noise)
    assert len(drawn) == 3 * SITES
    world.close()


def test_the_sealed_answer_is_bit_identical_to_the_open_one_with_the_same_noise(tmp_path: Path) -> None:
    sealed = Federation(tmp_path / "sealed", study=sealed_study(), sites=SITES, share_sampler=silent)
    plain = Federation(tmp_path / "open", study=make_study(quorum=3, planned_queries=3), sites=SITES, sampler=silent)
    for world in (sealed, plain):
        world.core().run(world.transport)
    answers = zip(sealed.core().answers(), plain.core().answers(), strict=True)
    assert all(np.array_equal(one.noisy_sum, other.noisy_sum) for one, other in answers)
    for world in (sealed, plain):
        world.close()


def test_both_ledgers_charge_the_same_and_verify(world: Federation) -> None:
    world.core().run(world.transport)
    spent = {world.ledger.spent(site.pool).mu_squared for site in world.sites}
    own = {ledger.spent().mu_squared for ledger in world.site_ledgers.values()}
    query = world.planned()[0]
    assert spent == own == {3 * query.mechanism.mu_squared(world.study.privacy.protection)}
    assert not verify(world.root / "ledger.sqlite").problems
    for site in world.sites:
        ledger = world.site_ledgers[site.name]
        assert ledger.receipts()
        assert not ledger.alarms()
        assert not verify(world.root / site.name / "site-ledger.sqlite").problems


def test_a_draw_is_charged_at_the_server_before_any_site_is_asked_for_codes(world: Federation) -> None:
    charged: list[int] = []

    def watch(node: int, body: bytes, reply: bytes) -> bytes:
        if part(body, type(world.request(world.planned()[:1]))) is not None:
            charged.append(world.ledger.spent(world.sites[0].pool).releases)
        return reply

    world.transport.intercept = watch
    world.core().run(world.transport)
    assert charged[0] == 2  # both queries of the first batch


def words_of(world: Federation, node: int) -> list[np.ndarray]:
    """Return the content of a site's replies, decrypted with the core's key."""
    found = []
    by_node = {site.node_id: site.name for site in world.sites}
    for sender, reply in world.transport.replies:
        answer = part(reply, CodesReply)
        if sender == node and answer is not None:
            queries = [next(q for q in world.planned() if q.id == query) for query, _ in answer.codes]
            found += world.opened(encode(answer), queries, site=by_node[node])
    return found


def test_the_server_opens_neither_a_code_nor_anything_near_one(world: Federation) -> None:
    world.core().run(world.transport)
    for site in world.sites:
        for words in words_of(world, site.node_id):
            assert np.abs(words.astype(float)).max() > 2.0**50


def test_a_site_that_is_late_completes_the_draw(tmp_path: Path) -> None:
    world = Federation(tmp_path, study=sealed_study(patience_s=600), sites=SITES)  # it is asked again at once
    asked = 0

    def late(node: int, body: bytes, reply: bytes) -> bytes | None:
        nonlocal asked
        if node == 102 and part(body, type(world.request(world.planned()[:1]))) is not None:
            asked += 1
            return None if asked == 1 else reply
        return reply

    world.transport.intercept = late
    world.core().run(world.transport)
    assert len(world.core().answers()) == 3
    assert not world.events("draw-lost")
    assert world.ledger.spent("pool-2").releases == 3
    world.close()


def dead(node: int, body: bytes, reply: bytes) -> bytes | None:
    """Let the last site die when it is asked for its codes."""
    return None if node == 103 and part(body, CodesRequest) is not None else reply


def test_a_site_that_dies_in_the_middle_costs_one_draw_and_the_rest_go_on_without_it(world: Federation) -> None:
    world.transport.intercept = dead
    world.core().run(world.transport)
    answers = world.core().answers()
    assert len(answers) == 3
    assert all("site-3" not in {entry.site for entry in answer.roster} for answer in answers)
    (lost,) = world.events("draw-lost")
    assert (lost["sites"], lost["reason"], len(lost["queries"])) == (["site-3"], "incomplete", 2)
    assert world.ledger.spent("pool-0").releases == world.site_ledgers["site-0"].spent().releases == 5
    assert not verify(world.root / "ledger.sqlite").problems


def test_when_the_spare_draws_are_used_up_the_study_ends_with_the_answers_it_has(tmp_path: Path) -> None:
    world = Federation(tmp_path, study=sealed_study(spare_draws=0), sites=SITES)

    world.transport.intercept = dead
    world.core().run(world.transport)
    assert len(world.core().answers()) == 1  # three charges in all: two lost, one answered
    assert world.ledger.spent("pool-0").releases == 3
    assert world.events("budget-refused")
    world.close()


def test_a_study_whose_sites_died_one_by_one_says_so_and_not_that_its_budget_is_used_up(tmp_path: Path) -> None:
    """Two of four sites vanish, each in another draw. The quorum is missing, but budget is left."""
    world = Federation(tmp_path, study=sealed_study(spare_draws=8), sites=SITES)
    going = [103, 102]

    def vanishes(node: int, body: bytes, reply: bytes) -> bytes | None:
        if part(body, type(world.request(world.planned()[:1]))) is None or node in world.transport.offline:
            return reply
        if going and node == going[0]:
            world.transport.offline.add(going.pop(0))
        return None if node in world.transport.offline else reply

    world.transport.intercept = vanishes
    with pytest.raises(QuorumNotReached, match="did not answer them in time: site-2, site-3"):
        world.core().run(world.transport)
    assert [lost["sites"] for lost in world.events("draw-lost")] == [["site-3"]], "the second one waits for site-2"
    assert not world.events("budget-refused")
    said = {(event["site"], event["reason"]) for event in world.events("offer-answered") if not event["accepted"]}
    assert said == {("site-2", "left-out"), ("site-3", "left-out")}
    world.transport.offline.clear()
    world.transport.intercept = lambda node, body, reply: reply
    world.core().run(world.transport)
    assert len(world.core().answers()) == 3
    world.close()


def test_a_hospital_that_vanished_before_it_was_asked_for_its_codes_is_put_on_record_once(world: Federation) -> None:
    def vanishes(node: int, body: bytes, reply: bytes) -> bytes:
        if part(body, Offer) is not None and node == 103:
            world.transport.offline.add(103)
        return reply

    world.transport.intercept = vanishes
    world.core().run(world.transport)
    missing = [(event["site"], event["reason"]) for event in world.events("reply-missing")]
    assert missing == [("site-3", "offline")]
    assert len(world.core().answers()) == 3


class Killed(BaseException):
    """Ends the process like kill -9, so nothing is cleaned up."""


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_core_that_dies_between_charge_and_answer_asks_for_the_same_words_again(
    world: Federation, after: int
) -> None:
    asked = 0

    def die(node: int, body: bytes, reply: bytes) -> bytes:
        nonlocal asked
        if part(body, type(world.request(world.planned()[:1]))) is not None:
            asked += 1
            if asked == after:
                raise Killed
        return reply

    world.transport.intercept = die
    with pytest.raises(Killed):
        world.core().run(world.transport)
    assert world.ledger.spent("pool-0").releases == 2
    world.transport.intercept = lambda node, body, reply: reply
    world.core().run(world.transport)
    assert len(world.core().answers()) == 3
    assert world.ledger.spent("pool-0").releases == 3
    assert world.site_ledgers["site-0"].spent().releases == 3
    assert not world.events("draw-lost")


def test_a_site_that_sends_an_impossible_value_spoils_the_sum_and_nothing_is_released(world: Federation) -> None:
    honest = world.workers[101]._sampler
    world.workers[101]._sampler = lambda size, std: honest(size, std) + (1 << 40)
    with pytest.raises(Refused, match="sum"):
        world.core().run(world.transport)
    assert not world.core().answers()
    (lost,) = world.events("draw-lost")
    assert lost["reason"] == "spoiled"
    assert world.ledger.spent("pool-0").releases == 2  # charged all the same
    world.workers[101]._sampler = honest
    world.core().run(world.transport)
    assert len(world.core().answers()) == 3


# --- who is on the roster


def test_sites_that_have_not_confirmed_each_other_are_not_on_one_roster(world: Federation) -> None:
    world.site_ledgers["site-0"].confirm_peer(world.study.id, Peer("site-3", "5" * 64))
    world.core().run(world.transport)
    rosters = {tuple(entry.site for entry in answer.roster) for answer in world.core().answers()}
    assert rosters == {("site-1", "site-2", "site-3")}  # a site's statement removes only that site
    said = world.events("peers-unconfirmed")[0]
    assert (said["site"], said["peers"]) == ("site-0", ["site-3"])


def test_a_site_that_nobody_has_confirmed_yet_keeps_no_other_from_the_roster(world: Federation) -> None:
    for name in ("site-0", "site-1", "site-2"):
        world.site_ledgers[name].confirm_peer(world.study.id, Peer("site-3", "5" * 64))
    world.core().run(world.transport)
    rosters = {tuple(entry.site for entry in answer.roster) for answer in world.core().answers()}
    assert rosters == {("site-0", "site-1", "site-2")}


def test_without_confirmed_peers_nothing_is_charged_and_the_message_says_what_to_do(world: Federation) -> None:
    for name in ("site-0", "site-1"):
        for other in ("site-2", "site-3"):
            world.site_ledgers[name].confirm_peer(world.study.id, Peer(other, ("a" if other == "site-2" else "b") * 64))
    with pytest.raises(QuorumNotReached):
        world.core().run(world.transport)
    assert world.ledger.spent("pool-0").releases == 0


def test_a_server_that_invents_sites_gets_nothing(world: Federation) -> None:
    """The operator attacks with a roster of one honest site and puppets whose keys the operator made."""
    keys = [Ed25519PrivateKey.generate() for _ in range(3)]
    puppets = [Peer(f"zz-{i}", public_hex(key)) for i, key in enumerate(keys)]
    queries = world.planned()[:1]
    offer = world.offer(queries, draw=1, peers=(Peer("site-0", world.sites[0].answer_key), *puppets))
    reply = decode(world.workers[100].handle(encode(offer)))
    assert isinstance(reply, OfferReply)
    assert reply.reason == "unknown-peers"
    assert world.site_ledgers["site-0"].spent().releases == 0


# --- what an adversarial server may ask


def accept(world: Federation, *, draw: int = 1, batch: str = "b" * 64) -> tuple:  # type: ignore[type-arg]
    """Let every site accept the first query; return its members as a server would list them."""
    queries = world.planned()[:1]
    peers = tuple(Peer(site.name, site.answer_key) for site in world.sites)
    members = []
    for site in world.sites:
        offer = world.offer(queries, draw=draw, peers=peers, batch=batch)
        reply = decode(world.workers[site.node_id].handle(encode(offer)))
        assert isinstance(reply, OfferReply)
        assert reply.mask is not None, reply.reason
        members.append(Member(site.name, reply.mask))
    return queries, tuple(members)


def ask(world: Federation, queries, members, *, site: int = 0, draw: int = 1, **changes):  # type: ignore[no-untyped-def]
    request = world.request(queries, draw=draw, members=members, **changes)
    return world.opened(world.workers[100 + site].handle(encode(request)), queries, site=f"site-{site}")


def test_the_same_request_gets_the_same_words_and_no_charge(world: Federation) -> None:
    queries, members = accept(world)
    first, again = ask(world, queries, members), ask(world, queries, members, attempt=2)
    assert np.array_equal(first[0], again[0])
    assert world.site_ledgers["site-0"].spent().releases == 1


def test_a_second_roster_for_one_draw_is_refused(world: Federation) -> None:
    queries, members = accept(world)
    ask(world, queries, members)
    with pytest.raises(Refused, match="another roster"):
        ask(world, queries, members[:3])


def test_the_words_that_were_sent_are_the_same_after_the_worker_was_restarted(world: Federation) -> None:
    queries, members = accept(world)
    first = ask(world, queries, members)
    world.site_ledgers["site-0"].close()
    world.hospitals.open(world.sites[0])
    assert np.array_equal(ask(world, queries, members)[0], first[0])


def test_after_a_withdrawal_a_site_refuses_the_draw_and_sends_no_second_code_under_its_masks(
    world: Federation,
) -> None:
    queries, members = accept(world)
    ask(world, queries, members)
    ledger = world.site_ledgers["site-0"]
    withdraw(ledger)
    with pytest.raises(Refused, match="withdrawn"):
        ask(world, queries, members)
    queries, members = accept(world, draw=2)
    ask(world, queries, members, draw=2)
    assert ledger.spent().releases == 2


def withdraw(ledger: SiteLedger) -> None:
    ledger.withdraw_patient(subject="c" * 64, slot=0, voter=0, weights=None)


def test_a_later_draw_is_charged_again_and_an_earlier_one_is_never_answered(world: Federation) -> None:
    queries, first = accept(world)
    queries, second = accept(world, draw=2)
    assert world.site_ledgers["site-0"].spent().releases == 2
    ask(world, queries, second, draw=2)
    with pytest.raises(Refused, match=f"draw of query {queries[0].id[:12]}"):
        ask(world, queries, first)
    offer = world.offer(queries, draw=1, peers=tuple(Peer(s.name, s.answer_key) for s in world.sites))
    reply = decode(world.workers[100].handle(encode(offer)))
    assert isinstance(reply, OfferReply)
    assert (reply.reason, reply.last_draw, reply.mask) == ("old-draw", 2, None)


@pytest.mark.parametrize(("quorum", "members"), [(3, 2), (4, 2), (4, 3)])
def test_a_roster_below_the_quorum_is_refused(tmp_path: Path, quorum: int, members: int) -> None:
    """This holds even if two honest sites and one colluder are left."""
    world = Federation(tmp_path / "world", study=sealed_study(quorum=quorum), sites=SITES)
    queries, all_members = accept(world)
    with pytest.raises(Refused, match=f"the roster has {members} sites; at least {quorum}"):
        ask(world, queries, all_members[:members])
    assert not [row for row in world.site_ledgers["site-0"].rows() if row.kind == "masked"]
    world.close()


def test_a_request_without_a_roster_gets_no_code_of_a_sealed_study(world: Federation) -> None:
    queries, _ = accept(world)
    with pytest.raises(Refused, match="draw"):
        world.workers[100].handle(encode(world.request(queries)))


def test_an_open_offer_of_a_sealed_study_is_declined(world: Federation) -> None:
    reply = decode(world.workers[100].handle(encode(world.offer(world.planned()[:1]))))
    assert isinstance(reply, OfferReply)
    assert reply.reason == "wrong-mechanism"


def test_an_exchanged_mask_key_is_refused(world: Federation) -> None:
    queries, members = accept(world)
    stranger = replace(members[1].mask, key="1" * 64)
    with pytest.raises(Refused, match="confirmed"):
        ask(world, queries, (members[0], Member("site-1", stranger), *members[2:]))


@pytest.mark.parametrize("trick", ["one repeated", "renewed key", "another study", "another draw"])
def test_a_roster_of_other_keys_than_people_confirmed_for_this_draw_is_refused(world: Federation, trick: str) -> None:
    queries, members = accept(world)
    own, other, *rest = members
    signer = world.site_ledgers["site-1"]
    draw = DrawId(world.study.id, world.ledger.head().ledger_id, "b" * 64, 1)
    if trick == "one repeated":
        members = (own, other, other, other)
    elif trick == "renewed key":  # the old key still signs, whoever holds it now
        world.site_ledgers["site-0"].confirm_peer(world.study.id, Peer("site-1", "c" * 64))
    else:
        foreign = replace(draw, study="d" * 64) if trick == "another study" else replace(draw, number=2)
        private = mask_private_key(b"s" * 32, foreign, nonce="0" * 64)
        members = (own, Member("site-1", signed_mask_key(private, foreign, sign=signer.sign, site="site-1")), *rest)
    with pytest.raises((Refused, InvalidInput)):
        ask(world, queries, members)
    assert not [row for row in world.site_ledgers["site-0"].rows() if row.kind == "masked"]


@pytest.mark.parametrize(
    "trick",
    [
        "small order",
        "small order, not canonical",
        "another's",
        "another's with its top bit",
        "another's twin",
        "unsigned",
    ],
)
def test_a_site_whose_mask_key_nobody_can_mask_with_costs_no_draw_and_the_rest_go_on(
    world: Federation, trick: str
) -> None:
    """Otherwise every honest site would refuse the roster after it was charged, and all would count as silent."""
    small = {"small order": bytes(32), "small order, not canonical": (2**255 - 19).to_bytes(32, "little")}
    others: dict[DrawId, str] = {}

    def forge(node: int, body: bytes, reply: bytes) -> bytes:
        message = decode(reply)
        parts = list(message.parts) if isinstance(message, Several) else [message]
        for index, one in enumerate(parts):
            offer = part(body, Offer)
            if not isinstance(one, OfferReply) or one.mask is None or offer is None or offer.draw_id is None:
                continue
            draw = offer.draw_id
            if node == 102:
                others[draw] = one.mask.key
            elif node == 103:
                key = small[trick].hex() if trick in small else one.mask.key
                if trick.startswith("another's"):
                    key = twin_of(others[draw], trick)
                sign = world.site_ledgers["site-3"].sign if trick != "unsigned" else (lambda _: bytes(64))
                parts[index] = replace(one, mask=MaskKey(key, sign(_statement(key, draw, site="site-3"))))
        return encode(Several(tuple(parts)) if isinstance(message, Several) else parts[0])

    world.transport.intercept = forge
    world.core().run(world.transport)
    assert len(world.core().answers()) == 3
    assert not world.events("draw-lost")
    assert all("site-3" not in {entry.site for entry in answer.roster} for answer in world.core().answers())


def twin_of(key: str, trick: str) -> str:
    """Return the key: unchanged, with the bit that X25519 ignores, or with a point of order eight added."""
    if trick == "another's with its top bit":
        return (int.from_bytes(bytes.fromhex(key), "little") | 1 << 255).to_bytes(32, "little").hex()
    if trick == "another's twin":
        point = curve25519.of_montgomery(int.from_bytes(bytes.fromhex(key), "little"))
        return curve25519.agreement_hex(curve25519.montgomery(curve25519.added(point, curve25519.small_order()[1])))
    return key


def test_an_offer_that_names_one_peer_again_and_again_makes_no_quorum_and_costs_nothing(world: Federation) -> None:
    known = [Peer(site.name, site.answer_key) for site in world.sites[:2]]
    offer = world.offer(world.planned()[:1], draw=1, peers=(*known, known[1], known[1]))
    with pytest.raises(InvalidInput, match=r"^peers"):
        world.workers[100].handle(encode(offer))
    assert world.site_ledgers["site-0"].spent().releases == 0


def test_a_sum_with_a_missing_message_or_two_versions_of_the_roster_reveals_no_code(world: Federation) -> None:
    queries, members = accept(world)
    words = [ask(world, queries, members, site=site)[0].view(np.uint64) for site in range(SITES)]
    whole = np.sum(words, axis=0, dtype=np.uint64).view(np.int64)
    share = share_std(queries[0].mechanism, sites=SITES)
    assert np.abs(whole - open_codes(world, 0)).max() < 12 * float(share) * SITES
    for missing in range(SITES):
        rest = np.sum([w for i, w in enumerate(words) if i != missing], axis=0, dtype=np.uint64).view(np.int64)
        assert np.abs(rest.astype(float)).max() > 2.0**50


def test_a_receipt_for_another_roster_than_the_site_was_asked_under_is_an_alarm(world: Federation) -> None:
    """The server shows the site one roster and charges another."""
    world.core().run(world.transport)
    ledger = world.site_ledgers["site-0"]
    receipt = ledger.receipts()[0]
    books = ledger._books.sealed
    query = receipt.releases[0].release
    books._masked_under[query.query_id, 1] = "d" * 64
    with pytest.raises(Exception, match="roster other than"):
        ledger._books.check_receipt(receipt)


def test_a_receipt_with_another_number_of_colluders_than_the_study_is_an_alarm(world: Federation) -> None:
    world.core().run(world.transport)
    receipt, terms = world.site_ledgers["site-0"].receipts()[0], StudyTerms.of(world.study)
    check_arithmetic(receipt, terms)
    with pytest.raises(ReceiptContradiction, match="colluders"):
        check_arithmetic(receipt, replace(terms, colluders=terms.colluders + 1, quorum=1))
    with pytest.raises(ReceiptContradiction, match="fewer sites"):
        check_arithmetic(receipt, replace(terms, quorum=SITES + 1))


def test_messages_of_a_sealed_study_survive_their_encoding(world: Federation) -> None:
    queries, members = accept(world)
    request = world.request(queries, draw=1, members=members)
    assert decode(encode(request)) == request
    assert request.roster is not None
    assert request.roster.sites == tuple(site.name for site in world.sites)
    offer = world.offer(queries, draw=1, peers=tuple(Peer(s.name, s.answer_key) for s in world.sites))
    assert decode(encode(Several((Receipts(offer.ledger, ()), offer)))) == Several((Receipts(offer.ledger, ()), offer))
    assert isinstance(offer, Offer)


def test_pages_and_certificate_count_answers_and_not_charges(world: Federation) -> None:
    world.transport.intercept = dead
    world.core().run(world.transport)
    fold = LedgerFold(world.root / "ledger.sqlite", study_id=world.study.id)
    for _ in fold.steps(RLock()):
        pass
    assert fold.problem is None
    assert sum(batch.answers for batch in fold.batches.values()) == fold.books.answers(world.study.id) == 3
    assert len(fold.points) == 5
    # Every batch has answers after its charge.
    assert all(fold.last and batch.last_charge < fold.last.seq for batch in fold.batches.values())
    facts = world.ledger.study_facts(world.study)
    history = _history(world.ledger, world.study, facts)
    assert (history["answers"], history["lost_draws"]) == (3, 2)
    assert facts.lost_draws == 2


# --- an older copy of a site's ledger


def test_a_copy_that_forgot_what_was_sent_never_sends_a_second_message_under_the_same_masks(
    world: Federation, tmp_path: Path
) -> None:
    queries, members = accept(world)
    backup(world.root / "site-0" / "site-ledger.sqlite", tmp_path / "copy")
    ask(world, queries, members)
    ledger = world.put_back(tmp_path / "copy")
    with pytest.raises(Refused, match=f"draw of query {queries[0].id[:12]}"):
        ask(world, queries, members)
    peers = tuple(Peer(site.name, site.answer_key) for site in world.sites)
    reply = decode(world.workers[100].handle(encode(world.offer(queries, draw=1, peers=peers))))
    assert isinstance(reply, OfferReply)
    assert (reply.reason, reply.last_draw) == ("old-draw", 1)
    queries, members = accept(world, draw=2)
    ask(world, queries, members, draw=2)
    assert ledger.spent().releases == 2


def test_a_server_goes_on_with_a_later_draw_where_its_ledger_or_a_sites_is_an_older_copy(
    world: Federation, tmp_path: Path
) -> None:
    accept(world, draw=5)  # the server's lost ledger had reached draw 5
    world.core().run(world.transport)
    assert len(world.core().answers()) == 3
    draws = {release.draw for _, release in world.ledger._books.releases.by_row()}
    assert 6 in draws


def test_the_note_of_a_batch_that_is_drawn_again_names_the_draw_that_was_offered(world: Federation) -> None:
    core = world.core()
    batch = core._plan(world.planned())
    assert batch is not None
    assert batch.offer.draw == 1
    again = core._redrawn(batch, draw=0)  # the offer keeps draw 1
    assert again.offer.draw == 1
    assert world.ledger.notes() == (f"drawn again as draw 1 of batch {batch.id}",)


def test_a_server_restored_from_an_older_copy_draws_anew_and_every_ledger_counts_both_draws(
    tmp_path: Path,
) -> None:
    world = Federation(tmp_path / "world", study=sealed_study(spare_draws=3), sites=SITES)
    path = world.root / "ledger.sqlite"
    backup(path, tmp_path / "copy")
    world.core().run(world.transport)
    receipts = [receipt for ledger in world.site_ledgers.values() for receipt in ledger.receipts()]
    world.ledger.close()
    for old in path.parent.glob("ledger.sqlite*"):
        old.unlink()
    shutil.copy(tmp_path / "copy", path)
    with pytest.raises(LedgerCorrupt, match="older copy"):
        Ledger.open(path, signing_key=world.signing_key)
    world.ledger = Ledger.open(path, signing_key=world.signing_key, restored=True)
    assert world.ledger.recover(receipts) == 3
    assert world.ledger.spent("pool-0").releases == 3
    for ledger in world.site_ledgers.values():
        ledger.recover(world.ledger.ledger_id)
    world.core().run(world.transport)
    assert len(world.core().answers()) == 3
    assert world.ledger.books.last_draw(world.planned()[0].id) == 2
    assert world.ledger.spent("pool-0").releases == world.site_ledgers["site-0"].spent().releases == 6
    assert not world.site_ledgers["site-0"].alarms()
    assert not verify(path).problems
    world.close()
