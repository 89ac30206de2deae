"""A released noisy sum → probabilities of a whole volume: post-processing, free of privacy cost, repeatable.

Uses nothing but public values: the answer from the ledger, the roster's number of voters, the codec. Refuses answers
that cannot be the codec's.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from jaxtyping import Float, Int64

from common.canonical import check_integer
from common.codecs import Codec
from common.errors import InvalidInput
from common.privacy.mechanism import GRID_BITS


def decode_answer(
    codec: Codec, noisy_sum: Int64[np.ndarray, "l"], *, voters: int, noise_std_int: Fraction
) -> Float[np.ndarray, "c x y z"]:
    """Decode one stored answer to float32 pseudo-label probabilities.

    ``noisy_sum``: the integer sum with its noise, in grid steps of 2⁻¹⁶. ``voters``: codes in the sum, the roster's
    sites times voters a site; a site that failed after accepting still counts, its code is zero. ``noise_std_int``: σ
    on the integer sum. The mean code is S̃ / 2¹⁶ / voters, its noise :func:`mean_noise_std`.
    Source: Fay et al. 2021, Algorithm 1, the recovery step, with the codec's Wiener weights.
    """
    if not isinstance(noisy_sum, np.ndarray) or noisy_sum.dtype != np.int64 or noisy_sum.shape != (codec.dimension,):
        raise InvalidInput(
            "noisy sum",
            value=(str(getattr(noisy_sum, "dtype", type(noisy_sum))), getattr(noisy_sum, "shape", None)),
            limit=f"int64 of shape {(codec.dimension,)}",
        )
    noise_std = mean_noise_std(noise_std_int, voters=voters)
    return codec.decode(noisy_sum.astype(np.float64) / (voters * 2.0**GRID_BITS), noise_std=noise_std)


def mean_noise_std(noise_std_int: Fraction, *, voters: int) -> float:
    """Standard deviation of the noise on the mean code, in the code's units: σ_int / (voters · 2¹⁶)."""
    check_integer("voters", voters, least=1)
    if not isinstance(noise_std_int, Fraction) or noise_std_int <= 0:
        raise InvalidInput("noise standard deviation", value=noise_std_int, limit="a positive rational")
    return float(noise_std_int / (voters << GRID_BITS))
