"""Opens a ledger: combines the file (a chain of rows) with the totals that its rows add up to.

Base of the server's and a site's ledger. Opening replays every row, in this order:

1. Each row is checked against the chain and against the rules, and entered into the totals.
2. The newest row must be covered by a signed head: a signature of that row's hash by the ledger's own key.
3. The signing key, if the caller gives one, must be the ledger's current key.

Refuses a ledger that fails one of these checks. A process that has a ledger open for writing checks again, before it
charges, that no earlier row has changed in the meantime, either through SQLite or by editing the file.
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
from common.ledger.rollback_guard import KeptStanding, kept_standing, lies_with_its_key, place_elsewhere
from common.ledger.rows import START, Position, Row, SignedHead
from common.ledger.sqlite_file import ledger_error

QUICK_S, LOOK_SHARE = 0.02, 30
"""Limits on how often old rows are checked again. A check takes a few microseconds per row. If a check took longer than
``QUICK_S`` seconds, the next check waits ``LOOK_SHARE`` times as long as that check took.
"""


class FilledByRows(Protocol):
    """Interface of the object that computes a ledger's totals. It receives every row of the ledger, in order.

    Attributes:
        key: The public keys that have signed the ledger.
        row_count: Number of rows received.
        kept: The records that charge lost rows, by the positions of the lost rows that they name.
        has_standing: True if a standing file was kept beside the ledger from its first row on.
    """

    key: SigningKey
    row_count: int
    kept: dict[Position, Document]
    has_standing: bool

    def enter(self, row: Row) -> object:
        """Enter the next row into the totals.

        Args:
            row: The row.

        Returns:
            Anything; the caller ignores it.

        Raises:
            LedgerCorrupt: If the row breaks a rule.
        """
        ...


B = TypeVar("B", bound=FilledByRows)


class OpenLedger(ABC, Generic[B]):
    """Base class of the server's and a site's ledger. It holds the open file and the totals of the file's rows. As a
    context manager it closes the file on exit.

    Args:
        chain: The open file, which this object closes when it is closed.
        books: Totals and rules of an empty ledger. Opening enters every row of the file into them.

    Raises:
        InvalidInput: If the file was opened with a signing key that is not the ledger's current key.
        LedgerCorrupt: If a row breaks the chain or a rule, or no head with a valid signature covers the newest row.
    """

    STANDING: ClassVar[type[KeptStanding]]

    def __init__(self, chain: Chain, books: B) -> None:
        self._chain, self._books = chain, books
        self._restoring, self._kept_at = False, 0
        self._touched, self._look_from = False, 0.0
        self._unsigned = False  # True while the head over rows of another process has not been checked
        try:
            with chain.snapshot():
                self._enter_new_rows()
                self._check_head()
                self._look_back()
            self._unsigned = False
            if chain.public_key not in (None, self._books.key.public_key):
                raise InvalidInput(
                    "signing key",
                    value=chain.public_key,
                    limit=f"the ledger's key, {self._books.key.public_key}",
                    remedy="use the key file that belongs to this ledger. For a copy made before the server's key was "
                    "changed, run `consilium ledger recover` with the newest key file; the retired key files, "
                    f"ledger.key.retired-{self._books.key.public_key[:12]} among them, must be in the same folder",
                )
        except sqlite3.Error as error:
            chain.close()
            raise ledger_error(error, "the ledger file cannot be read", chain.path) from error
        except BaseException:
            chain.close()
            raise

    def close(self) -> None:
        """Close the file. Committed rows are durable already."""
        self._chain.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def head(self) -> SignedHead:
        """Return the newest signed head: the ledger's signature of the newest row's number and hash. Somebody who keeps
        a copy of the head on another machine can later detect that rows were cut off or rewritten.
        """
        self._catch_up()
        return self._chain.head()

    def sign(self, statement: bytes) -> bytes:
        """Sign a statement with the ledger's Ed25519 key, on behalf of the ledger's owner.

        Args:
            statement: Bytes that begin with the name of this kind of statement, so that the signature is valid for no
                other kind.

        Returns:
            The signature.

        Raises:
            InvalidInput: If the ledger is open for reading only.
        """
        return self._chain.signing_key.sign(statement)

    def rows(self) -> Iterator[Row]:
        """Return every row as stored, from the first."""
        return self._chain.all_rows()

    def row_hashes(self, *, kinds: tuple[str, ...] = ()) -> list[bytes]:
        """Return the hashes of rows, 32 bytes each, from the first.

        Args:
            kinds: Kinds of rows to include; empty for all.

        Returns:
            The hashes in order.
        """
        return self._chain.row_hashes(until=self.books.row_count, kinds=kinds)

    @property
    def row_count(self) -> int:
        """Number of rows."""
        return self.books.row_count

    @property
    def ledger_id(self) -> str:
        """The random id that the ledger got when it was created. Every signature covers it."""
        return self._books.key.ledger_id

    @property
    def public_key(self) -> str:
        """The public key, in hex, that now verifies the ledger's heads (signed hashes of the newest row)."""
        return self._books.key.public_key

    @property
    def public_keys(self) -> frozenset[str]:
        """Every public key, in hex, that verifies one of the ledger's heads, or will verify the next."""
        return frozenset(key for _, key in self._books.key.history)

    def contains(self, position: Position) -> bool:
        """Return whether a row with this number and this hash is in the ledger.

        A signed head whose row is not in the ledger proves that the ledger was rolled back or forked.

        Args:
            position: Number and hash of a row. The position before the first row is in every ledger.

        Returns:
            True if the row is there and has this hash.
        """
        self._catch_up()
        if position == START:
            return True
        found = self._chain.rows_between(position.seq - 1, position.seq)
        return bool(found) and found[0].hash == position.hash

    def covers(self, position: Position) -> bool:
        """Return whether this ledger has counted the charges of every row up to a given row.

        Args:
            position: Number and hash of the row.

        Returns:
            True if the row is in the ledger. Also True if the row was lost when an older copy was restored, and the
            charges up to it were entered afterwards from the standing file.
        """
        return self.contains(position) or position in self._books.kept

    def _older_copy(self, *, this: str, beside: str) -> str | None:
        """Return a message if this ledger file may be an older copy; else None.

        A standing file, kept beside the ledger, states the ledger's newest row. There is a message if this row is not
        in the ledger file, if another key signed the standing file, or if a standing file should exist and does not. A
        ledger has a standing file from its first row on; a ledger of an earlier version has one from its first charge
        on. A read-only copy without its signing key needs no standing file.

        Args:
            this: How the message names the ledger file.
            beside: How the message states where the standing file is.
        """
        path = kept_standing(self._chain.path)
        if path is None:
            in_use = not self._chain.read_only or lies_with_its_key(self._chain.path)
            if in_use and ((self._books.has_standing and self.row_count > 1) or self._has_charged()):
                return f"the standing file of {this} is missing, so it is unknown whether {this} is an older copy"
            return None
        standing = self.STANDING.load(path)
        found = standing.against(
            ledger_id=self.ledger_id, rows=self.row_count, covers=self.covers, this=this, beside=beside
        )
        if found is None and not self._is_by_own_key(standing):
            return (
                f"the standing file kept {beside} is signed by another key than this ledger's, so it is unknown "
                f"whether {this} is an older copy"
            )
        return found

    def _is_by_own_key(self, standing: KeptStanding) -> bool:
        """Return whether a key of this ledger signed a standing file's head.

        This copy cannot check the signer of rows that were lost and charged again, so it accepts every key for them.
        """
        position, key = standing.position, standing.head.public_key
        if self.contains(position):
            return key == self._books.key.at(position.seq)
        return key in self.public_keys or position in self._books.kept

    def check_signer(self, standing: KeptStanding, *, named: bool) -> None:
        """Refuse, in a recovery, a standing file of another ledger, or one that somebody else may have written.

        Anyone can sign a standing file with a key of their own. A key of this ledger must therefore have signed the
        file's head. If this ledger has had a standing file from its first row on and the file shows lost rows, the
        whole file must be signed too.

        The ledger's newest key may be unknown to an older copy. A file that shows lost rows is therefore also accepted
        if a person names it.

        Args:
            standing: The contents of the standing file.
            named: True if a person named the file in the command, and so vouches for it.

        Raises:
            InvalidInput: If the file is refused.
        """
        path = self._chain.path.with_suffix(".standing")
        if standing.head.ledger_id != self.ledger_id:
            raise InvalidInput(
                "ledger id in the standing file",
                value=standing.head.ledger_id,
                limit=f"the id of this ledger, {self.ledger_id}",
                remedy="give the standing file of this ledger"
                if named
                else f"replace {path} by the standing file of this ledger; if it is lost, delete {path}, and "
                "--charge-all counts all remaining budget as spent",
            )
        signed = standing.signature is not None or not self._books.has_standing or self.covers(standing.position)
        if self._is_by_own_key(standing) and signed:
            return
        if named and not self.covers(standing.position):
            return
        remedy = f"delete {path}, and --charge-all counts all remaining budget as spent"
        if not self.covers(standing.position):
            remedy = f"if you know that this ledger wrote the file, name it: --standing {path}; otherwise {remedy}"
        if self.STANDING.ROLE == "server" and standing.head.public_key not in self.public_keys:
            remedy = f"give the ledger's newest key with --key; if it is lost: {remedy}"
        raise InvalidInput(
            "standing file (the small file beside the ledger) that is not signed, or signed by another key",
            value=f"key {standing.head.public_key[:16]}",
            limit="a file that a key of this ledger signed",
            remedy=remedy,
        )

    def _fork(self, standing: KeptStanding) -> Position:
        """Return the newest row of a standing file up to which this ledger contains every charge.

        If there is none, return START, so that the recovery charges every row of the standing file again. The standing
        file names only some rows, so the ledger may in fact agree with it up to a later row. The recovery then charges
        too much, never too little.
        """
        return next((position for position in standing.positions() if self.covers(position)), START)

    @abstractmethod
    def _has_charged(self) -> bool:
        """Return whether any row charged a pool, a study or a training."""

    @abstractmethod
    def _standing(self) -> KeptStanding:
        """Return what the standing file must state now: the newest row and the totals. The caller holds the write
        lock.
        """

    def _keep_standing(self) -> None:
        with self._chain.unchanging():  # otherwise an earlier standing could replace a later one
            self._catch_up()
            self._standing().save(self._chain.path, key=self._chain.signing_key)
            self._kept_at = self._books.row_count

    def _make_good_standing(self) -> None:
        """Write the standing file if it is missing or outdated, which happens after a crash or after using a version of
        Consilium that wrote none.
        """
        path = kept_standing(self._chain.path)
        last = self._chain.last
        kept = None if path is None else self.STANDING.load(path)
        known = None if kept is None else (kept.position, kept.elsewhere)
        if last is None or known != (Position(last.seq, last.hash), place_elsewhere(self._chain.path)):
            self._keep_standing()
        self._kept_at = self._books.row_count

    def _append(self, record: Document, *, payload: tuple[str, bytes] | None = None) -> None:
        """Write a row and enter it into the totals. The totals are computed from the row's text, as a reader would."""
        kind = kind_of(self.STANDING.ROLE, record)
        self._books.enter(self._chain.append(kind, record.to_json(), payload=payload))

    @property
    def books(self) -> B:
        """The totals after all rows that are in the file now, including the rows of other processes."""
        self._catch_up()
        return self._books

    def _catch_up(self) -> None:
        """Enter the rows of other processes; raise LedgerCorrupt if the ledger's key did not sign the last one's head.

        Every later call raises it too. Otherwise this ledger's next head would cover a row that anybody appended.
        """
        self._enter_new_rows()
        if self._unsigned and self._chain.last is not None:
            self._check_signature(self._chain.last)
            self._unsigned = False
        self._look_back()

    def _enter_new_rows(self) -> None:
        for row in self._chain.new_rows():
            if row.kind == "key" and self._books.row_count:
                self._check_signature(row)
            self._books.enter(row)
            self._chain.ledger_id = self._books.key.ledger_id
            self._unsigned = True

    def _look_back(self) -> None:
        """Check that the rows read earlier are unchanged, if somebody else changed the file. Other processes may only
        append rows.

        Only a ledger that is open for writing is checked. A check hashes all rows again; :data:`LOOK_SHARE` limits how
        often.
        """
        if self._chain.read_only or self._chain.has_uncommitted:
            return
        self._touched |= self._chain.changed_by_others()
        if self._touched and (begun := time.monotonic()) >= self._look_from:
            self._chain.check_rows()
            took = (ended := time.monotonic()) - begun
            self._touched, self._look_from = False, ended + (LOOK_SHARE * took if took > QUICK_S else 0.0)

    def _check_head(self) -> None:
        """Check that a head by the ledger's key covers the newest row."""
        head, last = self._chain.head(), self._chain.last
        if last is None or (head.seq, head.hash) != (last.seq, last.hash):
            raise LedgerCorrupt("the newest row is not covered by a signed head", row=head.seq)
        self._check_signature(last)

    def _check_signature(self, row: Row) -> None:
        """Check that the key in force at a row signed the row's head.

        Each row that introduces a key is checked before it is entered, also while the ledger is open. Otherwise anybody
        could append a row that introduces a key, and then every other row.
        """
        signed = self._chain.head(row.seq)
        by_key = signed.public_key == self._books.key.at(row.seq) and signed.hash == row.hash
        if not by_key or not signed.is_genuine():
            raise LedgerCorrupt("the signature of this row's head is not by the ledger's key", row=row.seq)
