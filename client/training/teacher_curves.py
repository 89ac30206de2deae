"""Writes the curves of a site's own training to a folder at the hospital: each teacher's loss, and Dice at its end.

The curves are made of patients' data and no ε covers them, so they stay where they are written, and nothing sends them.
The loss of a private training is not written, because its privacy charge does not cover it. Its Dice on held-out cases
is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from client.training.task import SiteReport
from common.curves import Curves, open_curves


class TeacherCurves:
    """Adds what a training tells of its voters to curves."""

    def __init__(self, curves: Curves) -> None:
        self._curves = curves

    def step(self, voter: int, step: int, loss: float) -> None:
        """Add a step's loss; nothing where there is none."""
        if math.isfinite(loss):
            self._curves.point(f"teacher-{voter}/loss", loss, step=step)

    def end(self, report: SiteReport, structures: Sequence[str]) -> None:
        """Add each teacher's Dice on the cases that were held out of its training."""
        for voter in report.voters:
            for name, dice in zip(structures, voter.dice, strict=False):
                if dice is not None and math.isfinite(dice):
                    self._curves.point(f"teacher-{voter.voter}/dice/{name}", dice, step=voter.steps)


@contextmanager
def curves_of(asked: str | None, *, run: str) -> Iterator[TeacherCurves | None]:
    """The curves that ``asked`` names; None where none are asked for."""
    if asked is None:
        yield None
        return
    with closing(open_curves(asked, run=run)) as curves:
        yield TeacherCurves(curves)
