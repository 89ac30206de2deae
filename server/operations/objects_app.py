"""``GET /public/<sha256>`` and ``GET /public/students/<study id>``: a study's public objects, and nothing else.

The gateway puts it behind TLS and keys. Refuses every other path and method. What is named by a hash was put into the
object store by it and never changes, so an interrupted download goes on where it stopped (``Range``). A student's entry
is the signed statement that names its bundle; it changes when the student is exported anew.
"""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route

from common.canonical import check_hash
from common.errors import InvalidInput
from common.objects import ObjectStore

STUDENTS = "students"


def statement_file(objects: Path, study_id: str) -> Path:
    """Where the statement about a study's student lies, below the object store's directory."""
    return objects / STUDENTS / check_hash(study_id)


def objects_app(directory: Path) -> Starlette:
    """The ASGI application over the object store in ``directory``."""
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

    def student(request: Request) -> Response:
        try:
            data = statement_file(directory, request.path_params["study"]).read_bytes()
        except (InvalidInput, OSError):
            return _missing()
        return Response(data, media_type="application/json", headers={"Cache-Control": "no-cache"})

    return Starlette(routes=[Route(f"/public/{STUDENTS}/{{study}}", student), Route("/public/{name}", public)])


def _missing() -> Response:
    return PlainTextResponse("no such object\n", status_code=404)
