"""Starts, watches and stops the long-running processes (daemons) of a federation, and leaves none of them behind.

Called by the demo, by `up` commands and by supervision. A daemon counts as started when its readiness check succeeds. A
daemon that dies or does not become ready raises ``DaemonFailed`` with its last log lines. Every daemon has a tag in its
environment, which its children inherit, so a child that moved to another session is still found and stopped.
Orphans are reaped by this process (``PR_SET_CHILD_SUBREAPER``). If this process itself is killed, the kernel ends the
daemons (``PR_SET_PDEATHSIG``). All of this works on Linux, where ``/proc`` is read; elsewhere only the daemon's process
group is stopped, because there is no other process to read.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType, TracebackType

from common.errors import DaemonFailed, InvalidInput
from common.plain import plain


@dataclass(frozen=True, slots=True)
class Process:
    """One process as the kernel describes it now.

    Attributes:
        pid: Process id.
        ended: True if it has ended, but its parent has not reaped it (a zombie).
        parent: Process id of its parent.
        group: Id of its process group.
        session: Id of its session.
        threads: Number of its threads.
    """

    pid: int
    ended: bool
    parent: int
    group: int
    session: int
    threads: int

    @property
    def folder(self) -> Path:
        """The folder in which the kernel shows the process."""
        return Path("/proc", str(self.pid))


def process(pid: int) -> Process | None:
    """Read one process.

    Args:
        pid: Its process id.

    Returns:
        The process; None if it is gone.
    """
    try:
        stat = Path("/proc", str(pid), "stat").read_bytes()
        state, *numbers = stat[stat.rindex(b")") + 2 :].split(maxsplit=18)[:18]  # the program's name may hold spaces
        parent, group, session = map(int, numbers[:3])
        return Process(pid, state in (b"Z", b"X"), parent, group, session, threads=int(numbers[16]))
    except (OSError, ValueError, IndexError):
        return None


def processes() -> Iterator[Process]:
    """Yield all visible processes, one after the other."""
    for entry in os.scandir("/proc") if os.path.isdir("/proc/self") else ():
        if entry.name.isdigit() and (found := process(int(entry.name))) is not None:
            yield found


READY_TIMEOUT_S = 300.0
"""Default of :attr:`DaemonSpec.ready_timeout_s`. On a machine under load, 60 s were too few for SuperExec."""
TAG = "CONSILIUM_DAEMON"
"""Environment variable that marks a daemon and all processes it starts. Its value is ``<group>.<number>.``"""

_INHERITED = (
    "PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "XDG_RUNTIME_DIR",
    "PYTHONUTF8",  # daemons read the names of patients' files as the command that starts them
    "CONSILIUM_STATE_DIR", "XDG_STATE_HOME",  # folder of the list of this machine's site ledgers
)  # fmt: skip

_PROXY = ("http_proxy", "https_proxy", "no_proxy")

# Runs between fork and the daemon, in an interpreter of its own, because code run in a forked copy of a threaded
# process may deadlock. exec keeps the pid, the signal at the parent's death, and oom_score_adj. The latter is raised so
# that the kernel, when memory runs out, prefers to kill a daemon and not the process that can start it again.
_LAUNCH = """
import ctypes, os, signal, sys
parent, argv = int(sys.argv[1]), sys.argv[2:]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_SETMASK, ())
if parent:
    ctypes.CDLL(None).prctl(1, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(143)
try:
    with open("/proc/self/oom_score_adj", "r+") as file:
        raised = min(1000, int(file.read()) + 300)
        file.seek(0)
        file.write(str(raised))
except OSError:
    pass
try:
    os.execv(argv[0], argv)
except OSError as error:
    sys.exit(f"cannot run {argv[0]}: {error.strerror}")
"""

_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0e-\x1f\x7f-\x9f]")


class Terminated(KeyboardInterrupt):
    """Raised when SIGTERM or SIGHUP reaches a process that owns daemons; ``signum`` is the signal.

    It ends the process as Ctrl-C does, so that the daemons are stopped.
    """

    def __init__(self, signum: int) -> None:
        self.signum = signum
        super().__init__(f"stopped by {signal.Signals(signum).name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSpec:
    """The facts needed to start one daemon.

    Attributes:
        role: Group of daemons that stop together, such as ``supernode``.
        name: Distinguishes daemons of one role.
        argv: Program (an absolute path) and arguments. It must contain no secret, because every user of the machine can
            read it.
        env: The whole environment; start from :func:`base_env`.
        cwd: Working directory.
        log: File for stdout and stderr.
        ready: Called until it returns True; None if it is enough that the program runs for 0.2 s.
        ready_timeout_s: Seconds in which the daemon must be ready.
        grace_s: Seconds that it has to end after SIGINT, before it is killed.
        show_log: False if its log may mention a site's cases; the log is then never quoted in errors.
    """

    role: str
    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: Path
    log: Path
    ready: Callable[[], bool] | None = None
    ready_timeout_s: float = READY_TIMEOUT_S
    grace_s: float = 10.0
    show_log: bool = True

    def __post_init__(self) -> None:
        if not self.argv or not Path(self.argv[0]).is_absolute():
            raise InvalidInput("a daemon's program", value=self.argv[:1], limit="an absolute path")

    @property
    def label(self) -> str:
        """Role and name, or the role alone if both are the same."""
        return self.role if self.role == self.name else f"{self.role} {self.name}"


@dataclass(frozen=True, slots=True, eq=False)
class Daemon:
    """A started daemon. It leads its own session; ``pid`` is also its process group."""

    spec: DaemonSpec
    tag: str
    _process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        """Process id of the daemon."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the daemon; None while it runs, negative if a signal ended it."""
        return self._process.poll()

    @property
    def alive(self) -> bool:
        """True while the daemon itself runs."""
        return self.returncode is None

    def check(self) -> None:
        """Raise ``DaemonFailed``, with exit status and last log lines, unless the daemon runs."""
        code = self.returncode
        if code is not None:
            raise DaemonFailed(_obituary(self.spec, _status(code)))

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the daemon to end by itself.

        Args:
            timeout_s: Longest wait in seconds.

        Returns:
            Its exit status; None if it still runs after this time.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def wait_ready(self) -> None:
        """Call ``spec.ready`` every 50 ms until it returns True.

        Raises:
            DaemonFailed: If the daemon ends, or is not ready after ``spec.ready_timeout_s``.
        """
        started = time.monotonic()
        deadline = started + self.spec.ready_timeout_s
        while True:
            self.check()
            if self.spec.ready is None:
                if self._is_launching():
                    started = time.monotonic()
                elif time.monotonic() - started >= 0.2:
                    self.check()
                    return
            else:
                with contextlib.suppress(OSError):
                    if self.spec.ready():
                        return
            if time.monotonic() > deadline:
                raise DaemonFailed(_obituary(self.spec, f"was not ready after {self.spec.ready_timeout_s:g} s"))
            time.sleep(0.05)

    def _is_launching(self) -> bool:
        """Return whether the launcher has not yet become the daemon (exec)."""
        try:
            return _LAUNCH.encode() in Path("/proc", str(self.pid), "cmdline").read_bytes()
        except OSError:  # the daemon ended, or this system has no /proc
            return False

    def members(self) -> frozenset[int]:
        """Return the pids of the daemon and of everything it started that is still alive."""
        return _members(self.tag, session=self.pid if self.alive else None)

    def stop(self, *, grace_s: float | None = None) -> None:
        """End the daemon and everything it started: send its stop signal, and SIGKILL to processes that remain.

        Calling it again does no harm.

        Args:
            grace_s: Seconds before SIGKILL; ``spec.grace_s`` if None, 0 for SIGKILL at once.
        """
        _stop_together([self], grace_s=grace_s, hurry=lambda: False)


class ProcessGroup:
    """Context manager that owns daemons. When the block ends for any reason, all of them are stopped.

    Daemons stop in reverse order of their start, those of one role together. SIGTERM and SIGHUP end the block like
    Ctrl-C (``Terminated``); a second signal while stopping skips the grace time. Use it from the main thread: signals
    are handled only there, and the kernel's death signal is bound to the thread that started a daemon.
    """

    def __init__(self) -> None:
        self._tag = secrets.token_hex(8)
        self._daemons: list[Daemon] = []
        self._leaders: set[int] = set()
        self._seen: set[int] = set()
        self._started = 0
        self._stopping = False
        self._hurry = False
        self._handlers: dict[int, object] = {}
        self._was_reaper = False

    @property
    def daemons(self) -> tuple[Daemon, ...]:
        """All daemons started so far in order, including those that ended."""
        return tuple(self._daemons)

    def start(self, spec: DaemonSpec) -> Daemon:
        """Start one daemon and wait until it is ready.

        Args:
            spec: The daemon.

        Returns:
            The running daemon.

        Raises:
            DaemonFailed: If it is not ready in time; it is then stopped.
        """
        return self.start_all([spec])[0]

    def start_all(self, specs: Iterable[DaemonSpec]) -> tuple[Daemon, ...]:
        """Start several daemons at once and wait until all are ready.

        Args:
            specs: The daemons.

        Returns:
            The running daemons.

        Raises:
            DaemonFailed: If one is not ready in time; all of them are then stopped.
        """
        begun: list[Daemon] = []
        try:
            for spec in specs:
                begun.append(self.begin(spec))
            for daemon in begun:
                daemon.wait_ready()
        except DaemonFailed:
            self._seen |= _stop_together(begun, grace_s=2.0, hurry=lambda: self._hurry)
            raise
        return tuple(begun)

    def begin(self, spec: DaemonSpec) -> Daemon:
        """Start one daemon without waiting, for daemons that end by themselves.

        Args:
            spec: The daemon.

        Returns:
            The daemon.
        """
        self._started += 1
        tag = f"{self._tag}.{self._started}."
        spec.log.parent.mkdir(parents=True, exist_ok=True)
        spec.cwd.mkdir(parents=True, exist_ok=True)
        parent = os.getpid() if sys.platform == "linux" and threading.current_thread() is threading.main_thread() else 0
        with open(os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            started = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(parent), *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec.cwd,
                env={**spec.env, TAG: tag},
                start_new_session=True,
            )
        daemon = Daemon(spec, tag, started)
        self._daemons.append(daemon)
        self._leaders.add(daemon.pid)
        return daemon

    def check(self) -> None:
        """Raise ``DaemonFailed`` for the first daemon that ended by itself."""
        self._reap_orphans()
        for daemon in self._daemons:
            daemon.check()

    def stop(self, *daemons: Daemon) -> None:
        """Stop daemons together and forget them, so that :meth:`check` no longer expects them.

        Args:
            daemons: The daemons. Those that were stopped before may be among them.
        """
        self._seen |= _stop_together(list(daemons), grace_s=None, hurry=lambda: self._hurry)
        self._reap_orphans()
        self._daemons = [daemon for daemon in self._daemons if daemon not in daemons]

    def stop_all(self) -> None:
        """Stop every daemon, the last started first, then everything else with the group's tag."""
        for _, same_role in groupby(reversed(self._daemons), key=lambda daemon: daemon.spec.role):
            self._seen |= _stop_together(list(same_role), grace_s=None, hurry=lambda: self._hurry)
        self._sweep()

    def _sweep(self) -> None:
        """Kill everything with the group's tag, including processes that were forked but not registered yet."""
        deadline = time.monotonic() + 5.0
        while (found := _members(f"{self._tag}.", session=None)) and time.monotonic() < deadline:
            self._seen |= found
            _signal_each(found, signal.SIGKILL)
            time.sleep(0.02)
        while _dying(self._seen) and time.monotonic() < deadline:
            time.sleep(0.02)
        self._reap_orphans()

    def _reap_orphans(self) -> None:
        """Reap ended orphans of the daemons' sessions, or seen in them, which would otherwise stay zombies.

        The daemons themselves and children that other code started are reaped by their ``Popen`` objects.
        """
        if not _child_ended():
            return
        me = os.getpid()
        for one in processes():
            orphan = one.session in self._leaders or one.pid in self._seen
            if one.pid not in self._leaders and one.ended and one.parent == me and orphan:
                with contextlib.suppress(OSError):
                    os.waitpid(one.pid, os.WNOHANG)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stopping:
            self._hurry = True
        elif signum == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            raise Terminated(signum)

    def __enter__(self) -> ProcessGroup:
        atexit.register(self._sweep)
        self._was_reaper = _adopt_orphans(True)
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(signum) != signal.SIG_IGN:  # a signal that nohup ignores stays ignored
                    self._handlers[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping = True
        try:
            self.stop_all()
        finally:
            for signum, handler in self._handlers.items():
                signal.signal(signum, handler)  # type: ignore[arg-type]
            self._handlers.clear()
            _adopt_orphans(self._was_reaper)
            atexit.unregister(self._sweep)


def stop_on_signals() -> threading.Event:
    """Make SIGTERM and SIGINT set an event instead of ending this process, and return the event.

    Returns:
        The event.
    """
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def base_env(**extra: str) -> dict[str, str]:
    """Return a small environment for a daemon: this process's variables that are on an allow-list, and ``extra``.

    Credentials in this process's environment are not passed on. The folder of this interpreter comes first on ``PATH``,
    because Flower's daemons start their helpers by bare name.

    Args:
        **extra: Further variables.

    Returns:
        The environment.
    """
    kept = {name: value for name, value in os.environ.items() if name in _INHERITED or name.startswith("LC_")}
    folders = dict.fromkeys([*map(str, _script_folders()), *kept.get("PATH", os.defpath).split(os.pathsep)])
    return {**kept, "PATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1", **extra}


def proxy_env() -> dict[str, str]:
    """Return the HTTP proxy settings of this process, for daemons that call other machines. Loopback bypasses the
    proxy.
    """
    found = {name: value for name in _PROXY for key in (name, name.upper()) if (value := os.environ.get(key))}
    if not found:
        return {}
    bypass = dict.fromkeys([*found.get("no_proxy", "").split(","), "127.0.0.1", "localhost", "::1"])
    return {**found, "no_proxy": ",".join(name for name in bypass if name)}


def executable(name: str) -> str:
    """Return the path of a command that is installed beside this interpreter, or on ``PATH``.

    Args:
        name: The command.

    Returns:
        An absolute path.

    Raises:
        DaemonFailed: If it is not installed.
    """
    for folder in _script_folders():
        if os.access(folder / name, os.X_OK):
            return str(folder / name)
    if found := shutil.which(name):
        return os.path.abspath(found)
    raise DaemonFailed(
        f"the command {name!r} is not installed beside {sys.executable}; to fix: install Consilium again"
    )


def plain_text(path: Path, *, since: int = 0, max_bytes: int = 4096) -> str:
    """Return the end of a log without empty lines, with control characters escaped.

    Args:
        path: The log.
        since: Position of the first byte to read.
        max_bytes: Largest number of bytes to read.

    Returns:
        The text; empty if there is no log.
    """
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0 if since > end else since, end - max_bytes))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(plain(_COLOURS.sub("", line)) for line in text.splitlines() if line.strip())


