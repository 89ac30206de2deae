"""Tests the checks of `site doctor` on the way to the server, against a real TLS server with one fault at a time."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from typer.testing import CliRunner

from client.operations import own_page, readiness, staff_decisions
from client.operations.daemons import LOG_MODULE, OFFLINE_S
from client.operations.findings import CheckResult, State, to_json, to_text
from client.operations.readiness import _clock, _gpu, check_newest, check_site
from client.policy import load_site
from client.records.served import RETIRED
from common.config import load_study
from common.errors import InvalidInput, LedgerCorrupt, StorageFailed
from common.pki import certificate_names, create_authority, issue_server_certificate
from common.security_log.program import TARGETS_FILE, log_daemon, recorded_targets
from common.supervision import FACTS, json_report, keeping
from consilium.cli.site import site_app
from server.operations import provision
from server.study.workspace import Workspace
from tests.client.operations.answering import answering
from tests.client.teachers.written import write_teacher
from tests.commands import typed
from tests.common.ledger.full_disk import leave_log, no_byte_more
from tests.waiting import until

pytestmark = pytest.mark.slow


@dataclass
class World:
    """Holds a server that answers as the test sets it, and a site made from its kit."""

    site: Path
    workspace: Workspace
    context: ssl.SSLContext
    status: int = 404
    word: str = "no such object"
    ahead: timedelta = timedelta()

    def finding(self, name: str, *, now: datetime | None = None) -> CheckResult:
        (found,) = [finding for finding in check_site(self.site, now=now) if finding.check == name]
        return found

    def present(self, certificate: Path, key: Path) -> None:
        self.context.load_cert_chain(certificate, key)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response_only(world.status)
            self.send_header("date", format_datetime(datetime.now(UTC) + world.ahead))
            self.end_headers()
            self.wfile.write(f"{world.word}\n".encode())

    with answering(tmp_path, Answer, now=datetime.now(UTC) - timedelta(days=60)) as (site, workspace, context):
        study = workspace.study()
        write_teacher(site / "teachers" / "voter-000", seed=1, data=study.data, recipe=study.teacher)
        world = World(site, workspace, context)
        yield world


def test_a_ready_site_passes_every_check(world: World) -> None:
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    findings = check_site(world.site)
    assert [finding.check for finding in findings] == [
        *("site.toml", "keys", "authority", "network", "certificate", "clock", "admission", "data", "disk", "teachers"),
        *("ledger", "consent", "graphics memory", "daemons"),
    ]
    assert all(finding.ok and not finding.remedy for finding in findings[:-1]), findings


def test_teachers_are_asked_for_after_consent_only(world: World) -> None:
    shutil.rmtree(world.site / "teachers")
    (found,) = (one for one in check_site(world.site) if one.check == "teachers")
    assert re.findall("`consilium site ([^`]+)`", found.remedy) == ["consent", "train"]


def test_daemons_that_are_about_to_start_are_not_checked(world: World) -> None:
    checked = [finding.check for finding in check_site(world.site, starting=True)]
    assert checked == [finding.check for finding in check_site(world.site)][: len(checked)]
    assert not {"consent", "graphics memory", "daemons"} & set(checked)


def test_data_that_are_gone_and_teachers_that_were_never_trained_are_named(world: World) -> None:
    shutil.rmtree(world.site / "teachers")
    shutil.rmtree(world.site.parent / "data")
    failed = {f.check: f for f in check_site(world.site, starting=True) if f.state is State.FAIL}
    assert failed.keys() == {"data", "teachers"}
    assert str(world.site.parent / "data") in failed["data"].text
    assert "site train" in failed["teachers"].remedy


def test_a_folder_without_a_dataset_is_named(world: World) -> None:
    (world.site.parent / "data" / "cases.csv").unlink()
    assert "cases.csv" in world.finding("data").remedy
    (world.site.parent / "data" / "cases.csv").write_text("image,label,patient_id\na.nii,,p1\n")
    assert "no labelled case" in world.finding("data").text


def test_a_finding_about_the_data_leaves_without_the_names_of_tables_and_cases(world: World) -> None:
    (world.site.parent / "data" / "patients.csv").write_text("case_id,patient_id\nmueller,1\nmueller,2\n")
    found = world.finding("data")
    assert found.state is State.FAIL
    assert "mueller" in to_text([found])
    assert not re.search("mueller|patients.csv", to_json([found]))


def test_a_certificate_that_ends_soon_is_worth_a_word(world: World) -> None:
    folder = world.workspace.gateway_dir
    provision.renew(world.workspace, valid_days=5)
    world.present(folder / "server.crt", folder / "server.key")
    finding = world.finding("certificate")
    assert finding.state is State.NOTE
    assert "provision renew" in finding.remedy


def test_a_site_that_was_admitted_before_is_told_that_it_was_revoked(world: World) -> None:
    world.status, world.word = 401, "unknown-key"
    assert "does not know" in world.finding("admission").text
    json_report(world.site / "logs" / FACTS)("daemon-ready", daemon="supernode north", pid=1, seconds=1.0)
    assert "revoked" in world.finding("admission").text


def test_the_doctor_reports_each_daemon_that_ended_with_its_last_error(world: World) -> None:
    report = json_report(world.site / "logs" / FACTS)
    ended = {"why": "status 2", "said": "error: invented", "log": "/x/worker.log"}
    report("daemon-ended", daemon="worker north", **ended)
    (world.site / "logs" / "daemons.lock").touch()
    assert "error: invented" in world.finding("daemon").text
    assert "site up" in world.finding("daemon").remedy  # no supervisor runs
    with keeping(world.site / "logs"):
        assert world.finding("daemon").state is State.NOTE  # the failure is from before this supervisor's start
        report("daemon-ended", daemon="worker north", **ended)
        assert world.finding("daemon").state is State.FAIL
        assert "/x/worker.log" in world.finding("daemon").remedy


@pytest.mark.parametrize(
    ("status", "word", "said"),
    [(401, "unknown-key", "key"), (401, "replayed", "401"), (200, "<html>", "200")],
)
def test_a_site_that_is_not_admitted_is_told_what_to_do(world: World, status: int, word: str, said: str) -> None:
    world.status, world.word = status, word
    finding = world.finding("admission")
    assert not finding.ok
    assert said in finding.text
    assert finding.remedy


@pytest.mark.parametrize(("minutes", "said"), [(-10, "ahead of"), (10, "behind")])
def test_a_clock_that_is_off_is_measured(world: World, minutes: int, said: str) -> None:
    world.ahead, world.status, world.word = timedelta(minutes=minutes), 401, "clock"
    finding = world.finding("clock")
    assert not finding.ok
    assert said in finding.text
    assert "NTP" in finding.remedy
    assert [f.check for f in check_site(world.site, starting=True) if not f.ok] == ["clock"]  # one fault, one line


def test_a_clock_from_before_the_kit_is_noticed_without_the_server(world: World) -> None:
    """The kit's authority is valid only from a later time, so the doctor needs no answer of the server."""
    found = readiness._authority(load_site(world.site), datetime.now(UTC) - timedelta(days=365))
    assert found.state is State.FAIL
    assert "this machine's clock says 20" in found.text
    assert "set the clock" in found.remedy


