"""The aggregator's Flower daemons: how SuperLink and SuperExec start, and how they are asked for things.

Flower is driven through its commands in processes of their own; nothing here imports it. Refuses plain HTTP (TLS and
node authentication are always on) and an app with any runtime dependency to install. No secret is ever in an argument:
keys and the SuperExec secret are files of mode 0600 in the daemons' folder.

SuperLink listens on loopback, and :mod:`server.operations.superlink` asks whoever calls its control routes for the
operators' secret, without which Flower 1.41 would take code from anybody on this machine. Flower's own client
carries it from a file.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import secrets
import ssl
import subprocess
import sys
import tempfile
import tomllib
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common import __version__
from common.engine import flower_env
from common.errors import DaemonFailed, InvalidInput
from common.https import opener
from common.objects import shared, write_atomically
from common.pki import ServerIdentity, read_node_public_key
from common.process import DaemonSpec, executable
from common.sockets import accepts, free_port
from server.aggregation.relay import FOLDER as RELAY_FOLDER

COMMAND_TIMEOUT_S = 120.0
HOST = "127.0.0.1"
"""Where SuperLink listens, and nowhere else."""

NODE_OF_KEY = Path(__file__).with_name("registered_node.py")
CONNECTION = "consilium"
"""Name of the connection in Flower's ``config.toml``."""

APP_PACKAGES = ("client", "common", "server")
"""What goes into the app bundle: these packages as this interpreter imports them."""

APP_NAME = "consilium"
_APP_SUFFIXES = (".py", ".json", ".toml")  # Flower bundles few kinds of file, and refuses a pattern for others
_BUNDLE_MAX_BYTES = 10 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerServer:
    """The aggregator's Flower side: its folder, its port on loopback and its TLS identity, which must name ``HOST``.

    ``folder`` holds ``superlink.db``, ``superexec.secret``, ``operator.secret``, ``home/`` (Flower's own), ``logs/``.
    It may be given to a group, and the daemons be another user of it. ``client``, the home of Flower's client, is the
    operator's alone.
    """

    folder: Path
    client: Path
    port: int
    identity: ServerIdentity

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", self.folder.absolute())
        object.__setattr__(self, "client", self.client.absolute())
        if not 0 < self.port < 65536:
            raise InvalidInput("port", value=self.port, limit="1 to 65535")

    @property
    def address(self) -> str:
        """``host:port`` as clients write it."""
        return f"{HOST}:{self.port}"

    @property
    def database(self) -> Path:
        """SuperLink's SQLite file: messages lie in it, sealed."""
        return self.folder / "superlink.db"

    @property
    def secret(self) -> Path:
        """Shared by SuperLink and SuperExec, so that nobody else is handed ServerApp tasks."""
        return self.folder / "superexec.secret"

    @property
    def operator_secret(self) -> Path:
        """What SuperLink asks of whoever calls its control routes."""
        return self.folder / "operator.secret"

    @property
    def home(self) -> Path:
        """Flower's home folder for this server's daemons."""
        return self.folder / "home"

    @property
    def logs(self) -> Path:
        """Where the daemons' logs lie."""
        return self.folder / "logs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A registered SuperNode as SuperLink sees it. ``status``: registered (never seen), online or offline."""

    node_id: int
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """``status``: pending, starting, running, finished; ``outcome`` once finished: completed, failed, stopped.

    ``fab_hash`` is the SHA-256 of the app bundle that every node is sent.
    """

    run_id: int
    status: str
    outcome: str = ""
    details: str = ""
    fab_hash: str = ""

    @property
    def finished(self) -> bool:
        """Whether the run is over, however it ended."""
        return self.status == "finished"


