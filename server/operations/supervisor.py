"""Starts a study's daemons, submits its ServerApp, follows the run's events, and submits again if the ServerApp dies.

`consilium server up`, `consilium study run` and the dashboard call it. Flower does not restart a ServerApp that was
killed. When a run dies, the kernel frees its lock of the study; the supervisor sees this and submits another run, which
continues from the ledger. No run is submitted after :data:`RESTARTS` restarts, or after a run that reported an error
(budget, quorum, invalid input), because another attempt would end in the same way.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import itertools
import re
import shlex
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import ConsiliumError, DaemonFailed, InvalidInput
from common.events import EventTail, read_events
from common.objects import check_room, write_atomically
from common.pki import ServerIdentity
from common.process import READY_TIMEOUT_S, DaemonSpec, base_env, plain_text
from common.security_log.program import kept_log, with_backlog
from common.sockets import accepts, answers_http, reachable
from common.supervision import (
    AnswerWatch,
    DaemonStanding,
    KeptRunning,
    all_of_a_study,
    keep_running,
    last_words,
    standings,
    unrecorded,
)
from server.aggregation.relay import SOCKET as CORE_SOCKET
from server.aggregation.relay import answers as core_answers
from server.operations.daemons import (
    HOST,
    FlowerServer,
    app_dir,
    prepare,
    run_status,
    stop_run,
    submit,
    superexec,
    superlink,
    unfinished_runs,
)
from server.operations.listener import cannot_listen
from server.operations.one_port import BEHIND, read_behind
from server.operations.port_certificate import certificate_obstacle
from server.study.locks import held_alone
from server.study.run_state import DIED, SUPERVISED, supervised
from server.study.workspace import BUSY, Workspace

START_TIMEOUT_S = READY_TIMEOUT_S
"""Seconds in which a submitted run must report its start, because on a busy machine its process begins slowly."""
START_LOOK_S = 15.0
"""Interval in seconds at which SuperLink is asked whether a submitted run ended without reporting its start."""
SUPERLINK_BACK_S = 60.0
"""Seconds to wait, before a run is submitted, for a SuperLink that is being restarted."""
RESTARTS = 3
UNTOLD = 0
"""Recorded in place of a run's id until SuperLink has told it; its answer to a submission can be lost."""
POLL_S = 0.3
SOCKET = "fleet.sock"
LOG_MODULE = "server.operations.security_events"
PARTS = ("core", "network")
"""The two parts of a server, which can run as two users or in two containers."""
IDENTITY = ("ca.crt", "server.crt", "server.key")
"""Files of SuperLink's TLS identity, in ``flower/``."""

DAMAGED = ("file is not a database", "database disk image is malformed")
"""What SQLite says about a file that it can neither read nor repair."""
_DATABASE_ERROR = re.compile(r"\(sqlite3\.\w+\) (.+)")

OnEvent = Callable[[dict[str, Any]], None]


class RunFailed(ConsiliumError):
    """The run ended with an error of its own; the ledger is intact and `consilium study resume` continues from it.

    Args:
        reason: The error's text.
        code: Exit code of the error that ended the run. Any other value than an integer from 1 to 127 is replaced by
            the default.
    """

    def __init__(self, reason: str, *, code: object = ConsiliumError.exit_code) -> None:
        super().__init__(reason)
        self.exit_code = code if type(code) is int and 1 <= code < 128 else ConsiliumError.exit_code


def flower_server(workspace: Workspace) -> FlowerServer:
    """Return the folders, port and TLS identity of the study's SuperLink.

    Args:
        workspace: The study's directory.

    Returns:
        The server, for the functions of :mod:`server.operations.daemons`.
    """
    folder, client = workspace.flower_dir, workspace.root / "keys" / "flower"
    authority, certificate, key = (folder / name for name in IDENTITY)
    identity = ServerIdentity(authority=authority, certificate=certificate, key=key)
    return FlowerServer(folder=folder, client=client, port=workspace.endpoint().internal_port, identity=identity)


