"""Keeps a party's daemons running: starts them, restarts those that ended, and writes one line of JSON for each event.

Called by `up` commands. Waits between restarts grow from a second to a minute. A SuperNode that was killed is restarted
only after SuperLink counts it as gone, which takes up to 60 s without a heartbeat. A daemon that is not ready in time
is stopped and counts as ended. A daemon whose port another program uses is not started, because that program's replies
would count as readiness.

The lines (*facts*) contain roles, pids, exit statuses and paths of logs; of a log's text they contain only the part
that ``explain`` selects. :func:`standings` computes the daemons' states from the facts in any process. Refuses to keep
daemons running that another process keeps running.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from common.errors import DaemonFailed
from common.locks import held, take
from common.objects import append_line
from common.process import READY_TIMEOUT_S, Daemon, DaemonSpec, ProcessGroup, base_env, executable, plain_text
from common.reading import lenient_json
from common.wording import local_time

LOG_MAX_BYTES = 16 << 20
POLL_S = 0.5
LONGEST_WAIT_S = 60.0
STEADY_S = 120.0
"""Seconds that a daemon must run for its next wait before a restart to be the first, shortest one again."""
ASK_S = 10.0
"""Seconds between two checks whether a ready daemon answers."""
SILENT_S = 60.0
"""Seconds without an answer after which a ready daemon counts as offline."""
BEAT_S = 5.0
"""Seconds between two heartbeats of a supervising process. A heartbeat updates the modification time of its lock
file."""
FACTS = "daemons.jsonl"
"""Name of the file, in the folder of the daemons' logs, with one line of JSON for each event."""
_LOCK = "daemons.lock"
_READ_BYTES = 256 << 10

Report = Callable[..., None]
"""A function that records an event: it takes the event's name and its facts as keywords."""


def last_words(text: str) -> str:
    """Return the last line of a log that states an error, else its last line; at most 400 characters.

    Args:
        text: The log.

    Returns:
        The line; empty for an empty log.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"to fix:|\berror\b", line, re.IGNORECASE)]
    return (telling or lines or [""])[-1][:400]


def deliberate(text: str) -> str:
    """Return the last line of a log that starts with ``error: ``, which a daemon wrote on purpose.

    Args:
        text: The log.

    Returns:
        At most 400 characters; empty if there is no such line.
    """
    lines = [line for line in text.splitlines() if line.startswith("error: ")]
    return lines[-1][:400] if lines else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRunning:
    """A daemon that is restarted whenever it ends, with the waiting times between restarts.

    Attributes:
        spec: Returns the program and settings of the daemon; called at every start.
        first_s: First wait before a restart. Each further wait is twice as long, at most :data:`LONGEST_WAIT_S`.
        after_kill_s: Least wait after a death by signal.
        obstacle: Called before each start; returns the reason why it cannot start, with a remedy, or an empty text.
        explain: Takes the daemon's log since its last start; returns the part that the event about its end quotes.
        offline: Called while the daemon is ready; returns a sentence with a remedy while it does not answer or does not
            reach its server, else an empty text.
        offline_s: Seconds of being offline after which the daemon is restarted. The restart loses a reply that waits in
            the daemon's memory. So the time is longer than a study usually waits for replies.
    """

    spec: Callable[[], DaemonSpec]
    first_s: float = 1.0
    after_kill_s: float = 1.0
    obstacle: Callable[[], str] = lambda: ""
    explain: Callable[[str], str] = deliberate
    offline: Callable[[], str] = lambda: ""
    offline_s: float = 1800.0


class AnswerWatch:
    """Watches whether a ready daemon answers, and says since when it has not.

    Pass :meth:`ask` as the daemon's test of readiness, and the object itself as :attr:`KeptRunning.offline`.

    Args:
        silence: What a silence is called, such as ``the gateway has not answered``.
        answers: Asks the daemon; returns True if it answers. It may take a few seconds.
        remedy: What to do if it does not answer.
        ask_s: Least number of seconds between two questions.
        silent_s: Number of seconds without an answer that is a silence.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        silence: str,
        answers: Callable[[], bool],
        *,
        remedy: str,
        ask_s: float = ASK_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._silence, self._answers, self._remedy, self._clock = silence, answers, remedy, clock
        self._ask_s, self._silent_s = ask_s, silent_s
        self._asked = self._heard = clock()

    def ask(self) -> bool:
        """Ask the daemon now, and return whether it answered."""
        self._asked = self._clock()
        if found := self._answers():
            self._heard = self._clock()
        return found

    def __call__(self) -> str:
        """Return since when the daemon has not answered, with the remedy, if that is a silence.

        Asks the daemon again if the last question is old enough.

        Returns:
            The sentence; empty while the daemon answers.
        """
        if self._clock() - self._asked >= self._ask_s:
            self.ask()
        silent_s = self._clock() - self._heard
        if silent_s < self._silent_s:
            return ""
        since = datetime.now(UTC) - timedelta(seconds=silent_s)
        return f"{self._silence} since {since:%Y-%m-%d %H:%M:%S} UTC; to fix: {self._remedy}"


