"""Attack: a local user has an account on the server's machine, without the consortium's rights.

| attack | defence |
|---|---|
| it takes the gateway's port, so that the server seems up | the port is tested first; a gateway shows its certificate |
| it lists nodes, or submits an app that reads the keys | SuperLink requires a secret that only its owner can read |
| it reads a study's events or lists its labels | only their owner can open the study's folder, events and labels |
| it has SuperLink's secret and submits an app | the app runs as SuperLink's user, who can read no key and no ledger |
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from common.pki import create_authority, create_node_keys, issue_server_certificate
from common.process import ProcessGroup
from common.sockets import free_ports
from server.aggregation.pipeline import locked_events
from server.operations.daemons import healthy, list_nodes, register_node, submit, superexec, superlink
from server.operations.supervisor import fleet_daemon, flower_server, gateway_answers, port_taken, start_run
from server.study.workspace import Endpoint, Workspace
from tests.attacks.thief import Attacker, open_routes
from tests.small_servers import http_server, serving, tls_of
from tests.studies import made_study, served_study
from tests.waiting import events_of, until

pytestmark = pytest.mark.slow


class _Unauthorised(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("content-length", "0")
        self.end_headers()


def open_to_others(root: Path) -> set[str]:
    """Return the paths in the study's folder that another user of this machine could read, list or pass through."""
    found = {path.relative_to(root).as_posix() for path in (root, *root.rglob("*")) if path.stat().st_mode & 0o077}
    return {name for name in found if name.split("/")[0] not in ("objects", "gateway")}  # public, or the gateway's


def test_a_study_and_what_happens_in_it_are_closed_to_other_users(tmp_path: Path) -> None:
    """The test uses the usual umask of 022."""
    before = os.umask(0o022)
    try:
        workspace = made_study(tmp_path / "study")
        assert stat.S_IMODE(workspace.root.stat().st_mode) == 0o700
        workspace.root.chmod(0o755)  # as a mounted folder is, and what earlier versions made in it
        workspace.events_file.touch()
        workspace.labels_dir.mkdir()
        assert {"events.jsonl", "labels"} <= open_to_others(workspace.root)
        with locked_events(workspace) as (_, events):
            events.emit("stop-requested", run="1")
            (workspace.student_dir / "zero_code").mkdir(parents=True)
            assert not {"events.jsonl", "labels", "student", "student/zero_code"} & open_to_others(workspace.root)
        assert not {"events.jsonl", "labels", "student"} & open_to_others(workspace.root)
        (tmp_path / "afterwards").mkdir()
        assert stat.S_IMODE((tmp_path / "afterwards").stat().st_mode) == 0o755
    finally:
        os.umask(before)


def test_a_study_that_was_given_to_a_group_stays_that_groups(tmp_path: Path) -> None:
    workspace = made_study(tmp_path / "study")
    workspace.events_file.touch()
    workspace.events_file.chmod(0o664)
    workspace.root.chmod(0o2750)
    with locked_events(workspace):
        pass
    assert stat.S_IMODE(workspace.events_file.stat().st_mode) == 0o640


def impostor(folder: Path, port: int) -> AbstractContextManager[object]:
    """Run another user's TLS server, which answers 401 like a gateway."""
    identity = issue_server_certificate(create_authority(folder / "ca"), folder / "tls", names=["localhost"])
    return serving(http_server(_Unauthorised, port), tls=tls_of(identity.certificate, identity.key))


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return served_study(tmp_path / "study", endpoint=Endpoint("localhost", *free_ports(2)))


def test_somebody_elses_server_is_no_gateway(workspace: Workspace, tmp_path: Path) -> None:
    port, authority = workspace.endpoint().port, workspace.gateway_dir / "ca.crt"
    assert port_taken("127.0.0.1", port) == ""
    assert not gateway_answers("127.0.0.1", port, authority)
    with impostor(tmp_path, port):
        assert not gateway_answers("127.0.0.1", port, authority)
        assert gateway_answers("127.0.0.1", port, tmp_path / "ca" / "ca.crt")
        said = port_taken("0.0.0.0", port)
        assert "`consilium provision server` with --port" in said
        inner = port_taken("127.0.0.1", port, option="--internal-port")
        assert "`consilium provision server` with --internal-port" in inner
    assert re.search(rf"0\.0\.0\.0:{port}: another program .*; to fix: ", said)


