"""Every charge of a server's ledger by its row and by its query, in columns: about 140 bytes each.

What consecutive charges have alike (study, batch, mechanism, roster, draw) is kept once for all of them. A query of a
sealed sum may be charged again for a later draw: its newest charge has its answer, or is lost.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from common.ledger.charges import Roster
from common.ledger.packed import Digests, Hashes, packed
from common.ledger.releases import Answer, Release
from common.ledger.rows import NO_HASH
from common.privacy.mechanism import Mechanism


class Terms(NamedTuple):
    """What the charges of a batch have alike."""

    study_id: str
    batch_id: str
    mechanism: Mechanism
    roster: Roster
    voters: int
    draw: int | None = None
    masks: str | None = None


_OPEN = Answer(0, NO_HASH, NO_HASH)


class ReleaseTable:
    """Charges in the order of their rows. A charge is known by its place: 0, 1, 2 …

    After :meth:`mark` everything can be undone, until :meth:`settle`.
    """

    def __init__(self) -> None:
        self._queries = Digests()
        self._newest = array("I")  # by query: the place of its newest charge
        self._query = array("I")  # by charge, as all that follow: its query
        self._rows = array("I")
        self._alike = array("I")
        self._answered_in = array("I")  # the answer's row; 0 for none
        self._answer_rows, self._answers = Hashes(), Hashes()
        self._terms: list[Terms] = []
        self._mechanisms: dict[Mechanism, Mechanism] = {}
        self._before: dict[int, int] = {}  # the charge before this one, where a query was charged again
        self._lost: set[int] = set()
        self._mark: tuple[int, list[int]] | None = None

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, query_id: str) -> bool:
        return self._queries.find(query_id) is not None

    def __getitem__(self, query_id: str) -> Release:
        """A query's newest charge; KeyError for one that was never charged."""
        return self._release(self._place(query_id))

    def by_row(self, *, newest_first: bool = False) -> Iterator[tuple[int, Release]]:
        """Every charge with its row."""
        places = range(len(self))[:: -1 if newest_first else 1]
        return ((self._rows[place], self._release(place)) for place in places)

    def at(self, row: int) -> Release:
        """What was charged in this row; KeyError for a row that charged nothing."""
        place = bisect_left(self._rows, row)
        if place == len(self) or self._rows[place] != row:
            raise KeyError(row)
        return self._release(place)

    def last_row(self) -> int:
        """The newest row that charged a query; 0 for none."""
        return self._rows[-1] if self._rows else 0

    def answered(self, query_id: str) -> bool:
        """Whether a query has its answer."""
        query = self._queries.find(query_id)
        return query is not None and self._answered_in[self._newest[query]] > 0

    def of_queries(self) -> Iterator[Release]:
        """The newest charge of every query, by the order in which queries were first charged."""
        return map(self._release, self._newest)

    def of_study(self, study_id: str) -> Iterator[Release]:
        """The same for the queries of one study."""
        return map(self._release, self._in_study(study_id, self._newest))

    def open_in(self, study_id: str) -> Iterator[Release]:
        """A study's draws that have no answer and are not lost, by their rows."""
        waiting = (place for place, row in enumerate(self._answered_in) if not row and place not in self._lost)
        newest = (place for place in waiting if self._newest[self._query[place]] == place)
        return map(self._release, self._in_study(study_id, newest))

    def lost_in(self, study_id: str) -> int:
        """How many charges of a study gave no answer: those that were lost, and those before a later one."""
        return sum(1 for _ in self._in_study(study_id, self._lost.union(self._before.values())))

    def row_of(self, query_id: str, draw: int | None) -> int | None:
        """The row that charged a query, or this draw of it; None for none."""
        query = self._queries.find(query_id)
        place = None if query is None else self._newest[query]
        while place is not None and draw not in (None, self._terms[self._alike[place]].draw):
            place = self._before.get(place)
        return None if place is None else self._rows[place]

    def last_draw(self, query_id: str) -> int:
        """The number of a query's newest draw; 0 for none."""
        return (self[query_id].draw or 0) if query_id in self else 0

    # --- entering

    def add(self, row: int, query_id: str, terms: Terms, *, answer: Answer | None, lost: bool = False) -> None:
        """Enter the charge of a row after all that are here, with its answer if it has one."""
        answer = answer or _OPEN
        hashes = packed(query_id + answer.row_hash + answer.sha256)
        self.add_packed(row, hashes, terms, answered_in=answer.seq, lost=lost)

    def add_packed(self, row: int, hashes: bytes, terms: Terms, *, answered_in: int, lost: bool) -> None:
        """The same of 96 bytes: query, answer's row and answer; of zeros where there is no answer, in row 0."""
        place, query = len(self._rows), self._queries.add_packed(hashes[:32])
        if query == len(self._newest):
            self._newest.append(place)
        else:
            self._before[place], self._newest[query] = self._newest[query], place
        if not self._terms or (self._terms[-1] is not terms and self._terms[-1] != terms):
            shared = self._mechanisms.setdefault(terms.mechanism, terms.mechanism)
            self._terms.append(terms._replace(mechanism=shared))
        self._answer_rows.add(hashes[32:64])
        self._answers.add(hashes[64:])
        self._query.append(query)
        self._rows.append(row)
        self._alike.append(len(self._terms) - 1)
        self._answered_in.append(answered_in)
        if lost:
            self._lost.add(place)

    def end(self, query_id: str, answer: Answer | None) -> None:
        """Enter the answer of a query's open draw, or, without one, that it is lost."""
        place = self._place(query_id)
        if self._mark is not None:
            self._mark[1].append(place)
        if answer is None:
            self._lost.add(place)
        else:
            self._answer_rows.put(place, answer.row_hash)
            self._answers.put(place, answer.sha256)
            self._answered_in[place] = answer.seq

    def mark(self) -> None:
        """Remember where the table stands."""
        self._mark = len(self), []

    def settle(self) -> None:
        """Keep everything since :meth:`mark`."""
        self._mark = None

    def undo(self) -> None:
        """Forget everything since :meth:`mark`, if that was called."""
        if self._mark is None:
            return
        count, ended = self._mark
        for place in ended:
            self._answered_in[place] = 0
            self._lost.discard(place)
        while len(self) > count:
            self._drop_last()
        self._mark = None

    def _drop_last(self) -> None:
        place, query = len(self) - 1, self._query[-1]
        self._lost.discard(place)
        if place in self._before:
            self._newest[query] = self._before.pop(place)
        else:
            self._newest.pop()
            self._queries.drop_last()
        for column in (self._query, self._rows, self._alike, self._answered_in):
            column.pop()
        self._answer_rows.drop_last()
        self._answers.drop_last()

    # --- reading a place

    def _place(self, query_id: str) -> int:
        query = self._queries.find(query_id)
        if query is None:
            raise KeyError(query_id)
        return self._newest[query]

    def _in_study(self, study_id: str, places: Iterable[int]) -> Iterator[int]:
        return (place for place in places if self._terms[self._alike[place]].study_id == study_id)

    def _release(self, place: int) -> Release:
        terms = self._terms[self._alike[place]]
        row, query = self._answered_in[place], self._query[place]
        return Release(
            seq=self._rows[place],
            study_id=terms.study_id,
            batch_id=terms.batch_id,
            query_id=self._queries[query],
            mechanism=terms.mechanism,
            roster=terms.roster,
            voters=terms.voters,
            draw=terms.draw,
            masks=terms.masks,
            answer=Answer(row, self._answer_rows[place], self._answers[place]) if row else None,
            lost=place in self._lost and self._newest[query] == place,
        )
