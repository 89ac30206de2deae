"""The whole road over real Flower daemons on loopback: TLS, node keys, SuperLink's database, workers, ledgers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from client.ledger.site_ledger import SiteLedger
from client.site.enrolment import site_status
from common.config import CollectionConfig
from common.privacy.mechanism import AccountantName
from consilium.demo.federation import running
from consilium.reports.patient_report import patient_lines
from server.operations.supervisor import start_run
from tests.e2e.road import EACH_ITS_OWN, QUERIES, SITES, Road, build, found_in, known_codes, memory_with_one_reply

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    root = tmp_path_factory.mktemp("road")
    names = [f"site-{k}" for k in range(SITES)]
    workspace, sites = build(root, names, collection=CollectionConfig(), private=EACH_ITS_OWN)
    with running(workspace, sites) as federation:
        yield Road(root=root, workspace=workspace, sites=sites, federation=federation)


def test_a_serverapp_killed_between_commit_and_decode_is_resumed_and_nothing_is_charged_twice(road):
    start_run(road.workspace)
    (road.root / "memory").write_bytes(memory_with_one_reply(road))
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


def test_a_run_whose_operator_s_terminal_was_closed_is_attached_to_from_another_and_nothing_is_charged_again(road):
    stored, runs = road.answers(), len(road.events("run-started"))
    with road.ledger() as ledger:
        rows = ledger.row_count
    for folder in (road.workspace.student_dir, road.workspace.bundle_dir):
        shutil.rmtree(folder)  # so that there is something left to do
    command = [sys.executable, "-c", "from consilium.cli.main import main; main()", "study", "run"]
    with subprocess.Popen([*command, str(road.workspace.root)], start_new_session=True) as terminal:
        while len(road.events("run-started")) == runs:
            road.federation.group.check()
            assert terminal.poll() is None
            time.sleep(0.05)
        terminal.send_signal(signal.SIGHUP)
        assert terminal.wait(20) != 0
    assert not road.workspace.bundle_dir.exists()

    attached = road.consilium("study", "watch", str(road.workspace.root), "--json")
    assert attached.returncode == 0, attached.stderr
    assert json.loads(attached.stdout)["answers"] == QUERIES
    assert "student" in attached.stderr
    assert (road.workspace.bundle_dir / "configs" / "metadata.json").exists()
    assert len(road.events("run-finished")) == 2
    assert road.answers() == stored
    with road.ledger() as ledger:
        assert ledger.row_count == rows


def test_teachers_with_a_guarantee_give_each_patient_the_smaller_of_training_and_releases(road):
    trained = set()
    for name, directory in road.sites.items():
        status = site_status(directory)
        trained.update(status["trainings"]["strategies"])
        with road.ledger() as ledger:
            released = ledger.pool_guarantees(f"{name}/patients")[AccountantName.EXACT]
        *_, both = patient_lines(status["trainings"], released)
        assert both.endswith("unit patient, relation replace-one (the smaller of training and releases)")
        epsilon = float(both.split("ε = ")[1].split(" ")[0])
        assert 3.9 < epsilon <= 4.0 < released.epsilon
    assert trained == {"dp-sgd", "dp-bbb"}


def test_a_stranger_with_an_unregistered_key_was_turned_away(road):
    assert road.federation.refusal.exit_code == 305
    assert road.federation.refusal.api_code == 2004


def test_every_daemon_is_a_process_of_its_own(road):
    pids = [pid for _, pid in road.federation.daemons]
    assert len(set(pids)) == len(pids) == 5 + 3 * SITES


def test_a_known_code_is_in_no_byte_of_superlinks_database_log_or_node_files(road):
    codes = known_codes(road.sites.values(), road.answers())
    assert all(known_codes([directory], road.answers()) for directory in road.sites.values())
    files = [
        path
        for folder in (road.workspace.flower_dir, *(site / "node" for site in road.sites.values()))
        for path in folder.rglob("*")
        if path.is_file()
    ]
    files += [path for path in road.workspace.root.iterdir() if path.is_file()]
    assert any(path.name == "superlink.db" and path.stat().st_size > 50_000 for path in files)
    for path in files:
        assert not found_in(path.read_bytes(), codes), path


def test_in_an_open_study_a_code_is_found_in_the_server_s_memory_while_it_is_added_up(road):
    codes = known_codes([next(iter(road.sites.values()))], road.answers())
    assert found_in((road.root / "memory").read_bytes(), codes)


def test_sites_hold_receipts_for_all_that_was_released(road):
    for directory in road.sites.values():
        with SiteLedger.read(directory / "site-ledger.sqlite") as ledger:
            assert {q for receipt in ledger.receipts() for q in receipt.query_ids} == set(road.answers())
            assert ledger.alarms() == ()