def prepare_network(workspace: Workspace) -> None:
    """Write the files that SuperLink and the operator's commands need, and create the folders of the sockets.

    A second call changes nothing.

    Args:
        workspace: The study, set up by `consilium provision server`.
    """
    server = flower_server(workspace)
    for name in IDENTITY:
        if not (server.folder / name).exists():  # an earlier version kept them in another folder
            write_atomically(server.folder / name, (workspace.tls_dir / name).read_bytes(), mode=0o600)
    workspace.copy_endpoint()
    prepare(server)
    for folder in (workspace.relay_dir, workspace.fleet_dir):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def core_daemon(workspace: Workspace) -> DaemonSpec:
    """Return how to start the core, the process that has the keys and the ledger and makes the releases.

    Args:
        workspace: The study's directory.

    Returns:
        The daemon. A socket left by an earlier core is deleted.
    """
    folder = workspace.relay_dir.absolute()
    (folder / CORE_SOCKET).unlink(missing_ok=True)
    return _daemon(
        "core",
        ("server.aggregation.core", "--study", str(workspace.root.absolute()), "--socket", CORE_SOCKET),
        cwd=folder,
        log=workspace.root.absolute() / "logs" / "core.log",
        ready=lambda: core_answers(folder),
    )


def explain_superlink(text: str) -> str:
    """Explain why SuperLink ended, from its log.

    Args:
        text: The log since SuperLink's start.

    Returns:
        The reason in words, with a remedy where one is known.
    """
    found = _DATABASE_ERROR.findall(text)
    if not found:
        return last_words(text)
    if found[-1] in DAMAGED:
        return (
            f"SuperLink cannot use its database flower/superlink.db: {found[-1]}; to fix: move every file "
            "flower/superlink.db* away, so that SuperLink makes a new one. `consilium provision list` then says what "
            "each site needs; only messages on their way are lost"
        )
    return f"SuperLink cannot use its database flower/superlink.db: {found[-1]}"


def fleet_daemon(workspace: Workspace) -> DaemonSpec:
    """Return how to start the proxy between the gateway and SuperLink (:mod:`server.operations.fleet`).

    Args:
        workspace: The study's directory.

    Returns:
        The daemon. A socket left by an earlier proxy is deleted.
    """
    server, folder = flower_server(workspace), workspace.fleet_dir.absolute()
    (folder / SOCKET).unlink(missing_ok=True)
    return _daemon(
        "fleet",
        (  # a Unix socket's path has at most 107 bytes, so it is named from its own folder
            *("server.operations.fleet", "--socket", SOCKET),
            *("--superlink", server.address, "--superlink-ca", str(server.identity.authority.absolute())),
        ),
        cwd=folder,
        log=server.logs / "fleet.log",
        ready=lambda: answers_http(folder / SOCKET),
    )


def gateway_daemon(workspace: Workspace, *, bind: str) -> DaemonSpec:
    """Describe how to start the gateway, the process that listens at the one port that sites reach.

    Args:
        workspace: The study whose gateway it is.
        bind: The address to listen on.

    Returns:
        The daemon.
    """
    endpoint, root, folder = workspace.endpoint(), workspace.root.absolute(), workspace.gateway_dir.absolute()
    return _daemon(
        "gateway",
        (
            *("server.operations.gateway", "--objects", str(root / "objects"), "--nodes", str(folder / "nodes.json")),
            *("--certificate", str(folder / "server.crt"), "--key", str(folder / "server.key")),
            *("--bind", bind, "--port", str(endpoint.port), "--fleet", SOCKET),
        ),
        cwd=workspace.fleet_dir.absolute(),
        log=flower_server(workspace).logs / "gateway.log",
        ready=lambda: gateway_answers(bind, endpoint.port, folder / "ca.crt"),
    )


def _daemon(role: str, module: tuple[str, ...], *, cwd: Path, log: Path, ready: Callable[[], bool]) -> DaemonSpec:
    """Return how to start a daemon that is a module of Consilium; ``module`` is its name and its arguments."""
    argv = (sys.executable, "-P", "-m", *module)
    return DaemonSpec(role=role, name=role, argv=argv, env=base_env(), cwd=cwd, log=log, ready=ready)


