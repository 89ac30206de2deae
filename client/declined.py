"""Remembers the newest declined offer, so that an old offer that is sent again is not accepted.

The worker calls it for every offer, which is the server's announcement of a batch of queries. The server signs each
offer together with the time at which it was made. The site declines an offer as ``stale`` in two cases:

1. The offer is older than an honest delivery can be.
2. The offer was made no later than the newest offer that the site declined before.

Neither rule stops an honest server, because such a server makes a new offer for the queries that it still needs. The
newest declined offer is written to a file before the site replies, so that a restarted worker knows it. If the file
cannot be read, the site acts as if it had declined an offer when the worker started. If the file names a time in the
future, which happens after both clocks were ahead, the site acts as if it had declined an offer now.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from common.canonical import canonical_bytes
from common.config import CollectionConfig
from common.document import Between, Document, OneOf, Sha256
from common.errors import InvalidInput
from common.masking import DrawNumber
from common.messages import MAX_TIME, REASONS, Offer
from common.objects import write_atomically
from common.reading import parse_json

DECLINED = "declined.json"
"""The file of the newest declined offer, in a site's directory."""

CLOCKS_S = 300.0
"""Largest difference between a site's clock and the server's; the gateway refuses a larger one."""

ON_ITS_WAY_S = 60.0
"""Seconds added to the greatest age of an offer, because an offer can wait in Flower's SuperLink and SuperNode."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastDeclined(Document):
    """The newest offer that this site declined, and the reason.

    Attributes:
        study: Id of the study.
        batch: Hash of the batch.
        issued: When the server made the offer, in ms since 1970.
        reason: Why it was declined.
        draw: Number of the draw, which is one attempt at a sealed sum; None in a study without sealed sums.
    """

    SCHEMA: ClassVar = (DECLINED, 1)

    study: Sha256
    batch: Sha256
    issued: Annotated[int, Between("time of an offer", 0, MAX_TIME)]
    reason: Annotated[str, OneOf("reason of a declined offer", REASONS)]
    draw: DrawNumber | None = None


class Declined:
    """Remembers the newest offer that this worker declined, and tells which offers are stale.

    Args:
        collection: The study's deadlines.
        path: File that keeps the newest declined offer; without one it is lost when this object ends.
        now: Seconds since 1970 by this site's clock. If the file cannot be read, the site acts as if it had declined an
            offer made at this time.
    """

    def __init__(self, collection: CollectionConfig, *, path: Path | None = None, now: float = 0.0) -> None:
        self._age_s = max(collection.offer_deadline_s, collection.deadline_s) + ON_ITS_WAY_S + CLOCKS_S
        self._path = path
        self._last: LastDeclined | None = None
        self._newest = -1
        if path is None or not path.exists():
            return
        try:
            self._last = LastDeclined.from_json(parse_json(path.read_bytes(), what=DECLINED))
            self._newest = self._last.issued
        except (OSError, InvalidInput) as error:
            log.warning("event=declined-unreadable cause=%s", type(error).__name__)
            self._newest = int(1000 * now)

    def reason(self, offer: Offer, *, now: float) -> str | None:
        """Return the reason why an offer must be declined: it is stale, or the site declined it before.

        Args:
            offer: The offer that the server signed. An offer without a time is always new.
            now: Seconds since 1970 by this site's clock.

        Returns:
            The reason for declining; None if the offer is new.
        """
        if offer.issued is None:
            return None
        if not -CLOCKS_S <= now - offer.issued / 1000 <= self._age_s:
            return "stale"
        if (last := self._last) is not None:
            declined = last.study, last.batch, last.draw, last.issued
            if declined == (offer.study, offer.batch, offer.draw, offer.issued):
                return last.reason
        if self._newest > 1000 * (now + CLOCKS_S):  # remembered while this site's clock was ahead
            self._newest = int(1000 * now)
        return "stale" if offer.issued <= self._newest else None

    def note(self, offer: Offer, reason: str) -> None:
        """Remember an offer if the site declined it and it is newer than the offer remembered so far.

        Offers that were accepted, or declined as stale, are not remembered. If the file cannot be written, the offer is
        remembered only as long as this object exists.

        Args:
            offer: The offer.
            reason: The site's answer to it.
        """
        if reason in ("accepted", "stale") or offer.issued is None or offer.issued <= self._newest:
            return
        self._newest = offer.issued
        self._last = LastDeclined(
            study=offer.study, batch=offer.batch, issued=offer.issued, reason=reason, draw=offer.draw
        )
        if self._path is None:
            return
        try:
            write_atomically(self._path, canonical_bytes(self._last.to_json()), mode=0o600)
        except OSError as error:
            log.warning("event=declined-not-kept cause=%s", type(error).__name__)
