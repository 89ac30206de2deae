"""Tests a study that release 0.2.0 ran half: it goes on under this version, back under 0.2.0, and ends under
this one.

Each version runs in one process with real workers, ledgers and core. tests/faults/deployment/test_upgraded.py does the
same with real daemons.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from common.ledger.rollback_guard import standing_path
from common.privacy.mechanism import AccountantName
from server.ledger.server_ledger import Ledger
from server.ledger.verify import verify
from tests.dashboard_study import QUERIES, SITES
from tests.earlier_versions import RELEASED, installed

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]


def goes_on(python: str, folder: Path, releases: int) -> subprocess.CompletedProcess[str]:
    """Run the study with this interpreter until ``releases`` more batches are released; 0 runs it to the end."""
    words = [python, "-P", str(Path(__file__).with_name("half_run.py")), str(folder), str(releases)]
    path = {"PYTHONPATH": str(ROOT)} if python == sys.executable else {}
    env = {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", **path}
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=folder.parent, env=env)


def answers(done: subprocess.CompletedProcess[str]) -> tuple[str, int]:
    """Return the study's id and its number of answers."""
    assert done.returncode == 0, done.stderr[-2000:]
    study, count = done.stdout.split()[-2:]
    return study, int(count)


def ledgers(folder: Path) -> list[Path]:
    return [folder / "study" / "ledger.sqlite", *(folder / "sites" / name / "site-ledger.sqlite" for name in SITES)]


def stored(folder: Path) -> dict[str, bytes]:
    """Return every stored answer, by query."""
    with Ledger.open(folder / "study" / "ledger.sqlite") as ledger:
        (study,) = ledger.books.studies.values()
        return {one.query.id: one.noisy_sum.tobytes() for one in ledger.answers(study.id)}


def test_a_study_of_0_2_0_goes_on_here_and_back_there_and_loses_no_answer_and_no_charge(tmp_path: Path) -> None:
    old, folder = str(installed(RELEASED, tmp_path / "older")), tmp_path / "trial"
    folder.mkdir()
    study, first = answers(goes_on(old, folder, 1))
    before = stored(folder)
    assert 0 < first == len(before) < QUERIES
    upgraded, second = answers(goes_on(sys.executable, folder, 1))
    assert (upgraded, second > first) == (study, True)

    refused = goes_on(old, folder, 1)
    assert "standing" in refused.stderr, "the older version does not know what stands there, and opens nothing"
    for ledger in ledgers(folder):
        assert verify(ledger).ok
        standing_path(ledger).rename(ledger.with_suffix(".standing.newer"))
    back, third = answers(goes_on(old, folder, 1))
    assert (back, third > second) == (study, True)

    again, last = answers(goes_on(sys.executable, folder, 0))
    assert (again, last) == (study, QUERIES)
    assert all(stored(folder)[query] == answer for query, answer in before.items()), "an answer was drawn again"
    with Ledger.open(folder / "study" / "ledger.sqlite") as server:
        exact = server.study_spending(study).readings()[AccountantName.EXACT].epsilon
        assert 8 * 0.999 <= exact <= 8
    for ledger in ledgers(folder):
        assert verify(ledger).ok
    for ledger in ledgers(folder)[1:]:
        with SiteLedger.read(ledger) as site:
            assert site.facts("site").accepted == QUERIES
            assert site.alarms() == ()
