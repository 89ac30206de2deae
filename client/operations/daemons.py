"""Starts and watches a site's processes: SuperNode, launcher, and teacher worker.

`consilium site up` calls it. The SuperNode connects to the server, the launcher passes its messages on, and the worker
has data and models. The SuperNode runs in process isolation: it starts no app code and hands its tasks only to the
launcher, which shares a secret with it. SuperNode and launcher know the worker's socket, but not where data or models
are. The module refuses to start a node without TLS or without the node's own key.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

from client.site.node_link import NodeLink, write_link
from common.engine import flower_env
from common.errors import SAME_VERSION, DaemonFailed, InvalidInput
from common.objects import PathInside, shared, write_atomically
from common.pki import NodeKeys
from common.process import DaemonSpec, ProcessGroup, base_env, plain_text, proxy_env
from common.reading import parse_json, parsing
from common.security_log.program import ROLE, kept_log, recorded_targets, with_backlog
from common.sockets import free_port
from common.supervision import (
    FACTS,
    AnswerWatch,
    DaemonStanding,
    KeptRunning,
    all_of_a_study,
    are_kept,
    deliberate,
    file_size,
    keep_running,
    last_words,
    standings,
    unrecorded,
)
from common.worker_api import healthy

PARTS = ("worker", "node")
"""The parts of a site: the worker has data and models; the node's processes connect to the server."""

LOG_MODULE = "client.operations.security_events"

DOCTOR = "`consilium site doctor`"

_SILENT = f"{DOCTOR}; if the consortium has ended the study, end `consilium site up`"

OFFLINE_S = 75.0
"""A node counts as offline if the server accepted its last heartbeat more than this number of seconds ago.

SuperLink counts it as offline after 60 s, and a node sends a heartbeat every 18 to 23 s.
"""

KILLED_NODE_S = 45.0
"""Seconds before a killed SuperNode restarts, since SuperLink counts it as online for 60 s without a heartbeat."""

_CONNECTED = "SuperNode ID:"
_EXIT_CODE = re.compile(r"Exit Code: \d+")
_API_ERROR = re.compile(r"\[code: (\d+)\] *(.*)")
_CERTIFICATE = re.compile(r"certificate verify failed: ([^(\n]*)")
_ENDED_ITSELF = "SuperNode terminated gracefully"
"""Flower's last words, with exit status 0, after SIGINT or SIGTERM. A refused heartbeat makes Flower send SIGINT."""
_SAID_AT_EXIT = re.compile(r"Exit Code: \d+\n((?:.*\S.*\n?){1,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteNode:
    """Everything needed to start the SuperNode (Flower's client process) of one site.

    Attributes:
        site: Name of the site.
        folder: Folder of Flower's home and the logs.
        superlink: Address of SuperLink, ``host:port``.
        root_certificates: Certificate of the study's authority.
        keys: The node's keys.
        socket: The worker's Unix socket.
        port: Free loopback port at which the SuperNode hands out its tasks.

    Raises:
        InvalidInput: If the name or port is invalid, or a file is missing.
    """

    site: str
    folder: Path
    superlink: str
    root_certificates: Path
    keys: NodeKeys
    socket: Path
    port: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder.absolute())
        if not self.site or not self.site.isprintable():
            raise InvalidInput("site", value=self.site, limit="a printable name")
        if not 0 < self.port < 65536:
            raise InvalidInput("port", value=self.port, limit="1 to 65535")
        for path in (self.root_certificates, self.keys.private):
            if not path.is_file():
                raise InvalidInput(
                    "file of the node",
                    value=str(path),
                    limit="an existing file",
                    remedy="put it back, or set the site up again",
                )

    secret = PathInside("runtime.secret", of="folder")
    """File of the secret shared by SuperNode and launcher, so that no other process gets the node's messages."""
    home = PathInside("flower", of="folder")
    """Flower's home folder of this node."""
    log = PathInside("logs/supernode.log", of="folder")
    """The SuperNode's log."""
    contact = PathInside("logs/supernode.contact", of="folder")
    """File that is touched at every heartbeat that the server accepts."""


