"""Measures a server's ledger by releases R and sites K: opening (which replays every row), verifying, a site's receipt.

``python -m benchmarks.ledger_scale R K`` fills a ledger in batches of a thousand and prints one line of JSON; ``python
-m benchmarks.ledger_scale FILE`` opens a ledger and prints how many MiB that takes. Answers have eight coordinates.
Flushing to disk is switched off while the ledger is filled, which is not measured.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.run import Figure, cpu_s, figure, measured_alone, memory_mib
from common.canonical import sha256_bytes
from common.ledger.charges import PoolDeclaration, RosterEntry
from common.privacy.mechanism import MAX_STATED_STD, Mechanism, QuerySpec
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.worlds import make_study

BATCH, DIMENSION = 1_000, 8
CONSORTIUM = (10_000, 64)
"""Numbers of releases and sites that the ledger is designed for."""


def filled(path: Path, *, releases: int, sites: int) -> Ed25519PrivateKey:
    """Write a ledger of so many releases, each with all sites on its roster.

    Args:
        path: The new file.
        releases: Number of releases R.
        sites: Number of sites K.

    Returns:
        The ledger's signing key.
    """
    key = Ed25519PrivateKey.generate()
    study = make_study(planned_queries=10)
    mechanism = Mechanism(DIMENSION, 1 << 16, 1, Fraction(MAX_STATED_STD >> 10))
    roster = tuple(RosterEntry(f"site-{number:04}", f"pool-{number:04}") for number in range(sites))
    codec, zero, terms = sha256_bytes(b"codec"), np.zeros(DIMENSION, dtype=np.int64), study.privacy
    with Ledger.create(path, signing_key=key) as ledger:
        ledger._chain._db.execute("PRAGMA synchronous = OFF")
        ledger.register_study(study)
        for entry in roster:
            ledger.declare_pool(
                PoolDeclaration(entry.pool, entry.site, terms.budget, terms.accountant, terms.protection)
            )
        for first in range(0, releases, BATCH):
            asked = [
                QuerySpec(1, codec, (sha256_bytes(b"%d" % number),), 1, "zero", "codec", mechanism)
                for number in range(first, min(releases, first + BATCH))
            ]
            done = ledger.release_batch(
                study_id=study.id, batch_id=f"b{first}", roster=roster, queries=asked, draw=lambda _: zero
            )
            assert not done.refused
    return key


def measured(path: Path, *, releases: int, sites: int) -> dict[str, Any]:
    """Fill a ledger, and return its size and the seconds of opening, verifying and issuing a receipt."""
    key = filled(path, releases=releases, sites=sites)

    found: dict[str, Any] = {"ledger_bytes": path.stat().st_size}
    found["memory"] = measured_alone("benchmarks.ledger_scale", path)
    found["open"] = min(cpu_s(lambda: Ledger.open(path).close()) for _ in range(3))
    with Ledger.open(path, signing_key=key) as ledger:
        found["receipt"] = cpu_s(lambda: ledger.receipts_due("site-0000", after=ledger.row_count - BATCH)[-1]())
    found["verify"] = cpu_s(lambda: verify(path).raise_for_problems())
    return found


def opened(path: Path) -> float:
    """Return the MiB by which this process grows when it opens a ledger."""
    before = memory_mib()
    with Ledger.open(path):
        return memory_mib() - before


def figures() -> Iterator[Figure]:
    """Yield the figures of a consortium of 64 sites, of a small one, and of a tenth of the releases."""
    for releases, sites in ((10_000, 8), (1_000, 64), CONSORTIUM):
        found, name = measured_alone("benchmarks.ledger_scale", releases, sites), f"R = {releases:,}, K = {sites}"
        aims = {"open": "at most 2"} if (releases, sites) == CONSORTIUM else {}
        for what in ("open", "verify", "receipt"):
            yield figure(f"{what}, {name}", [found[what]], "s", aim=aims.get(what, ""))
        yield figure(f"memory of an open ledger, {name}", [found["memory"]], "MiB")
        yield figure(f"bytes a release, {name}", [found["ledger_bytes"] / releases], "B")


def main() -> None:
    if len(sys.argv) == 2:
        print(json.dumps(opened(Path(sys.argv[1]))))
        return
    releases, sites = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(Path(folder) / "ledger.sqlite", releases=releases, sites=sites)))


if __name__ == "__main__":
    main()
