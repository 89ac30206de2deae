"""What a site's rows say of sealed sums: whose keys it confirmed, its mask keys, and what it sent under masks.

Refuses a peer that is the site itself or has another peer's key, a second message under the same masks, and one under
another roster than the server's receipt charges.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from common.canonical import sha256_bytes
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.base_state import once
from common.ledger.charges import ReleaseRecord
from common.ledger.packed import Column, Digests, Rows
from common.ledger.rows import Row
from common.ledger.sealed_records import MaskedRecord, MaskKeyRecord, PeerRecord


def draw_key(query_id: str, draw: int) -> str:
    """The hash by which one draw of a query is found."""
    return sha256_bytes(f"{query_id}/{draw}".encode())


class SealedSums:
    """Part of a site's books. Rows are taken in order, each once; what breaks a rule changes nothing.

    ``peers``: study → site → confirmed key. ``nonces`` of mask keys by batch and draw. By :func:`draw_key` the rows of
    codes under masks (``masked``), which say the rest, and the rosters of these and of the receipts.
    """

    def __init__(self) -> None:
        self.peers: dict[str, dict[str, str]] = {}
        self.nonces: dict[tuple[str, int], str] = {}
        draws = Digests()
        self.masked = Rows(draws)
        self._draws, self._rosters = draws, Digests()
        self._masked_under, self._receipted_under = Column(draws), Column(draws)

    def check_peer(self, record: PeerRecord, *, own_name: str, own_keys: AbstractSet[str]) -> None:
        """InvalidInput for a peer under this site's own name or with a key of its own, with a key confirmed under
        another name; and for one to distrust that was never trusted."""
        known = self.peers.get(record.study_id, {})
        if not record.key and record.site not in known:
            raise InvalidInput("peer", value=record.site, limit=f"one that was confirmed: {', '.join(known) or 'none'}")
        if record.site == own_name or record.key in own_keys:
            raise InvalidInput("peer", value=record.site, limit="another site than this one, with a key of its own")
        named = next((site for site, key in known.items() if key == record.key and site != record.site), None)
        if named is not None and record.key:
            raise InvalidInput(
                f"key of peer {record.site}",
                value=record.key[:16],
                limit=f"another one than that of {named}, confirmed before",
                remedy="two sites with one key are one site: talk to both, and to the consortium last",
            )

    def enter_peer(self, record: PeerRecord) -> None:
        """Trust a peer's key in the place of the one before, or no key of it any more."""
        known = self.peers.setdefault(record.study_id, {})
        known.pop(record.site, None)
        if record.key:
            known[record.site] = record.key

    def enter_mask_key(self, record: MaskKeyRecord) -> None:
        """One mask key for a draw of a batch."""
        once((record.batch_id, record.draw), self.nonces, "mask key of draw")
        self.nonces[record.batch_id, record.draw] = record.nonce

    def enter_masked(self, row: Row, record: MaskedRecord) -> None:
        """A code under masks is made once for a draw: never two messages under the same masks."""
        key, roster = draw_key(record.query_id, record.draw), self._rosters.add(record.masks) + 1
        once(key, self.masked, "masked code of draw")
        if self._receipted_under.get(key, roster) != roster:
            raise InvalidInput("roster of a masked code", limit="the one that the server's receipt charges")
        self._draws.add(key)
        self.masked.enter(key, row)
        self._masked_under[key] = roster

    def enter_receipted(self, query_id: str, draw: int, masks: str) -> None:
        """The roster under which a receipt charges a draw."""
        key = draw_key(query_id, draw)
        self._draws.add(key)
        self._receipted_under[key] = self._rosters.add(masks) + 1

    def masked_under(self, query_id: str, draw: int) -> str | None:
        """The id of the roster under which a query's code was masked for a draw; None where it was not."""
        roster = self._masked_under.get(draw_key(query_id, draw))
        return None if roster is None else self._rosters[roster - 1]

    def check_draw(self, record: ReleaseRecord, *, accepted: int | None) -> None:
        """That a receipt charges no draw that this site did not accept, and none under another roster than it saw."""
        if record.draw is None:
            return
        if record.draw > (accepted or record.draw):
            raise LedgerCorrupt(f"the receipt charges a draw of query {record.query_id[:12]} that was never accepted")
        if self.masked_under(record.query_id, record.draw) not in (None, record.masks):
            raise LedgerCorrupt(f"a draw of query {record.query_id[:12]} was asked of this site under another roster")
