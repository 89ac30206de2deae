"""Tests a study that an older version began: its parties are upgraded one by one, go back, and are upgraded again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.ledger.rollback_guard import standing_path
from tests.earlier_versions import OLDER, RELEASED, installed
from tests.faults.deployment.parts import (
    QUERIES,
    SITES,
    STARTED_S,
    Federation,
    consilium,
    federation,
    namespaces_work,
)

pytestmark = [pytest.mark.faults, pytest.mark.slow]


@contextmanager
def made_by(commit: str, folder: Path, *, sites: Sequence[str] = SITES) -> Iterator[Federation]:
    """Yield parties whose directories an older version made, and which run that version."""
    if not namespaces_work():
        pytest.skip("needs root and network namespaces")
    python, made = installed(commit, folder / "older"), folder / "made"
    make = "import sys; from pathlib import Path; from tests.faults.deployment.parts import make_parties; "
    made.mkdir()
    subprocess.run(
        [python, "-P", "-c", f"{make} make_parties(Path(sys.argv[1]))", str(made)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with federation(made, folder / "parties", sites=sites) as parties:
        for party in parties.parties.values():
            party.python = str(python)
        yield parties


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Federation]:
    with made_by(OLDER, tmp_path) as parties:
        yield parties


def runs(parties: Federation, name: str, role: str) -> str:
    """Return the program that a daemon runs."""
    return Path(f"/proc/{parties.parties[name].pid(role)}/cmdline").read_bytes().split(b"\0")[0].decode()


def upgrade(parties: Federation, name: str) -> None:
    """Upgrade a party as the guide says: stop it, install the new version, start it."""
    assert parties.stop(name, signal.SIGTERM) == 0
    started_with(sys.executable, parties, name)


def started_with(python: str, parties: Federation, name: str) -> None:
    party = parties.parties[name]
    party.python, ready = python, party.count("all-ready")
    parties.start(name)
    parties.recorded(name, "all-ready", count=ready + 1, timeout_s=STARTED_S)


def test_a_study_goes_on_while_its_parties_are_upgraded_one_after_the_other(older: Federation) -> None:
    """During one run, first the sites are upgraded and then the server. Meanwhile both versions exchange messages."""
    older.up()
    older.start_run()
    older.wait("released")
    before = older.workspace.study().id
    assert "/older/" in runs(older, "site-1", "worker")
    upgrade(older, "site-1")
    assert "/older/" not in runs(older, "site-1", "worker")
    older.wait("released", count=len(older.events("released")) + 1)
    for name in SITES[1:]:
        upgrade(older, name)
    upgrade(older, "server")
    older.finish_run()  # the operator's command is of the old version and may end with its server
    older.start_run()
    older.wait("released", count=len(older.events("released")) + 1)
    if older.finish_run(timeout_s=900.0) != 0:
        older.start_run()
        assert older.finish_run(timeout_s=900.0) == 0, older.tails()
    older.assert_whole()
    assert older.workspace.study().id == before
    for site in SITES:
        assert older.site_charges(site) == QUERIES


def ledgers(parties: Federation) -> list[tuple[str, Path]]:
    """Return each party's name and ledger."""
    sites = [(name, parties.root / name / "site-ledger.sqlite") for name in parties.sites]
    return [("server", parties.workspace.ledger_file), *sites]


def goes_on(parties: Federation) -> int:
    """Run the study until one more batch is released, and stop it; return its number of answers."""
    before = len(parties.events("released"))
    parties.start_run()
    parties.wait("released", count=before + 1, timeout_s=STARTED_S)
    stopped = parties.command("study", "stop", str(parties.workspace.root))
    assert stopped.returncode == 0, stopped.stderr
    parties.finish_run(timeout_s=STARTED_S)
    return int(json.loads(parties.command("study", "status", str(parties.workspace.root), "--json").stdout)["answers"])


def test_a_half_run_study_of_the_last_release_is_upgraded_rolled_back_and_upgraded_again_and_loses_nothing(
    tmp_path: Path,
) -> None:
    """All parties run the commands of docs/deployment.md, "Upgrading" and "Going back", one party after another."""
    with made_by(RELEASED, tmp_path, sites=SITES[:2]) as parties:
        old = parties.parties["server"].python
        parties.up()
        study, answers = parties.workspace.study().id, [goes_on(parties)]
        for python in (sys.executable, old, sys.executable):
            for name in parties.parties:
                assert parties.stop(name) == 0
            if python == old:
                for name, ledger in ledgers(parties):
                    verified = parties.inside(name, *consilium("verify", str(ledger)))
                    assert verified.returncode == 0, verified.stdout + verified.stderr
                    standing_path(ledger).rename(ledger.with_suffix(".standing.newer"))
            for name in parties.parties:
                started_with(python, parties, name)
            assert ("/older/" in runs(parties, parties.sites[0], "worker")) is (python == old)
            answers.append(goes_on(parties))
        assert answers == sorted(set(answers)), "an answer was lost"
        parties.start_run()
        assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
        parties.assert_whole()
        assert parties.workspace.study().id == study
        for site in parties.sites:
            assert parties.site_charges(site) == QUERIES
