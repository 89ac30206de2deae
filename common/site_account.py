"""Defines the signed account of its state that a site's operator hands over.

Such a file goes by mail. Whoever gets it knows the key from the site's admission, and so whose word it is and of when;
nobody acts on what it says.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from cryptography.exceptions import InvalidSignature

from common.errors import InvalidInput
from common.ledger.keys import hex_bytes, signing_public_key
from common.ledger.rows import format_time

_DOMAIN = b"consilium/site-account/v1\0"


def signed_account(facts: Mapping[str, Any], *, sign: Callable[[bytes], bytes], now: datetime) -> dict[str, Any]:
    """``facts`` with the time and a signature over all of it, JSON-ready."""
    said = {**facts, "time": format_time(now)}
    return {**said, "signature": sign(_statement(said)).hex()}


def check_account(said: Mapping[str, Any], *, key: str) -> datetime:
    """When an account was signed. InvalidInput unless it bears the signature of ``key`` (hex) over all that it says."""
    rest = {name: value for name, value in said.items() if name != "signature"}
    try:
        signing_public_key(key).verify(hex_bytes(said["signature"]), _statement(rest))
        time = datetime.fromisoformat(said["time"])
    except (InvalidSignature, InvalidInput, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidInput(
            "signature of a site's account",
            limit="that of the key the site was admitted with, over the file as it was printed",
            remedy="ask the site for what `consilium site status --json` prints, whole and unchanged",
        ) from error
    if time.tzinfo is None:
        raise InvalidInput("time of a site's account", limit="with its offset from UTC")
    return time


def _statement(said: Mapping[str, Any]) -> bytes:
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _DOMAIN + text.encode()
