"""Tests how the daemons are started: with TLS and node authentication, no secret in an argument, no cloud address."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import stat
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from zipfile import ZipFile

import pytest
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType

from client.operations.daemons import SiteNode, explain_supernode, launcher, node_id, supernode, worker
from client.operations.serve import serve
from common.engine import flower_env, sql_corestate
from common.errors import DaemonFailed, InvalidInput
from common.pki import NodeKeys, ServerIdentity, create_authority, create_node_keys, issue_server_certificate
from common.process import DaemonSpec, ProcessGroup, base_env, executable
from common.sockets import free_port
from server.operations import daemons
from server.operations.daemons import (
    FlowerServer,
    app_dir,
    app_files,
    guarded,
    healthy,
    prepare,
    register_node,
    submit,
    superexec,
    superlink,
)
from server.operations.superlink import give_time_to_begin
from server.operations.supervisor import explain_superlink
from tests.attacks.link import Link


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> ServerIdentity:
    folder = tmp_path_factory.mktemp("tls")
    return issue_server_certificate(create_authority(folder / "ca"), folder, names=["127.0.0.1", "localhost"])


@pytest.fixture
def server(tmp_path: Path, identity: ServerIdentity) -> FlowerServer:
    made = FlowerServer(folder=tmp_path / "flower", client=tmp_path / "client", port=free_port(), identity=identity)
    prepare(made)
    return made


@pytest.fixture
def node(tmp_path: Path, server: FlowerServer) -> SiteNode:
    return SiteNode(
        site='St. Anna "Süd"',
        folder=tmp_path / "site",
        superlink=server.address,
        root_certificates=server.identity.authority,
        keys=create_node_keys(tmp_path / "keys"),
        socket=tmp_path / "with space" / "worker.sock",
        port=free_port(),
    )


def test_superlink_has_tls_node_authentication_a_database_and_separate_serverapps(server: FlowerServer) -> None:
    argv = superlink(server).argv
    assert "--enable-supernode-auth" in argv
    assert "--insecure" not in argv
    pairs = dict(pairwise(argv))
    assert pairs["--isolation"] == "process"
    assert pairs["--database"] == str(server.database)
    assert Path(pairs["--ssl-certfile"]) == server.identity.certificate


@pytest.mark.slow
def test_a_superlink_that_was_ended_while_it_made_its_database_starts_again(server: FlowerServer) -> None:
    """A power cut at the first start leaves some of the tables, and Flower would try to create all of them again."""
    superlink(server)
    with contextlib.closing(sqlite3.connect(server.database)) as half, half:
        half.execute("CREATE TABLE task_event (id INTEGER PRIMARY KEY)")
    spec = superlink(server)
    assert not server.database.exists()
    with ProcessGroup() as group:
        group.start(spec)
    whole = server.database.read_bytes()
    superlink(server)  # from now on a database is kept, however SuperLink ended
    assert server.database.read_bytes() == whole
    assert not list(server.folder.glob("*unborn"))


def test_no_secret_is_in_an_argument_or_the_environment(server: FlowerServer, node: SiteNode) -> None:
    keys = server.identity.key.read_text() + node.keys.private.read_text()
    held = server.operator_secret.read_text()
    assert stat.S_IMODE(server.operator_secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((server.client / "credentials.yaml").stat().st_mode) == 0o600
    secrets = [
        held,
        server.secret.read_bytes().hex(),
        *(line for line in keys.splitlines() if not line.startswith("-----")),
    ]
    for spec in (superlink(server), superexec(server, relay=server.folder), supernode(node), worker(node.folder)):
        said = "\n".join([*spec.argv, *spec.env.values()])
        assert not any(secret in said for secret in secrets)
    assert stat.S_IMODE(server.secret.stat().st_mode) == 0o600
    assert len(server.secret.read_bytes()) >= 32


def test_nothing_is_reported_or_installed_from_outside(server: FlowerServer, node: SiteNode) -> None:
    for spec in (superlink(server), superexec(server, relay=server.folder), supernode(node)):
        assert spec.env["FLWR_TELEMETRY_ENABLED"] == "0"
        assert spec.env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
        assert spec.env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
        assert not any("allow-runtime" in argument for argument in spec.argv)


def test_server_and_site_have_flower_homes_of_their_own(server: FlowerServer, node: SiteNode) -> None:
    homes = {superlink(server).env["FLWR_HOME"], supernode(node).env["FLWR_HOME"]}
    assert homes == {str(server.folder / "home"), str(node.folder / "flower")}


def test_the_connection_is_this_server_and_nothing_else(server: FlowerServer) -> None:
    config = tomllib.loads((server.client / "config.toml").read_text())
    assert config == {
        "superlink": {
            "default": "consilium",
            "consilium": {"address": server.address, "root-certificates": str(server.identity.authority)},
        }
    }


def test_preparing_twice_keeps_the_secrets(server: FlowerServer) -> None:
    before = [path.read_bytes() for path in (server.secret, server.operator_secret)]
    prepare(server)
    assert [path.read_bytes() for path in (server.secret, server.operator_secret)] == before


@pytest.mark.slow
def test_a_superlink_that_takes_orders_from_anybody_is_never_ready(server: FlowerServer) -> None:
    """Flower's own command, with the same arguments but without our module, takes such orders."""
    ours = superlink(server)
    rest = ours.argv[ours.argv.index("--host") :]
    stock = replace(ours, argv=(executable("flower-superlink"), *rest), ready=lambda: healthy(server))
    with ProcessGroup() as group:
        group.start(stock)
        assert ours.ready is not None
        assert not guarded(server)
        assert not ours.ready()


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["Flower's place for authentication has moved", "no secret", "a short secret"])
def test_a_superlink_without_its_guard_does_not_start(server: FlowerServer, broken: str) -> None:
    moved = "import types, server.operations.superlink as our; our.config_loader = types.SimpleNamespace(); our.main()"
    code = moved if "moved" in broken else "import server.operations.superlink as our; our.main()"
    argv = superlink(server).argv
    match broken:
        case "no secret":
            server.operator_secret.unlink()
        case "a short secret":
            server.operator_secret.write_text("short")
    started = [sys.executable, "-P", "-c", code, *argv[argv.index("--operator-secret-file") :]]
    done = subprocess.run(started, env=superlink(server).env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode != 0
    assert "authentication" in done.stderr or "secret" in done.stderr
    assert not healthy(server)


def test_the_node_is_told_nothing_of_the_site_and_the_launcher_its_worker_socket_only(node: SiteNode) -> None:
    pairs = dict(pairwise(supernode(node).argv))
    assert pairs["--isolation"] == "process"
    assert "--node-config" not in pairs
    assert "--insecure" not in pairs
    assert stat.S_IMODE(node.secret.stat().st_mode) == 0o600
    spec = launcher(node)
    assert spec.argv[1:4] == ("-P", "-m", "client.app")  # the installed code, never what lies in the current folder
    assert dict(pairwise(spec.argv))["--socket"] == str(node.socket)
    for path in (node.folder.parent, node.keys.private):
        assert str(path) not in {*spec.argv, *spec.env.values()}


def test_only_what_calls_out_of_the_house_is_given_the_proxy(
    node: SiteNode, server: FlowerServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "intranet.example")
    for spec in (supernode(node), worker(node.folder)):
        assert spec.env["https_proxy"] == "http://proxy.example:3128"
        assert spec.env["no_proxy"].split(",")[:2] == ["intranet.example", "127.0.0.1"]
    for spec in (launcher(node), superlink(server), superexec(server, relay=server.folder)):
        assert not any("proxy" in name.lower() for name in spec.env)


def test_a_worker_log_is_never_quoted(node: SiteNode) -> None:
    assert not worker(node.folder).show_log


@pytest.mark.slow
def test_a_socket_left_by_a_killed_worker_does_not_count_as_ready(tmp_path: Path) -> None:
    path = tmp_path / "w.sock"
    spec = worker(tmp_path, socket=path)
    assert spec.ready is not None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert not spec.ready()
        listener.listen()
        assert not spec.ready()  # somebody listens, and answers nothing
    assert path.is_socket()
    assert not spec.ready()
    answering = serve(object(), socket=path)
    assert spec.ready()
    answering.stop(grace=None).wait()
    assert not spec.ready()


def test_a_node_id_is_read_from_the_latest_start_only(node: SiteNode) -> None:
    node.log.parent.mkdir(parents=True)
    node.log.write_text("INFO : SuperNode ID: 12345\n")
    spec = supernode(node)
    assert node_id(node) == 12345
    assert spec.ready is not None
    assert not spec.ready()
    with node.log.open("a") as log:
        log.write("INFO : SuperNode ID: 678\n")
    assert spec.ready()


@pytest.mark.parametrize("site", ["", "a\nb", "a\0"])
def test_bad_site_names_are_refused(node: SiteNode, site: str) -> None:
    with pytest.raises(InvalidInput, match="site"):
        replace(node, site=site)


def test_a_node_without_its_key_is_refused(node: SiteNode, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="existing file"):
        replace(node, keys=NodeKeys(private=tmp_path / "none", public=tmp_path / "none.pub"))


def test_health_means_the_study_s_own_server(tmp_path: Path, server: FlowerServer) -> None:
    """A server with a certificate of another authority on the same port does not count."""
    code = (
        "import http.server,ssl,sys\n"
        "class H(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): self.send_response(200); self.end_headers()\n"
        "s=http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), H)\n"
        "c=ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER); c.load_cert_chain(sys.argv[2], sys.argv[3])\n"
        "s.socket=c.wrap_socket(s.socket, server_side=True); open(sys.argv[4], 'w').close(); s.serve_forever()"
    )
    stranger = issue_server_certificate(create_authority(tmp_path / "x"), tmp_path / "x", names=["127.0.0.1"])
    assert not healthy(server)
    for who, expected in ((server.identity, True), (stranger, False)):
        up = tmp_path / f"{expected}.up"
        with ProcessGroup() as group:
            group.start(
                DaemonSpec(
                    role="fake",
                    name="fake",
                    argv=(sys.executable, "-c", code, str(server.port), str(who.certificate), str(who.key), str(up)),
                    env=base_env(),
                    cwd=tmp_path,
                    log=tmp_path / "fake.log",
                    ready=up.exists,
                )
            )
            assert healthy(server) is expected


def test_a_foreign_key_is_not_registered(server: FlowerServer, tmp_path: Path) -> None:
    (tmp_path / "rsa.pub").write_text("ssh-rsa AAAA nonsense")
    with pytest.raises(InvalidInput, match="OpenSSH public key"):
        register_node(server, tmp_path / "rsa.pub", name="A")


def test_an_absent_server_is_one_clear_error(server: FlowerServer, node: SiteNode) -> None:
    with pytest.raises(DaemonFailed, match=rf"{server.address}; to fix: `consilium server up`"):
        register_node(server, node.keys.public, name="A")


def test_a_command_that_superlink_is_slow_to_answer_says_that_it_may_be_carried_out(
    server: FlowerServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "flwr"
    slow.write_text("#!/bin/sh\nexec sleep 60\n", encoding="utf-8")
    slow.chmod(0o700)
    monkeypatch.setattr(daemons, "COMMAND_TIMEOUT_S", 0.05)
    monkeypatch.setattr(daemons, "executable", lambda _name: str(slow))
    monkeypatch.setattr(daemons, "accepts", lambda _host, _port: True)
    with pytest.raises(DaemonFailed, match=r"flwr run did not end within 0.05 s, but SuperLink may still.*repeat"):
        submit(server, tmp_path)


def test_the_app_is_our_own_code_without_dependencies(tmp_path: Path) -> None:
    folder = app_dir(tmp_path / "app")
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["dependencies"] == []
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "server.app:app",
        "clientapp": "client.app:app",
    }
    root = Path(__file__).parents[2]
    sources = [path.relative_to(folder) for path in folder.rglob("*.py")]
    assert all((folder / path).read_bytes() == (root / path).read_bytes() for path in sources)
    assert not list(folder.rglob("__pycache__"))
    with pytest.raises(InvalidInput, match="empty"):
        app_dir(folder)


@pytest.mark.parametrize("component", ["server.app", "client.app"])
@pytest.mark.slow
def test_the_app_has_what_its_components_import_and_little_more(tmp_path: Path, component: str) -> None:
    """Every node receives the app before it can answer; at 50 kB/s this must take at most ten seconds."""
    folder = app_dir(tmp_path / "app")
    code = (
        f"import sys, {component}; "
        "print(*{m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in ('client', 'common', 'server')})"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=True
    )
    assert all(Path(name).is_relative_to(folder) for name in ran.stdout.split())
    assert sum(path.stat().st_size for path in folder.rglob("*.py")) < 500_000


@pytest.mark.slow
def test_flower_bundles_every_file_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    hashes = set()
    for name in ("one", "two"):
        folder = app_dir(tmp_path / name)
        command = [executable("flwr"), "build", "--app", str(folder)]
        subprocess.run(command, env=flower_env(tmp_path / "home"), cwd=tmp_path / name, check=True, timeout=600)
        (bundle,) = (tmp_path / name).glob("*.fab")
        hashes.add(bundle.read_bytes())
    assert len(hashes) == 1
    with ZipFile(bundle) as archive:
        names = set(archive.namelist())
        assert {n: archive.read(n) for n in app_files()} == app_files()
    assert names - set(app_files()) == {"pyproject.toml", ".info/CONTENT"}


@pytest.mark.slow
def test_daemon_modules_do_not_import_flower() -> None:
    code = (
        "import sys, server.operations.daemons, client.operations.daemons; "
        "sys.exit('flwr' in sys.modules or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=600).returncode == 0


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "ERROR:  Exit Code: 305\nFailed.\n[code: 2004] refused: unknown-key\nmore\n",
            "revoked",
        ),
        ("ERROR:  Exit Code: 305\n[code: 2001] refused: clock\n", "NTP"),
        (
            "ERROR:  Exit Code: 305\n[code: 2004] Node is not registered\n",
            "admitted",
        ),
        (
            "ERROR:  Exit Code: 305\n[code: 2004] Failed to activate SuperNode.\n",
            "or another SuperNode with this site's key is connected; to fix: end `site up` in every other copy",
        ),
        ("ERROR:  Exit Code: 305\n[code: 9] something new\n", "[code: 9] something new"),
        (
            "ERROR:  Exit Code: 305\nFailed to initialize the connection to the SuperLink.\n[SSL: "
            "CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1006)\nmore\n",
            "certificate has expired; to fix: `consilium site doctor`",
        ),
        (
            "ERROR: certificate verify failed: certificate is not yet valid \nerror: the connection to the "
            "server ended; the SuperNode is started again\n",
            "certificate is not yet valid; to fix: `consilium site doctor`",
        ),
        (
            "ERROR:  Exit Code: 300\nFailed to initialize.\nName or service not known\n\nmore\n",
            "Failed to initialize. Name or service not known; to fix: `consilium site doctor`",
        ),
        ("INFO: starting\nKeyError: 'x'\n", "KeyError"),
        (
            "INFO: SuperNode terminated gracefully.\nINFO: Finished server process [7]\n",
            "no longer accepts its heartbeats",
        ),
    ],
)
def test_a_node_that_was_turned_away_says_what_to_do(log: str, said: str) -> None:
    assert said in explain_supernode(log)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("DatabaseError) file is not a database", "move every file flower/superlink.db* away"),
        ("DatabaseError) database disk image is malformed", "`consilium provision list`"),
        ("OperationalError) database or disk is full", "database or disk is full"),
    ],
)
def test_a_superlink_that_cannot_use_its_database_says_why_and_moves_no_good_one_away(error: str, said: str) -> None:
    log = f"sqlalchemy.exc.Error: (sqlite3.{error}\n(Background on this error at: https://sqlalche.me/e/21/4xp6)\n"
    assert said in explain_superlink(log)
    assert ("away" in explain_superlink(log)) == error.startswith("DatabaseError")
    assert explain_superlink("INFO: starting\nKeyError: 'x'\n") == "KeyError: 'x'"


