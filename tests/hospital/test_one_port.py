"""Tests two studies at once over real daemons: one port, one command a party, one pool; one is paused, the
other ends.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from common.sockets import accepts
from consilium.demo.federation import HOST, admit, write_sites
from consilium.demo.training import train_all
from server.ledger.verify import verify
from server.operations.supervisor import RunFailed, daemon_standings, supervise
from server.study.workspace import Workspace
from tests.e2e.consortium import POOL_EPSILON, SITES, Consortium, consortium_of, costs, events
from tests.hospital.parties import consilium, up, wait

pytestmark = pytest.mark.hospital


def test_two_studies_behind_one_port_spend_one_pool_and_end_apart(tmp_path: Path) -> None:
    made: Consortium = consortium_of(tmp_path)
    first, second = made.first, Workspace(tmp_path / "second")
    made.study("first", epsilon=4.0, ledger=None)
    made.sites = write_sites(first, tmp_path / "sites", names=SITES, data=tmp_path / "data")
    train_all(made.sites, seed=0, processes=1, on_steps=lambda done, total: None)
    made.study("second", epsilon=4.0, ledger=first.root, behind=first)
    joined = made.join(second)
    made.set_caps(POOL_EPSILON)

    with contextlib.ExitStack() as parties:
        server = parties.enter_context(up(tmp_path / "server.log", "server", "up", str(first.root), "--bind", HOST))
        wait(tmp_path / "server.log", "server is up", server)
        admit(first, made.sites, pool_epsilon=POOL_EPSILON)
        admit(second, joined)
        for directory in (*made.sites.values(), *joined.values()):
            consilium("site", "consent", "--site-dir", str(directory), "--by", "A. Noether", "--yes")
        consilium("site", "pause", "second", "--site-dir", str(joined["site-1"]))
        for name, directory in made.sites.items():
            log = tmp_path / f"{name}.log"
            wait(log, "connected", parties.enter_context(up(log, "site", "up", "--all", "--site-dir", str(directory))))

        endpoint = first.endpoint()
        assert {second.endpoint().superlink} == {endpoint.superlink}
        assert accepts(HOST, endpoint.port)
        gateways = [one for one in daemon_standings(second) if one.daemon == "gateway"]
        assert [one.state for one in gateways] == ["ready"], "the one that both studies' sites reach"

        with pytest.raises(RunFailed, match="quorum"):
            supervise(second)  # site-1 has paused this study
        assert {(event["site"], event["reason"]) for event in events(second, "offer-answered")} >= {
            ("site-1", "paused")
        }
        supervise(first)
        assert events(first, "run-finished")
        spent = made.spent()
        assert {name: by_server for name, (by_server, _) in spent.items()} == dict.fromkeys(SITES, costs(first))
        assert spent["site-1"][1] == costs(first), "the paused study took nothing here"
        assert spent["site-0"][1] >= costs(first), "this hospital charged what it accepted, too"

        consilium("site", "resume", "second", "--site-dir", str(joined["site-1"]))
        supervise(second)
        total = costs(first) + costs(second)
        spent = made.spent()
        assert {name: by_server for name, (by_server, _) in spent.items()} == dict.fromkeys(SITES, total)
        assert spent["site-1"][1] == total
        assert spent["site-0"][1] >= total
        assert "complete" in consilium("study", "status", str(first.root))
    assert not accepts(HOST, endpoint.port)
    assert not accepts(HOST, second.endpoint().internal_port)
    for path in (first.ledger_file, *(directory / "site-ledger.sqlite" for directory in made.sites.values())):
        assert verify(path).ok
