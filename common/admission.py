"""Defines a site's join request: its name, its patient pool with its ledger's totals, and its public node key.

The signature proves that the sender holds the key; who the sender is, two people settle by reading the request's
fingerprint to each other. It covers all that is asked, so that nobody is admitted under another name, for another pool
or into another study than was read out. Refuses a request that was altered, a name that is more than one segment of a
path, and a key that is spelled in another way than ours.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from common.canonical import canonical_bytes, check_hash, check_name, check_pool
from common.document import FLAT, Document
from common.errors import InvalidInput
from common.fingerprints import fingerprint_of, is_fingerprint
from common.objects import write_atomically
from common.pki import load_node_key, node_key_line, parse_node_key
from common.privacy.mechanism import Protection
from common.public_keys import IdentityKey
from common.reading import parse_json, read_text

MAX_REQUEST_BYTES = 1 << 16
_FINGERPRINT_DOMAIN = b"consilium/join/v1\0"


@dataclass(frozen=True, slots=True)
class KitFacts(Document):
    """What a startup kit's kit.json says: the site's name, the server's public keys and addresses."""

    objects_url: str
    sealing_key: str
    signing_key: str
    site: str
    superlink: str

    def check(self) -> None:
        check_name(self.site, what="site in the startup kit")


@dataclass(frozen=True, slots=True)
class StatedBooks(Document):
    """What a site says of its pool's books: their ledger's id and key, and Σμ² spent so far under its protection.

    ``answer_key`` (Ed25519, hex) is the key of that ledger, which signs all that the site replies.
    """

    ledger_id: str
    answer_key: IdentityKey
    mu_squared: Fraction
    protection: Annotated[Protection, FLAT]

    def check(self) -> None:
        ledger_id = self.ledger_id
        if len(ledger_id) != 32 or set(ledger_id) - set("0123456789abcdef") or self.mu_squared < 0:
            raise InvalidInput(
                "books of a join request", value=ledger_id, limit="an id of 32 hex digits and a sum of at least 0"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest(Document):
    """What a site sends to the consortium; everything in it is public. Older sites say nothing of their ``books``."""

    study: str
    site: str
    pool: str
    node_key: str
    books: StatedBooks | None = None

    def __post_init__(self) -> None:
        check_hash(self.study)
        check_name(self.site, what="site in the join request")
        check_pool(self.pool, what="patient pool in the join request")
        if node_key_line(parse_node_key(self.node_key)) != self.node_key:
            raise InvalidInput(
                "node key in the join request", limit="ecdsa-sha2-nistp384 and base64, without a comment"
            )

    @property
    def fingerprint(self) -> str:
        """``SHA256:…`` of all that is signed (study, site, pool, key), to be read out."""
        return fingerprint_of(_FINGERPRINT_DOMAIN + self.statement())

    def has_fingerprint(self, read_out: str) -> bool:
        """Whether ``read_out`` is this request's fingerprint, with or without its ``SHA256:``."""
        return is_fingerprint(read_out, self.fingerprint)

    def statement(self) -> bytes:
        """What is signed."""
        return canonical_bytes({"join": 1, **self.to_json()})


@dataclass(frozen=True, slots=True)
class SignedRequest(Document):
    """The request as its file holds it; whether the signature holds is checked by :func:`read_request`."""

    request: Annotated[JoinRequest, FLAT]
    signature: str


def write_request(
    path: Path, *, study: str, site: str, pool: str, node_key: Path, books: StatedBooks | None = None
) -> JoinRequest:
    """Make and sign a request with the private key in ``node_key``."""
    key = load_node_key(node_key)
    request = JoinRequest(study=study, site=site, pool=pool, node_key=node_key_line(key.public_key()), books=books)
    signature = b64encode(key.sign(request.statement(), ec.ECDSA(hashes.SHA384()))).decode()
    record = SignedRequest(request, signature).to_json()
    write_atomically(path, (json.dumps(record, indent=1) + "\n").encode())
    return request


def read_request(path: Path) -> JoinRequest:
    """A request whose signature holds; :class:`InvalidInput` for any other."""
    remedy = "ask the site for its request.json again"
    text = read_text(path, what="join request", most_bytes=MAX_REQUEST_BYTES, remedy=remedy)
    record = parse_json(text, what="join request", value=str(path), remedy=remedy)
    signed = SignedRequest.from_json(record)
    request = signed.request
    try:
        parse_node_key(request.node_key).verify(
            b64decode(signed.signature, validate=True), request.statement(), ec.ECDSA(hashes.SHA384())
        )
    except (InvalidSignature, ValueError) as error:
        raise InvalidInput("signature of the join request", limit="the node key's own", remedy=remedy) from error
    return request