def study_daemons(root: Path, log_to: Sequence[str] = ()) -> DaemonSpec:
    """Return the daemon that starts all daemons of another study, which is served at this study's port.

    This daemon is the process `consilium server up` for the other study.

    Args:
        root: The other study's directory.
        log_to: Targets of its security events.

    Returns:
        How to start that process.
    """
    workspace = Workspace(root)
    return all_of_a_study(
        ("server", "up", str(root.absolute())),
        root,
        log="server.log",
        ready=lambda: core_answers(workspace.relay_dir) and answers_http(workspace.fleet_dir / SOCKET),
        log_to=log_to,
    )


def study_gone(root: Path, entry: Path) -> str:
    """Explain why the daemons of another study cannot be started: its directory is missing.

    Args:
        root: The other study's directory.
        entry: The file by which the gateway serves it.

    Returns:
        The reason with its remedy; empty if the directory holds a study.
    """
    if (root / "study.toml").exists():
        return ""
    return (
        f"{root} holds no study; to fix: put the study's directory back, or, if it was deleted on purpose, `rm "
        f"{shlex.quote(str(entry))}`; then start `consilium server up` again"
    )


def gateway_answers(bind: str, port: int, authority: Path) -> bool:
    """Return whether a gateway of this consortium listens at an address and refuses an unsigned request.

    Args:
        bind: Address that the gateway listens on.
        port: Its port.
        authority: File with the certificate of the consortium's certificate authority.

    Returns:
        True if the answer has status 401, over TLS with a certificate of this authority.
    """
    context = ssl.create_default_context(cafile=str(authority))
    context.check_hostname = False  # its names may resolve to another address from here; the authority is still checked
    connection = http.client.HTTPSConnection(reachable(bind), port, timeout=2.0, context=context)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/", headers={"host": "localhost"})
        return connection.getresponse().status == 401
    return False


def port_taken(bind: str, port: int, *, option: str = "--port") -> str:
    """Explain why a port cannot be bound now.

    Args:
        bind: Address to listen on.
        port: Port to listen on.
        option: The option that the remedy names.

    Returns:
        The reason with its remedy; empty if the port is free.
    """
    if not accepts(bind, port):
        return ""
    return cannot_listen(OSError(errno.EADDRINUSE, ""), bind, port, option=option)


def serve(
    workspace: Workspace,
    *,
    bind: str,
    parts: Collection[str] = PARTS,
    gateway: bool = True,
    on_ready: Callable[[], None] = lambda: None,
    log_to: Sequence[str] = (),
) -> None:
    """Run a server's daemons until a signal arrives, and restart any that ends.

    The part ``core`` prepares the folders of the part ``network`` and sends the security events. A study that is served
    at another study's port starts no gateway. If both parts run here, the daemons of every study that is served at this
    study's port run, too.

    Args:
        workspace: The study.
        bind: Address that the gateway listens on.
        parts: The parts to run. ``core`` holds the keys and the ledger. ``network`` consists of SuperLink, its fleet
            proxy, SuperExec with the ServerApp, and the gateway unless it runs elsewhere. Of the study's directory,
            ``network`` needs only ``flower/``, ``relay/`` and ``gateway/run/``, and for the gateway ``gateway/`` and
            ``objects/``.
        gateway: False if the gateway runs elsewhere.
        on_ready: Called once all daemons are ready.
        log_to: Targets of the security events.
    """
    kept, keep = [], partial(KeptRunning, explain=last_words)
    if "core" in parts:
        prepare_network(workspace)
        kept.append(keep(spec=partial(core_daemon, workspace)))
        if log_to:
            kept.append(kept_log(workspace.root, module=LOG_MODULE, name="log", targets=log_to))
    server, endpoint = flower_server(workspace), workspace.endpoint()
    if "network" in parts:
        taken = partial(port_taken, HOST, endpoint.internal_port, option="--internal-port")
        kept += [
            keep(spec=partial(superlink, server), obstacle=taken, explain=explain_superlink),
            keep(spec=partial(fleet_daemon, workspace)),
            keep(spec=partial(superexec, server, relay=workspace.relay_dir)),
        ]
    if "network" in parts and gateway and not endpoint.behind:
        answers = partial(gateway_answers, bind, endpoint.port, workspace.gateway_dir / "ca.crt")
        watch = AnswerWatch(
            "the gateway has not answered", answers, remedy="see gateway.log, then restart `consilium server up`"
        )
        kept.append(
            keep(
                spec=lambda: replace(gateway_daemon(workspace, bind=bind), ready=watch.ask),
                obstacle=lambda: certificate_obstacle(workspace) or port_taken(bind, endpoint.port),
                offline=watch,
            )
        )
    if set(PARTS) <= set(parts):
        for other in read_behind(workspace.gateway_dir / BEHIND):
            gone = partial(study_gone, Path(other.directory), workspace.gateway_dir / BEHIND / f"{other.study}.json")
            kept.append(keep(spec=partial(study_daemons, Path(other.directory), log_to), obstacle=gone))
    keep_running(workspace.root / "logs" if "core" in parts else server.logs, kept, on_ready=on_ready)