def all_of_a_study(
    command: Sequence[str],
    folder: Path,
    *,
    log: str,
    ready: Callable[[], bool],
    ready_timeout_s: float = READY_TIMEOUT_S,
    log_to: Sequence[str] = (),
    show_log: bool = True,
) -> DaemonSpec:
    """Return the spec of a daemon that runs a `consilium` command, such as `server up`, for a further study.

    The command starts and supervises all daemons of that study.

    Args:
        command: The words after `consilium`, such as ``server up DIRECTORY``.
        folder: The study's directory.
        log: Name of the command's own log in the folder's ``logs``.
        ready: Returns True when all daemons of the study are ready.
        ready_timeout_s: Seconds in which they must be ready.
        log_to: Targets of the study's security events.
        show_log: True if the log may be quoted in errors.

    Returns:
        The daemon. Stopping it waits until all daemons of the study have stopped.
    """
    return DaemonSpec(
        role="study",
        name=f"study {folder.name}",
        argv=(executable("consilium"), *command, *(part for target in log_to for part in ("--log-to", target))),
        env=base_env(),
        cwd=folder,
        log=folder / "logs" / log,
        ready=ready,
        ready_timeout_s=ready_timeout_s,
        grace_s=40.0,
        show_log=show_log,
    )


@dataclass(slots=True)
class _Slot:
    kept: KeptRunning
    daemon: Daemon | None = None
    last: DaemonSpec | None = None
    ready: bool = False
    started: float = 0.0
    due: float = 0.0
    wait_s: float = 0.0
    was_ready: bool = False
    offline_from: float | None = None
    log_from: int = 0
    oom_kills: int = 0


