"""Signs and checks every message between the server's core and a site's worker.

Flower and the gateway carry messages and are asked nothing: a node's connection, a message's sender and the id that a
reply refers to are all things that an admitted hospital, or whoever holds the gateway, can choose. So the core signs
what it asks with its ledger's key, for one site, and the worker of that site checks it; the worker signs
its reply with its own ledger's key, over the very request it answers, and the core checks it. A signed message is the
64 bytes of an Ed25519 signature and then the body. Refuses whatever is not signed by a key that is expected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.canonical import canonical_bytes, sha256_bytes
from common.errors import Refused

SIGNATURE_BYTES = 64

Sign = Callable[[bytes], bytes]
"""Statement → its Ed25519 signature, 64 bytes."""


def asked(body: bytes, *, sign: Sign, site: str) -> bytes:
    """``body`` as the server asks it of one site."""
    return sign(_question(body, site=site)) + body


def open_asked(message: bytes, *, keys: Iterable[Ed25519PublicKey], site: str) -> bytes:
    """The body of a message that one of the server's ``keys`` signed for this site; else Refused."""
    return _opened(message, keys=keys, statement=_question(body_of(message), site=site))


def answered(body: bytes, *, sign: Sign, site: str, request: bytes) -> bytes:
    """``body`` as a site answers ``request``, the signed message it was sent."""
    return sign(_answer(body, site=site, request_sha256=sha256_bytes(request))) + body


def open_answered(message: bytes, *, key: Ed25519PublicKey, site: str, request_sha256: str) -> bytes:
    """The body of a reply to the very request of this hash by the site whose ledger's key this is; else Refused."""
    return _opened(message, keys=[key], statement=_answer(body_of(message), site=site, request_sha256=request_sha256))


def body_of(message: bytes) -> bytes:
    """What is said, whoever says it: for what needs no trust."""
    return message[SIGNATURE_BYTES:]


def _opened(message: bytes, *, keys: Iterable[Ed25519PublicKey], statement: bytes) -> bytes:
    for key in keys:
        try:
            key.verify(message[:SIGNATURE_BYTES], statement)
        except InvalidSignature:
            continue
        return body_of(message)
    raise Refused("unsigned", "the message is not signed by an expected key for this exchange")


def _question(body: bytes, *, site: str) -> bytes:
    return b"consilium/asked/v1\0" + canonical_bytes({"body": sha256_bytes(body), "site": site})


def _answer(body: bytes, *, site: str, request_sha256: str) -> bytes:
    fields = {"body": sha256_bytes(body), "request": request_sha256, "site": site}
    return b"consilium/answered/v1\0" + canonical_bytes(fields)
