"""Answers machines: whether the dashboard follows the study, its metrics, and the API's description.

It refuses ``/metrics`` without a session or the metrics token.
"""

from __future__ import annotations

import hmac

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import JSONResponse, Response

from common.errors import InvalidInput
from server.dashboard.metrics import exposition
from server.dashboard.read_model import SILENT_S
from server.dashboard.security import Gate
from server.dashboard.service import Here

routes = APIRouter(include_in_schema=False)


@routes.get("/healthz")
async def health(request: Request, service: Here) -> JSONResponse:
    """Whether the process follows the study and people can sign in; says nothing about the study itself.

    It uses no worker thread, so it answers even if all of them are busy.
    """
    follower, door = service.follower, request.app.state.door
    following = follower.problem is None and follower.silent_s < SILENT_S
    try:
        door.users.users()
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
    """Return the metrics as Prometheus text, to a signed-in user or a bearer of the metrics token."""
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
    token: str | None = request.app.state.metrics_token
    gate: Gate = request.app.state.gate
    if not (token and hmac.compare_digest(given, token.encode())) and gate.session(request) is None:
        raise HTTPException(401, "give the metrics token as a bearer", headers={"www-authenticate": "Bearer"})
    text, kind = exposition(service)
    return Response(text, media_type=kind)


@routes.get("/api/openapi.json")
def openapi(request: Request) -> JSONResponse:
    return JSONResponse(request.app.openapi())
