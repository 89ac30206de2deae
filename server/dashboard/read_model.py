"""The read model: a study's ledger and event log folded into facts, and the thread that keeps them up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.config import Study, load_study
from common.errors import InvalidInput
from server.dashboard.event_fold import EventFold
from server.dashboard.ledger_fold import LedgerFold, file_stamp
from server.study.workspace import Site, Workspace


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
        self._small: tuple[tuple[int, ...], ...] = ()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def sites(self) -> tuple[Site, ...]:
        """Registered sites; none before the first is registered."""
        return self._sites

    @property
    def silent_s(self) -> float:
        """Seconds since the last look; 0 before the first."""
        return 0.0 if self.looked is None else self._clock() - self.looked

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
        stamp = tuple(file_stamp(self.workspace.root / name) for name in ("sites.json", "public.json", "codec.json"))
        if stamp == self._small:
            return False
        try:
            sites = self.workspace.sites() if (self.workspace.root / "sites.json").exists() else ()
        except InvalidInput:
            return False  # caught while it was being replaced; the next look finds it whole
        with self.lock:
            self._small, self._sites = stamp, sites
        return True
