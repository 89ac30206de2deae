"""Tracks every charge of a server's ledger: its cost, its row and where its answer is stored."""

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
class Obstacle:
    """Why a release may not be written: the limit it would pass, for which pool, and by how much."""

    reason: str
    pool: str
    requested: Fraction
    remaining: Fraction


@dataclass(frozen=True, slots=True)
class ChargedTotals:
    """New totals that a release brings about, not yet entered: by pool, and by (study, pool)."""

    pools: dict[str, Spend]
    studies: dict[tuple[str, str], Spend]


@dataclass(frozen=True, slots=True)
class AnswerRow:
    """Where a noisy answer stands, by row and hash, and the SHA-256 of its bytes."""

    seq: int
    row_hash: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Release:
    """What a query was charged as in row ``seq``, and which row has its answer; a draw has none at first, or ever.

    ``lost``: the draw is on record as ended without an answer.
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
class Recovered:
    """A charge known from a site's receipt, whose row this ledger lost; ``head`` is the receipt's, where recorded."""

    study_id: str
    mechanism: Mechanism
    roster: Roster
    head: Position | None = None


class Releases:
    """Every charge of a server's ledger, in the order of its rows and by its query.

    A query of a sealed sum is charged for every draw. Its newest draw has the answer, or was lost as those before it.
    :meth:`undo` takes back every change since :meth:`mark`; :meth:`settle` keeps them for good.
    """

    def __init__(self) -> None:
        self._charges: list[Release] = []
        self._newest: dict[str, int] = {}  # by query: the place of its newest charge
        self._before: dict[int, int] = {}  # the place of the charge before this one, where a query was charged again
        self._mechanisms: dict[Mechanism, Mechanism] = {}  # mostly the same: kept once
        self._mark: tuple[int, dict[int, Release]] | None = None

    def __len__(self) -> int:
        return len(self._charges)

    def __contains__(self, query_id: str) -> bool:
        return query_id in self._newest

    def __getitem__(self, query_id: str) -> Release:
        """A query's newest charge; KeyError for one that was never charged."""
        return self._charges[self._newest[query_id]]

    def by_row(self, *, newest_first: bool = False) -> Iterator[tuple[int, Release]]:
        """Every charge with its row."""
        return ((one.seq, one) for one in (reversed if newest_first else iter)(self._charges))

    def at(self, row: int) -> Release:
        """What was charged in this row; KeyError for a row that charged nothing."""
        place = bisect_left(self._charges, row, key=attrgetter("seq"))
        if place == len(self) or self._charges[place].seq != row:
            raise KeyError(row)
        return self._charges[place]

    def last_row(self) -> int:
        """The newest row that charged a query; 0 for none."""
        return self._charges[-1].seq if self._charges else 0

    def answered(self, query_id: str) -> bool:
        """Whether a query has its answer."""
        return query_id in self._newest and self[query_id].answer is not None

    def of_queries(self) -> Iterator[Release]:
        """The newest charge of every query, by the order in which queries were first charged."""
        return map(self._charges.__getitem__, self._newest.values())

    def of_study(self, study_id: str) -> Iterator[Release]:
        """The same for the queries of one study."""
        return (one for one in self.of_queries() if one.study_id == study_id)

    def open_in(self, study_id: str) -> Iterator[Release]:
        """A study's draws that have no answer and are not lost, by their rows."""
        found = (one for one in self.of_study(study_id) if one.answer is None and not one.lost)
        return iter(sorted(found, key=attrgetter("seq")))

    def lost_in(self, study_id: str) -> int:
        """How many charges of a study gave no answer: those that were lost, and those before a later one."""
        earlier = set(self._before.values())
        return sum(
            one.study_id == study_id and (one.lost or place in earlier) for place, one in enumerate(self._charges)
        )

    def largest_roster(self, study_id: str) -> int:
        """Sites on the largest roster that a study's charges name; 0 for none."""
        return max((len(one.roster) for one in self._charges if one.study_id == study_id), default=0)

    def row_of(self, query_id: str, draw: int | None) -> int | None:
        """The row that charged a query, or this draw of it; None for none."""
        place = self._newest.get(query_id)
        while place is not None and draw not in (None, self._charges[place].draw):
            place = self._before.get(place)
        return None if place is None else self._charges[place].seq

    def last_draw(self, query_id: str) -> int:
        """The number of a query's newest draw; 0 for none."""
        return (self[query_id].draw or 0) if query_id in self else 0

    # --- entering

    def add(self, release: Release) -> None:
        """Enter the charge of a row after all that are here, with its answer if it has one."""
        place, shared = len(self._charges), self._mechanisms.setdefault(release.mechanism, release.mechanism)
        if release.query_id in self._newest:
            self._before[place] = self._newest[release.query_id]
        self._newest[release.query_id] = place
        self._charges.append(replace(release, mechanism=shared))

    def end(self, query_id: str, answer: AnswerRow | None) -> None:
        """Enter the answer of a query's open draw, or, without one, that it is lost."""
        place = self._newest[query_id]
        if self._mark is not None:
            self._mark[1].setdefault(place, self._charges[place])
        self._charges[place] = replace(self._charges[place], answer=answer, lost=answer is None)

    def mark(self) -> None:
        """Remember where the books stand."""
        self._mark = len(self._charges), {}

    def settle(self) -> None:
        """Keep everything since :meth:`mark`."""
        self._mark = None

    def undo(self) -> None:
        """Forget everything since :meth:`mark`, if that was called."""
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
