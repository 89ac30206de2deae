"""Serves the routes for machines: health check, Prometheus metrics and the API's OpenAPI description.

The application mounts the routes of this module. ``/healthz`` is open to everybody; ``/metrics`` needs a session or the
metrics token.
"""

from __future__ import annotations

import hmac

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from common.errors import InvalidInput
from server.dashboard.metrics import exposition
from server.dashboard.read_model import SILENT_S
from server.dashboard.security import SessionReader
from server.dashboard.service import Here

routes = APIRouter(include_in_schema=False)


@routes.get("/healthz")
async def health(request: Request, service: Here) -> JSONResponse:
    """Report whether the dashboard follows the study and whether users can sign in.

    The answer states nothing about the study itself. The route uses no worker thread, so it answers even if all worker
    threads are busy.

    Args:
        request: The request.
        service: The dashboard's service.

    Returns:
        JSON with each check; status 200 if all hold, else 503.
    """
    follower, sign_in = service.follower, request.app.state.sign_in
    following = follower.problem is None and follower.silent_s < SILENT_S
    try:
        sign_in.users.users()
        users = True
    except (InvalidInput, OSError):
        users = False
    readable = follower.ledger.problem is None
    ok = following and readable and users
    facts = {
        "ok": ok,
        "following": following,
        "up_to_date": follower.looked is not None and follower.ledger.complete,
        "ledger_readable": readable,
        "users_readable": users,
    }
    return JSONResponse(facts, status_code=200 if ok else 503)


@routes.get("/metrics")
def metrics(request: Request, service: Here) -> Response:
    """Return the metrics in Prometheus' text format.

    Args:
        request: The request, with a session or the metrics token as a bearer token.
        service: The dashboard's service.

    Returns:
        The metrics.

    Raises:
        HTTPException: 401 without a session and without the token.
    """
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
    token: str | None = request.app.state.metrics_token
    gate: SessionReader = request.app.state.gate
    if not (token and hmac.compare_digest(given, token.encode())) and gate.session(request) is None:
        raise HTTPException(
            401,
            "sign in, or send the metrics token as `Authorization: Bearer TOKEN`",
            headers={"www-authenticate": "Bearer"},
        )
    text, kind = exposition(service)
    return Response(text, media_type=kind)


@routes.get("/api/openapi.json")
def openapi(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())
