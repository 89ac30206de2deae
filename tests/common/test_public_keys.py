"""Tests that each key has one spelling: an adversary's variants of an honest key are refused, or are recognised as
twins.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from client.policy import ServerFacts
from common.admission import StatedBooks
from common.errors import InvalidInput, Refused
from common.ledger.keys import public_hex, read_public_key, sealing_public_key, signing_public_key
from common.masking import MaskedRoster, MaskKey, Member
from common.peers import Peer, Peers, fingerprint
from common.privacy.mechanism import Protection
from common.public_keys import check_agreement_key, check_identity_key, point_of
from common.sealing import SealContext, seal, unseal
from common.sealing_rotation import SealingNotice
from tests.oracles import curve25519 as curve

SIGNED = bytes(64)


def agreement_keys(count: int) -> list[str]:
    return [public_hex(X25519PrivateKey.generate()) for _ in range(count)]


def identity_keys(count: int) -> list[str]:
    return [public_hex(Ed25519PrivateKey.generate()) for _ in range(count)]


def with_top_bit(key: str) -> str:
    raw = bytearray(bytes.fromhex(key))
    raw[31] |= 0x80
    return raw.hex()


def not_canonical() -> list[str]:
    """Return every number from p to 2²⁵⁵ − 1, with either sign."""
    numbers = [number | sign << 255 for number in range(curve.P, 2**255) for sign in (0, 1)]
    return [number.to_bytes(32, "little").hex() for number in numbers]


def small_agreement_keys() -> list[str]:
    """Return the points of small order: u of those on the curve, and −1, of order four on the twist."""
    return [curve.agreement_hex(u) for u in {curve.montgomery(point) for point in curve.small_order()} | {curve.P - 1}]


def small_identity_keys() -> list[str]:
    points = curve.small_order()
    return [curve.edwards_hex(point) for point in points] + [with_top_bit(curve.edwards_hex(p)) for p in points]


def twins(key: str) -> list[str]:
    """Return the other canonical keys that share the same secret with everybody: the point plus one of small order."""
    point = curve.of_montgomery(int.from_bytes(bytes.fromhex(key), "little"))
    found = {curve.agreement_hex(curve.montgomery(curve.added(point, small))) for small in curve.small_order()}
    return sorted(found - {key})


def test_every_key_that_is_made_is_accepted_as_it_is() -> None:
    for key in agreement_keys(50):
        assert check_agreement_key(key) == key == public_hex(sealing_public_key(key))
    for key in identity_keys(50):
        assert check_identity_key(key) == key == public_hex(signing_public_key(key))


AGREEMENT_DOORS = {
    "check": check_agreement_key,
    "sealing_public_key": sealing_public_key,
    "mask key": lambda key: MaskKey.from_json({**MaskKey("1" * 64, SIGNED).to_json(), "key": key}),
    "notice": lambda key: SealingNotice.from_json({"sealing_key": key, "replaces": [], "signature": ""}),
    "site.toml": lambda key: facts(sealing_key=key),
    "twins": point_of,
}


def facts(**keys: object) -> ServerFacts:
    known = {"sealing_key": "1" * 64, "signing_key": "2" * 64, **keys}
    return ServerFacts(objects_url="https://a", superlink="b:1", root_certificates="ca.crt", **known)  # type: ignore[arg-type]


@pytest.mark.parametrize("door", AGREEMENT_DOORS)
def test_an_x25519_key_has_one_spelling_wherever_it_enters(door: str) -> None:
    enters = AGREEMENT_DOORS[door]
    (key,) = agreement_keys(1)
    enters(key)
    for bad in (with_top_bit(key), *not_canonical(), *small_agreement_keys(), key.upper(), key[:-2], "", 7):
        if bad != key:
            with pytest.raises(InvalidInput):
                enters(bad)


IDENTITY_DOORS = {
    "check": check_identity_key,
    "signing_public_key": signing_public_key,
    "peer": lambda key: Peer("north", key),
    "fingerprint": fingerprint,
    "peers.json": lambda key: Peers.parse(
        b'{"schema": 1, "study": "%s", "peers": [{"site": "north", "key": "%s"}]}' % (b"5" * 64, str(key).encode()),
        origin="a file",
    ),
    "join request": lambda key: StatedBooks.from_json(
        {
            **StatedBooks("0" * 32, "1" * 64, Fraction(0), Protection("hospital", "replace-one")).to_json(),
            "answer_key": key,
        }
    ),
    "site.toml": lambda key: facts(signing_key=key),
    "site.toml, more": lambda key: facts(more_signing_keys=(key,)),
    "verifier's": lambda key: read_public_key(str(key)),
}


@pytest.mark.parametrize("door", IDENTITY_DOORS)
def test_an_ed25519_key_has_one_spelling_wherever_it_enters(door: str) -> None:
    enters = IDENTITY_DOORS[door]
    (key,) = identity_keys(1)
    enters(key)
    for bad in (*not_canonical(), *small_identity_keys(), key.upper() + "G", key[:-2], "", 7):
        with pytest.raises(InvalidInput):
            enters(bad)


def test_a_key_of_small_order_in_a_file_is_refused(tmp_path: Path) -> None:
    """Anybody can sign for such a key: R = S·B holds for the neutral element and any message."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    neutral = Ed25519PublicKey.from_public_bytes((1).to_bytes(32, "little"))
    neutral.verify((1).to_bytes(32, "little") + bytes(32), b"anything")
    path = tmp_path / "neutral.pub"
    path.write_bytes(neutral.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with pytest.raises(InvalidInput):
        read_public_key(str(path))


def test_a_signature_has_one_form() -> None:
    """S + L, or R in another spelling, verifies under no key."""
    key = Ed25519PrivateKey.generate()
    signature = key.sign(b"said")
    key.public_key().verify(signature, b"said")
    s = int.from_bytes(signature[32:], "little")
    other_r = bytes([*signature[:31], signature[31] ^ 0x80])
    for forged in (signature[:32] + (s + curve.ORDER).to_bytes(32, "little"), other_r + signature[32:]):
        with pytest.raises(InvalidSignature):
            key.public_key().verify(forged, b"said")


def test_keys_that_share_every_secret_are_one_key_on_a_roster() -> None:
    """A twin by a point of small order is a canonical key; only the shared secret shows whose it is."""
    (key, other) = agreement_keys(2)
    anybody = X25519PrivateKey.generate()
    secret = anybody.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(key)))
    found = twins(key)
    assert len(found) == 7
    for twin in found:
        assert anybody.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(twin))) == secret
        assert point_of(twin) == point_of(key) != point_of(other)
        with pytest.raises(InvalidInput, match="mask keys"):
            roster(key, other, twin)
    assert roster(key, other, agreement_keys(1)[0]).members


def roster(*keys: str) -> MaskedRoster:
    members = tuple(Member(f"site-{i}", MaskKey(key, SIGNED)) for i, key in enumerate(keys))
    made = MaskedRoster("a" * 64, "ledger", "b" * 64, 1, members)
    return MaskedRoster.from_json(made.to_json())


def test_a_sealed_code_whose_encapsulated_key_is_another_spelling_does_not_open() -> None:
    private = X25519PrivateKey.generate()
    context = SealContext(study="a" * 64, query="b" * 64, site="north", attempt=1)
    sealed = seal(np.arange(4), public_key=private.public_key(), context=context)
    assert unseal(sealed, private_key=private, context=context, dimension=4).tolist() == [0, 1, 2, 3]
    for other in (bytes.fromhex(with_top_bit(sealed[:32].hex())), *map(bytes.fromhex, twins(sealed[:32].hex()))):
        with pytest.raises(Refused):
            unseal(other + sealed[32:], private_key=private, context=context, dimension=4)
