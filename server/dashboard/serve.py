"""Runs the dashboard's HTTP server in the foreground, until SIGINT or SIGTERM.

`consilium dashboard` calls it. It refuses a certificate without its key (or a key without its certificate), passwords
over an unencrypted network, and a proxy without host names.
"""

from __future__ import annotations

import asyncio
import ipaddress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import InvalidInput
from server.dashboard.app import Options, create_app
from server.operations.exact import CertificateHosts
from server.operations.listener import addresses

SHUTDOWN_S = 2
HEAD_S = 15.0
"""Interval in seconds at which a connection is checked for a request's head.

A connection that sends no complete head is closed after one to two such intervals.
"""


class Connection(H11Protocol):
    """uvicorn's h11 connection, which is closed if no complete request head arrives in time (:data:`HEAD_S`).

    The h11 parser accepts request heads of at most 64 KiB; uvicorn's other parser has no limit.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to watch for request heads.

        Args:
            transport: The connection's transport.
        """
        super().connection_made(transport)
        self._watch = self.loop.call_later(HEAD_S, self._look, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the watch.

        Args:
            exc: The error that ended the connection; None if it was closed.
        """
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self, before: object) -> None:
        if (self.cycle is None or self.cycle.response_complete) and self.cycle is before:
            self.transport.close()
        else:
            self._watch = self.loop.call_later(HEAD_S, self._look, self.cycle)


@dataclass(frozen=True, slots=True)
class Listen:
    """The address at which the dashboard listens.

    Attributes:
        host: IP address or host name at which it listens.
        port: TCP port at which it listens.
        certificate: File of the TLS certificate; None for no TLS.
        key: File of its private key.
        proxy: Address of a TLS proxy whose ``X-Forwarded-*`` headers are trusted.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    proxy: str | None = None

    @property
    def url(self) -> str:
        """URL of the Overview page, for a user at this machine."""
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{'localhost' if is_loopback(self.host) else self.host}:{self.port}/"


def options_for(listen: Listen, options: Options, *, hosts: str) -> Options:
    """Return the settings of a dashboard at an address, after checking that the address is safe for passwords.

    Args:
        listen: The address at which it listens.
        options: The settings that do not depend on the address.
        hosts: Host names in the URLs by which browsers reach it, separated by commas.

    Returns:
        The settings, with ``secure`` and ``hosts``.

    Raises:
        InvalidInput: If only one of certificate and key is given, if passwords would cross a network unencrypted, or if
            a proxy has no host name.
    """
    if (listen.certificate is None) != (listen.key is None):
        raise InvalidInput("one of --certificate and --key without the other", limit="both options, or neither")
    secure = listen.certificate is not None or listen.proxy is not None
    if not secure and not is_loopback(listen.host):
        raise InvalidInput(
            "--bind",
            value=listen.host,
            limit="a loopback address, because without TLS passwords would cross the network unencrypted",
            remedy="give --certificate and --key, or --behind-proxy with the address of a TLS proxy",
        )
    if listen.proxy is not None and not hosts and listen.certificate is None:
        raise InvalidInput(
            "--hosts is missing", remedy="name the host by which browsers reach the proxy, as in their address bar"
        )
    given = frozenset(name.strip().lower() for name in (*hosts.split(","), listen.host) if name.strip())
    named = CertificateHosts(listen.certificate) if listen.certificate is not None else frozenset
    return replace(options, secure=secure, hosts=lambda: given | named())


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address.

    Args:
        address: IP address or host name.

    Returns:
        True for a loopback address and for ``localhost``.

    >>> is_loopback("127.0.0.1"), is_loopback("192.0.2.1")
    (True, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def serve(options: Options, listen: Listen) -> None:
    """Serve a dashboard until SIGINT or SIGTERM; open event streams end :data:`SHUTDOWN_S` seconds after the signal.

    Args:
        options: The dashboard's settings.
        listen: The address at which it listens.
    """
    run_app(
        create_app(options),
        host=addresses(listen.host),  # type: ignore[arg-type]  # asyncio takes several
        port=listen.port,
        ssl_certfile=None if listen.certificate is None else str(listen.certificate),
        ssl_keyfile=None if listen.key is None else str(listen.key),
        proxy_headers=listen.proxy is not None,
        forwarded_allow_ips=listen.proxy,
    )


def run_app(app: FastAPI, *, host: str, port: int, **more: Any) -> None:
    """Serve an application until SIGINT or SIGTERM, by :class:`Connection`; name neither the software nor requests.

    Args:
        app: The application.
        host: The address.
        port: The port.
        more: Further settings of uvicorn.
    """
    uvicorn.run(
        app,
        host=host,
        port=port,
        http=Connection,
        ws="none",
        server_header=False,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_S,
        **more,
    )
