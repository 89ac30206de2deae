"""Defines the SQLite file of a ledger: its tables and triggers, its format version, its opening, and its errors.

Called by the chain, by backups and by the verifier. An older schema is migrated, one version per transaction. Refuses a
file of another format or an unknown schema version, and a disk that does not support a write-ahead log.
"""

from __future__ import annotations

import os
import secrets
import shlex
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from common import __version__
from common.canonical import check_schema
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt, StorageFailed
from common.ledger.rows import NO_HASH, ROLES
from common.objects import name_new, sync_directory

SCHEMA_VERSION = 1
APPLICATION_ID = 0x434F4E53  # "CONS", shown by file(1)
BUSY_TIMEOUT_S = 60.0
LOCKED_REMEDY = "wait until the other command or daemon has finished, or end it; then run the same command again"

Migration = Callable[[sqlite3.Connection, str], None]

MIGRATIONS: dict[int, Migration] = {}
"""``MIGRATIONS[n]`` migrates a file from schema n to n + 1. It may add tables and columns, but change no stored row."""


def schema_sql(role: str) -> dict[str, str]:
    """Return the SQL of every table and trigger of a ledger. ``consilium verify`` compares a file's schema with this
    SQL.

    Args:
        role: ``server`` or ``site``.

    Returns:
        SQL by name.
    """
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
        # INSERT OR REPLACE deletes rows without firing delete triggers, so a trigger before the insert is needed too.
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


def migrate(connection: sqlite3.Connection, *, role: str, path: Path, read_only: bool) -> None:
    """Check a file's format, and migrate an older schema, one version per transaction.

    Args:
        connection: The open database.
        role: ``server`` or ``site``.
        path: The file, for errors.
        read_only: True if the file must not be changed.

    Raises:
        LedgerCorrupt: If the file is no ledger or is damaged.
        InvalidInput: If it is another kind of ledger or of an unknown schema, or must be migrated but is read-only.
    """
    try:
        application = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except (sqlite3.DatabaseError, UnicodeError) as error:
        raise ledger_error(error, f"{path} is not a ledger or is damaged", path) from error
    if application != APPLICATION_ID or "rows" not in tables:
        raise LedgerCorrupt(f"{path} is not a Consilium ledger; to fix: give a ledger's file, NAME.sqlite")
    if ROLES[role] not in tables:
        raise InvalidInput("kind of ledger", value=str(path), limit=f"a {role} ledger")
    if version > SCHEMA_VERSION:
        check_schema("ledger", version, known=SCHEMA_VERSION)
    while version < SCHEMA_VERSION:
        if version not in MIGRATIONS:
            raise InvalidInput(
                "ledger schema",
                value=version,
                limit=f"{SCHEMA_VERSION}, or an older one that Consilium {__version__} can migrate, which runs here",
                remedy="open it once with the version that wrote it and with each later one",
            )
        if read_only:
            writer = "consilium study run" if role == "server" else "consilium site up"
            raise InvalidInput(
                "ledger schema",
                value=version,
                limit=f"{SCHEMA_VERSION}, which Consilium {__version__} reads, the version that runs here",
                remedy=f"migrate the ledger: run a command that writes to it, such as `{writer}`",
            )
        connection.execute("BEGIN IMMEDIATE")
        try:
            if (
                connection.execute("PRAGMA user_version").fetchone()[0] == version
            ):  # otherwise another process has migrated the file
                MIGRATIONS[version](connection, role)
                connection.execute(f"PRAGMA user_version = {version + 1}")
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        version = connection.execute("PRAGMA user_version").fetchone()[0]


def ledger_error(error: Exception, damaged: str, path: Path | None = None) -> ConsiliumError:
    """Return the error that explains a failure of SQLite: a full disk, a file that cannot be opened, or damage.

    A full disk does not count as damage, because everything committed is intact.

    Args:
        error: SQLite's error.
        damaged: The message if the file itself is damaged.
        path: The ledger's file; None if the caller does not know it.

    Returns:
        The error, for the caller to raise.
    """
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # extended codes name the call that failed
    if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        what = "the disk is full" if code == sqlite3.SQLITE_FULL else "the disk is full or failing"
        where = "file" if path is None else path
        return StorageFailed(
            f"the ledger {where} cannot be read or written: {what} ({error}); nothing was charged; "
            "to fix: free space on the ledger's disk (`df`); if there is space, check the system's log for disk errors"
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return InvalidInput("another process holds the ledger's lock", value=str(error), remedy=LOCKED_REMEDY)
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH):
        remedy = (
            "let this user write to the ledger's file and folder, and check that the disk is not full and its file "
            "system not read-only"
        )
        return InvalidInput("ledger file cannot be opened", value=str(error), remedy=remedy)
    return LedgerCorrupt(f"{damaged} ({error})")


