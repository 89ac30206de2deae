"""Noise drawn in shares, one a site: what each site adds, and how the server adds up what it cannot read.

A roster of K sites of which at most t collude with the server: each adds round(N(0, s²)) to every coordinate of its
code, with s² ≥ σ²/(K − t), so that what is left for the server and any t of them carries σ at least. The sum of h
rounded Gaussians is, up to aliasing of order exp(−π²s²), post-processing of N(0, h·s²) (docs/privacy.md has the
proof), which is why shares below :data:`MIN_SHARE_STD` grid steps are refused. Refuses rosters with fewer than two
honest sites, and sums that no honest sites can have made.
"""

from __future__ import annotations

from fractions import Fraction
from math import ceil, isqrt, log, sqrt

import numpy as np
from jaxtyping import Int64, UInt64

from common.canonical import check_integer
from common.errors import InvalidInput, Refused
from common.privacy.calibration import sqrt_up
from common.privacy.gaussian import MAX_NOISE_STD
from common.privacy.mechanism import HONEST_SITES, Mechanism

MIN_SHARE_STD = 16
"""Grid steps. The lemma's error term for h honest sites, 29·h²·s²·exp(−π²s²) a coordinate, is then below 2⁻³⁶⁰⁰ for
4,096 of them, which is under what is set aside of δ."""
_UNLIKELY = 80
"""An honest sum passes its bound with probability below 2⁻⁸⁰."""
_ROOM = 1 << 62


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
    """What the norm of an honest noisy sum stays within: K·m·R + s·√K·(√l + √(2·80·ln 2)) + √l·K/2, in grid steps.

    The second term bounds a Gaussian vector's norm but for probability 2⁻⁸⁰ (Laurent & Massart 2000, Lemma 1), the
    third the rounding of K shares. A sum within the bound may still hold a wrong code; one beyond it must.
    """
    noise = float(share_std(mechanism, sites=sites)) * sqrt(sites)
    root = isqrt(mechanism.dimension) + 1
    return sites * mechanism.site_radius_int + ceil(noise * (root + sqrt(2 * _UNLIKELY * log(2))) + root * sites / 2)


def unmasked(total: UInt64[np.ndarray, "l"], mechanism: Mechanism, *, sites: int) -> Int64[np.ndarray, "l"]:
    """The noisy sum behind the sum modulo 2⁶⁴ of all masked codes of a roster.

    Refused (``sum-spoiled``) beyond :func:`sum_bound`: then a site sent something else than a code within m·R with its
    noise and its masks. Masks that do not cancel leave uniform words: one passes with probability below 2⁻⁹.
    """
    if total.dtype != np.uint64 or total.shape != (mechanism.dimension,):
        raise InvalidInput("sum of masked codes", limit=f"uint64[{mechanism.dimension}]")
    bound = sum_bound(mechanism, sites=sites)
    if bound >= _ROOM >> 8:
        raise InvalidInput(
            "sum of codes", value=sites, limit="K·m·R and its noise below 2^54", remedy="a smaller radius"
        )
    result = total.view(np.int64).copy()
    if max(int(result.max()), -int(result.min())) > bound or _norm_squared(result) > bound**2:
        raise Refused("sum-spoiled", "the sum of a roster is larger than honest codes with their noise can make it")
    return result


def _norm_squared(vector: Int64[np.ndarray, "l"]) -> int:
    """Σx² in exact integers, of entries below 2⁵⁴."""
    high, low = vector >> 27, vector & ((1 << 27) - 1)
    products = (high * high, high * low, low * low)  # each below 2⁵⁴: summed in halves, nothing wraps
    sums = [int((part >> 27).sum()) * 2**27 + int((part & ((1 << 27) - 1)).sum()) for part in products]
    return sums[0] * 2**54 + sums[1] * 2**28 + sums[2]
