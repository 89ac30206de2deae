"""Codes sealed to the server core's key, so that nothing between a site's worker and the core can read them.

Flower keeps every message body in a database on disk; what lies there is HPKE ciphertext (RFC 9180, base mode: X25519,
HKDF-SHA256, ChaCha20-Poly1305). The context (study, query, site, attempt) is bound as ``info``: a sealed code opened
under any other context fails. Refuses codes of the wrong length and ciphertexts of the wrong size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from numpy.typing import NDArray

from common.canonical import canonical_bytes
from common.errors import InvalidInput, Refused

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
SealingKeys = X25519PrivateKey | Sequence[X25519PrivateKey]
"""The key that opens codes, or several while it is being changed: the current one first."""

_OVERHEAD = 32 + 16  # the encapsulated key and the tag


@dataclass(frozen=True, slots=True)
class SealContext:
    """What a sealed code is bound to; both ends build it from what they know, it is never sent along."""

    study: str
    query: str
    site: str
    attempt: int

    def info(self) -> bytes:
        fields = {"attempt": self.attempt, "query": self.query, "site": self.site, "study": self.study}
        return b"consilium/code/v1\0" + canonical_bytes(fields)


def seal(code: NDArray[np.int64], *, public_key: X25519PublicKey, context: SealContext) -> bytes:
    """Seal an integer code int64[l]; the ciphertext's size depends on l alone, never on the values."""
    if code.dtype != np.int64 or code.ndim != 1:
        raise InvalidInput("code to seal", value=f"{code.dtype}[{code.ndim}-d]", limit="int64[l]")
    return _SUITE.encrypt(code.astype("<i8").tobytes(), public_key, info=context.info())


def seal_bytes(data: bytes, *, public_key: X25519PublicKey, info: bytes) -> bytes:
    """Seal bytes to a key, bound to ``info``, which names what they are and both ends know."""
    return _SUITE.encrypt(data, public_key, info=info)


def open_bytes(sealed: bytes, *, private_key: X25519PrivateKey, info: bytes) -> bytes:
    """The bytes that :func:`seal_bytes` sealed; InvalidTag or ValueError for another key, other info or other bytes."""
    return _SUITE.decrypt(sealed, private_key, info=info)


def unseal(sealed: bytes, *, private_key: SealingKeys, context: SealContext, dimension: int) -> NDArray[np.int64]:
    """Open a sealed code int64[l] with the first of the given keys that opens it."""
    if len(sealed) != _OVERHEAD + 8 * dimension:
        raise Refused("sealed-code", f"a sealed code has {len(sealed)} bytes, expected {_OVERHEAD + 8 * dimension}")
    for key in (private_key,) if isinstance(private_key, X25519PrivateKey) else private_key:
        with contextlib.suppress(InvalidTag, ValueError):
            data = _SUITE.decrypt(sealed, key, info=context.info())
            return np.frombuffer(data, dtype="<i8").astype(np.int64)
    raise Refused("sealed-code", "a sealed code cannot be opened for this study, query, site and attempt")