def daemon_standings(workspace: Workspace) -> tuple[DaemonStanding, ...]:
    """Return the state of every daemon of this server, and of its gateway.

    Args:
        workspace: The study's directory.

    Returns:
        The states, from those logs that this user can read.
    """
    own, keeper = standings((workspace.root / "logs", workspace.flower_dir / "logs")), workspace.port_keeper()
    own = with_backlog(own, workspace.root)
    if keeper is workspace:
        return own
    theirs = standings((keeper.root / "logs", keeper.flower_dir / "logs"))
    return (*own, *(one for one in theirs if one.daemon == "gateway"))


def no_daemons(workspace: Workspace) -> str:
    """Explain why :func:`daemon_standings` has found no daemon of a server.

    Args:
        workspace: The study's directory.

    Returns:
        The text.
    """
    return unrecorded((workspace.root / "logs", workspace.flower_dir / "logs"), command="consilium server up")


def _superlink_kept(workspace: Workspace) -> bool:
    """Return whether a supervisor is running that restarts SuperLink."""
    return any(one.daemon == "superlink" and one.state != "stopped" for one in daemon_standings(workspace))


def start_run(workspace: Workspace) -> int:
    """Submit the ServerApp for this study, and record the run id.

    If SuperLink is down and a supervisor restarts it, this function waits up to :data:`SUPERLINK_BACK_S` seconds for
    SuperLink. It then calls :func:`stop_open_runs`.

    Returns:
        Flower's id of the run.

    Raises:
        DaemonFailed: If SuperLink does not answer or refuses the run.
    """
    until, server = time.monotonic() + SUPERLINK_BACK_S, flower_server(workspace)
    while not accepts(HOST, server.port) and _superlink_kept(workspace) and time.monotonic() < until:
        time.sleep(POLL_S)
    stop_open_runs(workspace)
    workspace.save_run_id(UNTOLD)
    with tempfile.TemporaryDirectory(prefix="consilium-app-") as scratch:
        app = app_dir(Path(scratch) / "app")
        run_id = submit(server, app)
    workspace.save_run_id(run_id)
    return run_id


def stop_open_runs(workspace: Workspace) -> None:
    """Stop the study's previous run, as far as SuperLink allows, if it has reported no end.

    Without this, SuperLink would take about a minute to notice that the previous run's ServerApp was killed. Until then
    SuperNodes would wait for messages that this ServerApp had announced but not sent. A run that had not begun would
    begin by itself when SuperExec is started again. If SuperLink's answer to the last submission was lost, all
    unfinished runs are stopped.

    Args:
        workspace: The study.
    """
    for previous in _open_runs(workspace):
        with contextlib.suppress(DaemonFailed):  # SuperLink refuses to stop a run that has ended
            stop_run(flower_server(workspace), previous)


def _open_runs(workspace: Workspace) -> list[int]:
    """Return the previous runs that may not have ended: all of SuperLink's if the newest one's id is not known."""
    previous = workspace.run_id()
    if previous == UNTOLD:
        return _submitted(workspace)
    return [] if previous is None or _reported_end(workspace, previous) else [previous]


