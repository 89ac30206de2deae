"""Computes the noise shares of a sealed sum, and checks the sum that the server unmasks.

In a sealed sum, the K sites of the roster draw the noise, and up to t of them may collude with the server. Each site
adds its share, the rounded Gaussian round(N(0, s²)), to every coordinate of its code, with s² ≥ σ²/(K − t). The noise
that the server and any t sites do not know then has at least the claimed standard deviation σ. The sum of h rounded
Gaussians is, up to aliasing of order exp(−π²s²), post-processing of N(0, h·s²) (docs/privacy.md has the proof), so
shares below :data:`MIN_SHARE_STD` grid steps are refused.

Sites call this module for their shares. The server, auditors and disputes call it for the bounds. Refuses rosters with
fewer than two honest sites, and sums that honest sites cannot have made.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, isfinite, log, sqrt

import numpy as np
from jaxtyping import Int64, UInt64
from scipy.special import chndtrinc, chndtrix

from common.canonical import check_integer
from common.errors import InvalidInput, Refused
from common.privacy.calibration import sqrt_up
from common.privacy.gaussian import MAX_NOISE_STD
from common.privacy.mechanism import HONEST_SITES, Mechanism

MIN_SHARE_STD = 16
"""Smallest standard deviation of a site's noise share, in grid steps. The error term in the proof (docs/privacy.md) for
h honest sites is 29·h²·s²·exp(−π²s²) for each coordinate. For shares of this size or more it is below 2⁻³⁶⁰⁰ for 4,096
sites, less than the part of δ that is set aside.
"""
FALSE_ALARM = 1e-6
"""Largest probability that an honest sum, or an honest site's vector in a dispute, exceeds its bound."""
_ROOM = 1 << 62
_EXACT_UP_TO = 1e9
"""Largest noncentrality for which the noncentral χ² quantile is computed. Above it, a closed bound is used, which is at
most 0.01 % too large.
"""


def share_std(mechanism: Mechanism, *, sites: int) -> Fraction:
    """Return the standard deviation s = σ/√(K − t) of one site's share of the noise, rounded up.

    Guarantee: (K − t)·s² ≥ σ² exactly, with the mechanism's standard deviation σ of the noise.

    Args:
        mechanism: The release's mechanism, with ``colluders`` t set.
        sites: Number K of sites on the roster, at least t + 2.

    Returns:
        The share's standard deviation s, in grid steps of 2⁻¹⁶.

    Raises:
        InvalidInput: If the server adds the noise, K is too small, or s is outside the range that the proof and the
            sampler cover.
    """
    if mechanism.colluders is None:
        raise InvalidInput("mechanism", limit="a mechanism whose noise is drawn at the sites")
    honest = check_integer("sites on a roster", sites, least=mechanism.colluders + HONEST_SITES) - mechanism.colluders
    share = sqrt_up(mechanism.noise_std**2 / honest)
    if not MIN_SHARE_STD <= share <= MAX_NOISE_STD:
        raise InvalidInput(
            "share of the noise, in grid steps",
            value=float(share),
            limit=f"{MIN_SHARE_STD} to {float(MAX_NOISE_STD):g}",
            remedy="change the clipping norm C (codec.radius), or ask fewer sites at once",
        )
    return share


def sum_bound(mechanism: Mechanism, *, sites: int) -> int:
    """Return the norm that an honest noisy sum exceeds with probability at most :data:`FALSE_ALARM`.

    In the worst case all honest codes have one direction and the largest norm m·R (m voters of clipping norm R). The
    noise of K sites with shares of standard deviation s is N(0, K·s²) on every coordinate. For the sum S,
    ‖S‖²/(K·s²) is then noncentral χ² with l degrees of freedom, the length of a code, and noncentrality
    (K·m·R)²/(K·s²); for other honest codes it is stochastically smaller. The bound is that distribution's quantile,
    plus √l·K/2 for the rounding of K shares.

    The noiseless sums of honest sites fill a ball, and the noise is the same in every direction. No rotation-invariant
    test of the sum alone can therefore be tighter. A sum within the bound may still contain a wrong code. A sum beyond
    the bound almost certainly contains one.

    Args:
        mechanism: The release's mechanism, with ``colluders`` set.
        sites: Number K of sites on the roster.

    Returns:
        The bound in grid steps of 2⁻¹⁶.

    Raises:
        InvalidInput: If the server adds the noise, or K or s is outside the range of :func:`share_std`.
    """
    share = float(share_std(mechanism, sites=sites))
    return _longest(sites * mechanism.site_radius_int, share * sqrt(sites), mechanism.dimension, shares=sites)


