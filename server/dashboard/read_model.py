"""Keeps the state that pages show up to date: reads a study's ledger and event log in a thread of its own.

The service owns one :class:`Follower`, and the views read its state. If a file cannot be read, the follower reports a
problem or a doubt and reads the file again at the next pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from common.config import Study, load_study
from common.errors import InvalidInput
from common.measured_gain import MeasuredGain
from common.study_facts import StudyFacts, study_facts
from server.dashboard.event_fold import EventFold
from server.dashboard.ledger_fold import STANDING_MISSING, LedgerFold, file_stamp
from server.study.pools import gone_pools
from server.study.read_facts import measured_files, read_measured
from server.study.run_state import lives
from server.study.workspace import LEFT, LeftSite, Site, Workspace

logger = logging.getLogger(__name__)

SILENT_S = 60.0
"""Seconds without a completed pass after which the study counts as not being followed."""

_Seen = tuple[int, str | None, MeasuredGain | None, tuple[str, ...], frozenset[str]]


class Follower:
    """The state of one study, kept up to date by a thread. Readers hold ``lock`` while they read.

    Args:
        workspace: The study's directory.
        clock: Monotonic clock in seconds.

    Attributes:
        version: Number that grows with each change.
        looked: Time of the last pass over the files, by ``clock``; None before the first pass.
        nobody_runs: True if no process runs this study. A run without a logged end has then died.
        problem: Error of the last pass; None if it succeeded.
        sites: The registered sites, including revoked ones.
    """

    def __init__(self, workspace: Workspace, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.workspace, self._clock = workspace, clock
        self.study: Study = load_study(workspace.study_file)
        self.lock = threading.RLock()
        self.ledger = LedgerFold(workspace.ledger_file, study_id=self.study.id)
        self.events = EventFold(workspace.events_file)
        self.version = 0
        self.looked: float | None = None
        self.nobody_runs = False
        self.problem: str | None = None
        self.sites: tuple[Site, ...] = ()
        self._revoked: tuple[Site, ...] = ()
        self._left: tuple[LeftSite, ...] = ()
        self._small: tuple[tuple[int, ...], ...] = ()
        self._gain: MeasuredGain | None = None
        self._facts: tuple[_Seen, StudyFacts] | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def admitted(self) -> tuple[Site, ...]:
        """The registered sites that are not revoked."""
        return tuple(site for site in self.sites if site not in self._revoked)

    @property
    def doubt(self) -> str | None:
        """Reason why the ledger's figures may be too low, as text; None if they cover the whole ledger."""
        if self.ledger.problem is not None:
            return "the ledger is not valid or cannot be read"
        if self.ledger.cut is not None:
            return "the ledger was cut or replaced"
        if self.ledger.forgotten is not None:
            missing = self.ledger.forgotten == STANDING_MISSING
            return f"the ledger's standing file {'is missing' if missing else 'names a row that the ledger lacks'}"
        if self.ledger.unread is not None:
            return "the ledger's standing file cannot be read"
        if self.problem is not None or self.silent_s > SILENT_S:
            return "the study is not being followed"
        if self.looked is None or not self.ledger.complete:
            return "the ledger is still being read"
        if self.study.id not in self.ledger.books.studies:
            return "the ledger lacks this study: study.toml was changed, or the ledger is an older copy"
        return None

    def facts(self) -> StudyFacts:
        """Return the study's figures, computed from the rows of the ledger that were read so far."""
        asked = tuple(site.pool for site in self.sites)
        revoked = gone_pools(self.ledger.books.pools.values(), revoked=self._revoked, left=self._left)
        seen = self.version, self.doubt, self._gain, asked, revoked
        if self._facts is None or self._facts[0] != seen:
            found = study_facts(
                self.study, self.ledger.books, doubt=seen[1], gain=seen[2], asked=asked, revoked=revoked
            )
            self._facts = seen, found
        return self._facts[1]

    @property
    def silent_s(self) -> float:
        """Seconds since the study's files were last read; 0 before the first time."""
        return 0.0 if self.looked is None else self._clock() - self.looked

    def poll(self) -> bool:
        """Make one pass: read the event log and the ledger to their ends, and small files that changed.

        Returns:
            True if anything changed.
        """
        changed = self._read_small()
        before = lives(self.workspace)
        if self.events.step(self.lock):
            self.version += 1
            changed = True
        died = before is False and lives(self.workspace) is False  # checked twice, in case a run began in between
        changed, self.nobody_runs = changed or died != self.nobody_runs, died
        for stepped in self.ledger.steps(self.lock):
            if stepped:
                self.version += 1
                changed = True
            if self.looked is not None:
                self.looked = self._clock()
            if self._stopping.wait(0.0005):  # lets requests take the lock between two steps
                return changed
        self.looked = self._clock()
        if changed:
            self.version += 1
        return changed

    def start(self, *, every_s: float, after: Callable[[], object] = lambda: None) -> None:
        """Call :meth:`poll` repeatedly in a daemon thread until :meth:`stop`.

        Args:
            every_s: Seconds between two passes.
            after: Called in the thread after each pass that found a change.
        """

        def follow() -> None:
            pause = 0.0
            while not self._stopping.wait(pause):
                pause = every_s
                try:
                    if self.poll():
                        after()
                    problem = None
                except Exception as error:  # report the failed pass, and try again
                    logger.exception("look=failed")
                    problem = type(error).__name__
                if problem != self.problem:
                    self.problem, self.version = problem, self.version + 1

        self._thread = threading.Thread(target=follow, name="follow", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)

    def _read_small(self) -> bool:
        root = self.workspace.root
        small = (
            *(root / "sites.json", root / "public.json", self.workspace.codec_file, self.workspace.nodes_file),
            *(self.workspace.revoked_file, root / LEFT),
            *measured_files(root),
        )
        stamp = tuple(map(file_stamp, small))
        if stamp == self._small:
            return False
        try:
            sites, revoked, left = self.workspace.registered(), self.workspace.revoked(), self.workspace.left()
        except (InvalidInput, OSError):
            return False  # the file is being replaced; the next pass reads it
        measured = read_measured(root, self.study.id)
        with self.lock:
            self._small, self.sites, self._revoked, self._left = stamp, sites, revoked, left
            self._gain = None if measured is None else measured.measured_gain
        return True