def test_an_expired_a_foreign_and_a_misnamed_certificate_are_told_apart(world: World, tmp_path: Path) -> None:
    folder = world.workspace.gateway_dir
    provision.renew(world.workspace, valid_days=1, now=datetime.now(UTC) - timedelta(days=3))
    world.present(folder / "server.crt", folder / "server.key")
    assert "expired" in world.finding("certificate").text
    assert "provision renew" in world.finding("certificate").remedy
    assert re.search(r"clock of 20\d\d", world.finding("certificate").text)
    assert "set the clock" in world.finding("certificate").remedy

    authority = create_authority(world.workspace.authority_dir)
    early = issue_server_certificate(
        authority, tmp_path / "early", names=["localhost"], now=datetime.now(UTC) + timedelta(days=3)
    )
    world.present(early.certificate, early.key)  # as on a machine whose clock is days behind
    assert "not yet valid" in world.finding("certificate").text
    assert "set the clock" in world.finding("certificate").remedy

    other = issue_server_certificate(create_authority(tmp_path / "x"), tmp_path / "x", names=["localhost"])
    world.present(other.certificate, other.key)
    assert "inspects TLS" in world.finding("certificate").remedy

    mine = create_authority(world.workspace.authority_dir)
    named = issue_server_certificate(mine, tmp_path / "y", names=["else.example"])
    world.present(named.certificate, named.key)
    remedy = world.finding("certificate").remedy
    assert "kit.json has another address" in remedy
    (option,) = re.findall(r"--more-names (\S+)$", remedy)
    endpoint = world.workspace.endpoint()
    provision.set_up_server(world.workspace, endpoint, more_names=["a.example"])
    provision.set_up_server(world.workspace, endpoint, more_names=["b.example", option])
    world.present(folder / "server.crt", folder / "server.key")
    assert world.finding("certificate").ok
    assert "a.example" in certificate_names(folder / "server.crt")  # or sites that use it would be cut off


