"""The one way an answer leaves the server: check every site's integers, sum exactly, add rounded Gaussian noise.

This is the function that is audited and the function that is used. It keeps no code, logs nothing and never quotes one.
Refuses codes beyond the norm bound and sums that could leave int64.
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


class CodeSum:
    """Σ_k codes_k of one query while they come in: integers, so exact in any order. # sensitive until noised

    Keeps none of them. Each code is one site's int64 vector, the sum of its m voters' codes; a site that sends none
    stands as the zero code. Guarantee: each was tested, ‖code‖₂ ≤ m·R in exact integers, before it was added. Edge
    cases: a wrong dtype or length, a norm beyond the bound, K·m·R ≥ 2⁶² → InvalidInput, and the sum is what it was.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism, self.codes = mechanism, 0
        self._total = np.zeros(mechanism.dimension, dtype=np.int64)

    def add(self, code: Int64[np.ndarray, "l"]) -> None:
        """Add one site's code; each site's once is for the caller to see to."""
        if not isinstance(code, np.ndarray) or code.dtype != np.int64 or code.shape != self._total.shape:
            raise InvalidInput(f"code {self.codes}", limit=f"an int64 vector of length {self.mechanism.dimension}")
        _check_room(self.mechanism, self.codes + 1)
        if not within(code, bound_int=self.mechanism.site_radius_int):
            raise InvalidInput(
                f"code {self.codes}", limit="an l2 norm of at most m·R", remedy="count it as the zero code"
            )
        self._total += code
        self.codes += 1

    def released(self, *, sites: int, sampler: Sampler = rounded_gaussian) -> Int64[np.ndarray, "l"]:
        """The sum over a roster of so many sites + round(N(0, σ²)) per coordinate: the answer, fresh noise each time.

        Edge cases: no site, fewer sites than codes, K·m·R ≥ 2⁶², or a sampler that does not return ``dimension`` int64
        values below 2⁶² → InvalidInput, with nothing released. ``sampler`` is for tests.
        """
        if type(sites) is not int or sites < max(1, self.codes):
            raise InvalidInput("codes to sum", value=sites, limit="at least one site, and one for each code")
        _check_room(self.mechanism, sites)
        noise = sampler(self.mechanism.dimension, self.mechanism.noise_std)
        if not isinstance(noise, np.ndarray) or noise.dtype != np.int64 or noise.shape != self._total.shape:
            raise InvalidInput("noise", limit=f"an int64 vector of length {self.mechanism.dimension}")
        if int(noise.max()) >= _ROOM or int(noise.min()) <= -_ROOM:
            raise InvalidInput("noise", limit="below 2^62 in size")
        return self._total + noise


def noisy_sum(
    codes: Sequence[Int64[np.ndarray, "l"]], mechanism: Mechanism, *, sampler: Sampler = rounded_gaussian
) -> Int64[np.ndarray, "l"]:
    """Σ_k codes_k + round(N(0, σ²)) per coordinate: the released answer, of codes that are all there.

    ``codes`` holds one int64 vector a site of the roster. Guarantee: what is released about the codes is (Δ/σ)-GDP with
    Δ and σ of ``mechanism``, for every input, because each vector is tested here. That any single voter of a site stays
    within R rests on the site's own :func:`~common.privacy.quantise.quantise`. Refuses what :class:`CodeSum` refuses,
    and no codes, with nothing drawn.
    """
    if codes:
        _check_room(mechanism, len(codes))
    summed = CodeSum(mechanism)
    for code in codes:
        summed.add(code)
    return summed.released(sites=len(codes), sampler=sampler)


def _check_room(mechanism: Mechanism, sites: int) -> None:
    if sites * mechanism.site_radius_int >= _ROOM:
        raise InvalidInput("sum of codes", value=sites, limit="K·m·R below 2^62", remedy="use a smaller radius")
