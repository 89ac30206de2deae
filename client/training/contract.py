"""Defines the interface of a trainer: it takes one voter's volumes and returns a network with its privacy event.

``client.training.voter`` calls trainers. A trainer receives one voter's patients and public values only, so a change to
one patient changes one voter.
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
class VoterData:
    """One voter's patients, as a trainer receives them.

    Attributes:
        images: Float array [n, c, x, y, z] of n scans with c channels, or
            :class:`~common.data.volume_cache.StoredVolumes` that are read one volume at a time if memory is short.
        labels: uint8 label maps [n, x, y, z] with values below ``classes``.
        classes: Number of labels, background included.
        places: The patient of each scan, as a position among the voter's training patients. Patients without a usable
            scan do not occur. If empty, each scan is a patient of its own.
    """

    images: Float[np.ndarray, "n c x y z"] | StoredVolumes
    labels: UInt8[np.ndarray, "n x y z"] | StoredVolumes
    classes: int
    places: tuple[int, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """For each scan, the position of its patient among the voter's training patients."""
        return self.places or tuple(range(len(self.images)))


@dataclass(frozen=True, slots=True)
class TrainedVoter:
    """The result of a trainer.

    Attributes:
        model: The trained network.
        steps: Number of steps done.
        loss: Last loss; None for a private training, whose charge does not cover the release of a loss.
        seconds: Duration.
        event: The privacy event of the training itself; None for a training without differential privacy.
        deviations: The posterior's standard deviation of every parameter by name, for a trainer whose result is a
            distribution around ``model``; None otherwise.
    """

    model: torch.nn.Module
    steps: int
    loss: float | None
    seconds: float
    event: TrainingEvent | None = None
    deviations: dict[str, torch.Tensor] | None = None


class Trainer(Protocol):
    """Trains one voter's network.

    Equal arguments give equal weights, even if the training is resumed from ``checkpoint``. A private training is the
    exception: its noise comes from the operating system.
    """

    def train(
        self, part: VoterData, recipe: TrainingConfig, *, seed: int, checkpoint: Path | None, on_step: OnStep | None
    ) -> TrainedVoter:
        """Train a new network.

        A private trainer always runs all its steps, so that their number does not depend on the patients.

        Args:
            part: The voter's patients.
            recipe: The study's recipe of a teacher.
            seed: Seed of the initial weights, the order and the augmentation.
            checkpoint: File to resume from; None to store none.
            on_step: Called after each step with its number and loss.

        Returns:
            The network and its privacy event.

        Raises:
            InvalidInput: For an empty part or a diverged loss, unless the training is private.
        """
