"""Runs a study through Flower and sees it to its end: submits the ServerApp, follows its events, submits it again.

A ServerApp that was killed is not restarted by Flower; its death is seen by the study's lock, which the kernel frees,
and the next run goes on from the ledger. Gives up after a bounded number of restarts, and at once on a run that ended
with a reason (budget, quorum, bad input), which another try would not cure.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import itertools
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from common.errors import ConsiliumError, DaemonFailed, InvalidInput
from common.events import EventTail, read_events
from common.objects import write_atomically
from common.pki import ServerIdentity
from common.process import DaemonSpec, base_env, plain_text
from common.security_log.program import log_daemon
from common.sockets import accepts, answers_http, reachable
from common.supervision import DaemonStanding, KeptRunning, all_of_a_study, keep_running, last_words, standings
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
)
from server.operations.listener import cannot_listen
from server.operations.one_port import BEHIND, read_behind
from server.study.locks import held_alone
from server.study.run_state import DIED, SUPERVISED, supervised
from server.study.workspace import BUSY, Workspace

START_TIMEOUT_S = 120.0
START_LOOK_S = 15.0
"""How often SuperLink is asked whether a run that has not begun has ended already."""
SUPERLINK_BACK_S = 60.0
"""How long a run that is to be submitted waits for a SuperLink that whoever keeps it starts again."""
RESTARTS = 3
POLL_S = 0.3
SOCKET = "fleet.sock"
LOG_MODULE = "server.operations.security_events"
PARTS = ("core", "network")
"""What may run as two users or in two containers."""
IDENTITY = ("ca.crt", "server.crt", "server.key")
"""SuperLink's TLS identity, in ``flower/``."""

OnEvent = Callable[[dict[str, Any]], None]


class RunFailed(ConsiliumError):
    """The run ended with a reason of its own; nothing was lost, `consilium study resume` goes on from the ledger.

    Its exit code is that of the error which ended the run.
    """

    def __init__(self, reason: str, *, code: object = ConsiliumError.exit_code) -> None:
        super().__init__(reason)
        self.exit_code = code if type(code) is int and 1 <= code < 128 else ConsiliumError.exit_code


def flower_server(workspace: Workspace) -> FlowerServer:
    """The SuperLink of this study as the daemons module describes it."""
    folder, client = workspace.flower_dir, workspace.root / "keys" / "flower"
    authority, certificate, key = (folder / name for name in IDENTITY)
    identity = ServerIdentity(authority=authority, certificate=certificate, key=key)
    return FlowerServer(folder=folder, client=client, port=workspace.endpoint().internal_port, identity=identity)


def prepare_network(workspace: Workspace) -> None:
    """Write what SuperLink and the operator's commands need, and make the folders of the sockets. Idempotent."""
    server = flower_server(workspace)
    for name in IDENTITY:
        if not (server.folder / name).exists():  # an earlier version had them elsewhere
            write_atomically(server.folder / name, (workspace.tls_dir / name).read_bytes(), mode=0o600)
    workspace.copy_endpoint()
    prepare(server)
    for folder in (workspace.relay_dir, workspace.fleet_dir):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def core_daemon(workspace: Workspace) -> DaemonSpec:
    """How to start the core: keys, ledger and releases, and a Unix socket for the ServerApp."""
    folder = workspace.relay_dir.absolute()
    (folder / CORE_SOCKET).unlink(missing_ok=True)
    return DaemonSpec(
        role="core",
        name="core",
        argv=(
            *(sys.executable, "-P", "-m", "server.aggregation.core"),
            *("--study", str(workspace.root.absolute()), "--socket", CORE_SOCKET),
        ),
        env=base_env(),
        cwd=folder,
        log=workspace.root.absolute() / "logs" / "core.log",
        ready=lambda: core_answers(folder),
    )


