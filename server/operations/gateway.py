"""Serves the one port that sites reach: Flower's fleet traffic and the public objects, and nothing else.

``supervisor.gateway_daemon`` starts it. A request passes these steps in order; the code repeats their numbers:

1. The gateway ends TLS, and limits the number of connections (``listener``).
2. The request must name this server (``exact``) and be signed by a node key that the consortium admitted. An unsigned,
   unknown, late or repeated request is answered 401 with one word, before any of its body is read.
3. The route must be one of the ten that a SuperNode needs (``fleet``), or a public object (``objects_app``). Control,
   runtime, documentation, registration and health cannot be reached from here.
4. A message that a site pushes must be a reply of its own node, and have the one allowed structure (``sender``).
5. The site's requests in progress must be within its limits (``shares``). Objects and answers are passed on as they
   arrive.

The certificate and the list of admitted nodes are read again when their files change, so renewing and revoking need no
restart. Several studies may share the port (``one_port``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import ssl
import sys
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from common.clock import Clock
from common.errors import SAME_VERSION, DaemonFailed, InvalidInput, Refused
from common.node_auth import RequestAdmission
from common.plain import log_to_stderr
from common.sockets import short
from server.operations import fleet
from server.operations.exact import CertificateHosts, ExactPaths, Hosts, KnownHosts, SingleContentLength, sent_path
from server.operations.listener import GuardedProtocol, Listener
from server.operations.objects_app import objects_app
from server.operations.one_port import BEHIND, BehindPort, OnePort
from server.operations.sender import NODE_OF, check_sender
from server.operations.shares import Share, Shares

ACTIVATION_FAILED = 2004
"""Flower's code for a node whose activation failed."""

