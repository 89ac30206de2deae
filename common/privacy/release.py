"""Releases an answer: checks every site's integers, sums them exactly, and adds rounded Gaussian noise.

The server's engine and the audit call the same function. In open studies every answer that leaves the server comes from
this function. The module stores no code, logs nothing, and quotes no code in an error. Refuses codes beyond the norm
bound, and sums that could exceed int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from common.errors import InvalidInput
from common.privacy.checks import check_kind
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.mechanism import Mechanism
from common.privacy.quantise import within

_ROOM = 1 << 62


class CodeSum:
    """The running sum of the codes of one query. # sensitive until noised

    Each of K sites has m voters and sends one code, the sum of its voters' codes. R is the clipping norm of one voter,
    in grid steps of 2⁻¹⁶. The sum is in integers, so the order of the codes does not matter. No code is kept. A site
    that sends none counts as the zero code. Guarantee: a code with ‖code‖₂ > m·R, tested in exact integers, is refused
    and not added.

    Args:
        mechanism: The release's mechanism.

    Raises:
        InvalidInput: From the methods, for a wrong dtype or length, a norm beyond the bound, or K·m·R ≥ 2⁶². The sum is
            then unchanged.
    """

    def __init__(self, mechanism: Mechanism) -> None:
        self.mechanism, self.codes = check_kind("mechanism", mechanism, Mechanism), 0
        self._total = np.zeros(mechanism.dimension, dtype=np.int64)

    def add(self, code: Int64[np.ndarray, "l"]) -> None:
        """Add one site's code to the sum.

        The caller ensures that each site's code is added once.

        Args:
            code: Int64 array of shape [l], the sum of the codes of the site's voters.

        Raises:
            InvalidInput: For a wrong dtype or length, a norm beyond the bound of a site, or a sum that could leave
                int64.
        """
        if type(code) is not np.ndarray or code.dtype != np.int64 or code.shape != self._total.shape:
            raise InvalidInput(f"code {self.codes}", limit=f"a plain int64 array of length {self.mechanism.dimension}")
        _check_room(self.mechanism, self.codes + 1)
        if not within(code, bound_int=self.mechanism.site_radius_int):
            raise InvalidInput(
                f"code {self.codes}",
                limit="an l2 norm of at most m·R, the voters per site times the radius",
                remedy="count it as the zero code",
            )
        self._total += code
        self.codes += 1

    def released(self, *, sites: int, sampler: Sampler = rounded_gaussian) -> Int64[np.ndarray, "l"]:
        """Return the sum plus rounded Gaussian noise on every coordinate: the answer, with fresh noise each time.

        Args:
            sites: Sites on the roster, at least one and at least the number of codes.
            sampler: The noise source. Only tests pass one; production uses the default.

        Returns:
            Int64 array of shape [l], safe to release.

        Raises:
            InvalidInput: For too few sites, K·m·R ≥ 2⁶² (see the class), or a sampler that does not return l int64
                values below 2⁶². Nothing is released then.
        """
        if type(sites) is not int or sites < max(1, self.codes):
            raise InvalidInput(
                "sites on a roster", value=sites, limit=f"at least 1, and at least {self.codes}, the number of codes"
            )
        _check_room(self.mechanism, sites)
        if not callable(sampler):
            raise InvalidInput("sampler", value=type(sampler).__name__, limit="a function that draws noise")
        noise = sampler(self.mechanism.dimension, self.mechanism.noise_std)
        if type(noise) is not np.ndarray or noise.dtype != np.int64 or noise.shape != self._total.shape:
            raise InvalidInput(
                "noise from the sampler", limit=f"a plain int64 array of length {self.mechanism.dimension}"
            )
        if int(noise.max()) >= _ROOM or int(noise.min()) <= -_ROOM:
            raise InvalidInput("noise from the sampler", limit="numbers below 2^62 in absolute value")
        return self._total + noise


def noisy_sum(
    codes: Sequence[Int64[np.ndarray, "l"]], mechanism: Mechanism, *, sampler: Sampler = rounded_gaussian
) -> Int64[np.ndarray, "l"]:
    """Return the sum of the codes plus rounded Gaussian noise on every coordinate: the answer that is released.

    Guarantee: the release is (Δ/σ)-GDP with the sensitivity Δ and the noise's standard deviation σ of ``mechanism``,
    for every input, because every code is tested here. That each voter of a site stays within the clipping norm depends
    on the site's own :func:`~common.privacy.quantise.quantise`.

    Args:
        codes: One int64 array of shape [l] for each site of the roster.
        mechanism: Dimension, norm bound and noise.
        sampler: The noise source. Only tests pass one; production uses the default.

    Returns:
        Int64 array of shape [l].

    Raises:
        InvalidInput: If there is no code, or :class:`CodeSum` refuses one. No noise is drawn then.

    >>> release = c.Mechanism(dimension=2, radius_int=65536, voters_per_site=1, noise_std=Fraction(1000))
    >>> c.noisy_sum([np.array([39321, 52428])] * 3, release).shape
    (2,)
    """
    if not isinstance(codes, list | tuple):
        raise InvalidInput("codes", value=type(codes).__name__, limit="a list with one code for each site")
    summed = CodeSum(mechanism)
    if codes:
        _check_room(mechanism, len(codes))
    for code in codes:
        summed.add(code)
    return summed.released(sites=len(codes), sampler=sampler)


def _check_room(mechanism: Mechanism, sites: int) -> None:
    if sites * mechanism.site_radius_int >= _ROOM:
        raise InvalidInput(
            "sum of codes",
            value=sites,
            limit="sites × voters per site × radius below 2^62 grid steps",
            remedy="use a smaller radius",
        )
