"""The read model: a study's ledger and event log folded into facts, row by row as they appear.

The ledger is opened for reading, for the length of one pass, and every row is checked against the chain and the rules
before it counts. Nothing is written beside it where no run has it open. A row that does not hold stops the fold and is
told as the ledger's problem; what was folded before stands. The event log is followed from where the last pass ended.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

from common.config import Study, load_study
from common.errors import ConsiliumError, InvalidInput
from common.events import EVENT_SCHEMA
from common.ledger.chain import Row, check_link, connect
from common.ledger.records import RefusalRecord, ReleaseRecord
from common.ledger.server_state import Books
from server.study.workspace import Site, Workspace

ROWS_A_STEP = 250
RECENT = 60
ROUTINE = frozenset({"stage-progress", "student-step", "receipts-held", "label-decoded"})
"""Kinds of event that a list of what happened leaves out, beside accepted offers."""

STAGES = ("collect", "decode", "student", "controls", "export")


def open_ledger(path: Path) -> sqlite3.Connection:
    """A connection that cannot write: SQLite's read-only mode with ``query_only``, for a short while.

    Where no writer has the file open it is read as it lies, without the lock files a reader would leave beside it.
    """
    return connect(path, read_only=True, as_it_lies=not Path(f"{path}-wal").exists())


@dataclass(frozen=True, slots=True)
class ReleasePoint:
    """One release of the study: its row, time, batch and Σμ² of the pool it cost most, after it."""

    seq: int
    time: str
    batch: str
    worst: Fraction


@dataclass(slots=True)
class Batch:
    """A batch as the ledger shows it: rows, roster and voters of its releases."""

    id: str
    time: str
    first_row: int
    last_row: int
    answers: int
    roster: tuple[str, ...]
    voters: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal row: what was not released, why, which pool had how much Σμ² left of how much requested."""

    seq: int
    time: str
    batch: str
    queries: int
    reason: str
    pool: str
    requested: str
    remaining: str


class LedgerFold:
    """A server ledger's rows folded into the books and this study's history."""

    def __init__(self, path: Path, *, study_id: str) -> None:
        self._path, self._study = path, study_id
        self._clear()

    def _clear(self) -> None:
        self.books = Books()
        self.last: Row | None = None
        self.kinds: dict[str, int] = {}
        self.points: list[ReleasePoint] = []
        self.batches: dict[str, Batch] = {}
        self.refusals: list[Refusal] = []
        self.problem: str | None = None
        self.rows_in_file = 0
        self._stamp: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        return self.last.seq if self.last else 0

    @property
    def complete(self) -> bool:
        """Whether everything the file held at the last look has been folded."""
        return self.rows >= self.rows_in_file

    def steps(self, lock: threading.RLock) -> Iterator[bool]:
        """Fold what is new, a few hundred rows at a time under ``lock``; yields whether anything changed."""
        stamp = _stamp(self._path)
        if stamp == self._stamp and self.complete:
            return
        connection = None
        try:
            connection = open_ledger(self._path)
            if self._rewritten(connection):
                with lock:
                    self._clear()
            self.rows_in_file = int(connection.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0])
            while rows := self._next_rows(connection):
                with lock:
                    for row in rows:
                        self._enter(row)
                yield True
            with lock:
                changed, self.problem, self._stamp = self.problem is not None, None, stamp
            yield changed
        except (ConsiliumError, sqlite3.Error) as error:
            with lock:
                changed, self.problem = self.problem != str(error), str(error)
            yield changed
        finally:
            if connection is not None:
                connection.close()

    def _rewritten(self, connection: sqlite3.Connection) -> bool:
        if self.last is None:
            return False
        found = connection.execute("SELECT hash FROM rows WHERE seq = ?", (self.last.seq,)).fetchone()
        return found is None or found[0] != self.last.hash

    def _next_rows(self, connection: sqlite3.Connection) -> list[Row]:
        sql = "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE seq > ? ORDER BY seq LIMIT ?"
        return [Row(*values) for values in connection.execute(sql, (self.rows, ROWS_A_STEP))]

    def _enter(self, row: Row) -> None:
        check_link("server", row, self.last)
        record = self.books.enter(row)
        self.last = row
        self.kinds[row.kind] = self.kinds.get(row.kind, 0) + 1
        if isinstance(record, ReleaseRecord) and record.study_id == self._study:
            worst = max(self.books.spent_in(self._study, entry.pool).mu_squared for entry in record.roster)
            if self.points:
                worst = max(worst, self.points[-1].worst)
            self.points.append(ReleasePoint(row.seq, row.time_utc, record.batch_id, worst))
            batch = self.batches.get(record.batch_id)
            if batch is None:
                roster = tuple(entry.site for entry in record.roster)
                self.batches[record.batch_id] = Batch(
                    record.batch_id, row.time_utc, row.seq, row.seq, 1, roster, record.voters
                )
            else:
                batch.answers, batch.last_row, batch.time = batch.answers + 1, row.seq, row.time_utc
        elif isinstance(record, RefusalRecord) and record.study_id == self._study:
            self.refusals.append(
                Refusal(
                    seq=row.seq,
                    time=row.time_utc,
                    batch=record.batch_id,
                    queries=len(record.query_ids),
                    reason=record.reason,
                    pool=record.pool,
                    requested=record.requested,
                    remaining=record.remaining,
                )
            )


