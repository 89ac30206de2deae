"""Defines a trainer: it takes a voter's own volumes and returns a trained network with its privacy event.

A trainer sees one voter's part and public values, nothing else: so a change to one patient changes one voter.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float, UInt8

from common.config import TrainingConfig
from common.data.volume_cache import StoredVolumes
from common.models.fit import OnStep
from common.privacy.training import TrainingEvent


@dataclass(frozen=True, slots=True)
class Part:
    """One voter's own patients: images [n, c, x, y, z] and label maps [n, x, y, z] with values below ``classes``.

    ``places[i]`` is scan i's patient, by place among the ``patients`` dealt to this voter for training; places without
    a usable scan do not occur, so there may be no image at all. Left out: every scan is a patient of its own.

    More than fits into memory comes as :class:`~common.data.volume_cache.StoredVolumes`, read one volume at a time.
    """

    images: Float[np.ndarray, "n c x y z"] | StoredVolumes
    labels: UInt8[np.ndarray, "n x y z"] | StoredVolumes
    classes: int
    places: tuple[int, ...] = ()
    patients: int = 0

    @property
    def slots(self) -> tuple[int, ...]:
        return self.places or tuple(range(len(self.images)))


@dataclass(frozen=True, slots=True)
class Trained:
    """A trainer's result. ``event`` is the differential privacy the training itself gives, None for none.

    ``loss`` is None where telling it was not paid for. ``deviations``: the posterior's standard deviation of every
    parameter, for a trainer whose result is a distribution of networks around ``model``.
    """

    model: torch.nn.Module
    steps: int
    loss: float | None
    seconds: float
    event: TrainingEvent | None = None
    deviations: dict[str, torch.Tensor] | None = None


class Trainer(Protocol):
    """Trains one voter; the same part, recipe and seed give the same weights, also through ``checkpoint``."""

    def train(
        self, part: Part, recipe: TrainingConfig, *, seed: int, checkpoint: Path | None, on_step: OnStep | None
    ) -> Trained:
        """Train a new network on ``part``.

        InvalidInput for an empty part or a diverged loss where the training is not private. A private one goes through
        all its steps whatever the part holds.
        """
