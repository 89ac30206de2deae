"""The fields that every table stating a budget has in common, checked once.

Refuses an unknown accountant, unit or relation, and unit ``patient`` with relation ``zero-out``.
"""

from __future__ import annotations

from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit


class StatedBudget:
    """Fields of every table that states a budget: a study's ``[privacy]`` and a site's ``[caps]``."""

    __slots__ = ()

    epsilon: float
    delta: float
    accountant: AccountantName
    unit: Unit
    relation: Relation

    @property
    def budget(self) -> Budget:
        return Budget(epsilon=self.epsilon, delta=self.delta)

    @property
    def protection(self) -> Protection:
        return Protection(unit=self.unit, relation=self.relation)

    def _check_budget(self, where: str) -> None:
        """Turn names into their enumerations; InvalidInput for an unknown one and for an unsound combination."""
        for name, kind in (("accountant", AccountantName), ("relation", Relation), ("unit", Unit)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except ValueError as error:
                raise InvalidInput(f"{where}.{name}", value=value, limit=", ".join(kind)) from error
        _ = self.budget, self.protection