def fleet_daemon(workspace: Workspace) -> DaemonSpec:
    """How to start what stands between the gateway and SuperLink: its fleet routes on a Unix socket."""
    server, folder = flower_server(workspace), workspace.fleet_dir.absolute()
    (folder / SOCKET).unlink(missing_ok=True)
    return DaemonSpec(
        role="fleet",
        name="fleet",
        argv=(
            *(sys.executable, "-P", "-m", "server.operations.fleet"),
            *("--socket", SOCKET),  # a Unix socket's path has at most 107 bytes, so it is named from its own folder
            *("--superlink", server.address, "--superlink-ca", str(server.identity.authority.absolute())),
        ),
        env=base_env(),
        cwd=folder,
        log=server.logs / "fleet.log",
        ready=lambda: answers_http(folder / SOCKET),
    )


def gateway_daemon(workspace: Workspace, *, bind: str) -> DaemonSpec:
    """How to start the gateway: the one port that sites reach."""
    endpoint, root, folder = workspace.endpoint(), workspace.root.absolute(), workspace.gateway_dir.absolute()
    return DaemonSpec(
        role="gateway",
        name="gateway",
        argv=(
            *(sys.executable, "-P", "-m", "server.operations.gateway"),
            *("--objects", str(root / "objects"), "--nodes", str(folder / "nodes.json")),
            *("--certificate", str(folder / "server.crt"), "--key", str(folder / "server.key")),
            *("--bind", bind, "--port", str(endpoint.port)),
            *("--fleet", SOCKET),
        ),
        env=base_env(),
        cwd=workspace.fleet_dir.absolute(),
        log=flower_server(workspace).logs / "gateway.log",
        ready=lambda: gateway_answers(bind, endpoint.port, folder / "ca.crt"),
    )


def study_daemons(root: Path, log_to: Sequence[str] = ()) -> DaemonSpec:
    """How to start all daemons of a study behind this one's port: ``consilium server up`` of its own directory."""
    workspace = Workspace(root)
    return all_of_a_study(
        ("server", "up", str(root.absolute())),
        root,
        log="server.log",
        ready=lambda: core_answers(workspace.relay_dir) and answers_http(workspace.fleet_dir / SOCKET),
        log_to=log_to,
    )


def gateway_answers(bind: str, port: int, authority: Path) -> bool:
    """Whether a gateway of this consortium listens there and turns an unsigned request away."""
    context = ssl.create_default_context(cafile=str(authority))
    context.check_hostname = False  # its certificate is this authority's, for names that may lead elsewhere from here
    connection = http.client.HTTPSConnection(reachable(bind), port, timeout=2.0, context=context)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/", headers={"host": "localhost"})
        return connection.getresponse().status == 401
    return False


def port_taken(bind: str, port: int, *, option: str = "--port") -> str:
    """Why nothing can listen at ``port`` now, with the remedy, which names the option; nothing if it can."""
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
    """Run a server's daemons until a signal; what dies is started again.

    ``parts``: ``core`` has the keys and the ledger. ``network`` is SuperLink, its fleet routes, SuperExec with the
    ServerApp and, unless it runs elsewhere, the gateway; of the study's directory it needs ``flower/``, ``relay/`` and
    ``gateway/run/``, and for the gateway ``gateway/`` and ``objects/``. The core's part prepares these, and sends the
    security events to the targets ``log_to``. A study behind another one's port starts no gateway. Where both parts run
    here, the daemons of every study behind this one's port run, too.
    """
    kept = []
    if "core" in parts:
        prepare_network(workspace)
        kept.append(KeptRunning(spec=lambda: core_daemon(workspace), explain=last_words))
        if log_to:
            log = partial(log_daemon, workspace.root, module=LOG_MODULE, name="log", targets=log_to)
            log()  # a target of no known form is said at once
            kept.append(KeptRunning(spec=log))
    server, endpoint = flower_server(workspace), workspace.endpoint()
    if "network" in parts:
        inner = lambda: port_taken(HOST, endpoint.internal_port, option="--internal-port")  # noqa: E731
        kept += [
            KeptRunning(spec=lambda: superlink(server), obstacle=inner, explain=last_words),
            KeptRunning(spec=lambda: fleet_daemon(workspace), explain=last_words),
            KeptRunning(spec=lambda: superexec(server, relay=workspace.relay_dir), explain=last_words),
        ]
    if "network" in parts and gateway and not endpoint.behind:
        outer = lambda: port_taken(bind, endpoint.port)  # noqa: E731
        kept.append(KeptRunning(spec=lambda: gateway_daemon(workspace, bind=bind), obstacle=outer, explain=last_words))
    if set(PARTS) <= set(parts):
        for other in read_behind(workspace.gateway_dir / BEHIND):
            kept.append(KeptRunning(spec=partial(study_daemons, Path(other.directory), log_to), explain=last_words))
    keep_running(workspace.root / "logs" if "core" in parts else server.logs, kept, on_ready=on_ready)


