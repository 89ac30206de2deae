"""Determines from the event log which sites a run waits for, and which of them are slow.

The status command and the dashboard use it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from common.wording import duration, many

SLOW_REMEDY = (
    "Ask its staff whether the machine is busy, or the connection slow. If it stays slow, the study can continue "
    "without the site: `consilium provision revoke`, if the quorum remains."
)


class Waiting:
    """What the newest run waits for, by the events so far.

    Attributes:
        sites: Names of the sites that were asked for codes in the newest attempt and have sent none yet.
        since: Time at which the first of them was asked.
        slow: By site, one entry for each ``site-slow`` event of the newest run: the seconds that the run waited for the
            site, and the median for the other sites.
    """

    def __init__(self) -> None:
        self.sites: set[str] = set()
        self.since = ""
        self.slow: dict[str, list[tuple[float, float]]] = {}

    def enter(self, event: Mapping[str, Any]) -> None:
        """Change the state by one more event of the log.

        Args:
            event: The event.
        """
        match event["event"]:
            case "run-started":
                self.sites, self.slow = set(), {}
            case "batch-dispatched":
                self.since = self.since if self.sites else event["time"]
                self.sites = set(event.get("asked", ()))
            case "reply-received":
                self.sites.discard(event["site"])
            case "site-slow":
                self.slow.setdefault(event["site"], []).append((event["seconds"], event["usual_seconds"]))
            case "released" | "draw-lost" | "quorum-missed" | "stage-finished" | "run-finished" | "run-failed":
                self.sites = set()

    def slow_words(self, site: str) -> str:
        """State in how many batches the newest run waited for a slow site, and how long it waited most recently.

        The sentence compares the most recent wait with the median wait for the other sites.

        Args:
            site: Name of a site in :attr:`slow`.

        Returns:
            The sentence, without a full stop.
        """
        seconds, usual = self.slow[site][-1]
        factor = f"{seconds / usual:,.0f} times" if usual >= 0.1 else "against"
        batches = many(len(self.slow[site]), "batch", "batches")
        return (
            f"{site} is slow: in {batches} of the newest run, the run waited much longer for it than for the others; "
            f"most recently {duration(seconds)}, {factor} the others' median of {duration(usual)}"
        )
