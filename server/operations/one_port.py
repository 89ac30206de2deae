"""Serves several studies at one port: a request goes to the study that admitted the key which signed it.

The gateway of one study, the *host*, listens at the port. Beside its list of nodes is a folder with one small file for
each further study that is served at the port. Every study keeps its own SuperLink, core, ledger, objects and list of
admitted nodes, so a site of one study reaches nothing of another. A request signed by an unknown key goes to the host's
study, which refuses it. If a file cannot be read, this is logged, and the studies served before are still served.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import httpx
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from common.canonical import check_hash
from common.document import Document
from common.errors import InvalidInput
from common.node_auth import RequestAdmission, claimed_key
from common.objects import write_json
from common.reading import parse_json

BEHIND = "behind"
"""The folder that lists the studies behind a port, beside the list of nodes of the host's own study."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BehindPort(Document):
    """A study that is served at the port, with the absolute paths that the gateway needs to serve it.

    Attributes:
        study: The study's id, 64 hexadecimal digits; empty for the host, whose id is not needed.
        directory: The study's directory.
        objects: Folder of its object store.
        nodes: File that lists its admitted nodes.
        fleet: Unix socket of its fleet proxy, by which the gateway reaches the study's SuperLink.
    """

    study: str
    directory: str
    objects: str
    nodes: str
    fleet: str


def write_behind(folder: Path, entry: BehindPort) -> None:
    """Add a study to those that the port's gateway serves.

    Args:
        folder: The folder that the host's gateway reads; it is created if missing.
        entry: The study.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(folder / f"{check_hash(entry.study)}.json", entry.to_json())


def read_behind(folder: Path) -> tuple[BehindPort, ...]:
    """Return the studies that :func:`write_behind` added, ordered by study id.

    Args:
        folder: The folder that the host's gateway reads.

    Returns:
        The studies; empty if the folder is missing.

    Raises:
        InvalidInput: If a file in the folder is not a valid entry.
    """
    return tuple(
        BehindPort.from_json(parse_json(path.read_bytes(), what="study behind the port", value=str(path)))
        for path in sorted(folder.glob("*.json"))
    )


@dataclass(frozen=True, slots=True)
class _Served:
    """A study that is being served.

    Attributes:
        keys: The node keys that the study admits.
        app: The study's ASGI application.
        upstream: HTTP client of the study's fleet proxy; it is closed when the study is no longer served.
        folder: Device and inode of the folder of the proxy's socket, which the client holds open.
    """

    keys: RequestAdmission
    app: ASGIApp
    upstream: httpx.AsyncClient
    folder: tuple[int, int] | None


def _folder(entry: BehindPort) -> tuple[int, int] | None:
    try:
        found = Path(entry.fleet).parent.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


Serve = Callable[[BehindPort, RequestAdmission], tuple[ASGIApp, httpx.AsyncClient]]


class OnePort:
    """The ASGI application of the port.

    Args:
        own: The host's study.
        folder: Folder that lists the other studies; it is read again whenever it changes.
        serve: Makes the application of one study, given the study and its admitted keys. It also returns the HTTP
            client by which the application reaches that study's SuperLink.
    """

    def __init__(self, own: BehindPort, *, folder: Path, serve: Serve) -> None:
        self._own, self._folder, self._serve = own, folder, serve
        self._served: dict[BehindPort, _Served] = {}
        self._version: int | None = None
        self._closing: list[asyncio.Task[None]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        served = self._all()
        if not served:  # the host's own directory is not mounted
            await PlainTextResponse("the server is starting\n", status_code=503)(scope, receive, send)
            return
        await _of(scope, served).app(scope, receive, send)

    def _all(self) -> list[_Served]:
        """Return every study that is served now, the host's own first.

        The folder with one entry for each study is read again if it has changed. A study whose directory was replaced,
        for example from a backup, is served anew.
        """
        version = self._folder.stat().st_mtime_ns if self._folder.is_dir() else 0  # entries are renamed into place
        kept = {entry: one for entry, one in self._served.items() if one.folder == _folder(entry)}
        if version != self._version or len(kept) < len(self._served):
            self._version = version
            try:
                listed = [self._own, *read_behind(self._folder)]
            except (InvalidInput, OSError) as error:
                log.error("event=study-unreadable cause=%s", type(error).__name__)
                listed = [self._own, *(entry for entry in self._served if entry != self._own)]
            before = self._served
            self._served = {entry: one for entry in listed if (one := kept.get(entry) or self._begin(entry))}
            for entry, one in before.items():
                if self._served.get(entry) is not one:
                    self._closing.append(asyncio.create_task(one.upstream.aclose()))
        return list(self._served.values())

    def _begin(self, entry: BehindPort) -> _Served | None:
        """Start serving a study. If its directory is not there, return None; the next request tries again."""
        keys, folder = RequestAdmission(Path(entry.nodes), started=datetime.now(UTC)), _folder(entry)
        try:
            app, upstream = self._serve(entry, keys)
        except OSError:  # its directory is not mounted; the next request tries again
            log.warning("event=study-away study=%s", entry.study[:12])
            self._version = None
            return None
        return _Served(keys, app, upstream, folder)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._all()
                await send({"type": "lifespan.startup.complete"})
            else:
                for one in self._served.values():
                    await one.upstream.aclose()
                await send({"type": "lifespan.shutdown.complete"})
                return


def _of(scope: Scope, served: Sequence[_Served]) -> _Served:
    """Return the study that admitted the key which the request names, or the host's study if none did."""
    if len(served) > 1:
        with contextlib.suppress(KeyError, ValueError):
            key = claimed_key(Headers(scope=scope))
            return next((one for one in served if one.keys.knows(key)), served[0])
    return served[0]