def supernode(node: SiteNode, *, max_retries: int | None = None, ready_timeout_s: float = 60.0) -> DaemonSpec:
    """Describe how to start a site's SuperNode, with the study's authority as its only TLS root and its own key.

    The process is ready when SuperLink has assigned its node id. It waits for a :func:`launcher` to take its messages.

    Args:
        node: The node.
        max_retries: Attempts to reach SuperLink; None for no limit.
        ready_timeout_s: Seconds until it must be ready.

    Returns:
        The description of the process.
    """
    start = file_size(node.log)
    _make_secret(node.secret)
    return DaemonSpec(
        role="supernode",
        name=node.site,
        argv=(
            *(sys.executable, "-P", "-m", "client.operations.supernode", str(node.contact)),
            *("--superlink", node.superlink),
            *("--root-certificates", str(node.root_certificates.absolute())),
            *("--auth-supernode-private-key", str(node.keys.private.absolute())),
            *("--host", "127.0.0.1", "--port", str(node.port)),
            *("--isolation", "process", "--superexec-auth-secret-file", str(node.secret)),
            *(("--max-retries", str(max_retries)) if max_retries is not None else ()),
        ),
        env=flower_env(node.home, **proxy_env()),
        cwd=node.home,
        log=node.log,
        ready=lambda: node_id(node, since=start) is not None,
        ready_timeout_s=ready_timeout_s,
    )


def contact_watch(contact: Path, *, clock: Callable[[], float] = time.monotonic) -> AnswerWatch:
    """Watch whether the server accepts the heartbeats of a running SuperNode.

    Args:
        contact: The file that each accepted heartbeat touches; it is missing until the first one.
        clock: Monotonic clock in seconds. A wrong wall clock can itself be why the server refuses the site.

    Returns:
        A watch that reports a silence of :data:`OFFLINE_S` after the first heartbeat.
    """
    touched = 0

    def heard() -> bool:
        nonlocal touched
        before = touched
        try:
            touched = contact.stat().st_mtime_ns
        except OSError:
            return True
        return touched != before

    silence = "the server has accepted no heartbeat"
    return AnswerWatch(silence, heard, remedy=_SILENT, ask_s=0, silent_s=OFFLINE_S, clock=clock)


def launcher(node: SiteNode) -> DaemonSpec:
    """Describe how to start the launcher, which passes the SuperNode's messages to the worker.

    It runs the site's installed code only. Start it after the SuperNode: it is ready when it has reached the SuperNode.

    Args:
        node: The node.

    Returns:
        The description of the process.
    """
    _make_secret(node.secret)
    log = node.folder / "logs" / "launcher.log"
    start = file_size(log)
    return DaemonSpec(
        role="launcher",
        name=node.site,
        argv=(
            *(sys.executable, "-P", "-m", "client.app", "--runtime", f"127.0.0.1:{node.port}"),
            *("--secret", str(node.secret), "--socket", str(node.socket.absolute())),
        ),
        env=flower_env(node.home),
        cwd=node.home,
        log=log,
        ready=lambda: "event=ready" in plain_text(log, since=start),
    )


def _make_secret(path: Path) -> None:
    if not path.exists():
        write_atomically(path, secrets.token_bytes(32), mode=0o600, replace=False)


def node_id(node: SiteNode, *, since: int = 0) -> int | None:
    """Read from the SuperNode's log the node id that SuperLink assigned.

    Args:
        node: The node.
        since: Byte of the log from which to read.

    Returns:
        The id; None if the node has not connected yet.
    """
    for line in _log_text(node, since).splitlines():
        if _CONNECTED in line and (word := line.rpartition(_CONNECTED)[2].strip()).isdigit():
            return int(word)
    return None


