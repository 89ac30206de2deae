"""Turns a voter's codes into the integers that it sends: combined by the query's encoder, clipped and quantised.

The worker of a site and a study in memory (:mod:`consilium.memory`) both call this function. The result is sensitive
until noise is added. The function refuses codes that are not finite or have another length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int64

from common.errors import InvalidInput
from common.privacy.mechanism import Mechanism
from common.privacy.quantise import quantise
from common.protocols.site_protocol import Encoder


def vote_of(encoder: Encoder, codes: Sequence[Float[np.ndarray, "l"]], mechanism: Mechanism) -> Int64[np.ndarray, "d"]:
    """Return one voter's vote on a query: its combined code as integers, clipped. # sensitive

    Args:
        encoder: The query's encoder, which combines the codes of all its volumes.
        codes: The voter's unclipped codes of the query's volumes, in the query's order.
        mechanism: The query's mechanism, which states the clipping norm and the dimension d.

    Returns:
        int64 array of shape [d], of norm at most ``mechanism.radius_int``.

    Raises:
        InvalidInput: If a code is not finite, or the combined code has another length than d.
    """
    vote = quantise(encoder.of_voter(np.stack(codes)), radius_int=mechanism.radius_int)
    if vote.shape != (mechanism.dimension,):
        raise InvalidInput("shape of a voter's code", value=vote.shape, limit=str((mechanism.dimension,)))
    return vote
