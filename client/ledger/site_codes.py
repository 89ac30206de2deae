"""Stores a site's codes, and its masked codes of a sealed sum, before any of them leaves the site.

It is part of :class:`client.ledger.site_ledger.SiteLedger`; the worker calls it between computing and sending. Each
query has one stored code, and in each *draw* (one attempt at a sealed sum) one masked code: integers modulo 2⁶⁴. A
retry sends the stored bytes. It refuses a second code for a query, a code beyond the clipping norm, and a second masked
code under the same masks.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from client.ledger.site_file import SiteFile
from common.canonical import check_hash, sha256_bytes
from common.errors import ASK_OPERATOR, InvalidInput, LedgerCorrupt, Refused
from common.ledger.charges import check_ledger_name
from common.ledger.records import CodeRecord, parse_body
from common.ledger.sealed_records import MaskedRecord, MaskKeyRecord
from common.masking import DrawId, MaskedRoster, mask_private_key
from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import within
from common.privacy.shares import share_std

KEYS_A_CHARGE = 4
"""Mask keys allowed for each charged release. One is not enough: a restarted server may offer accepted queries again in
another batch, and each batch needs a key of its own."""


class KeepsCodes(SiteFile):
    """The part of a site's ledger that stores the codes and masked codes which the site sends."""

    def store_code(
        self,
        query_id: str,
        code: NDArray[np.int64],
        *,
        outcome: str = "stored",
        teachers: str = "",
        computed_at: int | None = None,
    ) -> bool:
        """Store the code that answers an accepted query, before it leaves the site. # sensitive until noised

        Storing the same code again adds nothing.

        Args:
            query_id: Id of an accepted query.
            code: int64 array of shape [l] in grid steps of 2⁻¹⁶, of ℓ2 norm at most m·R for m voters of clipping norm
                R.
            outcome: How the code was obtained, in one word, such as ``zero-code``. It never leaves the site.
            teachers: Digest from :meth:`state_teachers` of the teachers that computed the code; empty if they are
                unknown.
            computed_at: Number of ledger rows when the computation began; None to skip the check for withdrawals.

        Returns:
            False, with nothing stored, if a patient was withdrawn after ``computed_at``: the code may contain that
            patient's vote. Otherwise True.

        Raises:
            Refused: ``not-accepted`` if the query was never accepted here.
            InvalidInput: If the code's type, shape or norm is not as ``code`` states, or if another code is stored for
                this query and no patient was withdrawn since.
        """
        check_hash(query_id)
        check_ledger_name(outcome, what="outcome")
        with self._writing():
            reservation = self._books.reservations.get(query_id)
            if reservation is None:
                raise Refused("not-accepted", f"query {query_id[:12]} was never accepted here; to fix: {ASK_OPERATOR}")
            mechanism = reservation.mechanism
            if type(code) is not np.ndarray or code.dtype != np.int64 or code.shape != (mechanism.dimension,):
                raise InvalidInput(
                    "code", value=type(code).__name__, limit=f"an int64 array of length {mechanism.dimension}"
                )
            if not within(code, bound_int=mechanism.site_radius_int):
                raise InvalidInput("norm of a code", limit=f"at most m·R = {mechanism.site_radius_int} grid steps")
            if computed_at is not None and self._books.teachers.last_withdrawal > computed_at:
                return False
            data = code.astype("<i8").tobytes()
            if self._books.teachers.code_is_current(query_id):
                if self._code_record(query_id).code_sha256 != sha256_bytes(data):
                    raise InvalidInput(
                        f"the code of query {query_id[:12]} differs from the stored one",
                        limit="the code that is already stored",
                    )
                return True
            record = CodeRecord(query_id, mechanism.dimension, outcome, sha256_bytes(data), teachers)
            self._append(record, payload=(query_id, data))
        return True

    def code(self, query_id: str) -> NDArray[np.int64] | None:
        """Return the stored code of a query. # sensitive until noised

        Args:
            query_id: Id of the query.

        Returns:
            A read-only int64 array of shape [l]; None if no code was stored since the last withdrawal of a patient.

        Raises:
            LedgerCorrupt: If the stored bytes are not those on record.
        """
        check_hash(query_id)
        if not self.books.teachers.code_is_current(query_id):
            return None
        seq, record = self._books.teachers.codes[query_id].seq, self._code_record(query_id)
        found = self._chain.payload(query_id)
        if found is None or found[0] != seq or sha256_bytes(found[1]) != record.code_sha256:
            raise LedgerCorrupt("the stored code differs from the one that the ledger recorded", row=seq)
        code = np.frombuffer(found[1], dtype="<i8").astype(np.int64)
        code.flags.writeable = False
        return code

    def _code_record(self, query_id: str) -> CodeRecord:
        return CodeRecord.from_json(parse_body(self._chain.row_at(self._books.teachers.codes[query_id]).body))

    # --- sealed sums

    def last_draw(self, queries: Sequence[QuerySpec], *, study_id: str) -> int | None:
        """Return the newest draw (attempt at a sealed sum) of any of these queries that this site has accepted for a
        study.

        Args:
            queries: The queries of a batch.
            study_id: Id of the study.

        Returns:
            The number of the draw; None if no draw was accepted.
        """
        known = map(self.books.reservations.get, (query.id for query in queries))
        draws = (one.draw for one in known if one is not None and one.study_id == study_id)
        return max((draw for draw in draws if draw is not None), default=None)

    def mask_key(self, draw: DrawId) -> X25519PrivateKey:
        """Return this site's mask key for one draw of a batch.

        The same draw always gives the same key, unless the ledger was lost in between; then the key is a new one.

        Args:
            draw: Study, batch and number of the draw.

        Returns:
            The private key. # sensitive

        Raises:
            Refused: ``old-draw`` if the draw's key was disclosed to an auditor, or if :data:`KEYS_A_CHARGE` keys for
                each charged release exist already. Without this limit a server could fill the site's disk without any
                charge: it could offer the same draw again and again, each time in a new batch.
        """
        of = draw.batch, draw.number
        with self._writing():
            self._refuse_disclosed(*of)
            if of not in self._books.sealed.nonces:
                if len(self._books.sealed.nonces) >= KEYS_A_CHARGE * self._books.spent().releases:
                    raise Refused(
                        "old-draw",
                        f"the server has offered one draw again in too many batches; to fix: {ASK_OPERATOR}",
                    )
                self._append(MaskKeyRecord(draw.study, *of, secrets.token_hex(32)))
            nonce = self._books.sealed.nonces[of]
        return mask_private_key(self._chain.signing_key.private_bytes_raw(), draw, nonce=nonce)

    def masked(
        self,
        queries: Sequence[QuerySpec],
        roster: MaskedRoster,
        *,
        make: Callable[[NDArray[np.int64], QuerySpec, Fraction], NDArray[np.uint64]],
    ) -> dict[str, NDArray[np.uint64]]:
        """Return the masked codes that this site sends in one draw, which is one attempt at a sealed sum.

        The first call computes and stores them; later calls for the same roster return the same. A masked code is the
        stored code of a query plus this site's share of the noise plus the draw's masks.

        Args:
            queries: The queries of the draw.
            roster: The hospitals of the draw.
            make: Computes the masked code (uint64 [l]) from a code, its query and the standard deviation of the noise
                share.

        Returns:
            The masked codes by query id.

        Raises:
            Refused: ``roster`` if the query was masked for another roster; ``no-code`` if it has no code; ``withdrawn``
                if a patient was withdrawn after the masked codes were made; ``old-draw`` if the mask key was disclosed.
                The site never sends two different messages under the same masks, because they would reveal the
                difference of the two noisy codes.
        """
        with self._writing():
            for query in queries:
                if (query.id, roster.draw) not in self._books.sealed.masked:
                    self._mask(query, roster, make)
        return {query.id: self._masked_codes(query.id, roster) for query in queries}

    def _refuse_disclosed(self, batch: str, draw: int) -> None:
        if self._books.sealed.is_disclosed(batch, draw):
            raise Refused(
                "old-draw",
                "the mask key of this draw was disclosed to an auditor, so this site does not use it again; to fix: "
                "the server begins a new draw with `consilium study resume`",
            )

    def _mask(
        self,
        query: QuerySpec,
        roster: MaskedRoster,
        make: Callable[[NDArray[np.int64], QuerySpec, Fraction], NDArray[np.uint64]],
    ) -> None:
        code, share = self.code(query.id), share_std(query.mechanism, sites=len(roster.members))
        self._refuse_disclosed(roster.batch, roster.draw)
        if code is None:
            raise Refused(
                "no-code",
                f"query {query.id[:12]} has no stored code, so there is nothing to mask; to fix: see the worker's log",
            )
        data = make(code, query, share).astype("<u8").tobytes()
        record = MaskedRecord(query.id, roster.draw, roster.id, share, sha256_bytes(data), roster.batch)
        self._append(record, payload=(f"{query.id}/{roster.draw}", data))

    def _masked_codes(self, query_id: str, roster: MaskedRoster) -> NDArray[np.uint64]:
        books = self._books.sealed
        found = self._chain.payload(f"{query_id}/{roster.draw}")
        if books.masked_under(query_id, roster.draw) != roster.id:
            raise Refused(
                "roster",
                f"query {query_id[:12]} was masked for another roster (list of hospitals); to fix: {ASK_OPERATOR}",
            )
        place = books.masked[query_id, roster.draw]
        if found is None or place.seq < self._books.teachers.last_withdrawal:
            raise Refused(
                "withdrawn",
                f"a patient was withdrawn since query {query_id[:12]} was masked; to fix: the server begins a "
                "new draw with `consilium study resume`",
            )
        row = self._chain.row_at(place)
        if sha256_bytes(found[1]) != MaskedRecord.from_json(parse_body(row.body)).words_sha256:
            raise LedgerCorrupt("the stored masked code differs from the one that the ledger recorded", row=row.seq)
        return np.frombuffer(found[1], dtype="<u8").astype(np.uint64)
