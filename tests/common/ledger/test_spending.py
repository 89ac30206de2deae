"""Tests spent and guaranteed ε, which come from the ledger's totals: reused answers and recovered charges
count.

The oracle is the analytic Gaussian formula in scipy, on how often noise was drawn.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from math import exp, sqrt
from pathlib import Path
from typing import Any

import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from common.config import parse_study
from common.ledger.charges import StudyTerms
from common.ledger.spending import Spending
from common.study_mechanism import study_mechanism
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.study.templates import template
from tests.backups import put_copy
from tests.common.ledger.ledger_world import (
    BUDGET,
    SITES,
    World,
    batch_receipts,
    ledger_study,
    make_mechanism,
    make_query,
    put_back,
    rolled_back,
    saved,
)

MECHANISM = make_mechanism(room_for=10)
POOL = "aachen-mri"


def epsilon(mu: float, delta: float = BUDGET.delta) -> float:
    """Return ε by Balle & Wang 2018, Theorem 8, solved by bisection."""
    return float(brentq(lambda e: norm.cdf(mu / 2 - e / mu) - exp(e) * norm.cdf(-mu / 2 - e / mu) - delta, 0, 200))


def mu_of(draws: int) -> float:
    return sqrt(draws) * 2 * MECHANISM.radius_int / float(MECHANISM.noise_std)


def recovered(world: World, tmp_path: Path) -> Spending:
    """Return the spending after 10 answers, a restored older copy, 8 more answers and a recovery from receipts."""
    old = saved(world, tmp_path / "monday")
    world.release([make_query(n, MECHANISM) for n in range(10)], batch="b1")
    receipts = batch_receipts(world.ledger, "b1")
    rolled_back(world, old)
    world.release([make_query(n, MECHANISM) for n in range(8)], batch="b2")
    world.ledger.recover(receipts)
    assert len(world.answers.drawn) == 18
    return world.ledger.study_spending(world.study.id)


def test_where_recovered_charges_pass_a_budget_what_was_spent_is_guaranteed(world: World, tmp_path: Path) -> None:
    found = recovered(world, tmp_path)
    assert found.passed
    assert found.budget.epsilon == 8.0
    assert found.spent.epsilon == pytest.approx(epsilon(mu_of(18)), rel=1e-6)
    assert found.guaranteed == found.spent
    assert found.odds_guaranteed == found.odds_spent == pytest.approx(norm.cdf(mu_of(18) / 2), rel=1e-9)
    assert "ε = 8 " in (found.warning or "")
    assert found.groups()[0].epsilon == found.spent.epsilon


def test_what_is_left_is_planned_and_fits_the_budgets_of_a_quorum(tmp_path: Path) -> None:
    """Ten answers are planned and paid for. Three are drawn twice, so only four of the missing seven fit."""
    study = ledger_study(planned_queries=10)
    mechanism, pools = study_mechanism(study, dimension=4), [f"{site}-mri" for site in SITES]
    world = World.create(tmp_path, study=study)

    def left(of: Sequence[str] = pools) -> int:
        return world.ledger.study_facts(study, asked=of).answers_left

    old = saved(world, tmp_path / "monday")
    assert left() == 10
    world.release([make_query(n, mechanism) for n in range(3)], batch="b1")
    assert left() == 7
    receipts = batch_receipts(world.ledger, "b1")
    rolled_back(world, old)
    world.reopen()
    world.release([make_query(n, mechanism) for n in range(3)], batch="b2")
    world.ledger.recover(receipts)
    assert left() == left([]) == left(["new-mri"]) == 4
    assert left(["new-mri", "other-mri"]) == 7, "two hospitals that nobody has asked yet"
    assert re.search("3 of 10 planned; .* 4 of the 7 left", world.ledger.study_facts(study).answers_line)
    world.release([make_query(n, mechanism) for n in range(3, 5)], batch="b3", sites=SITES[:2])
    assert [world.ledger.study_facts(study).pools[pool].room for pool in pools] == [2, 2, 4]
    assert left() == 2
    put_back(world, tmp_path / "monday" / "ledger.sqlite")
    with Ledger.open(world.path) as older:
        facts = older.study_facts(study, asked=pools)
    assert (facts.answers_left, facts.unanswered) == (0, 10), "more may have been spent than is known"
    assert "not known" in facts.answers_line


def test_within_a_budget_the_budget_is_guaranteed(world: World) -> None:
    assert world.ledger.study_spending(world.study.id).spent.epsilon == 0
    world.release([make_query(n, MECHANISM) for n in range(4)])
    found = world.ledger.study_spending(world.study.id)
    assert (found.guaranteed.epsilon, found.warning, found.passed) == (8.0, None, False)
    assert found.spent.epsilon == pytest.approx(epsilon(mu_of(4)), rel=1e-6)
    assert found.odds_spent == pytest.approx(norm.cdf(mu_of(4) / 2), rel=1e-9)
    assert found.odds_spent < found.odds_guaranteed


def test_a_study_that_only_uses_anothers_answers_has_spent_what_they_cost(world: World) -> None:
    queries = [make_query(n, MECHANISM) for n in range(10)]
    world.release(queries)
    second = replace(ledger_study(), name="second")
    world.ledger.register_study(second)
    world.release(queries, batch="b2", study=second.id)
    assert len(world.answers.drawn) == 10
    found = world.ledger.study_spending(second.id)
    assert found.spent.epsilon == pytest.approx(epsilon(mu_of(10)), rel=1e-6)
    assert found.largest_roster == 3
    assert world.ledger.pool_spending(POOL).spent.epsilon == pytest.approx(epsilon(mu_of(10)), rel=1e-6)


def test_a_pool_has_spent_what_all_studies_drew_from_it(world: World) -> None:
    second = replace(ledger_study(), name="second")
    world.ledger.register_study(second)
    world.release([make_query(1, MECHANISM), make_query(2, MECHANISM)])
    world.release([make_query(3, MECHANISM)], batch="b2", study=second.id)
    assert world.ledger.pool_spending(POOL).spent.epsilon == pytest.approx(epsilon(mu_of(3)), rel=1e-6)
    assert world.ledger.study_spending(second.id).spent.epsilon == pytest.approx(epsilon(mu_of(1)), rel=1e-6)


def test_nothing_is_known_to_be_guaranteed_while_the_ledger_is_an_older_copy(world: World, tmp_path: Path) -> None:
    backup(world.path, tmp_path / "monday.sqlite")
    world.release([make_query(1, MECHANISM)])
    world.ledger.close()
    put_copy(tmp_path / "monday.sqlite", world.path)
    world.ledger = Ledger.open(world.path)
    assert "older copy" in (world.ledger.study_spending(world.study.id).doubt or "")
    assert "nothing is known" in (world.ledger.pool_spending(POOL).warning or "")


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"epsilon": 8, "delta": 1e-5, "accountant": "rdp"},
        {"unit": "patient", "voters_per_site": 4},
        {"aggregation": "sealed-sum", "quorum": 5, "colluders": 2, "spare_draws": 3},
    ],
)
def test_terms_are_the_same_from_a_study_and_from_its_consent_text(terms: dict[str, Any]) -> None:
    study = parse_study(template("paper-pca"))
    study = replace(study, privacy=replace(study.privacy, **terms))
    assert repr(StudyTerms.of(study)) == repr(StudyTerms.from_json(study.to_json()))
