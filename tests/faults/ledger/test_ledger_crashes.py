"""Tests the ledger under races, kill -9 and load, with separate processes on one file and an oracle outside them."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from benchmarks.ledger_speed import measure
from common.ledger.keys import create_signing_key
from common.privacy.mechanism import QuerySpec
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.common.ledger.ledger_world import declare, ledger_study, make_mechanism, make_query, roster_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]

WRITER = """
import sys
from pathlib import Path
import numpy as np
from common.ledger.keys import load_signing_key
from server.ledger.server_ledger import Ledger
from tests.common.ledger.ledger_world import make_mechanism, make_query, ledger_study, roster_of

folder, room, first, count, batch = Path(sys.argv[1]), *map(int, sys.argv[2:6])
mechanism = make_mechanism(room_for=room, dimension=8)
study = ledger_study(planned_queries=room)
print("ready", flush=True)
sys.stdin.readline()
with Ledger.open(folder / "ledger.sqlite", signing_key=load_signing_key(folder / "ledger.key")) as ledger:
    for start in range(first, first + count, batch):
        queries = [make_query(n, mechanism) for n in range(start, min(start + batch, first + count))]
        def draw(_query):
            return np.frombuffer(np.random.default_rng().bytes(64), dtype=np.int64).copy()
        result = ledger.release_batch(
            study_id=study.id, batch_id=f"b{start}", roster=roster_of(),
            queries=queries, draw=draw)
        for answer in result.answers:
            print(answer.query.id, answer.noisy_sum.tobytes().hex(), flush=True)
        for refused in result.refused:
            print(refused, "refused", flush=True)
print("done", flush=True)
"""


def prepare(folder: Path, *, room: int) -> str:
    key = create_signing_key(folder / "ledger.key")
    study = ledger_study(planned_queries=room)
    with Ledger.create(folder / "ledger.sqlite", signing_key=key) as ledger:
        ledger.register_study(study)
        declare(ledger)
    return study.id


def start(folder: Path, *, room: int, first: int, count: int, batch: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(folder), *map(str, (room, first, count, batch))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.close()


def read(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return the answers that the process printed, by query id. An unfinished last line does not count."""
    assert process.stdout is not None
    text = process.stdout.read()
    process.stdout.close()
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return {line[0]: line[1] for line in lines if len(line) == 2 and len(line[1]) in (7, 128)}


def race(folder: Path, *, processes: int, charges: int, room: int) -> None:
    prepare(folder, room=room)
    share = charges // processes
    counts = [share + (1 if n < charges % processes else 0) for n in range(processes)]
    running = [start(folder, room=room, first=1000 * n, count=count, batch=1 + n % 3) for n, count in enumerate(counts)]
    for process in running:
        go(process)
    said = [read(process) for process in running]
    assert [process.wait() for process in running] == [0] * processes
    outcomes = [answer for answers in said for answer in answers.values()]
    assert len(outcomes) == charges
    assert sum(answer != "refused" for answer in outcomes) == room
    report = verify(folder / "ledger.sqlite")
    assert report.ok, report.problems
    assert report.kinds["release"] == room
    print(f"{processes} processes, {charges} charges, {room} admitted")


@pytest.mark.slow
def test_racing_processes_admit_exactly_what_fits(tmp_path: Path) -> None:
    race(tmp_path, processes=3, charges=60, room=25)


@pytest.mark.slow
def test_eight_processes_racing_500_charges_into_room_for_200_admit_200(tmp_path: Path) -> None:
    race(tmp_path, processes=8, charges=500, room=200)


