"""Signs and checks every message between the server's core and a site's worker.

Flower and the gateway only carry messages and are not trusted. An admitted hospital, or an attacker who controls the
gateway, can choose a node's connection, a message's sender and the id that a reply refers to. Therefore:

1. The core signs its request with its ledger's key, for one site.
2. The worker of that site checks the request.
3. The worker signs its reply with its own ledger's key, over exactly the request that it answers.
4. The core checks the reply.

A signed message is the 64 bytes of an Ed25519 signature followed by the body. Refuses messages that no expected key
signed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from common.canonical import canonical_bytes, sha256_bytes
from common.errors import Refused

SIGNATURE_BYTES = 64

Sign = Callable[[bytes], bytes]
"""A function that returns the Ed25519 signature (64 bytes) of a statement."""


def sign_request(body: bytes, *, sign: Sign, site: str) -> bytes:
    """Sign a request of the server to one site.

    Args:
        body: The request.
        sign: Signs with the server's ledger key.
        site: Name of the site.

    Returns:
        Signature and body.
    """
    return sign(_question(body, site=site)) + body


def open_request(message: bytes, *, keys: Iterable[Ed25519PublicKey], site: str) -> bytes:
    """Check a request that a site received.

    Args:
        message: Signature and body.
        keys: The server's public keys.
        site: Name of this site.

    Returns:
        The body.

    Raises:
        Refused: With code ``unsigned`` if none of the keys signed it for this site.
    """
    return _opened(message, keys=keys, statement=_question(body_of(message), site=site))


def sign_reply(body: bytes, *, sign: Sign, site: str, request: bytes) -> bytes:
    """Sign a site's reply to a request.

    Args:
        body: The reply.
        sign: Signs with the site's ledger key.
        site: Name of the site.
        request: The signed request that it answers.

    Returns:
        Signature and body.
    """
    return sign(_answer(body, site=site, request_sha256=sha256_bytes(request))) + body


def open_reply(message: bytes, *, key: Ed25519PublicKey, site: str, request_sha256: str) -> bytes:
    """Check a reply that the server received.

    Args:
        message: Signature and body.
        key: The site's public ledger key.
        site: Name of the site.
        request_sha256: Hash of the signed request.

    Returns:
        The body.

    Raises:
        Refused: With code ``unsigned`` if the key did not sign it as the reply of this site to this request.
    """
    return _opened(message, keys=[key], statement=_answer(body_of(message), site=site, request_sha256=request_sha256))


def body_of(message: bytes) -> bytes:
    """Return the body of a signed message without a check, for uses that need no trust.

    Args:
        message: Signature and body.

    Returns:
        The body.
    """
    return message[SIGNATURE_BYTES:]


def _opened(message: bytes, *, keys: Iterable[Ed25519PublicKey], statement: bytes) -> bytes:
    for key in keys:
        try:
            key.verify(message[:SIGNATURE_BYTES], statement)
        except InvalidSignature:
            continue
        return body_of(message)
    raise Refused(
        "unsigned",
        "the message is not signed by an expected key for this site and this request; to fix: compare the keys in "
        "kit and site.toml with those of `consilium provision list`",
    )


def _question(body: bytes, *, site: str) -> bytes:
    return b"consilium/asked/v1\0" + canonical_bytes({"body": sha256_bytes(body), "site": site})


def _answer(body: bytes, *, site: str, request_sha256: str) -> bytes:
    fields = {"body": sha256_bytes(body), "request": request_sha256, "site": site}
    return b"consilium/answered/v1\0" + canonical_bytes(fields)