@dataclass(frozen=True, slots=True)
class Length:
    """The joint length of several noisy sums in units of their noise, with the distribution it has for honest sums.

    For honest sums ``squared`` has a noncentral χ² distribution or is stochastically smaller. This holds even if later
    codes depend on earlier sums.

    Attributes:
        squared: Σ‖Sᵢ‖²/(Kᵢ·sᵢ²), for sums Sᵢ of Kᵢ sites whose noise shares have standard deviation sᵢ.
        dimension: Degrees of freedom.
        noncentrality: Σ(Kᵢ·m·R)²/(Kᵢ·sᵢ²), for m voters of clipping norm R at each site.
    """

    squared: float = 0.0
    dimension: int = 0
    noncentrality: float = 0.0

    @classmethod
    def of(cls, noisy: Int64[np.ndarray, "l"], mechanism: Mechanism, *, sites: int) -> Length:
        """Return the length of one unmasked sum, after subtracting what the rounding of the shares may add.

        Args:
            noisy: Int64 array of shape [l], the result of :func:`unmasked`.
            mechanism: The release's mechanism.
            sites: Number K of sites on the roster.

        Returns:
            The length; lengths of several sums are added with ``+``.

        Raises:
            InvalidInput: If the array has another type or shape.
        """
        if type(noisy) is not np.ndarray or noisy.dtype != np.int64 or noisy.shape != (mechanism.dimension,):
            raise InvalidInput("noisy sum", limit=f"int64[{mechanism.dimension}]")
        noise = float(share_std(mechanism, sites=sites)) * sqrt(sites)
        norm = max(0.0, sqrt(float(_norm_squared(noisy))) - sqrt(mechanism.dimension) * sites / 2)
        return cls((norm / noise) ** 2, mechanism.dimension, (sites * mechanism.site_radius_int / noise) ** 2)

    def __add__(self, other: Length) -> Length:
        return Length(
            self.squared + other.squared, self.dimension + other.dimension, self.noncentrality + other.noncentrality
        )

    @property
    def is_honest(self) -> bool:
        """True if the length does not exceed the bound for honest sums.

        Honest sums exceed the bound, and give False, with probability at most :data:`FALSE_ALARM`.
        """
        return self.dimension == 0 or self.squared <= _quantile(self.dimension, self.noncentrality, FALSE_ALARM)


def site_bound(mechanism: Mechanism, *, sites: int, queries: int = 1, false_alarm: float = FALSE_ALARM) -> int:
    """Return the norm that one honest site's code with its noise share exceeds with probability at most
    ``false_alarm``.

    An auditor uses it in a dispute, where a site's own vector is opened.

    Args:
        mechanism: The release's mechanism.
        sites: Number K of sites on the roster.
        queries: Number of queries of this mechanism whose vectors are joined to one vector and tested together.
        false_alarm: Largest probability that an honest site exceeds the bound.

    Returns:
        The bound in grid steps of 2⁻¹⁶.

    Raises:
        InvalidInput: If ``queries`` is below 1, or :func:`share_std` refuses the mechanism or the number of sites.
    """
    check_integer("queries whose vectors are joined", queries, least=1)
    longest, share = ceil(sqrt(queries) * mechanism.site_radius_int), float(share_std(mechanism, sites=sites))
    return _longest(longest, share, queries * mechanism.dimension, shares=1, false_alarm=false_alarm)


def _longest(mean: int, noise_std: float, dimension: int, *, shares: int, false_alarm: float = FALSE_ALARM) -> int:
    quantile = noise_std * sqrt(_quantile(dimension, (mean / noise_std) ** 2, false_alarm))
    return ceil(quantile + sqrt(dimension) * shares / 2)


