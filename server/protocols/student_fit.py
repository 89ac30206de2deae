"""Trains the student: a U-Net on public volumes and their pseudo-labels.

The protocols call it. It uses only public volumes, released answers and public settings, so the weights are
post-processing. It refuses pseudo-labels that are not an array of at least two classes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from common.config import TrainingConfig
from common.data.volume_cache import StoredVolumes
from common.errors import InvalidInput
from common.models.fit import FitResult, OnStep, fit
from common.models.unet import build_unet


def train_student(
    images: Float[np.ndarray, "n c x y z"] | StoredVolumes,
    pseudo_labels: Float[np.ndarray, "n k x y z"] | StoredVolumes,
    recipe: TrainingConfig,
    *,
    seed: int,
    weights: Float[np.ndarray, "n"] | None = None,
    start: torch.nn.Module | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> tuple[torch.nn.Module, FitResult]:
    """Train a U-Net on soft pseudo-labels; the same arguments give the same weights.

    Args:
        images: Public volumes, float [n, c, x, y, z].
        pseudo_labels: Float32 probabilities [n, k, x, y, z], background first.
        recipe: The training recipe.
        seed: Seed of initial weights and batches.
        weights: Weight of each volume in the loss, float [n]; by default all are equal.
        start: A network of the same recipe to continue from; by default the weights are random.
        checkpoint: File to resume from; deleted at the end.
        on_step: Called with step and loss.

    Returns:
        The network and the result of the fit.

    Raises:
        InvalidInput: If the pseudo-labels have another shape or fewer than two classes.
    """
    if pseudo_labels.ndim != 5 or pseudo_labels.shape[1] < 2:
        raise InvalidInput("pseudo-labels", value=pseudo_labels.shape, limit="shape [n, k, x, y, z] with k ≥ 2 classes")
    model = build_unet(
        recipe.channels,
        network=recipe.network,
        in_channels=images.shape[1],
        out_channels=pseudo_labels.shape[1],
        seed=seed,
    )
    if start is not None:
        model.load_state_dict(start.state_dict())
    result = fit(
        model, images, pseudo_labels, recipe, seed=seed, weights=weights, checkpoint=checkpoint, on_step=on_step
    )
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)
    return model, result