def kill_loop(folder: Path, *, rounds: int, room: int, seed: int) -> None:
    """Kill a writer at random moments.

    All releases that it had reported must remain, and no query may have two answers.
    """
    prepare(folder, room=room)
    rng, known, unsaid = random.Random(seed), {}, 0
    for _ in range(rounds):
        process = start(folder, room=room, first=0, count=room, batch=rng.choice((1, 2, 5)))
        go(process)
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        for query_id, answer in read(process).items():
            assert known.setdefault(query_id, answer) == answer, "a query was answered with two noises"
        report = verify(folder / "ledger.sqlite")
        assert report.ok, report.problems
        connection = sqlite3.connect(folder / "ledger.sqlite")
        stored = {query_id: data.hex() for query_id, data in connection.execute("SELECT query_id, data FROM answers")}
        connection.close()
        assert known.items() <= stored.items(), "an answer known outside is not in the ledger"
        unsaid = max(unsaid, len(stored) - len(known))
        known |= stored
    process = start(folder, room=room, first=0, count=room, batch=7)
    go(process)
    said = read(process)
    assert process.wait() == 0
    assert known.items() <= said.items()
    assert len(said) == room
    assert "refused" not in said.values()
    assert verify(folder / "ledger.sqlite").kinds["release"] == room
    print(f"seed {seed}: {rounds} kills, {len(known)} answers before the last run, at most {unsaid} of them unsaid")


def test_killed_writers_lose_nothing_and_draw_nothing_twice(tmp_path: Path) -> None:
    kill_loop(tmp_path, rounds=2, room=200, seed=11)


@pytest.mark.slow
def test_fifty_killed_writers_lose_nothing_and_draw_nothing_twice(tmp_path: Path) -> None:
    kill_loop(tmp_path, rounds=50, room=4000, seed=12)


def test_a_killed_creation_leaves_no_ledger_or_a_whole_one(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from server.ledger.server_ledger import Ledger
print("ready", flush=True)
for n in range(10_000):
    Ledger.create(Path(sys.argv[1]) / f"{n}.sqlite", signing_key=Ed25519PrivateKey.generate()).close()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    made = sorted(path for path in tmp_path.iterdir() if path.suffix == ".sqlite" and not path.name.startswith("."))
    assert all(verify(path).ok for path in made[-3:])


def test_a_charge_flushes_the_standing_once_however_many_it_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite's own commit flushes as well. `make bench` measures how long a flush takes on a disk."""
    flushed, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(descriptor) or fsync(descriptor))
    study, mechanism = ledger_study(planned_queries=65), make_mechanism(room_for=65, dimension=8)
    with Ledger.create(tmp_path / "ledger.sqlite", signing_key=Ed25519PrivateKey.generate()) as ledger:
        ledger.register_study(study)
        declare(ledger)
        for first, size in ((0, 1), (1, 64)):
            flushed.clear()
            release(ledger, study.id, [make_query(first + n, mechanism) for n in range(size)])
            assert len(flushed) == 1


def test_durable_releases_cost_little_processor_time(tmp_path: Path) -> None:
    """The best of three runs takes at most twice the expected time. Other load only adds time."""
    paces = []
    while len(paces) < 3 and not (paces and paces[-1].batched_cpu < 2):
        (folder := tmp_path / str(len(paces))).mkdir()
        paces.append(measure(folder, rounds=40))
    assert min(pace.batched_cpu for pace in paces) < 2, paces


def release(ledger: Ledger, study_id: str, queries: list[QuerySpec]) -> None:
    zero = np.zeros(8, dtype=np.int64)
    ledger.release_batch(
        study_id=study_id, batch_id=queries[0].id, roster=roster_of(), queries=queries, draw=lambda _: zero
    )


@pytest.mark.slow
def test_verification_takes_as_long_a_row_in_a_large_ledger_as_in_a_small_one(tmp_path: Path) -> None:
    """The test compares processor time for each row in ledgers of 20,000 and 2,000 rows, the best of three runs."""
    study, mechanism = ledger_study(planned_queries=20_000), make_mechanism(room_for=20_000, dimension=8)
    path, each = tmp_path / "ledger.sqlite", []
    with Ledger.create(path, signing_key=Ed25519PrivateKey.generate()) as ledger:
        ledger.register_study(study)
        declare(ledger)
        for first in range(0, 20_000, 500):
            release(ledger, study.id, [make_query(first + n, mechanism) for n in range(500)])
            if first + 500 in (2_000, 20_000):
                seconds = []
                for _ in range(3):
                    started = time.process_time()
                    report = verify(path)
                    seconds.append(time.process_time() - started)
                    assert report.ok
                    assert report.rows == first + 500 + 5
                each.append(min(seconds) / report.rows)
    small, large = each
    print(f"verify: {1e6 * small:.0f} µs of processor a row of 2,000, {1e6 * large:.0f} of 20,000")
    assert large < 1.5 * small
