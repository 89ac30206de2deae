"""Limits what one admitted site may have in progress at the gateway, so that it cannot block others.

Counts requests and bytes of bodies per site and in all. A request beyond its share waits while others of its site end;
:class:`Refused` ``busy`` where too many wait or too much is under way, which asks an honest sender to come again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import Refused

AT_ONCE = 8
"""Requests of a site that are answered at the same time."""

WAITING = 64
"""Requests of a site that wait for their turn; their bodies are not read."""

SITE_BODY_BYTES = 96 << 20
"""Bodies of a site that have begun and not ended; one message's largest object is 64 MiB."""

ALL_BODY_BYTES = 384 << 20

WAIT_S = 30.0


class Share:
    """One site's requests in progress and the bytes of their bodies."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._bytes = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Hold one of the site's turns."""
        if self._waiting >= WAITING:
            raise Refused("busy")
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise Refused("busy") from error
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    def take(self, count: int) -> None:
        """Count ``count`` bytes of a body as under way."""
        if self._bytes + count > SITE_BODY_BYTES or self._shares.bytes + count > ALL_BODY_BYTES:
            raise Refused("busy")
        self._bytes += count
        self._shares.bytes += count

    def give_back(self, count: int) -> None:
        """The body ended, one way or another."""
        self._bytes -= count
        self._shares.bytes -= count


class Shares:
    """The shares of all sites; as many as there are admitted ones."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sites: dict[str, Share] = {}

    def of(self, site: str) -> Share:
        """The share of an admitted site."""
        return self._sites.setdefault(site, Share(self))
