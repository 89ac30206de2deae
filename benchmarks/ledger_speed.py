"""Measures how many durable releases a second the server's ledger makes, beside bare sqlite3 on the same disk.

A bare commit inserts one row of a release's size (WAL, FULL). Bare commits, single releases and batches of 64 take
turns, so that other load on the machine affects all three. Drawing noise is not included: answers are zeros.

    python -m benchmarks.ledger_speed --folder /data/study --rounds 400
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.run import RATIO, Figure, figure
from common.canonical import sha256_bytes
from common.ledger.charges import PoolDeclaration, RosterEntry
from common.privacy.mechanism import QuerySpec
from common.study_mechanism import study_mechanism
from server.ledger.server_ledger import Ledger
from tests.worlds import make_study

BATCH, DIMENSION, SITES = 64, 64, ("aachen", "bergen", "cadiz")

ROWS = [{"row": number, "pools": [f"{site}-mri" for site in SITES], "noise": "16385/128"} for number in range(BATCH)]
"""Rows encoded in the same run for comparison, because the ledger's work is mostly Python's, too."""

ROWS_A_RELEASE = 29.0
"""Processor time of a release in a batch, divided by that of one of :data:`ROWS`.

Eight runs gave 28.5 to 31, quiet and beside three busy processes, on a machine whose speed changed by half meanwhile.
"""


@dataclass(frozen=True, slots=True)
class Pace:
    """Speed of one run.

    Attributes:
        bare: Bare commits a second (median).
        single: Single releases a second (median).
        batched: Releases a second in batches (median).
        single_cpu_s: Smallest processor seconds of a single release beyond a bare commit.
        batched_cpu_s: The same of a release in a batch.
        bare_cpu_s: Smallest processor seconds of a bare commit.
        encoded_cpu_s: Smallest processor seconds to encode and decode one of :data:`ROWS` as JSON.
    """

    bare: float
    single: float
    batched: float
    single_cpu_s: float
    batched_cpu_s: float
    bare_cpu_s: float
    encoded_cpu_s: float

    @property
    def batched_cpu(self) -> float:
        """Return the processor time of a release in a batch, divided by what is expected of this machine."""
        return self.batched_cpu_s / (ROWS_A_RELEASE * self.encoded_cpu_s)

    def __str__(self) -> str:
        return (
            f"bare sqlite3 {self.bare:.0f}/s; ledger {self.single:.0f}/s one by one ({self.single / self.bare:.3f} of "
            f"bare, {1e6 * self.single_cpu_s:.0f} µs of processor beyond it), {self.batched:.0f}/s in batches of "
            f"{BATCH} ({self.batched / self.bare:.1f} times bare, {1e6 * self.batched_cpu_s:.1f} µs of processor each; "
            f"a bare commit {1e6 * self.bare_cpu_s:.0f} µs)"
        )


def measure(folder: Path, *, rounds: int) -> Pace:
    """Measure on fresh files, with a batch in every fifth round.

    Args:
        folder: Folder on the disk to measure.
        rounds: Number of rounds.
    """
    study = make_study(planned_queries=14 * rounds + BATCH)
    privacy, mechanism = study.privacy, study_mechanism(study, dimension=DIMENSION)
    roster = tuple(RosterEntry(site=site, pool=f"{site}-mri") for site in SITES)
    zero = np.zeros(DIMENSION, dtype=np.int64)
    codec, numbers = sha256_bytes(b"codec"), iter(range(1 << 62))
    bare = sqlite3.connect(folder / "bare.sqlite", isolation_level=None)
    bare.execute("PRAGMA journal_mode = WAL")
    bare.execute("PRAGMA synchronous = FULL")
    bare.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT, c BLOB)")

    def commit() -> None:
        bare.execute("BEGIN IMMEDIATE")
        bare.execute("INSERT INTO t (b, c) VALUES (?, ?)", ("x" * 900, b"y" * 8 * DIMENSION))
        bare.execute("COMMIT")

    with Ledger.create(folder / "ledger.sqlite", signing_key=Ed25519PrivateKey.generate()) as ledger:
        study_id = ledger.register_study(study)
        for entry in roster:
            ledger.declare_pool(
                PoolDeclaration(entry.pool, entry.site, privacy.budget, privacy.accountant, privacy.protection)
            )

        def queries(size: int) -> list[QuerySpec]:
            volumes = [sha256_bytes(b"volume %d" % next(numbers)) for _ in range(size)]
            return [QuerySpec(1, codec, (volume,), 1, "zero", "codec", mechanism) for volume in volumes]

        def release(asked: list[QuerySpec]) -> None:
            ledger.release_batch(
                study_id=study_id, batch_id=f"b{next(numbers)}", roster=roster, queries=asked, draw=lambda _: zero
            )

        def encode() -> None:
            for row in ROWS:
                json.loads(json.dumps(row, sort_keys=True))

        times: dict[str, list[tuple[float, float]]] = {"bare": [], "single": [], "batched": [], "encoded": []}
        for number in range(rounds):
            times["bare"].append(_timed(commit))
            times["encoded"].append(_timed(encode))
            times["single"].append(_timed(partial(release, queries(1))))
            if number % 5 == 0:
                times["batched"].append(_timed(partial(release, queries(BATCH))))
    bare.close()
    wall = {name: statistics.median(seconds for seconds, _ in taken) for name, taken in times.items()}
    cpu = {name: min(seconds for _, seconds in taken) for name, taken in times.items()}
    return Pace(
        bare=1 / wall["bare"],
        single=1 / wall["single"],
        batched=BATCH / wall["batched"],
        single_cpu_s=cpu["single"] - cpu["bare"],
        batched_cpu_s=(cpu["batched"] - cpu["bare"]) / BATCH,
        bare_cpu_s=cpu["bare"],
        encoded_cpu_s=cpu["encoded"] / BATCH,
    )


def _timed(work: Callable[[], None]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def figures() -> Iterator[Figure]:
    """Yield the ledger's speed beside that of bare sqlite3 commits."""
    paces = []
    for _ in range(3):
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # /tmp may be in memory, not on a disk
            paces.append(measure(Path(folder), rounds=200))
    yield figure("bare sqlite3's commits, on this disk", [pace.bare for pace in paces], "/s")
    yield figure("releases one by one over them", [p.single / p.bare for p in paces], RATIO, more_is_better=True)
    yield figure("releases in batches of 64 over them", [p.batched / p.bare for p in paces], RATIO, more_is_better=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure; a temporary one by default")
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    for number in range(arguments.runs):
        print(f"run {number + 1} of {arguments.runs}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            print(measure(Path(folder), rounds=arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
