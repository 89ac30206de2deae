"""``GET /public/<sha256>``: the public objects of a study over TLS, and nothing else.

Refuses every other path and method. Only what was put into the object store by content hash can be read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from common.errors import InvalidInput
from common.objects import ObjectStore


def objects_app(store: ObjectStore) -> Starlette:
    """The ASGI application over ``store``."""

    def public(request: Request) -> Response:
        try:
            data = store.get(request.path_params["name"])
        except InvalidInput:
            return PlainTextResponse("no such object\n", status_code=404)
        return Response(
            data,
            media_type="application/octet-stream",
            headers={"Cache-Control": "public, max-age=31536000, immutable"},
        )

    def health(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    return Starlette(routes=[Route("/public/{name}", public), Route("/health", health)])


def main() -> None:
    """``python -m server.objects_app``: serve a study's public objects until stopped."""
    parser = argparse.ArgumentParser(description="Serve a study's public objects over TLS")
    parser.add_argument("--objects", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--certificate", type=Path, required=True)
    parser.add_argument("--key", type=Path, required=True)
    arguments = parser.parse_args()
    uvicorn.run(
        objects_app(ObjectStore(arguments.objects)),
        host=arguments.host,
        port=arguments.port,
        ssl_certfile=str(arguments.certificate),
        ssl_keyfile=str(arguments.key),
        log_level="warning",
    )


if __name__ == "__main__":
    main()
