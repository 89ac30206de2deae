"""Replays the rows of the server's or a site's ledger: checks each row, and tracks the ledger's signing keys.

The classes that compute the server's totals and a site's totals are subclasses of :class:`RowState`. The same object
checks new rows before they are written and stored rows when they are replayed. A ledger with a row that breaks a rule
can therefore neither be opened nor verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cryptography.exceptions import InvalidSignature

from common.document import Document
from common.errors import InvalidInput, LedgerCorrupt, ReceiptContradiction
from common.ledger.keys import hex_bytes, signing_public_key
from common.ledger.records import GenesisRecord, KeyRecord, parse_record
from common.ledger.rows import Position, Row, possession_message
from common.ledger.sqlite_file import SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The public keys whose private keys have signed a ledger's heads (signed hashes of its newest row) so far.

    Attributes:
        ledger_id: Id of the ledger.
        history: For each key, the number of the row that introduced it and the public key in hex. The last key signs
            now.
    """

    ledger_id: str = ""
    history: tuple[tuple[int, str], ...] = ()

    @property
    def public_key(self) -> str:
        """The key that signs now, in hex; empty before the first row."""
        return self.history[-1][1] if self.history else ""

    @classmethod
    def first(cls, record: GenesisRecord, *, role: str) -> SigningKey:
        """Return the key that the first row of a ledger introduces.

        Args:
            record: The first row.
            role: ``server`` or ``site``.

        Returns:
            The key.

        Raises:
            InvalidInput: If the row begins another kind of ledger or a ledger of an unknown schema, or if the ledger's
                id does not have 32 characters.
        """
        if record.role != role or not 1 <= record.schema <= SCHEMA_VERSION or len(record.ledger_id) != 32:
            raise InvalidInput(
                "first row",
                value=record.role,
                limit=f"the first row of a {role} ledger, with a known schema and an id of 32 characters",
            )
        return cls(ledger_id=record.ledger_id, history=((1, record.public_key),))

    def changed(self, record: KeyRecord, *, role: str, seq: int, prev_hash: str) -> SigningKey:
        """Return these keys together with a new key that row ``seq`` introduces.

        Args:
            record: The row; it contains the new key's signature of its own introduction.
            role: ``server`` or ``site``.
            seq: Number of the row.
            prev_hash: Hash of the row before.

        Returns:
            These keys and the new one.

        Raises:
            InvalidInput: If the new key did not sign its introduction, or signed this ledger before.
        """
        message = possession_message(role, ledger_id=self.ledger_id, seq=seq - 1, row_hash=prev_hash)
        try:
            signing_public_key(record.public_key).verify(hex_bytes(record.proof), message)
        except (InvalidSignature, ValueError) as error:
            raise InvalidInput(
                "new key", limit="a key whose own signature in the row that introduces it is valid"
            ) from error
        if any(record.public_key == known for _, known in self.history):
            raise InvalidInput("new key", limit="a key that has not signed this ledger before")
        return SigningKey(ledger_id=self.ledger_id, history=(*self.history, (seq, record.public_key)))

    def at(self, seq: int) -> str:
        """Return the key that must have signed the ledger's head at a row. The row that introduces a new key is still
        signed by the previous key.

        Args:
            seq: Number of the row.

        Returns:
            The public key in hex.
        """
        return next(key for since, key in reversed(self.history) if since == 1 or seq > since)


class RowState:
    """Base class of the objects that compute a ledger's totals from its rows. Rows are entered in order, each once."""

    role = ""

    def __init__(self) -> None:
        self.key = SigningKey()
        self.row_count = 0
        self.kept: dict[Position, Document] = {}
        """For each lost row whose position is known, the record that charged it. Rows are lost if an older copy of the
        ledger is restored.
        """
        self.has_standing = False
        """True if a standing file was kept beside the ledger from the first row on."""

    def _take(self, row: Row, record: Document | None, enter: Callable[[Document], None]) -> Document:
        """Check one row and enter its record into the state.

        Genesis and key records are common to all ledgers and handled here. The caller's ``enter`` handles all other
        kinds. A writer passes the record it has just made; a reader passes None, and the row is parsed.

        Raises:
            LedgerCorrupt: If the row breaks a rule; the error has the row's number. An ``enter`` that raises must
                leave the state unchanged.
        """
        try:
            record = record or parse_record(self.role, row.kind, row.body)
            if (row.seq == 1) != isinstance(record, GenesisRecord):
                raise InvalidInput("first row", value=row.kind, limit="one genesis row, as row 1")
            if isinstance(record, GenesisRecord):
                self.key = SigningKey.first(record, role=self.role)
                self.has_standing = record.standing is not None
            elif isinstance(record, KeyRecord):
                self.key = self.key.changed(record, role=self.role, seq=row.seq, prev_hash=row.prev_hash)
            else:
                enter(record)
        except (InvalidInput, ReceiptContradiction) as error:
            raise LedgerCorrupt(str(error), row=row.seq) from error
        except KeyError as error:
            raise LedgerCorrupt(
                f"the row names {error.args[0]!r}, which no earlier row introduces", row=row.seq
            ) from error
        self.row_count = row.seq
        return record


def refuse_second(key: object, mapping: Mapping[Any, object], what: str) -> None:
    """Refuse a second ledger row with the same key, such as a second row for one study id.

    Args:
        key: The key of the new row, such as the study id.
        mapping: The keys that already have a row; the values are not used.
        what: Kind of the key for the error, such as "study".

    Raises:
        InvalidInput: If ``key`` is in ``mapping``.
    """
    if key in mapping:
        raise second_row_error(key, what)


def second_row_error(key: object, what: str) -> InvalidInput:
    """Return the error for a second ledger row with a key that may have only one row.

    Args:
        key: The key, such as a query's id.
        what: Kind of the key, such as "query".

    Returns:
        The error, for the caller to raise.
    """
    return InvalidInput(f"{what} {key}", limit="one row in the whole ledger")