def worker(site_dir: Path, *, socket: Path | None = None) -> DaemonSpec:
    """Describe how to start a site's teacher worker. It is ready when it answers at its socket.

    It runs the site's installed code, never code from the current directory. Its log stays at the site and is never
    quoted in an error.

    Args:
        site_dir: The site's directory.
        socket: The Unix socket; by default ``worker.sock`` in the site's directory.

    Returns:
        The description of the process.
    """
    folder = site_dir.absolute()
    where = (socket or folder / "worker.sock").absolute()
    return DaemonSpec(
        role="worker",
        name=folder.name,
        argv=(sys.executable, "-P", "-m", "client.operations.serve", "--site-dir", str(folder), "--socket", str(where)),
        env=base_env(**proxy_env()),
        cwd=folder,
        log=folder / "logs" / "worker.log",
        ready=lambda: healthy(where),
        ready_timeout_s=300.0,
        show_log=False,
    )


def site_up(
    site_dir: Path,
    *,
    parts: Collection[str] = PARTS,
    others: Sequence[Path] = (),
    on_ready: Callable[[], None] = lambda: None,
    log_to: Sequence[str] = (),
) -> None:
    """Run a site's daemons in the foreground until SIGINT or SIGTERM; a daemon that ends is restarted.

    Args:
        site_dir: The site's directory.
        parts: ``worker`` (data and models), ``node`` (SuperNode and launcher), or both. The two may run as different
            users or in different containers; the node needs only the folder ``node/`` of the site's directory.
        others: Directories of further studies of this hospital, whose daemons also run.
        on_ready: Called when all daemons are ready.
        log_to: Targets to which the site's security events are sent. The part ``worker`` sends them.

    Raises:
        InvalidInput: For a node that cannot be started, or an unknown target.
        DaemonFailed: If the site's daemons are running already.
    """
    folder = site_dir.absolute() / "node"
    with contextlib.ExitStack() as stack:
        socket = folder / "run" / "worker.sock"
        if set(parts) == set(PARTS):
            short = stack.enter_context(tempfile.TemporaryDirectory(prefix="consilium-"))
            socket = Path(short) / "worker.sock"  # a Unix socket's path has at most 107 bytes
        kept = []
        if "worker" in parts:
            _make_socket_folder(socket.parent)
            write_link(site_dir)
            kept.append(KeptRunning(spec=lambda: worker(site_dir, socket=socket)))
            if log_to:
                kept.append(kept_log(site_dir, module=LOG_MODULE, name=site_dir.absolute().name, targets=log_to))
        if "node" in parts:
            node = site_node(folder, socket=socket)
            kept.append(
                KeptRunning(
                    spec=lambda: supernode(node, ready_timeout_s=math.inf),
                    first_s=5.0,
                    after_kill_s=KILLED_NODE_S,
                    explain=explain_supernode,
                    offline=contact_watch(node.contact),
                )
            )
            kept.append(KeptRunning(spec=lambda: launcher(node), explain=last_words))
        kept += [KeptRunning(spec=partial(study_daemons, other, log_to), explain=deliberate) for other in others]
        keep_running(site_dir / "logs" if "worker" in parts else folder / "logs", kept, on_ready=on_ready)


def study_daemons(site_dir: Path, log_to: Sequence[str] = ()) -> DaemonSpec:
    """Describe how to start all daemons of another study of this hospital: with ``consilium site up`` in its directory.

    Args:
        site_dir: The other study's directory.
        log_to: Targets of security events.

    Returns:
        The description of the process.
    """
    folder = site_dir.absolute()

    def ready() -> bool:
        found = standings(_logs(folder))
        return bool(found) and all(one.state in ("ready", "offline") for one in found)  # offline ones were ready

    return all_of_a_study(
        ("site", "up", "--site-dir", str(folder)),
        folder,
        log="site.log",
        ready=ready,
        ready_timeout_s=math.inf,
        log_to=log_to,
        show_log=False,
    )