def daemon_standings(workspace: Workspace) -> tuple[DaemonStanding, ...]:
    """How every daemon of this server stands, and the gateway that it stands behind, as far as logs can be read."""
    own, keeper = standings((workspace.root / "logs", workspace.flower_dir / "logs")), workspace.port_keeper()
    if keeper is workspace:
        return own
    theirs = standings((keeper.root / "logs", keeper.flower_dir / "logs"))
    return (*own, *(one for one in theirs if one.daemon == "gateway"))


def _kept(workspace: Workspace, daemon: str) -> bool:
    """Whether somebody starts this daemon again should it end."""
    return any(one.daemon == daemon and one.state != "stopped" for one in daemon_standings(workspace))


def start_run(workspace: Workspace) -> int:
    """Submit the ServerApp for this study; returns Flower's run id, which is recorded.

    What ended the ServerApp may have ended SuperLink too: where somebody keeps it, it is waited for.
    """
    until, server = time.monotonic() + SUPERLINK_BACK_S, flower_server(workspace)
    while not accepts(HOST, server.port) and _kept(workspace, "superlink") and time.monotonic() < until:
        time.sleep(POLL_S)
    with tempfile.TemporaryDirectory(prefix="consilium-app-") as scratch:
        app = app_dir(Path(scratch) / "app")
        run_id = submit(server, app, {})
    workspace.save_run_id(run_id)
    return run_id


def request_stop(workspace: Workspace, *, now: bool = False) -> None:
    """Ask the run to stop at its next safe point; ``now`` also tells Flower to end it. Stored answers stay.

    InvalidInput where none goes on.
    """
    run_id = workspace.run_id()
    if not workspace.busy() and not _submitted(workspace, run_id):
        raise InvalidInput("no run is active", value=str(workspace.root), remedy="`consilium study status` tells more")
    workspace.stop_file.touch()
    if now and run_id is not None:
        stop_run(flower_server(workspace), run_id)


def _submitted(workspace: Workspace, run_id: int | None) -> bool:
    """Whether a run that Flower knows has not ended; it may not have begun to hold the study's lock."""
    try:
        return run_id is not None and not run_status(flower_server(workspace), run_id).finished
    except (DaemonFailed, InvalidInput):
        return False


def watch(workspace: Workspace, *, on_event: OnEvent) -> None:
    """Follow the run that goes on, from its first event, until it ends; the run that ended last, where none does.

    Looks, and changes nothing. RunFailed as :func:`supervise` raises it, or for a run that died while nobody is there
    to submit it again.
    """
    tail = EventTail(workspace.events_file)
    events = list(tail.new())
    starts = [number for number, event in enumerate(events) if event["event"] == "run-started"]
    if not starts and not workspace.busy():
        raise InvalidInput("no run to watch", value=str(workspace.root), remedy="`consilium study run`")
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
        elif alone:  # and what it may still have told has been read since
            raise RunFailed(DIED)
        else:
            alone = not workspace.busy() and not supervised(workspace)


