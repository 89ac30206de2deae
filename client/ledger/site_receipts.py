"""Checks each of the server's receipts against the site's own record, and stores it.

The worker and `site recover` call it. A signed receipt that contradicts the record raises an *alarm*: it is stored as
evidence, and the site answers nothing until a person ends the alarm. It refuses receipts without the server's
signature, and receipts that arrive while earlier ones are missing.
"""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from client.ledger.site_file import SiteFile
from common.errors import InvalidInput, ReceiptContradiction, Refused
from common.ledger.charges import charge_of
from common.ledger.receipts import Receipt, never_receipted
from common.ledger.records import AlarmRecord, ReceiptRecord, RecoveryRecord, SupersededRecord, parse_body
from common.ledger.rows import START, Position
from common.ledger.site_state import SiteBooks

MAX_EVIDENCE_BYTES_A_DAY = 64 << 20
"""Limit, in bytes, on the receipts that are stored as evidence in one day (:meth:`KeepsReceipts.record_receipt`)."""
MAX_EVIDENCE_BYTES = 16 * MAX_EVIDENCE_BYTES_A_DAY
"""Limit, in bytes, on all receipts that are stored as evidence. A contradicting receipt that arrives while there is no
alarm is stored even beyond both limits, because the alarm needs it.
"""
MAX_PAID_BYTES = 128 << 20
"""Limit, in bytes, on the stored receipts of one server ledger. Receipts that are stored as evidence are not counted
here. A receipt of one release takes 3 to 5 kB, with 100 bytes for each further row of the server's ledger. A server's
ledger is made for 10,000 releases, whose receipts take at most 50 MB.
"""
MAX_KIND = 64
"""Longest name of a row's kind in a receipt, in characters. A longer one would only fill the site's disk."""


