"""Holds the objects that pages, API and metrics share: read model, label decisions, background jobs and views.

The application creates one :class:`DashboardService`, and every page receives it as :data:`Here`. A view is the content
of a page. It is computed once for each version of the data, and again when it is :data:`FRESH_S` seconds old.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

from common.errors import InvalidInput
from common.ledger.spending import Spending
from common.pki import expires
from common.security_log.program import ROLE, not_accepted_of, with_backlog
from common.supervision import standings
from server.dashboard.jobs import Job, work
from server.dashboard.notify import FAILED, Webhook
from server.dashboard.pictures import Picture, load_picture
from server.dashboard.planning import PlannerQueue, form_of, planned
from server.dashboard.read_model import Follower
from server.dashboard.reports import HospitalReport, read_reports, take_report
from server.dashboard.security import of_app
from server.dashboard.views.alarms import STOP, Alarm
from server.dashboard.views.overview import Overview, overview
from server.dashboard.views.studies import StudyRow, study_rows
from server.dashboard.views.study import NoiseView, StudyPage, noise_view, study_page
from server.planning.codec_spread import codec_stds
from server.planning.planner import Plan
from server.postprocess.decisions import Decision, DecisionStore
from server.study.gate import shut_line

T = TypeVar("T")
Certifier = Callable[[Path, Path, Path], Sequence[str]]
"""Function that returns the command line that writes a privacy certificate.

Its arguments are the study's directory, the output folder and the folder of the sites' reports.
"""

POLL_S = 1.0
"""Seconds between two reads of the study's files."""
FRESH_S = 5.0
ENDS_SOON = timedelta(days=30)
MEND = "Restore decisions.jsonl from a backup. Until then every label is shown as undecided, and nobody can decide."
NOT_VERIFIED = Alarm(
    "ledger-not-verified",
    "critical",
    "The ledger failed the verification that was started here",
    f"The Ledger page shows the first invalid rows. {STOP} Restore the ledger from a copy that verifies.",
)
KEPT_VOLUMES = 6


