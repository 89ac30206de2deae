"""A site's trained teachers, loaded once and asked for predictions.

Refuses a directory without teachers, a gap in their numbers, weights that are not those their training recorded, and
teachers trained for another study's grid or labels. Predictions are sensitive until coded, summed and noised.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float

from client.training.site import TRAIN_SCHEMA, voter_directory
from common.config import DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.models.fit import predict
from common.models.unet import build_unet, load_weights


@dataclass(frozen=True, slots=True)
class Teachers:
    """``models[i]`` is voter i, None where all its slots are empty; ``weights[i]`` its weights' SHA-256."""

    data: DataConfig
    models: tuple[torch.nn.Module | None, ...]
    weights: tuple[str | None, ...]

    @classmethod
    def load(cls, directory: Path, *, data: DataConfig | None = None) -> Teachers:
        """Load every voter below ``directory`` (a site's ``teachers``); ``data`` is what they must be trained for."""
        found = sorted(directory.glob("voter-*"))
        if not found:
            raise InvalidInput("no teachers", value=str(directory), remedy="run `consilium site train`")
        if found != [voter_directory(directory, voter) for voter in range(len(found))]:
            raise InvalidInput("teachers are not numbered from 0 without a gap", remedy="run `consilium site train`")
        voters = [_load_voter(path) for path in found]
        settings = {voter_data for voter_data, _, _ in voters}
        if len(settings) > 1 or (data is not None and settings != {data}):
            raise InvalidInput(
                "teachers are trained for other labels, channels, spacing or grid",
                remedy="run `consilium site train` with this study",
            )
        return cls(
            data=voters[0][0], models=tuple(model for _, model, _ in voters), weights=tuple(w for _, _, w in voters)
        )

    def predict(self, image: Float[np.ndarray, "c x y z"]) -> list[Float[np.ndarray, "k x y z"] | None]:
        """Class probabilities (float32) of one z-scored volume on the grid by every voter, in their order."""
        expected = (len(self.data.channels), *self.data.grid)
        if image.shape != expected:
            raise InvalidInput("volume's shape", value=image.shape, limit=str(expected))
        return [None if model is None else predict(model, image) for model in self.models]


def _load_voter(directory: Path) -> tuple[DataConfig, torch.nn.Module | None, str | None]:
    try:
        record = json.loads((directory / "train.json").read_text(encoding="utf-8"))
        if record["schema"] != TRAIN_SCHEMA:
            raise InvalidInput("teacher's schema", value=record["schema"], limit=str(TRAIN_SCHEMA))
        data = DataConfig(**{field.name: record["data"][field.name] for field in dataclasses.fields(DataConfig)})
        recipe = TrainingConfig(**{f.name: record["recipe"][f.name] for f in dataclasses.fields(TrainingConfig)})
        expected = record["report"]["weights"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            "teacher is not trained to the end", value=directory.name, remedy="run `consilium site train`"
        ) from error
    if expected is None:
        return data, None, None
    model = build_unet(recipe.channels, in_channels=len(data.channels), out_channels=len(data.labels))
    load_weights(directory / "weights.pt", model, expected_hash=expected)
    model.eval()
    return data, model, expected
