"""Asks a study in memory with codes that a benchmark supplies; they are clipped, summed and noised as in a run.

The benchmarks call it; it uses :mod:`consilium.memory`. Use it for public or synthetic data only: codes are not
protected here.
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
"""Returns the code that the voter of this number sends for a query, before clipping."""

Draw = Callable[[QuerySpec, Sequence[Int64[np.ndarray, "d"]]], Int64[np.ndarray, "d"]]
"""Returns the noisy sum of a query's clipped codes."""


def noised(votes: Sequence[Int64[np.ndarray, "d"]], mechanism: Mechanism) -> Int64[np.ndarray, "d"]:
    """Return the noisy sum of votes; consecutive votes belong to the same site.

    Args:
        votes: Int64 codes [d], clipped.
        mechanism: The query's mechanism.
    """
    voters = mechanism.voters_per_site
    codes = [np.sum(votes[first : first + voters], axis=0) for first in range(0, len(votes), voters)]
    return released(codes, mechanism)


def ask(public: Public, vote: Vote, *, voters: int, draw: Draw) -> tuple[Drawn, ...]:
    """Return the answers to everything that the study asks, in order.

    Args:
        public: What is public of the study.
        vote: Returns a voter's code.
        voters: Number of voters.
        draw: Adds up codes and noise.
    """

    def votes(encoder: Encoder, query: QuerySpec) -> list[Int64[np.ndarray, "d"]]:
        radius = query.mechanism.radius_int
        return [quantise(vote(encoder, query, voter), radius_int=radius) for voter in range(voters)]

    return answers_to(public, codes=votes, draw=draw, voters=voters)