class Supervisor:
    """Keeps daemons running in a group. :meth:`step` does all due work and never waits for a starting daemon.

    Args:
        group: The group that owns the daemons.
        kept: The daemons in the order in which they start.
        report: Records each event.
        clock: Monotonic clock in seconds.
    """

    def __init__(
        self,
        group: ProcessGroup,
        kept: Sequence[KeptRunning],
        *,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._report, self._clock = group, report, clock
        self._slots = [_Slot(one, wait_s=one.first_s) for one in kept]

    @property
    def ready(self) -> bool:
        """True if every daemon runs and is ready."""
        return all(slot.ready for slot in self._slots)

    def step(self) -> None:
        """Check every daemon once, and start or restart it if it is due."""
        for slot in self._slots:
            if slot.daemon is None:
                if self._clock() >= slot.due:
                    self._start(slot)
            elif (status := slot.daemon.returncode) is not None:
                why = f"status {status}" if status >= 0 else f"signal {-status}"
                if status == -signal.SIGKILL and _oom_kills() > slot.oom_kills:
                    why += "; meanwhile the kernel killed a process because memory ran out"
                self._ended(slot, why, killed=status < 0)
            elif not slot.ready:
                self._ask(slot)
            else:
                if self._clock() - slot.started > STEADY_S:
                    slot.wait_s = slot.kept.first_s
                self._watch(slot)
            if not slot.was_ready:
                return  # daemons first start in order; later each is restarted independently

    def run(self, *, on_ready: Callable[[], None] = lambda: None, on_beat: Callable[[], None] = lambda: None) -> None:
        """Keep daemons running until interrupted (SIGINT, SIGTERM).

        Args:
            on_ready: Called once, when all are ready.
            on_beat: Called every :data:`BEAT_S` seconds.
        """
        told, due = False, self._clock()
        while True:
            self.step()
            if self._clock() >= due:
                on_beat()
                due = self._clock() + BEAT_S
            if self.ready and not told:
                told = True
                self._report("all-ready")
                on_ready()
            time.sleep(POLL_S)

    def _start(self, slot: _Slot) -> None:
        last = slot.last
        # Otherwise an empty folder would be made where a study or a site was, and would be in the way of its return.
        if last is not None and not (home := last.log.parent.parent).is_dir():
            self._again(slot, last, f"the folder {home} is gone; to fix: put it back", killed=False, said="")
            return
        slot.last = spec = slot.kept.spec()
        if why := slot.kept.obstacle():
            self._again(slot, spec, why, killed=False, said="")
            return
        _rotate(spec.log)
        slot.oom_kills = _oom_kills()
        slot.log_from = file_size(spec.log)
        slot.daemon, slot.started, slot.ready = self._group.begin(spec), self._clock(), False
        self._report("daemon-started", daemon=spec.label, pid=slot.daemon.pid, log=str(spec.log))

    def _ask(self, slot: _Slot) -> None:
        assert slot.daemon is not None
        spec, age_s = slot.daemon.spec, self._clock() - slot.started
        with contextlib.suppress(OSError):
            slot.ready = age_s >= POLL_S if spec.ready is None else spec.ready()
        if slot.ready:
            slot.was_ready = True
            self._report("daemon-ready", daemon=spec.label, pid=slot.daemon.pid, seconds=round(age_s, 1))
        elif age_s > spec.ready_timeout_s:
            self._ended(slot, f"not ready after {spec.ready_timeout_s:g} s", killed=False)

    def _watch(self, slot: _Slot) -> None:
        """Report when a ready daemon goes offline or comes back, and restart one that stays offline."""
        assert slot.daemon is not None
        label, pid = slot.daemon.spec.label, slot.daemon.pid
        why = slot.kept.offline()
        if not why:
            if slot.offline_from is not None:
                slot.offline_from = None
                self._report("daemon-ready", daemon=label, pid=pid)
        elif slot.offline_from is None:
            slot.offline_from = self._clock()
            self._report("daemon-offline", daemon=label, pid=pid, why=why)
        elif self._clock() - slot.offline_from > slot.kept.offline_s:
            self._ended(slot, f"offline for {slot.kept.offline_s:g} s", killed=False)

    def _ended(self, slot: _Slot, why: str, *, killed: bool) -> None:
        assert slot.daemon is not None
        spec = slot.daemon.spec
        self._group.stop(slot.daemon)  # also stops the processes that it started
        said = "" if killed else slot.kept.explain(plain_text(spec.log, since=slot.log_from))
        self._again(slot, spec, why, killed=killed, said=said)

    def _again(self, slot: _Slot, spec: DaemonSpec, why: str, *, killed: bool, said: str) -> None:
        """Report that a daemon does not run, and plan its next start."""
        pause_s = max(slot.wait_s, slot.kept.after_kill_s) if killed else slot.wait_s
        slot.due, slot.wait_s = self._clock() + pause_s, min(2 * slot.wait_s, LONGEST_WAIT_S)
        slot.daemon, slot.ready, slot.offline_from = None, False, None
        quoted = {"said": said} if said else {}
        facts = {"daemon": spec.label, "why": why, **quoted, "again_in_s": round(pause_s, 1), "log": str(spec.log)}
        self._report("daemon-ended", **facts)


def keep_running(logs: Path, kept: Sequence[KeptRunning], *, on_ready: Callable[[], None] = lambda: None) -> None:
    """Keep daemons running until SIGINT or SIGTERM.

    Args:
        logs: Folder for the file of events.
        kept: The daemons in the order in which they start.
        on_ready: Called once, when all are ready.

    Raises:
        DaemonFailed: If another process keeps the daemons running already.
    """
    report = json_report(logs / FACTS)
    with keeping(logs), ProcessGroup() as group:
        try:
            Supervisor(group, kept, report=report).run(on_ready=on_ready, on_beat=lambda: heartbeat(logs))
        except KeyboardInterrupt:
            report("stopping")
    report("stopped")


@dataclass(frozen=True, slots=True)
class DaemonStanding:
    """The state of a daemon: ``starting``, ``ready``, ``offline`` (it runs, but does not answer, or does not reach its
    server or the target of its log), ``ended`` (it will be restarted) or ``stopped``.

    ``since`` is when the state began; for a stopped daemon it is the last time it is known to have run. ``why`` is why
    the daemon ended last, ``said`` the quoted part of its log, and ``log`` the path of the log.
    """

    daemon: str
    state: str
    since: str
    why: str = ""
    said: str = ""
    log: str = ""

    @property
    def line(self) -> str:
        """The state as a line of text, with this machine's local time."""
        since = local_time(self.since)
        words = ", ".join(word for word in (self.why, self.said) if word)
        when = f", last heard of {since}" if self.state == "stopped" else f" since {since}"
        return f"{self.daemon}: {self.state}{when}" + (f" ({words}; log {self.log})" if words else "")


_STATES = {
    "daemon-started": "starting",
    "daemon-ready": "ready",
    "daemon-offline": "offline",
    "daemon-ended": "ended",
}


def standings(folders: Iterable[Path]) -> tuple[DaemonStanding, ...]:
    """Return the state of every daemon, from the newest event about it.

    If no process keeps the daemons running any more, or the process has not started a daemon yet, the daemon is
    ``stopped`` even if its last event states something else. ``since`` is then the time at which the process stopped.
    If it was killed, ``since`` is its last heartbeat, or else the time of the last event.

    Args:
        folders: Folders of logs.

    Returns:
        One state for each daemon; folders that cannot be read are left out.
    """
    found: dict[str, DaemonStanding] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            kept_from, runs = _keeper(folder)
            for at, one, over in _read_standings(folder / FACTS):
                of_keeper = kept_from is not None and kept_from < at
                now = one if of_keeper and runs else _stopped(one, folder, beat=of_keeper and not over)
                if one.daemon not in found or found[one.daemon].since <= one.since:
                    found[one.daemon] = now
    return tuple(found.values())


def unrecorded(folders: Iterable[Path], *, command: str) -> str:
    """Say why :func:`standings` knows no daemon: the folders' records cannot be read, or there are none.

    Args:
        folders: Folders of logs.
        command: The command that starts and records the daemons.

    Returns:
        The text.
    """
    for folder in folders:
        try:
            (folder / FACTS).open("rb").close()
        except PermissionError:
            return f"not known, because user {os.getuid()} cannot read {folder / FACTS}"
        except OSError:
            continue
    return (
        f"`{command}` has recorded none here; daemons that were started in another way, for example by "
        "`consilium demo`, are not listed"
    )


def _stopped(one: DaemonStanding, folder: Path, *, beat: bool) -> DaemonStanding:
    """Return a daemon's state as stopped. ``beat`` is True if the last heartbeat in this folder is from the supervising
    process that kept this daemon running.
    """
    since = one.since
    if beat and one.state != "ended":
        alive = datetime.fromtimestamp((folder / _LOCK).stat().st_mtime, UTC)
        since = max(datetime.fromisoformat(since), alive).isoformat(timespec="milliseconds")
    return replace(one, state="stopped", since=since)


def _read_standings(path: Path) -> list[tuple[int, DaemonStanding, bool]]:
    """Return three facts about each daemon: its newest state, the position in the file at which the event about this
    state ends, and True if the supervising process recorded that it stopped all daemons.
    """
    over: set[str] = set()
    found: dict[str, DaemonStanding] = {}
    ends: dict[str, int] = {}
    with path.open("rb") as stream:
        at = stream.seek(max(0, path.stat().st_size - _READ_BYTES))
        for line in stream:
            at += len(line)
            try:
                fact = lenient_json(line)
            except ValueError:  # a line that a crash cut off
                continue
            if state := _STATES.get(fact["event"]):
                before = found.get(fact["daemon"])
                why, said = (fact.get(name, "") for name in ("why", "said"))
                if state == "starting" and before is not None and before.state == "ended":
                    why, said = before.why, before.said  # the reason of the restart is that of the last end
                log = fact.get("log") or (before.log if before else "")
                found[fact["daemon"]] = DaemonStanding(fact["daemon"], state, fact["time"], why, said, log)
                ends[fact["daemon"]] = at
                over.discard(fact["daemon"])
            elif fact["event"] == "stopped":  # the process and all its daemons stopped; a later start has a later fact
                found = {name: replace(one, since=fact["time"]) for name, one in found.items()}
                over = set(found)
    return [(ends[daemon], standing, daemon in over) for daemon, standing in found.items()]


@contextlib.contextmanager
def keeping(logs: Path) -> Iterator[None]:
    """Lock the folder of the daemons' logs, so that in the with-block no other process keeps these daemons running.

    Args:
        logs: The folder. If no lock can be written there, none is held.

    Returns:
        A context.

    Raises:
        DaemonFailed: If another process keeps the daemons running.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            logs.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((logs / _LOCK).open("a"))
            if not take(lock):
                raise DaemonFailed(
                    f"the daemons with logs in {logs} are running already; to fix: stop the `up` command that runs them"
                )
            lock.truncate(0)
            os.write(lock.fileno(), b"%d" % file_size(logs / FACTS))  # this supervisor's facts begin here
        yield


def _keeper(logs: Path) -> tuple[int | None, bool]:
    """Return the length that the file of events had when the newest supervising process started, and whether that
    process still runs.

    The length is None if no such process is recorded.
    """
    try:
        with (logs / _LOCK).open() as lock:
            return int(lock.read() or 0), held(lock)
    except FileNotFoundError:
        return None, False


def are_kept(logs: Path) -> bool:
    """Return whether a supervising process runs that keeps certain daemons running.

    Args:
        logs: Folder of the daemons' logs.

    Returns:
        True if such a process runs; False if none runs, or if the folder cannot be read.
    """
    try:
        return _keeper(logs)[1]
    except OSError:
        return False


def heartbeat(logs: Path) -> None:
    """Record in the folder of the logs that the supervising process is alive now.

    Args:
        logs: The folder.
    """
    with contextlib.suppress(OSError):
        os.utime(logs / _LOCK)


def file_size(path: Path) -> int:
    """Return the size of a file.

    Args:
        path: The file.

    Returns:
        The size in bytes; 0 if there is no file.
    """
    return path.stat().st_size if path.exists() else 0


def json_report(path: Path) -> Report:
    """Return a function that writes events to a file and to stderr, or to stderr alone if the disk is full.

    Args:
        path: The file.

    Returns:
        The function.
    """

    def report(event: str, **facts: object) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts})
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            append_line(path, line.encode() + b"\n")

    return report


def _oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, under any limit; 0 if that is unknown."""
    with contextlib.suppress(OSError, ValueError):
        words = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(words[words.index("oom_kill") + 1])
    return 0


def _rotate(log: Path) -> None:
    """Rename a log above :data:`LOG_MAX_BYTES` to ``NAME.1``, so that repeated failures do not fill the disk."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_MAX_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
