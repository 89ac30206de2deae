"""Logs the student's training, so that its loss, its passes and its Dice on validation cases can be drawn as curves.

To compute the Dice, a checkpoint that the training wrote is loaded into a separate network. The training itself is not
affected: with and without validation cases the same seed gives the same student. At most :data:`POINTS` checkpoints of
a training are scored, each on at most :data:`MOST_CASES` cases. No network is selected by these scores.
`server.postprocess.networks` calls this module after every step.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from common.data.volume import example_from_bytes
from common.events import EventLog
from common.metrics import score
from common.models.checkpoint import load_checkpoint
from common.models.fit import predict
from common.models.unet import network_for
from server.postprocess.labels import Released
from server.protocols.query_protocol import FitFiles, NetworkTraining

PROGRESS_STEPS = 20
"""Number of steps between two values of the loss."""

POINTS = 8
MOST_CASES = 16


class StudentCurves:
    """The loss of one training of the student, the ends of its passes, and its mean Dice on the validation cases.

    Args:
        released: The study's public data, with the validation cases.
        training: The training.
        files: Files of the training, with its checkpoints.
        events: The event log, to which the values are written.
    """

    def __init__(self, released: Released, training: NetworkTraining, *, files: FitFiles, events: EventLog) -> None:
        self._public, self._cases = released.public, released.validation[:MOST_CASES]
        self._steps, self._passes = training.steps, training.passes
        self._files, self._events = files, events
        self._seen, self._due = self._newest(), 0.0

    def after(self, step: int, loss: float) -> None:
        """Log a step.

        Args:
            step: Number of the step, counted over the whole training.
            loss: Its loss.
        """
        if step % PROGRESS_STEPS == 0 or step == self._steps:
            self._events.emit("student-step", step=step, total=self._steps, loss=round(loss, 5))
        if step in self._passes:
            self._events.emit("student-pass", number=self._passes.index(step) + 1, step=step)
        self._validate(step)

    def _validate(self, step: int) -> None:
        """Score the newest checkpoint if this step wrote it and the next point of the curve is due.

        The last step is left out, because the finished student is scored on all cases.
        """
        # One step before the point is due, remember the newest checkpoint, so that only a later one is scored.
        if not self._cases or step >= self._steps or step + 1 < self._due:
            return
        newest = self._newest()
        fresh, self._seen = newest != self._seen, newest
        if newest is None or not fresh or step < self._due:
            return
        self._due = step + self._steps / POINTS
        dice = self._score(newest[0])
        if dice is not None:
            self._events.emit("student-validated", step=step, dice=dice, cases=len(self._cases))

    def _newest(self) -> tuple[Path, int, int] | None:
        """Return path, modification time and inode of the newest checkpoint; None if there is none.

        Modification time and inode show whether the checkpoint was written since the last call.
        """
        first = self._files.checkpoint
        there = [path for path in (first, *first.parent.glob(f"{first.name}.[0-9]*")) if path.is_file()]
        stats = [(path, path.stat()) for path in there]
        newest = max(stats, key=lambda one: one[1].st_mtime_ns, default=None)
        return None if newest is None else (newest[0], newest[1].st_mtime_ns, newest[1].st_ino)

    def _score(self, checkpoint: Path) -> float | None:
        study = self._public.study
        saved = load_checkpoint(checkpoint, run={})
        if saved is None:
            return None
        data, objects = study.data.student, self._public.objects
        with torch.random.fork_rng():
            network = network_for(study.student, study.data)
            network.load_state_dict(saved["model"])
            maps, truths = [], []
            for case in self._cases:
                example = example_from_bytes(objects.get(case.image), objects.get(case.label), data)
                found = predict(network, example.volume.image, patch=study.student.patch)
                maps.append(found.argmax(axis=0).astype(np.uint8))
                truths.append(example.label)
        mean = score(maps, truths, study.data.members).mean
        return None if math.isnan(mean) else mean