def prepare(server: FlowerServer) -> None:
    """Write what the daemons and commands need: folders, Flower's ``config.toml``, the two secrets. Idempotent."""
    given = shared(server.folder)
    for folder in (server.folder, server.home, server.logs):
        folder.mkdir(parents=True, exist_ok=True)
        if not given:
            folder.chmod(0o700)
    server.client.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_config(server)
    for path, secret in ((server.secret, secrets.token_bytes(32)), (server.operator_secret, _hex_secret())):
        if not path.exists():
            write_atomically(path, secret, mode=0o640 if given else 0o600)
    write_credentials(server)


def write_config(server: FlowerServer) -> Path:
    """Write ``config.toml`` with this server as the only and default connection; Flower's public cloud is not in it."""
    path = server.client / "config.toml"
    path.write_text(
        f"[superlink]\ndefault = {_toml(CONNECTION)}\n\n[superlink.{CONNECTION}]\n"
        f"address = {_toml(server.address)}\nroot-certificates = {_toml(str(server.identity.authority.absolute()))}\n",
        encoding="utf-8",
    )
    return path


def write_credentials(server: FlowerServer) -> Path:
    """Write the operators' secret where Flower's own client looks for what it shows a SuperLink."""
    path = server.client / "credentials.yaml"
    said = {
        "authn-type": "oidc",
        "oidc-access-token": server.operator_secret.read_text("ascii"),
        "oidc-refresh-token": "-",
    }
    entries = {f"flower.account-auth.{server.address}.{name}": value for name, value in said.items()}
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in entries.items()}
    write_atomically(path, json.dumps(encoded).encode(), mode=0o600)
    return path


def superlink(server: FlowerServer) -> DaemonSpec:
    """How to start the SuperLink: TLS, node authentication, database on disk, ServerApps in a process of their own.

    It is ready once it answers and has turned away a control call without the operators' secret.

    Flower cannot go on with a database whose making was interrupted. So a mark stands beside it from before the first
    start until SuperLink has answered once; a database found with its mark, in which nothing can be yet, is deleted.
    """
    unborn = server.database.with_name("superlink.db.unborn")
    if unborn.exists():
        for part in server.folder.glob(f"{server.database.name}*"):
            part.unlink()
    if not server.database.exists():
        unborn.touch()

    def ready() -> bool:
        if healthy(server) and guarded(server):
            unborn.unlink(missing_ok=True)
            return True
        return False

    return DaemonSpec(
        role="superlink",
        name="superlink",
        argv=(
            *(sys.executable, "-P", "-m", "server.operations.superlink"),
            *("--operator-secret-file", str(server.operator_secret)),
            *("--host", HOST, "--port", str(server.port)),
            *("--ssl-ca-certfile", str(server.identity.authority.absolute())),
            *("--ssl-certfile", str(server.identity.certificate.absolute())),
            *("--ssl-keyfile", str(server.identity.key.absolute())),
            *("--isolation", "process", "--database", str(server.database), "--enable-supernode-auth"),
            *("--superexec-auth-secret-file", str(server.secret), "--disable-runtime-dependency-installation"),
        ),
        env=flower_env(server.home),
        cwd=server.folder,
        log=server.logs / "superlink.log",
        ready=ready,
        ready_timeout_s=300.0,
    )


def superexec(server: FlowerServer, *, relay: Path) -> DaemonSpec:
    """How to start the SuperExec, which starts ServerApps and tells them the folder ``relay`` of the core's socket.

    Start it after the SuperLink. It is ready once it listens for who asks after its health.
    """
    port = free_port()
    return DaemonSpec(
        role="superexec",
        name="superexec",
        argv=(
            executable("flower-superexec"),
            *("--runtime-api-address", server.address),
            *("--root-certificates", str(server.identity.authority.absolute())),
            *("--superexec-auth-secret-file", str(server.secret)),
            *("--health-server-address", f"{HOST}:{port}"),
        ),
        env=flower_env(server.home, **{RELAY_FOLDER: str(relay.absolute())}),
        cwd=server.folder,
        log=server.logs / "superexec.log",
        ready=lambda: accepts(HOST, port),
    )


