"""Checks the fields that a study's section ``[privacy]`` and a site's section ``[caps]`` have in common.

They are ε, δ, the accountant, the unit of privacy and the neighbouring relation.

Refuses an unknown accountant, unit or relation, and unit ``patient`` with relation ``zero-out``.
"""

from __future__ import annotations

from common.canonical import member
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit


class StatedBudget:
    """Base of the sections that state a budget: ``[privacy]`` of a study and ``[caps]`` of a site."""

    __slots__ = ()

    epsilon: float
    delta: float
    accountant: AccountantName
    unit: Unit
    relation: Relation

    @property
    def budget(self) -> Budget:
        """The budget: ε and δ."""
        return Budget(epsilon=self.epsilon, delta=self.delta)

    @property
    def protection(self) -> Protection:
        """The unit of privacy and the neighbouring relation."""
        return Protection(unit=self.unit, relation=self.relation)

    def _check_budget(self, where: str) -> None:
        """Convert names to their enumerations. Raise InvalidInput for an unknown name and for an unsound
        combination.
        """
        for name, kind in (("accountant", AccountantName), ("relation", Relation), ("unit", Unit)):
            object.__setattr__(self, name, member(kind, getattr(self, name), what=f"{where}.{name}"))
        _ = self.budget, self.protection
