"""Writes the curves of a site's training to a folder at the hospital: each teacher's loss, and its Dice at the end.

The curves depend on patients' data and no ε covers them, so they are never sent. The loss of a private training is not
written, because its privacy charge does not cover it. The Dice of its teachers on held-out cases is written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from client.training.task import SiteReport
from common.curves import Curves


class TeacherCurves:
    """Adds the losses and Dice scores of a training's teachers to curves."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves

    def step(self, voter: int, step: int, loss: float) -> None:
        """Add the loss of one step; a loss that is not finite is left out.

        Args:
            voter: Number of the voter.
            step: Number of the step.
            loss: The step's loss.
        """
        if math.isfinite(loss):
            self._curves.point(f"teacher-{voter}/loss", loss, step=step)

    def end(self, report: SiteReport, structures: Sequence[str]) -> None:
        """Add each teacher's Dice on the cases that were held out of its training.

        Args:
            report: The training's report.
            structures: Names of the structures, in the order of the report's Dice.
        """
        for voter in report.voters:
            for name, dice in zip(structures, voter.dice, strict=False):
                if dice is not None and math.isfinite(dice):
                    self._curves.point(f"teacher-{voter.voter}/dice/{name}", dice, step=voter.steps)
