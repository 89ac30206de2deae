"""A draw's mask key on its way to an auditor: on record before it leaves, with what it would cost if the auditor told.

Refuses a draw this site sent no words in, one masked before its batch was recorded, and one with a code that a patient
was withdrawn from since.
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
from common.ledger.sealed_records import DisclosureRecord, MaskedRecord
from common.masking import DrawId, mask_private_key
from common.privacy.accounting import Guarantee, guarantee

LEAST_PREFIX = 12


@dataclass(frozen=True, slots=True)
class DisclosedDraw:
    """What disclosing a draw would show.

    ``roster`` is its id, ``queries`` how many queries were masked with its key, ``mu_squared`` by how much the pool's
    Σμ² would grow if the auditor told; ``if_told`` is the pool's guarantee then, by its own accountant.
    """

    roster: str
    draw: DrawId
    queries: int
    mu_squared: Fraction
    if_told: Guarantee


class KeepsDisclosures(SiteFile):
    """The part of a site's ledger that knows what was disclosed of sealed sums, and to whom."""

    def disclosures(self) -> tuple[DisclosureRecord, ...]:
        """Every disclosure on record, in order."""
        self._catch_up()
        return tuple(self._books.sealed.disclosed)

    def look_at_draw(self, named: str) -> DisclosedDraw:
        """What disclosing a draw would show, by its roster's id or at least the first twelve digits of it.

        Code and share of the noise of each query are N(q, s²·I) to the auditor: μ² = (Δ/s)² each, beside what the sum
        was charged. Counted over all queries masked with this draw's key, whatever their roster.
        """
        self._catch_up()
        masked = list(self._masked_rows())
        found = [record for _, record in masked if record.masks.startswith(named)]
        if len(named) < LEAST_PREFIX or set(named) - set("0123456789abcdef") or len({one.masks for one in found}) != 1:
            known = ", ".join(dict.fromkeys(record.masks[:16] for _, record in masked[-8:])) or "none"
            raise InvalidInput(
                "draw",
                value=named[:80],
                limit=f"the first 12 digits, or more, of a draw in which this site sent masked codes: {known}",
            )
        batch, number, masks = found[0].batch, found[0].draw, found[0].masks
        if batch is None or (batch, number) not in self._books.sealed.nonces:
            raise Refused(
                "old-draw", f"draw {masks[:16]} was made by an earlier version, which did not record its mask key"
            )
        mine = [(row, one) for row, one in masked if one.draw == number and one.batch in (None, batch)]
        if min(row.seq for row, _ in mine) < self._books.teachers.last_withdrawal:
            raise Refused(
                "withdrawn",
                f"a patient was withdrawn after draw {masks[:16]} was masked; disclosing it would disclose "
                "that patient's part",
            )
        reservation = self._books.reservations[found[0].query_id]
        grown = sum((self._told(record) for _, record in mine), start=Fraction(0))
        declared = self._books.declared.declaration
        told = guarantee(
            self._books.spent().mu_squared + grown, declared.budget, declared.protection, declared.accountant
        )
        draw = DrawId(reservation.study_id, reservation.ledger, batch, number)
        return DisclosedDraw(masks, draw, len(mine), grown, told)

    def disclose(self, named: str, *, auditor: str) -> tuple[DisclosedDraw, X25519PrivateKey]:
        """Put on record that a draw's mask key goes to the auditor with this sealing key (hex), and return the key.

        # the key is sensitive: with the site's words it opens code and noise share
        """
        check_hash(auditor)
        shown = self.look_at_draw(named)
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

    def _told(self, record: MaskedRecord) -> Fraction:
        """μ² of one query's code behind this site's own share of the noise alone, under the pool's protection."""
        mechanism = replace(
            self._books.reservations[record.query_id].mechanism, noise_std=record.share_std, colluders=None
        )
        return mechanism.mu_squared(self._books.declared.declaration.protection)
