"""Stores a ledger's rows in an append-only SQLite file, as a hash chain with signed heads.

The server's and a site's ledger use it. It contains no privacy rules. A row is ``(seq, time_utc, kind, body, prev_hash,
hash)``, where ``prev_hash`` is the hash of the row before. Each transaction ends with a head: an Ed25519 signature over
the hash of its last row. A payload (a noisy answer at the server, a code at a site) is stored in its own table, in the
transaction of the row that names its SHA-256.

The chain proves that nothing was changed, dropped or inserted **before** the newest head that somebody knows. If the
newest rows were cut off together with their heads, the file is shorter but valid; only a later head that was kept
elsewhere reveals it.

Refuses a file of another format or an unknown schema version, a row that does not follow from the one before, and
appending without a key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.canonical import canonical_text
from common.clock import Clock
from common.errors import InvalidInput, LedgerCorrupt, StorageFailed
from common.ledger.keys import public_hex
from common.ledger.rows import (
    NO_HASH,
    ROLES,
    Position,
    Row,
    SignedHead,
    body_digest,
    check_link,
    check_own_hash,
    format_time,
    head_message,
    possession_message,
    row_hash,
)
from common.ledger.sqlite_file import (
    APPLICATION_ID,
    LOCKED_REMEDY,
    SCHEMA_VERSION,
    appearing,
    check_one_name,
    connect,
    ledger_error,
    migrate,
    schema_sql,
)

EXACT_MARKS = 256
"""Number of newest transactions whose last rows a standing file lists. It also lists the last rows of some older ones.
"""


class Chain:
    """An open ledger file. The caller's lock serialises threads; SQLite's write lock serialises processes.

    Args:
        connection: The open database.
        path: The file.
        role: ``server`` or ``site``.
        signing_key: Key that signs the last row of each new transaction; None to open for reading only.
        clock: Source of the rows' times.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: Path,
        role: str,
        signing_key: Ed25519PrivateKey | None,
        clock: Clock,
    ) -> None:
        self.path, self.role, self.clock = path, role, clock
        self.payload_table = ROLES[role]
        self._db = connection
        self._key = signing_key
        self.public_key = None if signing_key is None else public_hex(signing_key)
        self.ledger_id = ""
        self._last: Row | None = None
        self._files = (str(path), f"{path}-wal")
        self._seen = self._stamp()
        self._appended: list[Row] = []
        self._in_transaction = False
        self._time = ""

    # --- opening and closing

    @classmethod
    def create(
        cls, path: Path, *, role: str, genesis: dict[str, object], signing_key: Ed25519PrivateKey, clock: Clock
    ) -> Chain:
        """Create a ledger whose first row is ``genesis`` with the ledger's id and key.

        The file appears under its name only when it is complete and durable, so a crash leaves no partial ledger.

        Args:
            path: A new file.
            role: ``server`` or ``site``.
            genesis: Further facts for the first row.
            signing_key: The ledger's key.
            clock: Source of the rows' times.

        Returns:
            The open ledger.

        Raises:
            InvalidInput: If the path exists, or its folder does not.
        """
        if path.exists():
            raise InvalidInput(
                "ledger file exists already, and a ledger is never overwritten",
                value=str(path),
                remedy="use this ledger, or give another path for the new one",
            )
        if not path.parent.is_dir():
            raise InvalidInput("folder of the ledger", value=str(path.parent), limit="an existing folder")
        with appearing(path, what="ledger file") as draft:
            connection = connect(draft, read_only=False)
            chain = cls(connection, path=draft, role=role, signing_key=signing_key, clock=clock)
            try:
                connection.execute("BEGIN IMMEDIATE")
                for statement in schema_sql(role).values():
                    connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute("COMMIT")
                chain.ledger_id = secrets.token_hex(16)
                own = {"ledger_id": chain.ledger_id, "public_key": public_hex(signing_key), "role": role}
                with chain.transaction():
                    chain.append("genesis", {**genesis, **own, "schema": SCHEMA_VERSION})
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()
        return cls.open(path, role=role, signing_key=signing_key, clock=clock)

    @classmethod
    def open(cls, path: Path, *, role: str, signing_key: Ed25519PrivateKey | None, clock: Clock) -> Chain:
        """Open an existing ledger without checking its rows. The caller checks them while it replays them.

        Args:
            path: The file.
            role: ``server`` or ``site``.
            signing_key: Key that signs the last row of each new transaction; None to open for reading only.
            clock: Source of the rows' times.

        Returns:
            The open ledger.

        Raises:
            InvalidInput: If the file does not exist, has a second name (a hard link), is another kind of ledger or of
                an unknown schema.
            LedgerCorrupt: If the file is no ledger or is damaged.
        """
        check_one_name(path)
        connection = connect(path, read_only=signing_key is None)
        try:
            migrate(connection, role=role, path=path, read_only=signing_key is None)
        except BaseException:
            connection.close()
            raise
        return cls(connection, path=path, role=role, signing_key=signing_key, clock=clock)

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    # --- reading

    @property
    def last(self) -> Row | None:
        """The newest row that this object has read or appended; None if there is none yet."""
        return self._last

    @property
    def read_only(self) -> bool:
        """True if the ledger was opened without a key."""
        return self._key is None

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read a consistent state within the context, even if other processes commit meanwhile."""
        self._db.execute("BEGIN")
        with self._rolled_back():
            yield

    def new_rows(self) -> Iterator[Row]:
        """Return the rows appended since the last call by any process, each checked against the chain as it is read.

        Returns:
            An iterator. A row counts as read when the next one is requested.

        Raises:
            LedgerCorrupt: If the row last read is gone or changed, a number is missing, or a hash is wrong.
        """
        try:
            self._still_there()
            after = self._last.seq if self._last else 0
            cursor = self._db.execute(
                "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE seq > ? ORDER BY seq", (after,)
            )
            for values in cursor:
                row = Row(*values)
                check_link(self.role, row, self._last)
                yield row
                self._last = row  # after the yield, so that a row that the caller refused counts as unread
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise ledger_error(error, "the ledger file cannot be read", self.path) from error

    def changed_by_others(self) -> bool:
        """Return whether anything but this object changed the file since the last call, or since it was opened.

        It detects commits of other connections, bytes written without SQLite, and a file that replaced this one.
        """
        before, self._seen = self._seen, self._stamp()
        return before != self._seen

    def _note_own_change(self) -> None:
        """Count the file's present state as seen after this object's own write, unless another file has replaced it.

        :meth:`changed_by_others` then reports the replacement.
        """
        now, path_and_inode = self._stamp(), slice(1, 3)
        if now[path_and_inode] == self._seen[path_and_inode]:
            self._seen = now

    def _stamp(self) -> tuple[object, ...]:
        """Return values that change whenever somebody else writes to the ledger or replaces its file.

        They are SQLite's count of other connections' commits, and the inode, size and modification times of the file
        and of its write-ahead log.
        """
        stamp: list[object] = [self._db.execute("PRAGMA data_version").fetchone()[0]]
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(file)  # called at every read, so it avoids making a Path
                stamp += [file, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        return tuple(stamp)

    @property
    def has_uncommitted(self) -> bool:
        """True if the transaction in progress has appended a row."""
        return bool(self._appended)

    def check_rows(self) -> None:
        """Check, between transactions, that every row that this object has read is unchanged in the file.

        The check uses a connection of its own, because this object's connection may hold older pages of the file in
        memory.

        Raises:
            LedgerCorrupt: If a row changed, or the file is missing or was replaced.
        """
        try:
            with closing(connect(self.path, read_only=True)) as fresh:
                self._check_rows(fresh)
        except InvalidInput as error:
            raise LedgerCorrupt(f"the ledger's file was removed while it was open ({error})") from error
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise ledger_error(error, "the ledger was rewritten while it was open", self.path) from error

    def _check_rows(self, connection: sqlite3.Connection) -> None:
        before: Row | None = None
        for row in _every_row(connection) if self._last else ():
            check_link(self.role, row, before)
            before = row
            if self._last and row.seq == self._last.seq:
                break
        if before != self._last:
            raise LedgerCorrupt(
                "the ledger was rewritten while it was open", row=self._last.seq if self._last else None
            )

    def forget(self) -> None:
        """Forget which rows were read, so that :meth:`new_rows` starts at the first row again."""
        self._last = None

    def all_rows(self) -> Iterator[Row]:
        """Return every row from the first as stored, without checks."""
        return _every_row(self._db)

    def rows_of(self, kind: str) -> Iterator[Row]:
        """Return every row of one kind in order as stored, without checks.

        Args:
            kind: Kind of the rows.

        Returns:
            An iterator.
        """
        sql = "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE kind = ? ORDER BY seq"
        for values in self._db.execute(sql, (kind,)):
            yield Row(*values)

    def row_hashes(self, *, until: int, kinds: tuple[str, ...] = ()) -> list[bytes]:
        """Return the stored hashes of all rows up to a given one.

        Args:
            until: Number of the last row.
            kinds: Kinds of rows to include; empty for all.

        Returns:
            Hashes of 32 bytes in order.
        """
        of = f"AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        found = self._db.execute(f"SELECT hash FROM rows WHERE seq <= ? {of} ORDER BY seq", (until, *kinds))
        return [bytes.fromhex(hashed) for (hashed,) in found]

    def rows_between(self, after: int, until: int) -> list[Row]:
        """Return the rows with after < seq ≤ until, as stored.

        Args:
            after: Number of the row before the first.
            until: Number of the last row.

        Returns:
            The rows in order.
        """
        cursor = self._db.execute(
            "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE seq > ? AND seq <= ? ORDER BY seq",
            (after, until),
        )
        return [Row(*values) for values in cursor]

    def row(self, seq: int) -> Row:
        """Return one row.

        Args:
            seq: Its number.

        Returns:
            The row.

        Raises:
            LedgerCorrupt: If the row is missing, or its stored hash does not match its fields.
        """
        found = self.rows_between(seq - 1, seq)
        if not found:
            raise LedgerCorrupt("row is missing", row=seq)
        check_own_hash(self.role, found[0])
        return found[0]

    def row_at(self, place: Position) -> Row:
        """Return a row that was read before, and check that it has not changed.

        Args:
            place: Number and hash of the row.

        Returns:
            The row.

        Raises:
            LedgerCorrupt: If the row is missing or has changed.
        """
        row = self.row(place.seq)
        if row.hash != place.hash:
            raise LedgerCorrupt("the row was altered while the ledger was open", row=row.seq)
        return row

    def payload(self, key: str) -> tuple[int, bytes] | None:
        """Return a stored payload.

        Args:
            key: The query's id for an answer or a code, ``query id/draw`` for a masked code, the SHA-256 of a roster.

        Returns:
            Row number and bytes; None if there is none.
        """
        found = self._db.execute(f"SELECT seq, data FROM {self.payload_table} WHERE query_id = ?", (key,)).fetchone()
        return None if found is None else (found[0], found[1])

    def head(self, at: int | None = None) -> SignedHead:
        """Return the signed head (a signature of a row's hash) of the newest row, or of the transaction that ended at a
        given row.

        Args:
            at: Number of the last row of a transaction; None for the newest.

        Returns:
            The head.

        Raises:
            LedgerCorrupt: If there is none.
        """
        if at is None:
            sql, values = "SELECT seq, hash, public_key, signature FROM heads ORDER BY seq DESC LIMIT 1", ()
        else:
            sql, values = "SELECT seq, hash, public_key, signature FROM heads WHERE seq = ?", (at,)  # type: ignore[assignment]
        found = self._db.execute(sql, values).fetchone()
        if found is None:
            raise LedgerCorrupt("signed head is missing", row=at)
        return SignedHead(self.role, self.ledger_id, *found)

    def transaction_end(self, seq: int) -> int:
        """Return the number of the last row of the transaction that contains a row.

        Args:
            seq: Number of the row.

        Returns:
            The last row's number.

        Raises:
            LedgerCorrupt: If no signed head covers the row.
        """
        end = self._db.execute("SELECT min(seq) FROM heads WHERE seq >= ?", (seq,)).fetchone()[0]
        if end is None:
            raise LedgerCorrupt("no signed head covers the row", row=seq)
        return int(end)

    def marks(self) -> tuple[tuple[int, str], ...]:
        """Return row number and hash of the last rows of some transactions, newest first.

        They are stored in the standing file. If an older copy of the ledger is restored, they show after which row the
        copy and the lost ledger differ.

        Returns:
            The last rows of the newest :data:`EXACT_MARKS` transactions, then of some older transactions, and of the
            first transaction. The distance of the older ones from the newest row grows by about a sixteenth from each
            one to the next, so the length of the result grows with the logarithm of the ledger's length.
        """
        ends = "SELECT seq, hash FROM heads {} ORDER BY seq DESC LIMIT ?"
        found = self._db.execute(ends.format(""), (EXACT_MARKS,)).fetchall()
        last, oldest = (found[0][0], found[-1][0]) if found else (0, 0)
        while oldest > 1 and len(found) >= EXACT_MARKS:
            step = max(last - oldest, 1)
            wanted = max(last - step - max(step // 16, 1), 1)
            (end,) = self._db.execute(ends.format("WHERE seq <= ?"), (wanted, 1)).fetchall() or [(0, "")]
            if not end:
                break
            found.append(end)
            oldest = end[0]
        return tuple(found)

    # --- appending

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Run the context in one transaction under the write lock. Commit it with a signed head (a signature of the
        last row), or roll everything back on any exception.

        Inside, the caller must first read the rows that other processes appended (:meth:`new_rows`).

        Raises:
            InvalidInput: If there is no key, or the lock cannot be taken.
            StorageFailed: If the disk is full or fails. Nothing was written.
        """
        key = self.signing_key
        self._take_place()
        self._appended, self._in_transaction = [], True
        self._time = format_time(self.clock())
        try:
            yield
            if self._appended:
                last = self._appended[-1]
                message = head_message(self.role, ledger_id=self.ledger_id, seq=last.seq, row_hash=last.hash)
                self._db.execute(
                    "INSERT INTO heads VALUES (?, ?, ?, ?)",
                    (last.seq, last.hash, self.public_key, key.sign(message).hex()),
                )
            self._db.execute("COMMIT")
            self._note_own_change()
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if self._appended:
                before = self._appended[0].seq - 1
                self._last = self.row(before) if before else None
            if isinstance(error, sqlite3.Error) and isinstance(
                failed := ledger_error(error, "", self.path), StorageFailed
            ):
                raise failed from error
            raise
        finally:
            self._appended, self._in_transaction = [], False

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """Hold the write lock within the context without appending, so that no other process can append a row."""
        self._take_place()
        with self._rolled_back():
            yield

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        """At the end of the context, roll back the transaction that the caller has begun.

        SQLite may have ended the transaction already, after a read error.
        """
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _take_place(self) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if isinstance(failed := ledger_error(error, "", self.path), StorageFailed):
                raise failed from error
            raise InvalidInput(
                "ledger cannot be locked for writing, because another process holds the lock",
                value=str(error),
                remedy=LOCKED_REMEDY,
            ) from error

    @property
    def today(self) -> str:
        """The UTC date of the transaction in progress."""
        return self._time[:10]

    def append(self, kind: str, body: dict[str, object], *, payload: tuple[str, bytes] | None = None) -> Row:
        """Add a row inside the current transaction.

        Args:
            kind: Kind of the row.
            body: Its facts, written as canonical JSON.
            payload: Key (see :meth:`payload`) and bytes to store with the row.

        Returns:
            The row.

        Raises:
            RuntimeError: Outside a transaction.
        """
        if not self._in_transaction:
            raise RuntimeError("append outside a transaction")
        seq, prev = (self._last.seq + 1, self._last.hash) if self._last else (1, NO_HASH)
        text = canonical_text(body)
        hashed = row_hash(
            self.role, seq=seq, time_utc=self._time, kind=kind, body_sha256=body_digest(text), prev_hash=prev
        )
        row = Row(seq, self._time, kind, text, prev, hashed)
        self._db.execute("INSERT INTO rows VALUES (?, ?, ?, ?, ?, ?)", (seq, self._time, kind, text, prev, hashed))
        if payload is not None:
            self._db.execute(f"INSERT INTO {self.payload_table} VALUES (?, ?, ?)", (payload[0], seq, payload[1]))
        self._appended.append(row)
        self._last = row
        return row

    def drop_payloads(self, *, before: int) -> None:
        """Delete the payloads of all rows before a given one, inside the current transaction. The rows stay.

        This is the only deletion in a ledger. The trigger that forbids deletions is dropped and restored in the same
        transaction.

        Args:
            before: Number of the first row whose payload stays.

        Raises:
            RuntimeError: Outside a transaction.
        """
        if not self._in_transaction:
            raise RuntimeError("deletion outside a transaction")
        guard = f"{self.payload_table}_no_delete"
        self._db.execute(f"DROP TRIGGER {guard}")
        self._db.execute(f"DELETE FROM {self.payload_table} WHERE seq < ?", (before,))
        self._db.execute(schema_sql(self.role)[guard])

    def has_payload(self, *, before: int) -> bool:
        """Return whether any row before a given one has a stored payload.

        Args:
            before: Number of the row.

        Returns:
            True if there is one.
        """
        found = self._db.execute(f"SELECT 1 FROM {self.payload_table} WHERE seq < ? LIMIT 1", (before,)).fetchone()
        return found is not None

    def settle(self) -> None:
        """Move the write-ahead log into the file and empty it, so that the log keeps no copy of deleted bytes.

        If another process is reading, this has no effect now; SQLite does it at the next checkpoint.
        """
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._note_own_change()

    def use_key(self, key: Ed25519PrivateKey) -> None:
        """Sign the ledger's heads (signed hashes of the newest row) with another key from now on.

        The row that introduces the key must have been committed.

        Args:
            key: The new key.
        """
        self._key, self.public_key = key, public_hex(key)

    @property
    def signing_key(self) -> Ed25519PrivateKey:
        """The key that signs the newest row of each transaction; raises InvalidInput if the ledger is open for reading
        only.
        """
        if self._key is None:
            raise InvalidInput("ledger is open for reading only", remedy="open it with its signing key")
        return self._key

    def possession(self, key: Ed25519PrivateKey) -> str:
        """Return a new key's proof of possession: its signature of the statement that it takes over this ledger after
        the newest row.

        Args:
            key: The new private key.

        Returns:
            The signature in hex.
        """
        seq, prev = (self._last.seq, self._last.hash) if self._last else (0, NO_HASH)
        return key.sign(possession_message(self.role, ledger_id=self.ledger_id, seq=seq, row_hash=prev)).hex()

    def _still_there(self) -> None:
        if self._last is None:
            return
        found = self._db.execute("SELECT hash FROM rows WHERE seq = ?", (self._last.seq,)).fetchone()
        if found is None or found[0] != self._last.hash:
            raise LedgerCorrupt(
                "the ledger was cut or rewritten while it was open: a row read before is no longer there",
                row=self._last.seq,
            )


def _every_row(connection: sqlite3.Connection) -> Iterator[Row]:
    for values in connection.execute("SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows ORDER BY seq"):
        yield Row(*values)
