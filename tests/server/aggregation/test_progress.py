import io

from rich.console import Console

from server.aggregation.progress import StudyProgress, bar_a_stage, stage_bars

RUN = [
    {"event": "run-started", "run": "1", "pid": 1, "resumed": False},
    {"event": "stage-started", "stage": "collect", "total": 4},
    {"event": "offer-answered", "batch": "b", "site": "south", "accepted": False, "reason": "paused"},
    {"event": "reply-missing", "batch": "b", "attempt": 1, "site": "north", "reason": "deadline"},
    {"event": "stage-progress", "stage": "collect", "done": 4, "total": 4},
    {"event": "stage-finished", "stage": "collect", "seconds": 1.0},
    {"event": "stage-started", "stage": "student", "total": 10},
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
    for line in ("site south declined: paused", "site north did not answer", "resumes from the ledger"):
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
