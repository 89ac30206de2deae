"""Tests that a mailed status report is accepted if the site signed it, and nothing else is."""

from __future__ import annotations

import json
import re
import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from common.errors import InvalidInput
from common.ledger.keys import public_hex
from common.site_account import _statement, check_account, signed_account
from common.supervision import FACTS, json_report, keeping
from server.dashboard.app import Options, create_app
from server.dashboard.reports import read_reports, take_report
from server.study.workspace import Workspace
from tests.server.dashboard.conftest import TestClient, looked_at
from tests.server.dashboard.hostile.files import REPORT

NOW = datetime(2026, 5, 1, 12, tzinfo=UTC)
NORTH, EAST = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
KEYS = {"north": public_hex(NORTH), "east": public_hex(EAST)}


def said(*, key: Ed25519PrivateKey = NORTH, at: datetime = NOW, **changed: object) -> dict[str, object]:
    return signed_account({**REPORT, **changed}, sign=key.sign, now=at)


def taken(report: object, folder: Path) -> str:
    return take_report(report if isinstance(report, str) else json.dumps(report), folder, keys=KEYS, now=NOW)


def test_a_report_is_accepted_from_the_site_whose_key_signed_it_and_shown_with_its_time(tmp_path):
    assert taken(said(at=NOW - timedelta(days=2)), tmp_path) == "north"
    assert taken(json.dumps(said(), indent=1), tmp_path) == "north"
    (report,) = read_reports(tmp_path, keys=KEYS).values()
    assert (report.signed, report.given, report.problem, report.spent_epsilon) == (
        True,
        "2026-05-01T12:00:00+00:00",
        "",
        4.0,
    )
    assert check_account(json.loads((tmp_path / "north.json").read_text()), key=KEYS["north"]) == NOW


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (REPORT, "signature"),
        ({**said(), "signature": "00" * 64}, "signature"),
        ({**said(), "signature": "zz"}, "signature"),
        ({**said(), "signature": None}, "signature"),
        ({**said(), "codes_stored": 5}, "signature"),
        ({**said(), "new": 1}, "signature"),
        ({**said(), "time": "2026-05-01T11:00:00Z"}, "signature"),
        (said(key=EAST), "signature"),
        (said(site="east"), "signature"),
        (said(site="south"), "registered"),
        (said(site="../../decisions"), "registered"),
        (said(site=["north"]), "registered"),
        (said(at=NOW + timedelta(hours=1)), "no later than now"),
        (said(spent={"exact": {"epsilon": -1}}), "status report"),
        (said(alarms="x"), "status report"),
        ("[" * 60_000, "JSON"),
        ('{"site": "north", "x": "\\ud800"}', "JSON"),
        ("", "JSON"),
        ("[]", "registered"),
        ("\ud800", "JSON"),
    ],
)
def test_a_report_of_any_other_site_or_form_is_refused_and_nothing_is_written(tmp_path, report, why):
    with pytest.raises(InvalidInput, match=why):
        taken(report, tmp_path / "reports")
    assert not (tmp_path / "reports").exists()


@pytest.mark.parametrize("time", ["0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00"])
def test_a_time_that_does_not_exist_in_utc_ends_no_page(tmp_path, time):
    report = {**REPORT, "time": time}
    report["signature"] = NORTH.sign(_statement(report)).hex()
    with pytest.raises(InvalidInput, match=r"time in a site's status report.*to fix: "):
        taken(report, tmp_path)
    (tmp_path / "north.json").write_text(json.dumps(report))
    (found,) = read_reports(tmp_path, keys=KEYS).values()
    assert "set aside" in found.problem


@pytest.mark.parametrize("number", [True, "4", "1_0"])
def test_a_report_with_a_figure_that_is_no_number_is_refused(tmp_path, number):
    with pytest.raises(InvalidInput, match="cannot be read"):
        taken(said(cap={**REPORT["cap"], "epsilon": number}), tmp_path)


def test_an_older_report_of_the_site_does_not_come_back(tmp_path):
    taken(said(), tmp_path)
    for at in (NOW, NOW - timedelta(seconds=5)):
        with pytest.raises(InvalidInput, match="newer"):
            taken(said(at=at, queries_accepted=0), tmp_path)
    assert read_reports(tmp_path, keys=KEYS)["north"].queries_accepted == 4


def test_a_report_taken_while_clocks_were_a_year_ahead_keeps_no_later_one_out_for_a_year(tmp_path):
    then = NOW + timedelta(days=365)
    take_report(json.dumps(said(at=then, queries_accepted=0)), tmp_path, keys=KEYS, now=then)
    assert taken(said(), tmp_path) == "north"
    assert read_reports(tmp_path, keys=KEYS)["north"].queries_accepted == 4


def test_a_signed_file_that_was_changed_in_the_studys_directory_is_set_aside_and_a_plain_one_is_marked(tmp_path):
    (tmp_path / "north.json").write_text(json.dumps({**said(), "queries_accepted": 9}))
    (tmp_path / "east.json").write_text(json.dumps({**REPORT, "site": "east"}))
    found = read_reports(tmp_path, keys=KEYS)
    assert "north.json is set aside" in found["north"].problem
    assert (found["east"].signed, found["east"].problem) == (False, "")


