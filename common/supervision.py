"""Keeps a party's daemons running: starts them, starts again what ended, and says so in one line of JSON a fact.

Refuses to hammer: waits grow from a second to a minute, and a SuperNode that was killed waits for SuperLink to count it
as gone, which takes up to 60 s without a heartbeat. A daemon that is not ready in its time is stopped and counts as
ended; one that cannot start, because its port is another program's, is not started, and so is not ready by what that
program answers. Facts name roles, pids, exit statuses and paths of logs; a line of a log only where whoever keeps the
daemon says that its log speaks of no case.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from common.process import Daemon, DaemonSpec, ProcessGroup, log_tail

LOG_MAX_BYTES = 16 << 20
POLL_S = 0.5

Report = Callable[..., None]
"""Takes an event's name and its facts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A daemon to keep running. ``spec`` is asked anew at every start.

    ``after_kill_s`` is the wait after a death by signal; otherwise waits double from ``first_s`` to ``longest_s``, and
    start over once the daemon has run for ``steady_s``. ``obstacle`` is asked before each start: why it could not, with
    the remedy, or nothing. ``quote`` lets the fact that it ended carry the last words of its log.
    """

    spec: Callable[[], DaemonSpec]
    first_s: float = 1.0
    longest_s: float = 60.0
    after_kill_s: float = 1.0
    steady_s: float = 120.0
    obstacle: Callable[[], str] = lambda: ""
    quote: bool = False


@dataclass(slots=True)
class _Slot:
    kept: Kept
    daemon: Daemon | None = None
    ready: bool = False
    started: float = 0.0
    due: float = 0.0
    wait_s: float = 0.0
    was_ready: bool = False
    began: bool = False
    oom_kills: int = 0


class Supervisor:
    """Keeps daemons running in ``group``; :meth:`step` does what is due and never blocks on a daemon that starts."""

    def __init__(
        self,
        group: ProcessGroup,
        kept: Sequence[Kept],
        *,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group, self._report, self._clock = group, report, clock
        self._slots = [_Slot(one, wait_s=one.first_s) for one in kept]

    @property
    def ready(self) -> bool:
        """Whether every daemon runs and is ready now."""
        return all(slot.ready for slot in self._slots)

    def step(self) -> None:
        """Look after every daemon once."""
        for slot in self._slots:
            if slot.daemon is None:
                if self._clock() >= slot.due:
                    self._start(slot)
            elif (status := slot.daemon.returncode) is not None:
                why = f"status {status}" if status >= 0 else f"signal {-status}"
                if status == -signal.SIGKILL and _oom_kills() > slot.oom_kills:
                    why += "; the kernel ended a process for want of memory meanwhile"
                self._ended(slot, why, killed=status < 0)
            elif not slot.ready:
                self._ask(slot)
            elif self._clock() - slot.started > slot.kept.steady_s:
                slot.wait_s = slot.kept.first_s
            if not slot.was_ready:
                return  # the first time in order; later each comes back by itself

    def run(self, *, on_ready: Callable[[], None] = lambda: None) -> None:
        """Keep on until interrupted (SIGINT, SIGTERM); ``on_ready`` is called once, when all are ready."""
        told = False
        while True:
            self.step()
            if self.ready and not told:
                told = True
                self._report("all-ready")
                on_ready()
            time.sleep(POLL_S)

    def _start(self, slot: _Slot) -> None:
        spec = slot.kept.spec()
        if why := slot.kept.obstacle():
            self._again(slot, spec, why, killed=False)
            return
        _rotate(spec.log)
        slot.oom_kills = _oom_kills()
        slot.daemon, slot.started, slot.ready, slot.began = self._group.begin(spec), self._clock(), False, True
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

    def _ended(self, slot: _Slot, why: str, *, killed: bool) -> None:
        assert slot.daemon is not None
        spec = slot.daemon.spec
        self._group.stop(slot.daemon)  # whatever it started
        self._again(slot, spec, why, killed=killed)

    def _again(self, slot: _Slot, spec: DaemonSpec, why: str, *, killed: bool) -> None:
        """Say that a daemon does not run, and plan its next start."""
        pause_s = max(slot.wait_s, slot.kept.after_kill_s) if killed else slot.wait_s
        slot.due, slot.wait_s = self._clock() + pause_s, min(2 * slot.wait_s, slot.kept.longest_s)
        slot.daemon, slot.ready = None, False
        said = {"said": last_words(spec.log)} if slot.kept.quote and not killed and slot.began else {}
        slot.began = False
        facts = {"daemon": spec.label, "why": why, **said, "again_in_s": round(pause_s, 1), "log": str(spec.log)}
        self._report("daemon-ended", **facts)


def json_report(path: Path) -> Report:
    """A report that appends to ``path`` and to stderr; a full disk silences the file and stops nothing."""

    def report(event: str, **facts: object) -> None:
        line = json.dumps({"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts})
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as log:
                log.write(line + "\n")

    return report


def last_words(log: Path) -> str:
    """The last line of a log that says what is wrong, else its last line; at most 400 characters."""
    lines = [line.strip() for line in log_tail(log).splitlines() if line.strip()]
    telling = [line for line in lines if re.search(r"to fix:|\berror\b", line, re.IGNORECASE)]
    return (telling or lines or [""])[-1][:400]


def _oom_kills() -> int:
    """How many processes the kernel has ended for want of memory, under any limit; 0 where it does not say."""
    with contextlib.suppress(OSError, ValueError):
        words = Path("/proc/vmstat").read_text(encoding="ascii").split()
        return int(words[words.index("oom_kill") + 1])
    return 0


def _rotate(log: Path) -> None:
    """One older log is kept; a daemon that fails for days fills no disk."""
    with contextlib.suppress(OSError):
        if log.stat().st_size > LOG_MAX_BYTES:
            log.replace(log.with_name(f"{log.name}.1"))
