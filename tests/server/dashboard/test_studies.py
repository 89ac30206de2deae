"""Tests the list of a ledger's studies: settings and spending come from the ledger, gains only from measurements."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from server.dashboard.app import Options, create_app
from server.dashboard.read_model import Follower
from server.dashboard.screens import environment
from server.dashboard.views.studies import study_rows
from server.study import create_study as setup
from server.study.workspace import Workspace
from tests.dashboard_study import QUERIES, SITES
from tests.federation import make_study
from tests.server.dashboard.conftest import PASSWORD, TestClient, until_followed


@pytest.fixture
def first(collected, tmp_path: Path) -> Workspace:
    shutil.copytree(collected.workspace.root, tmp_path / "first")
    return Workspace(tmp_path / "first")


@pytest.fixture
def second(first: Workspace, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Return a second study, created as if before the first one spent its pools; afterwards creation is refused."""
    monkeypatch.setattr(setup, "check_shared", lambda ledger, study: None)
    workspace = Workspace(first.root.parent / "second")
    study = make_study(epsilon=2.0)
    study = replace(study, codec=replace(study.codec, joint=True), name="second")
    setup.create_study(workspace, study, ledger=first.root)
    return workspace


def rows(workspace: Workspace):
    follower = Follower(workspace)
    follower.poll()
    return study_rows(follower)


def test_a_ledgers_studies_stand_side_by_side_whichever_is_followed(first, second):
    for workspace in (first, second):
        one, other = sorted(rows(workspace), key=lambda row: row.budget)
        assert (one.here, other.here) == (workspace is second, workspace is first)
        assert (one.answers, one.sites, one.epsilon, one.last) == (0, 0, 0.0, None)
        assert (other.answers, other.planned, other.sites) == (QUERIES, QUERIES, len(SITES))
        assert other.epsilon == pytest.approx(8.0, abs=1e-3)
        assert other.share == pytest.approx(1.0, abs=1e-6)
        assert ("rounds" in one.asks, "rounds" in other.asks) == (True, False)
        assert one.gain is None


def test_a_gain_is_of_the_study_that_its_report_names(first, second):
    report = {"study": {"id": first.study().id}, "student": {"dice": {"mean": 0.7, "cases": [0.69, 0.71]}}}
    report["controls"] = {"zero_code": {"dice": {"mean": 0.6, "cases": [0.6, 0.6]}}}
    (second.root / "report.json").write_text(json.dumps(report))
    (first.root / "report.json").write_text(json.dumps(report))
    gains = {row.id: row.gain for row in rows(first)}
    assert gains == {first.study().id: pytest.approx(0.1), second.study().id: None}
    report["study"]["id"] = second.study().id
    (second.root / "report.json").write_text(json.dumps(report))
    assert {row.gain for row in rows(second) if row.here} == {None}, "of a study without answers nothing is gained"


def test_no_gain_is_green_while_the_ledger_is_in_doubt(first):
    report = {"study": {"id": first.study().id}, "student": {"dice": {"mean": 0.7, "cases": [0.69, 0.71]}}}
    report["controls"] = {"zero_code": {"dice": {"mean": 0.6, "cases": [0.6, 0.6]}}}
    (first.root / "report.json").write_text(json.dumps(report))
    (row,) = (one for one in rows(first) if one.here)
    table = environment().get_template("blocks/studies_table.html")
    assert "tag good" in table.render(studies=[replace(row, word="proven")])
    assert "tag good" not in table.render(studies=[replace(row, word="proven", doubt="the ledger is not valid")])


def test_a_neighbour_that_is_no_study_changes_nothing(first):
    before = rows(first)
    for name, text in (("broken", "[[["), ("odd", "schema = 99\n")):
        (first.root.parent / name).mkdir()
        (first.root.parent / name / "study.toml").write_text(text)
    (first.root.parent / "gone").symlink_to("nowhere")
    assert rows(first) == before


def test_the_page_shows_the_newest_first_and_the_json_and_csv_are_the_same_rows(first, second, state):
    app = create_app(Options(study=first.root, state=state))
    with TestClient(app, base_url="http://localhost", follow_redirects=False) as client:
        until_followed(client)
        assert client.get("/studies").status_code == 303
        client.post("/login", data={"name": "paul", "password": PASSWORD})
        page = client.get("/studies").text
        assert page.index("<strong>second</strong>") < page.index("<strong>hippocampus-demo</strong>")
        assert "not measured" in page
        assert [one["name"] for one in client.get("/api/studies").json()] == ["second", "hippocampus-demo"]
        assert len(client.get("/api/tables/studies.csv").text.splitlines()) == 3
