"""Reads a study's event log and derives from it the state of the newest run, the sites, the batches and the student.

The read model calls it. Each pass reads the lines that were appended since the last one. Lines of another schema, and a
line left incomplete by a crash, are ignored. A line that is too long or not a valid event is counted and skipped.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common.errors import InvalidInput
from common.event_kinds import EVENTS, EventView, check_event, event_view
from common.events import EVENT_SCHEMA
from common.reading import FINITE_JSON, parse_json
from common.wording import MISSED
from server.study.run_state import RunState
from server.study.waiting import Waiting

RECENT = 12
"""Number of the newest events that are kept for the first page."""
READ_BYTES = 4 << 20
MAX_LINE_BYTES = 1 << 20


@dataclass(slots=True)
class StageState:
    """A stage of the newest run.

    Attributes:
        total: Number of the stage's steps.
        done: Number of these steps that are done.
        base: Number of these steps that an earlier run did, so that the estimate of the time left does not count them.
            None before the stage's first progress event. After it, the number of steps in that event for the stage
            ``collect``, and 0 for other stages.
        started: Time at which it began.
        finished: True if it has finished.
        seconds: Duration of a finished stage in seconds.
    """

    total: int = 0
    done: int = 0
    base: int | None = None
    started: str | None = None
    finished: bool = False
    seconds: float | None = None


@dataclass(slots=True)
class SiteState:
    """One site according to the event log.

    Attributes:
        last_seen: Time at which the site was last heard from.
        offer: The site's answer to the last offer: ``accepted``, or the reason for another outcome.
        accepted: Number of offers accepted.
        turned_down: Number of offers declined or missed, by reason.
        codes: Number of codes received.
        refused: Number of codes refused.
        missing: Number of requests for codes that the site did not answer.
        missing_in_a_row: Number of these requests since the site's last reply.
        asked_again: Number of replies to a second or later request.
        latencies: Seconds until each of the last replies.
        receipts_row: Ledger row up to which the site holds receipts.
        receipts_problem: Reason why the site could not get its receipts; None if it got them.
        contradicted_row: Row of a signed head that the site holds and the ledger does not contain; None if there is
            none.
        unwitnessed: Reason why the site has not countersigned the newest head; None if it has.
    """

    last_seen: str | None = None
    offer: str | None = None
    accepted: int = 0
    turned_down: Counter[str] = field(default_factory=Counter)
    codes: int = 0
    refused: int = 0
    missing: int = 0
    missing_in_a_row: int = 0
    asked_again: int = 0
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=500))
    receipts_row: int = 0
    receipts_problem: str | None = None
    contradicted_row: int | None = None
    unwitnessed: str | None = None

    @property
    def declined(self) -> int:
        """Number of offers declined."""
        return self.turned_down.total() - self.missed

    @property
    def missed(self) -> int:
        """Number of offers without an answer."""
        return sum(self.turned_down[reason] for reason in MISSED)


@dataclass(slots=True)
class BatchState:
    """A batch of queries according to the event log.

    Attributes:
        time: Time of the first event about the batch.
        accepted: Answer of each site to the offer: ``accepted``, or the reason for another outcome.
        replies: Site and seconds of each reply.
        attempts: Number of times that the batch's sites were asked for their codes.
        refused: Number of queries that the budget does not cover.
        quorum_missed: True if too few sites accepted.
    """

    time: str
    accepted: dict[str, str] = field(default_factory=dict)
    replies: list[tuple[str, float]] = field(default_factory=list)
    attempts: int = 0
    refused: int = 0
    quorum_missed: bool = False


@dataclass(slots=True)
class RunSeen:
    """The newest run according to the event log.

    Attributes:
        started: Time at which the run began.
        state: Its state, by the events since it began.
        ended: Time at which it ended; None if no end is logged.
    """

    started: str
    state: RunState
    ended: str | None = None


@dataclass(frozen=True, slots=True)
class QuorumMissed:
    """The last batch for which too few sites accepted or answered.

    Attributes:
        accepted: Number of sites that accepted the offer, or that sent codes.
        needed: Number of sites needed.
    """

    accepted: int
    needed: int


class EventFold:
    """The state that a study's event log describes: newest run, sites, batches and student.

    Args:
        path: The event log.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem: str | None = None
        self._clear()

    def _clear(self) -> None:
        self._offset, self._inode, self._torn = 0, 0, b""
        self.lines = 0
        self.malformed = 0
        self.first_malformed = ""
        self.last_time: str | None = None
        self.run: RunSeen | None = None
        self.stages: dict[str, StageState] = {}
        self.sites: dict[str, SiteState] = {}
        self.batches: dict[str, BatchState] = {}
        self.losses: list[tuple[int, float]] = []
        self.loss_total = 0
        self.passes: list[int] = []
        self.validated: list[tuple[int, float, int]] = []
        self.student: tuple[str, str, float] | None = None
        self.controls: dict[str, tuple[str, str]] = {}
        self.bundle: tuple[str, str] | None = None
        self.labels: dict[str, str] = {}
        self.quorum_missed: QuorumMissed | None = None
        self.implausible: tuple[str, ...] = ()
        self.budget_refused = False
        self.waiting = Waiting()
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)

    def step(self, lock: threading.RLock) -> bool:
        """Read the lines appended since the last call.

        Args:
            lock: Held while the state changes.

        Returns:
            Whether anything changed.
        """
        try:
            found = self._path.stat()
        except FileNotFoundError:
            return False
        except OSError as error:
            return self._tell(f"it cannot be read: {error.strerror}")
        if not stat.S_ISREG(found.st_mode):
            return self._tell("it is not a regular file")
        self._tell(None)
        return self._follow(found, lock)

    def _tell(self, problem: str | None) -> bool:
        changed, self.problem = self.problem != problem, problem
        return changed

    def _follow(self, found: os.stat_result, lock: threading.RLock) -> bool:
        if found.st_ino != self._inode or found.st_size < self._offset:
            with lock:
                self._clear()
                self._inode = found.st_ino
        if found.st_size <= self._offset:
            return False
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            while content := stream.read(READ_BYTES):
                *whole, rest = (self._torn + content).split(b"\n")
                with lock:
                    self._offset += len(content)
                    self._torn = rest[: MAX_LINE_BYTES + 1]  # enough to recognise a line that is too long
                    for line in whole:
                        self._line(line)
        return True

    def _line(self, line: bytes) -> None:
        self.lines += 1
        if not line.strip():
            return
        try:
            if len(line) > MAX_LINE_BYTES:
                raise InvalidInput("length of a line", limit=f"at most {MAX_LINE_BYTES} bytes")
            event = parse_json(line, what="the content", limit=FINITE_JSON)
            if not isinstance(event, dict):
                raise InvalidInput("content of a line", limit="a JSON object")
            if event.get("schema") == EVENT_SCHEMA:
                check_event(event)
                self._enter(event)
        except InvalidInput as error:
            if line.startswith(b"{") and not line.rstrip().endswith(b"}") and len(line) < MAX_LINE_BYTES:
                return  # torn by a crash: the end of the line is missing
            self.malformed += 1
            self.first_malformed = self.first_malformed or f"line {self.lines:,}: {error}"

    def latest(self) -> tuple[EventView, ...]:
        """Return the :data:`RECENT` newest events in words, without routine ones and accepted offers.

        Returns:
            The events, newest first.
        """
        return tuple(event_view(event) for event in self._recent)

    def site(self, name: str) -> SiteState:
        """Return the state of a site, a new one if the log has not named it yet.

        Args:
            name: The site's name.

        Returns:
            The state, which later events change.
        """
        return self.sites.setdefault(name, SiteState())

    def _batch(self, event: dict[str, Any]) -> BatchState:
        return self.batches.setdefault(event["batch"], BatchState(event["time"]))

    def _enter(self, event: dict[str, Any]) -> None:
        kind, time, known = event["event"], event["time"], EVENTS.get(event["event"])
        self.last_time = time
        if (known is None or known.words) and event.get("accepted") is not True:
            self._recent.appendleft(event)
        if known is None:
            return
        self.waiting.enter(event)
        if "site" in known.fields:
            self._site_event(kind, time, event)
        elif not (self._run_event(kind, time, event) or self._student_event(kind, time, event)):
            self._batch_event(kind, event)

    def _run_event(self, kind: str, time: str, event: dict[str, Any]) -> bool:
        match kind:
            case "run-started":
                self.run = RunSeen(time, RunState().after(event))
                self.stages, self.quorum_missed, self.budget_refused = {}, None, False
            case "run-finished" | "run-failed" if self.run is not None:
                self.run.ended, self.run.state = time, self.run.state.after(event)
            case "stop-requested" if self.run is not None:
                self.run.state = self.run.state.after(event)
            case "stage-started":
                self.stages[event["stage"]] = StageState(total=event["total"], started=time)
            case "stage-progress":
                self._progress(event["stage"], event["done"], event["total"], time)
            case "stage-finished":
                stage = self.stages.setdefault(event["stage"], StageState())
                stage.finished, stage.seconds = True, event["seconds"]
            case _:
                return False
        return True

    def _student_event(self, kind: str, time: str, event: dict[str, Any]) -> bool:
        match kind:
            case "label-decoded":
                self.labels[event["volume"]] = event["query"]
                stage = self.stages.get("decode", StageState())
                stage.done = min(stage.done + 1, stage.total)
            case "answers-weighed":
                self.implausible = tuple(event["warnings"])
            case "student-step":
                self._progress("student", event["step"], event["total"], time)
                self._keep_steps_before(event["step"] if event["total"] == self.loss_total else 0)
                self.losses.append((event["step"], event["loss"]))
                self.loss_total = event["total"]
            case "student-pass":
                self.passes = [step for step in self.passes if step < event["step"]] + [event["step"]]
            case "student-validated":
                self.validated = [one for one in self.validated if one[0] < event["step"]]
                self.validated.append((event["step"], event["dice"], event["cases"]))
            case "network-scored" if event["name"] == "student":
                self.validated = [one for one in self.validated if one[0] < self.loss_total]
                self.validated.append((self.loss_total, event["dice"], event["cases"]))
            case "student-trained":
                self.student = (event["weights"], time, event["seconds"])
            case "control-trained":
                self.controls[event["name"]] = (event["weights"], time)
            case "bundle-exported":
                self.bundle = (event["sha256"], time)
            case _:
                return False
        return True

    def _keep_steps_before(self, step: int) -> None:
        """Delete the curve's points from a step on, if the training has repeated that step after a restart.

        A resumed run that finds a trained student logs no step, so the curve of that student stays.
        """
        if self.losses and step <= self.losses[-1][0]:
            self.losses = [one for one in self.losses if one[0] < step]
            self.passes = [one for one in self.passes if one < step]
            self.validated = [one for one in self.validated if one[0] < step]

    def _batch_event(self, kind: str, event: dict[str, Any]) -> None:
        match kind:
            case "quorum-missed":
                self.quorum_missed = QuorumMissed(event["accepted"], event["needed"])
                self._batch(event).quorum_missed = True
            case "budget-refused":
                self.budget_refused = True
                if event["batch"]:
                    self._batch(event).refused = len(event["queries"])
            case "batch-dispatched":
                self._batch(event).attempts = event["attempt"]

    def _progress(self, name: str, done: int, total: int, time: str) -> None:
        stage = self.stages.setdefault(name, StageState(started=time))
        if stage.base is None:
            stage.base = done if name == "collect" else 0
        stage.done, stage.total = done, total

    def _site_event(self, kind: str, time: str, event: dict[str, Any]) -> None:
        site = self.site(event["site"])
        match kind:
            case "offer-answered":
                site.offer = event["reason"]
                self._batch(event).accepted[event["site"]] = event["reason"]
                if event["accepted"]:
                    site.accepted += 1
                    site.contradicted_row = None
                else:
                    site.turned_down[event["reason"]] += 1
                if event["reason"] not in ("offline", "deadline", "budget", "left-out"):
                    site.last_seen = time
                    # A refusal shows that the site is back. An acceptance shows it only when its codes arrive.
                    if not event["accepted"]:
                        site.missing_in_a_row = 0
            case "reply-received":
                site.last_seen, site.missing_in_a_row = time, 0
                site.codes += event["codes"]
                site.asked_again += event["attempt"] > 1
                site.latencies.append(event["seconds"])
                self._batch(event).replies.append((event["site"], event["seconds"]))
            case "reply-missing":
                site.missing += 1
                site.missing_in_a_row += 1
            case "code-refused":
                site.refused += event["codes"]
            case "ledger-contradicted":
                site.contradicted_row = event["ledger_row"]
            case "receipts-held":
                site.last_seen = time
                site.receipts_row, site.receipts_problem = event["ledger_row"], None
            case "receipts-missing":
                site.receipts_problem = event["reason"]
            case "witnessed":
                site.last_seen, site.unwitnessed = time, None
            case "witness-missing":
                site.unwitnessed = event["reason"]
            case "witness-disagrees":
                site.unwitnessed = "disagrees"
