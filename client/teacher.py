"""A site's trained teachers, loaded once and asked for predictions.

Refuses a directory without teachers, a gap in their numbers, weights that are not those their training recorded, and
teachers trained for another study's grid or labels. Predictions are sensitive until coded, summed and noised.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from client.training.site import TRAIN_SCHEMA, voter_directory
from common.canonical import check_schema
from common.config import DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.models.fit import best_device, predict
from common.models.unet import build_unet, load_weights


@dataclass(frozen=True, slots=True)
class Teachers:
    """``models[i]`` is voter i, None where all its slots are empty; ``weights[i]`` its weights' SHA-256.

    ``ensembles[i]`` are further networks drawn once around voter i's mean network, for a voter trained by dp-bbb:
    their predictions are averaged. The draws depend on the weights alone, so a question asked again is answered alike.
    """

    data: DataConfig
    models: tuple[torch.nn.Module | None, ...]
    weights: tuple[str | None, ...]
    ensembles: tuple[tuple[torch.nn.Module, ...], ...] = ()
    recipe: TrainingConfig = field(default_factory=TrainingConfig)

    @classmethod
    def load(cls, directory: Path, *, data: DataConfig | None = None) -> Teachers:
        """Load every voter below ``directory`` (a site's ``teachers``); ``data`` is what they must be trained for."""
        found = sorted(directory.glob("voter-*"))
        if not found:
            raise InvalidInput("no teachers", value=str(directory), remedy="run `consilium site train`")
        if found != [voter_directory(directory, voter) for voter in range(len(found))]:
            raise InvalidInput("teachers are not numbered from 0 without a gap", remedy="run `consilium site train`")
        voters = [_load_voter(path) for path in found]
        settings = {voter.data for voter in voters}
        if len(settings) > 1 or (data is not None and settings != {data}):
            raise InvalidInput(
                "teachers are trained for other labels, channels, spacing or grid",
                remedy="run `consilium site train` with this study",
            )
        return cls(
            data=voters[0].data,
            models=tuple(voter.model for voter in voters),
            weights=tuple(voter.weights for voter in voters),
            ensembles=tuple(voter.drawn for voter in voters),
            recipe=voters[0].recipe,
        )

    def predict(self, image: Float[np.ndarray, "c x y z"]) -> list[Float[np.ndarray, "k x y z"] | None]:
        """Class probabilities (float32) of one z-scored volume on the grid by every voter, in their order."""
        expected = (len(self.data.channels), *self.data.grid)
        if image.shape != expected:
            raise InvalidInput("volume's shape", value=image.shape, limit=str(expected))
        return [None if model is None else self._mean(voter, model, image) for voter, model in enumerate(self.models)]

    def _mean(
        self, voter: int, model: torch.nn.Module, image: Float[np.ndarray, "c x y z"]
    ) -> Float[np.ndarray, "k x y z"]:
        drawn = self.ensembles[voter] if self.ensembles else ()
        patch, amp = self.recipe.patch, self.recipe.amp
        if not drawn:
            return predict(model, image, patch=patch, amp=amp)
        return averaged(np.stack([predict(network, image, patch=patch, amp=amp) for network in drawn]))


SAMPLES = 10
"""Networks drawn from a posterior; their mean prediction is the voter's."""


def averaged(samples: Float[np.ndarray, "s k x y z"]) -> Float[np.ndarray, "k x y z"]:
    """The mean of sampled predictions, drawn towards the image's own mean label where the samples disagree.

    Voxel by voxel, with u in [0, 1] the mutual information between label and weights over log k: (1 − u)·p + u·p̄, p̄ the
    prediction's own mean over all voxels. Still probabilities, and a code of them is shorter where the posterior does
    not know; whether a site answers never depends on it.
    """
    mean = samples.mean(axis=0)
    total = -(mean * np.log(np.maximum(mean, 1e-30))).sum(axis=0)
    inner = -(samples * np.log(np.maximum(samples, 1e-30))).sum(axis=1).mean(axis=0)
    unsure = np.clip((total - inner) / np.log(samples.shape[1]), 0, 1)
    flat = mean.mean(axis=(1, 2, 3), keepdims=True)
    result: np.ndarray = ((1 - unsure) * mean + unsure * flat).astype(np.float32)
    return result


@dataclass(frozen=True, slots=True)
class _Voter:
    data: DataConfig
    recipe: TrainingConfig
    model: torch.nn.Module | None = None
    weights: str | None = None
    drawn: tuple[torch.nn.Module, ...] = ()


def _load_voter(directory: Path) -> _Voter:
    try:
        record = json.loads((directory / "train.json").read_text(encoding="utf-8"))
        check_schema("teacher", record["schema"], known=TRAIN_SCHEMA)
        # A field that an older version did not know has its default, by which that version went.
        data = DataConfig(**_known(DataConfig, record["data"]))
        recipe = TrainingConfig(**_known(TrainingConfig, record["recipe"]))
        expected, posterior = record["report"]["weights"], record.get("posterior")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            "teacher is not trained to the end", value=directory.name, remedy="run `consilium site train`"
        ) from error
    if expected is None:
        return _Voter(data, recipe)
    model = build_unet(recipe.channels, in_channels=len(data.channels), out_channels=len(data.labels))
    load_weights(directory / "weights.pt", model, expected_hash=expected)
    drawn = () if posterior is None else _drawn(directory / "posterior.pt", model, expected=posterior)
    device = best_device()
    for network in (model, *drawn):
        network.to(device).eval()
    return _Voter(data, recipe, model, expected, drawn)


def _known(kind: type[DataConfig] | type[TrainingConfig], record: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: record[one.name] for one in dataclasses.fields(kind) if one.name in record}


def _drawn(path: Path, model: torch.nn.Module, *, expected: str) -> tuple[torch.nn.Module, ...]:
    """:data:`SAMPLES` networks w = μ + s·ε; ε from a seed made of the file's hash."""
    spread = copy.deepcopy(model)
    found = load_weights(path, spread, expected_hash=expected)
    generator = torch.Generator().manual_seed(int(found[:15], 16))
    networks = []
    for _ in range(SAMPLES):
        network = copy.deepcopy(model)
        with torch.no_grad():
            for parameter, deviation in zip(network.parameters(), spread.parameters(), strict=True):
                parameter += deviation * torch.randn(parameter.shape, generator=generator)
        network.eval()
        networks.append(network)
    return tuple(networks)
