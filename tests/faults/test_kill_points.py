"""Kills the core process at named points from the first offer to the bundle, and tests the run that resumes it.

At every point, the same must hold. Stored answers stay unchanged, byte for byte. The study ends with the rows, sums and
ε of an undisturbed run. No query has two noises, and no noise is used twice. Workers and their ledgers keep running
behind their real sockets.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from client.operations.serve import serve
from common.config import CollectionConfig, TrainingConfig
from common.events import read_events
from common.ledger.charges import Spend
from common.privacy.accounting import Guarantee
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from server.study.workspace import Workspace
from tests.faults.kill_parts import POINTS
from tests.federation import Federation, make_study

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
QUERIES, BATCH = 6, 2
RECIPE = TrainingConfig(channels=(2, 4), steps=4, batch_size=2)


@pytest.fixture(scope="module")
def core() -> Iterator[Callable[[Path, Path, str], int]]:
    """Run the core on a study's directory, and kill it at a point if one is given; return how it ended."""
    with tempfile.TemporaryFile("w+") as log:
        parent = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.kill_parts"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

        def run(root: Path, sockets: Path, point: str) -> int:
            assert parent.stdin is not None
            assert parent.stdout is not None
            parent.stdin.write(f"{root}\t{sockets}\t{point}\n")
            parent.stdin.flush()
            told = parent.stdout.readline()
            log.seek(0)
            assert told, log.read()[-2000:]
            if int(told) > 0:
                raise AssertionError(log.read()[-2000:])
            return int(told)

        yield run
        parent.communicate(timeout=30)
        assert parent.returncode == 0


@dataclass(frozen=True)
class Ended:
    """Holds the facts about an ended study that must be the same whether or not a process was killed."""

    rows: int
    spent: dict[str, Spend]
    at_sites: dict[str, Spend]
    guarantees: list[Guarantee]
    labels: int


@dataclass
class Killed:
    """Holds a study on disk, with its workers behind sockets."""

    fed: Federation
    sockets: Path

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.fed.root)

    def stored(self) -> dict[str, bytes]:
        with Ledger.open(self.workspace.ledger_file) as ledger:
            return {answer.query.id: answer.noisy_sum.tobytes() for answer in ledger.answers(self.fed.study.id)}

    def ended(self) -> Ended:
        with Ledger.open(self.workspace.ledger_file) as ledger:
            return Ended(
                rows=ledger.row_count,
                spent={site.pool: ledger.spent(site.pool) for site in self.fed.sites},
                at_sites={name: own.spent() for name, own in self.fed.site_ledgers.items()},
                guarantees=list(ledger.study_spending(self.fed.study.id).readings().values()),
                labels=len(list(self.workspace.labels_dir.glob("*.npz"))),
            )

    def residuals(self) -> list[bytes]:
        """Return each stored answer minus the codes in the sites' ledgers: the noise."""
        found = []
        for query_id, answer in self.stored().items():
            codes = sum(ledger.code(query_id) for ledger in self.fed.site_ledgers.values())
            found.append((np.frombuffer(answer, dtype=np.int64) - codes).tobytes())
        return found


@pytest.fixture
def study(tmp_path: Path) -> Iterator[Killed]:
    collection = CollectionConfig(batch_size=BATCH)
    fed = Federation(tmp_path, study=make_study(planned_queries=QUERIES, student=RECIPE, collection=collection))
    fed.take_images()
    workspace = fed.workspace()
    workspace.save_sites(fed.sites)
    workspace.signing_key_file.parent.mkdir()
    for path, key in ((workspace.signing_key_file, fed.signing_key), (workspace.sealing_key_file, fed.sealing_key)):
        path.touch(mode=0o600)
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with tempfile.TemporaryDirectory(prefix="consilium-") as sockets:  # a socket's path must be short
        servers = [serve(fed.workers[site.node_id], socket=Path(sockets) / f"{site.name}.sock") for site in fed.sites]
        yield Killed(fed, Path(sockets))
        for server in servers:
            server.stop(None).wait()
    fed.close()


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Ended]:
    """Return facts about a run in which nothing is killed; the first test fills them in."""
    return {}


def check_whole(study: Killed) -> None:
    """Check everything that must hold for a finished study, whether or not a process was killed."""
    workspace, fed = study.workspace, study.fed
    answers = study.stored()
    drawn = [bytes.fromhex(line) for line in (workspace.root / "draws").read_text().split()]
    assert len(answers) == QUERIES
    assert len(set(study.residuals())) == QUERIES, "a noise was used twice"
    assert all(any(residual) for residual in study.residuals())
    assert len(set(drawn)) == len(drawn), "a noise was drawn twice"
    assert set(answers.values()) <= set(drawn)
    assert verify(workspace.ledger_file, public_key=fed.signing_key.public_key()).ok
    with Ledger.open(workspace.ledger_file) as ledger:
        head = ledger.head()
        assert all(len(answer.roster) == len(fed.sites) for answer in ledger.answers(fed.study.id))
    for own in fed.site_ledgers.values():
        assert own.alarms() == ()
        assert {query for receipt in own.receipts() for query in receipt.query_ids} == answers.keys()
        assert (own.held(head.ledger_id).seq, own.held(head.ledger_id).hash) == (head.seq, head.hash)
    said = {query for e in read_events(workspace.events_file) if e["event"] == "released" for query in e["queries"]}
    assert said <= answers.keys()
    assert (workspace.bundle_dir / "configs" / "privacy.json").is_file()
    assert not list(workspace.root.glob(".*.tmp")), "half a bundle was left behind"


def test_a_run_that_nobody_disturbs_ends_whole(study: Killed, core, undisturbed) -> None:
    assert core(study.fed.root, study.sockets, "") == 0
    check_whole(study)
    undisturbed["run"] = study.ended()


@pytest.mark.parametrize("point", POINTS)
def test_a_core_killed_at_a_named_point_is_resumed_to_the_same_end(study: Killed, core, undisturbed, point) -> None:
    assert core(study.fed.root, study.sockets, point) == -9, "the point was not reached"
    before = study.stored()
    rows = verify(study.workspace.ledger_file).rows
    assert core(study.fed.root, study.sockets, "") == 0
    check_whole(study)
    after = study.stored()
    assert before.items() <= after.items(), "a stored answer changed"
    assert rows <= study.ended().rows
    assert study.ended() == undisturbed["run"]
    calls = {name: voters.calls for name, voters in study.fed.voters.items()}
    assert set(calls.values()) == {QUERIES}, "a site computed a code twice"
