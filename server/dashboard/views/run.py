"""Computes the state of the newest run and of its stages: progress, estimated time left, and outcome."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from server.dashboard.read_model import Follower
from server.study.run_state import DIED

STAGE_WORDS = {
    "collect": "Collect codes and release",
    "decode": "Decode answers",
    "student": "Train the student",
    "controls": "Train its controls",
    "export": "Export the bundle",
}


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage of a run.

    Attributes:
        name: The stage's name in the event log.
        words: The stage's name as pages show it.
        state: ``waiting``, ``active``, ``done``, or ``cut`` if the run ended before the stage was finished.
        done: Number of the stage's steps that are done.
        total: Number of its steps.
        seconds: Duration of a finished stage in seconds; otherwise None.
        eta_s: Estimated seconds left; None if unknown.
    """

    name: str
    words: str
    state: str
    done: int
    total: int
    seconds: float | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class RunView:
    """The newest run.

    Attributes:
        state: ``none``, ``running``, ``stopped``, ``finished``, ``failed`` or ``died``.
        short: The state in a few words, for a page's header.
        words: The state in a sentence.
        started: Time at which the run began; None before the first run.
        ended: Time at which it ended; None while it is active.
        stages: The run's stages, in order.
    """

    state: str
    short: str
    words: str
    started: str | None
    ended: str | None
    stages: tuple[StageView, ...]


def run_view(follower: Follower, *, now: datetime) -> RunView:
    """Return the newest run with its stages.

    Args:
        follower: The read model.
        now: The current time.

    Returns:
        The run; its state is ``none`` before the first run.
    """
    events = follower.events
    run = events.run
    stages = tuple(_stage(follower, name, now=now) for name in STAGE_WORDS)
    if run is None:
        return RunView("none", "No run yet", "No run has been started yet.", None, None, stages)
    if run.ended is None and follower.nobody_runs:
        return RunView("died", "Run died", f"{DIED[0].upper()}{DIED[1:]}.", run.started, events.last_time, stages)
    if run.ended is None:
        active = next((stage for stage in stages if stage.state == "active"), None)
        words = f"Running: {active.words.lower()}." if active else "Running."
        return RunView("running", words, words, run.started, None, stages)
    words = {
        "failed": f"The last run failed: {run.state.reason}",
        "stopped": "The last run was stopped on request.",
        "finished": "The last run finished.",
    }[run.state.name]
    return RunView(run.state.name, f"Run {run.state.name}", words, run.started, run.ended, stages)


def _stage(follower: Follower, name: str, *, now: datetime) -> StageView:
    state = follower.events.stages.get(name)
    run = follower.events.run
    running = run is not None and run.ended is None and not follower.nobody_runs
    if state is None:
        return StageView(name, STAGE_WORDS[name], "waiting", 0, 0, None, None)
    if state.finished:
        return StageView(name, STAGE_WORDS[name], "done", state.total, state.total, state.seconds, None)
    eta = None
    if running and state.started and state.done > (state.base or 0):
        elapsed = (now - datetime.fromisoformat(state.started)).total_seconds()
        eta = max(0.0, elapsed / (state.done - (state.base or 0)) * (state.total - state.done))
    return StageView(name, STAGE_WORDS[name], "active" if running else "cut", state.done, state.total, None, eta)
