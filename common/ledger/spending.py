"""Computes from a ledger what was spent of a budget and what is guaranteed, for every text that prints it.

A study's figure is that of the pool the study cost most. It counts the study's releases, draws that were lost, answers
of other studies that it uses too, and charges that a restored ledger got back from receipts or from its standing. A
pool's figure counts all studies of the ledger. Charges that were recovered may pass a budget; what was spent is
guaranteed then, not the budget. Every figure is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import floor
from typing import Protocol

from common.ledger.charges import NOTHING, Spend
from common.ledger.server_state import Books
from common.privacy.accounting import ACCOUNTANTS, Guarantee, guarantee, max_mu_squared
from common.privacy.consent import (
    group_guarantees,
    group_sentence,
    guess_right_at_most,
    guess_sentence,
    spent_sentence,
)
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Protection

_PLD_LEAST, _PLD_MOST = Fraction(1, 2**20), Fraction(64**2)


class BudgetTerms(Protocol):
    """What a budget is and how it is counted: a study's, or a pool's."""

    @property
    def budget(self) -> Budget: ...
    @property
    def accountant(self) -> AccountantName: ...
    @property
    def protection(self) -> Protection: ...


@dataclass(frozen=True, slots=True)
class Spending:
    """One budget beside what the books say was spent of it.

    ``spend`` is of one unit under ``protection``: Σμ², releases, noisy coordinates. ``largest_roster`` is the number of
    sites that the largest roster behind it names, 0 for none. ``doubt`` says why more may have been spent than the
    books show: then every figure here is a lower bound and nothing is known to be guaranteed.
    """

    budget: Budget
    accountant: AccountantName
    protection: Protection
    spend: Spend = NOTHING
    largest_roster: int = 0
    doubt: str | None = None
    limit: Fraction = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "limit", max_mu_squared(self.accountant, self.budget))

    @classmethod
    def of(
        cls, terms: BudgetTerms, spend: Spend = NOTHING, *, largest_roster: int = 0, doubt: str | None = None
    ) -> Spending:
        """What ``spend`` is of the budget of a study or a pool."""
        return cls(terms.budget, terms.accountant, terms.protection, spend, largest_roster, doubt)

    @property
    def mu_squared(self) -> Fraction:
        """Σμ² of everything that was spent."""
        return self.spend.mu_squared

    @property
    def passed(self) -> bool:
        """Whether more was spent than the budget admits: recovered charges, or a budget that was tightened."""
        return self.mu_squared > self.limit

    @property
    def bound(self) -> Fraction:
        """The Σμ² that no unit exceeds: the budget's, or what was spent if that is more."""
        return max(self.limit, self.mu_squared)

    @property
    def share(self) -> float:
        """What was spent, as a share of the Σμ² that the budget admits: not a share of ε."""
        return float(self.mu_squared / self.limit)

    def room(self, cost: Fraction) -> int:
        """How many further charges of μ² = ``cost`` > 0 the budget admits."""
        return max(0, floor((self.limit - self.mu_squared) / cost))

    def by(self, accountant: AccountantName | str) -> Guarantee:
        """What was spent, by an accountant of this name."""
        return _guarantee(self.mu_squared, self.budget, self.protection, str(accountant))

    @property
    def spent(self) -> Guarantee:
        """What was spent, by the accountant that keeps the budget."""
        return self.by(self.accountant)

    @property
    def guaranteed(self) -> Guarantee:
        """The larger of the budget and what was spent, by the budget's accountant. It holds after further questions."""
        promised = Guarantee(self.budget.epsilon, self.budget.delta, str(self.accountant), self.protection)
        return max(promised, self.spent, key=lambda one: one.epsilon)

    def readings(self) -> dict[AccountantName, Guarantee]:
        """What was spent, by every accountant that may keep a budget."""
        return {name: self.by(name) for name in AccountantName}

    def by_all(self) -> tuple[Guarantee, ...]:
        """What was spent by every accountant that has an answer for it: pld has none for the smallest and largest."""
        mu_squared = self.mu_squared
        pld = mu_squared == 0 or _PLD_LEAST < mu_squared <= _PLD_MOST
        return tuple(self.by(name) for name in ACCOUNTANTS if name != "pld" or pld)

    def groups(self) -> tuple[Guarantee, ...]:
        """What is guaranteed to units that change together (:func:`common.privacy.consent.group_guarantees`)."""
        return group_guarantees(self.bound, self.budget, self.protection, self.accountant)

    @property
    def odds_guaranteed(self) -> float:
        """How often a guess about one unit can be right after all further questions; at least 1/2."""
        return guess_right_at_most(self.bound)

    @property
    def odds_spent(self) -> float:
        """The same after what was released so far."""
        return guess_right_at_most(self.mu_squared)

    def odds_sentence(self, *, colluders: int | None, yours: bool = False) -> str:
        """:attr:`odds_guaranteed` in words, as :func:`common.privacy.consent.guess_sentence` has it."""
        return self.if_known(guess_sentence(self.protection, self.bound, colluders=colluders, yours=yours))

    def odds_spent_sentence(self, *, sealed: bool) -> str:
        """:attr:`odds_spent` in words, as :func:`common.privacy.consent.spent_sentence` has it."""
        return spent_sentence(self.mu_squared, sealed=sealed)

    def groups_sentence(self) -> str:
        """:meth:`groups` in words, as :func:`common.privacy.consent.group_sentence` has it."""
        return self.if_known(group_sentence(self.groups()))

    def if_known(self, sentence: str) -> str:
        """A sentence about what is guaranteed, with the condition that it is under while more may have been spent."""
        return f"If no more was spent than the ledger shows: {sentence}" if self.doubt else sentence

    @property
    def warning(self) -> str | None:
        """What to say beside a budget that was passed, or of which more may have been spent; None for any other."""
        if self.doubt:
            return (
                f"More may have been spent than the ledger shows, so nothing is known to be guaranteed: {self.doubt}."
            )
        if not self.passed:
            return None
        return (
            f"More was spent than the budget of ε = {epsilon_text(self.budget.epsilon)} admits: ε = "
            f"{epsilon_text(self.spent.epsilon)} ({self.accountant} accountant, δ = {delta_text(self.budget.delta)}, "
            f"{self.protection}). What was spent is what holds."
        )


def of_study(books: Books, study_id: str, *, doubt: str | None = None) -> Spending:
    """What a study spent on the pool it cost most; KeyError for a study that is not in these books."""
    spends = (books.spent_in(study_id, pool) for pool in books.study_pools(study_id))
    worst = max(spends, key=lambda spend: spend.mu_squared, default=NOTHING)
    return Spending.of(books.studies[study_id], worst, largest_roster=books.largest_roster(study_id), doubt=doubt)


def of_pool_in_study(books: Books, study_id: str, pool: str, *, doubt: str | None = None) -> Spending:
    """What a study spent on one pool; KeyError for a study that is not in these books."""
    return Spending.of(books.studies[study_id], books.spent_in(study_id, pool), doubt=doubt)


def of_pool(books: Books, pool: str, *, doubt: str | None = None) -> Spending:
    """What all studies together spent on a pool, under the pool's own budget; KeyError for one not declared."""
    return Spending.of(books.pools[pool], books.spent(pool), doubt=doubt)


@lru_cache(maxsize=8192)
def _guarantee(mu_squared: Fraction, budget: Budget, protection: Protection, accountant: str) -> Guarantee:
    return guarantee(mu_squared, budget, protection, accountant)
