"""Seals codes: encrypts them to the server core's key, so that no process between a site's worker and the core can read
them.

Workers encrypt, the core decrypts. Flower stores every message body in a database on disk; there a code is HPKE
ciphertext (RFC 9180, base mode: X25519, HKDF-SHA256, ChaCha20-Poly1305). The context (study, query, site, attempt) is
bound as ``info``, so decryption in any other context fails. Refuses codes of the wrong type and ciphertexts of the
wrong size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
from numpy.typing import NDArray

from common.canonical import canonical_bytes
from common.errors import SAME_VERSION, InvalidInput, Refused

SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
SealingKeys = X25519PrivateKey | Sequence[X25519PrivateKey]
"""The key that decrypts codes, or several keys while the key is being changed, the current one first."""

UNOPENED = "sealed-code"
"""Code of the refusal of a sealed code that no key opens."""
WRONG_SIZE = "code-size"
"""Code of the refusal of a sealed code whose size no honest site sends."""
_OVERHEAD = 32 + 16  # the encapsulated key and the tag


@dataclass(frozen=True, slots=True)
class SealContext:
    """The context to which a sealed code is bound. Both parties know it; it is never sent."""

    study: str
    query: str
    site: str
    attempt: int

    def info(self) -> bytes:
        """Return the context as bytes."""
        return b"consilium/code/v1\0" + canonical_bytes(asdict(self))


def seal(code: NDArray[np.int64], *, public_key: X25519PublicKey, context: SealContext) -> bytes:
    """Seal an integer code. The size of the ciphertext depends on l only, never on the values.

    Args:
        code: Int64 array of shape [l]. # sensitive
        public_key: The core's key.
        context: The study, query, site and attempt to which the ciphertext is bound.

    Returns:
        The ciphertext.

    Raises:
        InvalidInput: If the code has another type or shape.
    """
    if code.dtype != np.int64 or code.ndim != 1:
        raise InvalidInput(
            "code to seal",
            value=f"{code.dtype}[{code.ndim}-d]",
            limit="an array of int64 with one axis",
            remedy="round the code to integers first",
        )
    return SUITE.encrypt(code.astype("<i8").tobytes(), public_key, info=context.info())


def unseal(sealed: bytes, *, private_key: SealingKeys, context: SealContext, dimension: int) -> NDArray[np.int64]:
    """Decrypt a sealed code with the first of several keys that opens it.

    Args:
        sealed: The ciphertext.
        private_key: One key, or several while the key is being changed.
        context: The study, query, site and attempt to which the ciphertext is bound.
        dimension: Length l of the code.

    Returns:
        Int64 array of shape [l].

    Raises:
        Refused: With code ``code-size`` if the size is wrong, ``sealed-code`` if no key opens it in this context.
    """
    if len(sealed) != _OVERHEAD + 8 * dimension:
        raise Refused(
            WRONG_SIZE,
            f"a sealed code has {len(sealed)} bytes; allowed: {_OVERHEAD + 8 * dimension} bytes; to fix: "
            f"{SAME_VERSION}",
        )
    for key in (private_key,) if isinstance(private_key, X25519PrivateKey) else private_key:
        with contextlib.suppress(InvalidTag, ValueError):
            data = SUITE.decrypt(sealed, key, info=context.info())
            return np.frombuffer(data, dtype="<i8").astype(np.int64)
    raise Refused(
        UNOPENED,
        "a sealed code cannot be decrypted, because it was changed, or was sealed to another key or for another study, "
        "query, site or attempt; to fix: compare the site's kit and study file with the server's",
    )
