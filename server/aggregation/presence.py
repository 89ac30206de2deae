"""Waits for sites to come online before an offer, and notes which of them answer messages.

The aggregators use it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from common.config import Study
from server.aggregation.batch import Batch
from server.aggregation.exchange import Transport, VerifiedReply
from server.study.workspace import Site

RETURN_S = 10.0
"""Longest wait in seconds, before each batch, for a reply from the sites that left their newest message unanswered."""


class Presence:
    """Tracks which sites do not come online and which do not answer messages, in one run.

    Args:
        study: The study; ``collection.offer_deadline_s`` is the longest wait.
        clock: Returns seconds.

    Attributes:
        silent: Names of the sites whose newest reply is missing, unreadable or unsigned.
    """

    def __init__(self, study: Study, *, clock: Callable[[], float]) -> None:
        self._study, self._clock = study, clock
        self._away: frozenset[int] = frozenset()
        self.silent: frozenset[str] = frozenset()

    def note_answered(self, heard: VerifiedReply) -> None:
        """Note whether a site answered a message.

        Args:
            heard: Its reply, or the reason why there is none.
        """
        name = frozenset({heard.site.name})
        self.silent = self.silent | name if heard.message is None else self.silent - name

    def await_sites(self, sites: Sequence[Site], batch: Batch, transport: Transport) -> frozenset[int]:
        """Wait until all these sites are online or the deadline has passed.

        A site that stays offline until the deadline is not waited for in later calls, if the others reach the quorum.
        Once it has been online again, calls wait for it.

        Args:
            sites: The sites.
            batch: The batch that they are to be offered; the wait for each is added to :attr:`Batch.waited`.
            transport: Tells which nodes are online.

        Returns:
            The ids of the sites' nodes that are online.
        """
        expected = frozenset(site.node_id for site in sites)
        looked = self._clock()
        until = looked + self._study.collection.offer_deadline_s
        while True:
            online = transport.online() & expected
            self._away -= online
            enough = len(online) >= self._study.privacy.quorum and online | self._away >= expected
            if enough or online == expected:
                return online
            if self._clock() >= until:
                self._away |= expected - online
                return online
            time.sleep(0.5)
            before, looked = looked, self._clock()
            for site in sites:
                if site.node_id not in online:
                    batch.waited[site.name] += looked - before
