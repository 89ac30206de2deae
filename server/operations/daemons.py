"""Describes how SuperLink and SuperExec are started, and sends commands to SuperLink.

``supervisor`` starts the daemons and submits runs through it; `consilium provision` registers nodes. Flower's commands
run in separate processes, and this module imports nothing of Flower. No daemon is started without TLS and node
authentication, and the app that this module builds has no runtime dependencies. Keys and secrets are files of mode 0600
in the daemons' folder (0640 if the folder belongs to a group), never command-line arguments.

SuperLink listens on loopback. There, :mod:`server.operations.superlink` requires the operators' secret for control
routes, because Flower 1.41 alone would accept code from every user of this machine. Flower's own client reads the
secret from a file.
"""

from __future__ import annotations

import ast
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from common import __version__
from common.engine import flower_env
from common.errors import DaemonFailed, InvalidInput
from common.https import opener
from common.objects import PathInside, shared, write_atomically
from common.pki import ServerIdentity, read_node_public_key
from common.process import DaemonSpec, executable
from common.reading import lenient_json
from common.sockets import accepts, free_port
from server.aggregation.relay import FOLDER as RELAY_FOLDER

COMMAND_TIMEOUT_S = 120.0
HOST = "127.0.0.1"
"""The only address SuperLink listens on."""

NODE_OF_KEY = Path(__file__).with_name("registered_node.py")
CONNECTION = "consilium"
"""Name of the connection in Flower's ``config.toml``."""

APP_PACKAGES = ("client", "common", "server")
"""The packages from which files are copied into the app bundle; they are the ones that this interpreter imports."""