def detach(workspace: Workspace, command: Sequence[str] = ()) -> None:
    """Supervise a run in a session of its own, which no terminal ends; returns once the run has begun.

    ``command`` does so, :func:`main` by default. What it says goes to ``logs/run.log``; DaemonFailed with its words if
    it ends before.
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
    threading.Thread(target=process.wait, daemon=True).start()  # whoever stays here leaves no zombie behind
    while process.poll() is None and _runs(workspace) == before:
        time.sleep(POLL_S)
    if process.returncode and _runs(workspace) == before:
        raise DaemonFailed(last_words(plain_text(log)).removeprefix("error: "))


def _runs(workspace: Workspace) -> int:
    """How many runs have begun."""
    return sum(event["event"] == "run-started" for event in read_events(workspace.events_file))


def supervise(
    workspace: Workspace,
    *,
    on_event: OnEvent = lambda _event: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run the study to its end, starting the ServerApp again when it dies; :class:`RunFailed` when it ends badly.

    ``check`` is called often and may raise, for instance when a daemon died.
    """
    with _supervising(workspace):
        with workspace.locked():
            pass  # refuses while another run goes on, before anything is submitted
        for remaining in reversed(range(RESTARTS + 1)):
            tail = EventTail(workspace.events_file, from_end=True)
            run_id = start_run(workspace)
            ending = _follow(workspace, run_id, tail, on_event=on_event, check=check)
            if ending == "run-finished" or workspace.stop_file.exists():  # it is there still where it died of a stop
                return
            if remaining:
                on_event({"event": "run-restarted", "run": str(run_id)})
    raise RunFailed(f"the ServerApp died {RESTARTS + 1} times; to fix: see `consilium study status` and the logs")


@contextlib.contextmanager
def _supervising(workspace: Workspace) -> Iterator[None]:
    """Hold what says that the run is supervised; the kernel frees it. StudyBusy while somebody else holds it."""
    with held_alone(workspace.root / SUPERVISED, busy=BUSY.format(workspace.root)):
        yield


def _follow(workspace: Workspace, run_id: int, tail: EventTail, *, on_event: OnEvent, check: Callable[[], None]) -> str:
    """Pass on events of this run until it ends; ``"died"`` when it holds no lock and told no ending, or never began."""
    started = ended = False
    submitted = looked = time.monotonic()
    for event in _tail(tail):
        check()
        if event is None:
            if ended and not started:  # and what it may still have told has been read since
                return "died"
            if not started and time.monotonic() - looked > START_LOOK_S:
                looked = time.monotonic()
                ended = _ended(workspace, run_id, late=looked - submitted > START_TIMEOUT_S)
            if started and not workspace.busy():
                endings = [
                    e["event"]
                    for e in read_events(workspace.events_file)
                    if e["event"] in ("run-finished", "run-failed") and e["run"] == str(run_id)
                ]
                if not endings:
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


def _ended(workspace: Workspace, run_id: int, *, late: bool) -> bool:
    """Whether SuperLink says that a run is over; DaemonFailed if it is ``late`` and not over. SuperLink may be away."""
    try:
        state = run_status(flower_server(workspace), run_id)
    except DaemonFailed:
        if late:
            raise
        return False
    if late and not state.finished:
        raise DaemonFailed(f"run {run_id} did not start within {START_TIMEOUT_S:g} s; it is {state.status}")
    return state.finished


def _tail(tail: EventTail) -> Iterator[dict[str, Any] | None]:
    """Events as they come, and None whenever there is nothing new."""
    while True:
        yield from tail.new()
        yield None
        time.sleep(POLL_S)


def main() -> None:
    """``python -m server.operations.supervisor DIR``: supervise a run of the study in DIR; errors are one line."""
    try:
        supervise(Workspace(Path(sys.argv[1])))
    except ConsiliumError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