def request_stop(workspace: Workspace, *, now: bool = False) -> None:
    """Ask the run to stop at its next safe point, or at once if it has not begun. Stored answers are kept.

    Args:
        workspace: The study.
        now: True to tell Flower, in addition, to end the ServerApp at once.

    Raises:
        InvalidInput: If no run is active.
    """
    begun = workspace.busy()
    submitted = [] if begun else _submitted(workspace)
    if not begun and not submitted:
        raise InvalidInput("no run is active", value=str(workspace.root), remedy="see `consilium study status`")
    workspace.stop_file.touch()
    for run_id in unfinished_runs(flower_server(workspace)) if begun and now else submitted:
        stop_run(flower_server(workspace), run_id)
    workspace.stop_file.touch()  # a run that began meanwhile has deleted it


def _submitted(workspace: Workspace) -> list[int]:
    """Return Flower's runs of the study that have not ended; none if SuperLink does not answer."""
    try:
        return unfinished_runs(flower_server(workspace))
    except (DaemonFailed, InvalidInput):
        return []


def watch(workspace: Workspace, *, on_event: OnEvent) -> None:
    """Follow the active run from its first event until it ends; if no run is active, repeat the last run's events.

    Nothing is changed.

    Args:
        workspace: The study.
        on_event: Called with each event.

    Raises:
        InvalidInput: If the study has no run.
        RunFailed: If the run ended with an error, or died and no supervisor is left to submit it again.
        OSError: If it died and the disk with the study's folder is full or failing.
    """
    tail = EventTail(workspace.events_file)
    events = list(tail.new())
    starts = [number for number, event in enumerate(events) if event["event"] == "run-started"]
    if not starts and not workspace.busy():
        raise InvalidInput(
            "no run to watch", value=str(workspace.root), remedy="start a run with `consilium study run`"
        )
    alone = begun = False
    for event in itertools.chain(events[starts[-1] :] if starts else events, _tail(tail)):
        if event is not None:
            if event["event"] == "run-started":
                if begun:
                    on_event({"event": "run-restarted", "run": event["run"]})
                begun = True
            on_event(event)
            if event["event"] == "run-failed":
                raise RunFailed(event["reason"], code=event.get("code"))
            if event["event"] == "run-finished":
                return
        elif alone:  # the events it may have written before it died have been read by now
            check_room(workspace.root / "logs")
            raise RunFailed(DIED)
        else:
            alone = not workspace.busy() and not supervised(workspace)


def detach(workspace: Workspace, command: Sequence[str] = ()) -> None:
    """Start a process that supervises a run and survives the terminal; return once the run has begun.

    Args:
        workspace: The study.
        command: Command of the process; by default it runs :func:`main`. Its output goes to ``logs/run.log``.

    Raises:
        DaemonFailed: With the command's output, if it fails before the run begins.
        OSError: If it fails so and the disk with the study's folder is full or failing.
        StudyBusy: If another run is active.
    """
    command = command or (sys.executable, "-P", "-m", "server.operations.supervisor", str(workspace.root.absolute()))
    with workspace.locked():  # refuses while another run goes on
        workspace.endpoint()
    log = workspace.root / "logs" / "run.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    before = _runs(workspace)
    with log.open("wb") as out:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )
    threading.Thread(target=process.wait, daemon=True).start()  # reaps the process if the caller keeps running
    while process.poll() is None and _runs(workspace) == before:
        time.sleep(POLL_S)
    if process.returncode and _runs(workspace) == before:
        check_room(workspace.root / "logs")
        raise DaemonFailed(last_words(plain_text(log)).removeprefix("error: "))


def _runs(workspace: Workspace) -> int:
    """Return the number of events ``run-started`` in the study's event log, which tells whether a new run has begun."""
    return sum(event["event"] == "run-started" for event in read_events(workspace.events_file))


