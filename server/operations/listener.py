"""The HTTP server of the one port: what a stranger may hold open, and for how long.

TLS handshakes, request heads and answers have deadlines. Connections on which nobody has signed anything yet are at
most :data:`MAX_STRANGERS`: one more closes the oldest of them, so that a crowd of idle ones keeps no admitted site out.
An admitted site has at most :data:`MAX_PER_SITE`. Built on uvicorn's h11 protocol, which reads no request in two ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
from asyncio import sslproto
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import DaemonFailed
from common.plain import OnceASecond

HANDSHAKE_S = 5.0
"""For the TLS handshake, and for its end."""

HEAD_S = 10.0
"""From connecting, or from the last answer, to the end of a request's head."""

STALLED_S = 30.0
"""How long an answer may wait for a reader who reads nothing."""

MAX_STRANGERS = 512
MAX_PER_SITE = 32
OPEN_FILES = 4096
"""All connections together, unfinished handshakes among them; more wait in the kernel's queue."""

TLS_BUFFER_BYTES = 32 << 10
"""Per connection; asyncio's own 256 KiB would be taken by every stranger before it says a word."""


class Connections:
    """The open connections: strangers in the order they came, and those of each admitted site."""

    def __init__(self) -> None:
        self._strangers: dict[GuardedProtocol, None] = {}
        self._sites: dict[str, dict[GuardedProtocol, None]] = {}

    def opened(self, connection: GuardedProtocol) -> None:
        self._strangers[connection] = None
        _bound(self._strangers, MAX_STRANGERS)

    def admitted(self, connection: GuardedProtocol, site: str) -> None:
        """A request on ``connection`` was signed by ``site``."""
        if connection in self._strangers:
            del self._strangers[connection]
            connection.site = site
            own = self._sites.setdefault(site, {})
            own[connection] = None
            _bound(own, MAX_PER_SITE)

    def closed(self, connection: GuardedProtocol) -> None:
        self._strangers.pop(connection, None)
        self._sites.get(connection.site, {}).pop(connection, None)


def _bound(connections: dict[GuardedProtocol, None], most: int) -> None:
    if len(connections) > most:
        oldest = next(iter(connections))
        del connections[oldest]
        oldest.abort()


class GuardedProtocol(H11Protocol):
    """One connection. A request finds it as ``scope["state"]["connection"]``."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}
        self.site = ""
        self._open = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def admitted(self, site: str) -> None:
        """Called by the application once ``site`` has signed a request."""
        self._open.admitted(self, site)

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._open.opened(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.closed(self)
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self._deadline is not None:  # a request's head is here
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        self._expect_head()  # also ends what is left of a body that nobody reads
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled = self._stalled or self.loop.call_later(STALLED_S, self.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _expect_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(HEAD_S, self.abort)


class Listener(uvicorn.Server):
    """uvicorn's server over guarded connections. DaemonFailed where its port is taken."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        uvicorns = logging.getLogger("uvicorn.error")  # a line a request that is none, whoever sends it
        if not any(isinstance(one, OnceASecond) for one in uvicorns.filters):
            uvicorns.addFilter(OnceASecond())

    async def startup(self, sockets: object = None) -> None:
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            self.should_exit = True
            return
        bound_resources()
        config, connections = self.config, Connections()

        def protocol() -> asyncio.Protocol:
            return GuardedProtocol(
                config=config, server_state=self.server_state, app_state=self.lifespan.state, connections=connections
            )

        handshake_s = HANDSHAKE_S if config.ssl else None
        try:
            server = await asyncio.get_running_loop().create_server(
                protocol,
                host=str(config.host),
                port=config.port,
                ssl=config.ssl,
                backlog=config.backlog,
                ssl_handshake_timeout=handshake_s,
                ssl_shutdown_timeout=handshake_s,
            )
        except OSError as error:
            await self.lifespan.shutdown()
            raise DaemonFailed(cannot_listen(error, str(config.host), config.port)) from error
        self.servers = [server]
        self.started = True


def cannot_listen(error: OSError, host: str, port: int, *, option: str = "--port") -> str:
    """Why a port could not be bound, and the remedy; ``option`` of `consilium provision server` chooses the port."""
    match error.errno:
        case errno.EADDRINUSE:
            why, remedy = (
                "another program has it",
                f"end that program, or choose another port: `consilium provision server` with {option}",
            )
        case errno.EACCES:
            why, remedy = "this user may not", "choose a port above 1023 and forward to it, or CAP_NET_BIND_SERVICE"
        case errno.EADDRNOTAVAIL:
            why, remedy = "the address is not this machine's", "give --bind an address of this machine"
        case _:
            why, remedy = str(error.strerror or error), "see the address and the port"
    return f"cannot listen on {host}:{port}: {why}; to fix: {remedy}"


def bound_resources() -> None:
    """Bound what connections may take of this process: files, and memory for each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
