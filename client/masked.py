"""Computes a site's part in a sealed sum: checks the roster, and adds the site's noise share and its masks to its code.

A *sealed sum* is a secure aggregation: each hospital adds a share of the noise, and masks that cancel in the sum. The
*roster* lists the hospitals that take part. The worker calls this module. The site sends code + round(N(0, s²)) +
masks, modulo 2⁶⁴ (:mod:`common.masking`), where s is the standard deviation of its noise share
(:mod:`common.privacy.shares`). The module refuses a roster without this site, a roster
with fewer members than the study's quorum, and a roster with a member whose key nobody at this site has confirmed: if
the server had invented the other members, the sum would reveal this site's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from common.config import PrivacyConfig
from common.errors import ASK_OPERATOR, InvalidInput, Refused
from common.masking import MaskedRoster, masks, unconfirmed
from common.peers import Peer
from common.privacy.gaussian import Sampler
from common.privacy.mechanism import QuerySpec


def unconfirmed_peers(offered: tuple[Peer, ...], *, me: str, confirmed: Mapping[str, str]) -> tuple[str, ...]:
    """Return the other hospitals in an offer whose keys nobody at this site has confirmed.

    Args:
        offered: Peers in the offer.
        me: This site's name.
        confirmed: Confirmed key, in hex, by site.

    Returns:
        Their names, sorted.
    """
    return tuple(sorted(peer.site for peer in offered if peer.site != me and confirmed.get(peer.site) != peer.key))


def check_roster(roster: MaskedRoster, *, me: str, confirmed: Mapping[str, str], privacy: PrivacyConfig) -> None:
    """Refuse a roster (list of hospitals in one sealed sum) under which the sum would not hide this site's code.

    The roster needs at least as many members as the study's quorum. A sealed study's quorum is at least the number of
    hospitals that are assumed to collude with the server, plus two.

    Args:
        roster: The roster of the sum.
        me: This site's name.
        confirmed: Confirmed key, in hex, by site.
        privacy: The study's privacy settings.

    Raises:
        Refused: ``roster`` if this site is missing or members are fewer than the quorum; ``unknown-peers`` if a
            member's key is not confirmed or did not sign this draw.
    """
    least = privacy.quorum
    if me not in roster.sites or len(roster.members) < least:
        raise Refused(
            "roster",
            f"the roster has {len(roster.members)} sites; at least {least} are needed, this site among them; to fix: "
            f"{ASK_OPERATOR}",
        )
    if unknown := unconfirmed(roster, me=me, peers=confirmed):
        raise Refused(
            "unknown-peers",
            f"the keys of {', '.join(unknown)} were not confirmed at this site, or did not sign this draw; to fix: "
            "compare and confirm them with `consilium site peers`",
        )


def with_share(code: NDArray[np.int64], share: Fraction, *, sampler: Sampler) -> NDArray[np.int64]:
    """Add the site's own noise share round(N(0, ``share``²)) to every coordinate of its code.

    Args:
        code: int64 array [l]. # sensitive
        share: Standard deviation of the share, in grid steps of 2⁻¹⁶.
        sampler: The noise sampler.

    Returns:
        The code plus the noise share, int64 array [l].

    Raises:
        InvalidInput: If the sampler returns another type or shape.
    """
    dimension = len(code)
    noise = sampler(dimension, share)
    if type(noise) is not np.ndarray or noise.dtype != np.int64 or noise.shape != code.shape:
        raise InvalidInput("noise share from the sampler", limit=f"an int64 vector of length {dimension}")
    noisy: NDArray[np.int64] = code + noise
    return noisy


def masked_code(
    code: NDArray[np.int64],
    query: QuerySpec,
    share: Fraction,
    *,
    roster: MaskedRoster,
    me: str,
    private: X25519PrivateKey,
    sampler: Sampler,
) -> NDArray[np.uint64]:
    """Compute what a site sends in a sealed sum: its code plus its noise share plus its masks, modulo 2⁶⁴.

    To anybody who does not know all of the masks, the result is uniformly random and reveals nothing about the code.

    Args:
        code: The sum of the codes of the site's m voters, int64 array [l] of norm at most m·R, where R is the clipping
            norm C in grid steps of 2⁻¹⁶. # sensitive
        query: The query.
        share: Standard deviation of the noise share, in grid steps of 2⁻¹⁶.
        roster: The roster of the draw.
        me: This site's name.
        private: This site's mask key of the draw.
        sampler: The noise sampler.

    Returns:
        The masked code, uint64 array [l].
    """
    noisy = with_share(code, share, sampler=sampler).view(np.uint64)
    added: NDArray[np.uint64] = noisy + masks(
        roster, me=me, private=private, query=query.id, dimension=query.mechanism.dimension
    )
    return added
