"""Tracks what a site knows of the server's ledgers from their receipts; part of a site's totals
(:mod:`common.ledger.site_state`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import starmap

from common.errors import InvalidInput
from common.ledger.charges import NOTHING, Roster, Spend
from common.ledger.receipts import KnownLedger, Receipt, never_receipted, row_hashes
from common.ledger.records import recovered_bodies
from common.ledger.rows import Position

MAX_HELD = 1 << 8
"""Number of the newest receipts of a ledger that are kept for comparison with a recovered ledger."""

MAX_BODIES = 1 << 16
"""Limit on the rows ``recovered`` that are computed for one new receipt. Without it a dishonest server could keep the
site computing for hours.
"""


@dataclass(frozen=True, slots=True)
class _HeldReceipt:
    """A receipt of this site, kept without its links.

    Attributes:
        receipt: The receipt without links.
        accepted: Whether the site accepted it; otherwise it contradicted the site's record, or came late.
        charges: Charges of the receipt's releases, as far as this site has paid for them.
        losses: Kind, number and SHA-256 of the body of each row among the links that charges lost releases.
    """

    receipt: Receipt
    accepted: bool
    charges: Spend
    losses: frozenset[tuple[str, int, str]]


class KnownLedgers(dict[str, KnownLedger]):
    """What receipts have shown of each server ledger, by the ledger's id.

    Attributes:
        recovered: The server's rows of kind ``recovered`` that receipts have shown. The keys are the hashes of their
            bodies. The values are the numbers of the rows, in the site's ledger, that store the receipts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recovered: dict[str, int] = {}
        self._held: dict[str, dict[Position, _HeldReceipt]] = {}

    def of(self, ledger_id: str) -> KnownLedger:
        """Return what is known of one ledger.

        Args:
            ledger_id: The ledger's id.

        Returns:
            The knowledge; that of an empty ledger if no receipt has come.
        """
        return self.get(ledger_id, KnownLedger())

    def counted_in(self, receipt: Receipt, rosters: Mapping[str, Roster]) -> KnownLedger:
        """Return what is known of a receipt's ledger, with only those charges that the receipt's totals surely contain.

        A large total proves nothing after a recovery of the server's ledger: the server may have lost a release of
        which this site holds a receipt, and charged other releases since. The new totals surely contain the charges of
        a held receipt in two cases only:

        1. The held receipt's head is in the new receipt's history. The history consists of the rows that the new
           receipt covers and its row ``previous``. If ``previous`` is the head of another held receipt, the history of
           that receipt is included.
        2. Rows of kind ``recovered`` charge all releases of the held receipt. These rows are in the new receipt's
           history, after the newest accepted receipt in it.

        The site charges itself for the rest of the totals. So it may count a release twice, but never leaves one out:

        - A row ``lost`` does not tell which releases it charges. If the server's ledger was recovered without this
          site's receipts, the releases in these receipts count twice.
        - If the server lost a row ``lost`` and entered its charge again, that charge counts twice.
        - If the recovered ledger continues none of the newest :data:`MAX_HELD` receipts, all earlier charges count
          twice.

        Without a recovery of the server's ledger, recorded by a person at this site, the totals contain all known
        charges.

        Args:
            receipt: A genuine receipt with consistent parts.
            rosters: Known rosters, by the SHA-256 of their rows' bodies.

        Returns:
            The knowledge before the receipt.
        """
        known, held = self.of(receipt.ledger_id), self._held.get(receipt.ledger_id, {})
        if not known.recovering:
            return known
        history = {place: held[place] for place in starmap(Position, row_hashes(receipt).items()) if place in held}
        at, losses, contained = receipt.previous, _losses(receipt), NOTHING
        while at in held and at not in history:
            history[at] = held[at]
            at = held[at].receipt.previous
        for one in sorted(history.values(), key=lambda one: -one.receipt.head.seq):
            if one.accepted:
                contained += one.receipt.after
                break
            contained, losses = contained + one.charges, losses | one.losses
        left = iter(range(MAX_BODIES))
        for place, one in reversed(held.items()):
            if place not in history and _is_charged_by(losses, one.receipt, rosters, left):
                contained += one.charges
        return replace(known, spend=contained, owed=NOTHING)

    def accept(self, receipt: Receipt, rosters: Mapping[str, Roster], *, row: int) -> Spend:
        """Enter an accepted receipt.

        Args:
            receipt: The receipt.
            rosters: Known rosters, by the SHA-256 of their rows' bodies.
            row: Number of its row in the site's ledger.

        Returns:
            The charges that :func:`~common.ledger.receipts.never_receipted` finds in it.
        """
        known = self.of(receipt.ledger_id)
        lost = never_receipted(receipt, self.counted_in(receipt, rosters))
        shown = (known.spend + known.owed).beyond(receipt.before)  # contradicting receipts showed these lost charges
        unshown = known.unshown.beyond(shown) + lost
        position = self._hold(receipt, receipt.after.beyond(receipt.before), accepted=True)
        self[receipt.ledger_id] = KnownLedger(position, receipt.after, unshown=unshown)
        self.recovered |= {link.body_sha256: row for link in receipt.links if link.kind == "recovered"}
        return lost

    def _hold(self, receipt: Receipt, charges: Spend, *, accepted: bool) -> Position:
        """Enter a receipt whose releases this site has paid for, and return the position of its head."""
        place, short = Position(receipt.head.seq, receipt.head.hash), replace(receipt, links=(), rosters=None)
        held = self._held.setdefault(receipt.ledger_id, {})
        held[place] = _HeldReceipt(short, accepted, charges, _losses(receipt))
        if len(held) > MAX_HELD:
            del held[next(iter(held))]
        return place

    def owe(self, receipt: Receipt, charges: Spend) -> None:
        """Enter the charges of a genuinely signed receipt that contradicted the site's record.

        The receipt is not accepted, so the site's last known position and total of the server's ledger stay. After a
        recovery of the server's ledger, the site checks that the ledger contains these charges.

        Args:
            receipt: The receipt.
            charges: The charges of those of its releases that the site had accepted.
        """
        self._hold(receipt, charges, accepted=False)
        known = self.of(receipt.ledger_id)
        self[receipt.ledger_id] = replace(known, owed=known.owed + charges, losses=known.losses + receipt.losses)

    def owe_nothing(self) -> None:
        """Forget the charges of receipts that contradicted this site's ledger, once it proved an older copy."""
        for ledger_id, known in self.items():
            held = self._held.get(ledger_id, {})
            self._held[ledger_id] = {place: one for place, one in held.items() if one.accepted}
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
        known, charges = self.of(receipt.ledger_id), receipt.after.beyond(receipt.before)
        self._hold(receipt, charges, accepted=False)
        unshown = known.unshown.beyond(charges)
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


def _losses(receipt: Receipt) -> frozenset[tuple[str, int, str]]:
    """Return kind, number and SHA-256 of the body of each row of a receipt that charges lost releases."""
    rows = enumerate(receipt.links, start=receipt.previous.seq + 1)
    return frozenset((link.kind, seq, link.body_sha256) for seq, link in rows if link.kind in ("lost", "recovered"))


def _is_charged_by(
    losses: Collection[tuple[str, int, str]], receipt: Receipt, rosters: Mapping[str, Roster], left: Iterator[int]
) -> bool:
    """Return whether rows of kind ``recovered`` charge all releases of a receipt, themselves or by a row ``lost``.

    Each body that is computed for the answer takes one number from ``left``.
    """
    shown = {body for kind, _, body in losses if kind == "recovered"}
    by = (None, *(seq for kind, seq, _ in losses if kind == "lost"))
    try:
        return bool(shown) and all(
            not shown.isdisjoint(body for body, _ in zip(bodies, left, strict=False))
            for _, bodies in recovered_bodies(receipt, rosters, by)
        )
    except (KeyError, InvalidInput):  # the receipt names a roster that nobody showed, or contradicts itself
        return False
