"""Determines the state of a study's newest run, from its locks and its event log.

The status commands and the dashboard use it. A run is active while a process holds its locks; otherwise the log tells
how the run ended. A run that logged its start but no end, and whose locks are free, has died.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from common.events import read_events
from server.study.locks import is_held
from server.study.workspace import RUN_LOCK, Workspace

SUPERVISED = "supervised.lock"
"""Lock of the process that submits the run again if it dies."""
DIED = "the run died, and nobody is there to submit it again; to fix: `consilium study resume` continues it"


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a study's newest run.

    Attributes:
        name: ``none`` if the study was never run, else ``running``, ``stopped``, ``finished``, ``failed`` or ``died``.
        reason: Why the run failed or died; empty in any other state.
    """

    name: str = "none"
    reason: str = ""

    def after(self, event: Mapping[str, Any]) -> RunState:
        """Return the state after one more event of the log; never ``died``, because a run that dies logs nothing.

        Args:
            event: The event.

        Returns:
            The new state.
        """
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
    """Determine the state of the newest run from its locks and the event log.

    Args:
        workspace: The study's directory.

    Returns:
        The state; if this user cannot read the locks, a run that has died is reported as ``running``.
    """
    before = lives(workspace)
    found = RunState()
    for event in read_events(workspace.events_file):
        found = found.after(event)
    if found.name == "running" and before is False and lives(workspace) is False:  # and no run began in between
        return RunState("died", DIED)
    return found


def lives(workspace: Workspace) -> bool | None:
    """Check whether a process runs the study, or supervises it to submit the run again if the run dies.

    Args:
        workspace: The study's directory.

    Returns:
        True or False; None if this user cannot read the locks.
    """
    held = [is_held(workspace.root / name) for name in (RUN_LOCK, SUPERVISED)]
    return True if True in held else None if None in held else False


def supervised(workspace: Workspace) -> bool:
    """Check whether a process will submit the study's run again if it dies.

    Args:
        workspace: The study's directory.

    Returns:
        True if such a process holds the file :data:`SUPERVISED`; False if not, or if this user cannot read the file.
    """
    return is_held(workspace.root / SUPERVISED) is True