@pytest.mark.parametrize(
    ("address", "said"), [("localhost:1", "refused"), ("no-such-host.invalid:443", "unknown name")]
)
def test_a_server_that_cannot_be_reached_is_a_matter_of_the_network(world: World, address: str, said: str) -> None:
    text = (world.site / "site.toml").read_text()
    mine = load_site(world.site).server.superlink
    (world.site / "site.toml").write_text(text.replace(mine, address))
    finding = world.finding("network")
    assert not finding.ok
    assert said in finding.text
    assert finding.remedy


def test_a_proxy_that_does_not_answer_is_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    finding = world.finding("network")
    assert not finding.ok
    assert "through the proxy" in finding.text


def test_a_site_s_folder_is_its_user_s_alone(world: World) -> None:
    assert world.site.stat().st_mode & 0o777 == 0o700


def test_keys_that_others_may_read_are_no_keys(world: World) -> None:
    (world.site / "node" / "keys" / "node").chmod(0o644)
    assert not world.finding("keys").ok
    assert [finding.check for finding in check_site(world.site, starting=True)] == [
        *("site.toml", "keys", "authority", "data", "disk", "teachers")
    ]


def test_a_date_without_its_time_zone_is_a_finding_and_no_crash() -> None:
    assert _clock("Sun, 29 Nov 2026 07:00:00 -0000", datetime.now(UTC)).state is State.FAIL


def test_graphics_memory_somebody_else_uses_is_seen() -> None:
    assert _gpu(lambda: None).ok
    assert _gpu(lambda: (20 << 30, 24 << 30)).ok
    assert "CUDA_VISIBLE_DEVICES" in _gpu(lambda: (1 << 30, 24 << 30)).remedy


def test_the_command_ends_with_eight_when_something_is_wrong(world: World) -> None:
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    said = typed(site_app, "doctor", "--site-dir", world.site)
    assert said.output.count("ok  ") == 13
    world.status, world.word = 401, "unknown-key"
    said = CliRunner().invoke(site_app, ["doctor", "--site-dir", str(world.site), "--json"])
    assert said.exit_code == 8
    findings = json.loads(said.output)["findings"]
    assert [entry["check"] for entry in findings if entry["state"] == "fail"] == ["admission"]


def test_a_supernode_that_runs_but_does_not_reach_the_server_is_a_failure(world: World) -> None:
    with keeping(world.site / "logs"):
        report = json_report(world.site / "logs" / FACTS)
        report("daemon-ready", daemon="supernode north", pid=1, seconds=1.0)
        assert world.finding("daemon").state is State.OK
        report("daemon-offline", daemon="supernode north", pid=1, why="the server has accepted no heartbeat since noon")
        found = world.finding("daemon")
        assert found.state is State.FAIL
        assert re.search("supernode north: offline.*since noon", found.text)


