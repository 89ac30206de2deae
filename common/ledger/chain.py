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
import re
import secrets
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.canonical import canonical_bytes, canonical_text, check_hash, checked_fields, digest, sha256_bytes
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt, StorageFailed
from common.ledger.keys import hex_bytes, public_hex, signing_public_key, sync_directory

SCHEMA_VERSION = 1
APPLICATION_ID = 0x434F4E53  # "CONS", shown by file(1)
NO_HASH = "0" * 64
BUSY_TIMEOUT_S = 60.0
ROLES = {"server": "answers", "site": "codes"}
"""Which table holds the payloads of which kind of ledger."""

Clock = Callable[[], datetime]
Migration = Callable[[sqlite3.Connection, str], None]

MIGRATIONS: dict[int, Migration] = {}
"""``MIGRATIONS[n]`` brings a file of schema n to n + 1; it may add tables and columns, never change a stored row."""

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{6}Z")


def utc_now() -> datetime:
    """The production clock."""
    return datetime.now(UTC)


def schema_sql(role: str) -> dict[str, str]:
    """Name → SQL of every table and trigger of a ledger of this role; ``verify`` compares the file with these."""
    payloads = ROLES[role]
    statements = {
        "rows": (
            "CREATE TABLE rows (seq INTEGER PRIMARY KEY, time_utc TEXT NOT NULL, kind TEXT NOT NULL, "
            "body TEXT NOT NULL, prev_hash TEXT NOT NULL UNIQUE, hash TEXT NOT NULL) STRICT"
        ),
        "heads": (
            "CREATE TABLE heads (seq INTEGER PRIMARY KEY REFERENCES rows (seq), hash TEXT NOT NULL, "
            "public_key TEXT NOT NULL, signature TEXT NOT NULL) STRICT"
        ),
        payloads: (
            f"CREATE TABLE {payloads} (query_id TEXT PRIMARY KEY NOT NULL, "
            "seq INTEGER NOT NULL UNIQUE REFERENCES rows (seq), data BLOB NOT NULL) STRICT"
        ),
        # INSERT OR REPLACE deletes without firing delete triggers, so the guard stands before the insert.
        "rows_follow": (
            "CREATE TRIGGER rows_follow BEFORE INSERT ON rows "
            "WHEN NEW.seq IS NOT (SELECT coalesce(max(seq), 0) + 1 FROM rows) "
            f"OR NEW.prev_hash IS NOT coalesce((SELECT hash FROM rows ORDER BY seq DESC LIMIT 1), '{NO_HASH}') "
            "BEGIN SELECT RAISE(ABORT, 'a row must follow the last row'); END"
        ),
        "heads_once": (
            "CREATE TRIGGER heads_once BEFORE INSERT ON heads "
            "WHEN EXISTS (SELECT 1 FROM heads WHERE seq >= NEW.seq) "
            "BEGIN SELECT RAISE(ABORT, 'a head must follow the last head'); END"
        ),
        f"{payloads}_once": (
            f"CREATE TRIGGER {payloads}_once BEFORE INSERT ON {payloads} "
            f"WHEN EXISTS (SELECT 1 FROM {payloads} WHERE query_id = NEW.query_id OR seq = NEW.seq) "
            "BEGIN SELECT RAISE(ABORT, 'stored once and for all'); END"
        ),
    }
    for table in ("rows", "heads", payloads):
        for action in ("UPDATE", "DELETE"):
            name = f"{table}_no_{action.lower()}"
            statements[name] = (
                f"CREATE TRIGGER {name} BEFORE {action} ON {table} "
                "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
            )
    return statements


@dataclass(frozen=True, slots=True)
class Row:
    """One stored row. ``hash`` covers every other field; ``body`` is canonical JSON text."""

    seq: int
    time_utc: str
    kind: str
    body: str
    prev_hash: str
    hash: str


@dataclass(frozen=True, slots=True)
class SignedHead:
    """The newest row's number and hash, signed: whoever keeps it will notice a rewrite or a cut before that row."""

    role: str
    ledger_id: str
    seq: int
    hash: str
    public_key: str
    signature: str

    def is_genuine(self) -> bool:
        """Whether ``public_key`` signed these very fields. Whose key that is, the caller must know."""
        try:
            message = head_message(self.role, ledger_id=self.ledger_id, seq=self.seq, row_hash=self.hash)
            signing_public_key(self.public_key).verify(hex_bytes(self.signature), message)
        except (InvalidSignature, ValueError, TypeError, InvalidInput):
            return False
        return True

    def to_json(self) -> dict[str, object]:
        return {
            "hash": self.hash,
            "ledger_id": self.ledger_id,
            "public_key": self.public_key,
            "role": self.role,
            "seq": self.seq,
            "signature": self.signature,
        }

    @classmethod
    def from_json(cls, data: object) -> SignedHead:
        kinds: dict[str, type] = {
            "hash": str,
            "ledger_id": str,
            "public_key": str,
            "role": str,
            "seq": int,
            "signature": str,
        }
        fields = checked_fields(data, kinds)
        check_hash(fields["hash"])
        if fields["role"] not in ROLES or fields["seq"] < 1:
            raise InvalidInput("signed head", value=(fields["role"], fields["seq"]), limit="a role and a row from 1")
        return cls(**fields)


