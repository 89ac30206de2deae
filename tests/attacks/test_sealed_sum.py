"""Tests the attack of a server that asks sites for anything in any order: it learns only sums of whole rosters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from client.ledger.site_codes import KEYS_A_CHARGE
from common.config import CollectionConfig
from common.errors import ConsiliumError, Refused
from common.ledger.charges import RosterEntry
from common.masking import MaskedRoster, Member
from common.messages import OfferReply, decode, encode
from common.peers import Peer
from common.privacy.mechanism import QuerySpec
from common.privacy.shares import share_std
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from tests.federation import Federation, make_study
from tests.worlds import receipts_of

pytestmark = pytest.mark.slow

SITES, QUERIES = 4, 60
Message = tuple[int, int, tuple[str, ...]]
"""The sender, the draw, and the roster whose mask keys were used."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    study = make_study(
        quorum=3, planned_queries=QUERIES, epsilon=500.0, aggregation="sealed-sum", spare_draws=4 * QUERIES
    )
    federation = Federation(
        tmp_path_factory.mktemp("sealed"), study=replace(study, collection=CollectionConfig()), sites=SITES
    )
    yield federation
    federation.close()


@pytest.fixture(scope="module")
def queries(world: Federation) -> Iterator[QuerySpec]:
    return iter(world.planned())


offers = st.tuples(st.just("offer"), st.integers(0, SITES - 1), st.integers(1, 3))
requests = st.tuples(
    st.just("ask"),
    st.integers(0, SITES - 1),
    st.integers(1, 3),
    st.lists(st.integers(0, SITES - 1), min_size=2, max_size=SITES, unique=True),
    st.integers(0, 3),
)


def honest_run(draw: int) -> list[tuple]:  # type: ignore[type-arg]
    everybody = list(range(SITES))
    return [("offer", site, draw) for site in everybody] + [("ask", site, draw, everybody, 0) for site in everybody]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(offers | requests, max_size=14), st.lists(st.integers(0, SITES - 1), max_size=6))
def test_only_whole_rosters_add_up_to_anything(
    world: Federation,
    queries: Iterator[QuerySpec],
    actions: list[tuple],
    order: list[int],  # type: ignore[type-arg]
) -> None:
    """Offers and requests come in any order, omitted, doubled and replayed, with differing rosters and with mask keys
    of other draws. The replies are then added and subtracted in every way.
    """
    query = next(queries)
    peers = tuple(Peer(site.name, site.answer_key) for site in world.sites)
    keys: dict[tuple[int, int], Member] = {}
    words: dict[Message, np.ndarray] = {}
    before = {site.name: world.site_ledgers[site.name].spent().releases for site in world.sites}
    offered, asked = honest_run(1)[:SITES], honest_run(1)[SITES:]
    for kind, site, draw, *rest in [*offered, *(asked[i] for i in order), *actions, *honest_run(4)]:
        name, worker = world.sites[site].name, world.workers[world.sites[site].node_id]
        batch = f"{int(query.id[:8], 16):064x}"
        try:
            if kind == "offer":
                offer = world.offer([query], draw=draw, peers=peers, batch=batch)
                reply = decode(worker.handle(encode(offer)))
                if isinstance(reply, OfferReply) and reply.mask is not None:
                    keys[site, draw] = Member(name, reply.mask)
                continue
            members, of_draw = rest
            found = [keys.get((one, of_draw or draw)) or keys.get((one, draw)) for one in sorted(members)]
            roster = tuple(member for member in found if member is not None)
            request = world.request([query], draw=draw, members=roster, batch=batch)
            (answer,) = world.opened(worker.handle(encode(request)), [query], site=name)
        except (ConsiliumError, ValueError):
            continue
        message = (site, draw, tuple(member.mask.key for member in roster))
        known = words.setdefault(message, answer)
        assert np.array_equal(known, answer), "the same request got other words"
    for site in range(SITES):
        drawn = {draw for sender, draw, _ in words if sender == site}
        assert len([1 for sender, *_ in words if sender == site]) == len(drawn), "two messages for one draw"
        spent = world.site_ledgers[f"site-{site}"].spent().releases - before[f"site-{site}"]
        assert spent >= len(drawn), "a message that was not charged"
    code_and_noise = 2.0**40 + 20 * float(share_std(query.mechanism, sites=SITES)) * SITES
    some = list(words)[:7]
    for signs in product((-1, 0, 1), repeat=len(some)):
        parts = [sign * words[one] for sign, one in zip(signs, some, strict=True) if sign]
        if parts:
            total = np.sum(parts, axis=0, dtype=np.int64)  # wraps, as the sum does
            readable = np.abs(total.astype(float)).max() < code_and_noise
            assert not readable or whole(dict(zip(some, signs, strict=True))), signs


def whole(taken: dict[Message, int]) -> bool:
    """Return whether these are complete rosters, each added or subtracted as a whole, and nothing else."""
    groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for (_, draw, roster), sign in taken.items():
        groups.setdefault((draw, roster), []).append(sign)
    return all(
        set(signs) == {0} or (len(set(signs)) == 1 and len(signs) == len(roster))
        for (_, roster), signs in groups.items()
    )


