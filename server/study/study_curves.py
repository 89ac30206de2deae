"""Turns a study's events into curves: the student's loss, where a pass of its training ends, and Dice.

Loss and Dice are of pseudo-labels and of published validation cases. Nothing here was made of a hospital's data but
what was released with noise, so these curves cost no budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from common.curves import Curves, open_curves
from common.events import EventTail
from server.study.workspace import Workspace


class StudyCurves:
    """Adds what events tell of trainings to curves."""

    def __init__(self, curves: Curves) -> None:
        self._curves, self._step = curves, 0

    def on_event(self, event: Mapping[str, Any]) -> None:
        """Add what one event tells; most tell nothing of a training."""
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
def curves_of(workspace: Workspace, asked: str | None) -> Iterator[StudyCurves | None]:
    """The curves that ``asked`` names, of a run of this study that is named for it; None where none are asked for."""
    if asked is None:
        yield None
        return
    with closing(open_curves(asked, run=workspace.study().name)) as curves:
        yield StudyCurves(curves)


@contextmanager
def curves_from_here(workspace: Workspace, asked: str | None) -> Iterator[None]:
    """Once what is done within is done, write the curves of the events that it told."""
    tail = EventTail(workspace.events_file, from_end=True)
    with curves_of(workspace, asked) as curves:
        try:
            yield
        finally:
            if curves is not None:
                for event in tail.new():
                    curves.on_event(event)
