"""A released noisy sum → probabilities of a whole volume: post-processing, free of privacy cost, repeatable.

Uses nothing but public values: the answer from the ledger, the roster's number of voters, the codec. Refuses answers
that cannot be the codec's.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from common.codecs import Codec
from common.errors import InvalidInput
from common.privacy.mechanism import GRID_BITS, Mechanism


def decode_answer(
    codec: Codec, noisy_sum: Int64[np.ndarray, "l"], *, voters: int, mechanism: Mechanism
) -> Float[np.ndarray, "c x y z"]:
    """Decode one stored answer to float32 pseudo-label probabilities.

    ``noisy_sum``: the integer sum with its noise, in grid steps of 2⁻¹⁶. ``voters``: codes in the sum, the roster's
    sites times voters a site; a site that failed after accepting still counts, its code is zero. ``mechanism``: the
    query's, which says what noise a sum of so many carries. The mean code is S̃ / 2¹⁶ / voters.
    Source: Fay et al. 2021, Algorithm 1, the recovery step, with the codec's Wiener weights.
    """
    if not isinstance(noisy_sum, np.ndarray) or noisy_sum.dtype != np.int64 or noisy_sum.shape != (codec.dimension,):
        raise InvalidInput(
            "noisy sum",
            value=(str(getattr(noisy_sum, "dtype", type(noisy_sum))), getattr(noisy_sum, "shape", None)),
            limit=f"int64 of shape {(codec.dimension,)}",
        )
    noise_std = mechanism.mean_noise_std(voters=voters)
    return codec.decode(noisy_sum.astype(np.float64) / (voters * 2.0**GRID_BITS), noise_std=noise_std)


def labels_of(codec: Codec, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "n k x y z"]:
    """Float32 probabilities the codes stand for."""
    return np.stack([codec.decode(code, noise_std=0.0) for code in codes])
