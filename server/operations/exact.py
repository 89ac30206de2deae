"""Requests in one spelling: ASGI middleware in front of every application of the server.

A host that the server is not known by, a path that could be read in two ways and a body that says its length in two
are refused before anything looks at them. Nothing behind may use ``request.url``: it is put together from the Host
header, so whoever sends the header says what is in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import InvalidInput
from common.pki import certificate_names

LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]"})
"""Names by which only this machine calls: health checks, a browser beside the server."""

Hosts = Callable[[], Collection[str]]
"""The names a server is called by, in lower case, IPv6 addresses in brackets; asked at every request."""

_HOST = re.compile(rb"([a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
_PATH = re.compile(r"/|(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")


class KnownHosts:
    """Passes requests whose one Host header names this server (421 for others), and no WebSocket.

    ``on_refused`` is told of each of the others.
    """

    def __init__(self, app: ASGIApp, *, hosts: Hosts, on_refused: Callable[[Scope], None] = lambda _: None) -> None:
        self._app, self._hosts, self._on_refused = app, hosts, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and not self._known(scope):
            self._on_refused(scope)
            await PlainTextResponse("unknown host\n", status_code=421)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _known(self, scope: Scope) -> bool:
        given = [value.lower() for name, value in scope["headers"] if name == b"host"]
        found = _HOST.fullmatch(given[0]) if len(given) == 1 else None
        if found is None:
            return False
        name = found[1].decode()
        return name in LOOPBACK or name in self._hosts()


class OneLength:
    """Passes requests that say in one way how long their body is (400 for others): RFC 9112, 6.1.

    With both a length and a coding, the reader behind may end the body elsewhere than the one before it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        said = [name for name, _ in scope.get("headers", ()) if name in (b"content-length", b"transfer-encoding")]
        if scope["type"] == "http" and len(said) > 1:
            refusal = PlainTextResponse("two lengths\n", status_code=400, headers={"connection": "close"})
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)


class ExactPaths:
    """Passes paths of plain segments without a query (404 for others): no escapes, no dots, nothing twice."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and exact_path(scope) is None:
            await PlainTextResponse("no such path\n", status_code=404)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def exact_path(scope: Scope) -> str | None:
    """The path as it came over the wire, if it can be read in one way only."""
    path = sent_path(scope)
    exact = path == scope["path"] and not scope["root_path"] and not scope["query_string"] and _PATH.fullmatch(path)
    return path if exact else None


def sent_path(scope: Scope) -> str:
    """The path as it came over the wire, with whatever escapes are in it."""
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("ascii", "replace")


class CertificateHosts:
    """The names in a certificate, read again when its file changes; :data:`Hosts`."""

    def __init__(self, certificate: Path) -> None:
        self._file = certificate
        self._version = 0
        self._names: frozenset[str] = frozenset()

    def __call__(self) -> frozenset[str]:
        try:
            if (version := self._file.stat().st_mtime_ns) != self._version:
                names = certificate_names(self._file)
                self._names = frozenset(f"[{name}]" if ":" in name else name.lower() for name in names)
                self._version = version
        except (OSError, InvalidInput):
            pass  # half of a new pair of files: the names so far hold
        return self._names