@pytest.mark.slow
def test_a_server_whose_port_is_taken_says_so_and_never_that_it_is_up(workspace: Workspace) -> None:
    port = workspace.endpoint().port
    program = "from consilium.cli.main import main; main()"
    up = (sys.executable, "-P", "-c", program, "server", "up", str(workspace.root), "--bind", "127.0.0.1")
    with socket.create_server(("127.0.0.1", port)) as taken:
        process = subprocess.Popen(up, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            facts = []
            for line in process.stderr:  # type: ignore[union-attr]
                facts.append(json.loads(line) if line.startswith("{") else {"event": line})
                if facts[-1].get("daemon") == "gateway":
                    break
            assert re.search(f"{port}: another program .*; to fix: ", facts[-1]["why"])
            assert all("ready" not in fact["event"] or fact.get("daemon") for fact in facts)
            taken.close()
            started = time.monotonic()
            for line in process.stderr:  # type: ignore[union-attr]
                if "all-ready" in line:
                    break
            assert time.monotonic() - started < 90
            assert gateway_answers("127.0.0.1", port, workspace.gateway_dir / "ca.crt")
        finally:
            os.kill(process.pid, signal.SIGTERM)
            process.communicate(timeout=600)


# --- SuperLink's control routes, which take code

NOBODY = 65534
REFUSED = "Authentication failed"
"""What Flower's client prints about status 401."""


@pytest.mark.slow
def test_nobody_but_the_operator_lists_nodes_or_submits_an_app(workspace: Workspace, tmp_path: Path) -> None:
    server = flower_server(workspace)
    keys = create_node_keys(tmp_path / "node")
    out = tmp_path / "stolen"
    with ProcessGroup() as group:
        group.start(superlink(server))
        group.start(superexec(server, relay=workspace.relay_dir))
        node = register_node(server, keys.public, name="north")
        attacker = Attacker.make(server, tmp_path / "attacker")
        listed = attacker.flwr("supernode", "list", "s", "--format", "json")
        ran = attacker.submit(workspace.root, out)
        until = time.monotonic() + 600
        while "run-id" in ran and not out.exists() and time.monotonic() < until:
            time.sleep(0.5)
        assert not out.exists(), f"the app read {out.read_text().split()}"
        assert str(node) not in listed
        for said in (listed, ran):
            assert REFUSED in said
        assert [found.node_id for found in list_nodes(server)] == [node]  # the operator's own command still works
        assert open_routes(server) == set()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_another_user_reads_no_secret_of_the_server_and_connects_to_no_socket() -> None:
    """Everybody may enter the study's directory here, so only the modes of the files in it protect them."""
    with tempfile.TemporaryDirectory(prefix="open-") as folder, ProcessGroup() as group:
        Path(folder).chmod(0o755)
        workspace = served_study(Path(folder, "study"), endpoint=Endpoint("localhost", *free_ports(2)))
        workspace.root.chmod(0o755)
        group.start(fleet_daemon(workspace))
        names = (
            "flower/operator.secret",
            "flower/superexec.secret",
            "keys/flower/credentials.yaml",
            "keys/sealing.key",
        )
        names += ("keys/ledger.key", "tls/authority/ca.key", "flower/server.key", "gateway/server.key")
        for name in names:
            path = workspace.root / name
            for above in path.relative_to(folder).parents:
                (Path(folder) / above).chmod(0o755)
            assert path.read_bytes()
            tried = subprocess.run(["cat", path], user=NOBODY, group=NOBODY, extra_groups=(), capture_output=True)
            assert b"Permission denied" in tried.stderr, name
            assert tried.stdout == b""
        socket_file = workspace.fleet_dir / "fleet.sock"
        workspace.fleet_dir.chmod(0o755)
        assert stat.S_IMODE(socket_file.stat().st_mode) == 0o600


VIEW = """
set -e
mount -t tmpfs -o mode=0755 view /mnt
mkdir -p /mnt/python /mnt/study/flower /mnt/study/relay /mnt/study/gateway/run
mount --bind "$PYTHON" /mnt/python
mount --bind "$STUDY/flower" /mnt/study/flower
mount --bind "$STUDY/relay" /mnt/study/relay
mount --bind "$STUDY/gateway/run" /mnt/study/gateway/run
top=/$(echo "$PYTHON" | cut -d/ -f2)
if ! setpriv --reuid "$1" --regid "$1" --clear-groups test -x "$PYTHON/bin"; then
    mount -t tmpfs -o mode=0755 python "$top" && mkdir -p "$PYTHON" && mount --bind /mnt/python "$PYTHON"
fi
exec setpriv --reuid "$1" --regid "$1" --clear-groups "$2" -P -c "$3" server up /mnt/study --only network --no-gateway
"""
"""Starts the network's daemons as another user, who sees only the paths that consilium-superlink.service shows."""


def give(workspace: Workspace, group: int) -> None:
    """Set groups and modes in the study's directory as systemd-tmpfiles does, for a user in both groups of SuperLink's
    unit.
    """
    text = (Path(__file__).parents[2] / "docker" / "systemd" / "consilium.tmpfiles").read_text(encoding="utf-8")
    for line in text.splitlines():
        words = line.split()
        ours = "consilium-superlink" in words or words[1:2] == ["/srv/consilium/study/gateway/run"]
        if words[:1] == ["z"] and ours and (workspace.root / words[1][21:]).exists():
            path = workspace.root / words[1].removeprefix("/srv/consilium/study/")
            os.chown(path, -1, group)
            path.chmod(int(words[2], 8))


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, in a mount namespace")
def test_an_app_submitted_with_the_operators_secret_reads_neither_key_nor_ledger(
    workspace: Workspace, tmp_path: Path
) -> None:
    give(workspace, NOBODY)
    server = flower_server(workspace)
    stolen = workspace.flower_dir / "stolen"
    program = "from consilium.cli.main import main; main()"
    up = (sys.executable, "-P", "-c", program, "server", "up", str(workspace.root), "--only", "core")
    network = ("unshare", "--mount", "--propagation", "private", "sh", "-c", VIEW, "view", str(NOBODY))
    env = os.environ | {"STUDY": str(workspace.root), "PYTHON": sys.base_prefix, "HOME": "/tmp"}
    with (tmp_path / "log").open("wb") as log:
        parts = [subprocess.Popen(up, stderr=log)]
        until((workspace.relay_dir / "core.sock").is_socket, "the core listens")
        parts.append(subprocess.Popen([*network, sys.executable, program], env=env, stderr=log))
    try:
        until(lambda: healthy(server), f"SuperLink answers: {(tmp_path / 'log').read_text()}")
        app = Attacker.make(server, tmp_path / "attacker").home / "app"
        settings = app / "pyproject.toml"  # the app carries its own settings
        told_where = settings.read_text().replace('study = ""', 'study = "/mnt/study"')
        settings.write_text(told_where.replace('out = ""', 'out = "/mnt/study/flower/stolen"'))
        submit(server, app)
        until(stolen.exists, "the app ran")
        assert stolen.read_text().split() == ["flower/operator.secret"]
        assert stolen.stat().st_uid == NOBODY
        start_run(workspace)  # our app, as the same user, asks the core for a run of the study, which has no site yet
        until(lambda: events_of(workspace.events_file, "run-failed"), "the core was asked for a run")
        assert re.search("missing .*directory", events_of(workspace.events_file, "run-failed")[0]["reason"])
        assert workspace.events_file.stat().st_uid == 0
    finally:
        for part in reversed(parts):
            part.terminate()
            part.wait(600)
