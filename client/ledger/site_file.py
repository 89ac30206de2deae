"""A site's ledger as a file: how it is written, the standing beside it, and what a restored copy is charged with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction

from common.errors import InvalidInput
from common.ledger.base_ledger import OpenLedger
from common.ledger.chain import Chain
from common.ledger.charges import Spend
from common.ledger.records import RestoredRecord
from common.ledger.rollback_guard import Standing
from common.ledger.rows import Position
from common.ledger.site_state import SiteBooks
from common.privacy.accounting import max_mu_squared


class SiteFile(OpenLedger[SiteBooks]):
    """Base of a site's ledger."""

    STANDING = Standing

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

    def charge_lost(self, standing: Standing | None) -> Spend:
        """After an older copy was restored: charge what it forgot, pause every study, and return the sum.

        With the lost file's last standing that is exactly what it had spent beyond this copy. Without one nobody can
        know, and everything that the pool's cap and each study's budget have left counts as spent. Receipts that the
        server sends for lost acceptances are then taken as part of that sum, up to it; one beyond it is an alarm. A
        query the standing knows as accepted without a receipt is part of the sum too when it is offered again. The
        alarms standing are ended. InvalidInput for a standing of another ledger, one that names a study unknown here,
        and one that this ledger contains: then nothing was lost.
        """
        with self._writing():
            record = self._all_that_is_left() if standing is None else self._beyond(standing)
            self._append(record)
        return record.pool

    def _all_that_is_left(self) -> RestoredRecord:
        """What an older copy may have forgotten where no standing tells: everything that caps and budgets had left."""
        books = self._books
        pool = Spend(max(books.limit - books.spent().mu_squared, Fraction(0)))
        studies = {}
        for terms in books.studies.values():
            allowed = max_mu_squared(terms.accountant, terms.budget)
            studies[terms.id] = Spend(max(allowed - books.spent_in(terms.id).mu_squared, Fraction(0)))
        return RestoredRecord(pool, studies, books.declared.queries_per_day, pending=(), kept_row=0)

    def _beyond(self, standing: Standing) -> RestoredRecord:
        """What the standing shows beyond this copy."""
        self._check_standing(standing)
        books = self._books
        same_day = standing.day == self._chain.today
        return RestoredRecord(
            pool=standing.pool.beyond(books.spent()),
            studies={study: spend.beyond(books.spent_in(study)) for study, spend in standing.studies.items()},
            queries=max(standing.queries - books.per_day.get(standing.day, 0), 0) if same_day else 0,
            pending=tuple(query for query in standing.pending if query not in books.reservations),
            kept_row=standing.head.seq,
        )

    def _check_standing(self, standing: Standing) -> None:
        head = standing.head
        if head.ledger_id != self.ledger_id:
            raise InvalidInput("standing", value=head.ledger_id, limit=f"of this ledger, {self.ledger_id}")
        if self.contains(Position(head.seq, head.hash)):
            raise InvalidInput("standing", value=f"row {head.seq}", limit="a row that this copy of the ledger lost")
        unknown = sorted(standing.studies.keys() - self._books.studies.keys())
        if unknown:
            raise InvalidInput(
                "studies of the standing", value=unknown, remedy="put the study's file in the site's directory first"
            )

    def _standing(self) -> Standing:
        books, day = self._books, self._chain.today
        return Standing(
            head=self._chain.head(),
            pool=books.spent(),
            studies={study: books.spent_in(study) for study in books.studies},
            day=day,
            queries=books.per_day.get(day, 0),
            pending=tuple(books.reservations.receipted.without()),
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One write transaction; on any exception nothing is kept and the totals are read from the file again.

        If it charged something, or put a code under masks, the standing follows it: neither may happen again from an
        older copy.
        """
        try:
            with self._chain.transaction():
                self._catch_up()
                before = self._charged()
                yield
        except BaseException:
            self._books = SiteBooks()
            self._chain.forget()
            self._catch_up()
            raise
        if self._charged() != before:
            self._keep_standing()

    def _charged(self) -> tuple[Spend, int, int]:
        return self._books.spent(), len(self._books.restored_at), len(self._books.sealed.masked)
