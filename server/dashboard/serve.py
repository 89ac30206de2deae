"""The dashboard's own HTTP server, in the foreground until SIGINT or SIGTERM."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import uvicorn

from server.dashboard.app import Options, create_app

SHUTDOWN_S = 2


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen; with TLS if a certificate and key are given; ``proxy`` is whose forwarded headers count."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    proxy: str | None = None


def serve(options: Options, listen: Listen) -> None:
    """Serve one study's dashboard; open event streams are cut after :data:`SHUTDOWN_S` seconds."""
    uvicorn.run(
        create_app(options),
        host=listen.host,
        port=listen.port,
        ssl_certfile=None if listen.certificate is None else str(listen.certificate),
        ssl_keyfile=None if listen.key is None else str(listen.key),
        proxy_headers=listen.proxy is not None,
        forwarded_allow_ips=listen.proxy,
        server_header=False,
        access_log=False,
        log_level="warning",
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
