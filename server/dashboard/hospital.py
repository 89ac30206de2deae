"""Serves a hospital's own page, which shows the state of its site, on the loopback address of the site's machine.

``consilium site dashboard`` calls it and prints the address with an access key. The page changes nothing. It uses the
dashboard's templates, static files and security headers. Its content is a :class:`~common.hospital_page.OwnPage`, which
the client package makes. Every method but GET is refused, and so are host names other than this machine's and requests
without the key.
"""

from __future__ import annotations

import hmac
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.staticfiles import StaticFiles

from common.errors import ConsiliumError, InvalidInput
from common.hospital_page import OwnPage, ShownCase
from common.plain import RESEARCH_ONLY
from common.planes import PlaneName
from server.dashboard.pictures import PictureLayer, draw
from server.dashboard.screens import HERE, environment, error_page, viewer_planes
from server.dashboard.security import SecureHeaders, SmallBodies
from server.operations.exact import KnownHosts, SingleContentLength

COOKIE = "consilium-site"
LAYERS: tuple[PictureLayer, ...] = ("label", "student", "own", "adapted", "none")
THUMB = 260

STATES = {
    "alarm": ("bad", "Alarm: nothing is answered"),
    "away": ("bad", "Not connected: nothing is answered"),
    "unconsented": ("warn", "Nobody consented: nothing is answered"),
    "paused": ("warn", "Paused"),
    "withdrawn": ("warn", "Withdrawn for good"),
    "spent": ("warn", "Budget spent"),
    "answering": ("good", "Answering"),
    "joined": ("", "Consented, nothing answered yet"),
}
"""CSS class and text of each state of a site."""

REASONS = {
    "pool-budget": "this site's own cap does not cover the batch",
    "study-budget": "the study's budget does not cover the batch",
    "coordinates": "the pool's releases would together contain more noisy numbers than δ allows",
    "paused": "the study is paused here, or this site left it",
    "alarm": "this site's own ledger raised an alarm",
    "daily-cap": "this site's own daily cap is reached",
    "not-allowed": "this site's policy does not allow these queries",
    "released-before": "the queries were released before; the server's ledger may have been restored",
}
"""Text of each reason for declining an offer, by the word for the reason in the site's ledger."""


def create_hospital_app(page: OwnPage, *, key: str) -> FastAPI:
    """Create the ASGI application of a hospital's own page.

    Args:
        page: The content.
        key: Access key. The first request sends it as ``?key=``; a cookie holds it afterwards.

    Returns:
        The application; it answers requests for loopback host names only.
    """
    templates = environment()

    async def admitted(request: Request) -> None:
        path: str = request.scope["path"]
        if _same(request.cookies.get(COOKIE), key):
            return
        if not _same(request.query_params.get("key"), key):
            raise HTTPException(
                403, "open the address that `consilium site dashboard` printed; it contains the access key"
            )
        answer = {"location": path, "set-cookie": f"{COOKIE}={key}; Path=/; HttpOnly; SameSite=Strict"}
        raise HTTPException(303, headers=answer)

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, dependencies=[Depends(admitted)])
    app.add_middleware(SmallBodies)
    app.add_middleware(KnownHosts, hosts=lambda: ())
    app.add_middleware(SingleContentLength)
    app.add_middleware(SecureHeaders, secure=False)

    @app.get("/", response_class=HTMLResponse)
    def shown(case: int = 0) -> str:
        facts = page.facts()
        given = _case_facts(page.case(case - 1), case) if case else None
        names = {one.number: one.name for one in facts.cases}
        level, words = STATES[facts.state]
        text = templates.get_template("hospital.html")
        return text.render(
            facts=facts,
            case=given,
            case_name=names.get(case, str(case)),
            level=level,
            state=words,
            reasons=REASONS,
            research_only=RESEARCH_ONLY,
        )

    @app.get("/api/labels/{number}/voxels")
    def voxels(number: int) -> Response:
        one = page.case(number - 1)
        body = b"".join(array.tobytes(order="F") for array in one.arrays.values())
        return Response(body, media_type="application/octet-stream", headers={"x-arrays": ",".join(one.arrays)})

    @app.get("/api/labels/{number}/slice.png")
    def slice_of(
        number: int, plane: PlaneName, index: int, layer: PictureLayer = "none", side: int = THUMB
    ) -> Response:
        one = page.case(number - 1)
        made = draw(
            dict(one.arrays),
            plane=plane,
            index=index,
            layer=layer,
            spacing_mm=one.spacing_mm,
            side=max(64, min(side, 512)),
        )
        return Response(made, media_type="image/png")

    def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, StarletteHTTPException)
        if error.status_code == 303:
            return RedirectResponse("/", 303, headers=error.headers)
        return said(error.status_code, str(error.detail))

    def refused_by_design(request: Request, error: Exception) -> Response:
        return said(400 if isinstance(error, InvalidInput) else 409, str(error))

    def said(status: int, words: str) -> Response:
        title = "Not allowed" if status == 403 else "That did not work"
        return error_page(status, title, words)

    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    app.add_exception_handler(StarletteHTTPException, refused)
    app.add_exception_handler(ConsiliumError, refused_by_design)
    return app


def _same(given: str | None, key: str) -> bool:
    return given is not None and hmac.compare_digest(given.encode(), key.encode())


def _case_facts(case: ShownCase, number: int) -> dict[str, Any]:
    """Return the template's facts about a case. The first slices shown go through the median of its labelled voxels."""
    import numpy as np

    drawn = np.argwhere(case.arrays["label"] > 0)
    shape = case.arrays["label"].shape
    centre = [int(n) for n in (np.median(drawn, axis=0) if len(drawn) else np.array(shape) // 2)]
    viewed = {"grid": list(shape), "spacing_mm": list(case.spacing_mm), "centre": centre, "labels": list(case.labels)}
    return {
        "number": number,
        "planes": viewer_planes(shape, centre),
        "viewed": viewed,
        "layers": [name for name in LAYERS if name == "none" or name in case.arrays],
        "beside": [name for name in LAYERS if name in case.arrays],
        "dice": case.dice,
        "structures": case.labels[1:],
    }