class KeepsReceipts(SiteFile):
    """The part of a site's ledger that checks and stores the server's receipts."""

    def record_receipt(self, receipt: Receipt, *, public_key: Ed25519PublicKey) -> None:
        """Check a receipt against everything on record here, and store it.

        A receipt that was accepted before changes nothing. Two kinds of receipts are not accepted, but stored as
        evidence:

        * A receipt that contradicts the record raises an alarm. If there is no alarm yet, its size is not limited.
        * A *superseded* receipt was signed before a recovery of the server's ledger. It raises no alarm.

        All other evidence is stored only within :data:`MAX_EVIDENCE_BYTES_A_DAY` and :data:`MAX_EVIDENCE_BYTES`. A
        receipt beyond these limits raises the same error without being stored.

        Args:
            receipt: The server's receipt.
            public_key: The server's signing key.

        Raises:
            InvalidInput: If the server's key did not sign the receipt, or if the name of a kind of row in it is longer
                than :data:`MAX_KIND` characters. Nothing is recorded.
            ReceiptContradiction: If the receipt is signed and contradicts the record. The site accepts no query until
                :meth:`recover`.
            Refused: ``receipt-gap`` if earlier receipts are missing; ``receipt-superseded`` if the receipt was signed
                before a recovery of the server's ledger, or if a person has already ended the alarm that it raised;
                ``receipts-full`` if the stored receipts of the server's ledger would take more than
                :data:`MAX_PAID_BYTES`.
        """
        if not receipt.is_genuine(public_key):
            raise InvalidInput(
                "receipt with a wrong signature",
                limit="receipts signed by the server's key",
                remedy="ask the consortium whether the server's signing key has changed",
            )
        longest = max((len(link.kind) for link in receipt.links), default=0)
        if longest > MAX_KIND:
            raise InvalidInput(
                "kind of a row in a receipt",
                value=f"{longest} characters",
                limit=f"at most {MAX_KIND} characters",
                remedy="ask the server's operator which program wrote the receipt",
            )
        problem: ReceiptContradiction | Refused | None = None
        with self._writing():
            books = self._books
            if books.heads.get(receipt.ledger_id, {}).get(receipt.head.seq) == receipt.head.hash:
                return
            known = books.alarm_heads.get((receipt.ledger_id, receipt.head.seq, receipt.head.hash))
            if known is not None and receipt.ledger_id in books.alarms:
                raise ReceiptContradiction(known)
            if known is not None:
                raise Refused(
                    "receipt-superseded",
                    "a person at this site has already ended the alarm that this receipt raised; to fix: nothing to do",
                )
            try:
                books.check_receipt(receipt)
                _check_paid(receipt, books)
            except ReceiptContradiction as error:
                problem = error
                if not books.alarms or self._has_room_for_evidence(receipt):
                    self._append(AlarmRecord(receipt, str(error)))
            except Refused as error:
                if error.reason != "receipt-superseded":
                    raise
                problem = error
                if self._has_room_for_evidence(receipt):
                    self._append(SupersededRecord(receipt, books.charged_as_lost(receipt)))
            else:
                self._check_paid_bytes(receipt)
                self._append(ReceiptRecord(receipt))
        if problem is not None:
            raise problem

    def _check_paid_bytes(self, receipt: Receipt) -> None:
        """Refuse a receipt with which the stored receipts of one server ledger would exceed :data:`MAX_PAID_BYTES`.

        A receipt contains a hash for every row that the server claims to have written. Without the limit a dishonest
        server could fill this site's disk.
        """
        stored, size = self._books.paid_bytes.get(receipt.ledger_id, 0), len(receipt.render())
        if stored + size > MAX_PAID_BYTES:
            raise Refused(
                "receipts-full",
                f"the receipts of ledger {receipt.ledger_id} take {stored} bytes here, this one {size}, and at most "
                f"{MAX_PAID_BYTES} are stored; to fix: ask the server's operator for `consilium verify` of that ledger",
            )

    def _has_room_for_evidence(self, receipt: Receipt) -> bool:
        """Tell whether a receipt can be stored as evidence within the limit for today and the limit for all days.

        Without the limit a dishonest server could fill the disk.
        """
        evidence, size = self._books.evidence, len(receipt.render())
        fits_today = evidence.get(self._chain.today, 0) + size <= MAX_EVIDENCE_BYTES_A_DAY
        return fits_today and sum(evidence.values()) + size <= MAX_EVIDENCE_BYTES

    def recover(self, ledger_id: str) -> None:
        """End an alarm: accept that the server's ledger continues from the row to which it was restored.

        The server must still hold every charge. Queries that receipts show as released may be asked again, and are
        charged again.

        Args:
            ledger_id: Id of the server's ledger.
        """
        with self._writing():
            self._append(RecoveryRecord(ledger_id))

    def alarms(self) -> tuple[str, ...]:
        """Return everything that contradicts this ledger.

        A signed contradiction stops every answer. A request for a query that was already released is declined and
        listed here as well, because it may be the first sign that the server's ledger was rolled back.

        Returns:
            One sentence for each server ledger concerned, and one if this file is an older copy; empty if all is well.
        """
        self._catch_up()
        contradicted = (alarm.problem for alarm in self._books.alarms.values())
        asked = (
            f"row {row}: the server asked again for queries that ledger {ledger} has released, as its receipts show: "
            "that ledger was rolled back, or an old message arrived late"
            for ledger, row in self._books.asked_again.items()
            if ledger not in self._books.alarms
        )
        forgotten = self.forgotten()
        return (*(() if forgotten is None else (forgotten,)), *contradicted, *asked)

    def alarmed_ledgers(self) -> tuple[str, ...]:
        """Return the server ledgers that :meth:`alarms` reports.

        Returns:
            Their ids.
        """
        self._catch_up()
        return tuple({**self._books.alarms, **self._books.asked_again})

    def held(self, ledger_id: str) -> Position:
        """Return the newest row of a server's ledger for which this site has a receipt.

        Args:
            ledger_id: Id of the server's ledger.

        Returns:
            The row's number and hash. They are (0, zeros) if there is no receipt, and after :meth:`recover` until the
            restored ledger sends one.
        """
        known = self.books.known.get(ledger_id)
        return START if known is None or known.recovering else known.position

    def server_heads(self) -> dict[str, tuple[int, str]]:
        """Return, for every server ledger, the newest row that a receipt at this site shows.

        Returns:
            Row and hash by ledger id.
        """
        known = self.books.known
        return {ledger_id: (known[ledger_id].position.seq, known[ledger_id].position.hash) for ledger_id in known}

    def belongs_elsewhere(self, ledger_id: str, *, study_id: str, elsewhere: Collection[str]) -> bool:
        """Return whether a ledger belongs to a server other than the one that runs a study.

        A study *uses* a ledger if this site has an accepted query or a receipt of both. The ledger belongs to another
        server if ``study_id`` does not use it, and ``elsewhere`` contains the ledger or a study that uses it.

        Args:
            ledger_id: The ledger's id.
            study_id: Id of the study.
            elsewhere: Ids of other servers' studies and ledgers.

        Returns:
            True if it does.
        """
        books = self.books
        dealt = {one.study_id for one in books.reservations.values() if one.ledger == ledger_id}
        dealt |= {study for study, line in books.lines.items() if line == ledger_id}
        return study_id not in dealt and not (dealt | {ledger_id}).isdisjoint(elsewhere)

    def receipts(self, *, evidence: bool = False) -> tuple[Receipt, ...]:
        """Return every receipt on record, in order.

        Args:
            evidence: True to include the contradicting and the superseded receipts. A recovery of the server's ledger
                needs them, because they prove charges too.

        Returns:
            The receipts.
        """
        self._catch_up()
        kinds = ("receipt", "alarm", "superseded") if evidence else ("receipt",)
        rows = (row for row in self._chain.all_rows() if row.kind in kinds)
        return tuple(Receipt.from_json(parse_body(row.body)["receipt"]) for row in rows)


