"""What a site's books know of the queries it accepted, and which of its limits one more would pass."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

from common.ledger.packed import Column, Digests, Rows
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


_Terms = tuple[Mechanism, str, str, str, str, int | None]
"""Mechanism, study, day, ledger, sealing key and draw."""


class Reservations(Mapping[str, Reservation]):
    """Every query a site ever accepted, by its id, in columns: about 80 bytes each. One accepted again keeps its place.

    What consecutive acceptances have alike is kept once for all of them. ``receipted`` tells whose receipt shows a
    query's release, ``codes`` the row of its code.
    """

    def __init__(self) -> None:
        self._queries = Digests()
        self._rows = array("I")
        self._alike = array("I")
        self._terms: list[_Terms] = []
        self._mechanisms: dict[Mechanism, Mechanism] = {}
        self._ledgers: list[str] = []
        self.receipted = Column(self._queries)
        self.codes = Rows(self._queries)

    def __len__(self) -> int:
        return len(self._queries)

    def __iter__(self) -> Iterator[str]:
        return map(self._queries.__getitem__, range(len(self)))

    def __contains__(self, query_id: object) -> bool:
        return isinstance(query_id, str) and self._queries.find(query_id) is not None

    def __getitem__(self, query_id: str) -> Reservation:
        place = self._queries.find(query_id)
        if place is None:
            raise KeyError(query_id)
        return self._reservation(place)

    def hold(self, reservation: Reservation) -> None:
        """Enter an acceptance, in the place of one of the same query before."""
        one = reservation
        terms = one.mechanism, one.study_id, one.day, one.ledger, one.sealing_key, one.draw
        if not self._terms or self._terms[-1] != terms:
            self._terms.append((self._mechanisms.setdefault(one.mechanism, one.mechanism), *terms[1:]))
        place = self._queries.add(one.query_id)
        if place == len(self._rows):
            self._rows.append(one.seq)
            self._alike.append(len(self._terms) - 1)
        else:
            self._rows[place], self._alike[place] = one.seq, len(self._terms) - 1

    def newest_in(self, study_id: str) -> Mechanism | None:
        """The mechanism of the query that a study first asked last; None where it asked none."""
        found = (self._terms[alike] for alike in reversed(self._alike))
        return next((terms[0] for terms in found if terms[1] == study_id), None)

    def receipt(self, query_id: str, ledger_id: str) -> None:
        """A receipt of this server's ledger shows the release of a query."""
        if ledger_id not in self._ledgers:
            self._ledgers.append(ledger_id)
        self.receipted[query_id] = self._ledgers.index(ledger_id) + 1

    def receipted_by(self, query_id: str) -> str:
        """The server's ledger whose receipt shows the release of a query; KeyError where none does."""
        return self._ledgers[self.receipted[query_id] - 1]

    def receipted_all_by(self, ledger_id: str) -> frozenset[str]:
        """The queries whose releases receipts of this ledger show."""
        return frozenset(query for query in self.receipted if self.receipted_by(query) == ledger_id)

    def _reservation(self, place: int) -> Reservation:
        mechanism, study_id, day, ledger, sealing_key, draw = self._terms[self._alike[place]]
        return Reservation(
            query_id=self._queries[place],
            mechanism=mechanism,
            study_id=study_id,
            day=day,
            seq=self._rows[place],
            ledger=ledger,
            sealing_key=sealing_key,
            draw=draw,
        )
