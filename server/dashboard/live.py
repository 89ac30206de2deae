"""Live pages: rendered once for everybody, only the blocks that changed are sent.

A page's live part is a few named blocks of HTML. A task renders the blocks of pages that somebody has open whenever the
read model changed, and every few seconds for what time alone changes; each open page is then sent the blocks that
differ from the ones it has. That costs one rendering however many pages are open. A page that cannot be rendered is
told so and tried again; the others go on.
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

from fastapi import Depends, Request

PERIOD_S = 1.0
TICK_S = 5.0
HEARTBEAT_S = 15.0
MOST_STREAMS = 100
"""Of a user at once; a page that gets none asks every few seconds."""

ALIVE = b"event: alive\ndata: {}\n\n"
"""Tells a page that nothing changed: without it for long the page knows that nobody is there."""

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
    """Blocks of every open page. ``render`` gives a page's blocks and runs in a thread of its own."""

    def __init__(self, render: Render, *, version: Callable[[], int]) -> None:
        self.render, self._version = render, version
        self._pages: dict[str, _Page] = {}
        self.open: Counter[str] = Counter()
        self._news = asyncio.Event()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Keep open pages up to date until cancelled."""
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
            self._update(page, blocks)

    @staticmethod
    def _update(page: _Page, blocks: Mapping[str, str]) -> None:
        changed = {name: html for name, html in blocks.items() if page.blocks.get(name) != html}
        if changed or not page.seq:
            page.seq += 1
            page.blocks = dict(blocks)
            page.changed = message(page.seq, changed)
            page.full = message(page.seq, blocks)

    async def stream(self, name: str, *, user: str, allowed: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Server-sent events for one reader of a page; ends with ``signed-out`` once ``allowed`` says no."""
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
            self.open += Counter()  # without users who have none


def message(seq: int, blocks: Mapping[str, str]) -> bytes:
    """One server-sent event with the blocks as JSON."""
    data = json.dumps({"seq": seq, "blocks": dict(blocks)}, ensure_ascii=False)
    return f"event: blocks\nid: {seq}\ndata: {data}\n\n".encode()


async def _live(request: Request) -> Live:
    live: Live = request.app.state.live
    return live


LivePages = Annotated[Live, Depends(_live)]
"""The live pages of the dashboard that a request reached."""
