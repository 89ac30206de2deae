"""Computes a site ledger's totals from its rows alone, and applies the rules that every row must obey.

The site's ledger and the verifier use it. The site charges itself when it accepts a query, and computes the cost from
the query's mechanism. The server's figures are stored as evidence. They enter a total only for releases that the server
charged as lost without sending this site a receipt. The same object decides whether a row may be written and replays
stored rows. A ledger that breaks a rule can therefore neither be opened nor verified.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction

from common.document import Document
from common.errors import InvalidInput, ReceiptContradiction, Refused
from common.ledger.base_state import RowState, refuse_second
from common.ledger.charges import NOTHING, ReleaseRecord, Roster, Spend, StudyTerms, charge_of
from common.ledger.known_ledgers import KnownLedgers
from common.ledger.receipts import Receipt, check_arithmetic, check_continuity, never_receipted
from common.ledger.records import (
    KINDS,
    AlarmRecord,
    CapsRecord,
    CodeRecord,
    ConsentRecord,
    DecisionRecord,
    NoteRecord,
    ReceiptRecord,
    RecoveryRecord,
    RefusalRecord,
    ReservationRecord,
    RestoredRecord,
    SealingKeyRecord,
    SupersededRecord,
    kept_of,
)
from common.ledger.reservations import Reservation, Reservations, Shortfall
from common.ledger.rows import Row
from common.ledger.sealed_records import DisclosureRecord, MaskedRecord, MaskKeyRecord, PeerRecord
from common.ledger.site_sealed import SealedRecords
from common.ledger.site_teachers import AskedQuery, TeacherBooks
from common.privacy.accounting import MAX_POOL_COORDINATES, admits, max_mu_squared
from common.privacy.mechanism import Mechanism, QuerySpec


class SiteBooks(RowState):
    """Totals and rules of a site's ledger. Rows are entered through :meth:`enter`, in order, each once."""

    role = "site"

    def __init__(self) -> None:
        super().__init__()
        self.caps: CapsRecord | None = None
        self.earlier_caps = list[CapsRecord]()
        self.reservations = Reservations()
        self.teachers = TeacherBooks(self.reservations.codes)
        self.studies: dict[str, StudyTerms] = {}
        self.per_day: dict[str, int] = {}
        self.paused: dict[str, str] = {}
        self.known = KnownLedgers()
        self.lines: dict[str, str] = {}
        self.reopened: set[str] = set()
        self.asked_again: dict[str, int] = {}
        self.recovered_at: dict[str, int] = {}
        self.alarm_heads: dict[tuple[str, int, str], str] = {}
        self.heads: dict[str, dict[int, str]] = {}
        self.rosters: dict[str, Roster] = {}
        self.alarms: dict[str, AlarmRecord] = {}
        self.sealing_keys: dict[str, set[str]] = {}
        self.sealed = SealedRecords()
        self.lost, self.pending = dict[str, Spend](), set[str]()
        self.restored_at, self.restored_blindly = list[int](), False
        self._contradicting: dict[str, list[str]] = {}
        """By server ledger: accepted queries that receipts of an alarm show as released."""
        self.refusals: dict[tuple[str, str, str], int] = {}
        self.refused, self.evidence = 0, dict[str, int]()
        self.paid_bytes: dict[str, int] = {}
        self._counted_later = False
        self._spent, self._study_spent = NOTHING, dict[str, Spend]()

    def spent(self) -> Spend:
        """Return the total over all studies, for the pool's own unit and relation.

        It contains the charge of every accepted query. A server that restored an old backup may have released an answer
        twice; if receipts show a second release, its charge is contained too. The total also contains releases that the
        server charged as lost without sending a receipt, and the charges that this ledger lost when it was itself
        restored from an older copy.
        """
        return self._spent

    def spent_in(self, study_id: str) -> Spend:
        """Return the total of one study, for the study's unit and relation.

        Args:
            study_id: The study's id.

        Returns:
            The total.
        """
        return self._study_spent.get(study_id, NOTHING)

    def is_settled(self, query_id: str) -> bool:
        """Return whether the server's receipts show a release for every time that this site accepted a query.

        A further release of such a query is allowed only after a recovery of the server's ledger.

        Args:
            query_id: The query's id.

        Returns:
            True if the query is settled.
        """
        return (
            query_id in self.reservations.receipted
            and not self.reservations.awaits_release(query_id)
            and query_id not in self.reopened
        )

    def is_for(self, reservation: Reservation, *, study_id: str, ledger: str, sealing_key: str) -> bool:
        """Return whether an accepted query was accepted for this study and from this server.

        The server is identified by its ledger's id and by its sealing key. A new key that the server announced in place
        of the old one is accepted too. A value that the row or the caller leaves empty is not compared. If the row
        names no ledger, the ledger from which the study's receipts came is compared.

        Args:
            reservation: The accepted query.
            study_id: The study's id.
            ledger: Id of the server's ledger; empty if unknown.
            sealing_key: Server's sealing key in hex; empty if unknown.

        Returns:
            True if nothing differs.
        """
        offered_by = reservation.ledger or self.lines.get(reservation.study_id, "")
        keys, following = {reservation.sealing_key}, {reservation.sealing_key}
        while following:
            following = {new for old in following for new in self.sealing_keys.get(old, ())} - keys
            keys |= following
        return (
            reservation.study_id == study_id
            and (not offered_by or not ledger or offered_by == ledger)
            and (not reservation.sealing_key or not sealing_key or sealing_key in keys)
        )

    @property
    def limit(self) -> Fraction:
        """The Σμ² that all studies together may ever spend on the pool, by the site's own cap."""
        declaration = self.declared.declaration
        return max_mu_squared(declaration.accountant, declaration.budget)

    @property
    def declared(self) -> CapsRecord:
        """The site's caps; raises InvalidInput if none were declared."""
        if self.caps is None:
            raise InvalidInput(
                "the site's pool has no caps", limit="caps that are declared before the first acceptance"
            )
        return self.caps

    def shortfall(self, mechanisms: list[Mechanism], *, study_id: str) -> Shortfall | None:
        """Return the first limit that accepting all of these releases would exceed.

        Args:
            mechanisms: Mechanisms of the queries, in order.
            study_id: The study's id.

        Returns:
            The limit; None if no limit is exceeded.
        """
        study = self.studies[study_id]
        spent, inside = self._spent.mu_squared, self.spent_in(study_id).mu_squared
        allowed = max_mu_squared(study.accountant, study.budget)
        coordinates = self._spent.coordinates
        for mechanism in mechanisms:
            cost, own = self._costs(mechanism, study)
            if not admits(spent, cost, self.limit):
                return Shortfall("pool-budget", cost, self.limit - spent)
            if not admits(inside, own, allowed):
                return Shortfall("study-budget", own, allowed - inside)
            coordinates += mechanism.dimension
            if coordinates > MAX_POOL_COORDINATES:
                return Shortfall("coordinates", cost, self.limit - spent)
            spent, inside = spent + cost, inside + own
        return None

    def enter(self, row: Row, record: Document | None = None) -> Document:
        """Enter a row into the totals.

        Args:
            row: The next row.
            record: The record, if the caller has just written the row.

        Returns:
            The row's record.

        Raises:
            LedgerCorrupt: If the row breaks a rule; the error has the row's number.
        """
        return self._take(row, record, lambda found: self._enter(row, found))

    def _enter(self, row: Row, record: Document) -> None:
        match record:
            case ReservationRecord():
                self._reserve(row, record)
            case NoteRecord():
                pass
            case ReceiptRecord(receipt=receipt):
                self._accept(row, receipt)
            case ConsentRecord(terms=terms):
                refuse_second(terms.id, self.studies, "study")
                self.studies[terms.id] = terms
            case CapsRecord():
                record.check_after(self.caps)
                self.earlier_caps += [] if self.caps is None else [self.caps]
                self.caps = record
            case DecisionRecord():
                self._decide(record)
            case MaskKeyRecord() | DisclosureRecord():
                self.sealed.enter_key(record)
            case MaskedRecord():
                reservation = self.reservations[record.query_id]
                if not self.draw_is_current(reservation, record.draw):
                    raise InvalidInput(
                        "draw of a masked code", value=record.draw, limit="the newest draw that this site accepted"
                    )
                self.sealed.enter_masked(row, record)
            case SealingKeyRecord():
                self.sealing_keys.setdefault(record.replaces, set()).add(record.sealing_key)
            case PeerRecord():
                self.check_peer(record)
                self.sealed.enter_peer(record)
            case AlarmRecord() | SupersededRecord():
                self._contradicted(row, record)
            case RecoveryRecord():
                self._recover(row, record)
            case RestoredRecord():
                self._restore(row, record)
            case RefusalRecord():
                self.refused += 1
                self.refusals[record.study_id, record.reason, row.time_utc[:10]] = row.seq
                if record.reason == "released-before":
                    self.asked_again |= {self.reservations.receipted[query]: row.seq for query in record.query_ids}
            case CodeRecord(query_id=query_id):
                held = self.reservations[query_id]
                unit = self.studies[held.study_id].protection.unit
                self.teachers.enter(row, record, asked=AskedQuery(held.query_id, held.mechanism.dimension, unit))
            case _:
                if not self.teachers.enter(row, record, asked=None):
                    raise InvalidInput("kind of row", value=row.kind, limit=", ".join(KINDS["site"]))

    def draw_is_current(self, reservation: Reservation, draw: int) -> bool:
        """Return whether a code may be sent under the masks of a draw (an attempt at a sealed sum).

        The draw must be the newest draw of the query that this site accepted. A row of this ledger must accept it after
        the last restore from an older copy; a receipt that shows it is not enough. Otherwise the lost copy may already
        have sent a code in this draw, and the draw's charge covers one sum only.

        Args:
            reservation: The accepted query.
            draw: Number of the draw.

        Returns:
            True if the code may be sent.
        """
        return reservation.draw == draw and self.sealed.draws[reservation.query_id, draw]

    def is_new(self, query_id: str, draw: int | None) -> bool:
        """Return whether accepting a query, or a further draw of a query, must be charged.

        In a sealed study every new draw is charged. In an open study a query is charged when it is accepted for the
        first time. If it has a receipt and is asked again after a recovery of the server's ledger, it is charged once
        more.

        Args:
            query_id: The query's id.
            draw: Number of the draw; None in an open study.

        Returns:
            True if it must be charged.
        """
        known = self.reservations.get(query_id)
        if draw is None or known is None:
            return known is None or query_id in self.reopened
        return draw > (known.draw or 0)

    def _contradicted(self, row: Row, record: AlarmRecord | SupersededRecord) -> None:
        receipt = record.receipt
        self.rosters |= receipt.shown
        if isinstance(record, AlarmRecord):
            self.alarms[receipt.ledger_id] = record
            self.alarm_heads[receipt.ledger_id, receipt.head.seq, receipt.head.hash] = record.problem
        else:
            self.heads.setdefault(receipt.ledger_id, {})[receipt.head.seq] = receipt.head.hash
        day = row.time_utc[:10]
        self.evidence[day] = self.evidence.get(day, 0) + len(row.body)
        if isinstance(record, SupersededRecord) and record.charged is not None:
            if record.charged != (row_number := self.charged_as_lost(receipt)):
                raise InvalidInput("field charged of a superseded receipt", value=record.charged, limit=str(row_number))
            self.known.show_lost(receipt)
            return
        accepted, owed = [query_id for query_id in receipt.query_ids if query_id in self.reservations], NOTHING
        for held in map(self.reservations.__getitem__, accepted):
            owed = owed.plus(self._costs(held.mechanism, self.studies[held.study_id])[0], held.mechanism.dimension)
        self.known.owe(receipt, owed)
        if isinstance(record, AlarmRecord):
            self._contradicting.setdefault(receipt.ledger_id, []).extend(accepted)
        else:
            self._release_aside(accepted)

    def _release_aside(self, query_ids: Iterable[str]) -> None:
        """Count releases that happened although this site did not accept their receipts.

        A release that was not paid for is charged here. In a sealed study each draw was paid for when it was accepted.
        If such a query is asked again, the server draws new noise for it. It is then charged again.
        """
        for query_id in query_ids:
            self.reservations.release_aside(query_id)
            self.reopened.add(query_id)
            if self.reservations[query_id].draw is None:
                self._charge_unpaid(query_id)

    def _recover(self, row: Row, record: RecoveryRecord) -> None:
        self.known.expect_recovered(record.ledger_id)
        self.alarms.pop(record.ledger_id, None)
        self.asked_again.pop(record.ledger_id, None)
        self.recovered_at[record.ledger_id] = row.seq
        receipted = self.reservations.receipted.items()
        self.reopened |= {query_id for query_id, ledger_id in receipted if ledger_id == record.ledger_id}
        self._release_aside(self._contradicting.pop(record.ledger_id, ()))

    def check_peer(self, record: PeerRecord) -> None:
        """Refuse the record of a peer (another site and its key) that breaks a rule of this ledger.

        The record must be for a study that this site consented to, and :meth:`SealedRecords.check_peer` must allow it.

        Args:
            record: The peer and its key.

        Raises:
            InvalidInput: If the study is unknown, or :meth:`SealedRecords.check_peer` refuses the peer.
        """
        if record.study_id not in self.studies:
            raise InvalidInput("study of a peer", value=record.study_id[:16], limit="a study this site consented to")
        own_keys = {key for _, key in self.key.history}
        self.sealed.check_peer(record, own_name=self.declared.declaration.site, own_keys=own_keys)

    def check_receipt(self, receipt: Receipt) -> None:
        """Check that a genuine receipt agrees with this site's consents, accepted queries and earlier receipts.

        1. Study, pool, protection and ledger must be those that the site knows.
        2. The parts of the receipt must agree with each other (:func:`check_arithmetic`).
        3. Every charged query, and every charged draw (attempt at a sealed sum), must have been accepted by this site.
           The row of the acceptance may be missing if it was lost when an older copy of this ledger was restored, and
           was then charged as lost.
        4. The receipt must continue the site's last receipt (:func:`check_continuity`).
        5. The charges that the server marks as lost must not exceed the cost of all accepted queries without a receipt,
           counted once for each row that marks a loss. This is not checked between a recovery of the server's ledger
           and the next receipt.

        A receipt that does not continue is superseded, which is no contradiction, if :meth:`charged_as_lost` finds its
        charges.

        After a recovery of the server's ledger, a receipt with totals that are too small can arrive. If the site
        accepted the receipt's queries before the recovery, the server signed the receipt before the recovery too. Such
        a receipt is superseded, which is no contradiction. If the site accepted the queries after the recovery, the
        receipt's totals must contain every charge.

        Args:
            receipt: A genuine receipt.

        Raises:
            ReceiptContradiction: For a contradiction.
            Refused: With code ``receipt-gap`` if earlier receipts are missing, or ``receipt-superseded`` if the receipt
                was signed before the recovery.
        """
        study = self.studies.get(receipt.study_id)
        if study is None:
            raise ReceiptContradiction(
                f"the receipt is for study {receipt.study_id[:12]}, to which this site never consented"
            )
        if receipt.declaration.pool != self.declared.declaration.pool:
            raise ReceiptContradiction(f"the receipt charges pool {receipt.declaration.pool!r}, not this site's")
        if receipt.declaration.protection != self.declared.declaration.protection:
            raise ReceiptContradiction(
                "the receipt states another unit or relation for this site's pool than this site's ledger does"
            )
        if self.lines.get(receipt.study_id, receipt.ledger_id) != receipt.ledger_id:
            raise ReceiptContradiction(
                f"the receipt is from the server's ledger {receipt.ledger_id}, but earlier receipts of this study are "
                "from another ledger"
            )
        lost = self.lost.get(study.id, NOTHING).mu_squared
        known = self.known.of(receipt.ledger_id)
        try:
            check_arithmetic(receipt, study, known=self.rosters)
        except Refused:
            if known.recovering or receipt.previous.seq > known.position.seq:
                raise
            raise ReceiptContradiction("the receipt names a roster that no receipt has shown") from None
        for record in (item.release for item in receipt.releases):
            reservation = self.reservations.get(record.query_id)
            if reservation is not None and reservation.study_id != receipt.study_id:
                raise ReceiptContradiction(f"query {record.query_id[:12]} was accepted for another study")
            if self._in_lost_row(record, left=lost, study=study):
                lost -= self._costs(record.query.mechanism, study)[1]
                if lost < 0:
                    raise ReceiptContradiction(
                        f"the receipt charges query {record.query_id[:12]}, which this site never accepted"
                    )
            elif reservation is not None:
                self.sealed.check_draw(record, accepted=reservation.draw)
        try:
            check_continuity(receipt, known)
        except ReceiptContradiction:
            rows = [self.reservations[query_id].seq for query_id in receipt.query_ids if query_id in self.reservations]
            before = max(rows or self.restored_at, default=0) < self.recovered_at.get(receipt.ledger_id, 0)
            if before or self.charged_as_lost(receipt) is not None:
                raise Refused(
                    "receipt-superseded",
                    "the receipt was signed before the ledger was recovered; to fix: nothing to do, the site has "
                    "newer ones",
                ) from None
            raise
        if not known.recovering and never_receipted(receipt, known).mu_squared > receipt.losses * self.open_to_loss():
            raise ReceiptContradiction(
                "the receipt charges as lost more than the cost of all accepted queries without a receipt"
            )

    def charged_as_lost(self, receipt: Receipt) -> int | None:
        """Return the row of this ledger with which the releases of a late receipt were charged as lost.

        Args:
            receipt: A genuine receipt with consistent parts.

        Returns:
            The result of :meth:`KnownLedgers.charged_as_lost`.
        """
        rosters = {**self.rosters, **receipt.shown}
        return self.known.charged_as_lost(receipt, rosters, accepted=self.reservations.keys())

    def open_to_loss(self) -> Fraction:
        """Return the largest Σμ² that a restored server can have charged this pool without sending a receipt.

        It is the cost of all accepted queries without a receipt, in this ledger or in rows that this ledger lost
        itself.

        Returns:
            The Σμ².
        """
        open_queries = self.reservations.without_receipt()
        costs = (self._costs(found.mechanism, self.studies[found.study_id])[0] for found in open_queries)
        return sum(costs, sum((spend.mu_squared for spend in self.lost.values()), Fraction(0)))

    def _accept(self, row: Row, receipt: Receipt) -> None:
        """Enter a receipt after all its checks.

        Accepting a query pays for one release. If receipts show more releases of a query than were paid for, the
        further releases are charged here, even beyond a limit, since they have happened.

        Earlier versions of the program charged lost releases only if the receipt had a row of kind ``lost``. So a
        ledger that they wrote may hold an accepted query (a reservation) that exceeds a limit once all lost releases
        are charged. :meth:`_reserve` then enters stored reservations beyond a limit. A new reservation is checked
        before it is stored.
        """
        self.check_receipt(receipt)
        self.paid_bytes[receipt.ledger_id] = self.paid_bytes.get(receipt.ledger_id, 0) + len(row.body)
        recovering = self.known.of(receipt.ledger_id).recovering
        lost, study = self.known.accept(receipt, self.rosters, row=row.seq), self.studies[receipt.study_id]
        for item in receipt.releases:
            draw, left = item.release.draw, self.lost.get(study.id, NOTHING).mu_squared
            if self._in_lost_row(item.release, left=left, study=study):
                self._regain(row, item.release.query, study, ledger=receipt.ledger_id, draw=draw)
            if draw is not None and item.release.masks is not None:
                self.sealed.enter_receipted(item.release.query_id, draw, item.release.masks)
        if lost != NOTHING:
            self._counted_later |= recovering or all(link.kind != "lost" for link in receipt.links)
            self._charge_lost(lost, receipt)
        self.rosters |= receipt.shown
        self.lines[receipt.study_id] = receipt.ledger_id
        self.heads.setdefault(receipt.ledger_id, {})[receipt.head.seq] = receipt.head.hash
        for query_id in receipt.query_ids:
            self.reservations.release(query_id, ledger_id=receipt.ledger_id)
            self.reopened.discard(query_id)
            self._charge_unpaid(query_id)

    def _charge_unpaid(self, query_id: str) -> None:
        """Charge a query again if more releases of it are known than were paid for."""
        if self.reservations.released(query_id) > self.reservations.paid(query_id):
            self._counted_later |= query_id in self.reservations.aside
            held = self.reservations[query_id]
            self._charge(query_id, held.mechanism, self.studies[held.study_id])

    def _charge_lost(self, lost: Spend, receipt: Receipt) -> None:
        """Charge what the server marked as lost, less what the recovery of this ledger has charged for lost rows.

        A receipt does not say in which study draws were lost. Every study of that server's ledger in which this site
        accepted a query is therefore charged for all lost draws. This holds even if receipts show a release of each
        query, because an earlier release of the same query may be lost.

        Both this ledger and the server's may have lost the rows of one release. Then the server marked it as lost, and
        the recovery of this ledger has charged it already. No receipt will show it, since the server has no row of it.
        So the recovery's charge is deducted here.
        """
        total, lines = lost, self.lines | {receipt.study_id: receipt.ledger_id}
        may_have_lost = {one.study_id for one in self.reservations.values() if one.ledger in ("", receipt.ledger_id)}
        may_have_lost |= {receipt.study_id, *(study for study, spend in self.lost.items() if spend.mu_squared)}
        for study in may_have_lost:
            if lines.get(study, receipt.ledger_id) == receipt.ledger_id:
                comparable = self.studies[study].protection == self.declared.declaration.protection
                paid = self.lost.get(study, NOTHING) if comparable and study in lines else NOTHING
                if paid != NOTHING:
                    self.lost[study], total = paid.beyond(lost), total.beyond(paid)
                self._study_spent[study] = self.spent_in(study) + lost.beyond(paid)
                self._counted_later |= study != receipt.study_id
        self._spent += total

    def _reserve(self, row: Row, record: ReservationRecord) -> None:
        if not self.is_new(record.query_id, record.draw):
            refuse_second(record.query_id, self.reservations, "reservation of query")
        self.reopened.discard(record.query_id)
        if record.pool != self.declared.declaration.pool:
            raise InvalidInput("pool of a reservation", value=record.pool, limit=self.declared.declaration.pool)
        study, mechanism = self.studies[record.study_id], record.query.mechanism
        if record.draw is None and self.is_prepaid(record.query_id, mechanism, study_id=study.id):
            self._regain(row, record.query, study, ledger=record.ledger, sealing_key=record.sealing_key)
            return
        short = self.shortfall([mechanism], study_id=study.id)
        if short is not None and not self._counted_later:
            raise InvalidInput(f"the reservation exceeds a limit ({short.reason})")
        if mechanism.voters_per_site != study.voters_per_site or mechanism.colluders != study.colluders:
            raise InvalidInput("voters or colluders of a reservation", limit="the numbers in the study's terms")
        day = row.time_utc[:10]
        if self.per_day.get(day, 0) >= self.declared.queries_per_day:
            raise InvalidInput(
                "the reservation exceeds the daily cap", limit=f"{self.declared.queries_per_day} queries a day"
            )
        self._charge(record.query_id, mechanism, study)
        self.per_day[day] = self.per_day.get(day, 0) + 1
        self._hold(row, record.query, study, record.ledger, record.sealing_key, record.draw)
        if record.draw is not None:
            self.sealed.draws[record.query_id, record.draw] = True

    def _hold(
        self, row: Row, query: QuerySpec, study: StudyTerms, ledger: str, sealing_key: str, draw: int | None
    ) -> None:
        """Enter an accepted query, unless a later draw of it was accepted."""
        if draw is not None:
            self.sealed.draws.setdefault((query.id, draw), False)
        known = self.reservations.get(query.id)
        if known is None or (draw or 0) >= (known.draw or 0):
            of = query.id, query.mechanism, study.id, row.seq
            self.reservations.hold(Reservation(*of, ledger, sealing_key, draw))

    def _in_lost_row(self, record: ReleaseRecord, *, left: Fraction, study: StudyTerms) -> bool:
        """Return whether this ledger must have lost the row by which the site accepted the release in a receipt.

        True if the ledger does not know the query. In a sealed study also True if it knows the query but not the draw
        (the attempt at the sum), and ``left`` is enough to pay for this draw. ``left`` is the unused part of the charge
        for the study's lost rows.
        """
        if record.query_id not in self.reservations:
            return True
        known = record.draw is None or (record.query_id, record.draw) in self.sealed.draws
        return not known and self._costs(record.query.mechanism, study)[1] <= left

    def _restore(self, row: Row, record: RestoredRecord) -> None:
        """Charge the rows that an older copy lacks, pause all studies, and forget confirmed peers.

        A decision to leave a study, or the revocation of a peer's key, may be among the lost rows. A person must
        therefore resume studies and confirm peers again.
        """
        self.sealed.enter_restore()
        self._spent += record.pool
        for study_id, spend in record.studies.items():
            _ = self.studies[study_id]
            self._study_spent[study_id] = self.spent_in(study_id) + spend
            self.lost[study_id] = self.lost.get(study_id, NOTHING) + spend
        for study_id in self.studies:
            self.paused.setdefault(study_id, "pause")
        day = row.time_utc[:10]
        self.per_day[day] = self.per_day.get(day, 0) + record.queries
        self.alarms.clear()
        self.alarm_heads.clear()
        self._contradicting.clear()  # this ledger was the older one; the server sends those receipts again
        self.known.owe_nothing()
        self.pending |= set(record.pending) - self.reservations.keys()
        self.restored_at.append(row.seq)
        self.restored_blindly |= record.kept_row == 0  # no standing was left, so every query was charged
        self.kept |= kept_of(record)

    def is_prepaid(self, query_id: str, mechanism: Mechanism, *, study_id: str) -> bool:
        """Return whether a query was accepted in a row that was lost, and paid for when the lost rows were charged.

        Args:
            query_id: The query's id.
            mechanism: Its mechanism.
            study_id: The study's id.

        Returns:
            True if the query needs no further charge.
        """
        own = self._costs(mechanism, self.studies[study_id])[1]
        return query_id in self.pending and own <= self.lost.get(study_id, NOTHING).mu_squared

    def _regain(
        self,
        row: Row,
        query: QuerySpec,
        study: StudyTerms,
        *,
        ledger: str,
        sealing_key: str = "",
        draw: int | None = None,
    ) -> None:
        """Enter again a query that this site had accepted and whose row was lost.

        A receipt or a repeated offer shows that the site had accepted the query. Its cost μ² is not charged again,
        because the recovery of the ledger charged the cost of all lost rows.

        Args:
            row: The row that the query is entered with.
            query: The query.
            study: Its study.
            ledger: Id of the server's ledger.
            sealing_key: The server's key that codes are encrypted to; empty if a receipt shows the query.
            draw: Number of the accepted draw in a sealed study; None in an open study.
        """
        mechanism = query.mechanism
        self.pending.discard(query.id)
        self.reservations.pay(query.id)
        one, left = Spend(self._costs(mechanism, study)[1], 1, mechanism.dimension), self.lost[study.id]
        self.lost[study.id] = left.beyond(one)
        uncounted = replace(one.beyond(left), mu_squared=Fraction(0))  # not empty if only the loss's Σμ² was known
        self._spent += uncounted
        self._study_spent[study.id] = self.spent_in(study.id) + uncounted
        self._hold(row, query, study, ledger, sealing_key, draw)

    def _charge(self, query_id: str, mechanism: Mechanism, study: StudyTerms) -> None:
        self.reservations.pay(query_id)
        cost, own = self._costs(mechanism, study)
        self._spent = self._spent.plus(cost, mechanism.dimension)
        self._study_spent[study.id] = self.spent_in(study.id).plus(own, mechanism.dimension)

    def _costs(self, mechanism: Mechanism, study: StudyTerms) -> tuple[Fraction, Fraction]:
        own = charge_of(mechanism, study.protection, study.protection)
        return charge_of(mechanism, self.declared.declaration.protection, study.protection), own

    def _decide(self, record: DecisionRecord) -> None:
        if record.study_id not in self.studies:
            raise InvalidInput("study", value=record.study_id, limit="a study that this site consented to")
        if self.paused.get(record.study_id) == "withdraw":
            raise InvalidInput(
                "decision",
                value=record.decision,
                limit="no further decision, because the site withdrew from the study for good",
            )
        if record.decision == "resume":
            self.paused.pop(record.study_id, None)
        else:
            self.paused[record.study_id] = record.decision
