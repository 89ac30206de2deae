"""Tracks a site's sealed sums from its rows: confirmed peer keys, mask keys, and codes sent under masks.

Refuses a peer that is the site itself or has another peer's key, a second message under the same masks, and one under
another roster than the server's receipt charges.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.base_state import once
from common.ledger.charges import ReleaseRecord
from common.ledger.rows import Position, Row
from common.ledger.sealed_records import DisclosureRecord, MaskedRecord, MaskKeyRecord, PeerRecord

Draw = tuple[str, int]
"""A query's id and the number of one of its draws."""


class SealedRecords:
    """Part of a site's books. Rows are taken in order, each once; what breaks a rule changes nothing.

    ``peers``: study → site → confirmed key. ``nonces`` of mask keys by batch and draw; those of ``disclosed`` draws are
    in somebody else's hands. By draw: the rows of codes
    under masks (``masked``), which say the rest, and the rosters of these and of the receipts.
    """

    def __init__(self) -> None:
        self.peers: dict[str, dict[str, str]] = {}
        self.nonces: dict[tuple[str, int], str] = {}
        self.disclosed: list[DisclosureRecord] = []
        self.masked: dict[Draw, Position] = {}
        self._masked_under, self._receipted_under = dict[Draw, str](), dict[Draw, str]()

    def check_peer(self, record: PeerRecord, *, own_name: str, own_keys: AbstractSet[str]) -> None:
        """InvalidInput for a peer under this site's own name or with a key of its own, with a key confirmed under
        another name; and for one to distrust that was never trusted."""
        known = self.peers.get(record.study_id, {})
        if not record.key and record.site not in known:
            raise InvalidInput("peer", value=record.site, limit=f"one that was confirmed: {', '.join(known) or 'none'}")
        if record.site == own_name or record.key in own_keys:
            raise InvalidInput("peer", value=record.site, limit="a site other than this one, with its own key")
        named = next((site for site, key in known.items() if key == record.key and site != record.site), None)
        if named is not None and record.key:
            raise InvalidInput(
                f"key of peer {record.site}",
                value=record.key[:16],
                limit=f"a key different from that of {named}, which was confirmed before",
                remedy="one key for two sites counts one site twice: call both hospitals before you ask the consortium",
            )

    def enter_peer(self, record: PeerRecord) -> None:
        """Trust a peer's key in the place of the one before, or no key of it any more."""
        known = self.peers.setdefault(record.study_id, {})
        known.pop(record.site, None)
        if record.key:
            known[record.site] = record.key

    def enter_key(self, record: MaskKeyRecord | DisclosureRecord) -> None:
        """Record a mask key for a draw of a batch, or that it was disclosed to an auditor. Several auditors may have
        it."""
        if isinstance(record, DisclosureRecord):
            self.disclosed.append(record)
            return
        once((record.batch_id, record.draw), self.nonces, "mask key of draw")
        self.nonces[record.batch_id, record.draw] = record.nonce

    def is_disclosed(self, batch: str, draw: int) -> bool:
        """Whether somebody beside this site has its mask key of a batch's draw."""
        return any((one.batch_id, one.draw) == (batch, draw) for one in self.disclosed)

    def enter_masked(self, row: Row, record: MaskedRecord) -> None:
        """A code under masks is made once for a draw: never two messages under the same masks."""
        if record.batch is not None and self.is_disclosed(record.batch, record.draw):
            raise InvalidInput("mask key of a masked code", limit="a key that was never disclosed")
        draw = record.query_id, record.draw
        once(draw, self.masked, "masked code of draw")
        if self._receipted_under.get(draw, record.masks) != record.masks:
            raise InvalidInput("roster of a masked code", limit="the one that the server's receipt charges")
        self.masked[draw] = Position(row.seq, row.hash)
        self._masked_under[draw] = record.masks

    def enter_receipted(self, query_id: str, draw: int, masks: str) -> None:
        """Record the roster under which a receipt charges a draw."""
        self._receipted_under[query_id, draw] = masks

    def masked_under(self, query_id: str, draw: int) -> str | None:
        """The id of the roster under which a query's code was masked for a draw; None where it was not."""
        return self._masked_under.get((query_id, draw))

    def check_draw(self, record: ReleaseRecord, *, accepted: int | None) -> None:
        """That a receipt charges no draw that this site did not accept, and none under another roster than it saw."""
        if record.draw is None:
            return
        if record.draw > (accepted or record.draw):
            raise LedgerCorrupt(f"the receipt charges a draw of query {record.query_id[:12]} that was never accepted")
        if self.masked_under(record.query_id, record.draw) not in (None, record.masks):
            raise LedgerCorrupt(f"a draw of query {record.query_id[:12]} was asked of this site under another roster")
