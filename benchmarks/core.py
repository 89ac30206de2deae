"""Measures what the server core costs by number of sites K: processor time by stage, memory, bytes on the wire.

The core, its ledger, sealing and signatures are the real ones. Sites answer with a recorded code through a transport in
the same process, and their time is counted separately. ``python -m benchmarks.core K D VOLUMES`` measures one
federation of K sites, code length D and so many volumes, and prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

import server.aggregation.exchange as exchange
from benchmarks.run import RATIO, Figure, figure, measured_alone, memory_mib
from common.canonical import sha256_bytes
from common.config import CollectionConfig
from common.envelope import body_of, sign_reply
from common.events import EventLog
from common.ledger.keys import public_hex
from common.messages import (
    NO_HEAD,
    CodesReply,
    CodesRequest,
    Offer,
    OfferReply,
    Part,
    Receipts,
    ReceiptsReply,
    Several,
    decode,
    encode,
)
from common.privacy.mechanism import QuerySpec
from common.sealing import SealContext, seal
from common.study_mechanism import study_mechanism
from server.aggregation.aggregator import Aggregator
from server.aggregation.exchange import Reply
from server.aggregation.receipts import ReceiptDelivery
from server.aggregation.sealed_sums import aggregator_of
from server.ledger.server_ledger import Ledger
from server.study.workspace import Site
from tests.worlds import make_study, pool_of

VOLUMES = 10


@dataclass
class Meter:
    """Counts processor seconds by stage; a stage within another is not counted in the outer one."""

    seconds: dict[str, float] = field(default_factory=dict)
    _inner: list[float] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block's processor time under this name."""
        started = time.process_time()
        self._inner.append(0.0)
        try:
            yield
        finally:
            taken = time.process_time() - started
            self.seconds[name] = self.seconds.get(name, 0.0) + taken - self._inner.pop()
            if self._inner:
                self._inner[-1] += taken

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Count every call of an object's function as the stage ``name``.

        Args:
            owner: The object or module.
            attribute: Name of the function; it is replaced by a counting one.
            name: The stage.
        """
        work: Callable[..., Any] = getattr(owner, attribute)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.stage(name):
                return work(*args, **kwargs)

        setattr(owner, attribute, counted)


class RecordedSites:
    """Stands for sites that accept everything and send one recorded code, sealed anew for each request."""

    def __init__(self, sites: Mapping[int, tuple[Site, Ed25519PrivateKey]], sealing: X25519PrivateKey, meter: Meter):
        self._sites, self._sealing, self._meter = sites, sealing.public_key(), meter
        self._heads: dict[int, tuple[int, str]] = {}
        self.code = np.zeros(1, dtype=np.int64)
        self.sent = self.received = 0

    def online(self) -> frozenset[int]:
        return frozenset(self._sites)

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        for node, body in bodies.items():
            with self._meter.stage("sites"):
                reply = self._reply(node, body)
            self.sent, self.received = self.sent + len(body), self.received + len(reply)
            yield Reply(node, reply)

    def _reply(self, node: int, message: bytes) -> bytes:
        site, key = self._sites[node]
        asked = decode(body_of(message))
        parts = asked.parts if isinstance(asked, Several) else (asked,)
        said = tuple(self._answer(node, site, part) for part in parts)
        body = encode(Several(said) if isinstance(asked, Several) else said[0])
        return sign_reply(body, sign=key.sign, site=site.name, request=message)

    def _answer(self, node: int, site: Site, part: Part) -> Part:
        if isinstance(part, Receipts) and part.receipts:
            head = json.loads(part.receipts[-1])["head"]
            self._heads[node] = head["seq"], head["hash"]
        row, held = self._heads.get(node, (0, NO_HEAD))
        match part:
            case Receipts():
                return ReceiptsReply(row, held)
            case Offer():
                return OfferReply(part.batch, "accepted", row, held)
            case CodesRequest():
                contexts = (SealContext(part.study, query, site.name, part.attempt) for query in part.queries)
                sealed = tuple(
                    (context.query, seal(self.code, public_key=self._sealing, context=context)) for context in contexts
                )
                return CodesReply(part.batch, part.attempt, sealed)
        raise TypeError(type(part).__name__)


def federation(
    folder: Path,
    *,
    sites: int,
    dimension: int,
    volumes: int,
    batch: int = 50,
    answering: type[RecordedSites] = RecordedSites,
    **terms: Any,
) -> dict[str, Any]:
    """Measure one study over a number of sites.

    Args:
        folder: Where ledger and event log are written.
        sites: Number of sites K.
        dimension: Length D of a code.
        volumes: Number of queries.
        batch: Largest number of queries in a batch.
        answering: Class of the sites.
        terms: Fields of the study's privacy configuration.

    Returns:
        The figures by name.
    """
    meter = Meter()
    study = make_study(planned_queries=volumes, collection=CollectionConfig(batch_size=min(batch, volumes)), **terms)
    mechanism = study_mechanism(study, dimension=dimension)
    codec, sealing = sha256_bytes(b"codec"), X25519PrivateKey.generate()
    keys = {100 + number: Ed25519PrivateKey.generate() for number in range(sites)}
    known = {
        node: (Site(f"site-{node}", f"pool-{node}", node, answer_key=public_hex(key)), key)
        for node, key in keys.items()
    }
    queries = [
        QuerySpec(1, codec, (sha256_bytes(b"volume %d" % number),), 1, "zero", "codec", mechanism)
        for number in range(volumes)
    ]
    transport = answering(known, sealing, meter)
    transport.code = np.random.default_rng(0).integers(-20, 21, dimension, dtype=np.int64)
    with Ledger.create(folder / "ledger.sqlite", signing_key=Ed25519PrivateKey.generate()) as ledger:
        ledger.register_study(study)
        for site, _ in known.values():
            ledger.declare_pool(pool_of(site, study))
        core = aggregator_of(study)(
            study=study,
            queries=queries,
            sites=lambda: tuple(site for site, _ in known.values()),
            ledger=ledger,
            sealing_key=sealing,
            events=EventLog(folder / "events.jsonl", study=study.id),
        )
        for name in ("missing", "_message"):
            meter.wrap(ReceiptDelivery, name, "receipts")
        for name, stage in (("encode", "questions"), ("sign_request", "questions"), ("open_reply", "replies")):
            meter.wrap(exchange, name, stage)
        meter.wrap(exchange, "decode", "replies")
        meter.wrap(Aggregator, "_open_reply", "codes")
        for name in ("release_batch", "charge_draw", "store_answer"):
            meter.wrap(ledger, name, "release")
        started, wall = time.process_time(), time.perf_counter()
        with meter.stage("other"):
            core.run(transport)
        total = time.process_time() - started
        assert len(core.answers()) == volumes
    return {
        "sites": sites,
        "dimension": dimension,
        "volumes": volumes,
        "server_s": total - sum(taken for name, taken in meter.seconds.items() if name.startswith("sites")),
        "wall_s": time.perf_counter() - wall,
        "stages": {name: round(seconds, 4) for name, seconds in sorted(meter.seconds.items())},
        "rss_mib": memory_mib("VmHWM"),
        "to_sites_bytes": transport.sent,
        "from_sites_bytes": transport.received,
        "ledger_bytes": (folder / "ledger.sqlite").stat().st_size,
        "events_bytes": (folder / "events.jsonl").stat().st_size,
    }


def figures() -> Iterator[Figure]:
    """Yield the figures of 8 to 1,000 sites, ten volumes each: short codes three times in turn, long codes once."""
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for dimension, counts, repeats in ((64, (8, 64, 256, 1_000), 3), (100_000, (8, 64), 1)):
        for _ in range(repeats):
            for sites in counts:
                found = measured_alone("benchmarks.core", sites, dimension, VOLUMES)
                runs.setdefault((dimension, sites), []).append(found)
    yield from _figures(runs)


def _figures(runs: dict[tuple[int, int], list[dict[str, Any]]]) -> Iterator[Figure]:
    for (dimension, sites), found in runs.items():
        name, codes = f"K = {sites:,}, D = {dimension:,}", sites * VOLUMES
        yield figure(f"server's processor a code, {name}", [1000 * one["server_s"] / codes for one in found], "ms")
        aim = "at most .1" if sites == 1_000 else ""
        yield figure(
            f"receipts in it, {name}", [one["stages"]["receipts"] / one["server_s"] for one in found], RATIO, aim=aim
        )
        yield figure(f"bytes to sites a code, {name}", [one["to_sites_bytes"] / codes for one in found], "B")
        yield figure(f"bytes from sites a code, {name}", [one["from_sites_bytes"] / codes for one in found], "B")
        yield figure(f"memory, {name}", [one["rss_mib"] for one in found], "MiB")
    for dimension, many in ((64, 1_000), (100_000, 64)):
        pairs = list(zip(runs[dimension, many], runs[dimension, 8], strict=True))
        ratios = [one["rss_mib"] / other["rss_mib"] for one, other in pairs]
        yield figure(f"memory at K = {many:,} over K = 8, D = {dimension:,}", ratios, RATIO, aim="at most 1.2")
        grown = [one["server_s"] / many / (other["server_s"] / 8) for one, other in pairs]
        yield figure(f"processor a code at K = {many:,} over K = 8, D = {dimension:,}", grown, RATIO)


def main() -> None:
    sites, dimension, volumes = map(int, sys.argv[1:4])
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(federation(Path(folder), sites=sites, dimension=dimension, volumes=volumes)))


if __name__ == "__main__":
    main()