@dataclass(slots=True)
class StageState:
    """Where a stage of the newest run stands; ``base`` is what was done when it began."""

    total: int = 0
    done: int = 0
    base: int | None = None
    started: str | None = None
    finished: bool = False
    seconds: float | None = None


@dataclass(slots=True)
class SiteState:
    """What the event log says about one site."""

    last_seen: str | None = None
    offer: str | None = None
    offered: str | None = None
    accepted: int = 0
    declined: int = 0
    codes: int = 0
    refused: int = 0
    missing: int = 0
    missing_in_a_row: int = 0
    last_problem: str | None = None
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=500))
    receipts_row: int = 0
    receipts_time: str | None = None
    receipts_problem: str | None = None


@dataclass(slots=True)
class BatchState:
    """A batch as the event log shows it: who was offered and accepted, who answered when, what became of it."""

    id: str
    time: str
    accepted: dict[str, str] = field(default_factory=dict)
    replies: list[tuple[str, float]] = field(default_factory=list)
    attempts: int = 0
    released: int = 0
    refused: int = 0
    quorum_missed: bool = False
    needed: int | None = None


@dataclass(slots=True)
class RunState:
    """The newest run: when it began, and how it ended if it did."""

    id: str
    started: str
    resumed: bool
    ended: str | None = None
    outcome: str | None = None
    reason: str = ""
    seconds: float | None = None


class EventFold:
    """The event log folded into the state of the newest run, of every site and of the student."""

    def __init__(self, path: Path, *, study_id: str) -> None:
        self._path, self._study = path, study_id
        self._clear()

    def _clear(self) -> None:
        self._offset, self._inode = 0, 0
        self.count = 0
        self.last_time: str | None = None
        self.run: RunState | None = None
        self.stages: dict[str, StageState] = {}
        self.sites: dict[str, SiteState] = {}
        self.batches: dict[str, BatchState] = {}
        self.losses: list[tuple[int, float]] = []
        self.loss_total = 0
        self.student: tuple[str, str, float] | None = None
        self.controls: dict[str, tuple[str, str]] = {}
        self.bundle: tuple[str, str] | None = None
        self.labels: dict[str, str] = {}
        self.quorum_missed: dict[str, Any] | None = None
        self.implausible: tuple[str, ...] = ()
        self.budget_refused: dict[str, Any] | None = None
        self.recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.outcomes: dict[str, int] = {}

    def step(self, lock: threading.RLock) -> bool:
        """Fold whole lines that were appended since the last call; whether there were any."""
        try:
            stat = self._path.stat()
        except FileNotFoundError:
            return False
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            with lock:
                self._clear()
                self._inode = stat.st_ino
        if stat.st_size <= self._offset:
            return False
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            content = stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        with lock:
            self._offset += len(whole)
            for line in whole.splitlines():
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # torn by a crash
                if isinstance(event, dict) and event.get("schema") == EVENT_SCHEMA:
                    self._enter(event)
        return bool(whole)

    def site(self, name: str) -> SiteState:
        return self.sites.setdefault(name, SiteState())

    def _batch(self, event: dict[str, Any]) -> BatchState:
        return self.batches.setdefault(event["batch"], BatchState(event["batch"], event["time"]))

    def _enter(self, event: dict[str, Any]) -> None:
        kind, time = event["event"], event["time"]
        self.count += 1
        self.last_time = time
        if kind not in ROUTINE and not event.get("accepted"):
            self.recent.appendleft(event)
        match kind:
            case "run-started":
                self.run = RunState(event["run"], time, event["resumed"])
                self.stages, self.quorum_missed, self.budget_refused = {}, None, None
            case "run-finished" | "run-failed" if self.run is not None:
                self.run.ended, self.run.outcome = time, kind.removeprefix("run-")
                self.run.reason, self.run.seconds = event.get("reason", ""), event.get("seconds")
            case "stop-requested" if self.run is not None:
                self.run.reason = "stop requested"
            case "stage-started":
                self.stages[event["stage"]] = StageState(total=event["total"], started=time)
                if event["stage"] == "student":
                    self.losses = []
            case "stage-progress":
                self._progress(event["stage"], event["done"], event["total"], time)
            case "stage-finished":
                stage = self.stages.setdefault(event["stage"], StageState())
                stage.finished, stage.seconds = True, event["seconds"]
            case "student-step":
                self._progress("student", event["step"], event["total"], time)
                self.losses.append((event["step"], event["loss"]))
                self.loss_total = event["total"]
            case "student-trained":
                self.student = (event["weights"], time, event["seconds"])
            case "control-trained":
                self.controls[event["name"]] = (event["weights"], time)
            case "bundle-exported":
                self.bundle = (event["sha256"], time)
            case "label-decoded":
                self.labels[event["volume"]] = event["query"]
                stage = self.stages.get("decode", StageState())
                stage.done = min(stage.done + 1, stage.total)
            case "answers-weighed":
                self.implausible = tuple(event["warnings"])
            case "quorum-missed":
                self.quorum_missed = event
                batch = self._batch(event)
                batch.quorum_missed, batch.needed = True, event["needed"]
            case "budget-refused":
                self.budget_refused = event
                self._count("refused", len(event["queries"]))
                if event["batch"]:
                    self._batch(event).refused = len(event["queries"])
            case "released":
                batch = self._batch(event)
                batch.released += len(event["queries"])
                self._count("released", len(event["queries"]))
            case "batch-dispatched":
                self._batch(event).attempts = event["attempt"]
            case _ if "site" in event:
                self._site_event(kind, time, event)

    def _count(self, outcome: str, queries: int) -> None:
        self.outcomes[outcome] = self.outcomes.get(outcome, 0) + queries

    def _progress(self, name: str, done: int, total: int, time: str) -> None:
        stage = self.stages.setdefault(name, StageState(started=time))
        if stage.base is None:
            stage.base = done if name == "collect" else 0
        stage.done, stage.total = done, total

    def _site_event(self, kind: str, time: str, event: dict[str, Any]) -> None:
        site = self.site(event["site"])
        match kind:
            case "offer-answered":
                site.offer, site.offered = event["reason"], time
                self._batch(event).accepted[event["site"]] = event["reason"]
                if event["accepted"]:
                    site.accepted += 1
                else:
                    site.declined += 1
                if event["reason"] not in ("offline", "deadline", "budget"):
                    site.last_seen = time
            case "reply-received":
                site.last_seen, site.missing_in_a_row = time, 0
                site.codes += event["codes"]
                site.latencies.append(event["seconds"])
                self._batch(event).replies.append((event["site"], event["seconds"]))
            case "reply-missing":
                site.missing += 1
                site.missing_in_a_row += 1
                site.last_problem = event["reason"]
            case "code-refused":
                site.refused += 1
                site.last_problem = event["reason"]
            case "receipts-held":
                site.last_seen = site.receipts_time = time
                site.receipts_row, site.receipts_problem = event["ledger_row"], None
            case "receipts-missing":
                site.receipts_problem = event["reason"]


