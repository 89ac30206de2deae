"""Tests that masks follow their definition, and are new for every draw, query, roster, pair and acceptance."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from common.masking import DrawId, MaskedRoster, Member, mask_private_key, masks, pair_mask, signed_mask_key
from tests.oracles import masks as oracle

A, B, C, D = (letter * 64 for letter in "abcd")
DRAW = DrawId(study=A, ledger="ledger", batch=B, number=3)
SECRETS = {"north": b"n" * 32, "south": b"s" * 32, "west": b"w" * 32}
SIZE = 40


def keys(draw: DrawId = DRAW, *, nonce: str = "0" * 64) -> dict[str, X25519PrivateKey]:
    return {site: mask_private_key(secret, draw, nonce=nonce) for site, secret in SECRETS.items()}


def roster_of(privates: dict[str, X25519PrivateKey], draw: DrawId = DRAW) -> MaskedRoster:
    members = [
        Member(site, signed_mask_key(private, draw, sign=lambda _: bytes(64), site=site))
        for site, private in sorted(privates.items())
    ]
    return MaskedRoster(draw.study, draw.ledger, draw.batch, draw.number, tuple(members))


def test_the_oracle_s_primitives_give_the_standards_own_vectors() -> None:
    """The vectors are RFC 7748, section 5.2; RFC 8439, section 2.3.2's key with block and nonce 0 by A.1; RFC 5869,
    A.3.
    """
    scalar = bytes.fromhex("a546e36bf0527c9d3b16154b82465edd62144c0ac1fc5a18506a2244ba449ac4")
    u = bytes.fromhex("e6db6867583030db3594c1a424b15f7c726624ec26b3353b10a903a6d0ab1c4c")
    assert oracle.x25519(scalar, u).hex() == "c3da55379de9c6908e94ea4df28d084f32eccf03491c71f754b4075577a28552"
    block = b"".join(word.to_bytes(8, "little") for word in oracle.chacha20(bytes(32), 4))
    assert block.hex() == "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    assert oracle.hkdf(b"\x0b" * 22, b"").hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d"


def test_a_site_s_masks_are_those_of_the_definition_to_the_last_bit() -> None:
    privates = keys()
    roster = roster_of(privates)
    raw = {s: oracle.private_key(secret, study=A, batch=B, draw=3, nonce="0" * 64) for s, secret in SECRETS.items()}
    points = {site: oracle.x25519(key, (9).to_bytes(32, "little")) for site, key in raw.items()}
    assert {member.site: member.mask.key for member in roster.members} == {s: p.hex() for s, p in points.items()}
    written = {member.site: (member.mask.key, member.to_json()["mask"]["signature"]) for member in roster.members}
    assert oracle.roster_id(A, "ledger", B, 3, written) == roster.id
    for me in SECRETS:
        expected = np.zeros(SIZE, dtype=np.uint64)
        for peer in sorted(set(SECRETS) - {me}):
            shared = oracle.x25519(raw[me], points[peer])
            words = oracle.mask(shared, pair=(me, peer), query=C, roster=roster.id, words=SIZE)
            expected += np.array(words if me < peer else [-word % 2**64 for word in words], dtype=np.uint64)
        assert np.array_equal(masks(roster, me=me, private=privates[me], query=C, dimension=SIZE), expected)


def mask(privates: dict[str, X25519PrivateKey], roster: MaskedRoster, *, query: str = C) -> np.ndarray:
    (peer,) = (member for member in roster.members if member.site == "south")
    return pair_mask(roster, me="north", peer=peer, private=privates["north"], query=query, dimension=SIZE)


def test_no_two_queries_draws_rosters_or_acceptances_are_masked_alike() -> None:
    """If a mask were used twice, the difference of the two messages would reveal the difference of two codes."""
    privates, renewed = keys(), keys(nonce="1" * 64)
    roster = roster_of(privates)
    later, elsewhere = replace(DRAW, number=4), replace(DRAW, batch=D)
    found = {
        "as it is": mask(privates, roster),
        "another query of the batch": mask(privates, roster, query=D),
        "a smaller roster": mask(privates, replace(roster, members=roster.members[:2])),
        "the same keys under another roster": mask(privates, replace(roster, ledger="other")),
        "accepted again after a restore": mask(renewed, roster_of(renewed)),
        "one of the two accepted again": mask(privates, roster_of({**privates, "west": renewed["west"]})),
        "a later draw": mask(keys(later), roster_of(keys(later), later)),
        "another batch": mask(keys(elsewhere), roster_of(keys(elsewhere), elsewhere)),
        "another study": mask(
            keys(replace(DRAW, study=D)), roster_of(keys(replace(DRAW, study=D)), replace(DRAW, study=D))
        ),
    }
    for (one, first), (other, second) in combinations(found.items(), 2):
        assert not np.any(first == second), f"{one} / {other}"


@pytest.mark.parametrize("change", [{"number": 4}, {"batch": D}, {"study": D}])
def test_a_mask_key_is_another_for_every_draw_and_every_nonce(change: dict[str, object]) -> None:
    def key(draw: DrawId, nonce: str, secret: bytes = b"n" * 32) -> bytes:
        return mask_private_key(secret, draw, nonce=nonce).private_bytes_raw()

    plain = key(DRAW, "0" * 64)
    others = {key(DRAW, "1" * 64), key(replace(DRAW, **change), "0" * 64), key(DRAW, "0" * 64, b"s" * 32)}  # type: ignore[arg-type]
    assert len(others | {plain}) == 4
