"""Health checks of the containers, with the standard library alone so that they cost little.

``health.py server``: SuperLink and the gateway answer over TLS, verified by the consortium's own authority.
``health.py site``: the teacher worker takes a connection and the SuperNode beside it answers.
Exit status 0: healthy; 1: not, with one line that says why.
"""

from __future__ import annotations

import glob
import json
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

TIMEOUT_S = 5.0
STUDY = Path("/study")
WORKER_SOCKETS = "/tmp/consilium-*/worker.sock"


def check_server(study: Path = STUDY) -> None:
    """SuperLink answers, and the gateway turns this unsigned request away, each under its own name."""
    endpoint = json.loads((study / "endpoint.json").read_text(encoding="utf-8"))
    context = ssl.create_default_context(cafile=str(study / "tls" / "ca.crt"))
    _get(f"https://{endpoint['internal_host']}:{endpoint['internal_port']}/health", context)
    _get(f"https://{endpoint['host']}:{endpoint['port']}/", context, expected=401)


def check_site(pattern: str = WORKER_SOCKETS, processes: Path = Path("/proc")) -> None:
    """The worker's Unix socket and the SuperNode's own port."""
    sockets = glob.glob(pattern)
    if not sockets:
        raise OSError("the worker has no socket yet")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(TIMEOUT_S)
        client.connect(max(sockets, key=lambda path: Path(path).stat().st_mtime))
    _get(f"http://127.0.0.1:{supernode_port(processes)}/health", None)


def supernode_port(processes: Path = Path("/proc")) -> int:
    """The port on the SuperNode's command line; it is chosen anew at every start."""
    for path in processes.glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode("utf-8", "replace").split("\0")
        except OSError:  # the process ended meanwhile
            continue
        if any(Path(word).name == "flower-supernode" for word in words[:3]) and "--port" in words:
            return int(words[words.index("--port") + 1])
    raise OSError("no SuperNode is running")


def _get(url: str, context: ssl.SSLContext | None, *, expected: int = 200) -> None:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
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
    checks: dict[str, Callable[[], None]] = {"server": check_server, "site": check_site}
    if len(arguments) != 1 or arguments[0] not in checks:
        print("usage: health.py server|site", file=sys.stderr)
        return 2
    try:
        checks[arguments[0]]()
    except (OSError, ValueError, KeyError) as error:
        print(f"unhealthy: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
