"""The dashboard's application: one study, read only, behind a sign-in.

Pages, the JSON under them and the metrics are built from the same views. Nothing in this package can charge the ledger:
it holds no signing key and opens the file for reading only.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jinja2
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.staticfiles import StaticFiles

from common.errors import ConsiliumError, InvalidInput
from server.dashboard import api, pages
from server.dashboard.auth import Sessions, Throttle, UserFile
from server.dashboard.live import Live
from server.dashboard.read_model import Follower
from server.dashboard.security import Gate, SecureHeaders, check_origin, check_token, local_path, read_form
from server.dashboard.service import Certifier, Service
from server.dashboard.views import epsilon_curve
from server.operations.exact import Hosts, KnownHosts
from server.postprocess.decisions import DecisionStore
from server.study.workspace import Workspace

HERE = Path(__file__).parent
SIGN_INS_AT_ONCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How one dashboard is run. ``state`` is its own directory; ``secure`` says that browsers reach it over TLS.

    ``certifier`` gives the command that writes a certificate into a folder; ``metrics_token`` opens ``/metrics`` to a
    bearer of it beside signed-in users. ``hosts`` are the names it is called by beside those of the machine itself: a
    page of another name that leads here is answered nothing.
    """

    study: Path
    state: Path
    secure: bool = False
    session_hours: float = 12.0
    metrics_token: str | None = None
    certifier: Certifier | None = None
    hosts: Hosts = lambda: ()
    poll_s: float = 1.0
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)


def users_file(state: Path) -> UserFile:
    """The users of the dashboard whose state directory this is."""
    return UserFile(state / "users.json")


