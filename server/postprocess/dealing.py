"""Who gets whose answer in the control that deals answers to the wrong volumes."""

from __future__ import annotations

import numpy as np

from common.errors import InvalidInput

DERANGEMENT_SEED = 0
"""Fixes who gets whose answer in ``shuffled_codes``; it protects nothing."""


def derangement(count: int, *, seed: int) -> tuple[int, ...]:
    """A permutation of 0 … count - 1 that leaves nothing in its place: one random cycle through all of them.

    Source: Sattolo 1986. The same arguments give the same permutation. Fewer than two have none and are refused.
    """
    if count < 2:
        raise InvalidInput(
            "answers to deal to the wrong volumes", value=count, limit="at least 2", remedy="plan two queries or more"
        )
    draws = np.random.default_rng(seed)
    order = list(range(count))
    for last in range(count - 1, 0, -1):
        other = int(draws.integers(last))  # never ``last`` itself: so one cycle, and no fixed point
        order[last], order[other] = order[other], order[last]
    return tuple(order)
