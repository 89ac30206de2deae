"""Shows a study's progress on a terminal: one bar for each stage with elapsed time and ETA, from the event log.

The commands that run or watch a study use it. Where there is no terminal, it prints a line a minute instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from common.event_kinds import event_words
from common.plain import plain
from server.public.material import OnStage

_SHARES = {"collect": 30, "decode": 3, "student": 16, "controls": 48, "export": 3}
"""Share of each stage in a run's time, in percent, as measured with the demo; the run's ETA is computed from them."""


class _Eta(ProgressColumn):
    """Shows the remaining time: a task's field ``eta_s`` if it has one, otherwise an estimate from the task's speed."""

    def __init__(self) -> None:
        super().__init__()
        self._by_speed = TimeRemainingColumn()

    def render(self, task: Task) -> Text:
        if "eta_s" not in task.fields:
            return self._by_speed.render(task)
        eta_s = task.fields["eta_s"]
        return Text("-:--:--" if eta_s is None else str(timedelta(seconds=round(eta_s))), style="progress.remaining")


LINE_EVERY_S = 60.0
"""Seconds between two lines about a stage if there is no terminal; further lines are printed at its start and end."""


class ProgressBars(Progress):
    """Progress bars on a terminal, or lines where there is none.

    Drawing starts at the first bar, so that an early error prints no blank line.

    Args:
        columns: rich's columns.
        console: Where to draw.
        show: False to print nothing.
    """

    def __init__(self, *columns: Any, console: Console, show: bool = True) -> None:
        self._said: dict[TaskID, float] = {}
        self._lines = show and not console.is_terminal
        super().__init__(*columns, console=console, disable=not show or not console.is_terminal)

    def __enter__(self) -> Self:
        return self

    def add_task(self, *given: Any, **more: Any) -> TaskID:
        self.start()
        task = super().add_task(*given, **more)
        if self._lines:
            self._say(task, "begins")
        return task

    def update(self, task_id: TaskID, **changed: Any) -> None:
        """Change a task's fields as rich's ``Progress.update`` does, and print its line if one is due.

        Args:
            task_id: The task.
            changed: rich's arguments, such as ``completed`` and ``total``.
        """
        super().update(task_id, **changed)
        self._print_if_due(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        """Advance a task as rich's ``Progress.advance`` does, and print its line if one is due.

        Args:
            task_id: The task.
            advance: Number of steps.
        """
        super().advance(task_id, advance)
        self._print_if_due(task_id)

    def _print_if_due(self, task_id: TaskID) -> None:
        """Without a terminal, print a line if the task is done or its last line is :data:`LINE_EVERY_S` ago."""
        if not self._lines or task_id not in self._said:
            return
        task = next(one for one in self.tasks if one.id == task_id)
        if task.total is not None and task.completed >= task.total:
            self._say(task_id, f"done after {timedelta(seconds=round(task.elapsed or 0))}")
            del self._said[task_id]
        elif self.get_time() - self._said[task_id] >= LINE_EVERY_S:
            done = f"{task.completed:g}" if task.total is None else f"{task.percentage:.0f} %"
            self._say(task_id, f"{done} after {timedelta(seconds=round(task.elapsed or 0))}")

    def _say(self, task_id: TaskID, what: str) -> None:
        task = next(one for one in self.tasks if one.id == task_id)
        self._said[task_id] = self.get_time()
        self.console.print(plain(f"{task.description}: {what}"), markup=False, emoji=False, highlight=False)

    def stop(self) -> None:
        if self.live.is_started:
            super().stop()


def stage_bars(console: Console) -> Progress:
    """Return progress bars that show a stage's name, the share done, the elapsed time and the ETA.

    Args:
        console: Where to draw.

    Returns:
        The bars, a context manager that stops drawing at its end.
    """
    return ProgressBars(
        TextColumn("{task.description:<12}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        _Eta(),
        console=console,
    )


@contextmanager
def bar_a_stage(console: Console) -> Iterator[OnStage]:
    """Yield a function that draws a bar for every stage it is called with.

    Args:
        console: Where to draw.

    Yields:
        Function of a stage's name, the steps done and the total number of steps.
    """
    with stage_bars(console) as bars:
        tasks: dict[str, TaskID] = {}

        def on_stage(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield on_stage


class StudyProgress:
    """Turns a study's events into bars, and problems at sites into lines above the bars.

    A bar's elapsed time counts from the event that began its stage. It is therefore right even if the bars are first
    shown in the middle of a run.

    Args:
        bars: Where to draw.
        indent: Text before each stage's name.
        overall: True to draw a bar for the whole run above those of the stages.
    """

    def __init__(self, bars: Progress, *, indent: str = "", overall: bool = False) -> None:
        self._bars, self._indent, self._overall = bars, indent, overall
        self._tasks: dict[str, TaskID] = {}
        self._begun = datetime.now(UTC)

    def on_event(self, event: dict[str, Any]) -> None:
        """Show one event, as a bar's progress or as a line; events of other kinds are ignored.

        Args:
            event: An event as the event log stores it.
        """
        self._show(event)
        if "run" in self._tasks and event["event"] != "run-finished":
            self._update_run()

    def _show(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "run-started" if self._overall:
                self._begun = datetime.fromisoformat(event["time"])
                self._tasks.setdefault("run", self._add("run", total=100, time=event["time"]))
            case "run-finished" if "run" in self._tasks:
                self._bars.update(self._tasks["run"], completed=100, eta_s=0)
                self._task(self._tasks["run"]).finished_time = event["seconds"]
            case "stage-started":
                name = event["stage"]
                self._tasks[name] = self._add(self._indent + name, total=event["total"], time=event["time"])
            case "stage-progress":
                self._update(event["stage"], completed=event["done"], total=event["total"])
            case "student-step":
                self._update("student", completed=event["step"], total=event["total"])
            case "label-decoded" if "decode" in self._tasks:
                self._bars.advance(self._tasks["decode"])
            case "stage-finished" if event["stage"] in self._tasks:
                total = self._bars.tasks[self._tasks[event["stage"]]].total
                self._update(event["stage"], completed=total, total=total)
                self._task(self._tasks[event["stage"]]).finished_time = event["seconds"]
            case "ledger-contradicted" | "reply-missing" | "code-refused" | "site-slow":
                self._say(event_words(event))
            case "offer-answered" if not event["accepted"]:
                self._say(event_words(event))
            case "run-restarted":
                self._say("the ServerApp ended unexpectedly; it was submitted again and resumes from the ledger")

    def _say(self, text: str) -> None:
        """Print a line above the bars, without control characters, since a site may have chosen some of its words."""
        self._bars.console.print(plain(text), markup=False, emoji=False)

    def _add(self, name: str, *, total: float, time: str) -> TaskID:
        task = self._bars.add_task(plain(name), total=total)
        self._task(task).start_time = self._bars.get_time() - max(0.0, _seconds_since(datetime.fromisoformat(time)))
        return task

    def _task(self, task: TaskID) -> Task:
        return next(one for one in self._bars.tasks if one.id == task)

    def _update_run(self) -> None:
        """Update the run's bar from the share of each stage, and its ETA at the average speed so far."""
        stages = {stage: self._task(task) for stage, task in self._tasks.items() if stage in _SHARES}
        done = sum(_SHARES[stage] * task.completed / (task.total or 1) for stage, task in stages.items())
        eta_s = _seconds_since(self._begun) * (100 - done) / done if done >= 1 else None
        self._bars.update(self._tasks["run"], completed=done, eta_s=eta_s)

    def _update(self, stage: str, *, completed: float | None, total: float | None) -> None:
        if stage in self._tasks:
            self._bars.update(self._tasks[stage], completed=completed, total=total)


def _seconds_since(time: datetime) -> float:
    return (datetime.now(UTC) - time).total_seconds()
