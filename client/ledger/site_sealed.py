"""Records what a site's staff decide about sealed sums: whose keys they compared, and whose mask keys they disclose.

`consilium site peers` records the other hospitals whose keys a person here has compared with them; the worker reads
them before a sealed sum. It refuses keys for a study not consented to, this site's own name or key, and one key for two
sites.

`consilium site disclose` hands the mask key of one draw to an auditor, after recording the disclosure and its cost. A
*draw* is one attempt at a sealed sum. The recorded cost is the additional μ² that the pool would have spent if the
auditor passed the key on. It refuses a draw in which this site sent nothing, a draw whose batch an earlier version of
the program did not record, and a draw after which a patient was withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from client.ledger.site_file import SiteFile
from common.canonical import check_hash
from common.errors import InvalidInput, Refused
from common.ledger.records import parse_body
from common.ledger.rows import Row
from common.ledger.sealed_records import DisclosureRecord, MaskedRecord, PeerRecord
from common.masking import DrawId, mask_private_key
from common.peers import Peer
from common.privacy.accounting import Guarantee, guarantee

LEAST_PREFIX = 12


@dataclass(frozen=True, slots=True)
class DisclosedDraw:
    """A draw and the privacy cost of disclosing its mask key.

    Attributes:
        roster: Id of the draw's roster, which is its list of hospitals.
        draw: Study, server ledger, batch and number of the draw.
        queries: Number of queries masked with the draw's key.
        mu_squared: Increase of the pool's Σμ² if the auditor passed the key on.
        if_told: The pool's ε and δ after that increase, by the accountant in the pool's caps.
    """

    roster: str
    draw: DrawId
    queries: int
    mu_squared: Fraction
    if_told: Guarantee


class KeepsSealed(SiteFile):
    """The part of a site's ledger about sealed sums: whose keys were confirmed, and which mask keys were disclosed."""

    def confirm_peer(self, study_id: str, peer: Peer) -> None:
        """Record that a person compared a peer's key with that hospital, for one study.

        A new key replaces the site's earlier one. No row is added if the key is already confirmed.

        Args:
            study_id: Id of the study.
            peer: The peer's site and key.

        Raises:
            InvalidInput: For a study not consented to, for this site's own name or key, and for a key that is confirmed
                for another site of the study.
        """
        self._note_peer(PeerRecord(study_id, peer.site, peer.key))

    def distrust_peer(self, study_id: str, site: str) -> None:
        """Withdraw a confirmation: this site joins no sealed sum with that peer until its key is confirmed again.

        Args:
            study_id: Id of the study.
            site: Name of the peer's site.
        """
        self._note_peer(PeerRecord(study_id, site, key=""))

    def peers(self, study_id: str) -> dict[str, str]:
        """Return the confirmed keys of a study, including those that other processes recorded meanwhile.

        Args:
            study_id: Id of the study.

        Returns:
            The key in hex by site name.
        """
        return dict(self.books.sealed.peers.get(study_id, {}))

    def disclosure_cost(self, named: str) -> DisclosedDraw:
        """Compute the privacy cost of disclosing a draw's mask key to an auditor; record nothing.

        With the key, the auditor can compute the sum of this site's code and its own noise share, for each query. This
        costs μ² = (Δ/s)² in addition to the charge of the sum, where s is the share's standard deviation and Δ is how
        far one unit of privacy can move the code. Every query that was masked with the draw's key counts, also if it
        was masked for another roster.

        Args:
            named: Id of the draw's roster (its list of hospitals), or at least its first twelve digits.

        Returns:
            The draw and its cost.

        Raises:
            InvalidInput: If ``named`` does not identify exactly one draw in which this site sent masked codes.
            Refused: ``old-draw`` if an earlier version of this program made the draw; ``withdrawn`` if a patient was
                withdrawn since.
        """
        self._catch_up()
        masked = list(self._masked_rows())
        found = [record for _, record in masked if record.masks.startswith(named)]
        if len(named) < LEAST_PREFIX or set(named) - set("0123456789abcdef") or len({one.masks for one in found}) != 1:
            known = ", ".join(dict.fromkeys(record.masks[:16] for _, record in masked[-8:])) or "none"
            raise InvalidInput(
                "draw (one attempt at a sealed sum)",
                value=named[:80],
                limit=f"the first 12 or more digits of the id of a draw in which this site sent masked codes: {known}",
                remedy="ask the consortium for the id of the disputed draw",
            )
        batch, number, masks = found[0].batch, found[0].draw, found[0].masks
        if batch is None or (batch, number) not in self._books.sealed.nonces:
            raise Refused(
                "old-draw",
                f"draw {masks[:16]} (an attempt at a sealed sum) was made by an earlier version, which did not record "
                "its mask key; to fix: choose a later draw",
            )
        mine = [(row, one) for row, one in masked if one.draw == number and one.batch in (None, batch)]
        if min(row.seq for row, _ in mine) < self._books.teachers.last_withdrawal:
            raise Refused(
                "withdrawn",
                f"a patient was withdrawn after this site masked its codes for draw {masks[:16]} (an attempt at a "
                "sealed sum); disclosing it would disclose that patient's contribution; to fix: choose a draw after "
                "the withdrawal",
            )
        reservation = self._books.reservations[found[0].query_id]
        grown = sum((self._cost_of_disclosure(record) for _, record in mine), start=Fraction(0))
        declared = self._books.declared.declaration
        told = guarantee(
            self._books.spent().mu_squared + grown, declared.budget, declared.protection, declared.accountant
        )
        draw = DrawId(reservation.study_id, reservation.ledger, batch, number)
        return DisclosedDraw(masks, draw, len(mine), grown, told)

    def disclose(self, named: str, *, auditor: str) -> tuple[DisclosedDraw, X25519PrivateKey]:
        """Record that a draw's mask key goes to an auditor, and return the key.

        # sensitive: together with the site's masked code, the key reveals the code plus the noise share

        Args:
            named: Id of the draw's roster (its list of hospitals), or at least its first twelve digits.
            auditor: The auditor's sealing key in hex.

        Returns:
            The draw with its cost, and the private mask key.

        Raises:
            InvalidInput: If ``named`` does not identify exactly one draw, or ``auditor`` is no key.
            Refused: ``old-draw`` or ``withdrawn``, for the reasons in :meth:`disclosure_cost`.
        """
        check_hash(auditor)
        shown = self.disclosure_cost(named)
        batch, number = shown.draw.batch, shown.draw.number
        with self._writing():
            record = DisclosureRecord(
                shown.draw.study, batch, number, shown.roster, auditor, shown.queries, shown.mu_squared
            )
            if record not in self._books.sealed.disclosed:
                self._append(record)
            nonce = self._books.sealed.nonces[batch, number]
        return shown, mask_private_key(self._chain.signing_key.private_bytes_raw(), shown.draw, nonce=nonce)

    def _masked_rows(self) -> Iterator[tuple[Row, MaskedRecord]]:
        for row in self._chain.rows_of("masked"):
            yield row, MaskedRecord.from_json(parse_body(row.body))

    def _cost_of_disclosure(self, record: MaskedRecord) -> Fraction:
        """Return the μ² of one query if only this site's noise share hides its code.

        The query costs this if the auditor passes the mask key on.
        """
        mechanism = replace(
            self._books.reservations[record.query_id].mechanism, noise_std=record.share_std, colluders=None
        )
        return mechanism.mu_squared(self._books.declared.declaration.protection)

    def _note_peer(self, record: PeerRecord) -> None:
        with self._writing():
            self._books.check_peer(record)
            before = self._books.sealed.peers.get(record.study_id, {}).get(record.site)
            if before != record.key:
                self._append(record)
