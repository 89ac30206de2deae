"""Tracks the queries that a site accepted; part of a site's totals (:mod:`common.ledger.site_state`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from common.ledger.rows import Position
from common.privacy.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class Reservation:
    """An accepted query, with the facts that later decisions need. The query itself is in its row.

    Attributes:
        query_id: The query's id.
        mechanism: Its mechanism.
        study_id: The study's id.

        seq: Number of the row that records the acceptance.
        ledger: Id of the server's ledger; empty if the row does not name it.
        sealing_key: Server's sealing key; empty if the row does not name it.
        draw: In a sealed study, number of the newest draw that was paid for.
    """

    query_id: str
    mechanism: Mechanism
    study_id: str
    seq: int
    ledger: str
    sealing_key: str
    draw: int | None = None


@dataclass(frozen=True, slots=True)
class Shortfall:
    """The limit of this site that a query would exceed, the query's μ², and the μ² that the limit has left."""

    reason: str
    requested: Fraction
    remaining: Fraction


class Reservations(dict[str, Reservation]):
    """Every query that a site ever accepted, by its id, in the order of their first acceptance.

    Attributes:
        receipted: For each query whose release a receipt shows, the id of the server's ledger that issued the receipt.
        codes: For each query with a computed code, the position of the code's row.
        aside: For each query, the number of releases that this site knows only from receipts that it did not accept
            because they contradicted its ledger.
    """

    def __init__(self) -> None:
        super().__init__()
        self.receipted: dict[str, str] = {}
        self.codes: dict[str, Position] = {}
        self.aside: dict[str, int] = {}
        self._paid_again, self._released_again = dict[str, int](), dict[str, int]()
        self._mechanisms: dict[Mechanism, Mechanism] = {}  # equal mechanisms share one object

    def hold(self, reservation: Reservation) -> None:
        """Enter a query that the site accepted. The new entry replaces an earlier entry of the same query.

        Args:
            reservation: The accepted query.
        """
        shared = self._mechanisms.setdefault(reservation.mechanism, reservation.mechanism)
        self[reservation.query_id] = replace(reservation, mechanism=shared)

    def newest_in(self, study_id: str) -> Mechanism | None:
        """Return the mechanism of the newest query of a study. A query that is asked again keeps its first position.

        Args:
            study_id: The study's id.

        Returns:
            The mechanism; None if the study asked nothing.
        """
        return next((one.mechanism for one in reversed(self.values()) if one.study_id == study_id), None)

    def without_receipt(self) -> Iterator[Reservation]:
        """Return the accepted queries for which no receipt shows a release yet, in the order of their first
        acceptance.
        """
        return (one for query_id, one in self.items() if query_id not in self.receipted)

    def unreleased(self) -> Iterator[str]:
        """Return the ids of the accepted queries without a receipt that no contradicting receipt shows as released."""
        return (one.query_id for one in self.without_receipt() if self.awaits_release(one.query_id))

    def pay(self, query_id: str) -> None:
        """Count a further payment for a query. :meth:`hold` counts the first. A query that is not held is ignored.

        Args:
            query_id: The query's id.
        """
        if query_id in self:
            self._paid_again[query_id] = self._paid_again.get(query_id, 0) + 1

    def release(self, query_id: str, *, ledger_id: str) -> None:
        """Count a release that an accepted receipt shows.

        Args:
            query_id: The query's id.
            ledger_id: Id of the server's ledger that issued the receipt.
        """
        if query_id in self.receipted:
            self._released_again[query_id] = self._released_again.get(query_id, 0) + 1
        self.receipted[query_id] = ledger_id

    def release_aside(self, query_id: str) -> None:
        """Count a release that only a contradicting receipt shows.

        Args:
            query_id: The query's id.
        """
        self.aside[query_id] = self.aside.get(query_id, 0) + 1

    def paid(self, query_id: str) -> int:
        """Return how many times this site has charged itself for the query. More than once is rare.

        Args:
            query_id: The query's id.

        Returns:
            The number.
        """
        return (query_id in self) + self._paid_again.get(query_id, 0)

    def released(self, query_id: str) -> int:
        """Return how many releases of the query receipts show.

        Args:
            query_id: The query's id.

        Returns:
            The number.
        """
        again, aside = self._released_again.get(query_id, 0), self.aside.get(query_id, 0)
        return (query_id in self.receipted) + again + aside

    @property
    def released_again(self) -> int:
        """Number of releases that receipts show in addition to the first release of each query."""
        return sum(max(0, self.released(query_id) - 1) for query_id in self._released_again.keys() | self.aside.keys())

    def awaits_release(self, query_id: str) -> bool:
        """Return whether this site has paid for more releases of a query than receipts have shown.

        Args:
            query_id: The query's id.

        Returns:
            True if it has.
        """
        return self.released(query_id) < self.paid(query_id)
