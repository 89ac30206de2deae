"""Computes from a ledger the spent part of a budget and the guarantee, for every text that prints them.

A study's figure is that of the pool on which the study spent most. It counts the study's releases, lost draws, answers
of other studies that it uses, and charges that a restored ledger recovered from receipts or from its standing file (the
file beside a ledger that states its newest totals). A pool's figure counts all studies of the ledger. Recovered charges
may exceed a budget; then the spent ε is guaranteed, not the budget. Every figure is rounded up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from math import floor
from typing import Protocol

from common.ledger.charges import NOTHING, Spend
from common.ledger.server_state import ServerBooks
from common.privacy.accounting import ACCOUNTANTS, MAX_PLD_EPSILON, Guarantee, guarantee, max_mu_squared
from common.privacy.consent import group_guarantees, group_sentence, guess_right_at_most, guess_sentence, spent_sentence
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Protection

_PLD_LEAST = Fraction(1, 2**20)


class BudgetTerms(Protocol):
    """A study or a pool: its budget, its accountant, and its unit and relation."""

    @property
    def budget(self) -> Budget: ...
    @property
    def accountant(self) -> AccountantName: ...
    @property
    def protection(self) -> Protection: ...


@dataclass(frozen=True, slots=True)
class Spending:
    """A budget, and the part of it that was spent according to the ledger.

    Attributes:
        budget: ε and δ.
        accountant: The accountant that decides whether a release fits the budget.
        protection: Privacy unit and neighbouring relation.
        spend: Total cost for one unit: Σμ², releases, noisy coordinates.
        largest_roster: Number of sites of the largest roster among the releases; 0 if there is no release.
        doubt: Reason why more may have been spent than the ledger shows; None if no reason is known. If there is a
            reason, every figure is a lower bound, and no guarantee is known to hold.
        limit: The Σμ² that the budget allows.
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
        """Return the spending of a study or a pool.

        Args:
            terms: The study or pool.
            spend: Total cost for one unit.
            largest_roster: Number of sites of the largest roster.
            doubt: Reason why more may have been spent than the ledger shows; None if no reason is known.

        Returns:
            The spending.
        """
        return cls(terms.budget, terms.accountant, terms.protection, spend, largest_roster, doubt)

    @property
    def mu_squared(self) -> Fraction:
        """Σμ² of everything that was spent."""
        return self.spend.mu_squared

    @property
    def passed(self) -> bool:
        """True if more was spent than the budget allows. Recovered charges and a tightened budget can cause it."""
        return self.mu_squared > self.limit

    @property
    def bound(self) -> Fraction:
        """Upper bound on the Σμ² of any unit (patient or hospital) after all further queries: the budget's limit, or
        the spent Σμ² if that is larger.
        """
        return max(self.limit, self.mu_squared)

    @property
    def share(self) -> float:
        """The spent share of the Σμ² that the budget allows. It is not a share of ε."""
        return float(self.mu_squared / self.limit)

    def room(self, cost: Fraction) -> int:
        """Return how many further charges the budget allows.

        Args:
            cost: μ² of one charge, above 0.

        Returns:
            The number.
        """
        return max(0, floor((self.limit - self.mu_squared) / cost))

    def by(self, accountant: AccountantName | str) -> Guarantee:
        """Return the guarantee of everything spent so far, computed by an accountant.

        Args:
            accountant: Name of the accountant.

        Returns:
            The guarantee.
        """
        return _guarantee(self.mu_squared, self.budget, self.protection, str(accountant))

    @property
    def spent(self) -> Guarantee:
        """The guarantee of everything spent so far, computed by the budget's accountant."""
        return self.by(self.accountant)

    @property
    def guaranteed(self) -> Guarantee:
        """The larger of the budget and the spent part, computed by the budget's accountant. It still holds after all
        further queries.
        """
        promised = Guarantee(self.budget.epsilon, self.budget.delta, str(self.accountant), self.protection)
        return max(promised, self.spent, key=lambda one: one.epsilon)

    def readings(self) -> dict[AccountantName, Guarantee]:
        """Return the guarantee of everything spent so far, by every accountant that may decide a budget."""
        return {name: self.by(name) for name in AccountantName}

    def by_all(self) -> tuple[Guarantee, ...]:
        """Return one guarantee for each accountant that can compute it, of everything spent so far.

        The accountant ``pld`` is left out if 0 < μ² ≤ 2⁻²⁰, where μ² is the sum over all releases, or if the exact ε is
        699 or more.
        """
        mu_squared = self.mu_squared
        pld = mu_squared == 0 or (mu_squared > _PLD_LEAST and self.by("exact").epsilon < MAX_PLD_EPSILON - 1)
        return tuple(self.by(name) for name in ACCOUNTANTS if name != "pld" or pld)

    def groups(self) -> tuple[Guarantee, ...]:
        """Return the guarantee for a group of k units, such as k patients of one family, for every k from 1 to 5.

        The tuple ends before the first size that is outside the accountants' range
        (:func:`common.privacy.consent.group_guarantees`).
        """
        return group_guarantees(self.bound, self.budget, self.protection, self.accountant)

    @property
    def odds_guaranteed(self) -> float:
        """Largest probability that a guess about one unit is right after all further queries; at least 1/2."""
        return guess_right_at_most(self.bound)

    @property
    def odds_spent(self) -> float:
        """Largest probability that a guess about one unit is right after what was released so far; at least 1/2."""
        return guess_right_at_most(self.mu_squared)

    def odds_sentence(self, *, colluders: int | None, yours: bool = False) -> str:
        """Return a sentence that states :attr:`odds_guaranteed`, the odds of a guess after all releases.

        :func:`common.privacy.consent.guess_sentence` writes it.

        Args:
            colluders: Number of hospitals whose shares of the noise the guesser may know; None in an open study.
            yours: True if the sentence addresses the hospital that is asked for consent.

        Returns:
            The sentence.
        """
        return self.if_known(guess_sentence(self.protection, self.bound, colluders=colluders, yours=yours))

    def odds_spent_sentence(self, *, sealed: bool) -> str:
        """Return a sentence that states :attr:`odds_spent`, the odds of a guess after the releases so far.

        :func:`common.privacy.consent.spent_sentence` writes it.

        Args:
            sealed: True for a study with sealed sums. Its masks rest on ciphers, so the sentence then does not claim
                that the odds hold against unlimited computing power.

        Returns:
            The sentence.
        """
        return spent_sentence(self.mu_squared, sealed=sealed)

    def groups_sentence(self) -> str:
        """Return the guarantees of :meth:`groups` as a sentence (:func:`common.privacy.consent.group_sentence`)."""
        return self.if_known(group_sentence(self.groups()))

    def if_known(self, sentence: str) -> str:
        """Begin a sentence about the guarantee with "If no more was spent than the ledger shows", if that is in doubt.

        Args:
            sentence: The sentence.

        Returns:
            The sentence; it begins with the condition if :attr:`doubt` is not None.
        """
        return f"If no more was spent than the ledger shows: {sentence}" if self.doubt else sentence

    @property
    def warning(self) -> str | None:
        """A warning if the budget was exceeded or more may have been spent than shown; else None."""
        if self.doubt:
            return (
                f"More may have been spent than the ledger shows, so nothing is known to be guaranteed: {self.doubt}."
            )
        if not self.passed:
            return None
        return (
            f"More was spent than the budget of ε = {epsilon_text(self.budget.epsilon)} admits: ε = "
            f"{epsilon_text(self.spent.epsilon)} ({self.accountant} accountant, δ = {delta_text(self.budget.delta)}, "
            f"{self.protection}). The guarantee that holds is the spent ε."
        )


