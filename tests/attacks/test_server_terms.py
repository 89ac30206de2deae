"""Tests altered fields in a malicious server's offers, one at a time. A site that accepts one charges its full cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from fractions import Fraction
from typing import Any

import pytest

from common.canonical import canonical_bytes
from common.envelope import body_of, sign_request
from common.errors import ConsiliumError
from common.messages import Offer, OfferReply, decode, encode
from common.peers import Peer
from common.privacy.mechanism import Mechanism, QuerySpec
from tests.federation import Federation, make_study

pytestmark = pytest.mark.slow

OTHER, ABSENT = "f" * 64, "absent"
WHOLE = [0, -1, 2, 3, 2**31, 2**63 - 1, 10**30, True, 1.0, -0.0, float("nan"), float("inf"), "1", None, [1], {}]
TEXTS = ["", "0" * 64, OTHER, "zero", "codec", "A" * 64, "\uff11" * 64, "a" * 64 + "\n", None, 1]
NUMBERS = ["nan", "inf", "-1/1", "0/1", "1/0", "-0/1", "1e9", "\u0661/1", 1.0, 5e-324, 1, True, None]
"""Replacements for the noise, besides rationals that are near it."""

QUERY = {field.name for field in fields(QuerySpec) if field.init}
MECHANISM = {field.name for field in fields(Mechanism)}
HOLDERS: dict[str, tuple[object, ...]] = {
    **dict.fromkeys((field.name for field in fields(Offer)), ()),
    **dict.fromkeys(QUERY, ("queries", 0)),
    **dict.fromkeys(MECHANISM, ("queries", 0, "mechanism")),
}
"""Where each field of an offer lies in its JSON form: in the offer, in its query, or in the query's mechanism."""

CONSENTED = {"issued", "batch", "codec", "volumes", "round", "dimension", "draw"}
"""Fields of which a study allows other values: a new query, or a new draw of one, which is charged."""


@pytest.fixture(scope="module", params=["open", "sealed"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    terms: dict[str, Any] = {"aggregation": "sealed-sum"} if request.param == "sealed" else {}
    study = make_study(quorum=3, planned_queries=40, epsilon=200.0, **terms)
    with Federation(tmp_path_factory.mktemp(request.param), study=study) as federation:
        yield federation


def offered(world: Federation) -> dict[str, Any]:
    """Return an honest offer as JSON."""
    sealed = {"draw": 1, "peers": tuple(Peer(site.name, site.answer_key) for site in world.sites)}
    more = sealed if world.study.privacy.sealed else {}
    document: dict[str, Any] = json.loads(encode(world.offer(world.planned()[:1], **more)))
    return document


def near(noise_std: str) -> list[str]:
    """Return rationals that differ from the noise in the 17th digit or by a factor, and another spelling of it."""
    exact = Fraction(noise_std)
    others = [exact * Fraction(10**17 + one, 10**17) for one in (-1, 1)] + [exact * 2, exact / 2, Fraction(1, 2**100)]
    double = f"{2 * exact.numerator}/{2 * exact.denominator}"
    return [*(f"{one.numerator}/{one.denominator}" for one in others), double, f" {noise_std}"]


def other_values(name: str, value: object) -> list[Any]:
    if name == "noise_std":
        assert isinstance(value, str)
        return [*NUMBERS, *near(value), ABSENT]
    more = [[], value + value, [OTHER], [*value, OTHER]] if isinstance(value, list) else []
    return [*WHOLE, *TEXTS, *more, ABSENT]


def charged(world: Federation) -> set[tuple[str, int | None]]:
    return {(one.query_id, one.draw) for one in world.site_ledgers["site-0"].books.reservations.values()}


@pytest.mark.parametrize("name", sorted(HOLDERS))
def test_an_offer_that_is_altered_is_accepted_at_its_full_price_or_not_at_all(world: Federation, name: str) -> None:
    site, worker = world.site_ledgers["site-0"], world.workers[100]
    price = world.planned()[0].mechanism.mu_squared(world.study.privacy.protection)
    base: Any = offered(world)
    worker.handle(canonical_bytes(base))
    for step in HOLDERS[name]:
        base = base[step]
    for value in other_values(name, base.get(name)):
        changed = holder = offered(world)
        for step in HOLDERS[name]:
            holder = holder[step]
        holder[name] = value
        if value == ABSENT:
            del holder[name]
        body = json.dumps(changed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        before, held = site.spent(), charged(world)
        try:
            reply = decode(body_of(worker.answer(sign_request(body, sign=world.ledger.sign, site="site-0"))))
        except ConsiliumError:
            reply = None
        accepted = isinstance(reply, OfferReply) and reply.reason == "accepted"
        new = len(charged(world) - held)
        assert site.spent().mu_squared - before.mu_squared == new * price
        assert new <= accepted, value
        assert not accepted or name in CONSENTED or holder.get(name) == base.get(name), value