def daemon_standings(site_dir: Path) -> tuple[DaemonStanding, ...]:
    """Return the state of every daemon of this site, as far as its logs can be read.

    A SuperNode may take any time to reach the server for the first time. After :data:`OFFLINE_S` it counts as offline.

    Args:
        site_dir: The site's directory.

    Returns:
        The states.
    """
    late = datetime.now(UTC) - timedelta(seconds=OFFLINE_S)
    why = f"it has not reached the server since it was started; to fix: {_SILENT}"
    found = (
        replace(one, state="offline", why=why, said="")  # the server's last message is out of date
        if one.daemon.startswith("supernode") and one.state == "starting" and datetime.fromisoformat(one.since) < late
        else one
        for one in standings(_logs(site_dir))
    )
    return with_backlog(found, site_dir)


def trouble(one: DaemonStanding, site_dir: Path) -> tuple[str, str]:
    """Describe a daemon's state and what to do about it.

    Args:
        one: The state.
        site_dir: The site's directory.

    Returns:
        The state in words, and a remedy. The remedy is empty for a daemon that is starting or ready.
    """
    if one.state == "offline":
        why, _, remedy = one.why.partition("; to fix: ")
        return replace(one, why=why).line, remedy or DOCTOR
    if one.state == "stopped":
        return one.line, _start_again(one, site_dir)
    return one.line, f"see {one.log}" if one.state == "ended" else ""


def _start_again(one: DaemonStanding, site_dir: Path) -> str:
    """Return the command that starts a stopped daemon. For the log process it names the targets of the log.

    If `site up` runs without the log process, it must be stopped first, because a second `up` is refused.
    """
    command, first = "consilium site up", ""
    if one.daemon.partition(" ")[0] == ROLE:
        targets = recorded_targets(site_dir) or ("TARGET",)
        command += "".join(f" --log-to {shlex.quote(target)}" for target in targets)
        if are_kept(site_dir / "logs"):
            first = "stop the running `consilium site up`, then run "
    return f"{first}`{command}`"


def no_daemons(site_dir: Path) -> str:
    """Explain why :func:`daemon_standings` returns no daemon of a site.

    Args:
        site_dir: The site's directory.

    Returns:
        The text.
    """
    return unrecorded(_logs(site_dir), command="consilium site up")


def _logs(site_dir: Path) -> tuple[Path, ...]:
    return site_dir / "logs", site_dir / "node" / "logs"


def was_let_in(site_dir: Path) -> bool:
    """Tell whether the server has ever admitted this site's node, from the supervisor's records.

    Args:
        site_dir: The site's directory.

    Returns:
        True if the node was ever ready.
    """
    for folder in _logs(site_dir):
        with contextlib.suppress(OSError):
            for line in (folder / FACTS).read_text(encoding="utf-8").splitlines():
                if '"event": "daemon-ready", "daemon": "supernode' in line:
                    return True
    return False


_REFUSALS = {
    "unknown-key": "the server does not know this site's key, or has revoked it; to fix: if you were not admitted yet, "
    "send request.json to the consortium; else ask the consortium, since a revoked key is never admitted again",
    "clock": "the server refuses this site because its clock is wrong; to fix: set the clock, for example by NTP",
    "2001": "the server does not know this node; to fix: ask the consortium whether you are admitted",
    "2004": "the server does not know this node, or another SuperNode with this site's key is connected; to fix: end "
    "`site up` in every other copy of this site's directory, also on other machines; after a crash of this machine, "
    "wait a minute: the server then admits the node again; otherwise ask the consortium whether you are admitted",
}
"""For each refusal of the gateway or SuperLink, an explanation for the hospital."""


