"""Tracks a site's sealed sums from its rows: confirmed peer keys, mask keys, and codes sent under masks.

Part of a site's totals (:mod:`common.ledger.site_state`). A draw is one attempt at a sealed sum. Refuses a peer that is
the site itself or has another peer's key, a second message under the same masks, and a message under another roster
than the one that the server's receipt charges.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from common.errors import InvalidInput, ReceiptContradiction
from common.ledger.base_state import refuse_second
from common.ledger.charges import ReleaseRecord
from common.ledger.rows import Position, Row
from common.ledger.sealed_records import DisclosureRecord, MaskedRecord, MaskKeyRecord, PeerRecord

Draw = tuple[str, int]
"""A query's id and the number of one of its draws."""


class SealedRecords:
    """The part of a site's totals about sealed sums: confirmed peers, mask keys and masked codes.

    Rows are entered in order, each once. A row that breaks a rule changes nothing.

    Attributes:
        peers: Confirmed key by study and site.
        nonces: Nonce from which the mask key is derived, by batch and draw.
        disclosed: Mask keys that were disclosed to an auditor.
        masked: Position of the row of the masked code, by query and draw.
        draws: By query and draw, for each draw that any row mentions: whether this site accepted it after its ledger
            was last restored from an older copy.
    """

    def __init__(self) -> None:
        self.peers: dict[str, dict[str, str]] = {}
        self.nonces: dict[tuple[str, int], str] = {}
        self.disclosed: list[DisclosureRecord] = []
        self.masked: dict[Draw, Position] = {}
        self.draws: dict[Draw, bool] = {}
        self._masked_under, self._receipted_under = dict[Draw, str](), dict[Draw, str]()

    def check_peer(self, record: PeerRecord, *, own_name: str, own_keys: AbstractSet[str]) -> None:
        """Refuse a peer that cannot be confirmed or revoked.

        Args:
            record: The peer and its key; an empty key revokes the confirmation.
            own_name: Name of this site.
            own_keys: All keys that ever signed this site's ledger.

        Raises:
            InvalidInput: If the peer has this site's name or key, or a key confirmed under another name, or a peer is
                revoked that was never confirmed.
        """
        known = self.peers.get(record.study_id, {})
        if not record.key and record.site not in known:
            raise InvalidInput("peer", value=record.site, limit=f"a confirmed peer: {', '.join(known) or 'none'}")
        if record.site == own_name or record.key in own_keys:
            raise InvalidInput("peer", value=record.site, limit="a site other than this one, with its own key")
        named = next((site for site, key in known.items() if key == record.key and site != record.site), None)
        if named is not None and record.key:
            raise InvalidInput(
                f"key of peer {record.site}",
                value=record.key[:16],
                limit=f"a key different from that of {named}, which was confirmed before",
                remedy="call both hospitals first, then the consortium: one key for two sites counts one site twice",
            )

    def enter_peer(self, record: PeerRecord) -> None:
        """Enter a confirmed peer key, which replaces an earlier one, or a revocation.

        Args:
            record: The peer and its key; empty to revoke.
        """
        known = self.peers.setdefault(record.study_id, {})
        known.pop(record.site, None)
        if record.key:
            known[record.site] = record.key

    def enter_key(self, record: MaskKeyRecord | DisclosureRecord) -> None:
        """Enter the mask key for one draw (attempt) of a batch, or the disclosure of a mask key to an auditor. A key
        may be disclosed several times.

        Args:
            record: The row.

        Raises:
            InvalidInput: If the draw has a mask key already.
        """
        if isinstance(record, DisclosureRecord):
            self.disclosed.append(record)
            return
        refuse_second((record.batch_id, record.draw), self.nonces, "mask key of draw")
        self.nonces[record.batch_id, record.draw] = record.nonce

    def is_disclosed(self, batch: str, draw: int) -> bool:
        """Return whether the mask key of one draw (attempt) of a batch was disclosed to an auditor.

        Args:
            batch: The batch.
            draw: Number of the draw.

        Returns:
            True if somebody besides this site has the key.
        """
        return any((one.batch_id, one.draw) == (batch, draw) for one in self.disclosed)

    def enter_restore(self) -> None:
        """Forget confirmed peers and mask keys, and allow no code in a draw that was accepted before the restore."""
        self.peers.clear()
        self.nonces.clear()
        self.draws = dict.fromkeys(self.draws, False)

    def enter_masked(self, row: Row, record: MaskedRecord) -> None:
        """Enter a code that was masked for one draw (attempt at a sum).

        A query has at most one masked code for each draw, because the same masks must never hide two messages.

        Args:
            row: The ledger row that stores the masked code.
            record: The row's content.

        Raises:
            InvalidInput: If the query already has a masked code for this draw, if this draw's mask key was disclosed to
                an auditor, or if a receipt shows that the server charged this draw for another roster.
        """
        if record.batch is not None and self.is_disclosed(record.batch, record.draw):
            raise InvalidInput("mask key of a masked code", limit="a key that was never disclosed")
        draw = record.query_id, record.draw
        refuse_second(draw, self.masked, "masked code of draw")
        if self._receipted_under.get(draw, record.masks) != record.masks:
            raise InvalidInput("roster of a masked code", limit="the roster that the server's receipt charges")
        self.masked[draw] = Position(row.seq, row.hash)
        self._masked_under[draw] = record.masks

    def enter_receipted(self, query_id: str, draw: int, masks: str) -> None:
        """Record the roster for which the server charged a draw (an attempt at a sealed sum), as a receipt shows.

        Args:
            query_id: The query's id.
            draw: Number of the draw.
            masks: One id for the roster and its sites' mask keys together.
        """
        self._receipted_under[query_id, draw] = masks

    def is_receipted(self, query_id: str, draw: int) -> bool:
        """Return whether a receipt shows that the server charged a draw (an attempt at a sealed sum).

        Args:
            query_id: The query's id.
            draw: Number of the draw.

        Returns:
            True if one does.
        """
        return (query_id, draw) in self._receipted_under

    def masked_under(self, query_id: str, draw: int) -> str | None:
        """Return the id of the roster for which this site masked a query's code in a draw (an attempt at the sum).

        Args:
            query_id: The query's id.
            draw: Number of the draw.

        Returns:
            The id, which also covers the mask keys of the roster's sites; None if the code was not masked.
        """
        return self._masked_under.get((query_id, draw))

    def check_draw(self, record: ReleaseRecord, *, accepted: int | None) -> None:
        """Check a charged draw (attempt at a sealed sum) in a receipt against this site's rows.

        The draw's number is at most that of the newest draw that this site accepted for the query. If this site masked
        its code for this draw, the draw is charged for the same roster as the code was masked for.

        Args:
            record: The charged release.
            accepted: Number of the newest accepted draw; None if it is unknown.

        Raises:
            ReceiptContradiction: If the charge contradicts this site's rows.
        """
        if record.draw is None:
            return
        if record.draw > (accepted or record.draw):
            raise ReceiptContradiction(
                f"the receipt charges draw {record.draw} of query {record.query_id[:12]}, but this site accepted only "
                f"draws up to {accepted}"
            )
        if self.masked_under(record.query_id, record.draw) not in (None, record.masks):
            raise ReceiptContradiction(
                f"the receipt charges draw {record.draw} of query {record.query_id[:12]} under a roster other than the "
                "one for which this site masked its code"
            )