BODY_PAUSE_S = 15.0
"""Longest wait for the next part of a body."""
BODY_GRACE_S = 20.0
"""Seconds allowed for every body, in addition to the time for its length."""
BODY_BYTES_PER_S = 32 << 10
"""Slowest allowed rate of a body in bytes per second, after the first :data:`BODY_GRACE_S` seconds."""
_SIGNED = ("flwr-", "consilium-")
_STATUS = {"busy": 503, "starting": 503, "too-slow": 408, "too-large": 413}
"""HTTP status for each reason to refuse an admitted site's request: it exceeds one of the site's limits, or was signed
before this process started. After 503 a site tries again.
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayFiles:
    """Paths of one study's files that the gateway reads.

    Attributes:
        objects: Folder of the study's public objects.
        nodes: File that lists the study's admitted nodes.
        certificate: File of the TLS certificate of the public port.
        key: File of this certificate's private key.
    """

    objects: Path
    nodes: Path
    certificate: Path
    key: Path


def gateway_app(
    files: GatewayFiles,
    *,
    upstream: httpx.AsyncClient,
    hosts: Hosts | None = None,
    keys: RequestAdmission | None = None,
    clock: Clock = lambda: datetime.now(UTC),
) -> Starlette:
    """Return the ASGI application that serves one study at the public port.

    Args:
        files: The study's files.
        upstream: Client of the study's fleet proxy; :class:`~server.operations.one_port.OnePort` closes it.
        hosts: Returns the host names of the server; by default those in the certificate.
        keys: Checks the signatures of requests; by default with the keys in the list of nodes.
        clock: Returns the current time, for the age of a signature.

    Returns:
        The application.
    """
    routes, said = [Route(path, _Fleet(upstream, path), methods=["POST"]) for path in fleet.PATHS], _Said()
    names = hosts or CertificateHosts(files.certificate)
    return Starlette(
        routes=[*routes, Mount("/", objects_app(files.objects))],  # step 3
        middleware=[  # step 2
            Middleware(SingleContentLength),
            Middleware(KnownHosts, hosts=names, on_refused=partial(said.refused, reason="unknown-host")),
            Middleware(
                _SignedCall, gatekeeper=keys or RequestAdmission(files.nodes, started=clock()), clock=clock, said=said
            ),
            Middleware(ExactPaths),
        ],
    )


class _SignedCall:
    """Middleware that passes on requests signed by an admitted site, within the site's limits (steps 2 and 5).

    Of an unsigned request only the headers are read.
    """

    def __init__(self, app: ASGIApp, *, gatekeeper: RequestAdmission, clock: Clock, said: _Said) -> None:
        self._app, self._gatekeeper, self._clock = app, gatekeeper, clock
        self._shares, self._said = Shares(), said

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:  # step 2
            site = self._gatekeeper.admit(
                _once_each(scope), method=scope["method"], path=sent_path(scope), now=self._clock()
            )
        except Refused as error:
            self._said.refused(scope, error.reason)
            await _refusal(scope, error.reason)(scope, receive, send)
            return
        except (InvalidInput, OSError) as error:  # the list of nodes cannot be read at the moment
            await _later(type(error).__name__)(scope, receive, send)
            return
        if (connection := scope.get("state", {}).get("connection")) is not None:
            connection.admitted(site)
        share = self._shares.of(site)  # step 5
        scope["share"], scope["node_id"] = share, self._gatekeeper.node_id(site)
        try:
            async with share.turn():
                await self._app(scope, receive, send)
        except Refused as error:
            self._said.refused(scope, error.reason, site=site)
            await _refusal(scope, error.reason)(scope, receive, send)


class _Fleet:
    """One of Flower's routes: passes the request's body to SuperLink and the answer back.

    On a route in ``sender.NODE_OF``, the body is read as a whole and its sender checked before it is passed on. Other
    bodies and all answers are passed on as they arrive.
    """

    def __init__(self, upstream: httpx.AsyncClient, path: str) -> None:
        self._upstream, self._path = upstream, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            body = _body(request, scope["share"], limit=fleet.max_body(self._path))
            if (route := self._path.rsplit("/", 1)[1]) in NODE_OF:  # step 4
                body = _body_of_sender(body, route, node_id=scope["node_id"])
            answer = await fleet.ask(self._upstream, request, self._path, body)
        except ClientDisconnect:
            return
        except fleet.TooLarge as error:
            raise Refused(
                "too-large", f"the request's body exceeds the limit of its route; to fix: {SAME_VERSION}"
            ) from error
        except httpx.TransportError as error:
            await _later(type(error).__name__)(scope, receive, send)
            return
        try:
            if answer.status_code >= 500:
                await _later(f"status {answer.status_code}")(scope, receive, send)
                return
            await fleet.answer(answer, send)
        finally:
            await answer.aclose()


async def _body_of_sender(body: AsyncGenerator[bytes], route: str, *, node_id: int) -> AsyncGenerator[bytes]:
    """Read the whole body, refuse it if it names another node than the one that signed it, and yield it in one part."""
    async with contextlib.aclosing(body):
        whole = b"".join([part async for part in body])
    check_sender(route, whole, node_id=node_id)
    yield whole


async def _body(request: Request, share: Share, *, limit: int) -> AsyncGenerator[bytes]:
    """Yield the request's body part by part, counting it against the site's share.

    Raises:
        fleet.TooLarge: As soon as the body exceeds ``limit`` bytes.
        Refused: ``too-slow`` if the body arrives too slowly, ``busy`` if the site has too many bytes in transit.
    """
    started, size = time.monotonic(), 0
    parts = request.stream()
    try:
        while True:
            until = started + BODY_GRACE_S + size / BODY_BYTES_PER_S
            try:
                async with asyncio.timeout(min(BODY_PAUSE_S, max(0.0, until - time.monotonic()))):
                    part = await anext(parts)
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise Refused(
                    "too-slow",
                    "the request's body arrives too slowly; to fix: check the network between site and server",
                ) from error
            if size + len(part) > limit:
                raise fleet.TooLarge
            share.take(len(part))
            size += len(part)
            if part:
                yield part
    finally:
        share.give_back(size)


class _Said:
    """Logs refusals, at most one a second for each reason and admitted site.

    A line states how many refusals of its kind were left out since the line before.
    """

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def refused(self, scope: Scope, reason: str, *, site: str = "") -> None:
        """Log a refusal unless one with the same reason and site was logged within the last second."""
        kind = (reason, site)
        at, count = self._kinds.get(kind, (0.0, 0))
        now = time.monotonic()
        if now - at < 1.0:
            self._kinds[kind] = (at, count + 1)
            return
        self._kinds[kind] = (now, 0)
        path = sent_path(scope)
        level = logging.DEBUG if path == "/" else logging.WARNING  # the containers' health check asks for "/"
        peer = scope["client"][0] if scope.get("client") else ""
        who = f" site={site}" if site else ""  # safe to log: the name comes from the list of admitted nodes
        log.log(level, "event=refused reason=%s path=%s peer=%s more=%d%s", reason, path[:80], peer, count, who)


def _once_each(scope: Scope) -> Headers:
    """Return the request's headers; refuse the request if a header that authenticates it is repeated."""
    names = [name.decode("latin-1") for name, _ in scope["headers"]]
    signed = [name for name in names if name.startswith(_SIGNED)]
    if len(set(signed)) != len(signed):
        raise Refused(
            "unsigned", "a header that authenticates the request is repeated; to fix: let no proxy repeat headers"
        )
    return Headers(scope=scope)


