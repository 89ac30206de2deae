"""Computes masks by the standards' pseudocode: HKDF (RFC 5869) of HMAC, X25519 (RFC 7748), ChaCha20 (RFC 8439)."""

from __future__ import annotations

import hashlib
import hmac
import json
import struct

P = 2**255 - 19


def hkdf(secret: bytes, info: bytes) -> bytes:
    """Return 32 bytes of HKDF-SHA256 without a salt, which then counts as 32 zeros."""
    extracted = hmac.digest(bytes(32), secret, "sha256")
    return hmac.digest(extracted, info + b"\x01", "sha256")


def x25519(scalar: bytes, u: bytes) -> bytes:
    """Compute X25519 as RFC 7748, section 5, defines it."""
    clamped = bytearray(scalar)
    clamped[0] &= 248
    clamped[31] = clamped[31] & 127 | 64
    k, x1 = int.from_bytes(clamped, "little"), int.from_bytes(u, "little") % 2**255 % P
    x2, z2, x3, z3 = 1, 0, x1, 1
    for bit in range(254, -1, -1):
        if k >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = (x2 + z2) % P, (x2 - z2) % P, (x3 + z3) % P, (x3 - z3) % P
        da, cb, aa, bb = d * a % P, c * b % P, a * a % P, b * b % P
        x3, z3 = (da + cb) ** 2 % P, x1 * (da - cb) ** 2 % P
        x2, z2 = aa * bb % P, (aa - bb) * (aa + 121665 * (aa - bb)) % P
        if k >> bit & 1:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, -1, P) % P).to_bytes(32, "little")


def chacha20(key: bytes, words: int) -> list[int]:
    """Return the first 64-bit little-endian words of the stream from block 0, nonce 0."""
    out = b""
    for block in range((words + 7) // 8):
        start = [*struct.unpack("<4I", b"expand 32-byte k"), *struct.unpack("<8I", key), block, 0, 0, 0]
        state = list(start)
        for _ in range(10):
            for a, b, c, d in ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)):
                _quarter(state, a, b, c, d)
            for a, b, c, d in ((0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)):
                _quarter(state, a, b, c, d)
        out += struct.pack("<16I", *((one + two) % 2**32 for one, two in zip(state, start, strict=True)))
    return list(struct.unpack(f"<{words}Q", out[: 8 * words]))


def _quarter(state: list[int], a: int, b: int, c: int, d: int) -> None:
    for one, two, three, left in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
        state[one] = (state[one] + state[two]) % 2**32
        mixed = state[three] ^ state[one]
        state[three] = (mixed << left | mixed >> 32 - left) % 2**32


def private_key(secret: bytes, *, study: str, batch: str, draw: int, nonce: str) -> bytes:
    """Return a site's key for one draw."""
    info = {"batch": batch, "draw": draw, "nonce": nonce, "study": study}
    return hkdf(secret, b"consilium/mask-key/v1\0" + written(info))


def mask(shared: bytes, *, pair: tuple[str, str], query: str, roster: str, words: int) -> list[int]:
    """Return the numbers that the site with the first name adds and the other one subtracts."""
    info = {"pair": sorted(pair), "query": query, "roster": roster}
    return chacha20(hkdf(shared, b"consilium/mask/v1\0" + written(info)), words)


def roster_id(study: str, ledger: str, batch: str, draw: int, members: dict[str, tuple[str, str]]) -> str:
    """Return the roster's id. ``members`` maps a name to (mask key, signature), as they are written."""
    listed = [{"mask": {"key": key, "signature": said}, "site": site} for site, (key, said) in sorted(members.items())]
    document = {"batch": batch, "draw": draw, "ledger": ledger, "members": listed, "schema": 1, "study": study}
    return hashlib.sha256(written(document)).hexdigest()


def written(document: dict[str, object]) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
