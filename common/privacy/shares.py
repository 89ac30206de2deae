"""Noise drawn in shares, one a site: what each site adds, and how the server adds up what it cannot read.

A roster of K sites of which at most t collude with the server: each adds round(N(0, s²)) to every coordinate of its
code, with s² ≥ σ²/(K − t), so that what is left for the server and any t of them carries σ at least. The sum of h
rounded Gaussians is, up to aliasing of order exp(−π²s²), post-processing of N(0, h·s²) (docs/privacy.md has the
proof), which is why shares below :data:`MIN_SHARE_STD` grid steps are refused. Refuses rosters with fewer than two
honest sites, and sums that no honest sites can have made.
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
"""Grid steps. The lemma's error term for h honest sites, 29·h²·s²·exp(−π²s²) a coordinate, is then below 2⁻³⁶⁰⁰ for
4,096 of them, which is under what is set aside of δ."""
FALSE_ALARM = 1e-6
"""Probability that one sum of honest sites, or one site's own part in a dispute, is longer than its bound, at most."""
_ROOM = 1 << 62
_EXACT_UP_TO = 1e9
"""Noncentrality up to which the noncentral χ² quantile is computed; beyond it a closed bound is within 0.01 %."""


def share_std(mechanism: Mechanism, *, sites: int) -> Fraction:
    """The standard deviation s of one site's share on a roster of ``sites``: σ/√(K − t), rounded up.

    Guarantee: (K − t)·s² ≥ σ² exactly. InvalidInput for a mechanism whose noise the server adds, fewer than
    two beside the t colluders, or a share too small for the lemma.
    """
    if mechanism.colluders is None:
        raise InvalidInput("mechanism", limit="one whose noise is drawn at the sites")
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
    """The longest norm that an honest noisy sum has, but for probability :data:`FALSE_ALARM`, in grid steps.

    The worst honest sites send codes of norm m·R in one direction, and their noise is N(0, K·s²) on every coordinate:
    ‖S‖²/(K·s²) is then noncentral χ² with l degrees of freedom and noncentrality (K·m·R)²/(K·s²), and stochastically
    smaller for all other honest codes. The bound is that law's quantile, plus √l·K/2 for the rounding of K shares. The
    honest means fill a ball and the noise is alike in every direction, so no test of the sum alone that treats
    directions alike is tighter. A sum within the bound may still hold a wrong code; one beyond it must.
    """
    share = float(share_std(mechanism, sites=sites))
    return _longest(sites * mechanism.site_radius_int, share * sqrt(sites), mechanism.dimension, shares=sites)


@dataclass(frozen=True, slots=True)
class Length:
    """How long several noisy sums are together, in units of their noise, and how long honest ones are by their law.

    ``squared`` is Σ‖Sᵢ‖²/(Kᵢ·sᵢ²). Of honest sums it is noncentral χ² with ``dimension`` degrees of freedom and
    ``noncentrality`` Σ(Kᵢ·m·R)²/(Kᵢ·sᵢ²), or stochastically smaller, also where later codes depend on earlier sums.
    """

    squared: float = 0.0
    dimension: int = 0
    noncentrality: float = 0.0

    @classmethod
    def of(cls, noisy: Int64[np.ndarray, "l"], mechanism: Mechanism, *, sites: int) -> Length:
        """The length of one sum that :func:`unmasked` gave; the rounding of its shares counts for its sites."""
        if noisy.dtype != np.int64 or noisy.shape != (mechanism.dimension,):
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
        """Whether honest sums may be so long; False for honest ones with probability :data:`FALSE_ALARM` at most."""
        return self.dimension == 0 or self.squared <= _quantile(self.dimension, self.noncentrality, FALSE_ALARM)


