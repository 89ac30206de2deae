"""Measures what a sealed sum costs a site and the server by number of sites: ``python -m benchmarks.sealed_sum [D]``.

One query has D coordinates (10,000 by default). A site checks its peers' signatures, draws its noise and makes its
masks. The server adds K messages; beside that stands the open mode's check of each code and its sum. Times are CPU
seconds of one process; compare the ratios.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.core import RecordedSites, federation
from benchmarks.run import RATIO, Figure, cpu_s, figure
from client.masked import masked_code
from common.canonical import canonical_bytes
from common.evidence import sign_word
from common.ledger.keys import public_hex
from common.masking import DrawId, MaskedRoster, Member, mask_private_key, signed_mask_key, unconfirmed
from common.messages import CodesReply, CodesRequest, Offer, OfferReply, Part
from common.privacy.gaussian import rounded_gaussian
from common.privacy.mechanism import Mechanism, QuerySpec
from common.privacy.release import noisy_sum
from common.privacy.shares import share_std, unmasked
from common.sealing import SealContext, seal
from server.study.workspace import Site

SITES = (8, 64, 256, 1_000)
STUDY, BATCH, QUERY, LEDGER = "a" * 64, "b" * 64, "c" * 64, "d" * 32
DRAW = DrawId(STUDY, LEDGER, BATCH, 1)


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of one query.

    Attributes:
        checking: Seconds in which a site checks its peers' keys.
        noise: Seconds in which it draws its noise.
        masking: Seconds in which it makes its masks.
        sent: Bytes of the roster that it receives.
        words: Bytes of the masked code that it sends.
        adding: Seconds in which the server adds all masked codes.
        opening: Seconds of the open mode's checks and sum.
    """

    checking: float
    noise: float
    masking: float
    sent: int
    words: int
    adding: float
    opening: float


def measured(sites: int, dimension: int) -> Cost:
    """Return the cost of one query.

    Args:
        sites: Number of sites K.
        dimension: Number of coordinates D.
    """
    mechanism = Mechanism(dimension, 65_536, 1, Fraction(131_072), colluders=1)
    identities = {f"site-{i:04d}": Ed25519PrivateKey.generate() for i in range(sites)}
    private, members = {}, []
    for name, identity in identities.items():
        private[name] = mask_private_key(identity.private_bytes_raw(), DRAW, nonce="0" * 64)
        key = signed_mask_key(private[name], DRAW, sign=identity.sign, site=name)
        members.append(Member(name, key))
    roster = MaskedRoster(STUDY, LEDGER, BATCH, 1, tuple(members))
    peers = {name: public_hex(identity) for name, identity in identities.items()}
    query = QuerySpec(1, QUERY, (QUERY,), 1, "zero", "codec", mechanism)
    code, share = np.zeros(dimension, dtype=np.int64), share_std(mechanism, sites=sites)

    def one(name: str) -> np.ndarray:
        return masked_code(code, query, share, roster=roster, me=name, private=private[name], sampler=rounded_gaussian)

    me = "site-0000"
    checking, masking = cpu_s(lambda: unconfirmed(roster, me=me, peers=peers)), cpu_s(lambda: one(me))
    noise = cpu_s(lambda: rounded_gaussian(dimension, share))
    words = np.random.default_rng(0).integers(0, 1 << 63, dimension, dtype=np.uint64)

    def add() -> None:
        total = np.zeros(dimension, dtype=np.uint64)
        for _ in range(sites):
            total += words

    adding, opening = cpu_s(add), cpu_s(lambda: noisy_sum([code] * sites, mechanism))
    if sites <= 16:  # compute one whole sum, to check that the timed functions give a valid one
        total = np.sum([one(name) for name in identities], axis=0, dtype=np.uint64)
        unmasked(np.asarray(total), mechanism, sites=sites)
    sent = len(canonical_bytes([member.to_json() for member in members]))
    return Cost(checking, noise, masking - noise, sent, 8 * dimension, adding, opening)


class MaskingSites(RecordedSites):
    """Stands for sites that make a mask key for each draw and mask their code; every 64th checks its peers' keys."""

    def __init__(self, *known: Any) -> None:
        super().__init__(*known)
        self._queries: dict[str, QuerySpec] = {}
        self._peers = {site.name: site.answer_key for site, _ in self._sites.values()}

    def _answer(self, node: int, site: Site, part: Part) -> Part:
        said, key = super()._answer(node, site, part), self._sites[node][1]
        private = partial(mask_private_key, key.private_bytes_raw(), nonce="0" * 64)
        if isinstance(part, Offer) and isinstance(said, OfferReply) and (draw := part.draw_id) is not None:
            self._queries |= {query.id: query for query in part.queries}
            mask = signed_mask_key(private(draw), draw, sign=key.sign, site=site.name)
            return replace(said, mask=mask, unconfirmed=())
        if isinstance(part, CodesRequest) and (roster := part.roster) is not None:
            if node % 64 == 0:
                with self._meter.stage("sites: keys of every 64th"):
                    assert not unconfirmed(roster, me=site.name, peers=self._peers)
            own = {"roster": roster, "me": site.name, "private": private(roster.draw_id), "sampler": rounded_gaussian}
            sealed, signatures = [], []
            for query in (self._queries[name] for name in part.queries):
                with self._meter.stage("sites: masks"):
                    share = share_std(query.mechanism, sites=len(roster.members))
                    words = masked_code(self.code, query, share, **own).view(np.int64)  # type: ignore[arg-type]
                of = {"roster": roster.id, "query": query.id, "site": site.name}
                signatures.append(sign_word(words.view(np.uint64), **of, sign=key.sign))
                context = SealContext(part.study, query.id, site.name, part.attempt)
                sealed.append((query.id, seal(words, public_key=self._sealing, context=context)))
            return CodesReply(part.batch, part.attempt, tuple(sealed), tuple(signatures))
        return said


def through_the_core(sites: int, dimension: int) -> dict[str, Any]:
    """Measure one query over this many masking sites by the core, with its ledger, sealing and signatures."""
    with TemporaryDirectory() as folder:
        terms: dict[str, Any] = {"quorum": 3, "aggregation": "sealed-sum"}
        return federation(Path(folder), sites=sites, dimension=dimension, volumes=1, answering=MaskingSites, **terms)


def figures() -> Iterator[Figure]:
    """Yield the figures for ten thousand coordinates, measured three times in turn."""
    runs = [{sites: measured(sites, 10_000) for sites in SITES} for _ in range(3)]
    for sites in SITES:
        yield figure(
            f"keys and masks of one site, K = {sites:,}", [r[sites].checking + r[sites].masking for r in runs], "s"
        )
        yield figure(f"the server adds, K = {sites:,}", [run[sites].adding for run in runs], "s")
    for name, part in (("masks", "masking"), ("checks", "checking")):
        grown = [getattr(run[1_000], part) / getattr(run[64], part) * 64 / 1_000 for run in runs]
        yield figure(f"{name} a peer at K = 1,000 over K = 64", grown, RATIO)


def main() -> None:
    if sys.argv[1:2] == ["core"]:
        print(json.dumps(through_the_core(*map(int, sys.argv[2:]))))
        return
    dimension = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print("| K | keys checked (s) | own noise (s) | masks (s) | roster sent to it (B) | words it sends (B) |", end="")
    print(" server adds (s) | open mode: tests and adds (s) |")
    print("|" + "---|" * 8)
    for sites in SITES:
        figures = (sites, *astuple(measured(sites, dimension)))
        cells = [f"{one:.3f}" if isinstance(one, float) else f"{one:,}" for one in figures]
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