APP_NAME = "consilium"
_COMPONENTS = ("server.app", "client.app")
"""The modules of the app's ServerApp and ClientApp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowerServer:
    """The server's Flower installation: its folders, SuperLink's port on loopback, and SuperLink's TLS identity.

    Attributes:
        folder: Holds ``superlink.db``, ``superexec.secret``, ``operator.secret``, ``home/`` (Flower's own) and
            ``logs/``. It may belong to a group, so that the daemons run as another user of that group.
        client: Home folder of Flower's client; only the operator can read it.
        port: SuperLink's port on loopback.
        identity: TLS certificate, key and authority; the certificate must name :data:`HOST`.

    Raises:
        InvalidInput: If the port is not within 1 to 65535.
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
        """SuperLink's address as ``host:port``."""
        return f"{HOST}:{self.port}"

    database = PathInside("superlink.db", of="folder")
    """SuperLink's SQLite file. The codes in the messages that it stores are encrypted."""
    secret = PathInside("superexec.secret", of="folder")
    """File of the secret that SuperLink and SuperExec share, so that only SuperExec receives ServerApp tasks."""
    operator_secret = PathInside("operator.secret", of="folder")
    """File of the secret that SuperLink requires for its control routes."""
    home = PathInside("home", of="folder")
    """Flower's home folder for this server's daemons."""
    logs = PathInside("logs", of="folder")
    """Folder of the daemons' logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A registered SuperNode as SuperLink lists it.

    Attributes:
        node_id: Flower's id of the node.
        status: ``registered`` (never seen), ``online`` or ``offline``.
    """

    node_id: int
    status: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run's status as SuperLink reports it.

    Attributes:
        run_id: Flower's id of the run.
        status: ``pending``, ``starting``, ``running`` or ``finished``.
        outcome: Once finished: ``completed``, ``failed`` or ``stopped``.
    """

    run_id: int
    status: str
    outcome: str = ""

    @property
    def finished(self) -> bool:
        """True if the run has completed, failed or been stopped."""
        return self.status == "finished"


def prepare(server: FlowerServer) -> None:
    """Create the folders, Flower's ``config.toml`` and the secrets that the daemons and Flower's client need.

    A second call keeps existing secrets.

    Args:
        server: The server's Flower installation. If its folder belongs to a group, the group may read the secrets.
    """
    given = shared(server.folder)
    for folder in (server.folder, server.home, server.logs):
        folder.mkdir(parents=True, exist_ok=True)
        if not given:
            folder.chmod(0o700)
    server.client.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_config(server)
    for path, secret in (
        (server.secret, secrets.token_bytes(32)),
        (server.operator_secret, secrets.token_hex(32).encode()),
    ):
        if not path.exists():
            write_atomically(path, secret, mode=0o640 if given else 0o600)
    _write_credentials(server)


def _write_config(server: FlowerServer) -> None:
    """Write the client's ``config.toml``, without which Flower would connect to its public cloud."""
    (server.client / "config.toml").write_text(
        f"[superlink]\ndefault = {_toml(CONNECTION)}\n\n[superlink.{CONNECTION}]\n"
        f"address = {_toml(server.address)}\nroot-certificates = {_toml(str(server.identity.authority.absolute()))}\n",
        encoding="utf-8",
    )


def _write_credentials(server: FlowerServer) -> None:
    """Write the operators' secret where Flower's client looks for its access token."""
    said = {
        "authn-type": "oidc",
        "oidc-access-token": server.operator_secret.read_text("ascii"),
        "oidc-refresh-token": "-",
    }
    entries = {f"flower.account-auth.{server.address}.{name}": value for name, value in said.items()}
    encoded = {name: base64.b64encode(value.encode()).decode() for name, value in entries.items()}
    write_atomically(server.client / "credentials.yaml", json.dumps(encoded).encode(), mode=0o600)


def superlink(server: FlowerServer) -> DaemonSpec:
    """Describe how to start SuperLink: with TLS, node authentication, and a database on disk.

    ServerApps run in separate processes. SuperLink counts as ready once it answers and has refused a control call
    without the operators' secret.

    Flower cannot use a database whose creation was interrupted. A marker file is therefore created before the first
    start and deleted once SuperLink has answered. A database found with its marker cannot hold any message yet, and is
    deleted.

    Args:
        server: The server's Flower installation, after :func:`prepare`.

    Returns:
        The daemon's description.
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
    )


def superexec(server: FlowerServer, *, relay: Path) -> DaemonSpec:
    """Describe how to start SuperExec, Flower's daemon that starts ServerApps. Start it after SuperLink.

    It counts as ready once its health port accepts connections.

    Args:
        server: The server's Flower installation, after :func:`prepare`.
        relay: Folder of the core's socket, passed to each ServerApp in an environment variable.

    Returns:
        The daemon's description.
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
    """Check whether SuperLink answers ``GET /health`` over TLS, verified by the study's authority.

    Args:
        server: The SuperLink.

    Returns:
        True if it answers with status 200.
    """
    return _status(server, urllib.request.Request(f"https://{server.address}/health")) == 200


def guarded(server: FlowerServer) -> bool:
    """Return whether SuperLink refuses a control call that carries no secret.

    Args:
        server: The SuperLink.

    Returns:
        True if it refuses the call; False if it accepts it or does not answer.
    """
    url = f"https://{server.address}/v1/control/list-nodes"
    headers = {"content-type": "application/protobuf", "accept": "application/protobuf"}
    return _status(server, urllib.request.Request(url, data=b"", headers=headers, method="POST")) == 401


def _status(server: FlowerServer, request: urllib.request.Request) -> int:
    """Return the HTTP status that SuperLink answers with over verified TLS, or 0 if it does not answer."""
    context = ssl.create_default_context(cafile=str(server.identity.authority))
    try:
        with opener(context, proxies=False).open(request, timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (urllib.error.URLError, OSError):
        return 0


def register_node(server: FlowerServer, public_key: Path, *, name: str) -> int:
    """Register a site's node key at SuperLink.

    If an interrupted approval registered the key already, its node id is returned again.

    Args:
        server: The SuperLink.
        public_key: File with an OpenSSH public key.
        name: The site's name, shown in Flower's lists.

    Returns:
        Flower's id of the node, to which the study then binds the site.

    Raises:
        InvalidInput: If the file is not a P-384 OpenSSH public key.
        DaemonFailed: With Flower's message, if SuperLink does not answer or refuses the key, for instance because the
            key was withdrawn.
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
    """Withdraw a node's admission at SuperLink, which refuses its next request.

    Args:
        server: The SuperLink.
        node_id: Flower's id of the node.

    Raises:
        DaemonFailed: With Flower's message, or if SuperLink does not answer.
    """
    _flwr(server, "supernode", "unregister", str(node_id), CONNECTION)


def list_nodes(server: FlowerServer) -> tuple[Node, ...]:
    """List the nodes registered at SuperLink.

    Args:
        server: The SuperLink.

    Returns:
        Every node with its status, ordered by node id.

    Raises:
        DaemonFailed: If SuperLink does not answer, or the answer contains no list of nodes.
    """
    answer = _flwr(server, "supernode", "list", CONNECTION)
    rows = answer.get("nodes")
    if not isinstance(rows, list):
        raise DaemonFailed(
            f"the answer of `flwr supernode list` contains no nodes, only {sorted(answer)}; to fix: install Flower 1.41"
        )
    nodes = [Node(node_id=int(_text(row, "node-id")), status=_text(row, "status")) for row in rows]
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def submit(server: FlowerServer, app: Path) -> int:
    """Submit the app in a folder as a new run.

    Args:
        server: The SuperLink.
        app: Folder of the app, as :func:`app_dir` writes it.

    Returns:
        Flower's id of the run.

    Raises:
        DaemonFailed: With Flower's message, or if SuperLink does not answer.
    """
    return int(_text(_flwr(server, "run", str(app.absolute()), CONNECTION), "run-id"))


def run_status(server: FlowerServer, run_id: int) -> RunStatus:
    """Return a run's status.

    Args:
        server: The SuperLink.
        run_id: Flower's id of the run.

    Returns:
        The status.

    Raises:
        DaemonFailed: If SuperLink does not answer or does not know the run.
    """
    found = _runs(_flwr(server, "list", CONNECTION, "--run-id", str(run_id)))
    if len(found) != 1:
        raise DaemonFailed(f"SuperLink does not know run {run_id}; to fix: `consilium study resume` submits a new run")
    return found[0]


def unfinished_runs(server: FlowerServer) -> list[int]:
    """Return Flower's ids of the runs that have not ended.

    Args:
        server: The SuperLink.

    Returns:
        The ids.

    Raises:
        DaemonFailed: If SuperLink does not answer.
    """
    return [run.run_id for run in _runs(_flwr(server, "list", CONNECTION)) if not run.finished]


def _runs(answer: dict[str, object]) -> list[RunStatus]:
    """Return the runs in an answer of `flwr list`."""
    rows = answer.get("runs")
    found = []
    for row in rows if isinstance(rows, list) else ():
        status, _, outcome = _text(row, "status").partition(":")
        found.append(RunStatus(run_id=int(_text(row, "run-id")), status=status, outcome=outcome))
    return found


def stop_run(server: FlowerServer, run_id: int) -> None:
    """Ask SuperLink to stop a run.

    Args:
        server: The SuperLink.
        run_id: Flower's id of the run.

    Raises:
        DaemonFailed: With Flower's message, or if SuperLink does not answer.
    """
    _flwr(server, "stop", str(run_id), CONNECTION)


def app_dir(folder: Path) -> Path:
    """Write the Flower app into ``folder`` from the packages that this interpreter imports.

    The folder then contains the source files that :func:`app_files` returns, and a ``pyproject.toml`` without
    dependencies, so that Flower installs none. The same code gives the same bundle hash from a clone and from an
    installed wheel.

    Args:
        folder: Empty or absent.

    Returns:
        ``folder``.

    Raises:
        InvalidInput: If the folder is not empty.
        DaemonFailed: If a package is not installed.
    """
    if folder.exists() and any(folder.iterdir()):
        raise InvalidInput("folder for the Flower app", value=str(folder), limit="an empty folder, or none yet")
    files = app_files()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    patterns = [f"{package}/**/*.py" for package in APP_PACKAGES]
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
        *(f'{module.split(".")[0]}app = "{module}:app"' for module in _COMPONENTS),
        "",
    ]
    (folder / "pyproject.toml").write_text("\n".join(lines), encoding="utf-8")
    return folder


def app_files() -> dict[str, bytes]:
    """Return the source files that the Flower app's two components import, by their path in the app, sorted.

    Other source files are left out to keep the app small, because every node must receive it before it can answer.

    Returns:
        The content of each file by its path.

    Raises:
        DaemonFailed: If a package is not installed.
    """
    found: dict[str, bytes] = {}
    wanted = list(_COMPONENTS)
    while wanted:
        module = wanted.pop()
        path = _source(module)
        if path is None or (name := path.as_posix()) in found:
            continue
        found[name] = _root(path.parts[0]).joinpath(*path.parts[1:]).read_bytes()
        wanted += [module.rpartition(".")[0], *_imported(found[name])]
    return dict(sorted(found.items()))


def _root(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DaemonFailed(f"the package {package!r} is not installed; to fix: install Consilium again")
    return Path(next(iter(spec.submodule_search_locations)))


def _source(module: str) -> PurePosixPath | None:
    """Return the path that a module's source file has in the Flower app.

    Return None if the module is in none of :data:`APP_PACKAGES`, or if there is no such module.
    """
    package, *inner = module.split(".")
    if package not in APP_PACKAGES:
        return None
    candidates = (PurePosixPath(package, *inner, "__init__.py"), PurePosixPath(package, *inner).with_suffix(".py"))
    return next((path for path in candidates if _root(package).joinpath(*path.parts[1:]).is_file()), None)


def _imported(source: bytes) -> list[str]:
    """Return the modules that a source file imports, anywhere in it.

    For ``from a import b``, both ``a`` and ``a.b`` are returned, because ``b`` may be a module or a name in one.
    """
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{name.name}" for name in node.names)]
    return found


def _flwr(server: FlowerServer, *arguments: str, script: Path | None = None) -> dict[str, object]:
    """Run one ``flwr`` command, or ``script`` in its place, and return its JSON answer."""
    if not accepts(HOST, server.port):
        raise DaemonFailed(f"SuperLink does not answer at {server.address}; to fix: `consilium server up` starts it")
    ours = script and [sys.executable, str(script), *arguments]
    out = _command(ours or [executable("flwr"), *arguments, "--format", "json"], folder=server.client)
    try:
        answer = lenient_json(out[out.index("{") :])
    except ValueError as error:
        raise DaemonFailed(
            f"`flwr {arguments[0]}` did not answer in JSON: {out[:200]!r}; to fix: {_REINSTALL}"
        ) from error
    if not isinstance(answer, dict) or answer.get("success") is False:
        said = answer.get("error-message", answer) if isinstance(answer, dict) else answer
        raise DaemonFailed(f"`flwr {' '.join(arguments[:2])}` failed: {said}; to fix: {_SUPERLINK_LOG}")
    return answer


def _command(command: list[str], *, folder: Path) -> str:
    """Run one command of Flower's client, with its home in ``folder``, and return its standard output."""
    name = " ".join((Path(command[0]).name, command[1]))
    with tempfile.TemporaryFile() as errors:
        try:
            done = subprocess.run(
                command,
                env=flower_env(folder, NO_COLOR="1", COLUMNS="200"),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                timeout=COMMAND_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DaemonFailed(
                f"the command {name} did not end within {COMMAND_TIMEOUT_S:g} s, but SuperLink may still carry it out; "
                f"to fix: repeat the command once this machine is less busy; if that does not help, {_SUPERLINK_LOG}"
            ) from error
        out = done.stdout.decode("utf-8", "replace")
        if done.returncode != 0 and "{" not in out:
            errors.seek(0)
            said = (out + errors.read().decode("utf-8", "replace")).strip()[-800:]
            raise DaemonFailed(
                f"the command {name} ended with status {done.returncode}: {said}; to fix: {_SUPERLINK_LOG}"
            )
    return out


_SUPERLINK_LOG = "see the log of SuperLink, flower/logs/superlink.log"
_REINSTALL = "install Consilium again, with the Flower that it requires"


def _text(row: object, key: str) -> str:
    if not isinstance(row, dict) or key not in row:
        raise DaemonFailed(f"Flower's answer lacks {key!r}; to fix: install Flower 1.41")
    return str(row[key])


def _toml(value: str | int | float | bool) -> str:
    """Return a value in TOML; strings, numbers and booleans are written as in JSON, with DEL escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
    tomllib.loads(f"x = {text}")
    return text
