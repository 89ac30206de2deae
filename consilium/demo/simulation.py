"""A study without daemons: every hospital's worker and the server's run in this process, on the directories of a demo.

Messages are signed, sealed, charged and received as in a federation; only what carries them is left out. One person
holds every party's data and keys here, so it promises nobody anything: no certificate is made of it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from client.operations.serve import open_worker
from common.events import read_events
from consilium.demo.federation import admit, agree, introduce
from consilium.in_process import Wire
from server.aggregation.pipeline import run_study
from server.operations.supervisor import POLL_S, OnEvent
from server.study.workspace import Workspace

FIRST_NODE = 1 << 32
"""Of the numbers that SuperLink would give the sites' nodes."""


def simulate(workspace: Workspace, sites: Mapping[str, Path], *, on_event: OnEvent) -> None:
    """Admit the sites, open their workers and run the study to its end; after a crash the same goes on from the ledger.

    No reply waits for the end of a tick: there is nobody who could watch the clock.
    """
    names = list(sites)
    agree(sites)
    admit(workspace, sites, register=lambda _key, name: FIRST_NODE + names.index(name))
    if workspace.study().privacy.sealed:
        introduce(workspace, dict(sites))
    nodes = {site.name: site.node_id for site in workspace.registered()}
    workers = {
        nodes[name]: open_worker(directory, sleep=lambda _s: None, fetch=workspace.objects.get)
        for name, directory in sites.items()
    }
    with _told(workspace, on_event):
        run_study(workspace, Wire(workers), run="simulation")


@contextmanager
def _told(workspace: Workspace, on_event: OnEvent) -> Iterator[None]:
    """Pass events on while the run writes them, and the last ones at its end."""
    seen = sum(1 for _ in read_events(workspace.events_file))
    ended = threading.Event()

    def tell() -> None:
        nonlocal seen
        while True:
            last = ended.wait(POLL_S)
            events = list(read_events(workspace.events_file))
            for event in events[seen:]:
                on_event(event)
            seen = len(events)
            if last:
                return

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