class Follower:
    """Both folds of one study, kept up to date by a thread of its own; readers take ``lock`` while they look.

    ``version`` grows with every change. The study's small files are read anew when they change.
    """

    def __init__(self, workspace: Workspace, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.workspace, self._clock = workspace, clock
        self.study: Study = load_study(workspace.study_file)
        self.lock = threading.RLock()
        self.ledger = LedgerFold(workspace.ledger_file, study_id=self.study.id)
        self.events = EventFold(workspace.events_file, study_id=self.study.id)
        self.version = 0
        self.looked: float | None = None
        self._sites: tuple[Site, ...] = ()
        self._small: tuple[Any, ...] = ()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """Registered sites; none before the first is registered."""
        return self._sites

    def poll(self) -> bool:
        """Look once, to the end of both files; whether anything changed."""
        changed = self._read_small()
        if self.events.step(self.lock):
            self.version += 1
            changed = True
        for stepped in self.ledger.steps(self.lock):
            if stepped:
                self.version += 1
                changed = True
            if self.looked is not None:
                self.looked = self._clock()
            if self._stopping.wait(0.0005):  # let requests in between the steps of a long fold
                return changed
        if changed:
            self.version += 1
        return changed

    def start(self, *, every_s: float, after: Callable[[], object] = lambda: None) -> None:
        """Poll in a daemon thread until :meth:`stop`; ``after`` is called in it after every look that found news."""

        def follow() -> None:
            pause = 0.0
            while not self._stopping.wait(pause):
                if self.poll():
                    after()
                self.looked, pause = self._clock(), every_s

        self._thread = threading.Thread(target=follow, name="follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _read_small(self) -> bool:
        stamp = tuple(_stamp(self.workspace.root / name) for name in ("sites.json", "public.json", "codec.json"))
        if stamp == self._small:
            return False
        try:
            sites = self.workspace.sites() if (self.workspace.root / "sites.json").exists() else ()
        except InvalidInput:
            return False  # caught while it was being replaced; the next look finds it whole
        with self.lock:
            self._small, self._sites = stamp, sites
        return True


def _stamp(path: Path) -> tuple[int, ...]:
    """What changes when a file, or the write-ahead log beside it, does."""
    found: list[int] = []
    for name in (path, Path(f"{path}-wal")):
        try:
            stat = name.stat()
            found += [stat.st_ino, stat.st_size, stat.st_mtime_ns]
        except OSError:
            found += [0, 0, 0]
    return tuple(found)
