"""Computes the masks of a sealed sum, which cancel only in the sum over all sites of its roster.

Sites mask their codes with this module; auditors recompute the masks. Every site of a draw (an attempt at a sum) has an
X25519 key made for this draw alone, signed with its ledger's key. Two sites k < j (by name) share the secret s =
HKDF-SHA256(X25519(k, j)), bound to the query and to exactly this roster. ChaCha20 under s gives pseudorandom numbers
that k adds to its code and j subtracts, modulo 2⁶⁴. If a member is missing, two sites see different rosters, or a key
was replaced, the masks do not cancel and the sum stays uniformly distributed.

Source: Bonawitz et al. 2017, without the secret shares. Refuses a roster that is not sorted or names a site or a key
twice; :func:`unconfirmed` finds keys that their site did not sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, ClassVar

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from common.canonical import canonical_bytes, sha256_bytes
from common.document import Between, Count, Document, Sha256
from common.envelope import Sign
from common.errors import ASK_OPERATOR, InvalidInput, Refused
from common.ledger.charges import SiteName
from common.ledger.keys import sealing_public_key, signing_public_key
from common.public_keys import AgreementKey, point_of

MAX_DRAW = 1_000_000
MAX_MEMBERS = 10_000

DrawNumber = Annotated[int, Between("number of a draw", 1, MAX_DRAW)]


def _check_signature(signature: bytes) -> None:
    if len(signature) != 64:
        raise InvalidInput("signature of a mask key", value=f"{len(signature)} bytes", limit="64 bytes")


@dataclass(frozen=True, slots=True)
class DrawId:
    """Identifies one draw (one attempt at a sealed sum): study, batch of queries, server's ledger, and number.

    Each draw has its own mask keys.
    """

    study: str
    ledger: str
    batch: str
    number: int


@dataclass(frozen=True, slots=True)
class MaskKey(Document):
    """A site's public X25519 key (hex) for one draw (attempt at a sealed sum), and its ledger's signature over it."""

    key: AgreementKey
    signature: Annotated[bytes, _check_signature]


@dataclass(frozen=True, slots=True)
class Member(Document):
    """One site that takes part in a sealed sum, with its mask key."""

    site: SiteName
    mask: MaskKey


@dataclass(frozen=True, slots=True)
class MaskedRoster(Document):
    """The sites of one draw (attempt at a sealed sum), sorted by name, with their mask keys."""

    SCHEMA: ClassVar = ("masked roster", 1)

    study: Sha256
    ledger: str
    batch: Sha256
    draw: DrawNumber
    members: Annotated[tuple[Member, ...], Count("members of a roster", least=2, most=MAX_MEMBERS)]
    _id: str = field(default="", init=False, repr=False, compare=False)

    def check(self) -> None:
        """Refuse a roster with unsorted or repeated sites, or with a mask key that occurs twice, in any encoding."""
        if not all(one.site < other.site for one, other in pairwise(self.members)):
            raise InvalidInput(
                "members of a roster", value=len(self.members), limit="each site once, sorted by site name"
            )
        if len({point_of(member.mask.key) for member in self.members}) != len(self.members):
            raise InvalidInput(
                "mask keys of a roster", limit="each key only once; two encodings of one key are the same key"
            )

    @property
    def draw_id(self) -> DrawId:
        """Identifier of the draw: study, server's ledger, batch and number."""
        return DrawId(self.study, self.ledger, self.batch, self.draw)

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the roster's sites, in order."""
        return tuple(member.site for member in self.members)

    def to_bytes(self) -> bytes:
        """Return the roster's canonical bytes, whose SHA-256 is :attr:`id`."""
        return canonical_bytes(self.to_json())

    @property
    def id(self) -> str:
        """SHA-256 of the roster's canonical bytes. It identifies the roster."""
        if not self._id:
            object.__setattr__(self, "_id", sha256_bytes(self.to_bytes()))
        return self._id


def mask_private_key(secret: bytes, draw: DrawId, *, nonce: str) -> X25519PrivateKey:
    """Derive a site's private mask key for one draw (attempt at a sealed sum).

    Args:
        secret: Secret bytes of the site's ledger.
        draw: The draw.
        nonce: Nonce that was drawn when the site accepted the offer.

    Returns:
        The key.
    """
    info = {"batch": draw.batch, "draw": draw.number, "nonce": nonce, "study": draw.study}
    seed = HKDF(SHA256(), 32, salt=None, info=b"consilium/mask-key/v1\0" + canonical_bytes(info)).derive(secret)
    return X25519PrivateKey.from_private_bytes(seed)


