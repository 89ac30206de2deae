"""Tracks what a site knows of the server's ledgers from their receipts; part of a site's totals
(:mod:`common.ledger.site_state`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice

from common.errors import InvalidInput
from common.ledger.charges import NOTHING, Roster, Spend
from common.ledger.receipts import KnownLedger, Receipt, never_receipted, row_hashes
from common.ledger.records import recovered_bodies
from common.ledger.rows import Position

MAX_BODIES = 1 << 12
"""Most rows ``recovered`` that are computed for one contradicting receipt. Without the limit a dishonest server could
fill the site's memory.
"""


@dataclass(frozen=True, slots=True)
class _Owed:
    """A receipt that contradicted the site's record: its rows, its charges, and which rows can charge each release."""

    head: Position
    previous: Position
    charges: Spend
    bodies: tuple[frozenset[str], ...]


class KnownLedgers(dict[str, KnownLedger]):
    """What receipts have shown of each server ledger, by the ledger's id.

    Attributes:
        recovered: For each known row of kind ``recovered``, by the hash of its body, the number of the row of the
            site's ledger whose receipt shows it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recovered: dict[str, int] = {}
        self._owed: dict[str, list[_Owed]] = {}

    def of(self, ledger_id: str) -> KnownLedger:
        """Return what is known of one ledger.

        Args:
            ledger_id: The ledger's id.

        Returns:
            The knowledge; that of an empty ledger if no receipt has come.
        """
        return self.get(ledger_id, KnownLedger())

    def counted_in(self, receipt: Receipt) -> KnownLedger:
        """Return what is known of a receipt's ledger, with only those owed charges that the receipt's totals contain.

        A contradicting receipt's charges are contained if its head is a row of the receipt's own history, or if rows of
        kind ``recovered`` charge its releases. The server may have lost the other ones, unnoticed.

        Args:
            receipt: A genuine receipt with consistent parts.

        Returns:
            The knowledge before the receipt.
        """
        waiting = self._owed.get(receipt.ledger_id)
        if not waiting:
            return self.of(receipt.ledger_id)
        at, previous = receipt.previous, {one.head: one.previous for one in waiting}
        history = {Position(*row) for row in row_hashes(receipt).items()}
        while at in previous and at not in history:
            history.add(at)
            at = previous[at]
        shown = self.recovered.keys() | {link.body_sha256 for link in receipt.links if link.kind == "recovered"}
        owed = NOTHING
        for one in waiting:
            if one.head in history or (one.bodies and not any(shown.isdisjoint(bodies) for bodies in one.bodies)):
                owed += one.charges
        return replace(self.of(receipt.ledger_id), owed=owed)

    def accept(self, receipt: Receipt, *, row: int) -> Spend:
        """Enter an accepted receipt.

        Args:
            receipt: The receipt.
            row: Number of its row in the site's ledger.

        Returns:
            The charges that :func:`~common.ledger.receipts.never_receipted` finds in it.
        """
        known = self.of(receipt.ledger_id)
        lost = never_receipted(receipt, self.counted_in(receipt))
        self._owed.pop(receipt.ledger_id, None)
        shown = (known.spend + known.owed).beyond(receipt.before)  # contradicting receipts showed these lost charges
        unshown = known.unshown.beyond(shown) + lost
        position = Position(receipt.head.seq, receipt.head.hash)
        self[receipt.ledger_id] = KnownLedger(position, receipt.after, unshown=unshown)
        self.recovered |= {link.body_sha256: row for link in receipt.links if link.kind == "recovered"}
        return lost

    def owe(self, receipt: Receipt, charges: Spend, rosters: Mapping[str, Roster]) -> None:
        """Enter the charges of a genuinely signed receipt that contradicted the site's record.

        The receipt is not accepted, so the site's last known position and total of the server's ledger stay. After a
        recovery of the server's ledger, the site checks that the ledger contains these charges.

        Args:
            receipt: The receipt.
            charges: The charges of those of its releases that the site had accepted.
            rosters: Known rosters, by the SHA-256 of their rows' bodies.
        """
        bodies, left = list[frozenset[str]](), MAX_BODIES
        try:
            for _, found in recovered_bodies(receipt, rosters):
                bodies.append(frozenset(islice(found, left)))
                left -= len(bodies[-1])
        except (KeyError, InvalidInput):  # the receipt names a roster that nobody showed, or contradicts itself
            bodies.clear()
        head = Position(receipt.head.seq, receipt.head.hash)
        owed = _Owed(head, receipt.previous, charges, tuple(bodies))
        self._owed.setdefault(receipt.ledger_id, []).append(owed)
        known = self.of(receipt.ledger_id)
        self[receipt.ledger_id] = replace(known, owed=known.owed + charges, losses=known.losses + receipt.losses)

    def owe_nothing(self) -> None:
        """Forget the charges of contradicting receipts, because this site's own ledger was the older copy."""
        self._owed.clear()
        for ledger_id, known in self.items():
            self[ledger_id] = replace(known, owed=NOTHING)

    def expect_recovered(self, ledger_id: str) -> None:
        """Enter a person's statement that a ledger of the server was recovered.

        Args:
            ledger_id: The ledger's id.
        """
        self[ledger_id] = replace(self.of(ledger_id), recovering=True)

    def show_lost(self, receipt: Receipt) -> None:
        """Enter a late receipt whose releases were charged as lost.

        Args:
            receipt: The receipt.
        """
        known = self.of(receipt.ledger_id)
        unshown = known.unshown.beyond(receipt.after.beyond(receipt.before))
        self[receipt.ledger_id] = replace(known, unshown=unshown)

    def charged_as_lost(
        self, receipt: Receipt, rosters: Mapping[str, Roster], *, accepted: Collection[str]
    ) -> int | None:
        """Return the row of the site's ledger with which the releases of a late receipt were charged as lost.

        A restored server enters a release that another site's receipt shows in a row ``recovered``. Accepted receipts
        show this site only the hash of the row's body. From the late receipt the site can compute the body. That the
        server names the release is not enough: it must also have charged this site for a loss.

        Args:
            receipt: A genuine receipt with consistent parts.
            rosters: Known rosters, by the SHA-256 of their rows' bodies.
            accepted: Ids of the queries that the site accepted.

        Returns:
            The number of the newest such row; None unless every release has one and this site was charged for all.
        """
        charged_by = 0
        for query_id, bodies in recovered_bodies(receipt, rosters):
            row = next((self.recovered[body] for body in bodies if body in self.recovered), None)
            if row is None or query_id not in accepted:
                return None
            charged_by = max(charged_by, row)
        charges, unshown = receipt.after.beyond(receipt.before), self.of(receipt.ledger_id).unshown
        return charged_by if charges.beyond(unshown) == NOTHING else None
