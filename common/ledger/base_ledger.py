"""An open ledger: a chain and the books that its rows fill. What the server's and a site's ledger have in common.

Opening replays every row. Refuses a file whose rows break the chain or a rule, whose newest row no head signed by the
ledger's own key covers, and a signing key that is not the ledger's.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from typing import Generic, Protocol, Self, TypeVar

from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.chain import Chain, Row, SignedHead, ledger_error
from common.ledger.server_state import SigningKey


class FilledByRows(Protocol):
    """Totals and rules that rows are entered into, in order."""

    key: SigningKey
    row_count: int

    def enter(self, row: Row) -> object: ...


B = TypeVar("B", bound=FilledByRows)


class OpenLedger(Generic[B]):
    """Base of both ledgers. A context manager, closed by ``close``; it owns the chain from the first moment."""

    def __init__(self, chain: Chain, books: B) -> None:
        self._chain, self._books = chain, books
        try:
            with chain.snapshot():
                self._catch_up()
                chain.ledger_id = books.key.ledger_id
                self._check_head()
            if chain.public_key not in (None, books.key.public_key):
                raise InvalidInput(
                    "signing key",
                    value=chain.public_key,
                    limit=f"the ledger's key, {books.key.public_key}",
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

    def _catch_up(self) -> None:
        for row in self._chain.new_rows():
            self._books.enter(row)

    def _check_head(self) -> None:
        head, last = self._chain.head(), self._chain.last
        if last is None or (head.seq, head.hash) != (last.seq, last.hash):
            raise LedgerCorrupt("the newest row is not covered by a signed head", row=head.seq)
        if head.public_key != self._books.key.at(head.seq) or not head.is_genuine():
            raise LedgerCorrupt("the newest head's signature is not by the ledger's key", row=head.seq)
