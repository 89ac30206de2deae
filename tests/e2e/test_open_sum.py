"""Tests which codes an open study leaves at the server; searches of a sealed study are compared with this."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest

from common.config import CollectionConfig
from server.operations.supervisor import start_run
from tests.e2e.daemons import running
from tests.e2e.road import QUERIES, SITES, Road, build, files_now, found_in, known_codes, memory_with_one_reply

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    root = tmp_path_factory.mktemp("open")
    workspace, sites = build(root, [f"site-{k}" for k in range(SITES)], collection=CollectionConfig())
    with running(workspace, sites) as federation:
        yield Road(root=root, workspace=workspace, sites=sites, federation=federation)


def test_a_code_of_an_open_study_is_in_the_servers_memory_while_it_is_added_up_and_in_no_file_of_superlink(
    road: Road,
) -> None:
    start_run(road.workspace)
    memory = memory_with_one_reply(road)
    road.wait("released")
    first = next(iter(road.sites.values()))
    assert found_in(memory, known_codes([first], road.answers()))
    assert all(known_codes([directory], road.answers()) for directory in road.sites.values())
    codes = known_codes(road.sites.values(), road.answers())
    folders = (road.workspace.root, *(site / "node" for site in road.sites.values()))
    sizes = {}
    for path, content in files_now(folders):
        assert not found_in(content, codes), path
        sizes[path.name] = len(content)
    assert sizes["superlink.db"] > 50_000


def test_a_run_that_is_killed_is_resumed_by_hand_and_nothing_is_charged_twice(road: Road) -> None:
    os.kill(road.events("run-started")[-1]["pid"], signal.SIGKILL)
    stored = road.answers()
    with road.ledger() as ledger:
        spent = {f"{name}/patients": ledger.spent(f"{name}/patients") for name in road.sites}
        rows = ledger.row_count
    result = road.consilium("study", "resume", str(road.workspace.root), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["answers"] == QUERIES == len(stored)
    assert road.answers() == stored
    with road.ledger() as ledger:
        assert {pool: ledger.spent(pool) for pool in spent} == spent
        assert ledger.row_count == rows
    assert [event["resumed"] for event in road.events("run-started")] == [False, True]
