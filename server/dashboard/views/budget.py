"""What was spent and is left, of the study and of every site's patient pool."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import floor
from typing import Protocol

from common.config import Study
from common.errors import InvalidInput
from common.ledger.charges import Spend, charge_of
from common.privacy.accounting import epsilon_by, guarantee
from common.privacy.figures import epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection
from common.study_mechanism import study_mechanism
from server.dashboard.read_model import Follower

GATES = tuple(str(name) for name in AccountantName)


class Terms(Protocol):
    """What a budget is and how it is counted: a study's, or a pool's."""

    @property
    def budget(self) -> Budget: ...
    @property
    def accountant(self) -> AccountantName: ...
    @property
    def protection(self) -> Protection: ...


@dataclass(frozen=True, slots=True)
class Reading:
    """One accountant's ε for the same spending."""

    accountant: str
    epsilon: float
    gate: bool


@dataclass(frozen=True, slots=True)
class BudgetView:
    """What was spent and is left, of a study or of a site's patient pool over all studies.

    ``share`` is of Σμ², the quantity that adds up and that the gate compares; ``answers_left`` at the planned noise.
    ``doubt`` says why more may have been spent than this: then ε is a lower bound and no answer counts as left.
    """

    name: str
    pool: str | None
    epsilon: float
    budget: float
    budget_text: str
    accountant: str
    delta: float
    unit: str
    relation: str
    share: float
    releases: int
    answers_left: int
    readings: tuple[Reading, ...]
    doubt: str | None
    words: str


def study_budget(follower: Follower) -> BudgetView:
    """What the study has spent on the pool it cost most."""
    study, books = follower.study, follower.ledger.books
    if study.id not in books.studies:
        return _budget("study", None, study.privacy, Spend(), limit=Fraction(0), left=0, doubt=follower.doubt)
    terms = books.studies[study.id]
    spends = [books.spent_in(study.id, pool) for pool in books.study_pools(study.id)]
    worst = max(spends, key=lambda spend: spend.mu_squared, default=Spend())
    limit = books.study_limit(study.id)
    cost = charge_of(mechanism_of(study), terms.protection, terms.protection)
    left = max(0, floor((limit - worst.mu_squared) / cost))
    return _budget("study", None, terms, worst, limit=limit, left=left, doubt=follower.doubt)


def pool_budget(follower: Follower, name: str, pool: str) -> BudgetView | None:
    """What all studies together have spent on a site's pool; None before the pool is declared."""
    study, books = follower.study, follower.ledger.books
    declared = books.pools.get(pool)
    if declared is None:
        return None
    spend, limit = books.spent(pool), books.limit(pool)
    cost = charge_of(mechanism_of(study), declared.protection, study.privacy.protection)
    left = floor((limit - spend.mu_squared) / cost)
    if study.id in books.studies:
        inside = books.spent_in(study.id, pool).mu_squared
        own = charge_of(mechanism_of(study), study.privacy.protection, study.privacy.protection)
        left = min(left, floor((books.study_limit(study.id) - inside) / own))
    return _budget(name, pool, declared, spend, limit=limit, left=max(0, left), doubt=follower.doubt)


@lru_cache(maxsize=65536)
def _epsilon(accountant: str, mu_squared: Fraction, delta: float) -> float:
    return epsilon_by(accountant, mu_squared, delta) if mu_squared else 0.0


def epsilon_of(accountant: str, mu_squared: Fraction, budget: Budget) -> float | None:
    """ε of a Σμ² by one accountant, 0 for nothing; None where the accountant has no answer."""
    try:
        return _epsilon(accountant, mu_squared, budget.analytic_delta)
    except InvalidInput:
        return None


@lru_cache(maxsize=4096)
def gate_epsilons(mu_squared: Fraction, budget: Budget, protection: Protection) -> tuple[tuple[str, float], ...]:
    """ε of a Σμ² by every accountant that may gate."""
    return tuple((name, guarantee(mu_squared, budget, protection, name).epsilon) for name in GATES)


@lru_cache(maxsize=64)
def mechanism_of(study: Study) -> Mechanism:
    """The study's mechanism but for the length of its code."""
    return study_mechanism(study, dimension=1)


def _budget(
    name: str, pool: str | None, terms: Terms, spend: Spend, *, limit: Fraction, left: int, doubt: str | None
) -> BudgetView:
    budget, protection = terms.budget, terms.protection
    readings = tuple(
        Reading(gate, epsilon, gate == terms.accountant)
        for gate, epsilon in gate_epsilons(spend.mu_squared, budget, protection)
    )
    gate = next(reading.epsilon for reading in readings if reading.gate)
    share = float(spend.mu_squared / limit) if limit else 0.0
    return BudgetView(
        name=name,
        pool=pool,
        epsilon=gate,
        budget=budget.epsilon,
        budget_text=epsilon_text(budget.epsilon),
        accountant=str(terms.accountant),
        delta=budget.delta,
        unit=str(protection.unit),
        relation=str(protection.relation),
        share=share,
        releases=spend.releases,
        answers_left=left if doubt is None else 0,
        readings=readings,
        doubt=doubt,
        words=_budget_words(gate, budget.epsilon, left, share, doubt),
    )


def _budget_words(epsilon: float, budget: float, left: int, share: float, doubt: str | None) -> str:
    if doubt is not None:
        known = f"at least ε {epsilon_text(epsilon)} of {epsilon_text(budget)} spent"
        return f"{known}; what is left is not known, for {doubt}"
    spent = f"ε {epsilon_text(epsilon)} of {epsilon_text(budget)} spent"
    if share > 1:
        return f"{spent}: past its budget, nothing more is released"
    if left == 0:
        return f"{spent}; no further answer fits"
    return f"{spent}; {left:,} more {'answer fits' if left == 1 else 'answers fit'}"
