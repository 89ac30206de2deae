"""A sealed study as its server sees it together with t of its sites, whose shares of the noise and masks it knows.

What is left is measured: the noise of a sum without the colluders' shares, and what a site's words look like without
the masks it shares with them. Read from the files alone, with every site's key, which only an audit holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import log2, sqrt

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from jaxtyping import Int64, UInt64

from common.canonical import parse_canonical
from common.ledger.keys import load_signing_key
from common.masking import MaskedRoster, mask_private_key, masks, pair_mask
from common.privacy.audit import Finding
from consilium.audit.service import Life, Release, Service, read_rows, vector

READABLE_BITS = 49
"""Of 63: that a uniform vector of two numbers or more stays below has probability 2⁻²⁸ or less."""


@dataclass(frozen=True, slots=True)
class _Draw:
    """A release with its roster and what it takes to look behind every site's masks."""

    release: Release
    roster: MaskedRoster
    privates: dict[str, X25519PrivateKey]
    words: dict[str, UInt64[np.ndarray, "l"]]


def left_of_noise(service: Service, life: Life, releases: list[Release]) -> list[Int64[np.ndarray, "l"]]:
    """The noise of each release, without the shares of the last t sites of its roster."""
    found = []
    for draw in _draws(service, releases):
        codes = {site: life.sites[site].codes[draw.release.query] for site in draw.release.roster}
        noise = draw.release.answer - sum(codes.values())
        for site in _colluders(service, draw.release):
            noise = noise - (_bare(draw, site) - codes[site])
        found.append(noise)
    return found


def share_bits(service: Service, release: Release) -> float:
    """Bits of entropy in all the shares of one release."""
    sites = len(release.roster)
    share = release.noise_std / sqrt(sites - service.study.privacy.colluders)
    return sites * release.dimension * log2(share * sqrt(2 * np.pi * np.e))


def masked_findings(service: Service, releases: list[Release]) -> list[Finding]:
    """What the first site of every roster sends must look like nothing to the server and t sites, also beside another.

    ``measured``: the bits of the largest number in what they can make of it, in the worst release.
    """
    seen: list[Int64[np.ndarray, "l"]] = []
    for draw in _draws(service, releases):
        first, known = draw.release.roster[0], draw.words[draw.release.roster[0]]
        for member in draw.roster.members:
            if member.site in _colluders(service, draw.release):
                known = known - pair_mask(
                    draw.roster,
                    me=first,
                    peer=member,
                    private=draw.privates[first],
                    query=draw.release.query,
                    dimension=draw.release.dimension,
                )
        seen.append(known.view(np.int64))
    apart = [one - other for one, other in pairwise(seen) if one.size == other.size]
    bits = min((log2(max(float(np.abs(one.astype(float)).max()), 1.0)) for one in (*seen, *apart)), default=63.0)
    meaning = "bits of a site's words, and of their differences, to the server and t sites; at least"
    return [Finding("masked words", bits, READABLE_BITS, bits < READABLE_BITS, meaning)]


def _colluders(service: Service, release: Release) -> tuple[str, ...]:
    t = service.study.privacy.colluders
    return release.roster[len(release.roster) - t :]


def _bare(draw: _Draw, site: str) -> Int64[np.ndarray, "l"]:
    """A site's code and noise, once its own masks are taken away."""
    release = draw.release
    own = masks(draw.roster, me=site, private=draw.privates[site], query=release.query, dimension=release.dimension)
    return (draw.words[site] - own).view(np.int64)


def _draws(service: Service, releases: list[Release]) -> list[_Draw]:
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
