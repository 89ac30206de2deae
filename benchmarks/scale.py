"""Measures a hundred volumes over 100 and 1,000 sites, and the growth of memory, ledger and event log with queries.

Sites answer with a recorded code through a transport in the same process; the server's time is counted separately.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.run import RATIO, Figure, figure, measured_alone

DIMENSION = 64


def figures() -> Iterator[Figure]:
    """Yield the figures of both federations, then of 1,000 and 4,000 queries over eight sites."""
    for sites in (100, 1_000):
        found = measured_alone("benchmarks.core", sites, DIMENSION, 100)
        aim = "below 60" if sites == 1_000 else ""
        yield figure(f"server's processor, {sites:,} sites, 100 volumes", [found["server_s"]], "s", aim=aim)
        share = found["stages"]["receipts"] / found["server_s"]
        yield Figure(f"receipts in it, {sites:,} sites, 100 volumes", round(share, 4), RATIO, 0.03, aim="at most .1")
        yield figure(f"bytes to sites, {sites:,} sites, 100 volumes", [found["to_sites_bytes"]], "B")
        yield figure(f"memory, {sites:,} sites, 100 volumes", [found["rss_mib"]], "MiB")
    few, many = (measured_alone("benchmarks.core", 8, DIMENSION, queries) for queries in (1_000, 4_000))
    for what, name in (("ledger_bytes", "ledger"), ("events_bytes", "event log")):
        yield figure(f"growth of the {name} a query, 8 sites", [(many[what] - few[what]) / 3_000], "B")
    yield figure("growth of memory a query, 8 sites", [1024 * (many["rss_mib"] - few["rss_mib"]) / 3_000], "KiB")
    ratio = many["server_s"] / 4_000 / (few["server_s"] / 1_000)
    yield Figure("processor a query at 4,000 over 1,000 queries", round(ratio, 4), RATIO, 0.2)
