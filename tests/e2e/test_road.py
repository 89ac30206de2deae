"""The whole road over real Flower daemons on loopback: TLS, node keys, SuperLink's database, workers, ledgers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from client.site.enrolment import site_status
from client.training.private.settings import PrivateSettings
from common.config import CodecConfig, CollectionConfig, PrivacyConfig, Study, TrainingConfig
from common.data.msd import write_dataset
from common.data.synthetic import study_data, write_phantoms
from common.events import read_events
from common.privacy.mechanism import AccountantName
from common.privacy.training import Neighbours
from consilium.demo.federation import Federation, running, write_server, write_sites
from consilium.demo.training import train_all
from consilium.reports.patient_report import patient_lines
from server.ledger.server_ledger import Ledger
from server.operations.supervisor import start_run
from server.study import create_study as setup
from server.study.workspace import Workspace

pytestmark = pytest.mark.slow

SITES, QUERIES, PATIENTS = 3, 6, 2
RECIPE = TrainingConfig(channels=(4, 8), steps=4)
TRAINING = PrivateSettings("dp-sgd", 4.0, 1e-3, neighbours=Neighbours.REPLACE_ONE, rate=Fraction(1, 2), steps=3)


@dataclass
class Road:
    root: Path
    workspace: Workspace
    sites: dict[str, Path]
    federation: Federation

    def ledger(self) -> Ledger:
        return Ledger.open(self.workspace.ledger_file)

    def answers(self) -> dict[str, bytes]:
        with self.ledger() as ledger:
            return {a.query.id: a.noisy_sum.tobytes() for a in ledger.answers(self.workspace.study().id)}

    def events(self, kind: str) -> list[dict]:
        return [event for event in read_events(self.workspace.events_file) if event["event"] == kind]

    def wait(self, kind: str, *, timeout_s: float = 120.0) -> dict:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if found := self.events(kind):
                return found[-1]
            self.federation.group.check()
            time.sleep(0.05)
        raise AssertionError(f"no {kind} event within {timeout_s} s")

    def consilium(self, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", "from consilium.cli.main import main; main()", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)


def build(
    root: Path, names: Sequence[str], *, collection: CollectionConfig, private: PrivateSettings | None = None
) -> tuple[Workspace, dict[str, Path]]:
    """A study with its codec and volumes, and sites with trained teachers; nothing runs yet."""
    phantoms = write_phantoms(root / "all", cases=len(names) * PATIENTS + QUERIES + 8, seed=1)
    cases = list(phantoms.cases)
    for k, name in enumerate(names):
        part = cases[k * PATIENTS : (k + 1) * PATIENTS]
        write_dataset(
            root / "data" / name,
            name=name,
            labels=phantoms.labels,
            channels=phantoms.channels,
            cases=part,
            synthetic=True,
        )
    rest = cases[len(names) * PATIENTS :]
    study = Study(
        name="road",
        data=study_data(2),
        privacy=PrivacyConfig(epsilon=8.0, delta=1e-3, planned_queries=QUERIES, quorum=2),
        codec=CodecConfig(augmentations=20, max_dimension=8),
        teacher=RECIPE,
        student=RECIPE,
        collection=collection,
    )
    workspace = Workspace(root / "server")
    setup.create_study(workspace, study)
    setup.publish_volumes(workspace, [case.image for case in rest[:QUERIES]])
    setup.fit_study_codec(workspace, [case.label for case in rest[QUERIES:]], sites=len(names))
    write_server(workspace)
    sites = write_sites(workspace, root / "sites", names=names, data=root / "data")
    train_all(sites, seed=0, processes=1, private=private, on_steps=lambda done, total: None)
    return workspace, sites


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    root = tmp_path_factory.mktemp("road")
    names = [f"site-{k}" for k in range(SITES)]
    workspace, sites = build(root, names, collection=CollectionConfig(), private=TRAINING)
    with running(workspace, sites) as federation:
        yield Road(root=root, workspace=workspace, sites=sites, federation=federation)


def test_a_serverapp_killed_between_commit_and_decode_is_resumed_and_nothing_is_charged_twice(road):
    start_run(road.workspace)
    road.wait("released")
    os.kill(road.events("run-started")[-1]["pid"], signal.SIGKILL)
    stored = road.answers()
    with road.ledger() as ledger:
        spent = {f"{name}/patients": ledger.spent(f"{name}/patients") for name in road.sites}
        rows = ledger.row_count
    assert len(stored) == QUERIES
    assert road.events("label-decoded") == []

    result = road.consilium("study", "resume", str(road.workspace.root), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["answers"] == QUERIES
    assert road.answers() == stored
    with road.ledger() as ledger:
        assert {pool: ledger.spent(pool) for pool in spent} == spent
        assert ledger.row_count == rows
        exact = ledger.study_guarantees(road.workspace.study().id)[AccountantName.EXACT].epsilon
    assert 8 * 0.999 <= exact <= 8
    assert [event["resumed"] for event in road.events("run-started")] == [False, True]
    assert len(road.events("label-decoded")) == QUERIES
    assert (road.workspace.bundle_dir / "configs" / "metadata.json").exists()


def test_teachers_with_a_guarantee_give_each_patient_the_smaller_of_training_and_releases(road):
    for name, directory in road.sites.items():
        status = site_status(directory)
        with road.ledger() as ledger:
            released = ledger.pool_guarantees(f"{name}/patients")[AccountantName.EXACT]
        *_, both = patient_lines(status["trainings"], released)
        assert both.endswith("unit patient, relation replace-one (the smaller of training and releases)")
        epsilon = float(both.split("ε = ")[1].split(" ")[0])
        assert 3.9 < epsilon <= 4.0 < released.epsilon


def test_a_stranger_with_an_unregistered_key_was_turned_away(road):
    assert road.federation.refusal.exit_code == 305
    assert road.federation.refusal.api_code == 2004


def test_every_daemon_is_a_process_of_its_own(road):
    pids = [pid for _, pid in road.federation.daemons]
    assert len(set(pids)) == len(pids) == 4 + 3 * SITES


def test_a_known_code_is_in_no_byte_of_superlinks_database_log_or_node_files(road):
    codes = []
    for name, directory in road.sites.items():
        with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
            codes += [ledger.code(query) for query in road.answers()]
        assert any(code.any() for code in codes), name
    files = [
        path
        for folder in (road.workspace.flower_dir, *(site / "node" for site in road.sites.values()))
        for path in folder.rglob("*")
        if path.is_file()
    ]
    files += [path for path in road.workspace.root.iterdir() if path.is_file()]
    assert any(path.name == "superlink.db" and path.stat().st_size > 50_000 for path in files)
    for path in files:
        content = path.read_bytes()
        for code in codes:
            if not code.any():
                continue
            for spelling in (
                code.astype("<i8").tobytes(),
                code.astype(">i8").tobytes(),
                code.astype("<i4").tobytes(),
                code.astype("<f8").tobytes(),
                ",".join(map(str, code.tolist())).encode(),
                ", ".join(map(str, code.tolist())).encode(),
            ):
                assert spelling not in content, path


def test_sites_hold_receipts_for_all_that_was_released(road):
    for directory in road.sites.values():
        with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
            assert {q for receipt in ledger.receipts() for q in receipt.query_ids} == set(road.answers())
            assert ledger.alarms() == ()
