"""Reads the ledger row by row as it grows, and keeps the totals and histories that the pages show.

The read model calls it. The ledger is open for reading only, and only during a pass. Each row is checked against the
hash chain and the ledger's rules before it counts. If no run has the ledger open, SQLite creates no file beside it.

- An invalid row ends the pass and is reported as :attr:`LedgerFold.problem`; the rows before it still count.
- If a row that was read before is gone, the ledger is read again from its start. :attr:`LedgerFold.cut` reports this
  until the process ends.
- The server keeps a small file beside the ledger, the standing file, which names the newest row
  (:mod:`common.ledger.rollback_guard`). If the ledger lacks this row, it is an older copy, and
  :attr:`LedgerFold.forgotten` reports this. :attr:`LedgerFold.unread` reports why the standing file cannot be read.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from pathlib import Path

from common.canonical import parse_rational
from common.document import Document
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt
from common.ledger.charges import ReleaseRecord
from common.ledger.records import LostRecord, RecoveredRecord, RefusalRecord, ReuseRecord, StudyRecord
from common.ledger.rollback_guard import ServerStanding, kept_standing, lies_with_its_key, standing_path
from common.ledger.rows import Position, Row, check_link
from common.ledger.sealed_records import AnswerRecord
from common.ledger.server_state import ServerBooks
from common.ledger.sqlite_file import connect

ROWS_A_STEP = 250
STANDING_MISSING = "its standing file is missing, so an older copy could not be recognised"


def open_ledger(path: Path) -> sqlite3.Connection:
    """Open a ledger for a short time, in SQLite's read-only mode with ``query_only``.

    If no writer has the file open, no lock files are created beside it.

    Args:
        path: The ledger's file.

    Returns:
        The connection, which the caller closes.

    Raises:
        LedgerCorrupt: If the file is no ledger of this version.
    """
    return connect(path, read_only=True, as_it_lies=not Path(f"{path}-wal").exists())


@dataclass(frozen=True, slots=True)
class SpendingPoint:
    """A row in which the study spent budget.

    Attributes:
        time: Time of the row.
        charges: Number of the study's charges up to this row.
        worst: Largest Σμ² that the study has spent on one patient pool up to this row.
    """

    time: str
    charges: int
    worst: Fraction


@dataclass(slots=True)
class BatchSeen:
    """A batch of queries according to the ledger.

    Attributes:
        time: Time of the batch's newest answer; of its first charge before there is an answer.
        first_row: Number of the batch's first row.
        last_row: Number of the row with its newest answer.
        last_charge: Number of the row with its last charge. A site has all receipts of the batch if it has a receipt
            for this row or a later one.
        answers: Number of its answers.
        roster: Names of the sites that took part.
        voters: Number of voters.
    """

    time: str
    first_row: int
    last_row: int
    last_charge: int
    answers: int
    roster: tuple[str, ...]
    voters: int


@dataclass(frozen=True, slots=True)
class RefusalSeen:
    """A row that records refused queries; a refusal costs nothing.

    Attributes:
        row: Number of the row.
        time: Time of the row.
        queries: Number of refused queries.
        reason: Reason, as a word of the ledger.
        pool: Patient pool whose budget does not cover the queries; empty if the reason is another one.
        requested: Σμ² requested; None if the row states none.
        remaining: Σμ² left; None if the row states none.
    """

    row: int
    time: str
    queries: int
    reason: str
    pool: str
    requested: float | None
    remaining: float | None


@dataclass(slots=True)
class History:
    """The short history of one study of the ledger.

    Attributes:
        consent: The study's configuration that the hospitals consented to, as stored in its row.
        registered: Time at which it was registered.
        last: Time of its newest release; None before the first release.
        refused: Number of its refused queries.
        sites: Names of the sites that took part in its releases.
    """

    consent: Mapping[str, object]
    registered: str
    last: str | None = None
    refused: int = 0
    sites: set[str] = field(default_factory=set)


class LedgerFold:
    """The state of a server ledger as far as it was read: totals, one study's details, every study's short history.

    The ledger's standing file names the ledger's newest row, so a comparison with it shows an older copy of the ledger.

    Args:
        path: The ledger's file.
        study_id: Id of the study.

    Attributes:
        books: The ledger's totals.
        points: The rows in which the study spent budget.
        batches: The study's batches by id.
        refusals: The rows that record the study's refused queries.
        histories: Every study of the ledger by id.
        problem: Reason why the reading stopped before the ledger's end; None if the end was reached.
        cut: Message that a row which was read before is gone; None if all these rows are still there.
        forgotten: Message that the ledger lacks a row that the standing file names, or that the standing file is
            missing; None if neither is the case.
        unread: Reason why the standing file cannot be read; None if it could be read or does not exist.
    """

    def __init__(self, path: Path, *, study_id: str) -> None:
        self._path, self._study = path, study_id
        self.cut: str | None = None
        self._clear()

    def _clear(self) -> None:
        self.books = ServerBooks()
        self.last: Row | None = None
        self.points: list[SpendingPoint] = []
        self.batches: dict[str, BatchSeen] = {}
        self.refusals: list[RefusalSeen] = []
        self.histories: dict[str, History] = {}
        self.problem: str | None = None
        self.forgotten: str | None = None
        self.unread: str | None = None
        self.rows_in_file = 0
        self._stamp: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows read so far."""
        return self.last.seq if self.last else 0

    @property
    def complete(self) -> bool:
        """True if every row that the file had at the last pass has been read."""
        return self.rows >= self.rows_in_file

    def steps(self, lock: threading.RLock) -> Iterator[bool]:
        """Read new rows, a few hundred at a time.

        Args:
            lock: Held while the state changes.

        Yields:
            Whether anything changed.
        """
        stamp = (*file_stamp(self._path), *file_stamp(standing_path(self._path)))
        if stamp == self._stamp and self.complete:
            return
        connection = None
        try:
            standing, unread = _standing(self._path)  # before the rows: a charge writes its row, then the standing
            connection = open_ledger(self._path)
            holds = partial(_contains, connection)
            if self.last is not None and not holds(Position(self.last.seq, self.last.hash)):
                with lock:
                    self.cut = self.cut or f"row {self.last.seq:,}, read at {self.last.time_utc}, is no longer in it"
                    self._clear()
            self.rows_in_file = int(connection.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0])
            while rows := self._next_rows(connection):
                with lock:
                    for row in rows:
                        self._enter(row)
                yield True
            forgotten = None
            if standing is None and unread is None and self._had_standing():
                forgotten = STANDING_MISSING
            if standing is not None:
                own, kept = self.books.key.ledger_id, self.books.kept
                forgotten = standing.against(
                    ledger_id=own,
                    rows=self.rows,
                    covers=lambda position: position in kept or holds(position),
                    this="the file",
                    beside="beside it",
                )
            with lock:
                before = self.problem, self.forgotten, self.unread
                self.problem, self.forgotten, self.unread, self._stamp = None, forgotten, unread, stamp
            yield before != (None, forgotten, unread)
        except (ConsiliumError, sqlite3.Error) as error:
            yield self._note_problem(str(error), lock)
        except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
            yield self._note_problem(
                f"row {self.rows + 1} has a content that no ledger writes ({type(error).__name__})", lock
            )
        finally:
            if connection is not None:
                connection.close()

    def _had_standing(self) -> bool:
        """Return whether the ledger must have had a standing file, the file that names its newest row.

        The server writes a standing file from the ledger's first row on. Earlier versions wrote it from the first
        charge on; a ledger of such a version without a signing key beside it counts as a copy for reading, which needs
        no standing file.
        """
        charged = bool(self.books.all_spent() or self.books.all_spent_in())
        return (self.books.has_standing and self.rows > 1) or (charged and lies_with_its_key(self._path))

    def _note_problem(self, problem: str, lock: threading.RLock) -> bool:
        with lock:
            changed, self.problem = self.problem != problem, problem
        return changed

    def _next_rows(self, connection: sqlite3.Connection) -> list[Row]:
        sql = "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE seq > ? ORDER BY seq LIMIT ?"
        return [Row(*values) for values in connection.execute(sql, (self.rows, ROWS_A_STEP))]

    def _enter(self, row: Row) -> None:
        check_link("server", row, self.last)
        record = self.books.enter(row)
        self.last = row
        self._note(row, record)
        self._spend(row, record)
        if isinstance(record, ReleaseRecord) and record.study_id == self._study:
            self._release(row, record)
        elif isinstance(record, AnswerRecord) and self.books.releases[record.query_id].study_id == self._study:
            self._answered(row, self.books.releases[record.query_id].batch_id)
        elif isinstance(record, RefusalRecord) and record.study_id == self._study:
            self.refusals.append(
                RefusalSeen(
                    row=row.seq,
                    time=row.time_utc,
                    queries=len(record.query_ids),
                    reason=record.reason,
                    pool=record.pool,
                    requested=float(parse_rational(record.requested)) if record.requested else None,
                    remaining=float(parse_rational(record.remaining)) if record.remaining else None,
                )
            )

    def _note(self, row: Row, record: Document) -> None:
        """Update the history of the study that a row names."""
        match record:
            case StudyRecord():
                self.histories[record.study_id] = History(record.study, row.time_utc)
            case ReleaseRecord():
                history = self.histories[record.study_id]
                history.sites.update(entry.site for entry in self.books.releases.at(row.seq).roster)
                history.last = row.time_utc
            case RefusalRecord():
                self.histories[record.study_id].refused += len(record.query_ids)

    def _spend(self, row: Row, record: Document) -> None:
        """Add a point to the ε curve if this study spends budget in the row."""
        charges, pools = self._charged(row, record)
        sums = [self.books.spent_in(self._study, pool).mu_squared for pool in pools]
        if not charges and not any(sums):
            return
        before = self.points[-1] if self.points else SpendingPoint("", 0, Fraction(0))
        worst = max(before.worst, *sums)
        self.points.append(SpendingPoint(row.time_utc, before.charges + charges, worst))

    def _charged(self, row: Row, record: Document) -> tuple[int, Iterable[str]]:
        """Return the number of this study's charges in a row, and the pools that pay for them."""
        books, study = self.books, self._study
        match record:
            case ReleaseRecord(study_id=whose) if whose == study:
                return 1, (entry.pool for entry in books.releases.at(row.seq).roster)
            case RecoveredRecord(release=release) if release.study_id == study:
                return 1, (entry.pool for entry in release.roster_in(books.named))
            case ReuseRecord(study_id=whose) if whose == study:
                rosters = [books.releases[query_id].roster for query_id in record.query_ids]
                return len(rosters), {entry.pool for roster in rosters for entry in roster}
            case LostRecord() if study in record.studies:
                spends = record.studies[study]
                return max((spend.releases for spend in spends.values()), default=0), spends
        return 0, ()

    def _release(self, row: Row, record: ReleaseRecord) -> None:
        new = BatchSeen(row.time_utc, row.seq, row.seq, row.seq, 0, (), record.voters)
        batch = self.batches.setdefault(record.batch_id, new)
        batch.last_charge, batch.voters = row.seq, record.voters
        batch.roster = tuple(entry.site for entry in self.books.releases.at(row.seq).roster)
        if record.draw is None:  # in a sealed study the answer has a row of its own
            self._answered(row, record.batch_id)

    def _answered(self, row: Row, batch_id: str) -> None:
        batch = self.batches[batch_id]
        batch.answers, batch.last_row, batch.time = batch.answers + 1, row.seq, row.time_utc


def _standing(ledger: Path) -> tuple[ServerStanding | None, str | None]:
    """Read the standing file of a ledger, which names the ledger's newest row.

    Returns:
        Its content, or None if there is no such file or it cannot be read; and the reason if it cannot be read.
    """
    try:
        path = kept_standing(ledger)
        return None if path is None else ServerStanding.load(path), None
    except (LedgerCorrupt, InvalidInput) as error:
        return None, str(error)


def _contains(connection: sqlite3.Connection, position: Position) -> bool:
    found = connection.execute("SELECT hash FROM rows WHERE seq = ?", (position.seq,)).fetchone()
    return found is not None and found[0] == position.hash


def file_stamp(path: Path) -> tuple[int, ...]:
    """Return numbers that differ after a change of a file or of its write-ahead log.

    Args:
        path: The file.

    Returns:
        Inode, size in bytes and modification time in ns, of the file and of its log; zeros for a missing file.
    """
    found: list[int] = []
    for name in (path, Path(f"{path}-wal")):
        try:
            stat = name.stat()
            found += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
        except OSError:
            found += [0, 0, 0]
    return tuple(found)
