"""Tests the status of a study: stages, missing sites, and a run that another terminal can follow."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import socket
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config import TrainingConfig
from common.errors import DaemonFailed, InvalidInput, StorageFailed
from common.events import EventLog, read_events
from common.ledger.rollback_guard import standing_path
from common.ledger.server_state import ServerBooks
from common.process import READY_TIMEOUT_S
from common.supervision import FACTS, DaemonStanding, json_report, keeping
from consilium.cli.study import ask_to_spend, study_app
from consilium.in_process import Wire
from server.aggregation import pipeline
from server.operations import supervisor
from server.operations.daemons import FlowerServer, RunStatus, prepare
from server.operations.supervisor import (
    RunFailed,
    detach,
    flower_server,
    request_stop,
    start_run,
    supervise,
    watch,
)
from server.study.locks import StudyBusy, held_alone
from server.study.read_facts import facts_of
from server.study.run_state import SUPERVISED, run_state
from server.study.status import study_status
from server.study.workspace import Endpoint, Workspace
from tests.backups import anothers_standing, delete_ledger
from tests.commands import typed
from tests.federation import make_study
from tests.studies import made_study


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return made_study(tmp_path / "study")


def events_of(workspace: Workspace) -> EventLog:
    return EventLog(workspace.events_file, study=workspace.study().id)


def test_a_study_that_waits_for_sites_is_not_said_to_have_spent_its_budget(workspace: Workspace) -> None:
    status = study_status(workspace)
    assert status.state == "not running"
    assert any(re.search(r"^sites admitted: 0\b.* 2 ", line) for line in status.lines())


def test_study_status_warns_of_another_ledgers_standing_before_a_run(workspace: Workspace, tmp_path: Path) -> None:
    assert study_status(workspace).warnings == ()
    anothers_standing(tmp_path, standing_path(workspace.ledger_file))
    (warning,) = study_status(workspace).warnings
    assert "of another ledger" in warning
    assert warning.count("consilium ledger recover") == 1


def test_a_site_whose_codes_were_refused_does_not_look_like_the_others(workspace: Workspace) -> None:
    """The site's reply arrived, and rosters contain the site. Only an event shows that its codes count as zero."""
    events = events_of(workspace)
    assert "refused" not in "\n".join(study_status(workspace).lines())
    for site in ("north", "south"):
        events.emit("reply-received", batch="b", attempt=1, site=site, codes=0, seconds=1.0)
    for codes in (2, 1):
        events.emit("code-refused", batch="b", site="south", query="q", reason="code-norm", codes=codes)
    status = study_status(workspace)
    assert {name: site.to_json().get("refused") for name, site in status.sites.items()} == {"north": None, "south": 3}
    (south,) = (line for line in status.lines() if line.strip().startswith("south"))
    assert "3 codes" in south


def test_a_run_that_a_full_disk_ended_says_so_and_not_only_the_error_s_kind(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event, `study status` and the exit code all state that the disk is full."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(workspace.labels_dir))

    monkeypatch.setattr(pipeline, "collect", full)
    with pytest.raises(OSError, match="No space"):
        pipeline.run_study(workspace, Wire({}), run="1")
    (failed,) = (event for event in read_events(workspace.events_file) if event["event"] == "run-failed")
    assert failed["code"] == StorageFailed.exit_code
    assert failed["reason"].startswith(f"{workspace.labels_dir}: No space left on device; to fix: make room")
    assert failed["reason"] in study_status(workspace).warnings


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        ("paused", "declined"),
        ("withdrawn", "withdrawn"),
        ("offline", "offline"),
        ("left-out", "offline"),
        ("accepted", "open"),
    ],
)
def test_a_site_that_declines_or_is_away_is_not_said_to_be_open(workspace: Workspace, reason: str, state: str) -> None:
    """Only a site that accepts offers is shown as `open`."""
    events = events_of(workspace)
    events.emit("offer-answered", batch="b", site="north", accepted=reason == "accepted", reason=reason)
    assert study_status(workspace).to_json()["sites"]["north"]["state"] == state  # type: ignore[index]
    events.emit("reply-received", batch="b", attempt=1, site="north", codes=1, seconds=1.0)
    assert study_status(workspace).to_json()["sites"]["north"]["state"] == "open"  # type: ignore[index]