def body_digest(body: str) -> str:
    """SHA-256 of a row's body; the row's hash takes the body in through this, so a link can be shown without it."""
    return sha256_bytes(body.encode())


def row_hash(role: str, *, seq: int, time_utc: str, kind: str, body_sha256: str, prev_hash: str) -> str:
    """The hash that names a row and everything before it; the role in the domain keeps the two ledgers apart."""
    fields = {"body_sha256": body_sha256, "kind": kind, "prev_hash": prev_hash, "seq": seq, "time_utc": time_utc}
    return digest(f"{role}-ledger-row", fields)


def head_message(role: str, *, ledger_id: str, seq: int, row_hash: str) -> bytes:
    """The bytes a head's signature covers."""
    fields = {"hash": row_hash, "ledger_id": ledger_id, "seq": seq}
    return f"consilium/{role}-ledger-head/v1".encode() + b"\0" + canonical_bytes(fields)


def check_time(text: object) -> str:
    """A row's time as ``YYYY-MM-DDTHH:MM:SS.ffffffZ``; anything else is refused."""
    if not isinstance(text, str) or not _TIME.fullmatch(text):
        raise InvalidInput("time", value=text, limit="YYYY-MM-DDTHH:MM:SS.ffffffZ")
    return text


def format_time(moment: datetime) -> str:
    """A clock's answer as the ledger writes it; a time without a zone is refused."""
    if moment.tzinfo is None:
        raise InvalidInput("clock", value=moment.isoformat(), limit="an aware time")
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")


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
        draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
        os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        try:
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
                with chain.transaction():
                    chain.append(
                        "genesis",
                        {
                            **genesis,
                            "ledger_id": chain.ledger_id,
                            "public_key": public_hex(signing_key),
                            "role": role,
                            "schema": SCHEMA_VERSION,
                        },
                    )
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            finally:
                connection.close()
            try:
                os.link(draft, path)
            except FileExistsError as error:
                raise InvalidInput("ledger file exists", value=str(path), remedy="open it") from error
        finally:
            for suffix in ("", "-wal", "-shm"):
                Path(f"{draft}{suffix}").unlink(missing_ok=True)
        sync_directory(path.parent)
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

    def forget(self) -> None:
        """Start reading from the first row again."""
        self._last = None

    def all_rows(self) -> Iterator[Row]:
        """Every row from the first, as stored (not checked)."""
        for values in self._db.execute("SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows ORDER BY seq"):
            yield Row(*values)

    def rows_between(self, after: int, until: int) -> list[Row]:
        """Rows with after < seq ≤ until, as stored."""
        cursor = self._db.execute(
            "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE seq > ? AND seq <= ? ORDER BY seq",
            (after, until),
        )
        return [Row(*values) for values in cursor]

    def row(self, seq: int) -> Row:
        found = self.rows_between(seq - 1, seq)
        if not found:
            raise LedgerCorrupt("row is missing", row=seq)
        return found[0]

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

    # --- appending

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Take the one writer's place; commit with a signed head, or roll everything back on any exception.

        What other processes appended before must be read by the caller (``new_rows``) as its first act inside.
        """
        key = self.signing_key
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if isinstance(failed := ledger_error(error, ""), StorageFailed):
                raise failed from error
            raise InvalidInput(
                "ledger cannot be locked for writing", value=str(error), remedy="see which process holds it; try again"
            ) from error
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


def possession_message(role: str, *, ledger_id: str, seq: int, row_hash: str) -> bytes:
    """The bytes a new key signs to take over; ``seq`` and hash of the row before the key row bind the place."""
    fields = {"hash": row_hash, "ledger_id": ledger_id, "seq": seq}
    return f"consilium/{role}-ledger-key/v1".encode() + b"\0" + canonical_bytes(fields)


def check_link(role: str, row: Row, previous: Row | None) -> None:
    """LedgerCorrupt unless ``row`` directly follows ``previous`` and its hash is that of its own fields."""
    seq, prev = (previous.seq + 1, previous.hash) if previous else (1, NO_HASH)
    if row.seq != seq:
        raise LedgerCorrupt(f"rows are out of order or missing: the next stored row is {row.seq}", row=seq)
    for name in ("time_utc", "kind", "body", "prev_hash", "hash"):
        if not isinstance(getattr(row, name), str):
            raise LedgerCorrupt(f"{name} is not text", row=seq)
    if row.prev_hash != prev:
        raise LedgerCorrupt("the previous hash is not that of the row before", row=seq)
    try:
        check_time(row.time_utc)
        expected = row_hash(
            role,
            seq=seq,
            time_utc=row.time_utc,
            kind=row.kind,
            body_sha256=body_digest(row.body),
            prev_hash=row.prev_hash,
        )
    except (InvalidInput, UnicodeEncodeError) as error:
        raise LedgerCorrupt(f"a stored value cannot be read ({error})", row=seq) from error
    if row.hash != expected:
        raise LedgerCorrupt("the hash does not match the row's contents", row=seq)


def migrate(connection: sqlite3.Connection, *, role: str, path: Path, read_only: bool) -> None:
    """Check the file's format and bring an older schema up to date, one version a transaction, or refuse it."""
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except (sqlite3.DatabaseError, UnicodeError) as error:
        raise ledger_error(error, f"{path} is not a ledger or is damaged") from error
    if application != APPLICATION_ID or "rows" not in tables:
        raise LedgerCorrupt(f"{path} is not a Consilium ledger")
    if ROLES[role] not in tables:
        raise InvalidInput("kind of ledger", value=str(path), limit=f"a {role} ledger")
    if version > SCHEMA_VERSION:
        raise InvalidInput("ledger schema", value=version, limit=f"up to {SCHEMA_VERSION}", remedy="upgrade Consilium")
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise InvalidInput("ledger schema", value=version, limit=f"{SCHEMA_VERSION}, or one that can be migrated")
        if read_only:
            raise InvalidInput("ledger schema", value=version, remedy="open it once with its signing key to migrate it")
        connection.execute("BEGIN IMMEDIATE")
        try:
            if connection.execute("PRAGMA user_version").fetchone()[0] == version:  # else another process was faster
                MIGRATIONS[version](connection, role)
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        version = connection.execute("PRAGMA user_version").fetchone()[0]


