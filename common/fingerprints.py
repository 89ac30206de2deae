"""``SHA256:…`` of something public, for two people to compare by telephone."""

from __future__ import annotations

import hashlib
import hmac
from base64 import b64encode

_PREFIX = "SHA256:"


def fingerprint_of(data: bytes) -> str:
    """``SHA256:`` and the base64 of the hash of ``data``, without padding."""
    return _PREFIX + b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def is_fingerprint(read_out: str, meant: str) -> bool:
    """Whether what a person typed is the fingerprint ``meant``, with or without its ``SHA256:``."""
    given = _PREFIX + read_out.strip().removeprefix(_PREFIX)
    return hmac.compare_digest(given.encode(errors="replace"), meant.encode())
