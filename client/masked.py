"""A site's part in a sealed sum: whom it masks with, its share of the noise, and its masks.

What leaves is code + round(N(0, s²)) + masks modulo 2⁶⁴ (:mod:`common.masking`, :mod:`common.privacy.shares`). Refuses
a roster that this site is not on with its own key, that is smaller than the study says, or that has a member whose
identity nobody here has confirmed: with a server that invents members, the sum would be this site's code alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from common.config import PrivacyConfig
from common.errors import InvalidInput, Refused
from common.masking import MaskedRoster, masks, unconfirmed
from common.peers import Peer
from common.privacy.gaussian import Sampler
from common.privacy.mechanism import QuerySpec


def strangers(offered: tuple[Peer, ...], *, me: str, confirmed: Mapping[str, str]) -> tuple[str, ...]:
    """Peers of an offer, by name, whose very keys nobody at this site has confirmed."""
    return tuple(sorted(peer.site for peer in offered if peer.site != me and confirmed.get(peer.site) != peer.key))


def check_roster(roster: MaskedRoster, *, me: str, confirmed: Mapping[str, str], privacy: PrivacyConfig) -> None:
    """Refused (``roster``, ``unknown-peers``) unless a sum over this roster hides the site's code as the study says.

    A sealed study's quorum leaves two honest sites beside its colluders, or it cannot be stated.
    """
    least = privacy.quorum
    if me not in roster.sites or len(roster.members) < least:
        raise Refused("roster", f"a roster of {len(roster.members)} sites, of which {least} with this one are needed")
    if unknown := unconfirmed(roster, me=me, peers=confirmed):
        raise Refused(
            "unknown-peers",
            f"the keys of {', '.join(unknown)} were not confirmed here, or did not sign this draw; to fix: `consilium "
            "site peers`",
        )


def with_share(code: NDArray[np.int64], share: Fraction, *, sampler: Sampler) -> NDArray[np.int64]:
    """A site's code with the site's own share of the noise, round(N(0, ``share``²)) on every coordinate."""
    dimension = len(code)
    noise = sampler(dimension, share)
    if noise.dtype != np.int64 or noise.shape != code.shape:
        raise InvalidInput("noise", limit=f"an int64 vector of length {dimension}")
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
    """The words that leave, uint64[l]: uniform to whoever lacks one of the masks. ``code`` int64[l] is within m·R."""
    noisy = with_share(code, share, sampler=sampler).view(np.uint64)
    added: NDArray[np.uint64] = noisy + masks(
        roster, me=me, private=private, query=query.id, dimension=query.mechanism.dimension
    )
    return added
