"""ASGI middleware that refuses requests which two programs could understand differently.

The gateway, the fleet proxy and the dashboard put it in front of their applications. It refuses a Host header that does
not name this server, a path that can be parsed in two ways, and a body whose length is stated twice. The applications
must not use ``request.url``, because Starlette builds it from the Host header, which the sender controls.
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
"""Host names that reach this machine from itself: health checks, or a browser on the server."""

Hosts = Callable[[], Collection[str]]
"""Function that returns a server's host names: lower case, IPv6 addresses in brackets. Every request calls it."""

_HOST = re.compile(rb"([a-z0-9_.-]{1,253}|\[[0-9a-f:.]{2,45}\])(:[0-9]{1,5})?")
_PATH = re.compile(r"/|(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")


class KnownHosts:
    """Middleware that passes on requests with exactly one Host header that names this server, and answers others 421.

    WebSockets are closed.

    Args:
        app: The application that gets the accepted requests.
        hosts: Returns the server's names; the names in :data:`LOOPBACK` are always accepted.
        on_refused: Called with the scope of each refused HTTP request.
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


class SingleContentLength:
    """Middleware that answers 400 to a request which states its body's length twice (RFC 9112, section 6.1).

    With both ``Content-Length`` and ``Transfer-Encoding``, two servers in a row may disagree on where the body ends.
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
    """Middleware that answers 404 unless the path consists of plain segments and there is no query string.

    Percent escapes, segments that begin with a dot and empty segments are refused.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and exact_path(scope) is None:
            await PlainTextResponse("no such path\n", status_code=404)(scope, receive, send)
            return
        await self._app(scope, receive, send)


def exact_path(scope: Scope) -> str | None:
    """Return the path as it came over the wire, or None if it could be read in more than one way."""
    path = sent_path(scope)
    exact = path == scope["path"] and not scope["root_path"] and not scope["query_string"] and _PATH.fullmatch(path)
    return path if exact else None


def sent_path(scope: Scope) -> str:
    """Return the path of a request as it was sent, with its percent escapes.

    Args:
        scope: The request's ASGI scope.

    Returns:
        The path.
    """
    raw: bytes = scope.get("raw_path") or scope["path"].encode()
    return raw.decode("ascii", "replace")


class CertificateHosts:
    """Callable that returns the host names in a certificate (:data:`Hosts`).

    It reads the certificate's file again when the file has changed. While the file cannot be read, for instance during
    a renewal, the names that were read last are returned.
    """

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
            pass  # a renewal is half written: keep the names read before
        return self._names
