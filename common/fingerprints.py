"""Computes fingerprints of public data (``SHA256:…``), which two people compare by telephone."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode

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