@lru_cache(maxsize=256)
def _quantile(dimension: int, noncentrality: float, false_alarm: float) -> float:
    """Return a value that a noncentral χ² variable exceeds with probability at most ``false_alarm``.

    Uses the exact quantile where it can be computed, else the closed bound of Birgé 2001, Lemma 8.1.
    """
    if noncentrality <= _EXACT_UP_TO:
        exact = float(chndtrix(1 - false_alarm, dimension, noncentrality)) * (1 + 1e-8)
        if isfinite(exact) and exact > dimension + noncentrality:
            return exact
    x = -log(false_alarm)
    return dimension + noncentrality + 2 * sqrt((dimension + 2 * noncentrality) * x) + 2 * x


def push_unseen(mechanism: Mechanism, *, sites: int) -> float:
    """Return the change of a sum that one dishonest site can cause while 95 % of such sums pass the bound.

    The change is in units of the largest change by an honest site. The other sites are assumed to send the zero
    code.

    Args:
        mechanism: The release's mechanism.
        sites: Number K of sites on the roster.

    Returns:
        The change; 1 in an open study, in which every code is checked.
    """
    if mechanism.colluders is None:
        return 1.0
    noise = float(share_std(mechanism, sites=sites)) * sqrt(sites)
    reach = (sum_bound(mechanism, sites=sites) / noise) ** 2
    return sqrt(float(chndtrinc(reach, mechanism.dimension, 0.95))) * noise / mechanism.site_radius_int


def unmasked(total: UInt64[np.ndarray, "l"], mechanism: Mechanism, *, sites: int) -> Int64[np.ndarray, "l"]:
    """Return the noisy sum from the sum modulo 2⁶⁴ of all masked codes of a roster.

    Each site must send its code, within the norm bound, plus its noise share and its masks. A sum beyond
    :func:`sum_bound` is refused, because it is nearly certain that some site then sent something else. Masks
    that do not cancel leave uniform values, which pass with probability below 2⁻⁹.

    Args:
        total: Uint64 array of shape [l].
        mechanism: The release's mechanism.
        sites: Number K of sites on the roster.

    Returns:
        Int64 array of shape [l].

    Raises:
        InvalidInput: If the array has another type or shape, or the bound is too large for the test in exact integers.
        Refused: With code ``sum-spoiled`` if the sum is too long; for an honest sum with probability at most
            :data:`FALSE_ALARM`.
    """
    if type(total) is not np.ndarray or total.dtype != np.uint64 or total.shape != (mechanism.dimension,):
        raise InvalidInput("sum of masked codes", limit=f"uint64[{mechanism.dimension}]")
    bound = sum_bound(mechanism, sites=sites)
    if bound >= _ROOM >> 8:
        raise InvalidInput(
            "sum of codes",
            value=sites,
            limit="sites × voters per site × radius, plus the noise, below 2^54 grid steps",
            remedy="use a smaller radius",
        )
    result = total.view(np.int64).copy()
    if not norm_within(result, bound):
        raise Refused(
            "sum-spoiled",
            "the sum is larger than the sum of any honest codes with their noise; to fix: see `consilium study "
            "status`, and find the site with `consilium dispute`",
        )
    return result


def norm_within(vector: Int64[np.ndarray, "l"], bound: int) -> bool:
    """Return whether a vector's norm is at most ``bound``, computed in exact integers.

    Args:
        vector: Int64 array of shape [l].
        bound: Integer of at least 1.

    Returns:
        True if the norm is at most ``bound``. It is False for every bound if an entry's absolute value exceeds 2⁵⁴.

    Raises:
        InvalidInput: If ``bound`` is below 1.
    """
    check_integer("bound of a norm", bound, least=1)
    if max(int(vector.max()), -int(vector.min())) > min(bound, _ROOM >> 8):
        return False
    return _norm_squared(vector) <= bound**2


def _norm_squared(vector: Int64[np.ndarray, "l"]) -> int:
    """Return Σx² in exact integers, for entries below 2⁵⁴."""
    high, low = vector >> 27, vector & ((1 << 27) - 1)
    products = (high * high, high * low, low * low)  # each below 2⁵⁴; summed in halves, so none overflows
    sums = [int((part >> 27).sum()) * 2**27 + int((part & ((1 << 27) - 1)).sum()) for part in products]
    return sums[0] * 2**54 + sums[1] * 2**28 + sums[2]
