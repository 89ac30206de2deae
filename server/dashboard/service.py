"""What pages, API and metrics share: the read model, the decisions, the jobs, and views computed once a version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from server.dashboard import views
from server.dashboard.follow import Follower
from server.dashboard.jobs import Job, work
from server.decisions import DecisionStore

T = TypeVar("T")
Certifier = Callable[[Path, Path], Sequence[str]]
"""The command that writes the certificate of a study's directory into a folder."""

FRESH_S = 5.0


class Service:
    """One study's views and jobs."""

    def __init__(
        self,
        *,
        follower: Follower,
        state: Path,
        decisions: DecisionStore,
        certifier: Certifier | None,
        now: Callable[[], datetime],
    ) -> None:
        self.follower, self.state, self.decisions, self.now = follower, state, decisions, now
        root = follower.workspace.root.absolute()
        self.pictures_dir = state / "pictures"
        self.certificate_dir = state / "certificate"
        self.verify = Job(state / "verify.json", lambda: work("verify", str(root / "ledger.sqlite")), now=now)
        self.pictures = Job(
            state / "pictures.json", lambda: work("pictures", str(root), str(self.pictures_dir.absolute())), now=now
        )
        self.certificate: Job | None = None
        if certifier is not None:
            self.certificate = Job(
                state / "certificate.txt", lambda: certifier(root, self.certificate_dir.absolute()), now=now
            )
        self._views: dict[Hashable, tuple[tuple[int, int], Any]] = {}
        self._making = threading.Lock()

    def view(self, key: Hashable, make: Callable[[], T]) -> T:
        """``make()`` under the read model's lock, once for each version and every few seconds."""
        stamp = (self.follower.version, int(self.now().timestamp() // FRESH_S))
        known = self._views.get(key)
        if known is None or known[0] != stamp:
            with self._making, self.follower.lock:
                known = self._views.get(key)
                if known is None or known[0] != stamp:
                    known = (stamp, make())
                    self._views[key] = known
        value: T = known[1]
        return value

    def overview(self) -> views.Overview:
        return self.view("overview", lambda: views.overview(self.follower, now=self.now()))

    def study(self) -> views.StudyPage:
        return self.view("study", lambda: views.study_page(self.follower))

    def close(self) -> None:
        """End jobs that run."""
        for job in (self.verify, self.pictures, self.certificate):
            if job is not None:
                job.stop()
