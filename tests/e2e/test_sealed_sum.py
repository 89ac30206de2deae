"""Tests a sealed sum over real Flower daemons: hospitals that confirmed each other, and one that did not.

The tests search the server's disk and memory for the sites' codes, which the server must never receive.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from client.ledger.site_ledger import SiteLedger
from client.site.peers import distrust
from client.site.status import site_status
from common.config import CollectionConfig
from common.privacy.mechanism import AccountantName
from server.ledger.verify import verify
from server.operations.supervisor import start_run
from tests.commands import run_here
from tests.e2e.daemons import running
from tests.e2e.road import (
    PRIVACY,
    QUERIES,
    Road,
    build,
    files_now,
    found_in,
    known_codes,
    memory_of,
    memory_with_one_reply,
)

pytestmark = pytest.mark.slow

NAMES = tuple(f"site-{k}" for k in range(4))
STRANGER = NAMES[-1]
SEALED = replace(PRIVACY, quorum=3, aggregation="sealed-sum", spare_draws=2)


@pytest.fixture(scope="module")
def road(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Road]:
    """Run the study to its end. Before the run, the last hospital took back its confirmations of all peers."""
    root = tmp_path_factory.mktemp("sealed")
    workspace, sites = build(root, NAMES, collection=CollectionConfig(), privacy=SEALED)
    with running(workspace, sites) as federation:
        road = Road(root=root, workspace=workspace, sites=sites, federation=federation)
        for name in NAMES[:-1]:
            distrust(sites[STRANGER], name)
        start_run(workspace)
        (root / "one-reply").write_bytes(memory_with_one_reply(road))
        road.wait("released")
        pid = road.events("run-started")[-1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        try:
            (root / "memory").write_bytes(memory_of(pid))
        finally:
            os.kill(pid, signal.SIGCONT)
        road.wait("run-finished")
        yield road


def test_those_who_confirmed_each_other_answer_everything_and_the_ledgers_agree(road: Road) -> None:
    study = road.workspace.study().id
    assert len(road.answers()) == QUERIES
    with road.ledger() as ledger:
        assert {entry.site for answer in ledger.answers(study) for entry in answer.roster} == set(NAMES[:-1])
        guarantee = ledger.study_spending(study).readings()[AccountantName.EXACT]
        spent = {name: ledger.spent(f"{name}/patients") for name in NAMES}
    assert guarantee.epsilon < 8  # two spare draws are unused
    assert spent[STRANGER].mu_squared == 0
    for name, directory in road.sites.items():
        with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
            assert ledger.spent().mu_squared == spent[name].mu_squared, name
            receipted = {query for receipt in ledger.receipts() for query in receipt.query_ids}
            assert receipted == (set() if name == STRANGER else set(road.answers()))
            assert ledger.alarms() == ()
        report = verify(directory / "site-ledger.sqlite")
        assert report.ok, report.problems
    report = verify(road.workspace.ledger_file)
    assert report.ok, report.problems


def test_heads_are_countersigned_at_the_end_of_the_run_and_verify_counts_the_witnesses(road: Road) -> None:
    """All sites countersign the server's head. A hospital's head is countersigned by the peers that confirmed it."""
    found = json.loads(run_here("verify", str(road.workspace.root), "--json").stdout)["countersigned"]
    assert (sorted(found["witnesses"]), found["size"], found["problems"]) == (list(NAMES), found["rows"], [])
    assert {event["site"] for event in road.events("witnessed")} == set(NAMES)
    assert road.events("witness-missing") == road.events("witness-disagrees") == []
    own = json.loads(run_here("verify", str(road.sites[NAMES[0]]), "--json").stdout)["countersigned"]
    assert sorted(own["witnesses"]) == list(NAMES[1:-1])


def test_a_hospital_that_confirmed_nobody_sends_nothing_and_is_told_what_to_do(road: Road) -> None:
    answered = {(e["accepted"], e["reason"]) for e in road.events("offer-answered") if e["site"] == STRANGER}
    assert answered == {(False, "unknown-peers")}
    with SiteLedger.read(road.sites[STRANGER] / "site-ledger.sqlite") as ledger:
        assert {row.kind for row in ledger.rows()}.isdisjoint({"code", "reservation", "draw"})
    peers = site_status(road.sites[STRANGER])["peers"]
    assert isinstance(peers, dict)
    assert all(name in str(peers["problems"]) for name in NAMES[:-1])
    shown = json.loads(run_here("site", "peers", "--site-dir", str(road.sites[STRANGER]), "--json").stdout)
    assert {(peer["standing"], "an offer" in peer["heard"]) for peer in shown["peers"]} == {("NOT CONFIRMED", True)}


def test_the_list_of_peers_fetched_over_the_network_shows_them_confirmed(road: Road) -> None:
    shown = run_here("site", "peers", "--site-dir", str(road.sites[NAMES[0]]), "--fetch", "--json")
    assert shown.returncode == 0, shown.stderr
    assert {peer["standing"] for peer in json.loads(shown.stdout)["peers"]} == {"confirmed"}


def test_a_dispute_about_a_draw_of_honest_hospitals_finds_nobody(road: Road) -> None:
    study, auditor = str(road.workspace.root), road.root / "auditor"
    assert run_here("dispute", "keys", str(auditor)).returncode == 0
    draw = run_here("dispute", "evidence", study).stdout.split()[0]
    evidence = road.root / "evidence.json"
    assert run_here("dispute", "evidence", study, draw, "--out", str(evidence)).returncode == 0
    files = [road.disclosed(name, draw, auditor) for name in NAMES[:-1]]
    done = run_here(
        *("dispute", "judge", str(evidence), *files, "--keys", str(auditor)),
        *("--peers", str(road.peers_file), "--out", str(road.root / "judged.json"), "--json"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert {(one["disclosure"], one["part"]) for one in json.loads(done.stdout)["findings"]} == {("true", "within")}


def test_no_code_is_on_the_servers_disk_or_in_its_memory_after_the_release(road: Road) -> None:
    sites = [road.sites[name] for name in NAMES[:-1]]
    codes = known_codes(sites, road.answers())
    assert len(codes) >= len(sites)
    for path, content in files_now([road.workspace.root, *(site / "node" for site in sites)]):
        assert not found_in(content, codes), path
    assert not found_in((road.root / "one-reply").read_bytes(), codes)
    memory = (road.root / "memory").read_bytes()
    assert not found_in(memory, codes)
    # The search finds the sum, which the server may know.
    assert any(answer in memory for answer in road.answers().values())


def test_no_code_of_a_hospital_is_in_the_memory_of_any_daemon_but_its_own(road: Road) -> None:
    """After the run, memory of SuperLink, core, relay, gateway and all other hospitals' daemons is searched."""
    codes = known_codes([road.sites[NAMES[0]]], road.answers())[:1]
    held: dict[str, bool] = {}
    for daemon in road.federation.group.daemons:
        held[daemon.spec.label] = any(found_in(memory_of(pid), codes) for pid in sorted(daemon.members()))
    assert len(held) >= 5 + 3 * len(NAMES)
    assert {label for label, found in held.items() if found} == {f"worker {NAMES[0]}"}  # the search finds it there