def test_a_supernode_that_never_reached_a_server_is_a_failure_too_after_a_while(world: World) -> None:
    """For example, the SuperNode was started after its server was removed for good."""
    facts, now = world.site / "logs" / FACTS, datetime.now(UTC)
    with keeping(world.site / "logs"):
        for seconds, state in ((OFFLINE_S - 30, State.NOTE), (OFFLINE_S + 1, State.FAIL)):
            started = (now - timedelta(seconds=seconds)).isoformat(timespec="milliseconds")
            with facts.open("a") as file:
                event = {"time": started, "event": "daemon-started", "daemon": "supernode north", "pid": 1, "log": "l"}
                file.write(json.dumps(event) + "\n")
            assert world.finding("daemon").state is state
        assert "has not reached the server since it was started" in world.finding("daemon").text
        assert "if the consortium has ended the study, end `consilium site up`" in world.finding("daemon").remedy
        assert [one.stops for one in own_page._away(world.site)] == [True]


def test_what_a_server_said_before_it_was_gone_is_not_shown_as_the_reason(world: World) -> None:
    facts, past = world.site / "logs" / FACTS, datetime.now(UTC) - timedelta(seconds=OFFLINE_S + 1)
    ended = {"event": "daemon-ended", "why": "status 1", "said": "the server refuses this site because of its clock"}
    with keeping(world.site / "logs"):
        for event in (ended, {"event": "daemon-started"}):
            known = {"time": past.isoformat(timespec="milliseconds"), "daemon": "supernode north", "log": "l"}
            with facts.open("a") as file:
                file.write(json.dumps(known | event) + "\n")
        found = world.finding("daemon").text
    assert "has not reached the server since it was started" in found
    assert "clock" not in found


def test_the_doctor_reports_a_missing_consent_a_pause_and_an_older_copy_of_the_ledger(
    world: World, tmp_path: Path
) -> None:
    assert world.finding("consent").state is State.FAIL
    assert "`consilium site consent`" in world.finding("consent").remedy
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    assert world.finding("consent").state is State.OK
    assert world.finding("ledger").state is State.OK
    ledger, older = world.site / "site-ledger.sqlite", tmp_path / "older.sqlite"
    shutil.copy(ledger, older)
    study = load_study(world.site / "study.toml").name
    staff_decisions.decide(world.site, study, "pause")
    assert (world.finding("consent").state, "paused" in world.finding("consent").text) == (State.NOTE, True)
    check_newest(world.site)
    shutil.copy(older, ledger)
    assert world.finding("ledger").state is State.FAIL
    assert "recover --own-ledger" in world.finding("ledger").remedy
    with pytest.raises(LedgerCorrupt, match="recover --own-ledger"):
        check_newest(world.site)


def test_a_copy_of_a_site_beside_its_original_is_reported_by_the_doctor_and_not_started(
    world: World, tmp_path: Path
) -> None:
    """Formerly the doctor called it fine, and `site up` started a worker repeatedly that refused to serve."""
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    shutil.copytree(world.site, tmp_path / "copy")
    check_newest(world.site)
    (found,) = (one for one in check_site(tmp_path / "copy") if one.check == "ledger")
    assert (found.state, f"use {world.site}" in found.remedy) == (State.FAIL, True)
    with pytest.raises(InvalidInput, match="is a copy of a site"):
        check_newest(tmp_path / "copy")


