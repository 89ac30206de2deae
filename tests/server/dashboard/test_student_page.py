"""Tests that the Student page shows existing trainings and calls a student released only after the gate released it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from common.config import GateConfig
from common.events import EventLog
from common.site_verdict import SiteVerdict
from common.student_statement import StudentStatement
from server.dashboard.app import Options
from server.study.gate import shown_gate, shut_line, take_verdict
from server.study.status import study_status
from server.study.workspace import Workspace
from tests.dashboard_study import make_large_study
from tests.exported import exported_study, statement_file
from tests.federation import make_study
from tests.server.dashboard.conftest import looked_at


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "study").mkdir()
    return make_large_study(tmp_path / "study", rows=12)


@pytest.fixture
def open_page(workspace: Workspace, state: Path):
    """Return the text of a page as the operator ada sees it after the dashboard has read the study."""

    def text(path: str) -> str:
        with looked_at(Options(study=workspace.root, state=state)) as client:
            return client.get(path).text

    return text


def test_the_curve_stays_when_a_resumed_run_finds_the_student_trained(workspace: Workspace, open_page) -> None:
    events = EventLog(workspace.events_file, study=workspace.study().id)
    events.emit("stage-started", stage="student", total=40)
    for step in (20, 40):
        events.emit("student-step", step=step, total=40, loss=20 / step)
    events.emit("student-trained", weights="a" * 64, seconds=3.0)
    events.emit("run-started", run="2", pid=1, resumed=True)
    events.emit("stage-started", stage="student", total=40)
    events.emit("stage-finished", stage="student", seconds=0.1)
    page = open_page("/student")
    assert "trained" in page
    assert re.search("loss .*0.5 at step 40 of 40", page)
    assert "No training yet" not in page


@pytest.fixture(scope="module")
def gated(tmp_path_factory: pytest.TempPathFactory):
    """Yield a finished study whose gate needs two verdicts; the student is exported."""
    terms = make_study(quorum=3, aggregation="sealed-sum", planned_queries=2, gate=GateConfig(2))
    federation = exported_study(tmp_path_factory.mktemp("gated"), terms)
    yield federation
    federation.close()


@pytest.mark.parametrize("better", [0, 1, 2])
def test_a_student_that_the_gate_keeps_is_nowhere_offered_as_released(gated, state: Path, better: int) -> None:
    workspace = Workspace(gated.root)
    bundle = StudentStatement.parse(statement_file(gated).read_bytes()).bundle
    for site in gated.sites[:better]:
        said = SiteVerdict(gated.study.id, bundle, site.name, "better", "2026-11-24T09:00:00.000000Z")
        take_verdict(workspace, said.signed_by(gated.site_ledgers[site.name].sign).render())
    missing = "2 must find it better: NOT RELEASED"
    with looked_at(Options(study=gated.root, state=state)) as client:
        first, page, api = client.get("/").text, client.get("/student").text, client.get("/api/overview").json()
        file = client.get("/api/student/bundle.zip").headers["content-disposition"]
    status = study_status(workspace)
    for text in (first, api["gate"], "\n".join(status.lines()), str(status.to_json()["gate"])):
        assert (missing in text) is (better < 2)
        assert ("consilium student verdict" in text) is (better < 2)
    assert ("consilium site evaluate" in page) is (better < 2)
    assert ("Download bundle" in page) is (better == 2)
    assert ("evaluation only" in page) is (better < 2)
    assert ("NOT RELEASED" in page) is (better < 2)
    assert ("not-released" in file) is (better < 2)


def test_no_student_is_offered_but_the_signed_one(gated, state: Path) -> None:
    path = Workspace(gated.root).bundle_dir / "models" / "model.pt"
    signed = path.read_bytes()
    path.write_bytes(signed[:-1])
    try:
        with looked_at(Options(study=gated.root, state=state)) as client:
            refused = client.get("/api/student/bundle.zip")
    finally:
        path.write_bytes(signed)
    assert refused.status_code == 409
    assert str(path) in refused.text


def test_a_student_whose_verdicts_cannot_be_read_counts_as_not_released(gated) -> None:
    file = statement_file(gated)
    kept = file.read_bytes()
    try:
        file.write_bytes(b"{")
        assert not shown_gate(Workspace(gated.root)).released
        assert re.search(r"\b2 .*: NOT RELEASED", shut_line(Workspace(gated.root)))
    finally:
        file.write_bytes(kept)
