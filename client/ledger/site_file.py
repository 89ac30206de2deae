"""A site's ledger as a file: how it is written, the standing beside it, and what a restored copy is charged with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

from common.errors import InvalidInput
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain
from common.ledger.charges import NOTHING, Spend
from common.ledger.records import DecisionRecord, RestoredRecord
from common.ledger.rollback_guard import SiteLedgerStanding
from common.ledger.rows import START, Position
from common.ledger.site_state import SiteBooks
from common.privacy.accounting import max_mu_squared


class SiteFile(OpenLedger[SiteBooks]):
    """Base of a site's ledger."""

    STANDING = SiteLedgerStanding

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain, SiteBooks())

    @property
    def pool(self) -> str:
        """The pool this ledger belongs to, for life."""
        return self._books.declared.declaration.pool

    def forgotten(self) -> str | None:
        """What shows that this file is an older copy than the one that charged last on this machine; None if nothing.

        The standing beside the file tells. Where it was rolled back together with the file, the server's next receipt
        does: it charges queries that the copy never accepted, and is an alarm.
        """
        return self._older_copy(this="this ledger", beside="beside it")

    def doubt(self) -> str | None:
        """The reason to doubt this ledger's figures: more may have been spent or trained than it shows.

        ``None`` if there is no reason. Either :meth:`forgotten` has one, or a server's receipt contradicts this
        ledger, as it does after the whole machine was rolled back.
        """
        self._catch_up()
        return self.forgotten() or next((alarm.problem for alarm in self._books.alarms.values()), None)

    def charge_lost(self, standing: SiteLedgerStanding | None, *others: SiteLedgerStanding) -> Spend:
        """After an older copy was restored: charge what it forgot, pause every study, and return the sum.

        With standings of the lost files that is all they charged since the row they last have in common with this
        ledger; what this ledger charged since that row itself stays charged beside it. Without one nobody can
        know, and everything that the pool's cap and each study's budget have left counts as spent. Receipts that the
        server sends for lost acceptances are then taken as part of that sum, up to it; one beyond it is an alarm. A
        query the standing knows as accepted without a receipt is part of the sum too when it is offered again.
        Withdrawals that a standing knows, of patients and from studies for good, are entered again. The
        alarms standing are ended. InvalidInput for a standing of another ledger, one that names a study unknown here,
        and one that this ledger contains or has charged: then nothing was lost.
        """
        charged, given = NOTHING, (*(() if standing is None else (standing,)), *others)
        with self._writing():
            for one in self._lost_by(given):
                record = self._beyond(one)
                self._append(record)
                self._repeat(one)
                charged += record.pool
            if not given:
                record = self._all_that_is_left()
                self._append(record)
                charged = record.pool
        self._restoring = False
        self._keep_standing()
        self._chain.settle()
        return charged

    def _repeat(self, standing: SiteLedgerStanding) -> None:
        """Enter again the withdrawals that were lost, and delete the codes of before them."""
        books = self._books
        for patient in standing.patients:
            if patient.subject not in books.teachers.patients:
                self._append(patient)
                self._chain.drop_payloads(before=books.teachers.last_withdrawal)
        for study in standing.left:
            if books.paused.get(study) != "withdraw":
                self._append(DecisionRecord(study, "withdraw"))

    def _all_that_is_left(self) -> RestoredRecord:
        """What an older copy may have forgotten where no standing tells: everything that caps and budgets had left."""
        books = self._books
        pool = Spend(max(books.limit - books.spent().mu_squared, Fraction(0)))
        studies = {}
        for terms in books.studies.values():
            allowed = max_mu_squared(terms.accountant, terms.budget)
            studies[terms.id] = Spend(max(allowed - books.spent_in(terms.id).mu_squared, Fraction(0)))
        return RestoredRecord(pool, studies, books.declared.queries_per_day, pending=(), kept_row=0)

    def _beyond(self, standing: SiteLedgerStanding) -> RestoredRecord:
        """What the standing charged since it parted from this ledger."""
        fork, today = self._fork(standing), self._chain.today
        before = self._at(fork)
        return RestoredRecord(
            pool=standing.pool.beyond(before.pool),
            studies={
                study: spend.beyond(before.studies.get(study, NOTHING)) for study, spend in standing.studies.items()
            },
            queries=max(standing.queries - before.per_day.get(today, 0), 0) if standing.day == today else 0,
            pending=tuple(query for query in standing.pending if query not in self._books.reservations),
            kept_row=standing.head.seq,
            kept_hash=standing.head.hash,
            fork=fork,
        )

    def _at(self, place: Position) -> _Totals:
        """What had been charged at a row of this ledger, or of lost rows that were charged here."""
        if place in self._books.kept and not self.contains(place):
            record = self._books.kept[place]
            assert isinstance(record, RestoredRecord)
            return self._at(record.fork or START).plus(record)
        books = SiteBooks()
        for row in self._chain.rows_between(0, place.seq):
            books.enter(row)
        return _Totals(books.spent(), {study: books.spent_in(study) for study in books.studies}, books.per_day)

    def _lost_by(self, standings: Sequence[SiteLedgerStanding]) -> list[SiteLedgerStanding]:
        """Those standings of which rows were lost here and not charged yet; the latest of those of the same rows."""
        lost: list[SiteLedgerStanding] = []
        for one in sorted(standings, key=lambda one: one.head.seq, reverse=True):
            if one.head.ledger_id != self.ledger_id:
                raise InvalidInput("standing", value=one.head.ledger_id, limit=f"of this ledger, {self.ledger_id}")
            if self.covers(one.position) or any(one.position in later.positions() for later in lost):
                continue
            if unknown := sorted(one.studies.keys() - self._books.studies.keys()):
                remedy = "put the study's file in the site's directory first"
                raise InvalidInput("studies of the standing", value=unknown, remedy=remedy)
            lost.append(one)
        if standings and not lost:
            raise InvalidInput(
                "standing",
                value=f"row {standings[0].head.seq}",
                limit="a standing that counts rows which this copy of the ledger lacks",
                remedy="nothing: this standing shows no further loss; see `consilium site status`",
            )
        return lost

    def _has_charged(self) -> bool:
        return self._books.spent() != NOTHING or bool(self._books.teachers.trainings)

    def _standing(self) -> SiteLedgerStanding:
        books, last = self._books, self._chain.last
        day = "" if last is None else last.time_utc[:10]
        return SiteLedgerStanding(
            head=self._chain.head(),
            marks=self._chain.marks(),
            pool=books.spent(),
            studies={study: books.spent_in(study) for study in books.studies},
            day=day,
            queries=books.per_day.get(day, 0),
            pending=tuple(one.query_id for one in books.reservations.without_receipt()),
            patients=tuple(record for _, record in books.teachers.patients.values()),
            left=tuple(sorted(study for study, decision in books.paused.items() if decision == "withdraw")),
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One write transaction; on any exception nothing is kept and the totals are read from the file again.

        The standing follows every row: nothing that is on record may be undone by an older copy. While such a copy is
        being recovered the standing kept beside it stays, until all that it knows is charged.
        """
        try:
            with self._chain.transaction():
                self._catch_up()
                yield
        except BaseException:
            self._books = SiteBooks()
            self._chain.forget()
            self._catch_up()
            raise
        if self._books.row_count != self._kept_at and not self._restoring:
            self._keep_standing()


@dataclass(frozen=True, slots=True)
class _Totals:
    """What had been charged by some row, in all and in each study, and how many queries were accepted on each day."""

    pool: Spend
    studies: Mapping[str, Spend]
    per_day: Mapping[str, int]

    def plus(self, record: RestoredRecord) -> _Totals:
        """With what was charged for lost rows."""
        studies = {
            study: self.studies.get(study, NOTHING) + record.studies.get(study, NOTHING)
            for study in self.studies.keys() | record.studies.keys()
        }
        return _Totals(self.pool + record.pool, studies, self.per_day)
