"""Tests the ε against each party if the noise is drawn in shares, with sums of shares written out as the oracle."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest

from common.config import Study
from common.models.bundle_configs import readme
from common.models.bundle_facts import BundlePrivacy
from common.privacy.accounting import epsilon_exact, max_mu_squared
from common.privacy.coalitions import against_whom, mu_squared_against, spare_sentence
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Relation, Unit
from common.privacy.shares import share_std
from common.study_mechanism import sealed_sentences
from server.study import consent_text
from tests.worlds import make_study

HIDDEN = Protection(Unit.HOSPITAL, Relation.REPLACE_ONE)
BUDGET = Budget(8.0, 1e-3)


def study(**privacy: object) -> Study:
    return make_study(**{"planned_queries": 4, "quorum": 5} | privacy)


SEALED = study(aggregation="sealed-sum", colluders=2, spare_draws=1)


@pytest.mark.parametrize(("sites", "colluders"), [(3, 1), (8, 2), (64, 5), (4, 0)])
def test_what_a_coalition_does_not_know_of_the_noise_is_what_it_is_charged(sites: int, colluders: int) -> None:
    """The remaining variance is the sum over the other sites' shares."""
    mechanism = Mechanism(4, 1 << 16, 1, Fraction(70_001), colluders=colluders)
    share = share_std(mechanism, sites=sites)
    for knowing in range(sites):
        left = sum(share**2 for _ in range(sites - knowing))
        charged = mu_squared_against(mechanism.mu_squared(HIDDEN), sites=sites, colluders=colluders, knowing=knowing)
        exact = Fraction(2 * (1 << 16)) ** 2 / left
        assert exact <= charged <= exact * (1 + Fraction(1, 2**40))


def test_a_party_with_fewer_noise_shares_has_a_smaller_epsilon_and_t_colluders_have_the_budgets() -> None:
    mu_squared = Fraction(40, 10)
    apart, together, more = against_whom(mu_squared, BUDGET, HIDDEN, AccountantName.EXACT, least=5, most=5, colluders=2)
    assert together.epsilon == pytest.approx(epsilon_exact(mu_squared, BUDGET.analytic_delta))
    assert apart.epsilon == pytest.approx(epsilon_exact(mu_squared * 3 / 5, BUDGET.analytic_delta))
    assert more.epsilon == pytest.approx(epsilon_exact(mu_squared * 3 / 2, BUDGET.analytic_delta))


def test_over_rosters_of_several_sizes_each_partys_epsilon_is_that_of_its_worst_roster() -> None:
    """Without a share, the largest roster is the worst; with one share too many, the smallest. The test tries every
    size.
    """
    terms = Fraction(4), BUDGET, HIDDEN, AccountantName.EXACT
    each = [against_whom(*terms, least=sites, most=sites, colluders=1) for sites in range(3, 9)]
    found = against_whom(*terms, least=3, most=8, colluders=1)
    assert found == tuple(max(kind, key=lambda one: one.epsilon) for kind in zip(*each, strict=True))
    assert found[0] != each[0][0]


def test_a_study_of_more_sites_than_its_quorum_tells_the_public_the_noise_of_all_of_them() -> None:
    few, many = (consent_text.for_consortium(SEALED, sites=sites) for sites in (5, 8))
    assert "if 5 hospitals answer" in few
    assert "if 8 hospitals answer" in many
    assert "for 3 hospitals of 5 (" in many
    told = [consent_text.sealed_facts(SEALED, sites=sites)["knowing_no_share"] for sites in (0, 5, 8)]
    assert told[0] == told[1] != told[2]
    limit = max_mu_squared(SEALED.privacy.accountant, BUDGET)
    assert isinstance(told[2], dict)
    assert told[2]["epsilon"] == pytest.approx(epsilon_exact(limit * 6 / 8, BUDGET.analytic_delta))


def test_a_sealed_study_says_against_whom_its_epsilon_holds_what_it_holds_and_what_remains_trusted() -> None:
    for text in (
        consent_text.for_site(SEALED),
        consent_text.for_consortium(SEALED, sites=5),
        readme(SEALED, FACTS, {}),
    ):
        said = " ".join(text.split())
        assert re.search("ε = 8 holds against the server's operator .*any 2 hospitals", said)
        assert "by fingerprint" in said
        assert "4 answers and 1 lost draw" in said
        assert "TRUSTED" not in said
        assert "study's aggregator" not in said


def test_every_epsilon_of_a_sealed_study_stands_with_its_terms() -> None:
    for sentence in sealed_sentences(SEALED):
        if "ε =" in sentence:
            assert all(
                word in sentence for word in ("δ = ", "unit hospital", "relation replace-one", "exact accountant")
            )
    facts = consent_text.facts(SEALED)["sealed_sum"]
    assert isinstance(facts, dict)
    assert facts["knowing_no_share"]["epsilon"] < 8 < facts["knowing_one_more"]["epsilon"]
    assert facts["knowing_the_colluders_shares"]["epsilon"] == pytest.approx(8.0)


def test_the_whole_plan_of_a_sealed_study_counts_the_draws_that_may_be_lost() -> None:
    planned = consent_text.facts(SEALED)["epsilon_of_plan"]
    assert isinstance(planned, dict)
    assert planned["exact"] == pytest.approx(8.0, abs=1e-6)


def test_an_open_study_says_none_of_it() -> None:
    assert sealed_sentences(study()) == ()
    assert "sealed_sum" not in consent_text.facts(study())
    assert "study's aggregator" in readme(study(), FACTS, {})


def test_without_colluders_it_holds_against_the_operator_alone() -> None:
    said = " ".join(sealed_sentences(study(aggregation="sealed-sum", colluders=0)))
    assert "server's operator alone" in said
    assert "no lost draw" in said
    assert "2 lost draws" in spare_sentence(answers=3, spare=2)


FACTS = BundlePrivacy(
    budget_epsilon=8.0,
    epsilon_exact=7.99,
    epsilon_rdp=8.87,
    delta=1e-3,
    protection=HIDDEN,
    accountant=AccountantName.EXACT,
    noise_multiplier=1.92,
    queries=4,
    sites=5,
    voters_per_site=1,
    ledger_head="a" * 64,
    study=SEALED.id,
    codec="c" * 64,
)


def test_an_open_study_says_all_that_its_operator_is_trusted_with() -> None:
    """The operator could invent the other hospitals, and release a single hospital's code with the noise."""
    said = " ".join(consent_text.for_site(study()).split())
    assert "TRUSTED to add the noise and to ask real hospitals" in said
    assert "not that noise was added or that the other hospitals on a roster exist" in said
