"""Keeps open pages up to date: renders each page once for all its readers, and sends only the blocks that changed.

The API's event stream uses it. The live part of a page consists of named blocks of HTML. A background task renders the
blocks of all open pages after each change of the read model, and every few seconds for values that depend on the time.
The readers of a page then receive the blocks that changed. The cost of rendering does not depend on the number of
readers. If a page cannot be rendered, its readers receive the event ``stale``, and the task tries again; other pages
are not affected.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated

from server.dashboard.security import of_app

PERIOD_S = 1.0
TICK_S = 5.0
HEARTBEAT_S = 15.0
MOST_STREAMS = 100
"""Largest number of open event streams of one user. A page without a stream polls every few seconds."""

ALIVE = b"event: alive\ndata: {}\n\n"
"""Event that is sent while nothing changes. A page that receives no event for 40 s shows that it is out of date."""

logger = logging.getLogger(__name__)

Render = Callable[[str], dict[str, str]]


@dataclass(slots=True)
class _Page:
    seq: int = 0
    blocks: dict[str, str] = field(default_factory=dict)
    full: bytes = b""
    changed: bytes = b""
    readers: int = 0
    failed: bool = False


class Live:
    """Renders the blocks of every open page, and streams the changed ones to the page's readers.

    Args:
        render: Returns the HTML of a page's blocks by name; called in a thread.
        version: Returns a number that grows when the study changes.
    """

    def __init__(self, render: Render, *, version: Callable[[], int]) -> None:
        self.render, self._version = render, version
        self._pages: dict[str, _Page] = {}
        self.open: Counter[str] = Counter()
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Keep open pages up to date until the task that runs this method is cancelled."""
        seen, rendered_at = -1, 0.0
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            version, now = self._version(), loop.time()
            if version != seen or now - rendered_at >= TICK_S:
                seen, rendered_at = version, now
                await self._refresh()
            await asyncio.sleep(PERIOD_S)

    async def _refresh(self) -> None:
        for name, page in list(self._pages.items()):
            if page.readers:
                await self._render(name, page)
        if not any(page.readers for page in self._pages.values()):
            self._wanted.clear()
        self._news.set()
        self._news = asyncio.Event()

    async def _render(self, name: str, page: _Page) -> None:
        try:
            blocks = await asyncio.to_thread(self.render, name)
        except Exception:
            logger.exception("page=%s render=failed", name)
            page.failed = True
        else:
            page.failed = False
            changed = {name: html for name, html in blocks.items() if page.blocks.get(name) != html}
            if changed or not page.seq:
                page.seq += 1
                page.blocks = blocks
                page.changed = message(page.seq, changed)
                page.full = message(page.seq, blocks)

    async def stream(self, name: str, *, user: str, allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yield server-sent events for one reader of a page.

        Args:
            name: Name of the page.
            user: Name of the user.
            allowed: Called before each event; when it returns False, the stream ends with the event ``signed-out``.

        Yields:
            The events: first all blocks of the page, then the changed ones.
        """
        page = self._pages.setdefault(name, _Page())
        page.readers += 1
        self.open[user] += 1
        try:
            await self._render(name, page)
            self._wanted.set()
            yield b"retry: 3000\n\n" + (page.full or ALIVE)
            sent = page.seq
            while True:
                news = self._news
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), timeout=HEARTBEAT_S)
                if not allowed():
                    yield b"event: signed-out\ndata: {}\n\n"
                    return
                if page.failed:
                    yield b"event: stale\ndata: {}\n\n"
                elif page.seq == sent:
                    yield ALIVE
                else:
                    yield page.changed if page.seq == sent + 1 else page.full
                    sent = page.seq
        finally:
            page.readers -= 1
            self.open[user] -= 1
            self.open += Counter()  # drops users without an open stream


def message(seq: int, blocks: Mapping[str, str]) -> bytes:
    """Return a server-sent event that carries blocks.

    Args:
        seq: Number of the event.
        blocks: HTML of each block by name.

    Returns:
        The event of type ``blocks``, with JSON data.
    """
    data = json.dumps({"seq": seq, "blocks": dict(blocks)}, ensure_ascii=False)
    return f"event: blocks\nid: {seq}\ndata: {data}\n\n".encode()


LivePages = Annotated[Live, of_app("live")]
"""The live pages of the dashboard that serves a request."""
