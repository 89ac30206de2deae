"""A study's progress on a terminal: one live bar a stage with elapsed time and ETA, fed by the event log."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

OnStage: TypeAlias = Callable[[str, int, int], None]
"""Called as work goes on: the name of what it is at, how much of that is done, of how much."""


def stage_bars(console: Console) -> Progress:
    """Bars with a stage's name, its share done, the time it took and its ETA; a context manager."""
    return Progress(
        TextColumn("{task.description:<12}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
    )


@contextmanager
def bar_a_stage(console: Console) -> Iterator[OnStage]:
    """A live bar for every stage that is named."""
    with stage_bars(console) as bars:
        tasks: dict[str, TaskID] = {}

        def on_stage(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(name, total=total)
            bars.update(tasks[name], completed=done, total=total)

        yield on_stage


class StudyProgress:
    """Turns a study's events into bars, and what went wrong at a site into a line above them."""

    def __init__(self, bars: Progress, *, indent: str = "") -> None:
        self._bars, self._indent = bars, indent
        self._tasks: dict[str, TaskID] = {}

    def on_event(self, event: dict[str, Any]) -> None:
        """Show one event; kinds that say nothing to a person are passed over."""
        match event["event"]:
            case "stage-started":
                name = event["stage"]
                self._tasks[name] = self._bars.add_task(self._indent + name, total=event["total"])
            case "stage-progress":
                self._update(event["stage"], completed=event["done"], total=event["total"])
            case "student-step":
                self._update("student", completed=event["step"], total=event["total"])
            case "label-decoded" if "decode" in self._tasks:
                self._bars.advance(self._tasks["decode"])
            case "stage-finished" if event["stage"] in self._tasks:
                total = self._bars.tasks[self._tasks[event["stage"]]].total
                self._update(event["stage"], completed=total, total=total)
            case "offer-answered" if not event["accepted"]:
                self._bars.console.print(f"site {event['site']} declined: {event['reason']}")
            case "ledger-contradicted":
                self._bars.console.print(
                    f"site {event['site']} holds a signed head of row {event['ledger_row']} that this ledger does not "
                    "contain: it was rolled back or forked; stop, and see `consilium ledger recover`"
                )
            case "reply-missing":
                self._bars.console.print(f"site {event['site']} did not answer ({event['reason']}); it is asked again")
            case "code-refused":
                self._bars.console.print(f"site {event['site']}: a code was refused ({event['reason']})")
            case "run-restarted":
                self._bars.console.print("the ServerApp died; submitted again, it resumes from the ledger")

    def _update(self, stage: str, *, completed: float | None, total: float | None) -> None:
        if stage in self._tasks:
            self._bars.update(self._tasks[stage], completed=completed, total=total)
