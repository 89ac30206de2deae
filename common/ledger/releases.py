"""Tracks every charge of a server's ledger: its cost, its row and where its answer is stored.

Part of the server's totals (:mod:`common.ledger.server_state`); the server's ledger reads it to answer queries.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from operator import attrgetter

from common.ledger.charges import Roster, Spend
from common.ledger.rows import Position
from common.privacy.mechanism import Mechanism


@dataclass(frozen=True, slots=True)
class ExceededLimit:
    """The limit that a planned release would exceed.

    Attributes:
        reason: Name of the limit: ``pool-budget``, ``study-budget`` or ``coordinates``.
        pool: The pool on which the limit would be exceeded.
        requested: μ² of the release.
        remaining: μ² that the study's budget has left for the pool, if the reason is ``study-budget``; otherwise μ²
            that the pool's own budget has left.
    """

    reason: str
    pool: str
    requested: Fraction
    remaining: Fraction


@dataclass(frozen=True, slots=True)
class ChargedTotals:
    """The totals by pool and by (study, pool) after a planned release or a planned reuse of an answer.

    They contain only the pools that the release or the reuse charges.
    """

    pools: dict[str, Spend]
    studies: dict[tuple[str, str], Spend]


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """Row number and row hash of a noisy answer, and the answer's SHA-256."""

    seq: int
    row_hash: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Release:
    """The charge of a query in row ``seq``, and the row of its answer.

    A draw of a sealed sum has no answer at first, and may never get one. ``lost`` is True if the ledger records that
    the draw ended without an answer.
    """

    seq: int
    study_id: str
    batch_id: str
    query_id: str
    mechanism: Mechanism
    roster: Roster
    voters: int
    draw: int | None = None
    masks: str | None = None
    answer: AnswerRow | None = None
    lost: bool = False


@dataclass(frozen=True, slots=True)
class RecoveredCharge:
    """A charge whose row this ledger lost, known from a site's receipt. ``head`` is the receipt's head, if it was
    recorded. ``charged`` is False if another row charges the release already.
    """

    study_id: str
    mechanism: Mechanism
    roster: Roster
    head: Position | None = None
    charged: bool = True