def _unpaid(receipt: Receipt, books: SiteBooks) -> Fraction:
    """Return the cost (Σμ²) of the releases in a receipt that this site accepted and has not paid for.

    Only the exceptions 2 and 3 of :func:`_check_paid` allow such releases. The site charges them when it stores the
    receipt.
    """
    protection = receipt.declaration.protection
    held = (books.reservations[one] for one in receipt.query_ids if one in books.reservations)
    unpaid = (one for one in held if not books.reservations.awaits_release(one.query_id))
    costs = (charge_of(one.mechanism, protection, books.studies[one.study_id].protection) for one in unpaid)
    return sum(costs, Fraction(0))


def _check_paid(receipt: Receipt, books: SiteBooks) -> None:
    """Check that this site has paid for each release in a new receipt. It pays when it accepts a query.

    The receipt's total must not be larger than this site's total together with the charges that the receipt adds. After
    a recovery of the server's ledger, a receipt may begin at any row, so its total can contain releases that it does
    not name. If this ledger is an older copy, it may have lost the charges for them, and the check fails.

    Three exceptions are allowed:

    1. Charges that the server marks as lost may take the pool beyond its cap, but by no more than the cost of all
       accepted queries without a receipt. This limit also holds after a person has ended an alarm.
    2. After a recovery of the server's ledger, each query may be released once more, because the server may have lost
       its answer.
    3. If this site's ledger lost rows, a release in a sealed study counts as paid, because the row that accepted it may
       be lost. A draw is still released only once.

    Receipts that are stored already are not checked by these rules, because versions up to 0.2.0 accepted receipts that
    break them.

    Raises:
        ReceiptContradiction: If a release is neither paid nor covered by an exception, if the receipt charges too much
            as lost, or if its total is larger than this site's.
    """
    lost = never_receipted(receipt, books.known.counted_in(receipt, books.rosters)).mu_squared
    if lost and books.spent().mu_squared + lost > books.limit + books.open_to_loss():
        raise ReceiptContradiction(
            "the receipt charges as lost more than this site's cap and its accepted queries without a receipt allow; "
            "to fix: have the server's operator enter this site's receipts (`consilium site heads --out`) with "
            "`consilium ledger recover`, or, to accept the charge, raise caps.epsilon in site.toml; then run "
            "`consilium site recover`"
        )
    seen = set[str]()
    for record in (item.release for item in receipt.releases):
        query_id, draw = record.query_id, record.draw
        repeated = query_id in seen
        seen.add(query_id)
        if query_id in books.reopened and not repeated:
            continue
        never_recovered = receipt.ledger_id not in books.recovered_at
        drawn = draw is not None and never_recovered and books.sealed.is_receipted(query_id, draw)
        known_paid = draw is None or receipt.study_id not in books.lost
        unpaid = known_paid and query_id in books.reservations and not books.reservations.awaits_release(query_id)
        if repeated or drawn or unpaid:
            raise ReceiptContradiction(
                f"the receipt releases query {query_id[:12]} again, but receipts already show every release that this "
                "site accepted"
            )
    if receipt.after.mu_squared > books.spent().mu_squared + lost + _unpaid(receipt, books):
        raise ReceiptContradiction("the receipt's total is larger than all that this site's ledger has charged")