def _script_folders() -> list[Path]:
    return [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]


def _status(code: int) -> str:
    if code >= 0:
        return f"ended with status {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _obituary(spec: DaemonSpec, what: str) -> str:
    tail = plain_text(spec.log) if spec.show_log else ""
    quoted = "".join(f"\n  | {line}" for line in tail.splitlines()[-12:])
    return f"{spec.label} {what}; its log is {spec.log}{quoted}"


def _members(tag: str, *, session: int | None) -> frozenset[int]:
    """Return living processes whose environment has a tag that starts with ``tag``, or that belong to ``session``."""
    needle = f"{TAG}={tag}".encode()
    found = set()
    for one in processes():
        if one.ended:
            continue
        if one.session == session:
            found.add(one.pid)
            continue
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if any(item.startswith(needle) for item in (one.folder / "environ").read_bytes().split(b"\0")):
                found.add(one.pid)
    return frozenset(found - {os.getpid()})


def _dying(pids: Iterable[int]) -> bool:
    """Return whether one of these processes is a child of this process and has not ended yet.

    :func:`_members` finds processes by their environment. A killed process loses its environment before it ends, so
    :func:`_members` may not find it any more.
    """
    return any(one is not None and one.parent == os.getpid() and not one.ended for one in map(process, pids))


