"""Runs servers in threads of the test's own process."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import uvicorn

from tests.waiting import until


def http_server(handler: type[BaseHTTPRequestHandler], port: int = 0) -> ThreadingHTTPServer:
    """Return a server on loopback that does not serve yet. It writes no log, and a client that hangs up is no error."""
    quiet = type(handler.__name__, (handler,), {"log_message": lambda *_: None})
    server = ThreadingHTTPServer(("127.0.0.1", port), quiet)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    return server


@contextmanager
def serving(server: ThreadingHTTPServer, *, tls: ssl.SSLContext | None = None) -> Iterator[ThreadingHTTPServer]:
    """Serve in a thread until the block ends."""
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving_app(config: uvicorn.Config) -> Iterator[uvicorn.Server]:
    """Run an application in a thread until the block ends; the block begins after it has started."""
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()

    def started() -> bool:
        assert thread.is_alive()
        return server.started

    until(started, pause_s=0.01)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(600)


def tls_of(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return the TLS settings of a server with this certificate and key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
