"""An open ledger: a chain and the books that its rows fill. What the server's and a site's ledger have in common.

Opening replays every row. Refuses a file whose rows break the chain or a rule, whose newest row no head signed by the
ledger's own key covers, and a signing key that is not the ledger's. A process that has it open to write notices rows
that anybody changes meanwhile, through SQLite or past it, before it charges.
"""

from __future__ import annotations

import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Generic, Protocol, Self, TypeVar

from common.document import Document
from common.errors import InvalidInput, LedgerCorrupt
from common.ledger.base_state import SigningKey
from common.ledger.chain import Chain
from common.ledger.records import kind_of
from common.ledger.rollback_guard import KeptStanding, kept_standing, lies_with_its_key, standing_path
from common.ledger.rows import START, Position, Row, SignedHead
from common.ledger.sqlite_file import ledger_error

QUICK_S, LOOK_SHARE = 0.02, 30
"""Looking at all old rows takes a few microseconds each. If it took longer than the first, which is some thousands of
rows, it is done again only after so many times as long: of a hundred thousand rows, a second in thirty at most.
"""


class FilledByRows(Protocol):
    """Totals and rules that rows are entered into, in order."""

    key: SigningKey
    row_count: int
    kept: dict[Position, Document]
    has_standing: bool

    def enter(self, row: Row) -> object: ...


B = TypeVar("B", bound=FilledByRows)


class OpenLedger(ABC, Generic[B]):
    """Base of both ledgers. A context manager, closed by ``close``; it owns the chain from the first moment."""

    STANDING: ClassVar[type[KeptStanding]]

    def __init__(self, chain: Chain, books: B) -> None:
        self._chain, self._books = chain, books
        self._restoring, self._kept_at = False, 0
        self._touched, self._look_from = False, 0.0
        try:
            with chain.snapshot():
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

    def row_hashes(self, *, kinds: tuple[str, ...] = ()) -> list[bytes]:
        """The hash of every row of these kinds, or of all, 32 bytes each, from the first."""
        self._catch_up()
        return self._chain.row_hashes(until=self._books.row_count, kinds=kinds)

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

    def covers(self, position: Position) -> bool:
        """Whether all that was charged by this row is charged here: it is in the ledger, or was lost with an older copy
        and charged by the standing of that very row."""
        return self.contains(position) or position in self._books.kept

    def _older_copy(self, *, this: str, beside: str) -> str | None:
        """What the standing kept ``beside`` the file shows against ``this`` file; None if nothing.

        A ledger that had a standing and has none is a problem too: its newest rows may be missing. All have one from
        their first row on; those of earlier versions have it from their first charge on. A copy that is only read, with
        no signing key where one lies beside a ledger, has none by its nature.
        """
        path = kept_standing(self._chain.path)
        if path is None:
            in_use = not self._chain.read_only or lies_with_its_key(self._chain.path)
            if in_use and ((self._books.has_standing and self.row_count > 1) or self._has_charged()):
                return f"the standing of {this} is missing, so that nothing tells whether {this} is an older copy"
            return None
        return self.STANDING.load(path).against(
            ledger_id=self.ledger_id, rows=self.row_count, covers=self.covers, this=this, beside=beside
        )

    def _fork(self, standing: KeptStanding) -> Position:
        """The newest row that a standing names and that is covered here; START, so that all of the standing is charged,
        where it names none. An earlier row than the last in common makes the charge larger, never smaller."""
        return next((position for position in standing.positions() if self.covers(position)), START)

    @abstractmethod
    def _has_charged(self) -> bool:
        """Whether any row charged a pool, a study or a training."""

    @abstractmethod
    def _standing(self) -> KeptStanding:
        """The standing as it is now, in the writer's place."""

    def _keep_standing(self) -> None:
        with self._chain.unchanging():  # so that no earlier standing replaces a later one
            self._catch_up()
            self._standing().save(standing_path(self._chain.path))
            self._kept_at = self._books.row_count

    def _make_good_standing(self) -> None:
        """Write a standing that a crash, or a version before there were any, left out."""
        path = kept_standing(self._chain.path)
        last = self._chain.last
        known = None if path is None else self.STANDING.load(path).position
        if last is None or known != Position(last.seq, last.hash):
            self._keep_standing()
        self._kept_at = self._books.row_count

    def _append(self, record: Document, *, payload: tuple[str, bytes] | None = None) -> None:
        """Write a row and take it in as it was written."""
        kind = kind_of(self.STANDING.ROLE, record)
        self._books.enter(self._chain.append(kind, record.to_json(), payload=payload))

    def _catch_up(self) -> None:
        for row in self._chain.new_rows():
            self._books.enter(row)
        self._look_back()

    def _look_back(self) -> None:
        """Once the file has changed, see that no row that was read before did: others may append only.

        For whoever writes. All rows are hashed again: see :data:`LOOK_SHARE`.
        """
        if self._chain.read_only or self._chain.has_uncommitted:
            return
        self._touched |= self._chain.changed_by_others()
        if self._touched and (begun := time.monotonic()) >= self._look_from:
            self._chain.check_rows()
            took = (ended := time.monotonic()) - begun
            self._touched, self._look_from = False, ended + (LOOK_SHARE * took if took > QUICK_S else 0.0)

    def _check_head(self) -> None:
        head, last = self._chain.head(), self._chain.last
        if last is None or (head.seq, head.hash) != (last.seq, last.hash):
            raise LedgerCorrupt("the newest row is not covered by a signed head", row=head.seq)
        if head.public_key != self._books.key.at(head.seq) or not head.is_genuine():
            raise LedgerCorrupt("the newest head's signature is not by the ledger's key", row=head.seq)
