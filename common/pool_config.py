"""Defines the ``[pool]`` section of a study: what a patient pool may spend in its life.

Read as part of a study (:mod:`common.config`). Later studies of the same ledger do not change a pool's budget. Refuses
a budget that is no finite number, or is negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from common.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """The budget for life of every patient pool that this study is the first to admit.

    Attributes:
        epsilon: ε for all studies of the pool together, at the study's δ and by its accountant; at least the study's
            own ε. 0 stands for the study's own ε, so that this study may spend all of it.
    """

    epsilon: float = 0.0

    def __post_init__(self) -> None:
        value = self.epsilon
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
            raise InvalidInput("pool.epsilon", value=value, limit="the study's own ε or more; 0 for the study's own")