class Releases:
    """Every charge of a server's ledger, in the order of rows and by query.

    A query of a sealed sum is charged for every draw (attempt). Only its newest draw may have the answer; all earlier
    draws were lost. :meth:`undo` reverts every change since :meth:`mark`; :meth:`settle` makes these changes final.
    """

    def __init__(self) -> None:
        self._charges: list[Release] = []
        self._newest: dict[str, int] = {}  # by query: index of its newest charge
        self._before: dict[int, int] = {}  # by index of a charge: index of the same query's charge before it
        self._mechanisms: dict[Mechanism, Mechanism] = {}  # equal mechanisms share one object
        self._mark: tuple[int, dict[int, Release]] | None = None

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, query_id: str) -> bool:
        return query_id in self._newest

    def __getitem__(self, query_id: str) -> Release:
        """Return a query's newest charge; raises KeyError if the query was never charged."""
        return self._charges[self._newest[query_id]]

    def by_row(self, *, newest_first: bool = False) -> Iterator[tuple[int, Release]]:
        """Return every charge with its row number.

        Args:
            newest_first: True for the reverse order.

        Returns:
            An iterator of (row number, charge).
        """
        return ((one.seq, one) for one in (reversed if newest_first else iter)(self._charges))

    def at(self, row: int) -> Release:
        """Return the charge in a row.

        Args:
            row: Number of the row.

        Returns:
            The charge.

        Raises:
            KeyError: If the row charged nothing.
        """
        place = bisect_left(self._charges, row, key=attrgetter("seq"))
        if place == len(self) or self._charges[place].seq != row:
            raise KeyError(row)
        return self._charges[place]

    def answered(self, query_id: str) -> bool:
        """Return whether a query has its answer.

        Args:
            query_id: The query's id.

        Returns:
            True if it was charged and answered.
        """
        return query_id in self._newest and self[query_id].answer is not None

    def of_queries(self) -> Iterator[Release]:
        """Return the newest charge of every query, in the order in which queries were first charged."""
        return map(self._charges.__getitem__, self._newest.values())

    def of_study(self, study_id: str) -> Iterator[Release]:
        """Return the newest charge of every query of a study, in the order in which queries were first charged.

        Args:
            study_id: The study's id.

        Returns:
            An iterator of charges.
        """
        return (one for one in self.of_queries() if one.study_id == study_id)

    def open_in(self, study_id: str) -> Iterator[Release]:
        """Return the draws (attempts at a sealed sum) of a study that have no answer and are not recorded as lost, in
        the order of rows.

        Args:
            study_id: The study's id.

        Returns:
            An iterator of charges.
        """
        found = (one for one in self.of_study(study_id) if one.answer is None and not one.lost)
        return iter(sorted(found, key=attrgetter("seq")))

    def lost_in(self, study_id: str) -> int:
        """Return how many charges of a study gave no answer. A draw (an attempt at a sealed sum) gave none if it was
        recorded as lost, or if a later draw of the same query followed.

        Args:
            study_id: The study's id.

        Returns:
            The number.
        """
        earlier = set(self._before.values())
        return sum(
            one.study_id == study_id and (one.lost or place in earlier) for place, one in enumerate(self._charges)
        )

    def largest_roster(self, study_id: str) -> int:
        """Return the number of sites on the largest roster of a study's charges.

        Args:
            study_id: The study's id.

        Returns:
            The number; 0 if there is no charge.
        """
        return max((len(one.roster) for one in self._charges if one.study_id == study_id), default=0)

    def row_of(self, query_id: str, draw: int | None) -> int | None:
        """Return the row that charged a query.

        Args:
            query_id: The query's id.
            draw: Number of the draw (attempt); None for the newest charge.

        Returns:
            The row number; None if there is none.
        """
        place = self._newest.get(query_id)
        while place is not None and draw not in (None, self._charges[place].draw):
            place = self._before.get(place)
        return None if place is None else self._charges[place].seq

    def last_draw(self, query_id: str) -> int:
        """Return the number of the newest draw (attempt at the sealed sum) of a query.

        Args:
            query_id: The query's id.

        Returns:
            The number; 0 if there is none.
        """
        return (self[query_id].draw or 0) if query_id in self else 0

    # --- entering

    def add(self, release: Release) -> None:
        """Enter the charge of a row after all earlier ones, with its answer if it has one.

        Args:
            release: The charge.
        """
        place, shared = len(self._charges), self._mechanisms.setdefault(release.mechanism, release.mechanism)
        if release.query_id in self._newest:
            self._before[place] = self._newest[release.query_id]
        self._newest[release.query_id] = place
        self._charges.append(replace(release, mechanism=shared))

    def end(self, query_id: str, answer: AnswerRow | None) -> None:
        """Enter how a query's newest draw (attempt at a sealed sum) ended: with an answer, or lost.

        Args:
            query_id: The query's id.
            answer: Row of the answer; None for a lost draw.
        """
        place = self._newest[query_id]
        if self._mark is not None:
            self._mark[1].setdefault(place, self._charges[place])
        self._charges[place] = replace(self._charges[place], answer=answer, lost=answer is None)

    def mark(self) -> None:
        """Remember the current state for :meth:`undo`."""
        self._mark = len(self._charges), {}

    def settle(self) -> None:
        """Make every change since :meth:`mark` final."""
        self._mark = None

    def undo(self) -> None:
        """Revert every change since :meth:`mark`; do nothing if :meth:`mark` was not called."""
        if self._mark is None:
            return
        count, ended = self._mark
        for place, release in ended.items():
            self._charges[place] = release
        while len(self._charges) > count:
            release = self._charges.pop()
            before = self._before.pop(len(self._charges), None)
            if before is None:
                del self._newest[release.query_id]
            else:
                self._newest[release.query_id] = before
        self._mark = None
