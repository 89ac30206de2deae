"""The append-only file under both ledgers: SQLite rows, each holding the hash of the one before, and signed heads.

It knows nothing of privacy. A row is ``(seq, time_utc, kind, body, prev_hash, hash)``; a transaction ends with an
Ed25519 signature over its last row's hash; a payload (a noisy answer at the server, a code at a site) lies in a table
of its own and is written in the transaction of the row that names its SHA-256. Refuses to open a file of another format
or an unknown schema version, to read past a row that does not follow from the one before, and to append without a key.

The chain shows that nothing was changed, dropped or inserted **before** the newest head one knows. A tail that was cut
off together with its heads leaves a shorter valid file: only someone outside who kept a later head can tell.
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
    SCHEMA_VERSION,
    appearing,
    connect,
    ledger_error,
    migrate,
    schema_sql,
)

EXACT_MARKS = 256
"""Of so many of the newest transactions a standing names every end; of older ones it names some."""


class Chain:
    """An open ledger file. Threads must take turns by the caller's lock; processes do by SQLite's write lock."""

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
        """Make a new ledger whose first row is ``genesis`` plus its id and key; an existing path is refused.

        The file appears under its name only when it is complete and durable: a crash leaves nothing half made.
        """
        if path.exists():
            raise InvalidInput("ledger file exists", value=str(path), remedy="open it; a ledger is never overwritten")
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
        """Open an existing ledger; without a key it is read only. Chain and rows are checked by the caller's replay."""
        connection = connect(path, read_only=signing_key is None)
        try:
            migrate(connection, role=role, path=path, read_only=signing_key is None)
        except BaseException:
            connection.close()
            raise
        return cls(connection, path=path, role=role, signing_key=signing_key, clock=clock)

    def close(self) -> None:
        self._db.close()

    # --- reading

    @property
    def last(self) -> Row | None:
        """The newest row this object has read or appended."""
        return self._last

    @property
    def read_only(self) -> bool:
        return self._key is None

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read rows and heads as of one moment, whatever others commit meanwhile."""
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            self._db.execute("COMMIT")

    def new_rows(self) -> Iterator[Row]:
        """Rows appended since the last call by anyone, each checked against the chain as it is read.

        LedgerCorrupt if the row last seen is gone or changed, a number is missing, or a hash is wrong.
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
                self._last = row  # only now: a row the reader refused stays unread
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise ledger_error(error, "the ledger file cannot be read") from error

    def changed_by_others(self) -> bool:
        """Whether the file changed since the last call, or since it was opened, other than by this object.

        Another connection's commits count, and so do bytes written past SQLite and a file put in this one's place.
        """
        before, self._seen = self._seen, self._stamp()
        return before != self._seen

    def _stamp(self) -> tuple[object, ...]:
        """What changes whenever somebody else writes to the ledger or puts another file in its place.

        It holds SQLite's count of other connections' commits; and for the file and its write-ahead log the inode, the
        size and the times of the last change.
        """
        stamp: list[object] = [self._db.execute("PRAGMA data_version").fetchone()[0]]
        for file in self._files:
            with contextlib.suppress(FileNotFoundError):
                found = os.stat(file)  # at every reading of a ledger: no Path is made for it
                stamp += [file, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        return tuple(stamp)

    @property
    def has_uncommitted(self) -> bool:
        """Whether the transaction in progress has appended a row."""
        return bool(self._appended)

    def check_rows(self) -> None:
        """Check that every row up to the newest one read lies in the file as it was, between transactions.

        Read through a connection of its own: this one's may hold pages of the file in memory as they were before.

        Raises:
            LedgerCorrupt: A row is not as it was, with its number, or the file is gone or another.
        """
        try:
            with closing(connect(self.path, read_only=True)) as fresh:
                self._check_rows(fresh)
        except InvalidInput as error:
            raise LedgerCorrupt(f"the ledger's file was taken away while it was open ({error})") from error
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise ledger_error(error, "the ledger was rewritten while it was open") from error

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
        """Start reading from the first row again."""
        self._last = None

    def all_rows(self) -> Iterator[Row]:
        """Every row from the first, as stored (not checked)."""
        return _every_row(self._db)

    def rows_of(self, kind: str) -> Iterator[Row]:
        """Every row of one kind in order, as stored (not checked)."""
        sql = "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE kind = ? ORDER BY seq"
        for values in self._db.execute(sql, (kind,)):
            yield Row(*values)

    def row_hashes(self, *, until: int, kinds: tuple[str, ...] = ()) -> list[bytes]:
        """The hash of every row from the first to row ``until``, of these kinds or of all, as stored."""
        of = f"AND kind IN ({', '.join('?' * len(kinds))})" if kinds else ""
        found = self._db.execute(f"SELECT hash FROM rows WHERE seq <= ? {of} ORDER BY seq", (until, *kinds))
        return [bytes.fromhex(hashed) for (hashed,) in found]

    def rows_between(self, after: int, until: int) -> list[Row]:
        """Rows with after < seq ≤ until, as stored."""
        cursor = self._db.execute(
            "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE seq > ? AND seq <= ? ORDER BY seq",
            (after, until),
        )
        return [Row(*values) for values in cursor]

    def row(self, seq: int) -> Row:
        """One row; LedgerCorrupt where it is missing, or its hash is not that of its fields."""
        found = self.rows_between(seq - 1, seq)
        if not found:
            raise LedgerCorrupt("row is missing", row=seq)
        check_own_hash(self.role, found[0])
        return found[0]

    def row_at(self, place: Position) -> Row:
        """The row at this place; LedgerCorrupt where it is missing, or is another one than was read before."""
        row = self.row(place.seq)
        if row.hash != place.hash:
            raise LedgerCorrupt("the row was altered while the ledger was open", row=row.seq)
        return row

    def payload(self, query_id: str) -> tuple[int, bytes] | None:
        """The row number and bytes stored for a query, or None."""
        found = self._db.execute(
            f"SELECT seq, data FROM {self.payload_table} WHERE query_id = ?", (query_id,)
        ).fetchone()
        return None if found is None else (found[0], found[1])

    def head(self, at: int | None = None) -> SignedHead:
        """The signed head of the newest row, or of the transaction that ended at row ``at``."""
        if at is None:
            sql, values = "SELECT seq, hash, public_key, signature FROM heads ORDER BY seq DESC LIMIT 1", ()
        else:
            sql, values = "SELECT seq, hash, public_key, signature FROM heads WHERE seq = ?", (at,)  # type: ignore[assignment]
        found = self._db.execute(sql, values).fetchone()
        if found is None:
            raise LedgerCorrupt("signed head is missing", row=at)
        return SignedHead(self.role, self.ledger_id, *found)

    def transaction_end(self, seq: int) -> int:
        """The row at which the transaction of row ``seq`` ended."""
        end = self._db.execute("SELECT min(seq) FROM heads WHERE seq >= ?", (seq,)).fetchone()[0]
        if end is None:
            raise LedgerCorrupt("no signed head covers it", row=seq)
        return int(end)

    def marks(self) -> tuple[tuple[int, str], ...]:
        """Row number and hash of ends of transactions, the newest first: by them another copy's fork is found.

        Returns:
            Each of the newest :data:`EXACT_MARKS`, then one for every step back by a sixteenth of the way, and the
            first of all. So their number grows with the logarithm of the ledger's length.
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
        """Take the one writer's place; commit with a signed head, or roll everything back on any exception.

        What other processes appended before must be read by the caller (``new_rows``) as its first act inside.
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
            self._seen = self._stamp()
        except BaseException as error:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            if self._appended:
                before = self._appended[0].seq - 1
                self._last = self.row(before) if before else None
            if isinstance(error, sqlite3.Error) and isinstance(failed := ledger_error(error, ""), StorageFailed):
                raise failed from error
            raise
        finally:
            self._appended, self._in_transaction = [], False

    @contextmanager
    def unchanging(self) -> Iterator[None]:
        """Take the one writer's place and append nothing: the newest row stays the newest meanwhile."""
        self._take_place()
        try:
            yield
        finally:
            self._db.execute("ROLLBACK")

    def _take_place(self) -> None:
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if isinstance(failed := ledger_error(error, ""), StorageFailed):
                raise failed from error
            raise InvalidInput(
                "ledger cannot be locked for writing", value=str(error), remedy="see which process holds it; try again"
            ) from error

    @property
    def today(self) -> str:
        """The UTC date of the transaction in progress."""
        return self._time[:10]

    def append(self, kind: str, body: dict[str, object], *, payload: tuple[str, bytes] | None = None) -> Row:
        """Add a row, and the payload (query id, bytes) that belongs to it, inside the current transaction."""
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
        """Delete the payloads of rows before row ``before``, inside the current transaction; the rows stay.

        The one deletion a ledger knows. The trigger against all others is put aside for it, in the same transaction.
        """
        if not self._in_transaction:
            raise RuntimeError("deletion outside a transaction")
        guard = f"{self.payload_table}_no_delete"
        self._db.execute(f"DROP TRIGGER {guard}")
        self._db.execute(f"DELETE FROM {self.payload_table} WHERE seq < ?", (before,))
        self._db.execute(schema_sql(self.role)[guard])

    def has_payload(self, *, before: int) -> bool:
        """Whether a payload of a row before row ``before`` is there."""
        found = self._db.execute(f"SELECT 1 FROM {self.payload_table} WHERE seq < ? LIMIT 1", (before,)).fetchone()
        return found is not None

    def settle(self) -> None:
        """Bring the write-ahead log into the file and empty it, so that no copy of what was deleted stays there.

        Where a reader is in the way the next checkpoint does it.
        """
        with contextlib.suppress(sqlite3.OperationalError):
            self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            self._seen = self._stamp()

    def use_key(self, key: Ed25519PrivateKey) -> None:
        """Sign later heads with ``key`` (after a key row was committed)."""
        self._key, self.public_key = key, public_hex(key)

    @property
    def signing_key(self) -> Ed25519PrivateKey:
        if self._key is None:
            raise InvalidInput("ledger is open for reading", remedy="open it with its signing key")
        return self._key

    def possession(self, key: Ed25519PrivateKey) -> str:
        """A new key's signature saying that it takes over this ledger after the newest row."""
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
