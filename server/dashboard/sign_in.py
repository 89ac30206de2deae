"""Handles signing in and out.

The application mounts the routes of this module. Guesses of passwords are slowed down, and scripts cannot read the
session's cookie. Wrong passwords, too many sign-ins from one address, and forms sent from another site are refused.

Sign-ins, refused sign-ins and sign-outs are logged, and the security log reads this log. A line has the time, the event
and the address. It has the user's name only if such a user exists, because text typed into the name field may be a
password. At 4 MiB the file is renamed to ``sign-ins.jsonl.1``, so guessing cannot fill the disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from common.errors import InvalidInput
from common.security_log.events import FoundEvent
from common.security_log.follow import LinesSource, Source, utc_time
from common.security_log.sinks import RotatedFile
from server.dashboard.auth import Sessions, Throttle, UserFile
from server.dashboard.oidc import Provider
from server.dashboard.security import SessionReader, check_origin, local_path, of_app, read_form
from server.dashboard.service import DashboardService
from server.postprocess.decisions import Verdict

SIGN_INS = "sign-ins.jsonl"
MAX_LOG_BYTES = 4 << 20
SIGN_INS_AT_ONCE = 2
WAITING_AT_ONCE = 8
"""Largest number of sign-ins in progress from one address. More are refused, so that other addresses need not wait."""

BUSY_S = 1.0
ASKED_AT_ONCE = 4
BACK = "/login/oidc/back"
"""Path to which a provider sends browsers back; the dashboard's address with this path is registered there."""


@dataclass(slots=True)
class SignInContext:
    """The objects that the sign-in routes share.

    Attributes:
        users: The local users.
        sessions: Open sessions.
        throttle: Limits guesses of passwords.
        secure: True if the cookie is sent over TLS only.
        log: Log of sign-ins.
        waiting: Number of sign-ins in progress, by address.
        provider: OpenID Connect provider; None if only local users can sign in.
        asking: Limits concurrent calls of the provider.
        scrypts: Limits concurrent password checks.
    """

    users: UserFile
    sessions: Sessions
    throttle: Throttle
    secure: bool
    log: SignInLog
    waiting: Counter[str] = field(default_factory=Counter)
    provider: Provider | None = None
    asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASKED_AT_ONCE))
    scrypts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SIGN_INS_AT_ONCE))

    def is_crowded(self, address: str) -> bool:
        """Return whether this address already has as many sign-ins in progress as are allowed."""
        return self.waiting[address] >= WAITING_AT_ONCE

    @contextlib.contextmanager
    def counted(self, address: str) -> Iterator[None]:
        """Count a sign-in of an address as in progress inside the block.

        Args:
            address: The client's address.
        """
        self.waiting[address] += 1
        try:
            yield
        finally:
            self.waiting[address] -= 1
            self.waiting += Counter()  # drops addresses without a sign-in in progress


ForSignIn = Annotated[SignInContext, of_app("sign_in")]
AtGate = Annotated[SessionReader, of_app("gate")]

routes = APIRouter(include_in_schema=False)


@routes.get("/login")
def login_page(request: Request, sign_in: ForSignIn, gate: AtGate, next: str = "/", ended: str = "") -> Response:
    if gate.session(request) is not None:
        return RedirectResponse(local_path(next), 303)
    problem = "Your session has ended. Sign in again." if ended else ""
    return _form(request, sign_in, problem=problem, target=local_path(next))


@routes.post("/login")
async def login(request: Request, sign_in: ForSignIn, gate: AtGate) -> Response:
    check_origin(request)
    fields = await read_form(request)
    name, password = fields.get("name", "")[:64], fields.get("password", "")
    target = local_path(fields.get("next"))
    address = _address(request)
    wait = BUSY_S if sign_in.is_crowded(address) else sign_in.throttle.attempt(name=name, address=address)
    if wait > 0:
        sign_in.log.write("sign-in-delayed", address=address, user=_known(sign_in, name))
        return _come_again(request, sign_in, wait_s=wait, name=name, target=target)
    with sign_in.counted(address):
        async with sign_in.scrypts:
            user = await asyncio.to_thread(sign_in.users.check, name, password)
    if user is None:
        sign_in.log.write("sign-in-failed", address=address, user=_known(sign_in, name))
        return _form(request, sign_in, status=401, problem="Name or password is wrong.", name=name, target=target)
    sign_in.throttle.succeeded(name=name, address=address)
    token, _ = sign_in.sessions.begin(user.name, user.role, credential=user.digest)
    sign_in.log.write("sign-in", address=address, user=user.name, role=user.role)
    return _let_in(sign_in, gate, token, target)


def _let_in(sign_in: SignInContext, gate: SessionReader, token: str, target: str) -> Response:
    response = RedirectResponse(target, 303)
    response.set_cookie(
        gate.cookie,
        token,
        max_age=round(sign_in.sessions.lifetime_s),
        httponly=True,
        samesite="lax",  # so that a link in a mail works; every change also needs the session's token
        secure=sign_in.secure,
        path="/",
    )
    return response


@routes.get("/login/oidc")
async def to_provider(request: Request, sign_in: ForSignIn, gate: AtGate, next: str = "/") -> Response:
    """Send the browser to the provider; it comes back to :func:`from_provider`."""
    if sign_in.provider is None:
        raise HTTPException(404, "this dashboard has no OpenID Connect provider; sign in with name and password")
    if sign_in.is_crowded(_address(request)):
        return _come_again(request, sign_in, target=local_path(next))
    here = f"{request.url.scheme}://{request.headers['host']}{BACK}"
    try:
        with sign_in.counted(_address(request)):
            async with sign_in.asking:
                url, word = await asyncio.to_thread(sign_in.provider.begin, redirect=here, target=local_path(next))
    except InvalidInput as error:
        return _form(
            request, sign_in, status=503, problem=f"{error}. Local users can sign in.", target=local_path(next)
        )
    response = RedirectResponse(url, 303)
    response.set_cookie(
        f"{gate.cookie}-oidc", word, max_age=600, httponly=True, samesite="lax", secure=sign_in.secure, path=BACK
    )
    return response


