"""Checks a sealed study from the view of its server together with the t sites that may collude.

Together they know the noise shares of the t sites, and the masks that these sites share with others. The module
measures the noise that remains after their shares are subtracted. It also checks that the masked codes of another site
still look uniform after the masks that it shares with the t sites are subtracted. It reads the ledger files with every
site's key, which only an audit has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import log2

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from jaxtyping import Int64, UInt64

from common.canonical import parse_canonical
from common.ledger.keys import load_signing_key
from common.masking import MaskedRoster, mask_private_key, masks, pair_mask
from common.privacy.audit import AuditFinding
from consilium.audit.service import AuditedRelease, AuditedRun, Service, read_rows, vector

READABLE_BITS = 49
"""A vector counts as not uniform if the magnitude of each of its numbers has fewer than this many bits, of 63. A
uniform vector of two or more numbers counts as not uniform with probability ≤ 2⁻²⁸.
"""


@dataclass(frozen=True, slots=True)
class _Draw:
    """A release of a sealed sum with its roster, and each site's private mask key and masked code."""

    release: AuditedRelease
    roster: MaskedRoster
    privates: dict[str, X25519PrivateKey]
    words: dict[str, UInt64[np.ndarray, "l"]]


def left_of_noise(
    service: Service, life: AuditedRun, releases: list[AuditedRelease], *, turn: int = 0
) -> list[Int64[np.ndarray, "l"]]:
    """Return the noise of each release that remains without the shares of the colluding sites.

    Args:
        service: The study's server and sites.
        life: Contents of their ledgers after one complete run.
        releases: The releases.
        turn: Number that selects the colluding sites of the first release; they change with each release.

    Returns:
        int64 arrays of shape [l].
    """
    found = []
    for number, draw in enumerate(_draws(service, releases)):
        codes = {site: life.sites[site].codes[draw.release.query] for site in draw.release.roster}
        noise = draw.release.answer - sum(codes.values())
        for site in _colluders(service, draw.release, turn=turn + number):
            noise = noise - (_bare(draw, site) - codes[site])
        found.append(noise)
    return found


def largest_bits(words: Int64[np.ndarray, "l"]) -> float:
    """Return the bits of the largest number of a vector.

    Args:
        words: Int64 array [l].

    Returns:
        The base-2 logarithm of the largest magnitude, at least 0.
    """
    return log2(max(float(np.abs(words.astype(float)).max()), 1.0))


def masked_findings(service: Service, releases: list[AuditedRelease]) -> list[AuditFinding]:
    """Check that a site's masked codes look uniform to the server together with as many sites as may collude.

    The masked codes themselves and their differences to the site's earlier ones are checked.

    Args:
        service: The study's server and sites.
        releases: The releases.

    Returns:
        A finding. For each masked code and each difference, the bits of its largest number are counted; ``measured`` is
        the smallest of these counts. Uniform numbers have about 63 bits.
    """
    seen: dict[tuple[str, int], list[Int64[np.ndarray, "l"]]] = {}
    for draw in _draws(service, releases):
        for site, turn in product(draw.release.roster, range(len(draw.release.roster))):
            colluders = _colluders(service, draw.release, turn=turn)
            if site not in colluders:
                seen.setdefault((site, turn), []).append(_without_masks(draw, site, colluders))
    looked_at = [one for words in seen.values() for one in words]
    pairs = [pair for words in seen.values() for pair in pairwise(words)]
    looked_at += [one - other for one, other in pairs if one.size == other.size]
    bits = min(map(largest_bits, looked_at), default=63.0)
    what = "bits of a site's masked codes and of their differences, as the server and t sites see them"
    return [AuditFinding.at_least("masked words", bits, READABLE_BITS, what)]


def _colluders(service: Service, release: AuditedRelease, *, turn: int) -> tuple[str, ...]:
    """Return the sites of a release that are assumed to collude.

    The choice changes with ``turn``. Over as many turns as the roster has sites, every site is chosen equally often.
    """
    sites = len(release.roster)
    return tuple(release.roster[(turn + place) % sites] for place in range(service.study.privacy.colluders))


def _without_masks(draw: _Draw, site: str, colluders: Sequence[str]) -> Int64[np.ndarray, "l"]:
    """Return a site's masked code after removing the masks that it shares with the colluders."""
    known = draw.words[site]
    for member in draw.roster.members:
        if member.site in colluders:
            known = known - pair_mask(
                draw.roster,
                me=site,
                peer=member,
                private=draw.privates[site],
                query=draw.release.query,
                dimension=draw.release.dimension,
            )
    return known.view(np.int64)


def _bare(draw: _Draw, site: str) -> Int64[np.ndarray, "l"]:
    """Return a site's code with its noise share, after removing its masks."""
    release = draw.release
    own = masks(draw.roster, me=site, private=draw.privates[site], query=release.query, dimension=release.dimension)
    return (draw.words[site] - own).view(np.int64)


def _draws(service: Service, releases: list[AuditedRelease]) -> list[_Draw]:
    _, stored = read_rows(service.workspace.ledger_file, "answers")
    files = {site.name: read_rows(service.site_file(i), "codes") for i, site in enumerate(service.sites)}
    found = []
    for release in releases:
        roster = MaskedRoster.from_json(parse_canonical(stored[release.masks]))
        privates, words = {}, {}
        for site in release.roster:
            rows, payloads = files[site]
            nonce = next(
                body["nonce"]
                for kind, body in rows
                if kind == "mask-key" and (body["batch"], body["draw"]) == (roster.batch, roster.draw)
            )
            secret = load_signing_key(service.key_file(site)).private_bytes_raw()
            privates[site] = mask_private_key(secret, roster.draw_id, nonce=nonce)
            words[site] = vector(payloads[f"{release.query}/{release.draw}"]).view(np.uint64)
        found.append(_Draw(release, roster, privates, words))
    return found
