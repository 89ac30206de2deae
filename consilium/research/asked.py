"""A study asked in memory: what its protocol asks, answered by votes that are clipped, summed and noised as in a run.

Production's protocols, site's half and server's, with the daemons, the sealing and the ledger left out, which change
no number. Stand-in data only: codes are not protected here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from jaxtyping import Float, Int64

from common.codecs import load_codec
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import Mechanism, QuerySpec
from common.privacy.quantise import quantise
from common.privacy.release import noisy_sum
from common.privacy.shares import share_std
from common.protocols.base import Encoder, site_protocol
from server.protocols.base import protocol_of
from server.study.workspace import Public

Vote = Callable[[Encoder, QuerySpec, int], Float[np.ndarray, "d"]]
"""What a voter, by its number, sends for a query; it is clipped afterwards."""

Draw = Callable[[QuerySpec, Sequence[Int64[np.ndarray, "d"]]], Int64[np.ndarray, "d"]]
"""The noisy sum of a query's clipped votes."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """An :class:`~server.protocols.base.Answer` that no ledger holds."""

    query: QuerySpec
    noisy_sum: Int64[np.ndarray, "d"]
    voters: int


def noised(votes: Sequence[Int64[np.ndarray, "d"]], mechanism: Mechanism) -> Int64[np.ndarray, "d"]:
    """Their noisy sum as the study's mode draws it: by the server, or in one share a site."""
    if mechanism.colluders is None:
        return noisy_sum(votes, mechanism)
    sites = len(votes) // mechanism.voters_per_site
    share = share_std(mechanism, sites=sites)

    def shares(size: int, _noise_std: Fraction) -> Int64[np.ndarray, "d"]:
        total: np.ndarray = np.sum([rounded_gaussian(size, share) for _ in range(sites)], axis=0)
        return total

    return noisy_sum(votes, mechanism, sampler=shares)


def ask(public: Public, vote: Vote, *, voters: int, draw: Draw) -> tuple[Drawn, ...]:
    """The answers to all that the study asks, in order."""
    codec, site = load_codec(public.objects.get(public.codec.sha256)), site_protocol(public.study)
    answers: dict[str, Drawn] = {}
    for queries in protocol_of(public.study).questions(public, answers.get):
        for query in queries:
            if query.id in answers:  # given again for its receipts
                continue
            encoder, radius = site.encoder(query, codec, fetch=public.objects.get), query.mechanism.radius_int
            votes = [quantise(vote(encoder, query, voter), radius_int=radius) for voter in range(voters)]
            answers[query.id] = Drawn(query, draw(query, votes), voters)
    return tuple(answers.values())