@pytest.fixture
def desk(collected, state, tmp_path):
    """Return a dashboard that knows north's key, with ada signed in."""
    shutil.copytree(collected.workspace.root, tmp_path / "study")
    workspace = Workspace(tmp_path / "study")
    sites = [
        one if one.name != "north" else type(one)(one.name, one.pool, one.node_id, KEYS["north"])
        for one in workspace.sites()
    ]
    workspace.save_sites(tuple(sites))
    options = Options(study=workspace.root, state=state, now=lambda: NOW)
    with looked_at(options) as client:
        yield client, workspace


def hand_in(client: TestClient, report: object) -> object:
    token = client.get("/api/me").json()["csrf"]
    return client.post("/sites/report", data={"csrf": token, "report": json.dumps(report)})


def test_a_report_is_handed_in_on_the_sites_page(desk, state):
    client, _ = desk
    assert "came by mail" in client.get("/sites").text
    assert hand_in(client, REPORT).status_code == 400
    answer = hand_in(client, said(alarms=["<b>bold</b>"], at_least="<b>bold</b>"))
    assert (answer.status_code, answer.headers["location"]) == (303, "/sites#site-north")
    text = client.get("/sites").text
    assert re.search(r"at least ε\s4 ", text), "its ledger is in doubt"
    assert "signed by" in text
    assert "&lt;b&gt;bold" in text
    assert "site-reports-alarm" in {one["name"] for one in client.get("/api/overview").json()["alarms"]}
    assert (state / "site-reports" / "north.json").exists()


@pytest.mark.parametrize("standing", ["ready", "offline", "stopped"])
def test_a_gateway_that_does_not_answer_is_an_alarm(desk, standing):
    client, workspace = desk
    logs = workspace.flower_dir / "logs"
    with keeping(logs):
        report = json_report(logs / FACTS)
        report("daemon-ready", daemon="gateway", pid=1)
        if standing != "ready":
            report("daemon-offline", daemon="gateway", pid=1, why="the gateway has not answered since X; to fix: now")
        if standing != "stopped":
            alarms = {one["name"]: one for one in client.get("/api/overview").json()["alarms"]}
    if standing == "stopped":
        alarms = {one["name"]: one for one in client.get("/api/overview").json()["alarms"]}
    assert ("gateway-silent" in alarms) == (standing == "offline")
    assert standing != "offline" or "has not answered since X" in json.dumps(alarms["gateway-silent"])


def test_a_log_target_of_the_server_that_fails_is_an_alarm_with_its_remedy(desk):
    client, workspace = desk
    logs = workspace.root / "logs"
    named = lambda: [a for a in client.get("/api/overview").json()["alarms"] if a["name"] == "log-fails"]  # noqa: E731
    with keeping(logs):
        report = json_report(logs / FACTS)
        report("daemon-ready", daemon="log server", pid=1)
        assert named() == []
        report("daemon-offline", daemon="log server", pid=1, why="target syslog accepts no line; to fix: start it")
        client.app.state.service._views.clear()
        (alarm,) = named()
    assert "target syslog accepts no line" in alarm["title"]
    assert "server" in alarm["title"]
    assert "start it" in alarm["remedy"]
    client.app.state.service._views.clear()
    assert named() == []  # the log was stopped on purpose


def test_a_log_target_of_the_dashboard_that_fails_is_an_alarm_with_its_remedy(collected, state, tmp_path):
    (tmp_path / "full").write_text("a file where a folder is needed")
    target = f"file:{tmp_path / 'full' / 'log.jsonl'}"
    options = Options(study=collected.workspace.root, state=state, log_to=(target,), now=lambda: NOW)
    with looked_at(options) as client:
        client.app.state.security_log.step()
        client.app.state.service._views.clear()
        found = {one["name"]: one for one in client.get("/api/overview").json()["alarms"]}
    assert target in found["log-fails"]["title"]
    assert "dashboard" in found["log-fails"]["title"]
    assert "--log-to" in found["log-fails"]["remedy"]
    without = create_app(Options(study=collected.workspace.root, state=state, now=lambda: NOW))
    assert "log-fails" not in {alarm.name for alarm in without.state.service.overview().alarms}


@pytest.mark.parametrize(("left", "level"), [(31, None), (29, "warning"), (-1, "critical")])
def test_the_end_of_the_servers_certificate_is_an_alarm_thirty_days_before(desk, monkeypatch, left, level):
    client, _ = desk
    ends = NOW + timedelta(days=left)
    monkeypatch.setattr("server.dashboard.service.expires", lambda path: ends)
    found = {one["name"]: one["level"] for one in client.get("/api/overview").json()["alarms"]}
    assert found.get("certificate-ends") == level
    assert f"holds until {ends:%Y-%m-%d}" in client.get("/sites").text