@routes.get(BACK)
async def from_provider(
    request: Request, sign_in: ForSignIn, gate: AtGate, state: str = "", code: str = ""
) -> Response:
    """Sign in a user whom the provider authenticated; any other answer signs in nobody."""
    if sign_in.provider is None:
        raise HTTPException(404, "this dashboard has no OpenID Connect provider; sign in with name and password")
    address = _address(request)
    if sign_in.is_crowded(address):
        sign_in.log.write("sign-in-delayed", address=address, by="oidc")
        return _come_again(request, sign_in)  # keeps the cookie, so the same link may be opened again
    word = request.cookies.get(f"{gate.cookie}-oidc", "")
    try:
        with sign_in.counted(address):
            async with sign_in.asking:
                who, target = await asyncio.to_thread(sign_in.provider.finish, state=state, code=code, browser=word)
    except InvalidInput as error:
        sign_in.log.write("sign-in-failed", address=address, by="oidc")
        response: Response = _form(request, sign_in, status=401, problem=f"The sign-in failed: {error}.")
    else:
        token, _ = sign_in.sessions.begin(who.name, who.role, credential=None)
        sign_in.log.write("sign-in", address=address, by="oidc", user=who.name, role=who.role)
        response = _let_in(sign_in, gate, token, target)
    response.delete_cookie(f"{gate.cookie}-oidc", path=BACK, httponly=True, samesite="lax", secure=sign_in.secure)
    return response


@routes.post("/logout")
def logout(request: Request, sign_in: ForSignIn, gate: AtGate) -> Response:
    if (session := gate.session(request)) is not None:
        address = _address(request)
        sign_in.log.write("sign-out", address=address, user=session.user)
    sign_in.sessions.end(request.cookies.get(gate.cookie))
    response = RedirectResponse("/login", 303)
    response.delete_cookie(gate.cookie, path="/", httponly=True, samesite="lax", secure=sign_in.secure)
    return response


def _known(sign_in: SignInContext, name: str) -> str:
    """Return the name if a local user has it, else an empty text. Other text is not logged: it may be a password."""
    return name if name in sign_in.users.users() else ""


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _come_again(
    request: Request, sign_in: SignInContext, *, wait_s: float = BUSY_S, name: str = "", target: str = "/"
) -> HTMLResponse:
    seconds = max(1, round(wait_s))
    problem = f"Too many sign-ins. Try again in {seconds} s."
    answer = _form(request, sign_in, status=429, problem=problem, name=name, target=target)
    answer.headers["retry-after"] = str(seconds)
    return answer


def _form(
    request: Request, sign_in: SignInContext, *, status: int = 200, problem: str = "", name: str = "", target: str = "/"
) -> HTMLResponse:
    service: DashboardService = request.app.state.service
    html = request.app.state.templates.get_template("login.html").render(
        problem=problem,
        name=name,
        target=target,
        nobody=not sign_in.users.users() and sign_in.provider is None,
        provider=sign_in.provider.host if sign_in.provider else "",
        study=service.follower.study.name,
    )
    return HTMLResponse(html, status_code=status)


class SignInLog:
    """Appends to ``sign-ins.jsonl``. If writing fails, the line is lost, so a full disk does not prevent signing in.

    Args:
        state: The dashboard's own directory.
        now: Returns the current time.
    """

    def __init__(self, state: Path, *, now: Callable[[], datetime]) -> None:
        self._file = RotatedFile(state / SIGN_INS, max_bytes=MAX_LOG_BYTES, kept=1)
        self._now, self._lock = now, threading.Lock()

    def write(self, event: str, *, address: str, by: str = "password", user: str = "", role: str = "") -> None:
        """Append one line about a sign-in or sign-out.

        Args:
            event: ``sign-in``, ``sign-in-failed``, ``sign-in-delayed`` or ``sign-out``.
            address: The client's address.
            by: ``password`` or ``oidc``.
            user: Name of an existing user; empty for any other text.
            role: The user's role.
        """
        facts = {"user": user, "role": role, "by": by, "address": address or "unknown"}
        with self._lock, contextlib.suppress(OSError):
            self._file.send({"time": self._now().isoformat(), "event": event, **facts})


def read_sign_in(line: str) -> FoundEvent | None:
    """Convert a line of ``sign-ins.jsonl`` to an event of the security log."""
    record = json.loads(line)
    more = {"sign-in": ("role", "by"), "sign-out": ()}.get(record["event"], ("by",))
    facts = {name: record[name] for name in ("user", "address", *more) if record[name]}
    return FoundEvent(record["event"], utc_time(record["time"]), facts)


def read_decision(line: str) -> FoundEvent | None:
    """Convert a line of ``decisions.jsonl`` to an event of the security log, without the note."""
    record = json.loads(line)
    facts = {"user": record["user"], "label": record["label"], "verdict": str(Verdict(record["verdict"]))}
    return FoundEvent("label-decided", utc_time(record["time"]), facts)


def dashboard_sources(state: Path) -> list[Source]:
    """Return the files of a dashboard that the security log follows.

    Args:
        state: The dashboard's state directory.

    Returns:
        The logs of sign-ins and of decisions about labels.
    """
    return [
        LinesSource(state / SIGN_INS, read=read_sign_in),
        LinesSource(state / "decisions.jsonl", read=read_decision),
    ]
