"""Tests curves of trainings: written where requested, with optional packages, and only of allowed values."""

from __future__ import annotations

import importlib.util
import math
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from client.training.task import SiteReport, VoterReport
from client.training.teacher_curves import TeacherCurves
from common.config import TrainingConfig, render_study
from common.curves import FORMS, curves_of, open_curves
from common.errors import InvalidInput
from common.events import EventLog, read_events
from consilium.cli.site import site_app
from consilium.cli.student import student_app
from consilium.cli.study import study_app
from server.dashboard.event_fold import EventFold
from server.postprocess import networks
from server.protocols.public_start import pass_ends
from server.protocols.query_protocol import NetworkTraining
from server.study.study_curves import StudyCurves, curves_from_here
from server.study.workspace import Workspace
from tests.commands import refusal_of
from tests.federation import make_study

TENSORBOARD = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs pip install tensorboard"
)
MLFLOW = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs pip install mlflow-skinny")


class Kept:
    """Keeps points in the order of arrival."""

    def __init__(self) -> None:
        self.points: list[tuple[str, float, int]] = []

    def point(self, name: str, value: float, *, step: int) -> None:
        self.points.append((name, value, step))

    def close(self) -> None:
        self.points.append(("closed", 0.0, 0))


def told(path: Path) -> EventLog:
    """Return a log of a run with two passes, a few losses and three scores."""
    events = EventLog(path, study=make_study().id)
    events.emit("stage-started", stage="student", total=40)
    events.emit("student-step", step=20, total=40, loss=0.9)
    events.emit("student-pass", number=1, step=20)
    events.emit("student-validated", step=20, dice=0.5, cases=3)
    events.emit("receipts-held", site="north", ledger_row=7)
    events.emit("student-step", step=40, total=40, loss=0.4)
    events.emit("student-pass", number=2, step=40)
    events.emit("network-scored", name="student", dice=0.71, cases=5)
    events.emit("network-scored", name="zero_code", dice=0.6, cases=5)
    return events


EXPECTED = [
    ("student/loss", 0.9, 20),
    ("student/pass", 1, 20),
    ("validation/dice/student", 0.5, 20),
    ("student/loss", 0.4, 40),
    ("student/pass", 2, 40),
    ("validation/dice/student", 0.71, 40),
    ("validation/dice/zero_code", 0.6, 40),
]


def test_a_students_curves_are_its_losses_its_passes_and_the_public_scores_and_nothing_else(tmp_path: Path) -> None:
    told(tmp_path / "events.jsonl")
    kept = Kept()
    curves = StudyCurves(kept)
    for event in read_events(tmp_path / "events.jsonl"):
        curves.on_event(event)
    assert kept.points == EXPECTED


