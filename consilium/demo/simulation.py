"""Runs a study without daemons: all hospitals' workers and the server in this process, on the directories of a demo.

Messages are signed, encrypted, charged and received as in a federation; only the network is left out. One person holds
every party's data and keys, so a simulation protects nobody and no certificate is made.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from client.operations.serve import open_worker
from common.events import EventTail
from consilium.demo.federation import admit, agree, introduce
from consilium.in_process import Wire
from server.aggregation.pipeline import run_study
from server.operations.supervisor import POLL_S, OnEvent
from server.study.workspace import Workspace

FIRST_NODE = 1 << 32
"""Node id of the first site. The others have the next numbers; in a federation SuperLink assigns the ids."""


def simulate(workspace: Workspace, sites: Mapping[str, Path], *, on_event: OnEvent) -> None:
    """Admit the sites, open their workers and run the study to its end.

    After a crash the next call continues from the ledger. Unlike in a federation, replies are not delayed to fixed
    times, because nobody can observe when they are sent.

    Args:
        workspace: The study's directory.
        sites: Directory of each hospital by name.
        on_event: Called with each event of the study.
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
    with _passing_events(workspace, on_event):
        run_study(workspace, Wire(workers), run="simulation")


@contextmanager
def _passing_events(workspace: Workspace, on_event: OnEvent) -> Iterator[None]:
    """Call ``on_event`` with the events that the run writes, while it runs."""
    tail, ended = EventTail(workspace.events_file, from_end=True), threading.Event()

    def tell() -> None:
        last = False
        while not last:
            last = ended.wait(POLL_S)
            for event in tail.new():
                on_event(event)

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
