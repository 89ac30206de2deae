"""Kills the real core with its ledger, and real workers, at random moments, over the real socket.

After every kill, four things are checked from outside. No answer that was published is missing or changed. Every answer
is charged at the server and at its sites. All chains verify. No site believes that the server lied to it. At the end
the study is complete. ``CONSILIUM_KILLS`` sets the number of kills, and ``CONSILIUM_SEED`` the seed.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from common.ledger.keys import load_signing_key
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.faults.ledger.crash_parts import SITES, prepare

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("core", *(site.name for site in SITES))


@dataclass
class Victims:
    """Holds the processes that the test kills. They are forked from a parent that has imported everything."""

    root: Path
    parent: subprocess.Popen[str]
    pids: dict[str, int] = field(default_factory=dict)

    def start(self, part: str) -> None:
        assert self.parent.stdin is not None
        assert self.parent.stdout is not None
        self.parent.stdin.write(f"{part}\n")
        self.parent.stdin.flush()
        told = self.parent.stdout.readline()
        assert told, (self.root / "log").read_text()[-2000:]
        self.pids[part] = int(told)

    def alive(self, part: str) -> bool:
        try:
            os.kill(self.pids[part], 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self, part: str) -> None:
        if self.alive(part):
            os.kill(self.pids[part], signal.SIGKILL)
        while self.alive(part):
            time.sleep(0.002)


@contextmanager
def victims(root: Path) -> Iterator[Victims]:
    log = (root / "log").open("w")
    parent = subprocess.Popen(
        [sys.executable, "-m", "tests.faults.ledger.crash_parts", str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    made = Victims(root, parent)
    try:
        yield made
    finally:
        for part in made.pids:
            made.kill(part)
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.close()
        parent.wait()
        parent.stdout.close()
        log.close()


def seen_outside(root: Path, known: dict[str, str]) -> None:
    """Add the published answers to ``known``, and check that no query has two different answers."""
    path = root / "outside"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            query_id, answer = line.split()
            assert known.setdefault(query_id, answer) == answer, "a query was answered with two noises"


def check(root: Path, known: dict[str, str]) -> int:
    """Check everything that must hold after any kill; return the number of stored answers."""
    seen_outside(root, known)
    key = load_signing_key(root / "ledger.key").public_key()
    report = verify(root / "ledger.sqlite", public_key=key)
    assert report.ok, report.problems
    with Ledger.open(root / "ledger.sqlite") as ledger:
        rows = -1
        while rows != ledger.row_count:  # the core may be writing: take answers and sums of one moment
            rows = ledger.row_count
            answers = {answer.query.id: answer for answer in ledger.answers(next(iter(ledger.books.studies)))}
            spent = {site.name: ledger.spent(site.pool) for site in SITES}
    for query_id, answer in known.items():
        assert query_id in answers, "an answer known outside is not in the ledger"
        assert answers[query_id].noisy_sum.tobytes().hex() == answer
    for site in SITES:
        path = root / site.name / "site-ledger.sqlite"
        if not path.exists():
            continue
        found = verify(path, server_key=key)
        assert found.ok, found.problems
        # The site is read after the server, so it can only have charged more since.
        with SiteLedger.read(path) as own:
            assert own.alarms() == ()
            mine = [q for q, a in answers.items() if site.name in {entry.site for entry in a.roster}]
            assert spent[site.name].releases == len(mine) >= len([q for q in mine if q in known])
            assert own._books.reservations.keys() >= set(mine)
            assert own.spent().mu_squared >= spent[site.name].mu_squared
    return len(answers)


def kill_loop(root: Path, *, kills: int, seed: int) -> None:
    print(f"seed {seed}, {kills} kills")
    planned = 8 * kills
    prepare(root, planned=planned)
    rng, known, killed, unsaid = random.Random(seed), {}, dict.fromkeys(PARTS, 0), 0
    with victims(root) as processes:
        for part in PARTS:
            processes.start(part)
        for _ in range(kills):
            time.sleep(rng.uniform(0.0, 0.35))
            part = rng.choice(("core", "core", *PARTS))
            assert processes.alive(part) or (root / "done").exists(), (root / "log").read_text()[-2000:]
            processes.kill(part)
            killed[part] += 1
            stored = check(root, known)
            unsaid = max(unsaid, stored - len(known))
            processes.start(part)
        early = (root / "done").exists()
        until = time.monotonic() + 30 + planned
        while not (root / "done").exists() and time.monotonic() < until:
            time.sleep(0.05)
        assert (root / "done").exists(), "the study did not complete"
        answered = check(root, known)
    assert answered == planned == len(known)
    for site in SITES:
        with SiteLedger.read(root / site.name / "site-ledger.sqlite") as own:
            assert own.spent().releases <= planned
    assert not early, "the study ended before the last kill: plan more queries"
    print(f"killed {killed}; {answered} answers, each with one noise; at most {unsaid} charged and not yet said")


@pytest.mark.slow
def test_a_federation_killed_sixty_times_or_more_charges_every_answer_and_completes(tmp_path: Path) -> None:
    kills = int(os.environ.get("CONSILIUM_KILLS", "60"))
    kill_loop(tmp_path, kills=kills, seed=int(os.environ.get("CONSILIUM_SEED", "22")))