def create_app(options: Options) -> FastAPI:
    """The ASGI application. Starts following the study at once, and stops with the server."""
    workspace = Workspace(options.study)
    follower = Follower(workspace, clock=options.clock)
    options.state.mkdir(parents=True, exist_ok=True)
    users = users_file(options.state)
    sessions = Sessions(users, clock=options.clock, lifetime_s=options.session_hours * 3600)
    service = Service(
        follower=follower,
        state=options.state,
        decisions=DecisionStore(options.state / "decisions.jsonl"),
        certifier=options.certifier,
        now=options.now,
    )
    templates = _templates()
    gate = Gate(cookie=f"consilium-{follower.study.id[:8]}", lookup=sessions.get)

    def render(page: str) -> dict[str, str]:
        return pages.live_blocks(service, templates, page)

    live = Live(render, version=lambda: follower.version)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        follower.start(every_s=options.poll_s, after=lambda: epsilon_curve(follower))  # so that no page waits for it
        task = asyncio.create_task(live.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await asyncio.to_thread(follower.stop)
        service.close()

    app = FastAPI(
        title="Consilium dashboard",
        version=version("consilium"),
        summary="Read a study's standing: budget, sites, ledger, labels, student.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    app.add_middleware(KnownHosts, hosts=options.hosts)
    app.add_middleware(SecureHeaders, secure=options.secure)
    _sign_in(app, options=options, templates=templates, gate=gate, users=users, sessions=sessions, service=service)
    _health(app, options=options, gate=gate, service=service)
    _errors(app, templates=templates)
    app.include_router(api.router(service, gate, live, render))
    app.include_router(pages.router(service, gate, templates))
    app.mount("/static", _Static(directory=HERE / "static"), name="static")

    @app.get("/api/openapi.json", include_in_schema=False)
    def openapi(request: Request) -> JSONResponse:
        gate.for_api(request)
        return JSONResponse(app.openapi())

    return app


class _Static(StaticFiles):
    """Vendored files; a page asks for them with its version, so the browser may keep them."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        response = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        response.headers["cache-control"] = "public, max-age=86400"
        return response


def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    pages.add_filters(environment)
    environment.globals["asset_version"] = version("consilium") + "-" + pages.static_version(HERE / "static")
    return environment


def _sign_in(
    app: FastAPI,
    *,
    options: Options,
    templates: jinja2.Environment,
    gate: Gate,
    users: UserFile,
    sessions: Sessions,
    service: Service,
) -> None:
    throttle = Throttle(clock=options.clock)
    scrypts = asyncio.Semaphore(SIGN_INS_AT_ONCE)

    def form(*, status: int = 200, problem: str = "", name: str = "", target: str = "/") -> HTMLResponse:
        html = templates.get_template("login.html").render(
            problem=problem, name=name, target=target, nobody=not users.users(), study=service.follower.study.name
        )
        return HTMLResponse(html, status_code=status)

    @app.get("/login", include_in_schema=False)
    def login_page(request: Request, next: str = "/", ended: str = "") -> Response:
        if gate.session(request) is not None:
            return RedirectResponse(local_path(next), 303)
        return form(problem="Your session has ended. Sign in again." if ended else "", target=local_path(next))

    @app.post("/login", include_in_schema=False)
    async def login(request: Request) -> Response:
        check_origin(request)
        fields = await read_form(request)
        name, password = fields.get("name", "")[:64], fields.get("password", "")
        target = local_path(fields.get("next"))
        address = request.client.host if request.client else ""
        wait = throttle.wait_s(name=name, address=address)
        if wait > 0:
            problem = f"Too many wrong sign-ins. Try again in {max(1, round(wait))} s."
            answer = form(status=429, problem=problem, name=name, target=target)
            answer.headers["retry-after"] = str(max(1, round(wait)))
            return answer
        async with scrypts:
            user = await asyncio.to_thread(users.check, name, password)
        if user is None:
            throttle.failed(name=name, address=address)
            return form(status=401, problem="Name or password is wrong.", name=name, target=target)
        throttle.succeeded(name=name, address=address)
        token, _ = sessions.begin(user)
        response = RedirectResponse(target, 303)
        response.set_cookie(
            gate.cookie,
            token,
            max_age=round(sessions.lifetime_s),
            httponly=True,
            samesite="strict",
            secure=options.secure,
            path="/",
        )
        return response

    @app.post("/logout", include_in_schema=False)
    async def logout(request: Request) -> Response:
        check_origin(request)
        session = gate.for_page(request)
        check_token(session, (await read_form(request)).get("csrf"))
        sessions.end(request.cookies.get(gate.cookie))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(gate.cookie, path="/", httponly=True, samesite="strict", secure=options.secure)
        return response


def _health(app: FastAPI, *, options: Options, gate: Gate, service: Service) -> None:
    from server.dashboard.metrics import exposition

    follower = service.follower

    @app.get("/healthz", include_in_schema=False)
    def health() -> JSONResponse:
        """Whether the process follows the study; says nothing about the study itself."""
        following = follower.looked is None or options.clock() - follower.looked < 60
        ok = following and follower.ledger.problem is None
        facts = {
            "ok": ok,
            "following": following,
            "up_to_date": follower.looked is not None and follower.ledger.complete,
            "ledger_readable": follower.ledger.problem is None,
        }
        return JSONResponse(facts, status_code=200 if ok else 503)

    @app.get("/metrics", include_in_schema=False)
    def metrics(request: Request) -> Response:
        """Prometheus text, for a signed-in user or a bearer of the metrics token."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
        token = options.metrics_token
        if not (token and hmac.compare_digest(given, token.encode())) and gate.session(request) is None:
            raise HTTPException(401, "give the metrics token as a bearer", headers={"www-authenticate": "Bearer"})
        text, kind = exposition(service)
        return Response(text, media_type=kind)


def _errors(app: FastAPI, *, templates: jinja2.Environment) -> None:
    def wants_json(request: Request) -> bool:
        return request.url.path.startswith(("/api/", "/metrics", "/healthz", "/static/"))

    def page(status: int, title: str, words: str) -> HTMLResponse:
        html = templates.get_template("error.html").render(status=status, title=title, words=words)
        return HTMLResponse(html, status_code=status)

    @app.exception_handler(StarletteHTTPException)
    def http_error(request: Request, error: StarletteHTTPException) -> Response:
        if error.status_code == 303:
            return RedirectResponse((error.headers or {})["location"], 303)
        if wants_json(request):
            return JSONResponse({"detail": error.detail}, status_code=error.status_code, headers=error.headers)
        titles = {403: "Not allowed", 404: "No such page"}
        return page(error.status_code, titles.get(error.status_code, "That did not work"), str(error.detail))

    @app.exception_handler(ConsiliumError)
    def deliberate(request: Request, error: ConsiliumError) -> Response:
        status = 400 if isinstance(error, InvalidInput) else 409
        if wants_json(request):
            return JSONResponse({"detail": str(error)}, status_code=status)
        return page(status, "That did not work", str(error))
