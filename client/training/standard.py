"""Trains a teacher by cross-entropy + Dice on augmented volumes, without differential privacy of its own.

Patients are protected by the noise on the released aggregate, not by this training, so the weights must not leave the
site.
"""

from __future__ import annotations

from pathlib import Path

from client.training.contract import TrainedVoter, VoterData
from common.config import TrainingConfig
from common.models.fit import OnStep, best_device, fit
from common.models.unet import load_weights, network_of


class StandardTrainer:
    """The standard trainer.

    Args:
        start: File of public weights to begin from; None for random ones.
    """

    def __init__(self, *, start: Path | None = None) -> None:
        self._start = start

    def train(
        self,
        part: VoterData,
        recipe: TrainingConfig,
        *,
        seed: int,
        checkpoint: Path | None = None,
        on_step: OnStep | None = None,
    ) -> TrainedVoter:
        """Train a UNet on the voter's patients, from the public start or from random weights.

        Raises:
            InvalidInput: If the start has other weights than the network, the part is empty, or the loss diverges.
        """
        model = network_of(recipe, channels=part.images.shape[1], classes=part.classes, seed=seed)
        if self._start is not None:
            load_weights(self._start, model)
        model.to(best_device())
        result = fit(
            model,
            part.images,
            part.labels,
            recipe,
            seed=seed,
            classes=part.classes,
            checkpoint=checkpoint,
            on_step=on_step,
        )
        return TrainedVoter(model=model, steps=result.steps, loss=result.loss, seconds=result.seconds)
