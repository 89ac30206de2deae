"""Writes a site's ledger file, keeps its standing beside it, and charges a restored copy for the rows it lost.

It is the base class of :class:`client.ledger.site_ledger.SiteLedger`. The *standing* is a small file that no backup
contains; it records the newest row and all totals, and so shows whether the ledger is an older copy. A recovery refuses
a standing of another ledger, and standings that show no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

from common.data.dataset import PatientIdentity
from common.errors import InvalidInput
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain
from common.ledger.charges import NOTHING, Spend
from common.ledger.records import DecisionRecord, RestoredRecord, SealingKeyRecord
from common.ledger.rollback_guard import SiteLedgerStanding
from common.ledger.rows import START, Position
from common.ledger.site_state import SiteBooks
from common.ledger.teacher_records import DrawnRecord, IdentityRecord
from common.privacy.accounting import max_mu_squared
from common.privacy.patient_guarantee import ADAPTED


class SiteFile(OpenLedger[SiteBooks]):
    """Base class of a site's ledger: runs transactions, writes the standing file, and recovers an older copy."""

    STANDING = SiteLedgerStanding

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain, SiteBooks())

    @property
    def pool(self) -> str:
        """The patient pool to which this ledger belongs; it never changes."""
        return self._books.declared.declaration.pool

    def forgotten(self) -> str | None:
        """Explain why this file must be an older copy than the one last written on this machine.

        The standing, a small file beside the ledger that records its newest row and totals, shows that rows are
        missing. If ledger and standing were rolled back together, only the server's next receipt shows the loss: that
        receipt charges queries which this copy never accepted, and raises an alarm.

        Returns:
            The explanation; None if the file is the newest as far as the standing shows.
        """
        return self._older_copy(this="this ledger", beside="beside it")

    def doubt(self) -> str | None:
        """Explain why more may have been spent or trained than this ledger shows.

        Returns:
            The reason: the file is an older copy (:meth:`forgotten`), or a server's receipt contradicts it. None if
            there is no reason.
        """
        self._catch_up()
        return self.forgotten() or next((alarm.problem for alarm in self._books.alarms.values()), None)

    def charge_lost(self, standing: SiteLedgerStanding | None, *others: SiteLedgerStanding) -> Spend:
        """Charge a restored older copy for the rows it lost, and pause every study.

        A standing is the small file beside a ledger that records its newest row and totals.

        1. For each standing of a lost file, charge what that file had spent after the last row that both files have.
           Charges that this ledger made itself after that row stay as well.
        2. Without a standing, charge everything that the pool's cap and each study's budget have left, since nobody
           knows what was lost.
        3. Record again what a standing lists: the withdrawals of patients, the final withdrawals from studies, the
           replaced sealing keys, the newest caps, the trainings of networks that may leave the hospital, and how the
           dataset identifies patients.
        4. End the alarms.

        Later receipts for lost acceptances are deducted from this charge until it is used up; a receipt beyond it
        raises an alarm. If a query that a standing lists as accepted without a receipt is offered again, the charge
        covers it.

        Args:
            standing: Standing of the lost file; None if there is none.
            others: Standings of further lost copies.

        Returns:
            What was charged to the pool.

        Raises:
            InvalidInput: If a standing is another ledger's, names a study this ledger does not know, or shows no row
                that is missing here and not charged yet.
        """
        charged, given = NOTHING, (*(() if standing is None else (standing,)), *others)
        with self._writing():
            for one in self._lost_by(given):
                record = self._beyond(one)
                self._append(record)
                self._repeat(one, record.fork or START)
                charged += record.pool
            if not given:
                record = self._all_that_is_left()
                self._append(record)
                charged = record.pool
        self._restoring = False
        self._keep_standing()
        self._chain.settle()
        return charged

    def _repeat(self, standing: SiteLedgerStanding, fork: Position) -> None:
        """Record again what a standing lists and this copy lacks, and delete codes stored before a withdrawal of a
        patient.

        A standing lists withdrawals of patients and from studies, sealing keys, caps, trainings, and the rule by which
        patients are told apart. Caps stay as they are if they changed in this copy after the row ``fork``. The rule
        stays too if it changed after that row, unless it counts every file as one patient. All steps of the trainings
        count as drawn.
        """
        books = self._books
        for patient in standing.patients:
            if patient.subject not in books.teachers.patients:
                self._append(patient)
                self._chain.drop_payloads(before=books.teachers.last_withdrawal)
        for study in standing.left:
            if books.paused.get(study) != "withdraw":
                self._append(DecisionRecord(study, "withdraw"))
        for replaced, keys in standing.sealing_keys.items():
            for key in sorted(set(keys) - books.sealing_keys.get(replaced, set())):
                self._append(SealingKeyRecord(key, replaced))
        before = self._books_at(fork)
        if standing.caps not in (None, books.caps) and before.caps == books.caps:
            self._append(standing.caps)
        known, unclear = books.teachers.identity, (before.teachers.identity, PatientIdentity.FILE)
        if standing.identity not in (None, known) and known in unclear:
            self._append(IdentityRecord(standing.identity))
        for training in standing.adapted:
            if training.training_id not in books.teachers.trainings:
                self._append(training)
                self._append(DrawnRecord(training.training_id, sum(event.steps for event in training.events)))

    def _all_that_is_left(self) -> RestoredRecord:
        """Return a charge of everything that the pool's cap and the studies' budgets have left."""
        books = self._books
        pool = Spend(max(books.limit - books.spent().mu_squared, Fraction(0)))
        studies = {}
        for terms in books.studies.values():
            allowed = max_mu_squared(terms.accountant, terms.budget)
            studies[terms.id] = Spend(max(allowed - books.spent_in(terms.id).mu_squared, Fraction(0)))
        return RestoredRecord(pool, studies, books.declared.queries_per_day, pending=(), kept_row=0)

    def _beyond(self, standing: SiteLedgerStanding) -> RestoredRecord:
        """Return the charge for the rows that a standing counts after the last row that it shares with this ledger."""
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
            marks=standing.marks_after(fork),
        )

    def _at(self, place: Position) -> _Totals:
        """Return the totals at a row of this ledger, or at a lost row that a recovery of this ledger has charged.

        If that row is not the newest one that the recovery charged, the totals may be too small but never too large.
        """
        if place in self._books.kept and not self.contains(place):
            record = self._books.kept[place]
            assert isinstance(record, RestoredRecord)
            before = self._at(record.fork or START)
            return before if place.seq < record.kept_row else before.plus(record)
        books = self._books_at(place)
        return _Totals(books.spent(), {study: books.spent_in(study) for study in books.studies}, books.per_day)

    def _books_at(self, place: Position) -> SiteBooks:
        books = SiteBooks()
        for row in self._chain.rows_between(0, place.seq):
            books.enter(row)
        return books

    def _lost_by(self, standings: Sequence[SiteLedgerStanding]) -> list[SiteLedgerStanding]:
        """Select the standings whose rows are missing here and not charged yet.

        If several standings cover the same rows, only the latest of them is selected.
        """
        lost: list[SiteLedgerStanding] = []
        for one in sorted(standings, key=lambda one: one.head.seq, reverse=True):
            if one.head.ledger_id != self.ledger_id:
                raise InvalidInput(
                    "ledger to which the standing (the small file beside a ledger) belongs",
                    value=one.head.ledger_id,
                    limit=f"{self.ledger_id}, this ledger",
                )
            if self.covers(one.position) or any(one.position in later.positions() for later in lost):
                continue
            if unknown := sorted(one.studies.keys() - self._books.studies.keys()):
                raise InvalidInput(
                    "the standing names studies that this ledger does not know",
                    value=unknown,
                    remedy="give the file of each study with --study FILE; the consortium has it",
                )
            lost.append(one)
        if standings and not lost:
            raise InvalidInput(
                "standing (the small file beside a ledger)",
                value=f"row {standings[0].head.seq}",
                limit="a standing that counts rows which this copy of the ledger lacks",
                remedy="nothing: this standing shows no further loss; see `consilium site status`"
                if self.forgotten() is None
                else "give a later standing; if it is lost, leave out --standing: --charge-all counts all remaining "
                "budget as spent",
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
            pending=tuple(books.reservations.unreleased()),
            patients=tuple(record for _, record in books.teachers.patients.values()),
            left=tuple(sorted(study for study, decision in books.paused.items() if decision == "withdraw")),
            sealing_keys={old: tuple(sorted(new)) for old, new in sorted(books.sealing_keys.items())},
            caps=books.caps,
            adapted=tuple(one for _, one in books.teachers.trainings.values() if one.strategy.startswith(ADAPTED)),
            identity=books.teachers.identity,
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Run one write transaction; on any exception, keep nothing and read the totals from the file again.

        The standing, a small file beside the ledger, is written after every change, so that an older copy of the ledger
        is noticed. During the recovery of an older copy the existing standing is kept until everything it counts is
        charged.
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
    """The charges up to one row, for the pool and for each study, and the queries accepted on each day."""

    pool: Spend
    studies: Mapping[str, Spend]
    per_day: Mapping[str, int]

    def plus(self, record: RestoredRecord) -> _Totals:
        """Return these totals plus a charge for lost rows."""
        studies = {
            study: self.studies.get(study, NOTHING) + record.studies.get(study, NOTHING)
            for study in self.studies.keys() | record.studies.keys()
        }
        return _Totals(self.pool + record.pool, studies, self.per_day)
