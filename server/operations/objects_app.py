"""Serves a study's public files over HTTP: public objects by their hash, and two files about the study.

The paths are ``/public/<sha256>``, ``/public/students/<study id>`` and ``/public/peers/<study id>``. The gateway serves
them over TLS, to requests signed by admitted node keys. Every other path and method is refused. An object named by its
hash never changes, so an interrupted download can be continued (``Range``). The two files about a study can change: the
signed statement that names its student's bundle, and the list of its sites with their keys.
"""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.errors import InvalidInput
from common.objects import ObjectStore
from server.public.public_files import PEERS, STUDENTS, said_file


def objects_app(directory: Path) -> Starlette:
    """Return the ASGI application that serves the object store in ``directory``.

    Args:
        directory: The study's ``objects/``, with the statements about the study beside the objects.

    Returns:
        The application.
    """
    store = ObjectStore(directory)

    def public(request: Request) -> Response:
        name = request.path_params["name"]
        try:
            path = store.path(name)
        except InvalidInput:
            return _missing()
        return FileResponse(
            path,
            media_type="application/octet-stream",
            headers={"Cache-Control": "private, max-age=31536000, immutable", "ETag": f'"{name}"'},
        )

    def said(what: str) -> Route:
        def of_study(request: Request) -> Response:
            try:
                data = said_file(directory, what, request.path_params["study"]).read_bytes()
            except (InvalidInput, OSError):
                return _missing()
            return Response(data, media_type="application/json", headers={"Cache-Control": "no-cache"})

        return Route(f"/public/{what}/{{study}}", of_study)

    return Starlette(routes=[said(STUDENTS), said(PEERS), Route("/public/{name}", public)])


def _missing() -> Response:
    return PlainTextResponse("no such object\n", status_code=404)
