"""Signs, reads and checks a site's status report, which `consilium site status --json` prints.

The site's operator sends it to the consortium, for example by mail. The recipient knows the site's key from its
admission, so the signature proves who made the report and when. The report is displayed, and no decision depends on it.
Refuses a report that the site's key did not sign.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from cryptography.exceptions import InvalidSignature

from common.errors import InvalidInput
from common.ledger.keys import hex_bytes, signing_public_key
from common.ledger.rows import format_time
from common.site_facts import SiteFacts

_DOMAIN = b"consilium/site-account/v1\0"


def signed_account(facts: Mapping[str, Any], *, sign: Callable[[bytes], bytes], now: datetime) -> dict[str, Any]:
    """Return a signed status report: facts with the time and a signature over both.

    Args:
        facts: The report's facts, as values that JSON can represent.
        sign: Signs with the site's ledger key.
        now: Current time.

    Returns:
        The status report, as values that JSON can represent.
    """
    said = {**facts, "time": format_time(now)}
    return {**said, "signature": sign(_statement(said)).hex()}


def check_account(said: Mapping[str, Any], *, key: str) -> datetime:
    """Check the signature of a status report.

    Args:
        said: The report.
        key: The site's ledger key in hex.

    Returns:
        When it was signed, in UTC.

    Raises:
        InvalidInput: If the key did not sign the whole report, or its time has no UTC offset or does not exist in UTC.
    """
    rest = {name: value for name, value in said.items() if name != "signature"}
    try:
        signing_public_key(key).verify(hex_bytes(said["signature"]), _statement(rest))
        time = datetime.fromisoformat(said["time"])
    except (InvalidSignature, InvalidInput, ValueError, LookupError, TypeError, RecursionError) as error:
        raise InvalidInput(
            "signature of a site's status report",
            limit="a signature over the unchanged file by the key with which the site was admitted",
            remedy="ask the site for the whole output of `consilium site status --json`, unchanged",
        ) from error
    try:
        if time.tzinfo is not None:
            return time.astimezone(UTC)
    except OverflowError:  # before year 1, or after 9999, in UTC
        pass
    raise InvalidInput(
        "time in a site's status report",
        value=str(said["time"])[:40],
        limit="a time with its offset from UTC, such as +00:00",
        remedy="ask the site to run `consilium site status --json` again",
    )


def read_account(said: Any, *, keys: Mapping[str, str]) -> tuple[SiteFacts, datetime | None]:
    """Read a status report, and check its signature if it is signed and the site's key is known.

    Args:
        said: The report's JSON.
        keys: Ledger keys in hex, by site.

    Returns:
        The report's figures, and when it was signed, in UTC; None for the time if no signature was checked.

    Raises:
        InvalidInput: If the report has another form, or the key did not sign it.
    """
    facts = SiteFacts.from_json(said)
    key = keys.get(facts.site)
    return facts, check_account(said, key=key) if key and "signature" in said else None


def _statement(said: Mapping[str, Any]) -> bytes:
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _DOMAIN + text.encode()
