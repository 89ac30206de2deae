"""Tests a sealed sum of eight hospitals: one dies between offer and code and comes back, and another dies for good.

It runs once with phantoms and one query for each volume, and once in four rounds of a joint query with the MSD
hippocampus data, if they are present (fixture ``hippocampus``). With those data, the collection's time is also compared
with the open mode's.
"""

from __future__ import annotations

import os
import signal
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from client.site.registry import STATE_DIR
from common.privacy.mechanism import AccountantName
from server.ledger.server_ledger import Ledger
from tests.faults.deployment.parts import (
    BATCH,
    PRIVACY,
    QUERIES,
    STARTED_S,
    TRUTH_S,
    Federation,
    federation,
    make_parties,
    namespaces_work,
)

pytestmark = [pytest.mark.faults, pytest.mark.slow]

SITES = tuple(f"site-{number}" for number in range(1, 9))
SEALED = replace(PRIVACY, quorum=5, aggregation="sealed-sum", spare_draws=2 * BATCH)
PATIENCE_S = 90.0
ROUNDS = 4
JOINT = replace(SEALED, planned_queries=ROUNDS, spare_draws=1)


@pytest.fixture(autouse=True)
def namespaces() -> None:
    if not namespaces_work():
        pytest.skip("needs root and network namespaces")


@pytest.fixture
def parties(tmp_path: Path) -> Iterator[Federation]:
    made = make_parties(tmp_path / "made", sites=SITES, privacy=SEALED, patience_s=PATIENCE_S)
    with federation(made, tmp_path / "running", sites=SITES) as one:
        yield one


def has_accepted(parties: Federation, site: str) -> None:
    """Wait until a site has accepted one more batch whose codes nobody has requested yet."""
    before = len(accepted(parties, site))
    parties.until(lambda: len(accepted(parties, site)) > before, f"{site} accepts a batch", timeout_s=TRUTH_S)


def accepted(parties: Federation, site: str) -> list[dict]:
    return [event for event in parties.events("offer-answered") if event["site"] == site and event["accepted"]]


def test_a_site_that_comes_back_completes_the_sum_and_one_that_does_not_costs_one_draw(parties: Federation) -> None:
    late, gone = "site-2", "site-8"
    parties.up()
    parties.start_run()
    parties.wait("released")
    has_accepted(parties, late)
    os.kill(parties.parties[late].pid("worker"), signal.SIGKILL)
    parties.wait("released", count=len(parties.events("released")) + 2, timeout_s=TRUTH_S + PATIENCE_S)
    assert parties.events("draw-lost") == []
    has_accepted(parties, gone)
    os.kill(parties.parties[gone].pid("worker"), signal.SIGSTOP)  # its node is there, and no code comes
    parties.wait("batch-dispatched", count=len(parties.events("batch-dispatched")) + 1, timeout_s=TRUTH_S)
    parties.stop(gone, signal.SIGKILL)
    lost = parties.wait("draw-lost", timeout_s=TRUTH_S + PATIENCE_S)
    assert (lost["sites"], lost["reason"], len(lost["queries"])) == ([gone], "incomplete", BATCH)
    assert parties.finish_run() == 0, parties.tails()

    assert len(parties.events("draw-lost")) == 1
    study = parties.workspace.study()
    with Ledger.open(parties.workspace.ledger_file) as ledger:
        answers = ledger.answers(study.id)
        exact = ledger.study_spending(study.id).readings()[AccountantName.EXACT].epsilon
        spent = {name: ledger.spent(name) for name in SITES}
    assert len(answers) == QUERIES
    assert [gone in {entry.site for entry in answer.roster} for answer in answers].count(False) >= BATCH
    one = answers[0].query.mechanism.mu_squared(study.privacy.protection)
    for name in SITES:
        if name != gone:
            assert spent[name].mu_squared == (QUERIES + BATCH) * one
            with SiteLedger.read(parties.root / name / "site-ledger.sqlite") as own:
                assert own.spent().mu_squared == spent[name].mu_squared, name
                assert own.alarms() == ()
    with SiteLedger.read(parties.root / gone / "site-ledger.sqlite") as own:
        assert own.spent().mu_squared <= spent[gone].mu_squared < spent[late].mu_squared
    assert exact <= 8
    for path in (parties.workspace.ledger_file, *(parties.root / name / "site-ledger.sqlite" for name in SITES)):
        verified = parties.command("verify", str(path))
        assert verified.returncode == 0, verified.stdout + verified.stderr


