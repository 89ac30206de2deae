"""Decodes a released noisy sum into label probabilities of a whole volume.

The protocols call it. It uses only public values: the stored answer, the roster's number of voters and the codec.
Decoding is therefore post-processing: it costs no privacy and can be repeated. It refuses a sum that does not have the
codec's dimension.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int64

from common.codecs import Codec
from common.errors import InvalidInput
from common.privacy.mechanism import GRID_BITS, Mechanism


def decode_answer(
    codec: Codec, noisy_sum: Int64[np.ndarray, "l"], *, voters: int, mechanism: Mechanism
) -> Float[np.ndarray, "k x y z"]:
    """Decode one stored answer to pseudo-label probabilities.

    The mean code is ``noisy_sum`` / 2¹⁶ / ``voters``.

    Args:
        codec: The codec of the query.
        noisy_sum: Int64 array [l] for codes of length l, the integer sum with its noise, in grid steps of 2⁻¹⁶.
        voters: Number of codes in the sum: the roster's sites times voters per site. A site that failed after accepting
            still counts; its code is zero.
        mechanism: The query's mechanism, which gives the noise of the sum.

    Returns:
        Float32 probabilities [k, x, y, z] of k classes.

    Raises:
        InvalidInput: If the sum is not int64 [l].

    Source: Fay et al. 2021, Algorithm 1, the recovery step, with the codec's Wiener weights.
    """
    if type(noisy_sum) is not np.ndarray or noisy_sum.dtype != np.int64 or noisy_sum.shape != (codec.dimension,):
        raise InvalidInput(
            "noisy sum",
            value=(str(getattr(noisy_sum, "dtype", type(noisy_sum))), getattr(noisy_sum, "shape", None)),
            limit=f"int64 of shape {(codec.dimension,)}",
        )
    noise_std = mechanism.mean_noise_std(voters=voters)
    return codec.decode(noisy_sum.astype(np.float64) / (voters * 2.0**GRID_BITS), noise_std=noise_std)


def labels_of(codec: Codec, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "n k x y z"]:
    """Decode codes without noise into label probabilities.

    Args:
        codec: The codec.
        codes: n codes of length l, float array [n, l]; the decoder treats them as free of noise.

    Returns:
        Float32 array [n, k, x, y, z] for k classes.
    """
    return np.stack([codec.decode(code, noise_std=0.0) for code in codes])
