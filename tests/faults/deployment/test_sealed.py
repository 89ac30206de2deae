"""Eight hospitals of a sealed sum: one dies between offer and code and comes back, one dies for good."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from common.privacy.mechanism import AccountantName
from server.ledger.server_ledger import Ledger
from tests.faults.deployment.parts import (
    BATCH,
    PRIVACY,
    QUERIES,
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


@pytest.fixture
def parties(tmp_path: Path) -> Iterator[Federation]:
    if not namespaces_work():
        pytest.skip("needs root and network namespaces")
    made = make_parties(tmp_path / "made", sites=SITES, privacy=SEALED, patience_s=PATIENCE_S)
    with federation(made, tmp_path / "running", sites=SITES) as one:
        yield one


def has_accepted(parties: Federation, site: str) -> None:
    """Wait until a site has accepted one more batch, whose codes nobody has asked it for."""
    before = len(accepted(parties, site))
    parties.until(lambda: len(accepted(parties, site)) > before, f"{site} accepts a batch", timeout_s=TRUTH_S)


def accepted(parties: Federation, site: str) -> list[dict]:
    return [event for event in parties.events("offer-answered") if event["site"] == site and event["accepted"]]


def test_who_comes_back_completes_the_sum_and_who_does_not_costs_one_draw(parties: Federation) -> None:
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
        exact = ledger.study_guarantees(study.id)[AccountantName.EXACT].epsilon
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