def _adopt_orphans(on: bool) -> bool:
    """Set whether this process adopts orphaned descendants, and return the earlier setting. Linux only."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None)
    before = ctypes.c_int(0)
    libc.prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
    libc.prctl(36, int(on), 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    return bool(before.value)


def _signal_each(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, signum)


def _child_ended() -> bool:
    """Return whether a child of this process has ended and is not reaped; far quicker than to read all processes."""
    if sys.platform != "linux":
        return False
    with contextlib.suppress(ChildProcessError):
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def _stop_together(daemons: Sequence[Daemon], *, grace_s: float | None, hurry: Callable[[], bool]) -> frozenset[int]:
    """Stop daemons together, and return the pids of all their processes.

    Each daemon gets SIGINT. Processes that still run after the grace time are killed.
    """
    started = time.monotonic()
    seen = _all_members(daemons)
    for daemon in daemons:
        if daemon.alive:  # not reaped yet, so the process group's id cannot have been reused
            with contextlib.suppress(OSError):
                os.killpg(daemon.pid, signal.SIGINT if grace_s != 0.0 else signal.SIGKILL)
    for daemon in daemons:
        grace = daemon.spec.grace_s if grace_s is None else grace_s
        while daemon.alive and time.monotonic() - started < grace and not hurry():
            time.sleep(0.02)
    if not hurry() and grace_s != 0.0:  # helpers in other sessions get a moment to end by themselves
        left = _all_members(daemons)
        seen |= left
        _signal_each(left - {daemon.pid for daemon in daemons}, signal.SIGTERM)
        deadline = time.monotonic() + min(1.0, max(daemon.spec.grace_s for daemon in daemons))
        while _all_members(daemons) - {daemon.pid for daemon in daemons} and time.monotonic() < deadline:
            time.sleep(0.05)
    deadline = time.monotonic() + 5.0
    while time.monotonic() < deadline:
        left = _all_members(daemons)
        seen |= left
        alive = [daemon for daemon in daemons if daemon.alive]
        if not left and not alive:
            break
        for daemon in alive:
            with contextlib.suppress(OSError):
                os.killpg(daemon.pid, signal.SIGKILL)
        _signal_each(left, signal.SIGKILL)
        time.sleep(0.02)
    return seen


def _all_members(daemons: Sequence[Daemon]) -> frozenset[int]:
    return frozenset[int]().union(*(daemon.members() for daemon in daemons))
