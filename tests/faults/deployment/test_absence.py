"""Tests absence over real daemons: a site down from the start, one killed during a batch, one past its deadline."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from common.config import CollectionConfig
from common.events import read_events
from consilium.demo.federation import admit
from server.ledger.server_ledger import Ledger
from server.operations.supervisor import start_run
from server.study.workspace import Workspace
from tests.e2e.daemons import running
from tests.e2e.road import QUERIES, build
from tests.waiting import until

pytestmark = pytest.mark.faults

UP = ("killed", "slow", "well-a", "well-b")
COLLECTION = CollectionConfig(batch_size=QUERIES // 2, offer_deadline_s=20.0, deadline_s=5.0, patience_s=25.0)


def told(workspace: Workspace, kind: str, **facts: object) -> list[dict]:
    events = (event for event in read_events(workspace.events_file) if event["event"] == kind)
    return [event for event in events if facts.items() <= event.items()]


def test_a_study_ends_with_the_roster_it_says_whoever_was_absent(tmp_path: Path) -> None:
    workspace, directories = build(tmp_path, ("down", *UP), collection=COLLECTION)
    with running(workspace, {name: directories[name] for name in UP}) as federation:
        admit(workspace, {"down": directories["down"]})
        pids = {
            role: dict(zip(UP, (d.pid for d in federation.group.daemons if d.spec.role == role), strict=True))
            for role in ("worker", "launcher", "supernode")
        }
        start_run(workspace)
        for name in ("killed", "slow"):
            until(lambda name=name: bool(told(workspace, "offer-answered", site=name, accepted=True)))
            os.kill(pids["worker"][name], signal.SIGSTOP)
        until(lambda: bool(told(workspace, "batch-dispatched")))
        for role in pids:
            os.kill(pids[role]["killed"], signal.SIGKILL)
        until(lambda: bool(told(workspace, "released")))
        os.kill(pids["worker"]["slow"], signal.SIGCONT)
        until(lambda: bool(told(workspace, "run-finished") + told(workspace, "run-failed")))

    assert told(workspace, "run-failed") == []
    released = told(workspace, "released")
    with Ledger.open(workspace.ledger_file) as ledger:
        answers = ledger.answers(workspace.study().id)
        spent = {name: ledger.spent(f"{name}/patients").releases for name in directories}
    rosters = {answer.query.id: [entry.site for entry in answer.roster] for answer in answers}
    assert rosters == {query: event["roster"] for event in released for query in event["queries"]}
    assert len(rosters) == QUERIES
    first, second = (event["roster"] for event in released)
    assert first == list(UP), "decided before anybody computed"
    assert {"well-a", "well-b"} <= set(second) <= {"slow", "well-a", "well-b"}
    assert [event["voters"] for event in released] == [len(first), len(second)]
    assert spent == {name: QUERIES // 2 * sum(name in event["roster"] for event in released) for name in directories}
    assert {event["site"] for event in told(workspace, "reply-received", batch=released[0]["batch"])} == set(UP[2:])
    assert {event["reason"] for event in told(workspace, "offer-answered", site="down")} == {"offline"}
