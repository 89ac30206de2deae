"""Limits how many requests and body bytes one admitted site may have in progress at the gateway.

The gateway counts requests and body bytes per site and in total, so that no site can block the others. A request beyond
the site's limit waits until others of the same site end. :class:`Refused` ``busy`` is raised if too many requests wait
or too many bytes are in transit; a SuperNode then tries again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from common.errors import Refused

AT_ONCE = 8
"""Requests of one site that are served at the same time."""

WAITING = 64
"""Largest number of requests of one site that wait to be served. Their bodies are not read while they wait."""

SITE_BODY_BYTES = 96 << 20
"""Largest number of body bytes of one site in transit at a time; the largest object of a message has 64 MiB."""

ALL_BODY_BYTES = 384 << 20
"""Largest number of body bytes of all sites in transit at a time."""

WAIT_S = 30.0
"""Seconds that a request waits to be served before it is refused as busy."""


class Share:
    """One site's requests in progress and body bytes in transit."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._waiting = 0
        self._bytes = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until fewer than :data:`AT_ONCE` requests of the site are served, and count one more during the block.

        Raises:
            Refused: ``busy`` if :data:`WAITING` requests wait already, or after :data:`WAIT_S` of waiting.
        """
        if self._waiting >= WAITING:
            raise Refused(
                "busy",
                "the site is too busy: too many of its requests wait; to fix: nothing to do, the site tries again",
            )
        self._waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise Refused(
                "busy", "the site is too busy: its request waited too long; to fix: nothing to do, the site tries again"
            ) from error
        finally:
            self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    def take(self, count: int) -> None:
        """Count body bytes as in transit.

        Args:
            count: Number of bytes.

        Raises:
            Refused: ``busy`` if the site's or the total limit would be exceeded; nothing is counted then.
        """
        if self._bytes + count > SITE_BODY_BYTES or self._shares.bytes + count > ALL_BODY_BYTES:
            raise Refused(
                "busy",
                "the server is too busy: too many body bytes are in transit; to fix: nothing to do, the site tries "
                "again",
            )
        self._bytes += count
        self._shares.bytes += count

    def give_back(self, count: int) -> None:
        """Subtract the bytes of a body that has ended or was abandoned from those in transit.

        Args:
            count: Number of bytes.
        """
        self._bytes -= count
        self._shares.bytes -= count


class Shares:
    """The :class:`Share` of every admitted site, and the body bytes of all sites together."""

    def __init__(self) -> None:
        self.bytes = 0
        self._sites: dict[str, Share] = {}

    def of(self, site: str) -> Share:
        """Return the share of an admitted site.

        Args:
            site: Name of the site.

        Returns:
            The share; it is created at first use.
        """
        return self._sites.setdefault(site, Share(self))
