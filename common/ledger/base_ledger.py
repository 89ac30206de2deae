"""An open ledger: a chain and the books that its rows fill. What the server's and a site's ledger have in common.

Opening replays every row. Refuses a file whose rows break the chain or a rule, whose newest row no head signed by the
ledger's own key covers, and a signing key that is not the ledger's.
"""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from common.document import Document
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.base_state import SigningKey
from common.ledger.chain import Chain
from common.ledger.records import kind_of
from common.ledger.rollback_guard import KeptStanding, kept_standing, standing_path
from common.ledger.rows import START, Position, Row, SignedHead
from common.ledger.sqlite_file import ledger_error


class FilledByRows(Protocol):
    """Totals and rules that rows are entered into, in order."""

    key: SigningKey
    row_count: int

    def enter(self, row: Row) -> object: ...


B = TypeVar("B", bound=FilledByRows)


class OpenLedger(ABC, Generic[B]):
    """Base of both ledgers. A context manager, closed by ``close``; it owns the chain from the first moment."""

    STANDING: ClassVar[type[KeptStanding]]

    def __init__(self, chain: Chain, books: B) -> None:
        self._chain, self._books = chain, books
        try:
            with chain.snapshot():
                self._continue()
                self._catch_up()
                chain.ledger_id = self._books.key.ledger_id
                self._check_head()
            if chain.public_key not in (None, self._books.key.public_key):
                raise InvalidInput(
                    "signing key",
                    value=chain.public_key,
                    limit=f"the ledger's key, {self._books.key.public_key}",
                    remedy="use the key file that belongs to this ledger, or the one it was rotated to",
                )
        except sqlite3.Error as error:
            chain.close()
            raise ledger_error(error, "the ledger file cannot be read") from error
        except BaseException:
            chain.close()
            raise

    def close(self) -> None:
        """Close the file; committed rows are already durable."""
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def head(self) -> SignedHead:
        """The newest signed head; whoever keeps it outside this machine will notice a cut or a rewrite."""
        self._catch_up()
        return self._chain.head()

    def sign(self, statement: bytes) -> bytes:
        """An Ed25519 signature by the ledger's key: what its owner says. Statements name their own kind first."""
        return self._chain.signing_key.sign(statement)

    def rows(self) -> Iterator[Row]:
        """Every row as stored, from the first."""
        return self._chain.all_rows()

    @property
    def row_count(self) -> int:
        self._catch_up()
        return self._books.row_count

    @property
    def ledger_id(self) -> str:
        """The random name this ledger got when it was made; every signature covers it."""
        return self._books.key.ledger_id

    @property
    def public_key(self) -> str:
        """The key that signs heads now, in hex."""
        return self._books.key.public_key

    def contains(self, position: Position) -> bool:
        """Whether this very row is in the ledger: if somebody holds a signed head that is not, the ledger was rolled
        back or forked. The place before the first row is in every ledger."""
        self._catch_up()
        if position == START:
            return True
        found = self._chain.rows_between(position.seq - 1, position.seq)
        return bool(found) and found[0].hash == position.hash

    def _older_copy(self, *, this: str, beside: str) -> str | None:
        """What the standing kept ``beside`` the file shows against ``this`` file; None if nothing."""
        path = kept_standing(self._chain.path)
        if path is None:
            return None
        return self.STANDING.load(path).against(
            ledger_id=self.ledger_id, rows=self.row_count, contains=self.contains, this=this, beside=beside
        )

    def _continue(self) -> None:
        """Called before the first row is read: where the rows before some row need no replaying."""

    @abstractmethod
    def _standing(self) -> KeptStanding:
        """The standing as it is now, in the writer's place."""

    def _keep_standing(self) -> None:
        with self._chain.transaction():  # the writer's place, so that no earlier standing replaces a later one
            self._catch_up()
            self._standing().save(standing_path(self._chain.path))

    def _append(self, record: Document, *, payload: tuple[str, bytes] | None = None) -> None:
        """Write a row and take it in as it was written."""
        kind = kind_of(self.STANDING.ROLE, record)
        self._books.enter(self._chain.append(kind, record.to_json(), payload=payload))

    def _catch_up(self) -> None:
        for row in self._chain.new_rows():
            self._books.enter(row)

    def _check_head(self) -> None:
        head, last = self._chain.head(), self._chain.last
        if last is None or (head.seq, head.hash) != (last.seq, last.hash):
            raise LedgerCorrupt("the newest row is not covered by a signed head", row=head.seq)
        if head.public_key != self._books.key.at(head.seq) or not head.is_genuine():
            raise LedgerCorrupt("the newest head's signature is not by the ledger's key", row=head.seq)