def ledger_error(error: Exception, damaged: str) -> ConsiliumError:
    """What went wrong with a ledger's file, by SQLite's code: the disk, access to the file, or the file itself.

    ``damaged`` are the words for the last. A full disk is no damage: what was committed is whole.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # extended codes name the call that failed
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        what = "the disk is full" if code == sqlite3.SQLITE_FULL else "the disk is full or failing"
        return StorageFailed(
            f"the ledger cannot be written: {what} ({error}); nothing was charged; "
            "to fix: free space where the ledger lies (`df`), see the system's log if there is some, and try again"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return InvalidInput("ledger is locked", value=str(error), remedy="see which process holds it; try again")
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        remedy = "let this user write to the ledger's file and folder, and see that the disk is not full"
        return InvalidInput("ledger file cannot be opened", value=str(error), remedy=remedy)
    return LedgerCorrupt(f"{damaged} ({error})")


def connect(path: Path, *, read_only: bool, as_it_lies: bool = False) -> sqlite3.Connection:
    """A connection as every ledger is opened: WAL and synchronous=FULL for a writer, nothing written by a reader.

    ``as_it_lies`` reads a file nobody has open, without the lock files a reader otherwise leaves beside it.
    """
    if sqlite3.sqlite_version_info < (3, 37):
        raise InvalidInput("SQLite library", value=sqlite3.sqlite_version, limit="3.37 or newer")
    if not path.is_file():
        raise InvalidInput("ledger file does not exist", value=str(path), remedy="check the path")
    # an unwritable folder cannot hold the shared-memory file a WAL reader needs; without a WAL nothing can change
    unwritable = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
    mode = "mode=ro" if read_only else "mode=rw"
    uri = f"{path.absolute().as_uri()}?{mode}{'&immutable=1' if read_only and (unwritable or as_it_lies) else ''}"
    try:
        connection = sqlite3.connect(
            uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False
        )
    except sqlite3.OperationalError as error:
        raise InvalidInput("ledger file cannot be opened", value=f"{path} ({error})") from error
    try:
        if read_only:
            connection.execute("PRAGMA query_only = ON")
        else:
            mode_now = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode_now != "wal":
                raise InvalidInput(
                    "journal mode", value=mode_now, limit="WAL", remedy="put the ledger on a local disk, not a share"
                )
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
    except (sqlite3.DatabaseError, UnicodeError) as error:
        connection.close()
        raise ledger_error(error, f"{path} is not a ledger or is damaged") from error
    except BaseException:
        connection.close()
        raise
    return connection
