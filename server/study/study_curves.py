"""Writes training curves from a study's events: the student's loss, the ends of training passes, and Dice.

The loss is measured on pseudo-labels, and Dice on published validation cases. Hospitals' data enter the curves only
through releases under differential privacy, so the curves cost no privacy budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from common.curves import Curves, curves_of
from common.events import EventTail
from server.study.workspace import Workspace


class StudyCurves:
    """Adds the training progress that events report to curves.

    Args:
        curves: The curves.
    """

    def __init__(self, curves: Curves) -> None:
        self._curves, self._step = curves, 0

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Add the point that an event reports; events of other kinds are ignored.

        Args:
            event: The event.
        """
        match event["event"]:
            case "student-step":
                self._step = event["step"]
                self._curves.point("student/loss", event["loss"], step=event["step"])
            case "student-pass":
                self._curves.point("student/pass", event["number"], step=event["step"])
            case "student-validated":
                self._curves.point("validation/dice/student", event["dice"], step=event["step"])
            case "network-scored":
                self._curves.point(f"validation/dice/{event['name']}", event["dice"], step=self._step)


@contextmanager
def curves_from_here(workspace: Workspace, asked: str | None) -> Iterator[None]:
    """Write, at the end of the block, the curves of the events that were logged inside the block.

    Args:
        workspace: The study's directory.
        asked: Format and folder of the log, as given to ``--metrics``; None for no log.
    """
    tail = EventTail(workspace.events_file, from_end=True)
    with curves_of(asked, StudyCurves, run=lambda: workspace.study().name) as curves:
        try:
            yield
        finally:
            if curves is not None:
                for event in tail.new():
                    curves.on_event(event)
