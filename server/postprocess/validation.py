"""Scores the student on published validation cases while it is trained, so that its Dice can be drawn as a curve.

The checkpoints that the training writes are scored, each in a separate network. The training itself is not affected:
with and without validation cases the same seed gives the same student. At most :data:`POINTS` checkpoints of a
training are scored, each on at most :data:`MOST_CASES` cases. Nothing is selected by these scores.
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
from server.protocols.query_protocol import FitFiles

POINTS = 8
MOST_CASES = 16


class ValidationCurve:
    """The student's mean Dice on the validation cases at a few steps of one training.

    Args:
        released: The study's public data, with the validation cases.
        files: Files of the training, with its checkpoints.
        steps: Number of the training's steps.
        events: The event log, to which the scores are written.
    """

    def __init__(self, released: Released, files: FitFiles, *, steps: int, events: EventLog) -> None:
        self._released, self._files, self._steps, self._events = released, files, steps, events
        self._cases = released.validation[:MOST_CASES]
        self._seen, self._due = self._newest(), 0.0

    def after(self, step: int) -> None:
        """Score the newest checkpoint if this step wrote it and the next point of the curve is due.

        The last step is left out, because the finished student is scored on all cases.

        Args:
            step: Number of the step, counted over the whole training.
        """
        if not self._cases or step >= self._steps or step + 1 < self._due:  # the step before tells what is fresh
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

        A new checkpoint differs from the one before in the last two.
        """
        first = self._files.checkpoint
        there = [path for path in (first, *first.parent.glob(f"{first.name}.[0-9]*")) if path.is_file()]
        stats = [(path, path.stat()) for path in there]
        newest = max(stats, key=lambda one: one[1].st_mtime_ns, default=None)
        return None if newest is None else (newest[0], newest[1].st_mtime_ns, newest[1].st_ino)

    def _score(self, checkpoint: Path) -> float | None:
        study = self._released.public.study
        saved = load_checkpoint(checkpoint, run={})
        if saved is None:
            return None
        data, objects = study.data.student, self._released.public.objects
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
