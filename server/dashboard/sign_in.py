"""Signing in and out: passwords checked two at a time, guesses slowed down, a cookie that no script reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from common.errors import InvalidInput
from server.dashboard.auth import Sessions, Throttle, UserFile
from server.dashboard.oidc import Provider
from server.dashboard.security import Gate, check_origin, local_path, read_form
from server.dashboard.service import Service

SIGN_INS_AT_ONCE = 2
WAITING_AT_ONCE = 8
"""Sign-ins of one address that are looked at or wait for it: more come back, so that nobody else waits behind them."""

BUSY_S = 1.0
ASKED_AT_ONCE = 4
BACK = "/login/oidc/back"
"""Where a provider sends browsers back to: what is registered there is this dashboard's address and this path."""


@dataclass(slots=True)
class Door:
    """Who may come in, who is in, and how often somebody tried. ``secure``: the cookie travels over TLS only;
    ``provider`` vouches for people beside the local users."""

    users: UserFile
    sessions: Sessions
    throttle: Throttle
    secure: bool
    waiting: Counter[str] = field(default_factory=Counter)
    provider: Provider | None = None
    asking: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(ASKED_AT_ONCE))
    scrypts: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(SIGN_INS_AT_ONCE))


async def _door(request: Request) -> Door:
    door: Door = request.app.state.door
    return door


async def _gate(request: Request) -> Gate:
    gate: Gate = request.app.state.gate
    return gate


AtDoor = Annotated[Door, Depends(_door)]
AtGate = Annotated[Gate, Depends(_gate)]

routes = APIRouter(include_in_schema=False)


@routes.get("/login")
def login_page(request: Request, door: AtDoor, gate: AtGate, next: str = "/", ended: str = "") -> Response:
    if gate.session(request) is not None:
        return RedirectResponse(local_path(next), 303)
    problem = "Your session has ended. Sign in again." if ended else ""
    return _form(request, door, problem=problem, target=local_path(next))


@routes.post("/login")
async def login(request: Request, door: AtDoor, gate: AtGate) -> Response:
    check_origin(request)
    fields = await read_form(request)
    name, password = fields.get("name", "")[:64], fields.get("password", "")
    target = local_path(fields.get("next"))
    address = request.client.host if request.client else ""
    wait = BUSY_S if door.waiting[address] >= WAITING_AT_ONCE else door.throttle.attempt(name=name, address=address)
    if wait > 0:
        problem = f"Too many sign-ins. Try again in {max(1, round(wait))} s."
        answer = _form(request, door, status=429, problem=problem, name=name, target=target)
        answer.headers["retry-after"] = str(max(1, round(wait)))
        return answer
    door.waiting[address] += 1
    try:
        async with door.scrypts:
            user = await asyncio.to_thread(door.users.check, name, password)
    finally:
        door.waiting[address] -= 1
    door.waiting += Counter()  # without addresses that wait for nothing
    if user is None:
        return _form(request, door, status=401, problem="Name or password is wrong.", name=name, target=target)
    door.throttle.succeeded(name=name, address=address)
    token, _ = door.sessions.begin(user.name, user.role, credential=user.digest)
    return _let_in(door, gate, token, target)


def _let_in(door: Door, gate: Gate, token: str, target: str) -> Response:
    response = RedirectResponse(target, 303)
    response.set_cookie(
        gate.cookie,
        token,
        max_age=round(door.sessions.lifetime_s),
        httponly=True,
        samesite="lax",  # a link in a mail leads in; every change also needs the session's token
        secure=door.secure,
        path="/",
    )
    return response


@routes.get("/login/oidc")
async def to_provider(request: Request, door: AtDoor, gate: AtGate, next: str = "/") -> Response:
    """Send the browser to the provider; it comes back to :func:`from_provider`."""
    if door.provider is None:
        raise HTTPException(404, "no provider is set up here")
    here = f"{request.url.scheme}://{request.headers['host']}{BACK}"
    try:
        async with door.asking:
            url, word = await asyncio.to_thread(door.provider.begin, redirect=here, target=local_path(next))
    except InvalidInput as error:
        return _form(request, door, status=503, problem=f"{error}. Local users can sign in.", target=local_path(next))
    response = RedirectResponse(url, 303)
    response.set_cookie(
        f"{gate.cookie}-oidc", word, max_age=600, httponly=True, samesite="lax", secure=door.secure, path=BACK
    )
    return response


@routes.get(BACK)
async def from_provider(request: Request, door: AtDoor, gate: AtGate, state: str = "", code: str = "") -> Response:
    """Let somebody in whom the provider vouches for; nobody for any other answer."""
    if door.provider is None:
        raise HTTPException(404, "no provider is set up here")
    word = request.cookies.get(f"{gate.cookie}-oidc", "")
    try:
        async with door.asking:
            who, target = await asyncio.to_thread(door.provider.finish, state=state, code=code, browser=word)
    except InvalidInput as error:
        response: Response = _form(request, door, status=401, problem=f"Nobody was let in: {error}.")
    else:
        token, _ = door.sessions.begin(who.name, who.role, credential=None)
        response = _let_in(door, gate, token, target)
    response.delete_cookie(f"{gate.cookie}-oidc", path=BACK, httponly=True, samesite="lax", secure=door.secure)
    return response


@routes.post("/logout")
def logout(request: Request, door: AtDoor, gate: AtGate) -> Response:
    door.sessions.end(request.cookies.get(gate.cookie))
    response = RedirectResponse("/login", 303)
    response.delete_cookie(gate.cookie, path="/", httponly=True, samesite="lax", secure=door.secure)
    return response


def _form(
    request: Request, door: Door, *, status: int = 200, problem: str = "", name: str = "", target: str = "/"
) -> HTMLResponse:
    service: Service = request.app.state.service
    html = request.app.state.templates.get_template("login.html").render(
        problem=problem,
        name=name,
        target=target,
        nobody=not door.users.users() and door.provider is None,
        provider=door.provider.host if door.provider else "",
        study=service.follower.study.name,
    )
    return HTMLResponse(html, status_code=status)
