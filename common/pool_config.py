"""Defines the ``[pool]`` section of a study: the ε that a patient pool may spend in all studies together.

Read as part of a study (:mod:`common.config`). Only the first study that admits a pool sets the pool's budget; later
studies of the same ledger do not change it. Refuses a budget that is no finite number, or is negative.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import InvalidInput
from common.sections import as_said, check_types


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The budget, for all studies together, of every patient pool that this study is the first to admit.

    Attributes:
        epsilon: ε that all studies together may spend, at the study's δ and by its accountant; at least the study's own
            ε. 0 stands for the study's own ε; this study may then spend the whole budget.
    """

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_types(self, where="pool")
        if self.epsilon < 0:
            raise InvalidInput(
                "pool.epsilon", value=self.epsilon, limit="at least the study's own ε, or 0 to use the study's own ε"
            )

    def to_table(self) -> dict[str, float]:
        """Return the section's keys and values, without keys that have their default."""
        return as_said(self, ("epsilon",))