def test_an_authority_that_ends_soon_does_not_hide_what_the_server_says(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    soon = CheckResult("authority", State.NOTE, "ca.crt is only valid until tomorrow", "ask for a new kit")
    monkeypatch.setattr(readiness, "_authority", lambda *_: soon)
    assert world.finding("admission").state is State.OK


def test_a_full_disk_is_the_cause_of_every_failed_check_and_nothing_is_to_be_put_back(world: World) -> None:
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    leave_log(world.site / "site-ledger.sqlite")
    with no_byte_more():
        failed = {one.check: one for one in check_site(world.site) if one.state is State.FAIL}
    assert {"ledger", "peers"} <= failed.keys()
    for one in failed.values():
        assert "disk is full" in one.text
        assert "free space" in one.remedy
        assert "back" not in one.remedy
        assert "restore" not in one.remedy
    assert all(one.state is not State.FAIL for one in check_site(world.site))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_full_or_failing_disk_is_reported_in_every_check_that_meets_it(
    world: World, monkeypatch: pytest.MonkeyPatch, number: int, wrapped: bool
) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise OSError(number, os.strerror(number), "/srv/x")
        except OSError as error:
            if not wrapped:
                raise
            raise InvalidInput("file cannot be read", remedy="put it back") from error

    for name in ("create_node_keys", "validity", "check_data_folder", "_has_teachers", "peers_view", "joined_study"):
        monkeypatch.setattr(readiness, name, fail)
    failed = [one for one in check_site(world.site) if one.state is State.FAIL]
    assert [one.check for one in failed] == ["keys", "authority", "data", "teachers", "peers", "ledger"]
    for one in failed:
        assert os.strerror(number) in one.text
        assert "free space" in one.remedy
        assert "put it back" not in one.remedy
    monkeypatch.setattr(readiness, "load_site", fail)
    assert "free space" in check_site(world.site)[0].remedy


def test_status_on_a_full_disk_reads_the_ledger_or_says_why_not(world: World) -> None:
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    words = [sys.executable, "-c", "from consilium.cli.main import main; main()", "site", "status"]

    def typed_there() -> subprocess.CompletedProcess[str]:
        with no_byte_more():
            return subprocess.run(
                [*words, "--site-dir", str(world.site)], capture_output=True, text=True, timeout=300, check=False
            )

    assert typed_there().returncode == 0, "no process has the ledger, so its file holds every row"
    leave_log(world.site / "site-ledger.sqlite")
    done = typed_there()
    assert done.returncode == StorageFailed.exit_code
    assert "site-ledger.sqlite cannot be read or written: the disk is full" in done.stderr, "this command only reads"
    assert "free space" in done.stderr


@pytest.mark.parametrize("runs", [True, False])
def test_the_remedy_of_a_log_that_was_left_out_names_its_targets_and_the_running_command(
    world: World, runs: bool
) -> None:
    logs = world.site / "logs"
    with keeping(logs):
        report = json_report(logs / FACTS)
        report("daemon-ready", daemon="log site", pid=1, seconds=1.0)
        report("daemon-offline", daemon="log site", pid=1, why="1 line waits here and will be sent")
        report("stopped")
    assert "--log-to TARGET" in world.finding("daemon").remedy  # a log whose targets were not recorded
    (logs / TARGETS_FILE).write_text(json.dumps(["tcp://127.0.0.1:9", "file:/var/log/a b"]))
    with keeping(logs) if runs else nullcontext():
        found = world.finding("daemon")
    assert found.state is State.NOTE
    assert "`consilium site up --log-to tcp://127.0.0.1:9 --log-to 'file:/var/log/a b'`" in found.remedy
    assert found.remedy.startswith("stop ") is runs
    assert "will be sent" not in found.text


def test_the_log_process_records_the_targets_it_was_started_with(world: World) -> None:
    targets = [f"file:{world.site.parent}/a.jsonl", f"file:{world.site.parent}/b.jsonl"]
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    daemon = log_daemon(world.site, module=LOG_MODULE, name="site", targets=targets)
    with subprocess.Popen(daemon.argv, env=dict(daemon.env), cwd=daemon.cwd) as process:
        until(lambda: recorded_targets(world.site), timeout_s=60)
        process.terminate()
    assert recorded_targets(world.site) == tuple(targets)


def test_voters_that_wait_for_their_retraining_are_not_blamed_on_the_cases(world: World) -> None:
    staff_decisions.consent(world.site, by="A. Noether", sheet="the sheet")
    record = world.site / "teachers" / "voter-000" / "train.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "identity": RETIRED}))
    found = world.finding("teachers")
    assert (found.state, found.remedy) == (State.FAIL, "`consilium site train`")
    assert "trained again" in found.text
    record.write_text(json.dumps({**json.loads(record.read_text()), "identity": "0" * 64, "report": {"weights": None}}))
    assert "site doctor --data" in world.finding("teachers").remedy  # training gave this voter no teacher