class DashboardService:
    """Computes the content of one study's pages, and runs the background jobs that pages start.

    Args:
        follower: The read model.
        state: The dashboard's own directory.
        decisions: Decisions about labels.
        certifier: Function that returns the command line that writes a privacy certificate; None if this dashboard
            issues none.
        webhook: URL to which a message is posted when an alarm begins or ends; None for no messages.
        log_state: File in which the dashboard's security log stores how far each of its targets has received the
            events; None if the dashboard sends no security log.
        now: Function that returns the current time.
    """

    def __init__(
        self,
        *,
        follower: Follower,
        state: Path,
        decisions: DecisionStore,
        certifier: Certifier | None,
        webhook: str | None,
        log_state: Path | None,
        now: Callable[[], datetime],
    ) -> None:
        self.follower, self.state, self.decisions, self.now = follower, state, decisions, now
        self._log_state = log_state
        root = follower.workspace.root.absolute()
        self.pictures_dir = state / "pictures"
        self.certificate_dir = state / "certificate"
        self.reports_dir = state / "site-reports"
        self.verify = Job(
            state / "verify.json", lambda: work("verify", str(follower.workspace.ledger_file.absolute())), now=now
        )
        self.pictures = Job(
            state / "pictures.json", lambda: work("pictures", str(root), str(self.pictures_dir.absolute())), now=now
        )
        self.certificate: Job | None = None
        if certifier is not None:
            self.certificate = Job(
                state / "certificate.txt",
                lambda: certifier(root, self.certificate_dir.absolute(), self.reports_dir.absolute()),
                now=now,
            )
        self.planner_queue = PlannerQueue()
        self._views: dict[Hashable, tuple[tuple[int, int], Any]] = {}
        self._arrays: dict[str, tuple[str, Picture]] = {}
        self._making = threading.Lock()
        self.webhook = None if webhook is None else Webhook(webhook, study=follower.study.name, clock=time.monotonic)

    @property
    def newest_certificate_dir(self) -> Path:
        """Folder of the newest certificate: the dashboard's own, or the study's copy of one that a command issued."""

        def issued_ns(folder: Path) -> int:
            try:
                return (folder / "certificate.json").stat().st_mtime_ns
            except OSError:
                return 0

        return max((self.certificate_dir, self.follower.workspace.certificate_dir), key=issued_ns)

    @property
    def ledger_file(self) -> Path:
        """The study's ledger."""
        return self.follower.workspace.ledger_file

    @property
    def ledger_id(self) -> str:
        """The ledger's id; empty until the ledger's first row has been read."""
        return self.follower.ledger.books.key.ledger_id

    def view(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return a view from memory, after computing it if the data have changed or the view is a few seconds old.

        The view is computed under the read model's lock.

        Args:
            key: Name of the view.
            make: Function that computes the view.

        Returns:
            The view.
        """
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
        """Return the facts of the Overview page."""
        return self.view(
            "overview",
            lambda: overview(
                self.follower,
                now=self.now(),
                reports=self.reports(),
                more=self._own_alarms(),
                plan=self._own_plan(),
                gate=shut_line(self.follower.workspace),
            ),
        )

    def _own_plan(self) -> Plan | None:
        """Return the plan for the study's own settings.

        It is None before a site is registered, and for settings that the planner refuses.
        """
        follower = self.follower
        if not follower.admitted:
            return None
        try:
            stds = codec_stds(follower.workspace)
            form = form_of(follower.study, hospitals=len(follower.admitted), stds=stds)
            return planned(form, follower.study, stds).plan
        except (InvalidInput, ValueError):  # the planner refuses this study's terms
            return None

    def _own_alarms(self) -> list[Alarm]:
        """Return the alarms about the webhook, the verification job, the gateway, the logs, the TLS certificate and
        decisions.
        """
        found = [FAILED] if self.webhook is not None and self.webhook.failing else []
        verified = self.verify.result
        if self.verify.state.state == "failed" or (verified is not None and not verified["ok"]):
            found.append(NOT_VERIFIED)
        found += [*self._gateway_alarms(), *self._log_alarms()]
        ends = self.certificate_ends()
        left = None if ends is None else ends - self.now()
        if ends is not None and left is not None and left < ENDS_SOON:
            found.append(
                Alarm(
                    "certificate-ends",
                    "critical" if left < timedelta(0) else "warning",
                    f"The server's TLS certificate {'ended' if left < timedelta(0) else 'ends'} on {ends:%Y-%m-%d}",
                    "`consilium provision renew` makes a new one. Sites cannot reach the server without a valid one.",
                )
            )
        try:
            self.decisions.decisions()
        except (InvalidInput, OSError) as error:
            found.append(Alarm("decisions-broken", "critical", f"Decisions about labels cannot be read: {error}", MEND))
        return found

    def _gateway_alarms(self) -> list[Alarm]:
        """Return an alarm if the gateway runs, but does not answer."""
        keeper = self.follower.workspace.port_keeper()
        found = standings((keeper.root / "logs", keeper.flower_dir / "logs"))
        return [
            Alarm("gateway-silent", "critical", f"The server does not answer the sites: {said}", f"Next: {remedy}.")
            for one in found
            if one.daemon == "gateway" and one.state == "offline"
            for said, _, remedy in [one.why.partition("; to fix: ")]
        ]

    def _log_alarms(self) -> list[Alarm]:
        """Return an alarm for each security log, the server's and the dashboard's, that a target does not accept."""
        workspace = self.follower.workspace
        found = with_backlog(standings((workspace.root / "logs", workspace.flower_dir / "logs")), workspace.root)
        offline = (one.why for one in found if one.daemon.partition(" ")[0] == ROLE and one.state == "offline")
        why = [("server", text) for text in offline]
        if self._log_state is not None:
            why.append(("dashboard", not_accepted_of(self._log_state)))
        return [
            Alarm("log-fails", "warning", f"The {whose}'s security log is not delivered: {said}", f"Next: {remedy}.")
            for whose, text in why
            for said, _, remedy in [text.partition("; to fix: ")]
            if text
        ]

    def certificate_ends(self) -> datetime | None:
        """Return when the server's TLS certificate expires; None if there is none or it cannot be read here."""
        try:
            return expires(self.follower.workspace.gateway_dir / "server.crt")
        except (InvalidInput, OSError):
            return None

    def decided(self) -> tuple[Decision, ...]:
        """Return every decision about a label; empty if the file is invalid, for which the Overview shows an alarm."""
        try:
            return self.decisions.decisions()
        except (InvalidInput, OSError):
            return ()

    def start(self, *, after: Callable[[], object]) -> None:
        """Follow the study's files and send alarms to the webhook, until :meth:`close`.

        Args:
            after: Called after every read that found a change.
        """
        self.follower.start(every_s=POLL_S, after=after)
        if self.webhook is not None:
            self.webhook.start(lambda: self.overview().alarms, every_s=POLL_S)

    def spending(self) -> Spending:
        """Return the privacy budget that the study has spent, and the guarantee that holds."""
        return self.view("spending", lambda: self.follower.facts().spending)

    def study(self) -> StudyPage:
        """Return the facts of the Study page."""
        return self.view("study", lambda: study_page(self.follower))

    def studies(self) -> tuple[StudyRow, ...]:
        """Return the rows of the Studies page."""
        return self.view("studies", lambda: study_rows(self.follower))

    def arrays(self, volume: str, key: str) -> Picture:
        """Return the arrays of a volume that the slice viewer shows.

        The arrays of the last few volumes stay in memory as long as their pictures do not change.

        Args:
            volume: Hash of the volume.
            key: Digest of the files from which the volume's picture was made.

        Returns:
            The arrays by name.
        """
        known = self._arrays.pop(volume, None)
        if known is None or known[0] != key:
            known = (key, load_picture(self.pictures_dir, volume))
        self._arrays[volume] = known
        while len(self._arrays) > KEPT_VOLUMES:
            self._arrays.pop(next(iter(self._arrays)), None)
        return known[1]

    def noise(self) -> NoiseView | None:
        """Compare the standard deviation of each code coordinate over public shapes with that of the noise.

        Returns:
            The comparison; None before a codec is fitted, and for a codec that does not store these deviations.
        """
        stds = codec_stds(self.follower.workspace)
        return self.view("noise", lambda: noise_view(self.follower, stds)) if stds else None

    def reports(self) -> dict[str, HospitalReport]:
        """Return the newest report of each site by the site's name."""
        return read_reports(self.follower.workspace.reports_dir, self.reports_dir, keys=self._site_keys())

    def take_report(self, text: str) -> str:
        """Check a site's report that was handed in on the Sites page, and store it.

        Args:
            text: The report.

        Returns:
            Name of the site that wrote it.

        Raises:
            InvalidInput: If :func:`server.dashboard.reports.take_report` refuses the report.
        """
        site = take_report(text, self.reports_dir, keys=self._site_keys(), now=self.now())
        self._views.clear()
        return site

    def _site_keys(self) -> dict[str, str]:
        return {site.name: site.answer_key for site in self.follower.sites if site.answer_key}

    def close(self) -> None:
        """Stop following the study's files, end the background jobs, and stop sending alarms to the webhook."""
        if self.webhook is not None:
            self.webhook.stop()
        self.follower.stop()
        for job in (self.verify, self.pictures, self.certificate):
            if job is not None:
                job.stop()


Here = Annotated[DashboardService, of_app("service")]
"""The service of the dashboard that serves a request."""
