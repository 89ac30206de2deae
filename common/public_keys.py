"""Checks public keys written as text, and computes the fingerprints that two people compare by telephone.

A key is written as 64 hex digits: the canonical encoding of its point on the curve. It is checked wherever it is read.
A point of Curve25519 has several encodings. With p = 2²⁵⁵ − 19, X25519 ignores the top bit of the last byte and reduces
numbers of p or more modulo p. Ed25519 libraries accept numbers of p or more, and a negative zero. Adding a point of
small order gives further keys with the same X25519 secret. A check by text that no key occurs twice would accept such
*twins* as different keys. Two keys are twins if and only if :func:`point_of` is equal for both.

Refuses every encoding but the canonical one, and points of small order, for which anybody can compute shared secrets
and forge signatures. A number that encodes no point is not refused, because no signature by it can be valid.

Source: RFC 7748, section 5; RFC 8032, section 5.1.3.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode
from functools import lru_cache
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from common.errors import InvalidInput

_PREFIX = "SHA256:"


def fingerprint_of(data: bytes) -> str:
    """Return the fingerprint of data: ``SHA256:`` and the unpadded base64 of its SHA-256.

    Args:
        data: The data.

    Returns:
        The fingerprint.
    """
    return _PREFIX + b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def is_fingerprint(read_out: str, meant: str) -> bool:
    """Return whether a typed text is the expected fingerprint.

    Args:
        read_out: What a person typed, with or without ``SHA256:``.
        meant: The expected fingerprint.

    Returns:
        True if they agree.
    """
    given = _PREFIX + read_out.strip().removeprefix(_PREFIX)
    return hmac.compare_digest(given.encode(errors="replace"), meant.encode())


_P = 2**255 - 19
_SIGN = 1 << 255
_ANY_SCALAR = X25519PrivateKey.from_private_bytes(bytes(range(32)))
_HEX = frozenset("0123456789abcdef")


def check_agreement_key(text: object) -> str:
    """Return a text if it is a canonical X25519 public key that is not of small order.

    Args:
        text: A mask key or a sealing key: 64 lower-case hex digits.

    Returns:
        The text.

    Raises:
        InvalidInput: For another length or spelling, a number from 2²⁵⁵ − 19 on, or a point of small order.
    """
    key = _hex(text)
    _ = _of_agreement(key)
    return key


def check_identity_key(text: object) -> str:
    """Return a text if it is a canonical Ed25519 public key that is not of small order.

    Args:
        text: A ledger's key: 64 lower-case hex digits.

    Returns:
        The text.

    Raises:
        InvalidInput: For another length or spelling, a number from 2²⁵⁵ − 19 on, or a point of small order.
    """
    key = _hex(text)
    _ = _of_identity(key)
    return key


AgreementKey = Annotated[str, check_agreement_key]
"""An X25519 public key in hex."""

IdentityKey = Annotated[str, check_identity_key]
"""An Ed25519 public key in hex."""


def point_of(agreement_key: str) -> bytes:
    """Return the secret that an X25519 key shares with one fixed key. It is equal for two keys only if they are twins.

    Args:
        agreement_key: 64 hex digits.

    Returns:
        32 bytes.

    Raises:
        InvalidInput: If :func:`check_agreement_key` refuses the key.
    """
    return _of_agreement(_hex(agreement_key))


@lru_cache(maxsize=4096)
def _of_agreement(key: str) -> bytes:
    number = int.from_bytes(bytes.fromhex(key), "little")
    if number >= _P:
        raise _refused(key)
    return _multiplied(number, key)


@lru_cache(maxsize=4096)
def _of_identity(key: str) -> bytes:
    """Convert an Ed25519 key y to the X25519 key u = (1 + y)/(1 − y), and return the secret that u shares with one
    fixed key.
    """
    y = int.from_bytes(bytes.fromhex(key), "little") & (_SIGN - 1)
    if y >= _P or y == 1:  # y = 1 is the neutral element, which has no u
        raise _refused(key)
    return _multiplied((1 + y) * pow(1 - y, -1, _P) % _P, key)


def _multiplied(u: int, key: str) -> bytes:
    try:
        return _ANY_SCALAR.exchange(X25519PublicKey.from_public_bytes(u.to_bytes(32, "little")))
    except ValueError as error:  # zero: the point is of small order
        raise _refused(key) from error


def _hex(text: object) -> str:
    if not isinstance(text, str) or len(text) != 64 or set(text) - _HEX:
        raise InvalidInput("public key", value=text, limit="64 lower-case hex digits")
    return text


def _refused(key: str) -> InvalidInput:
    return InvalidInput(
        "public key",
        value=key,
        limit="the canonical encoding of a Curve25519 point that is not of small order",
        remedy="copy the key again from the output of its owner's `consilium`, which makes only such keys",
    )
