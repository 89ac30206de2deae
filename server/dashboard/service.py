"""What pages, API and metrics share: the read model, the decisions, the jobs, and views computed once a version."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request

from server.dashboard.jobs import Job, work
from server.dashboard.label_files import LabelFiles
from server.dashboard.pictures import Picture
from server.dashboard.planning import Spectra
from server.dashboard.read_model import Follower
from server.dashboard.reports import SiteReport, read_reports
from server.dashboard.views.overview import Overview, overview
from server.dashboard.views.study import NoiseView, StudyPage, noise_view, study_page
from server.postprocess.decisions import DecisionStore

T = TypeVar("T")
Certifier = Callable[[Path, Path], Sequence[str]]
"""The command that writes the certificate of a study's directory into a folder."""

FRESH_S = 5.0
KEPT_VOLUMES = 6


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
        self.verify = Job(
            state / "verify.json", lambda: work("verify", str(follower.workspace.ledger_file.absolute())), now=now
        )
        self.pictures = Job(
            state / "pictures.json", lambda: work("pictures", str(root), str(self.pictures_dir.absolute())), now=now
        )
        self.certificate: Job | None = None
        if certifier is not None:
            self.certificate = Job(
                state / "certificate.txt", lambda: certifier(root, self.certificate_dir.absolute()), now=now
            )
        self.label_files = LabelFiles(follower.workspace)
        self.spectra = Spectra(follower.workspace)
        self._views: dict[Hashable, tuple[tuple[int, int], Any]] = {}
        self._arrays: dict[str, tuple[str, Picture]] = {}
        self._making = threading.Lock()

    @property
    def ledger_file(self) -> Path:
        return self.follower.workspace.ledger_file

    @property
    def ledger_id(self) -> str:
        """The identity of the ledger as far as it was read."""
        return self.follower.ledger.books.key.ledger_id

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

    def overview(self) -> Overview:
        return self.view("overview", lambda: overview(self.follower, now=self.now()))

    def study(self) -> StudyPage:
        return self.view("study", lambda: study_page(self.follower))

    def arrays(self, volume: str, key: str, load: Callable[[], Picture]) -> Picture:
        """A volume's arrays, the last few kept in memory while their picture is the same."""
        known = self._arrays.pop(volume, None)
        if known is None or known[0] != key:
            known = (key, load())
        self._arrays[volume] = known
        while len(self._arrays) > KEPT_VOLUMES:
            self._arrays.pop(next(iter(self._arrays)), None)
        return known[1]

    def noise(self) -> NoiseView | None:
        """None before a codec is fitted, and for one that states no spectrum."""
        spectrum = self.spectra.get()
        return None if spectrum is None else self.view("noise", lambda: noise_view(self.follower, spectrum.stds))

    def reports(self) -> dict[str, SiteReport]:
        return read_reports(self.follower.workspace.root / "site-reports")

    def close(self) -> None:
        """End jobs that run."""
        for job in (self.verify, self.pictures, self.certificate):
            if job is not None:
                job.stop()


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


Here = Annotated[Service, Depends(_service)]
"""The service of the dashboard that a request reached."""