def signed_mask_key(private: X25519PrivateKey, draw: DrawId, *, sign: Sign, site: str) -> MaskKey:
    """Return the signed public key of a private mask key, which a site sends to the server.

    Args:
        private: The private mask key.
        draw: The draw.
        sign: Signs with the site's ledger key.
        site: Name of the site.

    Returns:
        The signed key.
    """
    key = private.public_key().public_bytes_raw().hex()
    return MaskKey(key, sign(_statement(key, draw, site=site)))


def is_signed(mask: MaskKey, draw: DrawId, *, identity: str, site: str) -> bool:
    """Return whether a site's ledger key signed its mask key for a draw (attempt at a sealed sum).

    Args:
        mask: The mask key.
        draw: The draw.
        identity: The site's ledger key (Ed25519, hex).
        site: Name of the site.

    Returns:
        True if the signature is valid.
    """
    try:
        signing_public_key(identity).verify(mask.signature, _statement(mask.key, draw, site=site))
    except (InvalidSignature, InvalidInput):
        return False
    return True


def unconfirmed(roster: MaskedRoster, *, me: str, peers: Mapping[str, str]) -> tuple[str, ...]:
    """Return the members whose mask key is not signed by the ledger key that this site has confirmed for them.

    Args:
        roster: The roster.
        me: Name of this site, which is left out.
        peers: Confirmed ledger keys by site.

    Returns:
        Names of sites.
    """
    return tuple(
        member.site
        for member in roster.members
        if member.site != me
        and not (
            member.site in peers
            and is_signed(member.mask, roster.draw_id, identity=peers[member.site], site=member.site)
        )
    )


def masks(
    roster: MaskedRoster, *, me: str, private: X25519PrivateKey, query: str, dimension: int
) -> NDArray[np.uint64]:
    """Return the mask of a site: Σ_{j > me} stream(s_j) − Σ_{j < me} stream(s_j) modulo 2⁶⁴. # sensitive

    Here j runs over the other sites by name, and stream(s_j) are the pseudorandom numbers of the secret s_j that this
    site shares with site j.

    Args:
        roster: The roster.
        me: Name of this site.
        private: Its private mask key of this draw.
        query: Id of the query.
        dimension: Length l of the code.

    Returns:
        Uint64 array of shape [l].

    Raises:
        Refused: With code ``roster`` if the roster has another key for this site, or a peer's key is degenerate.
    """
    own = next((member for member in roster.members if member.site == me), None)
    if own is None or own.mask.key != private.public_key().public_bytes_raw().hex():
        raise Refused(
            "roster",
            "the roster lacks this site, or has another mask key for it than the one given for this draw; to fix: "
            f"{ASK_OPERATOR}",
        )
    total = np.zeros(dimension, dtype=np.uint64)
    for member in roster.members:
        if member.site != me:
            total += pair_mask(roster, me=me, peer=member, private=private, query=query, dimension=dimension)
    return total


def pair_mask(
    roster: MaskedRoster, *, me: str, peer: Member, private: X25519PrivateKey, query: str, dimension: int
) -> NDArray[np.uint64]:
    """Return the part of a site's mask that is shared with one peer. # sensitive

    Args:
        roster: The roster.
        me: Name of the site.
        peer: The peer.
        private: The site's private mask key of this draw.
        query: Id of the query.
        dimension: Length l of the code.

    Returns:
        Uint64 array of shape [l]. The peer's part is its negative modulo 2⁶⁴.

    Raises:
        Refused: With code ``roster`` if the peer's key is degenerate.
    """
    info = {"pair": sorted((me, peer.site)), "query": query, "roster": roster.id}
    words = _stream(_shared(private, peer), info=canonical_bytes(info), words=dimension)
    return words if me < peer.site else np.uint64(0) - words


def _shared(private: X25519PrivateKey, member: Member) -> bytes:
    try:
        return private.exchange(sealing_public_key(member.mask.key))
    except InvalidInput as error:  # such as a point of small order, for which everybody knows the shared secret
        raise Refused(
            "roster",
            f"the mask key of {member.site} is not a valid public key; to fix: tell the consortium's operator this "
            "line; the sum needs a valid key of that site, or a roster without it",
        ) from error


def _stream(shared: bytes, *, info: bytes, words: int) -> NDArray[np.uint64]:
    """Return 64-bit numbers of the ChaCha20 stream. Its key is used for one query, roster and pair of sites only, so
    the nonce can be zero.
    """
    key = HKDF(SHA256(), 32, salt=None, info=b"consilium/mask/v1\0" + info).derive(shared)
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(8 * words))
    return np.frombuffer(stream, dtype="<u8").astype(np.uint64)


def _statement(key: str, draw: DrawId, *, site: str) -> bytes:
    fields = {"batch": draw.batch, "draw": draw.number, "key": key}
    fields |= {"ledger": draw.ledger, "site": site, "study": draw.study}
    return b"consilium/mask-key-of-a-site/v1\0" + canonical_bytes(fields)
