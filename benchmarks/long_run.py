"""Measures memory, ledgers and event log over ten thousand queries in one run, and the dashboard afterwards.

Workers, site ledgers, sealing and core are the real ones in one process, so their memory is counted together; teachers
and transport are the tests' stubs. There are four sites, fifty queries to a batch, and no daily limit below the run.
Without a browser the dashboard is left out.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import sync_playwright

from benchmarks.dashboard import costs, state
from benchmarks.run import RATIO, Figure, figure, memory_mib
from common.config import CollectionConfig, render_study
from common.events import EventLog
from consilium.in_process import Wire
from server.aggregation.exchange import Reply
from server.study.workspace import Workspace
from tests.browser.conftest import ARGUMENTS, CHROMIUM, serving
from tests.federation import Federation, make_study

QUERIES, SITES, BATCH = 10_000, 4, 50
EARLY = QUERIES // 5


class Measured(Wire):
    """Keeps no reply, and records memory and processor time at each message."""

    def __init__(self, workers: Mapping[int, object]) -> None:
        super().__init__(workers)  # type: ignore[arg-type]
        self.seen: list[tuple[float, float]] = []

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        self.replies.clear()
        self.seen.append((memory_mib(), time.process_time()))
        return super().exchange(bodies, timeout_s=timeout_s)


def figures() -> Iterator[Figure]:
    """Yield everything that this part measures."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        root = Path(folder)
        study = replace(make_study(planned_queries=QUERIES), collection=CollectionConfig(batch_size=BATCH))
        federation = Federation(root, study=study, sites=SITES, queries_per_day=QUERIES)
        transport = Measured(federation.workers)
        EventLog(federation.events_file, study=study.id).emit("run-started", run="1", pid=1, resumed=False)
        federation.core().run(transport)
        federation.close()
        yield from _growth(federation, transport)
        if not CHROMIUM.exists():
            return
        workspace = Workspace(root)
        workspace.study_file.write_text(render_study(study), encoding="utf-8")
        workspace.save_sites(federation.sites)
        with sync_playwright() as run, serving(root, state(root / "state")) as dashboard:
            browser = run.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
            yield from costs(browser, dashboard, of=f"{QUERIES:,} queries")
            browser.close()


def _growth(federation: Federation, transport: Measured) -> Iterator[Figure]:
    """Yield memory and processor time of the last fifth beside the second fifth, and the growth of files."""
    fifth = len(transport.seen) // 5
    memory, spent = zip(*transport.seen, strict=True)
    early, late = statistics.median(memory[fifth : 2 * fifth]), statistics.median(memory[-fifth:])
    yield Figure(f"memory after {EARLY:,} queries", round(memory[fifth], 1), "MiB")
    yield Figure(f"memory after {QUERIES:,} queries", round(memory[-1], 1), "MiB")
    yield Figure("memory in the last fifth over the second", round(late / early, 4), RATIO, 0.05)
    paces = [spent[2 * fifth] - spent[fifth], spent[-1] - spent[-1 - fifth]]
    yield Figure("processor in the last fifth over the second", round(paces[1] / paces[0], 4), RATIO, 0.2)
    yield Figure("processor a query, sites and all", round(1000 * spent[-1] / QUERIES, 3), "ms")
    files = {"ledger": [federation.root / "ledger.sqlite"], "event log": [federation.events_file]}
    files["a site's ledger"] = [federation.root / site.name / "site-ledger.sqlite" for site in federation.sites]
    for name, paths in files.items():
        yield figure(f"growth of {name} a query", [path.stat().st_size / QUERIES for path in paths], "B")