def explain_supernode(text: str) -> str:
    """Explain why a SuperNode ended, from its log, which contains nothing about cases.

    Args:
        text: The log since the SuperNode's start.

    Returns:
        The reason in words, with a remedy where one is known.
    """
    if found := _CERTIFICATE.findall(text):
        return f"the server's certificate is not accepted: {found[-1].strip()}; to fix: `consilium site doctor`"
    if said := deliberate(text):
        return said
    if answer := _API_ERROR.search(text):
        word = answer[2].removeprefix("refused:").strip()
        return _REFUSALS.get(word) or _REFUSALS.get(answer[1]) or f"the server answered: {answer[0].strip()[:200]}"
    if _ENDED_ITSELF in text:
        return "the server no longer accepts its heartbeats, or a person ended it; it is started again"
    if found := _SAID_AT_EXIT.findall(text):
        return f"{' '.join(found[-1].split())[:400]}; to fix: `consilium site doctor`"
    return last_words(text)


def _make_socket_folder(folder: Path) -> None:
    """Create a folder that only this user can enter.

    If ``node/`` was given to a group, the members of that group can enter the folder too.
    """
    before = os.umask(0o027 if shared(folder.parent) else 0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)


def site_node(folder: Path, *, socket: Path, port: int = 0) -> SiteNode:
    """Read a site's SuperNode from its folder ``node/``.

    Args:
        folder: The folder ``node/``.
        socket: The worker's Unix socket.
        port: Loopback port; 0 for a free one.

    Returns:
        The node.

    Raises:
        InvalidInput: If ``link.json`` cannot be read, or a file is missing.
    """
    remedy = "start the worker's part first, which writes this file: `consilium site up`"
    what = "link.json of the node cannot be read"
    with parsing(what, value=str(folder), remedy=remedy):
        record = parse_json((folder / "link.json").read_bytes(), what=what, remedy=remedy)
    link = NodeLink.from_json(record)
    return SiteNode(
        site=link.site,
        superlink=link.superlink,
        folder=folder,
        root_certificates=folder / "ca.crt",
        keys=NodeKeys(private=folder / "keys" / "node", public=folder / "keys" / "node.pub"),
        socket=socket,
        port=port or free_port(),
    )


def expect_refused(group: ProcessGroup, node: SiteNode, *, timeout_s: float = 60.0) -> str:
    """Start a SuperNode whose key is not registered, and check that SuperLink refuses it.

    Args:
        group: Where the process is started.
        node: The node.
        timeout_s: Seconds to wait.

    Returns:
        The line of the node's log with SuperLink's answer; code 2004 stands for a key that is not registered.

    Raises:
        DaemonFailed: If it is admitted, is still trying after ``timeout_s``, or ends for another reason. In every case
            the process is stopped.
    """
    started, start = time.monotonic(), file_size(node.log)
    admitted = (
        f"SuperLink admitted the node {node.site!r}, whose key is not registered; to fix: {SAME_VERSION}, and let no "
        "site take part until SuperLink refuses this node"
    )
    daemon = group.begin(supernode(node, max_retries=3))
    try:
        while (status := daemon.wait(0.1)) is None:
            if node_id(node, since=start) is not None:
                raise DaemonFailed(admitted)
            if time.monotonic() - started > timeout_s:
                raise DaemonFailed(
                    f"the node {node.site!r} was neither admitted nor refused within {timeout_s:g} s; to fix: check "
                    "with `consilium server status` that the server runs, then run the same command again"
                )
    finally:
        group.stop(daemon)
    if node_id(node, since=start) is not None or status == 0:
        raise DaemonFailed(admitted)
    text = _log_text(node, start)
    answer = _API_ERROR.search(text)
    if answer is None or not _EXIT_CODE.search(text):
        raise DaemonFailed(
            f"the node {node.site!r} ended without an answer from SuperLink; to fix: remove the cause that its "
            f"log states, {node.log}, then run the same command again"
        )
    return answer[0].strip()


def _log_text(node: SiteNode, since: int) -> str:
    if not node.log.exists():
        return ""
    with node.log.open("rb") as log:
        log.seek(since)
        return log.read(1 << 20).decode("utf-8", "replace")
