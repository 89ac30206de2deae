"""The student: a U-Net trained on public volumes and their pseudo-labels.

Sees nothing but public volumes, released answers and public settings, so its weights are post-processing. Refuses
pseudo-labels that are not probabilities on the volumes' grid.
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
    """Train a U-Net, fresh or on from ``start``, on soft pseudo-labels; the same arguments give the same weights.

    ``pseudo_labels``: float32 probabilities as ``decode`` gives them, one map per class, background first.
    ``weights``: how much each volume counts. Interrupted training resumes from ``checkpoint``, which is deleted once
    the student is done.
    """
    if pseudo_labels.ndim != 5 or pseudo_labels.shape[1] < 2:
        raise InvalidInput("pseudo-labels", value=pseudo_labels.shape, limit="[n, k, x, y, z] with k ≥ 2 classes")
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
