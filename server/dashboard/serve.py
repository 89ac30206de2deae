"""Runs the dashboard's HTTP server in the foreground, until SIGINT or SIGTERM.

`consilium dashboard serve` calls it. It refuses half a certificate, passwords over an unencrypted network, and a proxy
without host names.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from common.errors import InvalidInput
from server.dashboard.app import Options, create_app
from server.dashboard.oidc import Settings
from server.dashboard.service import Certifier
from server.operations.exact import CertificateHosts

SHUTDOWN_S = 2
HEAD_S = 15.0
"""Time in which a connection must send a request's head; at most twice as long passes before it is closed."""


class Connection(H11Protocol):
    """A connection that is closed if no complete request head arrives within :data:`HEAD_S`.

    Its parser accepts at most 64 KiB of a request's head; uvicorn's other parser has no limit.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch = self.loop.call_later(HEAD_S, self._look, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch.cancel()
        super().connection_lost(exc)

    def _look(self, before: object) -> None:
        if (self.cycle is None or self.cycle.response_complete) and self.cycle is before:
            self.transport.close()
        else:
            self._watch = self.loop.call_later(HEAD_S, self._look, self.cycle)


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the dashboard listens.

    Attributes:
        host: Address.
        port: Port.
        certificate: TLS certificate; without it there is no TLS.
        key: Its private key.
        proxy: Address of a TLS proxy whose forwarded headers are trusted.
    """

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    proxy: str | None = None

    @property
    def url(self) -> str:
        """Address of the first page, for a user at this machine."""
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{'localhost' if is_loopback(self.host) else self.host}:{self.port}/"


def options_for(
    listen: Listen,
    *,
    study: Path,
    state: Path,
    session_hours: float,
    metrics_token: str | None,
    certifier: Certifier | None,
    hosts: str,
    webhook: str | None,
    oidc: Settings | None = None,
    log_to: Sequence[str] = (),
) -> Options:
    """Return the options of a dashboard that listens there.

    Args:
        listen: Where it listens.
        study: The study's directory.
        state: The dashboard's own directory.
        session_hours: How long a session lasts.
        metrics_token: Token that opens ``/metrics``.
        certifier: Returns the command that writes a certificate.
        hosts: Host names by which browsers call it, separated by commas.
        webhook: Address that is told of alarms.
        oidc: The OpenID Connect provider, if any.
        log_to: Targets of the security log.

    Raises:
        InvalidInput: For half a certificate, for passwords that would cross a network unencrypted, and for a proxy
            without a host name.
    """
    if (listen.certificate is None) != (listen.key is None):
        raise InvalidInput("--certificate and --key", limit="both, or neither")
    secure = listen.certificate is not None or listen.proxy is not None
    if not secure and not is_loopback(listen.host):
        raise InvalidInput(
            "--bind",
            value=listen.host,
            limit="a loopback address without TLS: passwords would cross the network in the clear",
            remedy="give --certificate and --key, or --behind-proxy with the address of a TLS proxy",
        )
    if listen.proxy is not None and not hosts and listen.certificate is None:
        raise InvalidInput(
            "--hosts is missing", remedy="name the host by which browsers reach the proxy, as in their address bar"
        )
    given = frozenset(name.strip().lower() for name in (*hosts.split(","), listen.host) if name.strip())
    named = CertificateHosts(listen.certificate) if listen.certificate is not None else frozenset
    return Options(
        study=study,
        state=state,
        secure=secure,
        session_hours=session_hours,
        metrics_token=metrics_token,
        certifier=certifier,
        webhook=webhook,
        oidc=oidc,
        log_to=tuple(log_to),
        hosts=lambda: given | named(),
    )


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("192.0.2.1")
    (True, False)
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def serve(options: Options, listen: Listen) -> None:
    """Serve one study's dashboard; open event streams are cut :data:`SHUTDOWN_S` seconds after the signal.

    Args:
        options: How it is run.
        listen: Where it listens.
    """
    uvicorn.run(
        create_app(options),
        host=listen.host,
        port=listen.port,
        http=Connection,
        ws="none",
        ssl_certfile=None if listen.certificate is None else str(listen.certificate),
        ssl_keyfile=None if listen.key is None else str(listen.key),
        proxy_headers=listen.proxy is not None,
        forwarded_allow_ips=listen.proxy,
        server_header=False,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
