"""A study asked in memory by votes that a benchmark makes: clipped, summed and noised as in a run.

By :mod:`consilium.memory`, which asks callables. Stand-in data only: codes are not protected here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int64

from common.privacy.mechanism import Mechanism, QuerySpec
from common.privacy.quantise import quantise
from common.protocols.site_protocol import Encoder
from consilium.memory.asked import Drawn, answers_to, released
from server.public.material import Public

Vote = Callable[[Encoder, QuerySpec, int], Float[np.ndarray, "d"]]
"""What a voter, by its number, sends for a query; it is clipped afterwards."""

Draw = Callable[[QuerySpec, Sequence[Int64[np.ndarray, "d"]]], Int64[np.ndarray, "d"]]
"""The noisy sum of a query's clipped votes."""


def noised(votes: Sequence[Int64[np.ndarray, "d"]], mechanism: Mechanism) -> Int64[np.ndarray, "d"]:
    """The noisy sum of votes, which belong to sites in turn."""
    voters = mechanism.voters_per_site
    codes = [np.sum(votes[first : first + voters], axis=0) for first in range(0, len(votes), voters)]
    return released(codes, mechanism)


def ask(public: Public, vote: Vote, *, voters: int, draw: Draw) -> tuple[Drawn, ...]:
    """The answers to all that the study asks, in order."""

    def votes(encoder: Encoder, query: QuerySpec) -> list[Int64[np.ndarray, "d"]]:
        radius = query.mechanism.radius_int
        return [quantise(vote(encoder, query, voter), radius_int=radius) for voter in range(voters)]

    return answers_to(public, codes=votes, draw=draw, voters=voters)