def test_four_rounds_on_hippocampus_end_with_one_late_and_one_gone(tmp_path: Path, hippocampus: Path) -> None:
    late, gone, slow = "site-2", "site-8", "site-3"
    made = make_parties(tmp_path / "made", sites=SITES, privacy=JOINT, patience_s=PATIENCE_S, scans=hippocampus)
    with federation(made, tmp_path / "running", sites=SITES) as parties:
        parties.up()
        parties.start_run()
        dies_between_offer_and_code(parties, late, slow=slow)
        parties.wait("released", count=2, timeout_s=STARTED_S)
        assert parties.events("draw-lost") == []
        dies_between_offer_and_code(parties, gone, slow=slow, for_good=True)
        lost = parties.wait("draw-lost", timeout_s=TRUTH_S + PATIENCE_S)
        assert (lost["sites"], lost["reason"], len(lost["queries"])) == ([gone], "incomplete", 1)
        assert parties.finish_run() == 0, parties.tails()
        study = parties.workspace.study()
        with Ledger.open(parties.workspace.ledger_file) as ledger:
            answers = ledger.answers(study.id)
            exact = ledger.study_spending(study.id).readings()[AccountantName.EXACT].epsilon
            spent = {name: ledger.spent(name) for name in SITES}
        assert len(answers) == ROUNDS
        assert 8 * 0.999 <= exact <= 8  # the draw to spare was used up
        for name in SITES:
            with SiteLedger.read(parties.root / name / "site-ledger.sqlite") as own:
                assert own.spent().mu_squared <= spent[name].mu_squared
                assert name == gone or own.spent().mu_squared == spent[name].mu_squared, name
                assert own.alarms() == ()
        for path in (parties.workspace.ledger_file, *(parties.root / n / "site-ledger.sqlite" for n in SITES)):
            verified = parties.command("verify", str(path))
            assert verified.returncode == 0, verified.stdout + verified.stderr


def dies_between_offer_and_code(parties: Federation, site: str, *, slow: str, for_good: bool = False) -> None:
    """Kill a site's worker after it accepted a draw and before codes are requested; ``slow`` delays the request."""
    stopped, before = parties.parties[slow].pid("worker"), len(accepted(parties, slow))
    os.kill(stopped, signal.SIGSTOP)
    try:
        has_accepted(parties, site)
        assert len(accepted(parties, slow)) == before
        if for_good:
            parties.stop(site, signal.SIGKILL)
        else:
            os.kill(parties.parties[site].pid("worker"), signal.SIGKILL)
    finally:
        os.kill(stopped, signal.SIGCONT)


def test_a_sealed_sum_takes_no_longer_than_an_open_one_when_nobody_dies(
    tmp_path: Path, hippocampus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test measures the time from the first offer to the last answer, twice for each mode, in turn."""
    modes = {"open": replace(PRIVACY, quorum=5, planned_queries=ROUNDS), "sealed": replace(JOINT, spare_draws=0)}
    made = {}
    for mode, privacy in modes.items():
        monkeypatch.setenv(STATE_DIR, str(tmp_path / f"state-{mode}"))  # else one pool would be begun twice
        made[mode] = make_parties(tmp_path / mode, sites=SITES, privacy=privacy, scans=hippocampus)
    seconds: dict[str, list[float]] = {mode: [] for mode in modes}
    for turn in range(2):
        for mode, parts in made.items():
            with federation(parts, tmp_path / f"{mode}-{turn}", sites=SITES) as parties:
                parties.up()
                parties.start_run()
                parties.wait("offer-answered", timeout_s=STARTED_S)
                started = time.monotonic()
                parties.wait("released", count=ROUNDS, timeout_s=STARTED_S)
                seconds[mode].append(time.monotonic() - started)
                assert parties.finish_run() == 0, parties.tails()
    print(f"collection of {ROUNDS} rounds by {len(SITES)} hospitals, seconds: {seconds}")
    assert statistics.median(seconds["sealed"]) <= 1.15 * statistics.median(seconds["open"])