def healthy(server: FlowerServer) -> bool:
    """Whether the SuperLink answers ``GET /health`` over TLS, verified by the study's authority."""
    return _status(server, urllib.request.Request(f"https://{server.address}/health")) == 200


def guarded(server: FlowerServer) -> bool:
    """Whether the SuperLink refuses a control call that carries no secret."""
    url = f"https://{server.address}/v1/control/list-nodes"
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    return _status(server, urllib.request.Request(url, data=b"", headers=headers, method="POST")) == 401


def _status(server: FlowerServer, request: urllib.request.Request) -> int:
    """What the SuperLink answers over TLS, verified by the study's authority; 0 where it does not."""
    context = ssl.create_default_context(cafile=str(server.identity.authority))
    try:
        with opener(context, proxies=False).open(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return 0


def register_node(server: FlowerServer, public_key: Path, *, name: str) -> int:
    """Admit the holder of a node key: its Flower node id, to which the study then binds the site.

    A key that SuperLink knows, from an approval that broke off, has its node already. Errors: InvalidInput for a key
    that is no P-384 OpenSSH public key; DaemonFailed with Flower's words otherwise, also for a key that was withdrawn.
    """
    read_node_public_key(public_key)
    try:
        answer = _flwr(server, "supernode", "register", str(public_key.absolute()), CONNECTION, "--name", name)
    except DaemonFailed as error:
        if "already in use" not in str(error):
            raise
        found = _flwr(server, str(public_key.absolute()), CONNECTION, script=NODE_OF_KEY)["node-ids"]
        if not isinstance(found, list) or len(found) != 1:
            raise
        return int(found[0])
    return int(_text(answer, "node-id"))


def unregister_node(server: FlowerServer, node_id: int) -> None:
    """Withdraw a node's admission; its next request is refused."""
    _flwr(server, "supernode", "unregister", str(node_id), CONNECTION)


def list_nodes(server: FlowerServer) -> tuple[Node, ...]:
    """Every registered node with its status, by node id."""
    answer = _flwr(server, "supernode", "list", CONNECTION)
    rows = answer.get("nodes")
    if not isinstance(rows, list):
        raise DaemonFailed(f"flwr supernode list answered without nodes: {sorted(answer)}")
    nodes = [Node(node_id=int(_text(row, "node-id")), status=_text(row, "status")) for row in rows]
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def submit(server: FlowerServer, app: Path, run_config: Mapping[str, str | int | float | bool]) -> int:
    """Submit the app in folder ``app``: the run's id. ``run_config`` may only override keys the app declares."""
    with tempfile.TemporaryDirectory() as scratch:  # a file, because Flower's own key=value syntax knows no escapes
        overrides = Path(scratch, "run-config.toml")
        overrides.write_text(_toml_table(run_config), encoding="utf-8")
        answer = _flwr(server, "run", str(app.absolute()), CONNECTION, "--run-config", str(overrides))
    return int(_text(answer, "run-id"))


def run_status(server: FlowerServer, run_id: int) -> RunStatus:
    """How a run stands."""
    answer = _flwr(server, "list", CONNECTION, "--run-id", str(run_id))
    rows = answer.get("runs")
    if not isinstance(rows, list) or len(rows) != 1:
        raise DaemonFailed(f"SuperLink does not know run {run_id}")
    status, _, outcome = _text(rows[0], "status").partition(":")
    return RunStatus(
        run_id=run_id,
        status=status,
        outcome=outcome,
        details=str(rows[0].get("status-details") or ""),
        fab_hash=_text(rows[0], "fab-hash"),
    )


def stop_run(server: FlowerServer, run_id: int) -> None:
    """Ask SuperLink to stop a run."""
    _flwr(server, "stop", str(run_id), CONNECTION)


def app_dir(folder: Path) -> Path:
    """Assemble the Flower app in ``folder`` from the packages this interpreter imports; returns ``folder``.

    Holds ``pyproject.toml`` (no dependencies, so none can be installed) and the sources, nothing else: the same code
    gives the same bundle and the same bundle hash from a clone and from an installed wheel. An existing ``folder`` must
    be empty.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput("folder for the app", value=str(folder), limit="empty or absent")
    files = app_files()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    patterns = sorted({f"{PurePosixPath(name).parts[0]}/**/*{PurePosixPath(name).suffix}" for name in files})
    lines = [
        "[project]",
        f"name = {_toml(APP_NAME)}",
        f"version = {_toml(__version__)}",
        'description = "Consilium\'s ServerApp and ClientApp"',
        'license = "Apache-2.0"',
        "dependencies = []",
        "",
        "[tool.flwr.app]",
        'publisher = "consilium"',
        f"fab-include = [{', '.join(map(_toml, patterns))}]",
        "",
        "[tool.flwr.app.components]",
        'serverapp = "server.app:app"',
        'clientapp = "client.app:app"',
        "",
    ]
    (folder / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")
    return folder


def app_files() -> dict[str, bytes]:
    """The app's sources by their path in the bundle, sorted."""
    found: dict[str, bytes] = {}
    for package in APP_PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            raise DaemonFailed(f"the package {package!r} is not installed; to fix: install Consilium anew")
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in root.rglob("*"):
            if path.suffix in _APP_SUFFIXES and path.is_file() and "__pycache__" not in path.parts:
                found[f"{package}/{path.relative_to(root).as_posix()}"] = path.read_bytes()
    total = sum(map(len, found.values()))
    if total > _BUNDLE_MAX_BYTES:
        raise DaemonFailed(f"the app has {total} bytes; Flower takes at most {_BUNDLE_MAX_BYTES}")
    return dict(sorted(found.items()))


def _flwr(server: FlowerServer, *arguments: str, script: Path | None = None) -> dict[str, object]:
    """One flwr command with ``--format json``, or a script that asks as one: its answer, or DaemonFailed."""
    if not accepts(HOST, server.port):
        raise DaemonFailed(f"SuperLink does not answer at {server.address}; to fix: `consilium server up`")
    ours = script and [sys.executable, str(script), *arguments]
    out = _command(ours or [executable("flwr"), *arguments, "--format", "json"], home=server.client, cwd=server.client)
    try:
        answer = json.loads(out[out.index("{") :])
    except ValueError as error:
        raise DaemonFailed(f"flwr {arguments[0]} did not answer in JSON: {out[:200]!r}") from error
    if not isinstance(answer, dict) or answer.get("success") is False:
        said = answer.get("error-message", answer) if isinstance(answer, dict) else answer
        raise DaemonFailed(f"flwr {' '.join(arguments[:2])}: {said}")
    return answer


def _command(command: list[str], *, home: Path, cwd: Path) -> str:
    """Run one command of Flower's client to its end; its standard output."""
    name = " ".join((Path(command[0]).name, command[1]))
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                env=flower_env(home, NO_COLOR="1", COLUMNS="200"),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DaemonFailed(f"{name} did not answer within {COMMAND_TIMEOUT_S:g} s") from error
        out = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0 and "{" not in out:
            errors.seek(0)
            said = (out + errors.read().decode("utf-8", "replace")).strip()[-800:]
            raise DaemonFailed(f"{name} ended with status {done.returncode}: {said}")
    return out


def _text(row: object, key: str) -> str:
    if not isinstance(row, dict) or key not in row:
        raise DaemonFailed(f"Flower's answer lacks {key!r}; is another version than 1.41 installed?")
    return str(row[key])


def _hex_secret() -> bytes:
    return secrets.token_hex(32).encode()


def _toml(value: str | int | float | bool) -> str:
    """A TOML value; JSON's strings, numbers and booleans are TOML's, once DEL is escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
    tomllib.loads(f"x = {text}")
    return text


def _toml_table(values: Mapping[str, str | int | float | bool]) -> str:
    return "".join(f"{key} = {_toml(value)}\n" for key, value in sorted(values.items()))
