"""Builds the dashboard's web application, which shows one study to signed-in users and cannot change its ledger.

:mod:`server.dashboard.serve` runs it. Pages, JSON and metrics are made from the same views. Nothing in this package can
charge the ledger, because it has no signing key and opens the file for reading only. The application refuses oversized
requests, unknown host names, and requests without a session.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from fastapi import Depends, FastAPI, Request
from fastapi.exception_handlers import request_validation_exception_handler
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.staticfiles import StaticFiles

from common import __version__
from common.errors import ConsiliumError, InvalidInput
from common.security_log.follow import LogFollower as SecurityLog
from common.security_log.program import STATE
from common.security_log.sinks import open_sink
from server.dashboard import api, health, pages, sign_in
from server.dashboard.auth import Sessions, Throttle, users_file
from server.dashboard.live import Live
from server.dashboard.oidc import Provider, Settings
from server.dashboard.read_model import Follower
from server.dashboard.screens import HERE, environment, error_page, live_blocks
from server.dashboard.security import SecureHeaders, SessionReader, SmallBodies, admitted, for_machines
from server.dashboard.service import Certifier, DashboardService
from server.dashboard.sign_in import SignInContext, SignInLog, dashboard_sources
from server.dashboard.views.study import epsilon_curve
from server.operations.exact import Hosts, KnownHosts, SingleContentLength
from server.postprocess.decisions import DecisionStore
from server.study.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a dashboard.

    Attributes:
        study: The study's directory.
        state: The dashboard's own directory.
        secure: True if browsers reach the dashboard over TLS.
        session_hours: Lifetime of a session in hours.
        metrics_token: Bearer token that gives access to ``/metrics`` without a session; None for no such token.
        certifier: Function that returns the command line that writes a privacy certificate; None if this dashboard
            issues no certificates.
        hosts: Function that returns the accepted host names besides those of this machine. Requests for other names
            are refused.
        webhook: URL to which a message is posted when an alarm begins or ends; None for no messages.
        oidc: Settings of an OpenID Connect provider that authenticates users besides the local ones.
        log_to: Destinations of the security log, such as ``syslog`` or ``file:PATH``; empty to write none.
        clock: Monotonic clock in seconds, for sessions and limits.
        now: Returns the current time.
    """

    study: Path
    state: Path
    secure: bool = False
    session_hours: float = 12.0
    metrics_token: str | None = None
    certifier: Certifier | None = None
    hosts: Hosts = lambda: ()
    webhook: str | None = None
    oidc: Settings | None = None
    log_to: tuple[str, ...] = ()
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


def create_app(options: Options) -> FastAPI:
    """Create the ASGI application.

    At startup the application starts three background tasks: one reads the study's files, one updates open pages, and
    one writes the security log. It stops them at shutdown.

    Args:
        options: The dashboard's settings.

    Returns:
        The application.

    Raises:
        InvalidInput: If the study cannot be read, or an option is invalid.
    """
    follower = Follower(Workspace(options.study), clock=options.clock)
    options.state.mkdir(parents=True, exist_ok=True)
    service = DashboardService(
        follower=follower,
        state=options.state,
        decisions=DecisionStore(options.state / "decisions.jsonl"),
        certifier=options.certifier,
        webhook=options.webhook,
        log_state=options.state / STATE if options.log_to else None,
        now=options.now,
    )
    users = users_file(options.state)
    sessions = Sessions(users, clock=options.clock, lifetime_s=options.session_hours * 3600)
    templates = environment()
    live = Live(partial(live_blocks, service, templates), version=lambda: follower.version)
    app = FastAPI(
        title="Consilium dashboard",
        version=__version__,
        summary="Read the state of a study: budget, sites, ledger, labels, student.",
        dependencies=[Depends(admitted)],
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.state.service, app.state.templates, app.state.live = service, templates, live
    app.state.gate = SessionReader(cookie=f"consilium-{follower.study.id[:8]}", lookup=sessions.get)
    provider = None if options.oidc is None else Provider(options.oidc, clock=options.clock)
    log = SignInLog(options.state, now=options.now)
    throttle = Throttle(clock=options.clock)
    app.state.sign_in = SignInContext(users, sessions, throttle, secure=options.secure, log=log, provider=provider)
    app.state.security_log = _security_log(options, follower.study.name)
    app.state.metrics_token = options.metrics_token
    app.add_middleware(SmallBodies)
    app.add_middleware(KnownHosts, hosts=options.hosts)
    app.add_middleware(SingleContentLength)
    app.add_middleware(SecureHeaders, secure=options.secure)
    for subject in (sign_in, health, api, pages):
        app.include_router(subject.routes)
    app.mount("/static", _Static(directory=HERE / "static"), name="static")
    app.add_exception_handler(StarletteHTTPException, _refused)
    app.add_exception_handler(ConsiliumError, _refused_by_design)
    app.add_exception_handler(RequestValidationError, _misunderstood)
    app.add_exception_handler(sqlite3.Error, _unreadable)
    app.add_exception_handler(Exception, _failed)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    service: DashboardService = app.state.service
    follower, live = service.follower, app.state.live
    service.start(after=lambda: epsilon_curve(follower))  # fills the cache, so that no page waits
    task = asyncio.create_task(live.run())
    stop, log = threading.Event(), app.state.security_log
    following = asyncio.create_task(asyncio.to_thread(log.run, stop=stop.wait)) if log is not None else None
    yield
    stop.set()
    if following is not None:
        await following
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await asyncio.to_thread(service.close)


def _security_log(options: Options, study: str) -> SecurityLog | None:
    if not options.log_to:
        return None
    sinks = {target: open_sink(target) for target in options.log_to}
    state = options.state / STATE
    return SecurityLog(dashboard_sources(options.state), sinks, party="dashboard", name=study, state=state)


class _Static(StaticFiles):
    """Serves static files. Pages add a version to their URLs, so browsers may cache each version for a day."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["cache-control"] = "public, max-age=86400"
        return response


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteHTTPException)
    if error.status_code == 303:
        return RedirectResponse((error.headers or {})["location"], 303)
    title = {403: "Not allowed", 404: "No such page"}.get(error.status_code, "That did not work")
    return _error_response(request, error.status_code, title, str(error.detail), headers=error.headers)


def _refused_by_design(request: Request, error: Exception) -> Response:
    return _error_response(request, 400 if isinstance(error, InvalidInput) else 409, "That did not work", str(error))


async def _misunderstood(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    if for_machines(request):
        return await request_validation_exception_handler(request, error)
    first = error.errors()[0]
    where = " ".join(str(part) for part in first["loc"][1:])
    return _error_response(
        request, 400, "The address of this page contains an invalid value", f"{where}: {first['msg']}"
    )


def _unreadable(request: Request, error: Exception) -> Response:
    remedy = "" if for_machines(request) else ". Overview says what to do."
    return _error_response(request, 503, "The ledger cannot be read", f"The ledger cannot be read: {error}{remedy}")


def _failed(request: Request, error: Exception) -> Response:
    words = f"This could not be shown ({type(error).__name__}); the dashboard's log has the details."
    return _error_response(request, 500, "Something is wrong here", words)


def _error_response(
    request: Request, status: int, title: str, words: str, *, headers: Mapping[str, str] | None = None
) -> Response:
    """Return an error message, as JSON to a program and as a page to a browser."""
    if for_machines(request):
        return JSONResponse({"detail": words}, status_code=status, headers=headers)
    return error_page(status, title, words, headers=headers)
