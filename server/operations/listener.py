"""Runs the HTTP server of the public port, with limits on the number and duration of clients' connections.

The gateway runs it. TLS handshakes, request heads and answers have deadlines. A connection is a *stranger's* until an
admitted site signs a request on it. At most :data:`MAX_STRANGERS` such connections may be open. A further one closes
the oldest, so that idle strangers cannot keep an admitted site out. An admitted site has at most :data:`MAX_PER_SITE`
connections. The server builds on uvicorn's h11 protocol, which refuses ambiguous requests.
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
from common.plain import OncePerSecond

HANDSHAKE_S = 5.0
"""Seconds allowed for the TLS handshake, and for closing TLS."""

HEAD_S = 10.0
"""Seconds allowed for the head of a request, from the connection or from the last answer on."""

STALLED_S = 30.0
"""A connection is closed if its client reads nothing of an answer for this many seconds."""

MAX_STRANGERS = 512
"""Largest number of open connections on which no admitted site has signed a request yet."""

MAX_PER_SITE = 32
"""Largest number of open connections of one admitted site."""
OPEN_FILES = 4096
"""Largest number of all connections together, including unfinished handshakes; others wait in the kernel's queue."""

TLS_BUFFER_BYTES = 32 << 10
"""TLS buffer per connection. With asyncio's default, each connection would take 256 KiB before it sends anything."""


class Connections:
    """The open connections: those of strangers, in the order in which they were opened, and those of each site."""

    def __init__(self) -> None:
        self._strangers: dict[GuardedProtocol, None] = {}
        self._sites: dict[str, dict[GuardedProtocol, None]] = {}

    def opened(self, connection: GuardedProtocol) -> None:
        """Count a new connection as a stranger's. If there are too many of these, close the oldest one.

        Args:
            connection: The connection.
        """
        self._strangers[connection] = None
        _bound(self._strangers, MAX_STRANGERS)

    def admitted(self, connection: GuardedProtocol, site: str) -> None:
        """Move ``connection`` from the strangers to ``site``, which has signed a request on it.

        Args:
            connection: The connection; one that already belongs to a site is left there.
            site: Name of the admitted site. Its oldest connection is closed if it has too many.
        """
        if connection in self._strangers:
            del self._strangers[connection]
            connection.site = site
            own = self._sites.setdefault(site, {})
            own[connection] = None
            _bound(own, MAX_PER_SITE)

    def closed(self, connection: GuardedProtocol) -> None:
        """Remove a connection that has ended.

        Args:
            connection: The connection.
        """
        self._strangers.pop(connection, None)
        self._sites.get(connection.site, {}).pop(connection, None)


def _bound(connections: dict[GuardedProtocol, None], most: int) -> None:
    """Close the oldest connection if there are more than ``most``."""
    if len(connections) > most:
        oldest = next(iter(connections))
        del connections[oldest]
        oldest.abort()


class GuardedProtocol(H11Protocol):
    """One connection with deadlines; applications find it at ``scope["state"]["connection"]`` of a request.

    Args:
        connections: The counts of open connections.
    """

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app_state = {**self.app_state, "connection": self}
        self.site = ""
        self._open = connections
        self._deadline: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def admitted(self, site: str) -> None:
        """Count this connection as a site's, after the gateway verified a request that the site signed.

        Args:
            site: Name of the site.
        """
        self._open.admitted(self, site)

    def abort(self) -> None:
        """Close the connection at once, even during a request or an answer."""
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count the connection, and start the deadline for a request's head.

        Args:
            transport: The connection's transport.
        """
        super().connection_made(transport)
        self._open.opened(self)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection from the counts, and stop its timers.

        Args:
            exc: The error that ended the connection; None if it was closed.
        """
        self._open.closed(self)
        for timer in (self._deadline, self._stalled):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and self._deadline is not None:  # a request's head has arrived
            self._deadline.cancel()
            self._deadline = None

    def on_response_complete(self) -> None:
        self._expect_head()  # also bounds how long an unread rest of a body may take
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
        """Close the connection unless the head of its next request arrives within :data:`HEAD_S`."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(HEAD_S, self.abort)


class Listener(uvicorn.Server):
    """uvicorn's server, with :class:`GuardedProtocol` for each connection.

    Raises:
        DaemonFailed: From ``startup``, if the port cannot be bound.
    """

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        uvicorns = logging.getLogger("uvicorn.error")  # it logs a line for every malformed request
        if not any(isinstance(one, OncePerSecond) for one in uvicorns.filters):
            uvicorns.addFilter(OncePerSecond())

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
                host=addresses(str(config.host)),
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


def addresses(bind: str) -> list[str]:
    """Return the addresses to listen on.

    An operator who chooses ``::`` means all addresses, IPv4 included, but asyncio makes every IPv6 socket refuse IPv4.

    Args:
        bind: The address that the operator chose.

    Returns:
        The IPv4 and the IPv6 wildcard for ``::``; otherwise only the chosen address.

    >>> addresses("::"), addresses("0.0.0.0")
    (['0.0.0.0', '::'], ['0.0.0.0'])
    """
    return ["0.0.0.0", "::"] if bind == "::" else [bind]


def cannot_listen(error: OSError, host: str, port: int, *, option: str = "--port") -> str:
    """Explain why a port could not be bound, with the remedy.

    Args:
        error: The error of binding.
        host: Address to listen on.
        port: Port to listen on.
        option: The option of `consilium provision server` that chooses this port.

    Returns:
        One line for the operator.
    """
    match error.errno:
        case errno.EADDRINUSE:
            why, remedy = (
                "another program has it",
                f"end that program, or choose another port: `consilium provision server` with {option}",
            )
        case errno.EACCES:
            why, remedy = (
                "this user may not use a port below 1024",
                "choose a port above 1023 and forward the other to it, or give the process CAP_NET_BIND_SERVICE",
            )
        case errno.EADDRNOTAVAIL:
            why, remedy = "the address is not this machine's", "give --bind an address of this machine"
        case _:
            why, remedy = str(error.strerror or error), "check the address and the port"
    return f"cannot listen on {host}:{port}: {why}; to fix: {remedy}"


def bound_resources() -> None:
    """Limit the number of open files of this process, and the TLS memory of each connection."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    sslproto.SSLProtocol.max_size = TLS_BUFFER_BYTES
