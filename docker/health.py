"""Health checks of the containers, with the standard library alone so that they cost little.

``health.py server``: the core answers at its socket.
``health.py superlink``: SuperLink answers over TLS, verified by the consortium's own authority, and so does its socket.
``health.py gateway``: the gateway turns this unsigned request away.
``health.py dashboard``: the dashboard answers.
``health.py worker``: the teacher worker takes a connection.
``health.py node``: the SuperNode answers, and the server has let it in.
Exit status 0: healthy; 1: not, with one line that says why.
"""

from __future__ import annotations

import json
import os
import socket
import ssl
import struct
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 5.0
STUDY = Path("/study", os.environ.get("STUDY", "."))
NODE = Path("/site/node")
WORKER = Path("/site", os.environ.get("SITE_STUDY", "."), "node")


def check_server(study: Path = STUDY) -> None:
    """Raise OSError unless the core answers an empty frame PING by DONE (server/aggregation/relay.py)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(str(study / "relay" / "core.sock"))
        client.sendall(struct.pack(">BQI", 11, 0, 0))
        if client.recv(1) != bytes([9]):
            raise OSError("the core does not answer")


def check_superlink(study: Path = STUDY) -> None:
    """Check SuperLink on loopback, and the socket by which the gateway reaches its fleet routes."""
    endpoint = json.loads((study / "flower" / "endpoint.json").read_text(encoding="utf-8"))
    context = ssl.create_default_context(cafile=str(study / "flower" / "ca.crt"))
    _get(f"https://127.0.0.1:{endpoint['internal_port']}/health", context)
    _connect(study / "gateway" / "run" / "fleet.sock")


def check_gateway(url: str = "https://127.0.0.1:8443/") -> None:
    """Check that the gateway asks for a signature. Its name is not checked here: the address is its own container's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _get(url, context, expected=401)


def check_dashboard(url: str = "https://127.0.0.1:8050/login") -> None:
    """Check that the dashboard shows its sign-in page, to which "/" would redirect.

    Its name is not checked here: the address is its own container's.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _get(url, context)


def check_worker(node: Path = WORKER) -> None:
    """Check that the worker accepts connections at its Unix socket."""
    _connect(node / "run" / "worker.sock")


def check_node(node: Path = NODE, processes: Path = Path("/proc")) -> None:
    """Check the SuperNode's own port, and its supervisor's last record about it."""
    _get(f"http://127.0.0.1:{supernode_port(processes)}/health", None)
    facts = (json.loads(line) for line in (node / "logs" / "daemons.jsonl").read_text(encoding="utf-8").splitlines())
    last = [fact["event"] for fact in facts if str(fact.get("daemon", "")).startswith("supernode")][-1:]
    if last != ["daemon-ready"]:
        raise OSError("the server has not let the SuperNode in; see logs/supernode.log")


def supernode_port(processes: Path = Path("/proc")) -> int:
    """Return the port on the SuperNode's command line; it is chosen anew at every start."""
    for path in processes.glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:  # the process ended meanwhile
            continue
        if "client.operations.supernode" in words[:5] and "--port" in words:
            return int(words[words.index("--port") + 1])
    raise OSError("no SuperNode is running")


def _connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(str(path))


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirects, so a program that answers in place of a daemon cannot send the check elsewhere."""

    def redirect_request(self, *_: object) -> None:
        return None


def _get(url: str, context: ssl.SSLContext | None, *, expected: int = 200) -> None:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({}), _NoRedirect()]
    if context is not None:
        handlers.append(urllib.request.HTTPSHandler(context=context))
    try:
        with urllib.request.build_opener(*handlers).open(url, timeout=TIMEOUT_S) as answer:
            status = answer.status
    except urllib.error.HTTPError as error:
        status = error.code
    if status != expected:
        raise OSError(f"{url} answered {status}")


def main(arguments: list[str]) -> int:
    """Run the check that is named."""
    checks: dict[str, Callable[[], None]] = {
        "server": check_server,
        "superlink": check_superlink,
        "gateway": check_gateway,
        "dashboard": check_dashboard,
        "worker": check_worker,
        "node": check_node,
    }
    if len(arguments) != 1 or arguments[0] not in checks:
        print(f"usage: health.py {'|'.join(checks)}", file=sys.stderr)
        return 2
    try:
        checks[arguments[0]]()
    except (OSError, ValueError, KeyError) as error:
        print(f"unhealthy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
