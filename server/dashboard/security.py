"""Adds security headers to every response, and checks every request's session, role and origin.

The application runs :func:`admitted` before every route, so a new route needs a session by default. It refuses
requests without a session (pages redirect to the sign-in, the API answers 401), forms without the session's token, and
forms sent from another site. Routes that only an operator may use take :data:`Decider` as an argument.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, urlsplit

from fastapi import Depends, HTTPException, Request
from fastapi.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.dashboard.auth import Session

MAX_BODY_BYTES = 1 << 16
BODY_S = 30.0
MAX_FIELDS = 1_000
"""Largest number of fields of a form.

The longest form decides about many labels at once. It cannot reach this number, because each label takes 67 bytes and
a body has at most :data:`MAX_BODY_BYTES`.
"""

POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}


class SecureHeaders:
    """ASGI middleware that adds :data:`HEADERS` to every response.

    It also forbids caching, unless the response itself has a ``cache-control`` header.
    """

    def __init__(self, app: ASGIApp, *, secure: bool) -> None:
        self._app = app
        self._headers = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        if secure:
            self._headers.append((b"strict-transport-security", b"max-age=31536000"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", []))
                headers += self._headers
                if not any(name == b"cache-control" for name, _ in headers):
                    headers.append((b"cache-control", b"no-store"))
                message["headers"] = headers
            await send(message)

        await self._app(scope, receive, with_headers)


class SmallBodies:
    """ASGI middleware that reads a request's whole body before passing the request on.

    It answers 413 to a body over 64 KiB, and 408 to one that takes longer than :data:`BODY_S` seconds. This limits the
    memory that clients can occupy without signing in.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        too_large = _refusal(413, f"the request's body must have at most {MAX_BODY_BYTES} bytes")
        stated = [value for name, value in scope["headers"] if name == b"content-length" and value.isdigit()]
        if any(int(value[:20]) > MAX_BODY_BYTES for value in stated):
            await too_large(scope, receive, send)
            return
        try:
            async with asyncio.timeout(BODY_S):
                while more and len(body) <= MAX_BODY_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return
                    body, more = body + message.get("body", b""), message.get("more_body", False)
        except TimeoutError:
            late = _refusal(408, f"the request's body must arrive within {BODY_S:.0f} s")
            await late(scope, receive, send)
            return
        if len(body) > MAX_BODY_BYTES:
            await too_large(scope, receive, send)
            return
        held: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return held.pop() if held else await receive()

        await self._app(scope, replay, send)


def _refusal(status: int, words: str) -> PlainTextResponse:
    return PlainTextResponse(f"{words}\n", status_code=status, headers={"connection": "close"})


@dataclass(frozen=True, slots=True)
class SessionReader:
    """Reads a request's session from its cookie.

    Attributes:
        cookie: Name of the cookie.
        lookup: Function that returns the session of a cookie's token, or None if there is no such session.
    """

    cookie: str
    lookup: Callable[[str | None], Session | None]

    def session(self, request: Request) -> Session | None:
        """Return the session of a request.

        Args:
            request: The request.

        Returns:
            The session; None if the request has no valid session.
        """
        return self.lookup(request.cookies.get(self.cookie))


OPEN = frozenset({"/login", "/login/oidc", "/login/oidc/back", "/healthz", "/metrics"})
"""Paths that need no session; each of these routes checks access itself."""


