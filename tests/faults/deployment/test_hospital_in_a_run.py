"""Tests three dishonest hospitals in a run of real daemons, each with its own attack.

The run ends with the honest hospitals' answers, every attacker is named with a reason, and SuperLink's disk does not
fill.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from common.config import CollectionConfig
from common.process import DaemonSpec, base_env
from server.operations.supervisor import start_run
from server.study.status import study_status
from tests.attacks import rogue_node
from tests.e2e.daemons import running
from tests.e2e.road import QUERIES, Road, build

pytestmark = pytest.mark.faults

ROOT = Path(__file__).resolve().parents[3]
HONEST = ("north", "south")
ROGUES = {"brook": "missing_child", "cliff": "never_comes", "delta": "flood"}
REASONS = {"brook": {"malformed"}, "cliff": {"malformed"}, "delta": {"malformed", "unsigned"}}
"""Reasons that the events may state for each site. Of the flood, one reply is read; it is complete but unsigned."""
COLLECTION = CollectionConfig(batch_size=QUERIES // 2, offer_deadline_s=90, deadline_s=60, patience_s=60)
"""Waits for the second attacker's reply as long as the patience, which takes most of the test's time.

On a busy machine the flood's 60 MiB take longer than 30 s.
"""
MOST_STORED = 2 * rogue_node.FLOOD_BYTES + (48 << 20)
"""Room for one reply of the flood, in the database and in the log before it, and for everything else."""


def rogue(road: Road, name: str, *, said: Path) -> DaemonSpec:
    """Return a program that attacks with the site's own node key and worker."""
    (launcher,) = (d for d in road.federation.group.daemons if (d.spec.role, d.spec.name) == ("launcher", name))
    words = dict(pairwise(launcher.spec.argv))
    node = road.sites[name] / "node"
    return DaemonSpec(
        role="rogue",
        name=name,
        argv=(
            *(sys.executable, "-m", "tests.attacks.rogue_node", "--attack", ROGUES[name], "--said", str(said)),
            *("--superlink", road.workspace.endpoint().superlink, "--authority", str(node / "ca.crt")),
            *("--key", str(node / "keys" / "node"), "--socket", words["--socket"]),
        ),
        env=base_env(PYTHONPATH=str(ROOT), FLWR_HOME=str(said.with_suffix(".home")), FLWR_TELEMETRY_ENABLED="0"),
        cwd=said.parent,
        log=said.with_suffix(".log"),
    )


def stored(road: Road) -> int:
    return sum(path.stat().st_size for path in (road.workspace.root / "flower").glob("superlink.db*"))


def test_a_run_ends_with_the_honest_answers_and_names_whoever_spoils_floods_or_stalls(tmp_path: Path) -> None:
    workspace, sites = build(tmp_path / "road", [*HONEST, *ROGUES], collection=COLLECTION)
    with running(workspace, sites) as federation:
        road = Road(root=tmp_path, workspace=workspace, sites=sites, federation=federation)
        group = federation.group
        for name in ROGUES:
            spec = rogue(road, name, said=tmp_path / name)
            for daemon in [d for d in group.daemons if d.spec.name == name and d.spec.role != "worker"]:
                group.stop(daemon)
            group.start(spec)
        started, largest = time.monotonic(), 0
        start_run(workspace)
        said_of_brook: dict[str, str] = {}
        while not (ended := road.events("run-finished") + road.events("run-failed")):
            assert time.monotonic() - started < 300
            group.check()
            largest = max(largest, stored(road))
            if not said_of_brook and road.events("reply-missing"):
                said_of_brook = dict(study_status(workspace).sites["brook"].newest)
            time.sleep(0.2)
    assert ended[0]["event"] == "run-finished", ended
    assert len(road.answers()) == QUERIES
    received = [event for event in road.events("reply-received") if event["codes"]]
    assert {event["site"] for event in received} == set(HONEST)
    (stalled,) = (e for e in road.events("reply-missing") if (e["site"], e["reason"]) == ("cliff", "malformed"))
    first = [event["seq"] for event in received if event["batch"] == stalled["batch"]]
    assert len(first) == len(HONEST)
    assert max(first) < stalled["seq"]  # honest replies did not wait for the one that never comes
    missing: dict[str, set[str]] = {name: set() for name in ROGUES}
    for event in road.events("reply-missing"):
        missing[event["site"]].add(event["reason"])
    assert all(missing[name] & REASONS[name] for name in ROGUES), missing
    assert (said_of_brook["event"], said_of_brook["reason"]) == ("reply-missing", "malformed")
    assert [batch.roster for batch in study_status(workspace).batches][1:] == [HONEST]
    assert int((tmp_path / "delta").read_text()) < 2 * rogue_node.FLOOD_BYTES  # one reply a question
    refused = (tmp_path / "delta.log").read_text()
    assert "refused the wide tree" in refused
    assert "refused 413" in refused  # the tree of 13,000 names
    assert rogue_node.FLOOD_BYTES < largest < MOST_STORED < rogue_node.FLOOD * rogue_node.FLOOD_BYTES