def test_a_receipt_opens_no_draw_that_a_restored_site_may_have_answered(tmp_path: Path) -> None:
    """The server has two rosters of one query and draw. Site-0 answered the first before its ledger was restored. For
    the second the server invents a receipt, which the charge for the lost rows would cover, too.
    """
    study = make_study(quorum=3, planned_queries=4, aggregation="sealed-sum", spare_draws=20)
    with Federation(tmp_path / "world", study=study, sites=5) as world:
        one, other = world.planned()[:2]
        peers = tuple(Peer(site.name, site.answer_key) for site in world.sites)
        path = world.root / "site-0" / "site-ledger.sqlite"

        def member(site: int, asked: list[QuerySpec], batch: str) -> Member:
            offer = world.offer(asked, draw=1, peers=peers, batch=batch)
            reply = decode(world.workers[100 + site].handle(encode(offer)))
            assert isinstance(reply, OfferReply)
            assert reply.mask is not None
            return Member(f"site-{site}", reply.mask)

        def answers(query: QuerySpec, members: tuple[Member, ...], batch: str) -> bool:
            request = world.request([query], draw=1, members=members, batch=batch)
            try:
                world.workers[100].handle(encode(request))
            except Refused:
                return False
            return True

        backup(path, tmp_path / "monday.sqlite")
        backup(world.root / "ledger.sqlite", tmp_path / "fork.sqlite")
        assert answers(one, tuple(member(site, [one], "b" * 64) for site in (0, 1, 2)), "b" * 64)
        ledger = world.put_back(tmp_path / "monday.sqlite")
        members = (member(0, [other], "c" * 64), *(member(site, [one, other], "c" * 64) for site in (3, 4)))
        roster = MaskedRoster(study.id, world.ledger.ledger_id, "c" * 64, 1, members)
        entries = tuple(RosterEntry(one.site, one.site.replace("site", "pool")) for one in members)
        with Ledger.open(tmp_path / "fork.sqlite", signing_key=world.signing_key, restored=True) as fork:
            fork._restoring = False
            fork.charge_draw(study_id=study.id, roster=entries, masks=roster, queries=[one])
            for receipt in receipts_of(fork, "site-0"):
                ledger.record_receipt(receipt, public_key=world.signing_key.public_key())
        sent = 1 + answers(one, members, "c" * 64) + answers(other, members, "c" * 64)
        assert (sent, ledger.spent().releases) == (2, 2)
        assert not ledger.alarms()


def test_masked_words_are_uniform_and_do_not_change_their_law_with_the_code(
    tmp_path: Path,
) -> None:
    """χ² is computed over the bytes that one site sends, for two codes far apart."""
    from common.masking import DrawId, MaskedRoster, mask_private_key, masks, signed_mask_key

    draw = DrawId("a" * 64, "l", "b" * 64, 1)

    def member(name: str, secret: bytes) -> Member:
        private = mask_private_key(secret, draw, nonce="0" * 64)
        return Member(name, signed_mask_key(private, draw, sign=lambda _: bytes(64), site=name))

    secrets = {f"site-{i}": bytes([i + 1]) * 32 for i in range(3)}
    roster = MaskedRoster("a" * 64, "l", "b" * 64, 1, tuple(member(*item) for item in secrets.items()))
    private = mask_private_key(secrets["site-0"], draw, nonce="0" * 64)
    size = 1 << 15
    for fill, query in ((0, "c" * 64), (65_536, "d" * 64)):
        code = np.full(size, fill, dtype=np.int64).view(np.uint64)
        sent = code + masks(roster, me="site-0", private=private, query=query, dimension=size)
        for byte in range(8):
            counts = np.bincount((sent >> np.uint64(8 * byte)).astype(np.uint8), minlength=256)
            assert chisquare(counts).pvalue > 1e-6


def test_a_draw_offered_under_ever_other_batches_fills_no_disk_and_costs_nothing(tmp_path: Path) -> None:
    study = make_study(quorum=3, aggregation="sealed-sum", spare_draws=1)
    federation = Federation(tmp_path, study=study)
    query, worker, ledger = federation.planned()[0], federation.workers[100], federation.site_ledgers["site-0"]
    peers = tuple(Peer(site.name, site.answer_key) for site in federation.sites)

    def offered(draw: int, batch: int) -> OfferReply:
        offer = federation.offer([query], draw=draw, peers=peers, batch=f"{batch:064x}")
        reply = decode(worker.handle(encode(offer)))
        assert isinstance(reply, OfferReply)
        return reply

    reasons = [offered(1, batch).reason for batch in range(40)]
    assert reasons == ["accepted"] * KEYS_A_CHARGE + ["old-draw"] * (40 - KEYS_A_CHARGE)
    assert ledger.spent().releases == 1
    assert [row.kind for row in ledger.rows()].count("mask-key") == KEYS_A_CHARGE
    assert offered(1, 0).mask is not None  # keys that were already given stay valid
    assert offered(2, 41).reason == "accepted"
    assert ledger.spent().releases == 2
    federation.close()
