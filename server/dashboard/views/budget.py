"""Computes the spent and the remaining privacy budget of the study and of every site's patient pool.

The other views use it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from common.config import Study
from common.errors import InvalidInput
from common.ledger.spending import Spending
from common.privacy.accounting import epsilon_by
from common.privacy.figures import epsilon_text
from common.privacy.mechanism import Budget, Mechanism
from common.study_facts import PoolFacts, StudyFacts
from common.study_mechanism import study_mechanism


@dataclass(frozen=True, slots=True)
class AccountantEpsilon:
    """One accountant's ε for the same spending.

    Attributes:
        accountant: Name of the accountant: ``exact``, ``rdp`` or ``paper``.
        epsilon: ε by this accountant.
        gate: True if this is the accountant whose ε decides whether the ledger allows a release. The gate of hospitals'
            verdicts on the student is something else.
    """

    accountant: str
    epsilon: float
    gate: bool


@dataclass(frozen=True, slots=True)
class BudgetView:
    """What was spent and what is left, of a study or of a site's patient pool over all studies.

    Attributes:
        name: ``study``, or the name of the pool's site.
        pool: Name of the pool; None for a study.
        epsilon: ε spent; a lower bound if there is ``doubt``.
        budget: ε of the budget.
        budget_text: ``budget`` as text.
        guaranteed: The larger of ``budget`` and ``epsilon``; None if there is ``doubt``.
        accountant: The accountant that decides whether a release is allowed.
        delta: δ of the budget.
        unit: Unit of privacy: ``patient`` or ``hospital``.
        relation: Neighbouring relation: ``replace-one`` or ``zero-out``.
        share: Spent share of Σμ², the quantity that adds up over releases and is compared with the limit.
        releases: Number of releases charged.
        answers_left: Planned queries without an answer that the budgets cover; 0 if there is ``doubt``, and for the
            pool of a revoked site.
        readings: ε by every accountant.
        doubt: Reason why more may have been spent than the ledger shows; None if there is no such reason.
        warning: Sentence that the budget was exceeded; None if it was not.
        words: A summary in one sentence.
    """

    name: str
    pool: str | None
    epsilon: float
    budget: float
    budget_text: str
    guaranteed: float | None
    accountant: str
    delta: float
    unit: str
    relation: str
    share: float
    releases: int
    answers_left: int
    readings: tuple[AccountantEpsilon, ...]
    doubt: str | None
    warning: str | None
    words: str


def study_budget(facts: StudyFacts) -> BudgetView:
    """Return the study's own budget as pages show it.

    Args:
        facts: The study's figures.

    Returns:
        The budget.
    """
    return _budget("study", None, facts.spending, room=facts.answers_left, done=not facts.unanswered)


def pool_budget(facts: PoolFacts, *, unanswered: int) -> BudgetView:
    """Return what all studies together have spent on a site's pool, as pages show it.

    Args:
        facts: The pool's figures.
        unanswered: Number of the study's planned queries without an answer.

    Returns:
        The budget.
    """
    left, done = facts.answers_left, not unanswered and not facts.exhausted
    found = _budget(facts.site, facts.pool, facts.for_life, room=left, done=done)
    if not facts.revoked or facts.for_life.doubt:
        return found
    spent = f"ε {epsilon_text(found.epsilon)} of {found.budget_text} spent"
    return replace(found, words=f"{spent}; the site is revoked and answers nothing")


def epsilon_of(accountant: str, mu_squared: Fraction, budget: Budget) -> float | None:
    """Convert a sum of μ² to ε by one accountant.

    Args:
        accountant: The accountant.
        mu_squared: Σμ², the squared Gaussian-DP parameters of all charges added up.
        budget: The budget, whose δ is used.

    Returns:
        ε; 0 if the sum is 0; None if the accountant cannot compute ε for this sum.
    """
    try:
        return epsilon_by(accountant, mu_squared, budget.analytic_delta) if mu_squared else 0.0
    except InvalidInput:
        return None


@lru_cache(maxsize=64)
def mechanism_of(study: Study) -> Mechanism:
    """Return the study's mechanism for a code of one coordinate; the noise is the same for codes of any length.

    Args:
        study: The study.

    Returns:
        The mechanism.
    """
    return study_mechanism(study, dimension=1)


def _budget(name: str, pool: str | None, spending: Spending, *, room: int, done: bool) -> BudgetView:
    budget, protection = spending.budget, spending.protection
    return BudgetView(
        name=name,
        pool=pool,
        epsilon=spending.spent.epsilon,
        budget=budget.epsilon,
        budget_text=epsilon_text(budget.epsilon),
        guaranteed=None if spending.doubt else spending.guaranteed.epsilon,
        accountant=str(spending.accountant),
        delta=budget.delta,
        unit=str(protection.unit),
        relation=str(protection.relation),
        share=spending.share,
        releases=spending.spend.releases,
        answers_left=room if spending.doubt is None else 0,
        readings=tuple(
            AccountantEpsilon(str(one), found.epsilon, one == spending.accountant)
            for one, found in spending.readings().items()
        ),
        doubt=spending.doubt,
        warning=None if spending.doubt else spending.warning,
        words=_budget_words(spending, room, done=done),
    )


def _budget_words(spending: Spending, left: int, *, done: bool) -> str:
    epsilon, budget = epsilon_text(spending.spent.epsilon), epsilon_text(spending.budget.epsilon)
    if spending.doubt is not None:
        return f"at least ε {epsilon} of {budget} spent; what is left is not known, because {spending.doubt}"
    spent = f"ε {epsilon} of {budget} spent"
    if left:
        fit = f"{left:,} more {'answer fits' if left == 1 else 'answers fit'}"
        if spending.passed:
            return f"{spent} by the most charged pool; {fit} the budgets of the others"
        return f"{spent}; {fit}"
    if done:
        return f"{spent}; every planned answer is there"
    return f"{spent}: exceeded, nothing more is released" if spending.passed else f"{spent}; no further answer fits"
