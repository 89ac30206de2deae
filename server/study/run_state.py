"""Determines the state of a study's newest run: running while a process holds its locks, else as its log says.

A count of answers says nothing of a run. A run that began, told no ending and is held by nobody has died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.events import read_events
from server.study.locks import is_held
from server.study.workspace import RUN_LOCK, Workspace

SUPERVISED = "supervised.lock"
"""Held by the process that submits the run again should it die."""
TURNS = ("run-started", "stop-requested", "run-finished", "run-failed")
DIED = "the run died, and nobody is there to submit it again; to fix: `consilium study resume` goes on from the ledger"


@dataclass(frozen=True, slots=True)
class RunState:
    """``name``: none, running, stopped, finished, failed or died; ``reason``: why it failed or died."""

    name: str = "none"
    reason: str = ""

    def after(self, event: Mapping[str, Any]) -> RunState:
        """The state by one more event of the log, which cannot tell that a run died."""
        match event["event"]:
            case "run-started":
                return RunState("running")
            case "run-failed":
                return RunState("failed", event["reason"])
            case "stop-requested":
                return RunState("stopped")
            case "run-finished" if self.name != "stopped":
                return RunState("finished")
        return self


def run_state(workspace: Workspace) -> RunState:
    """The state of the newest run, by its locks and its log."""
    before = lives(workspace)
    found = RunState()
    for event in read_events(workspace.events_file):
        found = found.after(event)
    if found.name == "running" and before is False and lives(workspace) is False:  # none began in between
        return RunState("died", DIED)
    return found


def lives(workspace: Workspace) -> bool | None:
    """Whether a process holds the study's run or submits it again; None where the locks cannot be read from here."""
    held = [is_held(workspace.root / name) for name in (RUN_LOCK, SUPERVISED)]
    return True if True in held else None if None in held else False


def supervised(workspace: Workspace) -> bool:
    """Whether somebody is there who submits the study's run again should it die."""
    return is_held(workspace.root / SUPERVISED) is True