def of_study(books: ServerBooks, study_id: str, *, doubt: str | None = None) -> Spending:
    """Return the spending of a study on the pool on which it spent most.

    Args:
        books: The totals of the server's ledger.
        study_id: The study's id.
        doubt: Reason why more may have been spent than the ledger shows; None if no reason is known.

    Returns:
        The spending.

    Raises:
        KeyError: If the study is not in the ledger.
    """
    spends = (books.spent_in(study_id, pool) for pool in books.study_pools(study_id))
    worst = max(spends, key=lambda spend: spend.mu_squared, default=NOTHING)
    return Spending.of(books.studies[study_id], worst, largest_roster=books.largest_roster(study_id), doubt=doubt)


def of_pool_in_study(books: ServerBooks, study_id: str, pool: str, *, doubt: str | None = None) -> Spending:
    """Return the spending of a study on one pool.

    Args:
        books: The totals of the server's ledger.
        study_id: The study's id.
        pool: Name of the pool.
        doubt: Reason why more may have been spent than the ledger shows; None if no reason is known.

    Returns:
        The spending.

    Raises:
        KeyError: If the study is not in the ledger.
    """
    return Spending.of(books.studies[study_id], books.spent_in(study_id, pool), doubt=doubt)


def of_pool(books: ServerBooks, pool: str, *, doubt: str | None = None) -> Spending:
    """Return the spending of all studies together on a pool, under the pool's own budget.

    Args:
        books: The totals of the server's ledger.
        pool: Name of the pool.
        doubt: Reason why more may have been spent than the ledger shows; None if no reason is known.

    Returns:
        The spending.

    Raises:
        KeyError: If the pool is not declared.
    """
    return Spending.of(books.pools[pool], books.spent(pool), doubt=doubt)


@lru_cache(maxsize=8192)
def _guarantee(mu_squared: Fraction, budget: Budget, protection: Protection, accountant: str) -> Guarantee:
    return guarantee(mu_squared, budget, protection, accountant)
