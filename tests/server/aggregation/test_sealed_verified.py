"""Tests that ``ledger verify`` proves of every draw that its roster's shares add up to the charged noise."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from common.ledger.charges import RosterRecord
from common.privacy import shares
from common.privacy.mechanism import Mechanism
from server.ledger import verify as verifying
from server.ledger.server_draws import AnswersQueries
from tests.federation import Federation, make_study

pytestmark = pytest.mark.slow


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    terms = make_study(quorum=4, planned_queries=2, aggregation="sealed-sum", colluders=2)
    federation = Federation(tmp_path, study=terms, sites=4)
    federation.core().run(federation.transport)
    federation.close()
    return tmp_path / "ledger.sqlite"


def test_every_draw_had_the_noise_its_charge_claims(ledger: Path) -> None:
    report = verifying.verify(ledger)
    assert (report.problems, report.draws) == ((), 2)


@pytest.mark.parametrize("share", [Fraction(99, 100), Fraction(1, 2), Fraction(10**9 - 1, 10**9)])
def test_shares_that_carry_less_than_was_charged_are_found_at_every_draw(
    ledger: Path, share: Fraction, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smaller(mechanism: Mechanism, *, sites: int) -> Fraction:
        return share * shares.share_std(mechanism, sites=sites)

    monkeypatch.setattr(verifying, "share_std", smaller)
    found = verifying.verify(ledger).problems
    assert len(found) == 2
    assert all("less noise" in problem.what for problem in found)


def test_shares_among_all_sites_instead_of_the_honest_are_found(ledger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_count(mechanism: Mechanism, *, sites: int) -> Fraction:
        return shares.share_std(mechanism, sites=sites + 2)

    monkeypatch.setattr(verifying, "share_std", all_count)
    assert len(verifying.verify(ledger).problems) == 2


def test_a_sum_under_the_masks_of_others_than_were_charged_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The operator, who holds the ledger's key, charges four hospitals, but the sum has the masks of three."""
    draw, charge, everybody = AnswersQueries.charge_draw, AnswersQueries._charge_draw, []

    def of_three(self: AnswersQueries, *, roster: Any, masks: Any, **rest: Any) -> Any:
        everybody[:] = [RosterRecord(roster)]
        fewer = tuple(entry for entry in roster if entry.site != "site-3")
        return draw(self, roster=fewer, masks=replace(masks, members=masks.members[:-1]), **rest)

    def to_four(self: AnswersQueries, study: Any, query: Any, _roster: Any, *rest: Any) -> None:
        charge(self, study, query, *everybody, *rest)

    terms = make_study(quorum=3, planned_queries=2, aggregation="sealed-sum")
    federation = Federation(tmp_path, study=terms, sites=4)
    with monkeypatch.context() as patched:
        patched.setattr(AnswersQueries, "charge_draw", of_three)
        patched.setattr(AnswersQueries, "_charge_draw", to_four)
        federation.core().run(federation.transport)
    federation.close()
    found = verifying.verify(tmp_path / "ledger.sqlite").problems
    assert len(found) == 2
    assert all("masks" in problem.what for problem in found)
