"""``GET /public/<sha256>``: the public objects of a study, and nothing else. The gateway puts it behind TLS and keys.

Refuses every other path and method. Only what was put into the object store by content hash can be read. An object
never changes, so an interrupted download goes on where it stopped (``Range``).
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.errors import InvalidInput
from common.objects import ObjectStore


def objects_app(store: ObjectStore) -> Starlette:
    """The ASGI application over ``store``."""

    def public(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            path = store.path(name)
        except InvalidInput:
            return PlainTextResponse("no such object\n", status_code=404)
        return FileResponse(
            path,
            media_type="application/octet-stream",
            headers={"Cache-Control": "private, max-age=31536000, immutable", "ETag": f'"{name}"'},
        )

    return Starlette(routes=[Route("/public/{name}", public)])
