"""What a site's books know of the queries it accepted, and which of its limits one more would pass."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from common.privacy.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class Reservation:
    """An accepted query: charged on ``day`` (UTC date) in row ``seq``, for the server of this ledger and sealing key.

    One for every query a site ever accepted, so it holds what later decisions need; the query itself stands in its row.
    ``ledger`` and ``sealing_key`` are empty where the row does not say. ``draw`` is the newest sum paid for, if sealed.
    """

    query_id: str
    mechanism: Mechanism
    study_id: str
    day: str
    seq: int
    ledger: str
    sealing_key: str
    draw: int | None = None


@dataclass(frozen=True, slots=True)
class Shortfall:
    """Which of the site's limits a query would pass."""

    reason: str
    requested: Fraction
    remaining: Fraction
