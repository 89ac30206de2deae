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
from consilium.memory.asked import AnswerInMemory, answers_to, released
from server.public.material import PublicMaterial

Vote = Callable[[Encoder, QuerySpec, int], Float[np.ndarray, "d"]]
"""A function of encoder, query and voter's number that returns the voter's code for the query, before clipping."""

Draw = Callable[[QuerySpec, Sequence[Int64[np.ndarray, "d"]]], Int64[np.ndarray, "d"]]
"""A function of a query and its clipped codes that returns their noisy sum."""


def noised(votes: Sequence[Int64[np.ndarray, "d"]], mechanism: Mechanism) -> Int64[np.ndarray, "d"]:
    """Return the noisy sum of all voters' codes.

    Args:
        votes: Clipped codes, int64 [d], site by site: the first m are of the first site's m voters, and so on.
        mechanism: The query's mechanism.
    """
    voters = mechanism.voters_per_site
    codes = [np.sum(votes[first : first + voters], axis=0) for first in range(0, len(votes), voters)]
    return released(codes, mechanism)


def ask(public: PublicMaterial, vote: Vote, *, voters: int, draw: Draw) -> tuple[AnswerInMemory, ...]:
    """Return the noisy answers to all queries of a study, in order.

    Args:
        public: The study's public material.
        vote: Returns a voter's code before clipping.
        voters: Number of voters.
        draw: Returns the noisy sum of a query's clipped codes.
    """

    def votes(encoder: Encoder, query: QuerySpec) -> list[Int64[np.ndarray, "d"]]:
        radius = query.mechanism.radius_int
        return [quantise(vote(encoder, query, voter), radius_int=radius) for voter in range(voters)]

    return answers_to(public, codes=votes, draw=draw, voters=voters)