def site_bound(mechanism: Mechanism, *, sites: int, queries: int = 1, false_alarm: float = FALSE_ALARM) -> int:
    """The same for one site's own code and share of the noise, as an auditor sees it in a dispute, in grid steps.

    ``queries``: of the parts of so many queries of this mechanism side by side, as one vector.
    """
    check_integer("queries side by side", queries, least=1)
    longest, share = ceil(sqrt(queries) * mechanism.site_radius_int), float(share_std(mechanism, sites=sites))
    return _longest(longest, share, queries * mechanism.dimension, shares=1, false_alarm=false_alarm)


def _longest(mean: int, noise_std: float, dimension: int, *, shares: int, false_alarm: float = FALSE_ALARM) -> int:
    quantile = noise_std * sqrt(_quantile(dimension, (mean / noise_std) ** 2, false_alarm))
    return ceil(quantile + sqrt(dimension) * shares / 2)


@lru_cache(maxsize=256)
def _quantile(dimension: int, noncentrality: float, false_alarm: float) -> float:
    """What a noncentral χ² variable exceeds with probability ``false_alarm`` at most.

    Where the exact quantile is out of reach: Birgé 2001, Lemma 8.1.
    """
    if noncentrality <= _EXACT_UP_TO:
        exact = float(chndtrix(1 - false_alarm, dimension, noncentrality)) * (1 + 1e-8)
        if isfinite(exact) and exact > dimension + noncentrality:
            return exact
    x = -log(false_alarm)
    return dimension + noncentrality + 2 * sqrt((dimension + 2 * noncentrality) * x) + 2 * x


def push_unseen(mechanism: Mechanism, *, sites: int) -> float:
    """The largest push of one site, in m·R, that 95 % of sums let pass while the others send the zero code.

    An honest site's is 1 at most; in an open sum nobody's is more.
    """
    if mechanism.colluders is None:
        return 1.0
    noise = float(share_std(mechanism, sites=sites)) * sqrt(sites)
    reach = (sum_bound(mechanism, sites=sites) / noise) ** 2
    return sqrt(float(chndtrinc(reach, mechanism.dimension, 0.95))) * noise / mechanism.site_radius_int


def unmasked(total: UInt64[np.ndarray, "l"], mechanism: Mechanism, *, sites: int) -> Int64[np.ndarray, "l"]:
    """The noisy sum behind the sum modulo 2⁶⁴ of all masked codes of a roster.

    Refused (``sum-spoiled``) beyond :func:`sum_bound`: then a site sent something else than a code within m·R with its
    noise and its masks. Masks that do not cancel leave uniform words: one passes with probability below 2⁻⁹. An honest
    sum is refused with probability :data:`FALSE_ALARM` at most.
    """
    if total.dtype != np.uint64 or total.shape != (mechanism.dimension,):
        raise InvalidInput("sum of masked codes", limit=f"uint64[{mechanism.dimension}]")
    bound = sum_bound(mechanism, sites=sites)
    if bound >= _ROOM >> 8:
        raise InvalidInput(
            "sum of codes", value=sites, limit="K·m·R and its noise below 2^54", remedy="a smaller radius"
        )
    result = total.view(np.int64).copy()
    if not norm_within(result, bound):
        raise Refused("sum-spoiled", "the sum of a roster is larger than honest codes with their noise can make it")
    return result


def norm_within(vector: Int64[np.ndarray, "l"], bound: int) -> bool:
    """Whether a vector's norm is at most ``bound``, which is below 2⁵⁴, in exact integers."""
    check_integer("bound of a norm", bound, least=1)
    if max(int(vector.max()), -int(vector.min())) > min(bound, _ROOM >> 8):
        return False
    return _norm_squared(vector) <= bound**2


def _norm_squared(vector: Int64[np.ndarray, "l"]) -> int:
    """Σx² in exact integers, of entries below 2⁵⁴."""
    high, low = vector >> 27, vector & ((1 << 27) - 1)
    products = (high * high, high * low, low * low)  # each below 2⁵⁴: summed in halves, nothing wraps
    sums = [int((part >> 27).sum()) * 2**27 + int((part & ((1 << 27) - 1)).sum()) for part in products]
    return sums[0] * 2**54 + sums[1] * 2**28 + sums[2]