@pytest.mark.parametrize(
    ("damage", "says"),
    [("cut short", "consilium ledger recover"), ("a link that leads nowhere", "mount that disk")],
)
def test_a_standing_that_cannot_be_read_is_a_warning_on_the_page_and_not_its_end(
    workspace: Workspace, tmp_path: Path, damage: str, says: str
) -> None:
    kept = workspace.ledger_file.with_suffix(".standing")
    if damage == "cut short":
        kept.write_text("{")
    else:
        kept.unlink()
        kept.symlink_to(tmp_path / "gone")
    done = typed(study_app, "status", workspace.root)
    (warning,) = study_status(workspace).warnings
    assert says in warning
    assert f"warning: {warning}" in done.stdout


def test_the_stage_and_how_much_of_it_is_done_are_shown(workspace: Workspace) -> None:
    events = events_of(workspace)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("stage-started", stage="student", total=40)
    events.emit("student-step", step=10, total=40, loss=0.5)
    shown = CliRunner().invoke(study_app, ["status", str(workspace.root)]).stdout
    assert "stage student: 10 of 40, since 2" in shown
    assert "+00:00" not in shown  # times are in the reader's time zone
    events.emit("run-finished", run="1", seconds=1.0)
    assert study_status(workspace).stage is None


def test_a_time_in_a_terminal_names_its_zone(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs, and other lines of the same output, state times in UTC."""
    events = events_of(workspace)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("stage-started", stage="student", total=40)
    with monkeypatch.context() as there:
        there.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        (stage,) = (line for line in study_status(workspace).lines() if line.startswith("stage student"))
        daemon = DaemonStanding("worker north", "ready", "2026-11-30T23:30:00.000+00:00").line
    time.tzset()
    assert stage.endswith(" JST")
    assert daemon == "worker north: ready since 2026-12-01 08:30:00 JST"


def test_the_status_names_the_sites_that_a_run_waits_for_and_that_delay_it(workspace: Workspace) -> None:
    events = events_of(workspace)
    events.emit("run-started", run="1", pid=1, resumed=False)
    asked = {"attempt": 1, "sites": 2, "queries": 1, "asked": ["north", "south"]}
    events.emit("batch-dispatched", batch="b", **asked)
    events.emit("reply-received", batch="b", attempt=1, site="south", codes=1, seconds=1.0)
    with workspace.locked():
        lines = study_status(workspace).lines()
    assert [line.split(",")[0] for line in lines if "waits for" in line] == ["waits for north"]
    assert study_status(workspace).waits_for == [], "no run is at work"
    events.emit("site-slow", batch="b", site="north", seconds=1_150.0, usual_seconds=25.0)
    (warning,) = (line for line in study_status(workspace).lines() if "is slow" in line)
    assert "north is slow: in 1 batch of the newest run" in warning
    assert "46 times" in warning


def test_the_status_of_a_run_that_reached_nobody_in_its_first_attempt_says_whom_it_waits_for(
    workspace: Workspace,
) -> None:
    """The log has no event for an attempt in which no site could be asked."""
    events = events_of(workspace)
    events.emit("run-started", run="1", pid=1, resumed=True)
    events.emit("batch-dispatched", batch="b", attempt=2, sites=1, queries=1, asked=["north"])
    with workspace.locked():
        assert any("waits for north, since 2" in line for line in study_status(workspace).lines())


@pytest.mark.parametrize("stage", ["collect", "student", "export"])
def test_a_killed_run_is_reported_as_dead_and_never_as_complete(
    workspace: Workspace, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = workspace.study().privacy.planned_queries
    monkeypatch.setattr(ServerBooks, "answers", lambda self, study_id: planned)
    events = events_of(workspace)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("stage-started", stage=stage, total=40)
    with workspace.locked():
        assert study_status(workspace).state == "running"
    status = study_status(workspace)
    assert (status.state, status.running, status.facts.answers_left) == ("died", False, 0)
    assert "consilium study resume" in " ".join(status.warnings)
    events.emit("run-failed", run="1", reason="invented reason")
    assert study_status(workspace).state == "failed"
    assert "invented reason" in " ".join(study_status(workspace).warnings)
    events.emit("run-started", run="2", pid=1, resumed=True)
    events.emit("run-finished", run="2", seconds=1.0)
    assert study_status(workspace).state == "complete"


@pytest.mark.parametrize(("answer", "asked_again"), [("n\n", True), ("y\n", False)])
def test_a_budget_that_the_plan_says_not_to_spend_is_asked_for_at_a_terminal(
    monkeypatch: pytest.MonkeyPatch, answer: str, asked_again: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    ask_to_spend(go_on=True)
    ask_to_spend(go_on=False)  # no terminal: nobody can answer
    assert "advises against" in capsys.readouterr().err
    terminal = io.StringIO(answer)
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    if asked_again:
        with pytest.raises(InvalidInput, match="plan another"):
            ask_to_spend(go_on=False)
    else:
        ask_to_spend(go_on=False)


def test_a_stop_with_no_run_is_refused_and_leaves_no_request_for_the_next(workspace: Workspace) -> None:
    with pytest.raises(InvalidInput, match=r"no run.*study status"):
        request_stop(workspace)
    assert not workspace.stop_file.exists()
    with workspace.locked():
        request_stop(workspace)
    assert workspace.stop_file.exists()


@pytest.mark.slow
def test_a_watcher_who_comes_in_the_middle_sees_the_run_from_its_beginning_to_its_end(workspace: Workspace) -> None:
    events, seen = events_of(workspace), []
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("run-failed", run="1", reason="an earlier one")
    events.emit("run-started", run="2", pid=1, resumed=True)
    events.emit("stage-started", stage="collect", total=4)

    def goes_on() -> None:
        events.emit("stage-progress", stage="collect", done=4, total=4)
        events.emit("run-finished", run="2", seconds=1.0)

    with workspace.locked():
        timer = threading.Timer(0.5, goes_on)
        timer.start()
        watch(workspace, on_event=lambda event: seen.append(event["event"]))
        timer.join()
    assert seen == ["run-started", "stage-started", "stage-progress", "run-finished"]


def test_a_watcher_is_told_of_a_run_that_failed_or_never_began(workspace: Workspace) -> None:
    with pytest.raises(InvalidInput, match=r"no run.*study run"):
        watch(workspace, on_event=lambda event: None)
    events = events_of(workspace)
    events.emit("run-started", run="1", pid=1, resumed=False)
    events.emit("run-failed", run="1", reason="quorum not reached")
    with pytest.raises(RunFailed, match="quorum not reached"):
        watch(workspace, on_event=lambda event: None)


@pytest.mark.slow
def test_a_run_that_died_is_waited_for_while_somebody_submits_it_again_and_said_to_have_died_when_nobody_does(
    workspace: Workspace,
) -> None:
    events, seen = events_of(workspace), []
    events.emit("run-started", run="1", pid=1, resumed=False)
    assert run_state(workspace).name == "died"
    with pytest.raises(RunFailed, match="to fix: `consilium study resume`"):
        watch(workspace, on_event=lambda event: None)

    def again() -> None:
        events.emit("run-started", run="2", pid=1, resumed=True)
        events.emit("run-finished", run="2", seconds=1.0)

    with held_alone(workspace.root / SUPERVISED, busy="already active"):
        assert run_state(workspace).name != "died"
        timer = threading.Timer(1.0, again)
        timer.start()
        watch(workspace, on_event=lambda event: seen.append(event["event"]))
        timer.join()
        with pytest.raises(StudyBusy, match="already active"):
            supervise(workspace)
    assert seen == ["run-started", "run-restarted", "run-started", "run-finished"]
    assert run_state(workspace).name != "died"


@pytest.mark.slow
def test_a_run_that_ended_before_it_began_is_submitted_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, the core refuses a run while another process holds the study."""
    events, seen, submitted = events_of(workspace), [], []
    away = iter([DaemonFailed("SuperLink does not answer")])

    def submit_next(_workspace: Workspace) -> int:
        submitted.append(len(submitted) + 1)
        if submitted[-1] == 2:
            events.emit("run-started", run="2", pid=1, resumed=False)
            events.emit("run-finished", run="2", seconds=1.0)
        return submitted[-1]

    def status(_server: FlowerServer, run_id: int) -> RunStatus:
        for error in away:
            raise error
        return RunStatus(run_id=run_id, status="finished")

    monkeypatch.setattr("server.operations.supervisor.start_run", submit_next)
    monkeypatch.setattr("server.operations.supervisor.run_status", status)
    monkeypatch.setattr("server.operations.supervisor.flower_server", lambda workspace: None)
    monkeypatch.setattr("server.operations.supervisor.START_LOOK_S", 0.1)
    supervise(workspace, on_event=lambda event: seen.append((event["event"], event["run"])))
    assert seen == [("run-restarted", "1"), ("run-started", "2"), ("run-finished", "2")]

    submitted[:] = [1, 2, 3]  # from now on no submitted run begins
    with pytest.raises(RunFailed, match="died 4 times"):
        supervise(workspace)


@pytest.mark.slow
def test_a_run_waits_for_a_superlink_that_is_restarted_and_not_for_one_without_a_supervisor(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    workspace.save_endpoint(Endpoint("localhost", 8443, port))
    prepare(flower_server(workspace))
    with pytest.raises(DaemonFailed, match=r"SuperLink.*server up"):
        start_run(workspace)

    submitted, listening = [], threading.Event()

    def submit(server: FlowerServer, app: Path) -> int:
        submitted.append(listening.is_set())
        return 7

    monkeypatch.setattr(supervisor, "submit", submit)
    logs = workspace.flower_dir / "logs"
    with keeping(logs), contextlib.ExitStack() as later:
        json_report(logs / FACTS)("daemon-ended", daemon="superlink", why="signal 9", again_in_s=1.0)

        def back() -> None:
            later.enter_context(socket.create_server(("127.0.0.1", port)))
            listening.set()

        timer = threading.Timer(1.0, back)
        timer.start()
        assert start_run(workspace) == 7
        timer.join()
    assert submitted == [True]
    assert workspace.run_id() == 7


def test_the_previous_run_is_stopped_before_another_is_submitted(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SuperLink still counts a killed run as running, and its half-sent messages delay the sites."""
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    calls: list[str] = []

    def stop(_server: FlowerServer, run_id: int) -> None:
        calls.append(f"stop {run_id}")
        raise DaemonFailed("the run has ended")

    def submit(_server: FlowerServer, _app: Path) -> int:
        calls.append("submit")
        return 6 + calls.count("submit")

    monkeypatch.setattr(supervisor, "accepts", lambda *_: True)
    monkeypatch.setattr(supervisor, "stop_run", stop)
    monkeypatch.setattr(supervisor, "submit", submit)
    assert [start_run(workspace), start_run(workspace)] == [7, 8]
    assert calls == ["submit", "stop 7", "submit"]


class SlowSuperLink:
    """Stands in for a SuperLink that carries out a submission after its client gave up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stopped: list[int] = []
        monkeypatch.setattr(supervisor, "accepts", lambda *_: True)
        monkeypatch.setattr(supervisor, "submit", self.submit)
        monkeypatch.setattr(supervisor, "unfinished_runs", lambda _server: [] if 7 in self.stopped else [7])
        monkeypatch.setattr(supervisor, "stop_run", lambda _server, run_id: self.stopped.append(run_id))

    def submit(self, _server: FlowerServer, _app: Path) -> int:
        raise DaemonFailed("the command flwr run did not end within 120 s")


def test_a_run_whose_submission_timed_out_is_stopped_before_another_is_submitted(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run recorded earlier had ended; formerly it was taken for the newest run."""
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    workspace.save_run_id(6)
    events_of(workspace).emit("run-finished", run="6", seconds=1.0)
    slow = SlowSuperLink(monkeypatch)
    with pytest.raises(DaemonFailed, match="did not end"):
        start_run(workspace)
    monkeypatch.setattr(supervisor, "submit", lambda *_: 8)
    assert start_run(workspace) == 8
    assert slow.stopped == [7]


@pytest.mark.parametrize("now", [False, True])
def test_a_run_whose_submission_timed_out_can_be_stopped_by_hand(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, now: bool
) -> None:
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    workspace.save_run_id(6)
    slow = SlowSuperLink(monkeypatch)
    with contextlib.suppress(DaemonFailed):
        start_run(workspace)
    slow.stopped.clear()
    request_stop(workspace, now=now)
    assert slow.stopped == [7]
    assert workspace.stop_file.exists()


def test_a_stop_at_once_is_asked_for_even_if_superlink_does_not_answer(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(_server: FlowerServer) -> list[int]:
        raise DaemonFailed("the command flwr list did not end")

    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    monkeypatch.setattr(supervisor, "unfinished_runs", silent)
    with workspace.locked(), pytest.raises(DaemonFailed, match="did not end"):
        request_stop(workspace, now=True)
    assert workspace.stop_file.exists()


def test_a_run_has_as_long_to_begin_as_a_daemon_and_the_error_names_a_busy_machine(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine no run began within the former two minutes, and the log that the error named was empty."""
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    assert supervisor.START_TIMEOUT_S >= READY_TIMEOUT_S
    monkeypatch.setattr(supervisor, "run_status", lambda _server, run_id: RunStatus(run_id=run_id, status="starting"))
    monkeypatch.setattr(supervisor, "stop_run", lambda _server, _run_id: None)
    with pytest.raises(
        DaemonFailed,
        match=r"superexec.log, names no error, end other work on the machine, then run `consilium study resume`",
    ):
        supervisor._ended(workspace, 7, late=True)


@pytest.mark.parametrize("answers", [False, True])
def test_a_run_that_begins_too_late_is_given_up_at_superlink_too(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Such a run once began by itself after SuperLink restarted."""
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    stopped: list[int] = []

    def status(_server: FlowerServer, run_id: int) -> RunStatus:
        if not answers:
            raise DaemonFailed("the command flwr list did not end")
        return RunStatus(run_id=run_id, status="pending")

    monkeypatch.setattr(supervisor, "start_run", lambda _workspace: 7)
    monkeypatch.setattr(supervisor, "run_status", status)
    monkeypatch.setattr(supervisor, "stop_run", lambda _server, run_id: stopped.append(run_id))
    monkeypatch.setattr(supervisor, "START_LOOK_S", 0.0)
    monkeypatch.setattr(supervisor, "START_TIMEOUT_S", 0.0)
    with pytest.raises(DaemonFailed, match="did not"):
        supervise(workspace)
    assert stopped == [7]


def test_a_run_that_reported_its_end_is_not_stopped_again(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    workspace.save_run_id(6)
    events_of(workspace).emit("run-finished", run="6", seconds=1.0)
    stopped: list[int] = []
    monkeypatch.setattr(supervisor, "accepts", lambda *_: True)
    monkeypatch.setattr(supervisor, "stop_run", lambda _server, run_id: stopped.append(run_id))
    monkeypatch.setattr(supervisor, "submit", lambda *_: 7)
    assert start_run(workspace) == 7
    assert stopped == []


def test_a_run_that_cannot_begin_says_why_to_who_detached_it(workspace: Workspace) -> None:
    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    with pytest.raises(DaemonFailed, match=r"^endpoint\.json is missing.*to fix"):
        detach(workspace, (sys.executable, "-c", "raise SystemExit('error: endpoint.json is missing; to fix: x')"))


@pytest.mark.slow
def test_a_run_that_died_of_a_full_disk_says_so_although_it_could_log_nothing(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run cannot write an event, so `study run` and `study resume` test the disk themselves."""

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    workspace.save_endpoint(Endpoint("localhost", 8443, 8000))
    events_of(workspace).emit("run-started", run="6", resumed=False, pid=1)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=f"No space left on device.*{workspace.root}"):
        detach(workspace, (sys.executable, "-c", "raise SystemExit(1)"))
    with pytest.raises(OSError, match="No space left on device"):
        watch(workspace, on_event=lambda _event: None)
    assert list((workspace.root / "logs").iterdir()) == [workspace.root / "logs" / "run.log"]


def test_a_complete_study_that_is_run_again_and_detached_is_said_to_be_complete(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = workspace.study().privacy.planned_queries
    monkeypatch.setattr(supervisor, "detach", lambda _workspace: None)
    words = ["run", str(workspace.root), "--detach", "--json", "--yes"]
    assert "goes on" in CliRunner().invoke(study_app, words).stderr
    monkeypatch.setattr(ServerBooks, "answers", lambda self, study_id: planned)
    events_of(workspace).emit("run-started", run="1", pid=1, resumed=False)
    events_of(workspace).emit("run-finished", run="1", seconds=1.0)
    said = CliRunner().invoke(study_app, words).stderr
    assert "complete" in said
    assert "goes on" not in said


@pytest.mark.parametrize("running", [True, False])
def test_answers_left_in_the_middle_of_a_sealed_batch_say_what_they_do_not_count(tmp_path: Path, running: bool) -> None:
    made = made_study(tmp_path / "sealed", make_study(quorum=3, aggregation="sealed-sum", planned_queries=6))
    found = study_status(made)
    short = replace(found, running=running, facts=replace(found.facts, quorum_room=4))
    (line,) = (one for one in short.lines() if one.startswith("answers "))
    assert "4 of the 6 left" in line
    assert ("draws under way" in line) is running


def test_a_study_is_made_with_the_planner_s_verdict_and_what_it_recommends_in_its_place(tmp_path: Path) -> None:
    words = ["--name", "t", "--labels", "background,body", "--grid", "16,16,16", "--quorum", "5", "--delta", "1e-3"]
    weak = CliRunner().invoke(study_app, ["init", str(tmp_path / "weak"), *words, "--queries", "16"]).stdout
    assert re.search("plan: .*public shapes", weak)
    assert re.search("instead: a joint query .*4 rounds", weak)
    joint = CliRunner().invoke(study_app, ["init", str(tmp_path / "joint"), *words, "--queries", "4", "--joint"]).stdout
    assert re.search("plan: .* 5 hospitals: a joint query .*4 rounds", joint)
    assert "instead" not in joint


def test_a_joint_query_on_a_grid_that_is_too_fine_for_it_is_refused_when_the_study_is_made(tmp_path: Path) -> None:
    words = ["--name", "t", "--labels", "background,body", "--quorum", "5", "--queries", "4", "--grid", "200,200,200"]
    done = CliRunner().invoke(study_app, ["init", str(tmp_path / "joint"), *words, "--joint"])
    assert f"got {200**3}" in str(done.exception)
    assert "data.grid" in done.exception.remedy
    assert not (tmp_path / "joint").exists()
    assert CliRunner().invoke(study_app, ["init", str(tmp_path / "each"), *words]).exit_code == 0


@pytest.mark.parametrize("who", ["teacher", "student"])
def test_a_recipe_whose_network_cannot_halve_the_grid_is_refused_when_the_study_is_made(
    tmp_path: Path, who: str
) -> None:
    file = tmp_path / "study.toml"
    terms = '[privacy]\nepsilon = 8.0\ndelta = 1e-3\nplanned_queries = 4\nquorum = 2\naggregation = "open"\n'
    data = '[data]\nlabels = ["background", "body"]\nspacing_mm = [1.0, 1.0, 1.0]\ngrid = [24, 16, 16]\n'
    file.write_text(f'schema = 1\nname = "t"\n{data}{terms}[{who}]\nchannels = [4, 4, 8, 8, 16]\n')
    done = CliRunner().invoke(study_app, ["create", str(tmp_path / "study"), "--study", str(file)])
    assert "(24, 16, 16); allowed: multiples of 16" in str(done.exception)
    assert not (tmp_path / "study").exists()


def test_only_a_network_that_pads_takes_a_grid_that_it_cannot_halve() -> None:
    five = TrainingConfig(channels=(4, 4, 8, 8, 8), network="paper-unet")
    five.check_grid((24, 24, 40))
    for network, grid in (("paper-unet", (24, 24, 24)), ("paper-unet", (8, 40, 40)), ("unet", (24, 24, 40))):
        with pytest.raises(InvalidInput, match="16"):
            replace(five, network=network).check_grid(grid)


def test_a_study_whose_ledger_is_gone_is_not_shown_as_one_that_spent_nothing(workspace: Workspace) -> None:
    """The standing still exists, so the ledger's file was lost, and with it the record of what was spent."""
    delete_ledger(workspace.ledger_file)
    assert facts_of(workspace).spending.doubt is not None
    told = CliRunner().invoke(study_app, ["show", str(workspace.root)]).output
    assert "nothing is known" in " ".join(told.split())
    standing_path(workspace.ledger_file).unlink()
    assert facts_of(workspace).spending.doubt is None
