"""The Student page shows the training that exists, and offers a student as released only if the gate lets it out."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.events import EventLog
from server.dashboard.app import Options, create_app
from server.study.workspace import Workspace
from tests.dashboard_study import make_large_study
from tests.server.dashboard.conftest import PASSWORD, TestClient, until_followed


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "study").mkdir()
    return make_large_study(tmp_path / "study", rows=12)


@pytest.fixture
def open_page(workspace: Workspace, state: Path):
    """Returns the text of a page, as the operator ada sees it once the dashboard has read the study."""

    def text(path: str) -> str:
        with TestClient(create_app(Options(study=workspace.root, state=state)), base_url="http://localhost") as client:
            until_followed(client)
            assert client.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 200
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
    assert "Now 0.5 at step 40 of 40" in page
    assert "No training yet" not in page
