"""Serves, on a Unix socket, a proxy for the ten SuperLink routes that a SuperNode needs.

SuperLink answers sites, operators and ServerApps on one port. It therefore listens on loopback, where neither the
gateway's container nor a network reaches it. The gateway reaches only this proxy. The proxy passes on the routes in
:data:`ROUTES`, each by its exact path (``server.operations.exact``). It refuses every other path, and a body over the
limit of its route.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from common.plain import log_to_stderr
from common.sockets import listen
from server.operations.exact import ExactPaths, SingleContentLength

ROUTES = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
"""The routes that a SuperNode calls. ``register-node`` and ``unregister-node`` are missing: only operators use them."""

PATHS = tuple(f"/v1/fleet/{name}" for name in ROUTES)
MAX_BODY_BYTES = {"/v1/fleet/push-object": 65 << 20, "/v1/fleet/push-messages": 64 << 10}
"""By route, the limit of a body in bytes, if it differs from the default. ``push-messages`` carries no content: only a
message's metadata and the names of its objects, or an error's text.
"""
DEFAULT_MAX_BODY_BYTES = 1 << 20
UPSTREAM_TIMEOUT_S = 60.0
UPSTREAM_CONNECTIONS = 512
_PASSED_ON = ("content-type", "accept")
_PASSED_BACK = (b"content-type", b"content-length")

log = logging.getLogger(__name__)


class TooLarge(Exception):
    """A body is longer than its route's limit."""


def max_body(path: str) -> int:
    """Return the largest body, in bytes, that a route accepts.

    Args:
        path: The route, for instance ``/v1/fleet/push-object``.

    Returns:
        The limit in bytes.

    >>> max_body("/v1/fleet/push-messages")
    65536
    """
    return MAX_BODY_BYTES.get(path, DEFAULT_MAX_BODY_BYTES)


async def ask(upstream: httpx.AsyncClient, request: Request, path: str, body: AsyncGenerator[bytes]) -> httpx.Response:
    """Pass a request on to SuperLink as its body arrives.

    Args:
        upstream: Client whose base address is SuperLink's, or a fleet proxy's.
        request: The request; only its ``flwr-`` headers, content type and accepted types are passed on.
        path: The route.
        body: Generator of the body's parts. This function closes it at the end.

    Returns:
        The answer, whose body is not read yet. The caller must close the answer.

    Raises:
        TooLarge: If the stated length exceeds the route's limit.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced[:20]) > max_body(path):
        raise TooLarge
    kept = {name: value for name, value in request.headers.items() if name in _PASSED_ON or name.startswith("flwr-")}
    kept["accept-encoding"] = "identity"
    if announced.isdigit():
        kept["content-length"] = announced
    async with contextlib.aclosing(body):
        return await upstream.send(upstream.build_request("POST", path, content=body, headers=kept), stream=True)


async def answer(found: httpx.Response, send: Send) -> None:
    """Pass an answer back to the client as its body arrives.

    Args:
        found: SuperLink's answer; of its headers only content type and length are kept.
        send: The ASGI channel to the client.
    """
    kept = [(name, value) for name, value in found.headers.raw if name.lower() in _PASSED_BACK]
    await send({"type": "http.response.start", "status": found.status_code, "headers": kept})
    async for part in found.aiter_bytes():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def fleet_app(upstream: httpx.AsyncClient) -> Starlette:
    """Return the proxy's ASGI application.

    Args:
        upstream: A client whose base address is SuperLink's; it is closed when the application ends.

    Returns:
        The application.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with upstream:
            yield

    routes = [Route(path, _Passage(upstream, path), methods=["POST"]) for path in PATHS]
    return Starlette(
        routes=routes, lifespan=lifespan, middleware=[Middleware(SingleContentLength), Middleware(ExactPaths)]
    )


class _Passage:
    """One proxied route."""

    def __init__(self, upstream: httpx.AsyncClient, path: str) -> None:
        self._upstream, self._path = upstream, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            found = await ask(self._upstream, request, self._path, _bounded(request, max_body(self._path)))
        except ClientDisconnect:
            return
        except TooLarge:
            await PlainTextResponse("too-large\n", status_code=413)(scope, receive, send)
            return
        except httpx.TransportError as error:
            log.warning("event=superlink-away cause=%s", type(error).__name__)
            await PlainTextResponse("the server is busy or starting\n", status_code=503)(scope, receive, send)
            return
        try:
            await answer(found, send)
        finally:
            await found.aclose()


async def _bounded(request: Request, limit: int) -> AsyncGenerator[bytes]:
    """Yield the body's parts; raise TooLarge once they exceed ``limit`` bytes."""
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise TooLarge
        if part:
            yield part


async def serve(path: Path, *, superlink: str, superlink_ca: Path) -> None:
    """Serve on the Unix socket ``path`` until SIGTERM or SIGINT.

    Args:
        path: The socket.
        superlink: ``host:port`` of SuperLink.
        superlink_ca: Certificate of the authority that signed SuperLink's certificate.
    """
    upstream = httpx.AsyncClient(
        base_url=f"https://{superlink}",
        verify=ssl.create_default_context(cafile=str(superlink_ca)),
        timeout=UPSTREAM_TIMEOUT_S,
        trust_env=False,
        limits=httpx.Limits(max_connections=UPSTREAM_CONNECTIONS, max_keepalive_connections=32),
    )
    config = uvicorn.Config(
        fleet_app(upstream),
        log_level="warning",
        server_header=False,
        http="h11",
        ws="none",
        timeout_graceful_shutdown=5,
    )
    with contextlib.closing(listen(path)) as listener:
        await uvicorn.Server(config).serve(sockets=[listener])


def main() -> None:
    """Run the proxy until SIGTERM or SIGINT: ``python -m server.operations.fleet``."""
    parser = argparse.ArgumentParser(description="SuperLink's fleet routes on a Unix socket")
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--superlink", required=True, help="host:port")
    parser.add_argument("--superlink-ca", type=Path, required=True)
    given = parser.parse_args()
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again after it has ended
        asyncio.run(serve(given.socket, superlink=given.superlink, superlink_ca=given.superlink_ca))


if __name__ == "__main__":
    main()
