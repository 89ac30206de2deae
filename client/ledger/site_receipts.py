"""The server's receipts as a site keeps them: each checked against the site's own record, and what contradicts it.

A contradiction that the server signed is kept as evidence and stops every answer until a person has looked into it.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from client.ledger.site_file import SiteFile
from common.errors import InvalidInput, LedgerCorrupt, Refused
from common.ledger.receipts import Receipt
from common.ledger.records import AlarmRecord, ReceiptRecord, RecoveryRecord, SupersededRecord, parse_body
from common.ledger.rows import START, Position

MAX_EVIDENCE_BYTES_A_DAY = 64 << 20
"""Of receipts that contradict the record: an honest server's whole line fits, a liar's does not fill the disk."""


class KeepsReceipts(SiteFile):
    """The part of a site's ledger that checks and stores receipts and heads of the server's ledger."""

    def record_receipt(self, receipt: Receipt, *, public_key: Ed25519PublicKey) -> None:
        """Check a server's receipt against everything on record here, and keep it.

        InvalidInput if the server's key did not sign it (no row: anyone could send that). LedgerCorrupt if it is signed
        and contradicts the record: the receipt is kept as evidence, once, and nothing is accepted until
        :meth:`recover`; after it the same receipt is Refused (``receipt-superseded``). While an alarm stands, further
        evidence is kept up to :data:`MAX_EVIDENCE_BYTES_A_DAY`. Refused (``receipt-gap``) if receipts before it are
        missing. A receipt already recorded changes nothing.
        """
        if not receipt.is_genuine(public_key):
            raise InvalidInput("receipt", limit="signed by the server's key", remedy="ask the consortium for its key")
        problem: LedgerCorrupt | Refused | None = None
        with self._writing():
            books = self._books
            if books.heads.get(receipt.ledger_id, {}).get(receipt.head.seq) == receipt.head.hash:
                return
            known = books.alarm_heads.get((receipt.ledger_id, receipt.head.seq, receipt.head.hash))
            if known is not None and receipt.ledger_id in books.alarms:
                raise LedgerCorrupt(known)
            if known is not None:
                raise Refused(
                    "receipt-superseded", "a person at this site has already ended the alarm that this receipt raised"
                )
            try:
                books.check_receipt(receipt)
            except LedgerCorrupt as error:
                problem = error
                if not books.alarms or self._has_room_for_evidence(receipt):
                    self._append(AlarmRecord(receipt, str(error)))
            except Refused as error:
                if error.reason != "receipt-superseded":
                    raise
                problem = error
                if self._has_room_for_evidence(receipt):
                    self._append(SupersededRecord(receipt))
            else:
                self._append(ReceiptRecord(receipt))
        if problem is not None:
            raise problem

    def _has_room_for_evidence(self, receipt: Receipt) -> bool:
        """Whether one more contradiction is kept today: whoever can sign could fill the disk with them."""
        kept, size = self._books.evidence.get(self._chain.today, 0), len(receipt.render())
        return kept + size <= MAX_EVIDENCE_BYTES_A_DAY

    def recover(self, ledger_id: str) -> None:
        """End an alarm: the server's ledger may go on from where it was restored, if it still owns every charge.

        Queries of that ledger that receipts show as released may be asked for again, and are charged again.
        """
        with self._writing():
            self._append(RecoveryRecord(ledger_id))

    def alarms(self) -> tuple[str, ...]:
        """What contradicts the record, one line for each server ledger concerned; empty when all is well.

        A signed contradiction stops every answer. A released query that is asked for again is declined, and shows here
        too: a restored server looks like that before it has signed anything.
        """
        self._catch_up()
        contradicted = (alarm.problem for alarm in self._books.alarms.values())
        asked = (
            f"row {row}: queries were asked for again that ledger {ledger} released by its own receipts: it was rolled "
            "back, or an old message arrived late"
            for ledger, row in self._books.asked_again.items()
            if ledger not in self._books.alarms
        )
        forgotten = self.forgotten()
        return (*(() if forgotten is None else (forgotten,)), *contradicted, *asked)

    def alarmed_ledgers(self) -> tuple[str, ...]:
        """Ids of the server ledgers that :meth:`alarms` speaks of."""
        self._catch_up()
        return tuple({**self._books.alarms, **self._books.asked_again})

    def held(self, ledger_id: str) -> Position:
        """The newest head of a server's ledger this site holds a receipt for; (0, zeros) for none, and after a
        recovery, when the rows of the restored ledger mean nothing yet."""
        self._catch_up()
        known = self._books.known.get(ledger_id)
        return START if known is None or known.recovering else known.position

    def server_heads(self) -> dict[str, tuple[int, str]]:
        """By server ledger id: row and hash of the newest head this site holds a receipt for."""
        self._catch_up()
        known = self._books.known
        return {ledger_id: (known[ledger_id].position.seq, known[ledger_id].position.hash) for ledger_id in known}

    def receipts(self, *, evidence: bool = False) -> tuple[Receipt, ...]:
        """Every receipt on record, in order: what the server charged by its own hand.

        With ``evidence`` also those that contradicted the record: a recovery needs them, since they charge too.
        """
        self._catch_up()
        kinds = ("receipt", "alarm", "superseded") if evidence else ("receipt",)
        rows = (row for row in self._chain.all_rows() if row.kind in kinds)
        return tuple(Receipt.from_json(parse_body(row.body)["receipt"]) for row in rows)