def supervise(
    workspace: Workspace,
    *,
    on_event: OnEvent = lambda _event: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run the study to its end. If the ServerApp dies, submit it again, at most :data:`RESTARTS` times.

    Args:
        workspace: The study.
        on_event: Called with each event, and with ``run-restarted`` at each new attempt.
        check: Called several times a second. An error that it raises ends the supervision, for instance because a
            daemon died.

    Raises:
        RunFailed: If the run ended with an error, or died on every attempt.
        StudyBusy: If another run is active or supervised.
    """
    with held_alone(workspace.root / SUPERVISED, busy=BUSY.format(workspace.root)):
        with workspace.locked():
            pass  # refuses while another run goes on, before anything is submitted
        for remaining in reversed(range(RESTARTS + 1)):
            tail = EventTail(workspace.events_file, from_end=True)
            run_id = start_run(workspace)
            ending = _follow(workspace, run_id, tail, on_event=on_event, check=check)
            if ending == "run-finished" or workspace.stop_file.exists():  # the file is left if a stop killed the run
                return
            if remaining:
                on_event({"event": "run-restarted", "run": str(run_id)})
    raise RunFailed(f"the ServerApp died {RESTARTS + 1} times; to fix: see `consilium study status` and the logs")


def _follow(workspace: Workspace, run_id: int, tail: EventTail, *, on_event: OnEvent, check: Callable[[], None]) -> str:
    """Pass the study's events to ``on_event`` until this run ends.

    Returns:
        ``"run-finished"``; or ``"died"`` if the run's process ended before it reported its start, or if the run
        released the study's lock without reporting its end.

    Raises:
        RunFailed: If the run reported an error.
        DaemonFailed: If the run does not begin within :data:`START_TIMEOUT_S`.
    """
    started = ended = False
    submitted = looked = time.monotonic()
    for event in _tail(tail):
        check()
        if event is None:
            if ended and not started:  # the events it may have written before it ended have been read by now
                return "died"
            if not started and time.monotonic() - looked > START_LOOK_S:
                looked = time.monotonic()
                ended = _ended(workspace, run_id, late=looked - submitted > START_TIMEOUT_S)
            if started and not workspace.busy() and not _reported_end(workspace, run_id):
                return "died"
            continue
        on_event(event)
        if event.get("run") != str(run_id):
            continue
        if event["event"] == "run-started":
            started = True
        if event["event"] == "run-failed":
            raise RunFailed(event["reason"], code=event.get("code"))
        if event["event"] == "run-finished":
            return "run-finished"
    return "died"


def _reported_end(workspace: Workspace, run_id: int) -> bool:
    """Return whether a run of the study reported, in the study's events, that it finished or failed."""
    return any(
        event["event"] in ("run-finished", "run-failed") and event["run"] == str(run_id)
        for event in read_events(workspace.events_file)
    )


def _ended(workspace: Workspace, run_id: int, *, late: bool) -> bool:
    """Return whether SuperLink reports that a run has ended; False if SuperLink does not answer.

    ``late`` is True if the run should have reported its start by now.

    Raises:
        DaemonFailed: If ``late`` is True and SuperLink does not report that the run has ended.
    """
    server = flower_server(workspace)
    try:
        state = run_status(server, run_id)
    except DaemonFailed:
        if late:
            _give_up(server, run_id)
            raise
        return False
    if late and not state.finished:
        _give_up(server, run_id)
        raise DaemonFailed(
            f"run {run_id} did not start within {START_TIMEOUT_S:g} s; its status is {state.status}; to fix: if the "
            "log of SuperExec, flower/logs/superexec.log, names no error, end other work on the machine, then run "
            "`consilium study resume`"
        )
    return state.finished


def _give_up(server: FlowerServer, run_id: int) -> None:
    """Stop a run that has not begun; otherwise it would begin at the next start of SuperLink, with nobody to follow."""
    with contextlib.suppress(DaemonFailed):
        stop_run(server, run_id)


def _tail(tail: EventTail) -> Iterator[dict[str, Any] | None]:
    """Yield events as they are written, and None whenever there is no new one."""
    while True:
        yield from tail.new()
        yield None
        time.sleep(POLL_S)


def main() -> None:
    """Supervise a run of the study in DIR: ``python -m server.operations.supervisor DIR``; an error is one line."""
    try:
        supervise(Workspace(Path(sys.argv[1])))
    except ConsiliumError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
