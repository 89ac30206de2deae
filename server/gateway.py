"""The one port that sites reach: Flower's fleet traffic and the public objects, and nothing else.

TLS ends here. Every request must be signed by a node key the consortium admitted; an unsigned, unknown, late or
repeated one ends with 401 and one word, before any of its body reaches Flower. Of Flower's routes the ten that a
SuperNode needs exist; control, runtime, documentation, registration and health do not. Bodies are bounded. The
certificate and the list of admitted nodes are read again when their files change, so renewing and revoking need no
restart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.errors import InvalidInput, Refused
from common.node_auth import Gatekeeper
from server.objects_app import objects_app

FLEET_ROUTES = (
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
"""What a SuperNode calls. ``register-node`` and ``unregister-node`` are the consortium's alone."""

ACTIVATION_FAILED = 2004
"""Flower's code for a node that is not let in."""

MAX_BODY_BYTES = {"/v1/fleet/push-object": 65 << 20}
DEFAULT_MAX_BODY_BYTES = 1 << 20
UPSTREAM_TIMEOUT_S = 60.0
_PASSED_ON = ("content-type", "accept", "accept-encoding")

log = logging.getLogger(__name__)

Clock = Callable[[], datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFiles:
    """What the gateway reads: the public objects, the list of admitted nodes, certificate and key of the one port."""

    objects: Path
    nodes: Path
    certificate: Path
    key: Path


def gateway_app(
    files: GatewayFiles, *, upstream: httpx.AsyncClient, clock: Clock = lambda: datetime.now(UTC)
) -> Starlette:
    """The ASGI application. ``upstream`` is a client whose base address is SuperLink's."""

    async def fleet(request: Request) -> Response:
        body = await _body(request, limit=MAX_BODY_BYTES.get(request.url.path, DEFAULT_MAX_BODY_BYTES))
        if body is None:
            return _refuse(request, "too-large", status=413)
        kept = {
            name: value for name, value in request.headers.items() if name in _PASSED_ON or name.startswith("flwr-")
        }
        try:
            answer = await upstream.post(request.url.path, content=body, headers=kept)
        except httpx.TransportError as error:
            return _later(type(error).__name__)
        if answer.status_code >= 500:
            return _later(f"status {answer.status_code}")
        return Response(answer.content, answer.status_code, {"content-type": answer.headers.get("content-type", "")})

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        async with upstream:
            yield

    routes = [Route(f"/v1/fleet/{name}", fleet, methods=["POST"]) for name in FLEET_ROUTES]
    application = Starlette(routes=[*routes, Mount("/", objects_app(files.objects))], lifespan=lifespan)
    application.add_middleware(_Signed, gatekeeper=Gatekeeper(files.nodes), clock=clock)
    return application


class _Signed:
    """Passes on what an admitted site signed; nothing of an unsigned request is read but its headers."""

    def __init__(self, app: ASGIApp, *, gatekeeper: Gatekeeper, clock: Clock) -> None:
        self._app, self._gatekeeper, self._clock = app, gatekeeper, clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            request = Request(scope)
            try:
                self._gatekeeper.admit(request.headers, method=request.method, path=request.url.path, now=self._clock())
            except Refused as error:
                await _refuse(request, error.reason, status=401)(scope, receive, send)
                return
            except (InvalidInput, OSError) as error:  # the list of nodes cannot be read now
                await _later(type(error).__name__)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _later(cause: str) -> Response:
    """Asks a SuperNode to try again. Any other 5xx ends its heartbeat for good, and it is offline without knowing."""
    log.warning("event=superlink-away cause=%s", cause)
    return PlainTextResponse("the server is busy or starting\n", status_code=503)


def _refuse(request: Request, reason: str, *, status: int) -> Response:
    """One word for the site. A SuperNode that asks to be let in is told in Flower's terms, which it logs."""
    level = logging.DEBUG if request.url.path == "/" else logging.WARNING  # the containers' health check asks for "/"
    peer = request.client.host if request.client else ""
    log.log(level, "event=refused reason=%s path=%s peer=%s", reason, request.url.path[:80], peer)
    if request.url.path == "/v1/fleet/activate-node":
        told = {"code": ACTIVATION_FAILED, "detail": f"refused: {reason}"}
        return Response(json.dumps(told), 412, media_type="application/json")
    return PlainTextResponse(f"{reason}\n", status_code=status)


async def _body(request: Request, *, limit: int) -> bytes | None:
    """The request's body, or None as soon as it is longer than ``limit`` bytes."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        return None
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return b"".join(parts)


async def serve(files: GatewayFiles, *, bind: str, port: int, superlink: str, superlink_ca: Path) -> None:
    """Serve until SIGTERM or SIGINT. A new certificate is taken up within a second, without closing a connection."""
    trust = ssl.create_default_context(cafile=str(superlink_ca))
    upstream = httpx.AsyncClient(
        base_url=f"https://{superlink}", verify=trust, timeout=UPSTREAM_TIMEOUT_S, trust_env=False
    )
    config = uvicorn.Config(
        gateway_app(files, upstream=upstream),
        host=bind,
        port=port,
        ssl_certfile=str(files.certificate),
        ssl_keyfile=str(files.key),
        log_level="warning",
        server_header=False,
        limit_concurrency=512,
        timeout_graceful_shutdown=5,
    )
    config.load()
    assert config.ssl is not None
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
    renewing = asyncio.create_task(_keep_certificate(config.ssl, files))
    try:
        await uvicorn.Server(config).serve()
    finally:
        renewing.cancel()


async def _keep_certificate(context: ssl.SSLContext, files: GatewayFiles) -> None:
    """New handshakes use what is on disk; a broken pair of files is reported and the old one kept."""
    known = files.certificate.stat().st_mtime_ns
    while True:
        await asyncio.sleep(1.0)
        with contextlib.suppress(OSError):
            if (version := files.certificate.stat().st_mtime_ns) != known:
                known = version
                try:
                    context.load_cert_chain(files.certificate, files.key)
                    log.info("event=certificate-renewed")
                except ssl.SSLError:
                    log.exception("event=certificate-unusable")


def main() -> None:
    """``python -m server.gateway``: serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="The one port that sites reach")
    for name in ("--objects", "--nodes", "--certificate", "--key", "--superlink-ca"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--superlink", required=True, help="host:port")
    given = parser.parse_args()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    files = GatewayFiles(objects=given.objects, nodes=given.nodes, certificate=given.certificate, key=given.key)
    asyncio.run(
        serve(files, bind=given.bind, port=given.port, superlink=given.superlink, superlink_ca=given.superlink_ca)
    )


if __name__ == "__main__":
    main()