async def admitted(request: Request) -> None:
    """Check a request before its handler runs; every route depends on it.

    1. Allow a path in :data:`OPEN` without further checks.
    2. Refuse a change (any method but GET) that comes from another site.
    3. Require a session.
    4. For a change, require the session's token: in the header ``X-CSRF-Token`` for the API, in the field ``csrf`` for
       a page's form.

    Handlers receive the session as :data:`SignedIn` and the form as :data:`Form`.

    Args:
        request: The request.

    Raises:
        HTTPException: 303 to the sign-in for a page without a session, 401 for another path without one, 403 for a
            change from another site or without the token, 400 or 415 for an unreadable form.
    """
    path: str = request.scope["path"]  # not request.url: the sender controls it through the Host header
    if path in OPEN:  # 1
        return
    page, changes = not for_machines(request), request.method != "GET"
    if changes:  # 2
        check_origin(request)
    gate: SessionReader = request.app.state.gate
    session = gate.session(request)  # 3
    if session is None and page:
        asked = path + (f"?{request.url.query}" if request.url.query else "")
        if changes:  # after the sign-in the browser asks for the page with the form, not for the form's own address
            asked = urlsplit(request.headers.get("referer", "")).path or "/"
        why = "&ended=1" if request.cookies.get(gate.cookie) else ""
        raise HTTPException(303, headers={"location": f"/login?next={quote(asked, safe='')}{why}"})
    if session is None:
        raise HTTPException(401, "sign in at /login and send the session's cookie")
    form = await read_form(request) if page and changes else {}
    if changes:  # 4
        _check_token(session, form.get("csrf") if page else request.headers.get("x-csrf-token"))
    request.state.session, request.state.form = session, form


def of_app(name: str) -> Any:
    """Return a dependency on the object that the application's state holds under a name.

    Args:
        name: The name.

    Returns:
        The dependency.
    """

    async def found(request: Request) -> Any:
        return getattr(request.app.state, name)

    return Depends(found)


async def _session(request: Request) -> Session:
    session: Session = request.state.session
    return session


async def _form(request: Request) -> dict[str, str]:
    form: dict[str, str] = request.state.form
    return form


async def _decider(session: SignedIn) -> Session:
    if not session.role.may_decide:
        raise HTTPException(
            403, "only an operator may decide about labels and hand in sites' reports; you are a privacy officer"
        )
    return session


SignedIn = Annotated[Session, Depends(_session)]
"""Dependency that gives a handler the session of the request."""

Form = Annotated[dict[str, str], Depends(_form)]
"""Dependency that gives a handler the fields of a page's form, after the form's token was checked."""

Decider = Annotated[Session, Depends(_decider)]
"""Dependency that gives a handler the session of an operator; a user of another role is answered 403."""


def for_machines(request: Request) -> bool:
    """Return whether a request's path serves programs rather than pages.

    Args:
        request: The request.

    Returns:
        True for the API, metrics, health check and static files.
    """
    path: str = request.scope["path"]
    return path.startswith(("/api/", "/metrics", "/healthz", "/static/"))


def check_origin(request: Request) -> None:
    """Refuse a request that a browser sends from a page of another site.

    Browsers state the origin in ``Sec-Fetch-Site`` or ``Origin``. A request without both headers passes.

    Args:
        request: The request.

    Raises:
        HTTPException: 403 if it comes from another site.
    """
    site = request.headers.get("sec-fetch-site")
    origin = request.headers.get("origin")
    foreign = site not in (None, "same-origin", "none")
    if origin is not None:
        foreign = foreign or origin.partition("://")[2] != request.headers.get("host")
    if foreign:
        raise HTTPException(403, "the request comes from another site")


def _check_token(session: Session, token: str | None) -> None:
    """Answer 403 unless a changing request sent the session's token."""
    if token is None or not hmac.compare_digest(token.encode(), session.csrf.encode()):
        raise HTTPException(403, "the form's token is not this session's; reload the page and try again")


async def read_form(request: Request) -> dict[str, str]:
    """Return the fields of an urlencoded form.

    Args:
        request: The request.

    Returns:
        The fields by name; of several fields with one name, the last.

    Raises:
        HTTPException: 415 for another content type, 400 for an unreadable form.
    """
    if not request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        raise HTTPException(415, "a form must be sent as application/x-www-form-urlencoded")
    try:
        return dict(parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError as error:
        raise HTTPException(400, "the form cannot be read") from error


def local_path(target: str | None) -> str:
    """Return a path of this dashboard that is safe to redirect to.

    Args:
        target: The requested path, if any.

    Returns:
        ``target`` if it is a path of this dashboard other than the sign-in, else ``/``.

    >>> local_path("/study"), local_path("https://example.org/")
    ('/study', '/')
    """
    if not target or not target.startswith("/") or target.startswith(("//", "/\\")) or not target.isprintable():
        return "/"
    parts = urlsplit(target)
    return "/" if parts.scheme or parts.netloc or parts.path == "/login" else target