@pytest.mark.slow
def test_a_serverapp_may_load_its_code_for_two_minutes_before_superlink_has_another_one_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine SuperLink refused each ServerApp after 30 s, so no run ever began."""
    for name in ("HEARTBEAT_DEFAULT_INTERVAL", "HEARTBEAT_PATIENCE"):
        monkeypatch.setattr(sql_corestate, name, getattr(sql_corestate, name))
    give_time_to_begin()
    link, now = Link(tmp_path / "superlink.db"), sql_corestate.now
    run = link.state.create_run("f", "1", "h", {}, NOOP_FEDERATION_ID, None, "a", TaskType.SERVER_APP)
    (task,) = link.state.get_tasks(run_ids=[run])
    token = link.state.claim_task(task.task_id)
    monkeypatch.setattr(sql_corestate, "now", lambda: now() + timedelta(seconds=140))
    assert link.state.activate_task(task.task_id)
    assert link.state.acknowledge_task_heartbeat(task.task_id)
    monkeypatch.setattr(sql_corestate, "now", lambda: now() + timedelta(seconds=140 + 59))
    assert link.state.get_task_by_token(token)
    monkeypatch.setattr(sql_corestate, "now", lambda: now() + timedelta(seconds=140 + 62))
    assert link.state.get_task_by_token(token) is None  # a killed ServerApp is noticed as soon as before