def _later(cause: str) -> Response:
    """Log the cause, and return an answer with status 503, after which a SuperNode tries again.

    After any other 5xx status a SuperNode stops its heartbeat for good, and stays offline without reporting an error.
    """
    log.warning("event=superlink-away cause=%s", cause)
    return PlainTextResponse("the server is busy or starting\n", status_code=503)


def _refusal(scope: Scope, reason: str) -> Response:
    """Return the answer to a refused request: the reason in one word.

    A SuperNode that asks to be activated gets the reason in Flower's own format, because it writes this to its log.
    """
    if reason in _STATUS:
        return PlainTextResponse(f"{reason}\n", status_code=_STATUS[reason])
    if sent_path(scope) == "/v1/fleet/activate-node":
        told = {"code": ACTIVATION_FAILED, "detail": f"refused: {reason}"}
        return Response(json.dumps(told), 412, media_type="application/json")
    return PlainTextResponse(f"{reason}\n", status_code=403 if reason in ("sender", "shape", "body") else 401)


async def serve(files: GatewayFiles, *, bind: str, port: int, socket: Path) -> None:
    """Serve until SIGTERM or SIGINT; a renewed certificate is used within a second, without closing a connection.

    Args:
        files: The host study's files, and the port's certificate.
        bind: The address to listen on.
        port: The port to listen on.
        socket: Unix socket of the host study's fleet proxy, the only way by which this process reaches a SuperLink.

    Raises:
        DaemonFailed: If the port is taken.
    """
    with contextlib.ExitStack() as folders:

        def serve_study(entry: BehindPort, keys: RequestAdmission) -> tuple[Starlette, httpx.AsyncClient]:
            upstream = _upstream(folders.enter_context(short(Path(entry.fleet))))
            study = replace(files, objects=Path(entry.objects), nodes=Path(entry.nodes))
            return gateway_app(study, upstream=upstream, keys=keys), upstream

        own = BehindPort("", "", str(files.objects), str(files.nodes), str(socket))
        config = uvicorn.Config(
            OnePort(own, folder=files.nodes.with_name(BEHIND), serve=serve_study),
            host=bind,
            port=port,
            ssl_certfile=str(files.certificate),
            ssl_keyfile=str(files.key),
            log_level="warning",
            server_header=False,
            http=GuardedProtocol,
            ws="none",
            timeout_graceful_shutdown=5,
        )
        config.load()
        assert config.ssl is not None
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_2
        renewing = asyncio.create_task(_keep_certificate(config.ssl, files))
        try:
            await Listener(config).serve()  # step 1
        finally:
            renewing.cancel()


def _upstream(socket: str) -> httpx.AsyncClient:
    """Return a client of one study's fleet proxy, which listens on the Unix socket ``socket``."""
    limits = httpx.Limits(max_connections=fleet.UPSTREAM_CONNECTIONS, max_keepalive_connections=32)
    return httpx.AsyncClient(
        base_url="http://superlink",
        transport=httpx.AsyncHTTPTransport(uds=socket, limits=limits),
        timeout=fleet.UPSTREAM_TIMEOUT_S,
        trust_env=False,
    )


async def _keep_certificate(context: ssl.SSLContext, files: GatewayFiles) -> None:
    """Watch the certificate's file, and use a changed certificate for new handshakes.

    If certificate and key do not belong together, this is logged and the old certificate stays in use.
    """
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
    """Run the gateway until SIGTERM or SIGINT: ``python -m server.operations.gateway``."""
    parser = argparse.ArgumentParser(description="The one port that sites reach")
    for name in ("--objects", "--nodes", "--certificate", "--key", "--fleet"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--bind", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    given = parser.parse_args()
    log_to_stderr()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    files = GatewayFiles(objects=given.objects, nodes=given.nodes, certificate=given.certificate, key=given.key)
    try:
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signal again after it has ended
            asyncio.run(serve(files, bind=given.bind, port=given.port, socket=given.fleet))
    except DaemonFailed as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
