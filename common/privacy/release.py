"""The one way an answer leaves the server: check every site's integers, sum exactly, add rounded Gaussian noise.

This is the function that is audited and the function that is used. It keeps nothing, logs nothing and never quotes a
code. Refuses codes beyond the norm bound and sums that could leave int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from common.errors import InvalidInput
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.mechanism import Mechanism
from common.privacy.quantise import within

_ROOM = 1 << 62


def noisy_sum(
    codes: Sequence[Int64[np.ndarray, "l"]], mechanism: Mechanism, *, sampler: Sampler = rounded_gaussian
) -> Int64[np.ndarray, "l"]:
    """Σ_k codes_k + round(N(0, σ²)) per coordinate: the released answer.

    ``codes`` holds one int64 vector a site of the roster, each the sum of that site's m codes; a site that failed after
    accepting stands as the zero code. Guarantee: what is released about the codes is (Δ/σ)-GDP with Δ and σ of
    ``mechanism``, for every input, because each vector is tested here once more: ‖code‖₂ ≤ m·R in exact integers. That
    any single voter of a site stays within R rests on the site's own :func:`~common.privacy.quantise.quantise`.
    Edge cases: no codes, a wrong dtype or length, a norm beyond the bound, K·m·R ≥ 2⁶², or a sampler that does not
    return ``dimension`` int64 values below 2⁶² → InvalidInput, with nothing released. ``sampler`` is for tests.
    """
    if not codes:
        raise InvalidInput("codes to sum", value=0, limit="at least one")
    bound = mechanism.site_radius_int
    if len(codes) * bound >= _ROOM:
        raise InvalidInput("sum of codes", value=len(codes), limit="K·m·R below 2^62", remedy="use a smaller radius")
    total = np.zeros(mechanism.dimension, dtype=np.int64)  # sensitive until noised
    for index, code in enumerate(codes):
        if not isinstance(code, np.ndarray) or code.dtype != np.int64 or code.shape != total.shape:
            raise InvalidInput(f"code {index}", limit=f"an int64 vector of length {mechanism.dimension}")
        if not within(code, bound_int=bound):
            raise InvalidInput(f"code {index}", limit="an l2 norm of at most m·R", remedy="count it as the zero code")
        total += code
    noise = sampler(mechanism.dimension, mechanism.noise_std)
    if not isinstance(noise, np.ndarray) or noise.dtype != np.int64 or noise.shape != total.shape:
        raise InvalidInput("noise", limit=f"an int64 vector of length {mechanism.dimension}")
    if int(noise.max()) >= _ROOM or int(noise.min()) <= -_ROOM:
        raise InvalidInput("noise", limit="below 2^62 in size")
    return total + noise