def test_the_student_page_marks_the_passes_of_the_newest_training_alone(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events, fold = told(path), EventFold(path)
    assert fold.step(threading.RLock())
    assert (fold.losses, fold.passes) == ([(20, 0.9), (40, 0.4)], [20, 40])
    assert fold.validated == [(20, 0.5, 3), (40, 0.71, 5)]
    events.emit("stage-started", stage="student", total=40)
    assert fold.step(threading.RLock())
    assert fold.passes == [20, 40], "a stage that has not trained yet leaves the curve of the student that exists"
    events.emit("student-step", step=20, total=40, loss=0.8)
    assert fold.step(threading.RLock())
    assert (fold.losses, fold.passes, fold.validated) == ([(20, 0.8)], [], [])
    events.emit("student-step", step=10, total=30, loss=0.7)
    assert fold.step(threading.RLock())
    assert fold.losses == [(10, 0.7)], "a training of another length is another training"


def test_a_training_resumed_at_a_checkpoint_keeps_the_steps_before_it(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    events, fold = told(path), EventFold(path)
    events.emit("stage-started", stage="student", total=40)
    events.emit("student-step", step=40, total=40, loss=0.3)
    assert fold.step(threading.RLock())
    assert (fold.losses, fold.passes) == ([(20, 0.9), (40, 0.3)], [20])
    assert fold.validated == [(20, 0.5, 3)]


@pytest.mark.parametrize(("steps", "ends"), [(10, (4, 7, 10)), (300, (100, 200, 300))])
def test_passes_end_where_the_steps_of_the_recipe_are_split(steps: int, ends: tuple[int, ...]) -> None:
    assert pass_ends(TrainingConfig(channels=(4, 8), steps=steps)) == ends


def test_a_training_of_several_passes_tells_where_each_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(files: object, on_step: Callable[[int, float], None]) -> torch.nn.Module:
        for step in range(1, 31):
            on_step(step, 1 / step)
        return torch.nn.Linear(1, 1)

    training = NetworkTraining("inputs", train, steps=30, passes=(10, 30))
    monkeypatch.setattr(networks, "protocol_of", lambda study: SimpleNamespace(finish=lambda student_data: training))
    monkeypatch.setattr(networks, "student_data_of", lambda released: None)
    released = SimpleNamespace(
        public=SimpleNamespace(study=make_study()), student_dir=tmp_path / "student", validation=()
    )
    events = EventLog(tmp_path / "events.jsonl", study=make_study().id)
    networks.fit_student(released, events=events)  # type: ignore[arg-type]
    kinds = [(one["event"], one["step"]) for one in read_events(tmp_path / "events.jsonl") if "step" in one]
    assert kinds == [("student-pass", 10), ("student-step", 20), ("student-step", 30), ("student-pass", 30)]


def test_a_teachers_curves_are_its_losses_and_its_held_out_dice_and_a_private_training_has_no_loss() -> None:
    kept = Kept()
    curves = TeacherCurves(kept)
    curves.step(0, 1, 0.8)
    curves.step(1, 1, math.nan)
    voter = VoterReport(
        voter=0, trained_on=3, held_out=1, empty_slots=0, dice=(0.5, None), steps=9, seconds=1.0, weights="a" * 64
    )
    curves.end(SiteReport((voter,), ()), ("anterior", "posterior"))
    assert kept.points == [("teacher-0/loss", 0.8, 1), ("teacher-0/dice/anterior", 0.5, 9)]


@pytest.mark.parametrize("asked", ["", "runs", "wandb:runs", "tensorboard:", "tensorboard"])
def test_a_form_or_a_folder_that_is_missing_is_refused_and_nothing_is_made(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput, match="FORM:FOLDER"):
        open_curves(asked, run="trial")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("form", [*FORMS])
def test_a_missing_package_says_how_to_install_it(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("tensorboard", "torch.utils.tensorboard", "mlflow", "mlflow.tracking"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInput, match=rf"pip install '{form}"):
        open_curves(f"{form}:{tmp_path / 'runs'}", run="trial")


def test_no_optional_package_is_imported_where_no_curves_are_asked_for() -> None:
    asks = (
        "import sys; from common.curves import curves_of\n"
        "import client.training.teacher_curves, server.study.study_curves\n"
        "with curves_of(None, print, run=lambda: 'north') as curves: assert curves is None\n"
        "assert not {'tensorboard', 'mlflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", asks], check=True, cwd=Path(__file__).parents[2])


def test_events_logged_before_a_training_are_in_none_of_its_curves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace, kept = Workspace(tmp_path), Kept()
    workspace.study_file.write_text(render_study(make_study()), encoding="utf-8")
    events = told(workspace.events_file)
    monkeypatch.setattr("common.curves.open_curves", lambda asked, *, run: kept)
    with curves_from_here(workspace, "tensorboard:runs"):
        events.emit("student-step", step=20, total=40, loss=0.3)
    assert kept.points == [("student/loss", 0.3, 20), ("closed", 0.0, 0)]


@pytest.fixture
def nobody_to_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test at any network connection."""

    def refused(self: socket.socket, address: object) -> None:
        raise AssertionError(f"a connection to {address}")

    monkeypatch.setattr(socket.socket, "connect", refused)


@TENSORBOARD
@pytest.mark.usefixtures("nobody_to_call")
def test_two_runs_in_one_folder_are_overlaid_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for run, loss in (("first", 0.5), ("second", 0.25)):
        curves = open_curves(f"tensorboard:{tmp_path}", run=run)
        curves.point("student/loss", loss, step=20)
        curves.close()
    for run, loss in (("first", 0.5), ("second", 0.25)):
        read = EventAccumulator(str(tmp_path / run)).Reload()
        assert [(one.step, one.value) for one in read.Scalars("student/loss")] == [(20, loss)]


@MLFLOW
@pytest.mark.usefixtures("nobody_to_call")
def test_two_runs_in_one_folder_are_listed_apart_in_mlflow(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    for run, loss in (("first", 0.5), ("second", 0.25)):
        with curves_of(f"mlflow:{tmp_path}", TeacherCurves, run=lambda run=run: run) as curves:
            assert curves is not None
            curves.step(0, 3, loss)
    client = MlflowClient(tracking_uri=tmp_path.as_uri())
    experiment = client.get_experiment_by_name("consilium")
    assert experiment is not None
    found = {one.info.run_name: one.info.run_id for one in client.search_runs([experiment.experiment_id])}
    for run, loss in (("first", 0.5), ("second", 0.25)):
        history = client.get_metric_history(found[run], "teacher-0/loss")
        assert [(one.step, one.value) for one in history] == [(3, loss)]


@pytest.mark.parametrize("command", ["study run", "study watch", "student train", "site train"])
def test_a_folder_of_curves_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, command: str) -> None:
    (tmp_path / "runs").write_text("a file")
    group, name = command.split()
    words = ["--site-dir", str(tmp_path)] if group == "site" else [str(tmp_path)]
    apps = {"study": study_app, "student": student_app, "site": site_app}
    refused = refusal_of(apps[group], name, *words, "--metrics", f"tensorboard:{tmp_path / 'runs'}")
    assert "output folder: got" in str(refused)
