import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from server.aggregation.progress import ProgressBars, StudyProgress, bar_a_stage, stage_bars

RUN = [
    {"event": "run-started", "run": "1", "pid": 1, "resumed": False},
    {"event": "stage-started", "time": "2026-11-22T10:00:00.000+00:00", "stage": "collect", "total": 4},
    {"event": "offer-answered", "batch": "b", "site": "south", "accepted": False, "reason": "paused"},
    {"event": "reply-missing", "batch": "b", "attempt": 1, "site": "north", "reason": "deadline"},
    {"event": "stage-progress", "stage": "collect", "done": 4, "total": 4},
    {"event": "stage-finished", "stage": "collect", "seconds": 1.0},
    {"event": "stage-started", "time": "2026-11-22T10:00:00.000+00:00", "stage": "student", "total": 10},
    {"event": "student-step", "step": 5, "total": 10, "loss": 1.0},
    {"event": "label-decoded", "volume": "v", "query": "q"},
    {"event": "run-restarted", "run": "1"},
]


def test_a_run_shows_its_stages_and_says_which_site_did_not_answer():
    out = io.StringIO()
    with stage_bars(Console(file=out, width=100, force_terminal=True)) as bars:
        progress = StudyProgress(bars, indent="  ")
        for event in RUN:
            progress.on_event(event)
        shares = {task.description.strip(): task.percentage for task in bars.tasks}
    assert shares == {"collect": 100.0, "student": 50.0}
    text = out.getvalue()
    for line in ("south did not accept: ", "north did not answer", "resumes from the ledger"):
        assert line in text


def test_work_that_tells_of_its_stages_has_a_bar_for_each() -> None:
    out = io.StringIO()
    with bar_a_stage(Console(file=out, width=100, force_terminal=True)) as on_stage:
        for name in ("public start", "tangent kernel"):
            for done in (1, 2, 3):
                on_stage(name, done, 3)
    last = out.getvalue()[-400:]
    assert "public start" in last
    assert "tangent kern" in last
    assert last.count("100%") == 2


def test_a_terminal_attached_in_the_middle_shows_the_whole_run_its_age_and_its_eta() -> None:
    begun = datetime.now(UTC) - timedelta(seconds=300)
    at = lambda seconds: (begun + timedelta(seconds=seconds)).isoformat()  # noqa: E731
    events = [
        {"event": "run-started", "time": at(0), "run": "1"},
        {"event": "stage-started", "time": at(0), "stage": "collect", "total": 4},
        {"event": "stage-finished", "time": at(100), "stage": "collect", "seconds": 100.0},
        {"event": "stage-started", "time": at(100), "stage": "student", "total": 10},
        {"event": "student-step", "time": at(299), "step": 5, "total": 10, "loss": 1.0},
    ]
    with stage_bars(Console(file=io.StringIO(), force_terminal=True)) as bars:
        progress = StudyProgress(bars, overall=True)
        for event in events:
            progress.on_event(event)
        run, collect, student = bars.tasks
        assert run.description == "run"
        assert 30 < run.percentage < 50
        assert run.fields["eta_s"] == pytest.approx(300 * (100 - run.completed) / run.completed, rel=0.05)
        assert (collect.finished, collect.finished_time) == (True, 100.0)
        assert student.elapsed == pytest.approx(200, abs=10)
        progress.on_event({"event": "run-finished", "time": at(300), "run": "1", "seconds": 300.0})
        assert (run.percentage, run.fields["eta_s"]) == (100, 0)


def test_without_a_terminal_every_stage_prints_lines_at_its_start_in_between_and_at_its_end() -> None:
    """Under nohup, systemd or CI the stages print lines, without bars and without long silence."""
    now, out = [0.0], io.StringIO()
    with stage_bars(Console(file=out, width=100)) as bars:
        bars.get_time = lambda: now[0]
        teach = bars.add_task("teachers", total=100)
        for done in range(100):
            now[0] = done * 10.0
            bars.update(teach, completed=done)
        bars.update(teach, completed=100)
        bars.update(teach, completed=100)
    lines = out.getvalue().splitlines()
    assert lines[0] == "teachers: begins"
    assert lines[1] == "teachers: 6 % after 0:01:00"
    assert lines[-1] == "teachers: done after 0:16:30"
    assert len(lines) == 2 + 990 // 60
    assert "\x1b" not in out.getvalue()


def test_where_nothing_is_to_be_shown_nothing_is() -> None:
    out = io.StringIO()
    bars = ProgressBars(console=Console(file=out), show=False)
    with bars:
        bars.update(bars.add_task("cases", total=1), completed=1)
    assert out.getvalue() == ""
