"""Writes a voter's files as a training leaves them, without training."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from client.records.voter_files import TRAIN_SCHEMA
from common.config import DataConfig, TrainingConfig
from common.models.unet import build_unet, save_weights

DATA = DataConfig(labels=("background", "core"), spacing_mm=(1, 1, 1), grid=(8, 8, 8))
RECIPE = TrainingConfig(channels=(2, 4))


def write_teacher(
    directory: Path, *, seed: int, posterior: bool = False, data: DataConfig = DATA, recipe: TrainingConfig = RECIPE
) -> str:
    """Write a voter's files as a training leaves them; return the weights' SHA-256."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = save_weights(
        directory / "weights.pt", build_unet(recipe.channels, in_channels=1, out_channels=2, seed=seed)
    )
    spread = None
    if posterior:
        still = build_unet(RECIPE.channels, in_channels=1, out_channels=2, seed=seed + 1)
        spread = save_weights(directory / "posterior.pt", still)
    record = {
        "schema": TRAIN_SCHEMA,
        "identity": f"{seed:064d}",
        "posterior": spread,
        "report": {"weights": weights},
        "data": dataclasses.asdict(data),
        "recipe": dataclasses.asdict(recipe),
    }
    (directory / "train.json").write_text(json.dumps(record))
    return weights