@contextmanager
def appearing(path: Path, *, what: str) -> Iterator[Path]:
    """Create a new file (mode 0600) as a draft, and give it its name only if the context ends without an error.

    Args:
        path: Name of the new file.
        what: Name of the file in the error.

    Returns:
        A context manager that gives the draft's path.

    Raises:
        InvalidInput: If a file of this name appeared meanwhile.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        yield draft
        name_new(draft, path)
    except FileExistsError as error:
        raise InvalidInput(what, value=str(path), limit="a new file") from error
    finally:
        for suffix in ("", "-wal", "-shm"):
            Path(f"{draft}{suffix}").unlink(missing_ok=True)
    sync_directory(path.parent)


def check_one_name(path: Path) -> None:
    """Refuse a ledger file that has a second name (a hard link), such as a snapshot made with ``cp -l``.

    SQLite keeps a write-ahead log beside each name, so two processes would not see each other's rows. A draft that a
    killed process left is not counted.

    Args:
        path: The file; nothing is checked if it does not exist.

    Raises:
        InvalidInput: If it has a second name.
    """
    if not path.is_file():
        return
    drafts = 0  # counted before the names, because a draft may be deleted at any moment
    for draft in path.parent.glob(f".{path.name}.*.new"):
        with suppress(FileNotFoundError):
            drafts += draft.samefile(path)
    if path.stat().st_nlink > 1 + drafts:
        name, copy = shlex.quote(str(path)), shlex.quote(f"{path}.copy")
        raise InvalidInput(
            "ledger file that is also stored under another path (a hard link)",
            value=str(path),
            limit="a ledger file with one path, because SQLite keeps a separate log for each path",
            remedy="stop every process that uses the file, then replace this path with a copy of its own: "
            f"`cp -p {name} {copy} && mv {copy} {name}`",
        )


def connect(path: Path, *, read_only: bool, as_it_lies: bool = False) -> sqlite3.Connection:
    """Open a ledger's database. A writer uses WAL and synchronous=FULL; a reader writes nothing.

    Args:
        path: The file.
        read_only: True for a reader.
        as_it_lies: True to read a file that no process has open, without creating lock files beside it.

    Returns:
        The connection.

    Raises:
        InvalidInput: If the file does not exist or cannot be opened, or SQLite is too old.
        LedgerCorrupt: If the file is no ledger or is damaged.
    """
    if sqlite3.sqlite_version_info < (3, 37):
        raise InvalidInput(
            "version of the SQLite library",
            value=sqlite3.sqlite_version,
            limit="3.37 or newer",
            remedy="use a Python that is built with a newer SQLite",
        )
    if not path.is_file():
        raise InvalidInput(
            "ledger file does not exist",
            value=str(path),
            remedy="give the path of the ledger's file, NAME.sqlite; a study that shares another study's ledger needs "
            'its file ledger.json, {"directory": "../OTHER"}, with the path from this study to that one',
        )
    # A WAL reader needs a shared-memory file, which an unwritable folder cannot hold. Without a WAL nothing can change.
    unwritable = not os.access(path.parent, os.W_OK) and not Path(f"{path}-wal").exists()
    mode = "mode=ro" if read_only else "mode=rw"
    uri = f"{path.absolute().as_uri()}?{mode}{'&immutable=1' if read_only and (unwritable or as_it_lies) else ''}"
    try:
        connection = sqlite3.connect(
            uri, uri=True, isolation_level=None, timeout=BUSY_TIMEOUT_S, check_same_thread=False
        )
    except sqlite3.OperationalError as error:
        remedy = "let this user read the ledger's file and write to its folder"
        raise InvalidInput("ledger file cannot be opened", value=f"{path} ({error})", remedy=remedy) from error
    try:
        if read_only:
            connection.execute("PRAGMA query_only = ON")
            if not as_it_lies and _no_room(connection, path):
                connection.close()
                return connect(path, read_only=True, as_it_lies=True)
        else:
            mode_now = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode_now != "wal":
                raise InvalidInput(
                    "journal mode of the ledger's SQLite file",
                    value=mode_now,
                    limit="wal, which SQLite cannot use on a network share",
                    remedy="move the ledger to a local disk",
                )
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")  # deleted content is overwritten
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA trusted_schema = OFF")
    except (sqlite3.DatabaseError, UnicodeError) as error:
        connection.close()
        raise ledger_error(error, f"{path} is not a ledger or is damaged", path) from error
    except BaseException:
        connection.close()
        raise
    return connection


def _no_room(connection: sqlite3.Connection, path: Path) -> bool:
    """Return whether a full disk keeps this connection from reading a ledger whose own file is complete.

    The first read of a ledger that no process has open creates a shared-memory file, for which there is no room. The
    ledger's own file is complete if the write-ahead log is empty or absent.
    """
    try:
        connection.execute("PRAGMA schema_version").fetchone()
    except sqlite3.DatabaseError as error:
        log = Path(f"{path}-wal")
        full = getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
        return full and not (log.exists() and log.stat().st_size)
    return False
