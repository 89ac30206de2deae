"""The JSON under every page, and the event stream of the live ones."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, HTTPException, Request
from fastapi import Path as InPath
from fastapi.responses import StreamingResponse

from server.dashboard import views
from server.dashboard.live import Live, Render
from server.dashboard.pages import LIVE
from server.dashboard.security import Gate
from server.dashboard.service import Service

PageName = Annotated[str, InPath(description="A live page.", pattern="^[a-z]{1,16}$")]


def router(service: Service, gate: Gate, live: Live, render: Render) -> APIRouter:
    """Every route below ``/api``."""
    routes = APIRouter(prefix="/api", responses={401: {"description": "Not signed in"}})

    @routes.get("/overview", tags=["study"])
    def overview(request: Request) -> views.Overview:
        """Budget, sites, run, alarms: the first page."""
        gate.for_api(request)
        return service.overview()

    @routes.get("/blocks/{page}", tags=["live"])
    def blocks(request: Request, page: PageName) -> dict[str, dict[str, str]]:
        """The blocks of a live page as they stand: what a page asks for where event streams do not get through."""
        gate.for_api(request)
        check_live(page)
        return {"blocks": render(page)}

    @routes.get("/live/{page}", tags=["live"], response_class=StreamingResponse)
    def stream(request: Request, page: PageName) -> StreamingResponse:
        """Server-sent events: the blocks of a page that changed, as HTML in JSON."""
        gate.for_api(request)
        check_live(page)

        def allowed() -> bool:
            return gate.session(request) is not None

        async def events() -> AsyncIterator[bytes]:
            async for chunk in live.stream(page, allowed=allowed):
                yield chunk

        return StreamingResponse(events(), media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    return routes


def check_live(page: str) -> None:
    if page not in LIVE:
        raise HTTPException(404, f"no live page of that name; there are {', '.join(LIVE)}")
