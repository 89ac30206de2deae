"""Tracks the queries a site accepted, and finds which limit a further one would exceed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from common.ledger.rows import Position
from common.privacy.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class Reservation:
    """An accepted query: charged on ``day`` (UTC date) in row ``seq``, for the server of this ledger and sealing key.

    It holds what later decisions need; the query itself stands in its row.
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


class Reservations(dict[str, Reservation]):
    """Every query a site ever accepted, by its id. One that is accepted again keeps its place.

    ``receipted``: the server's ledger whose receipt shows a query's release. ``codes``: the row of a query's code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.receipted: dict[str, str] = {}
        self.codes: dict[str, Position] = {}
        self._mechanisms: dict[Mechanism, Mechanism] = {}  # mostly the same: kept once

    def hold(self, reservation: Reservation) -> None:
        """Enter an acceptance, in the place of one of the same query before."""
        shared = self._mechanisms.setdefault(reservation.mechanism, reservation.mechanism)
        self[reservation.query_id] = replace(reservation, mechanism=shared)

    def newest_in(self, study_id: str) -> Mechanism | None:
        """Return the mechanism of the query that a study first asked last; None if it asked none."""
        return next((one.mechanism for one in reversed(self.values()) if one.study_id == study_id), None)

    def without_receipt(self) -> Iterator[Reservation]:
        """Acceptances whose release no receipt has shown, in order."""
        return (one for query_id, one in self.items() if query_id not in self.receipted)
