"""A site's trained teachers, loaded once and asked for predictions.

Refuses a directory without teachers, a gap in their numbers, weights that are not those their training recorded, and
teachers trained for another study's grid or labels. Predictions are sensitive until coded, summed and noised.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
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

    ``posteriors[i]`` is set for a voter trained by dp-bbb: the predictions of networks drawn around its mean network
    are averaged.
    """

    data: DataConfig
    models: tuple[torch.nn.Module | None, ...]
    weights: tuple[str | None, ...]
    posteriors: tuple[Posterior | None, ...] = ()
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
            posteriors=tuple(voter.posterior for voter in voters),
            recipe=voters[0].recipe,
        )

    def predict(self, image: Float[np.ndarray, "c x y z"]) -> Iterator[Float[np.ndarray, "k x y z"] | None]:
        """Class probabilities (float32) of one z-scored volume on the grid by every voter, in their order.

        Each is computed when it is asked for: m voters of a large volume need the memory of one.
        """
        expected = (len(self.data.channels), *self.data.grid)
        if image.shape != expected:
            raise InvalidInput("volume's shape", value=image.shape, limit=str(expected))
        return (None if model is None else self._mean(voter, model, image) for voter, model in enumerate(self.models))

    def _mean(
        self, voter: int, model: torch.nn.Module, image: Float[np.ndarray, "c x y z"]
    ) -> Float[np.ndarray, "k x y z"]:
        posterior = self.posteriors[voter] if self.posteriors else None
        patch, amp = self.recipe.patch, self.recipe.amp
        if posterior is None:
            return predict(model, image, patch=patch, amp=amp)
        return averaged(predict(network, image, patch=patch, amp=amp) for network in posterior.around(model))


SAMPLES = 10
"""Networks drawn from a posterior; their mean prediction is the voter's."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """The standard deviation of every parameter, in the parameters' order. ``seed`` is made of their file's hash, so
    the draws depend on the weights alone and a question asked again is answered alike."""

    deviations: tuple[torch.Tensor, ...]
    seed: int

    def around(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """:data:`SAMPLES` networks w = μ + s·ε around ``model``, one after the other."""
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(SAMPLES):
            network = copy.deepcopy(model)
            with torch.no_grad():
                for parameter, deviation in zip(network.parameters(), self.deviations, strict=True):
                    parameter += (deviation * torch.randn(deviation.shape, generator=generator)).to(parameter.device)
            yield network.eval()


def averaged(samples: Iterable[Float[np.ndarray, "k x y z"]]) -> Float[np.ndarray, "k x y z"]:
    """The mean of sampled predictions, drawn towards the image's own mean label where the samples disagree.

    Voxel by voxel, with u in [0, 1] the mutual information between label and weights over log k: (1 − u)·p + u·p̄, p̄ the
    prediction's own mean over all voxels. Still probabilities, and a code of them is shorter where the posterior does
    not know; whether a site answers never depends on it.
    """
    each = iter(samples)
    mean, count = next(each).copy(), 1
    inner = _entropy(mean)
    for sample in each:
        mean += sample
        inner += _entropy(sample)
        count += 1
    mean /= count
    inner /= count
    unsure = np.clip((_entropy(mean) - inner) / np.log(len(mean)), 0, 1)
    flat = mean.mean(axis=(1, 2, 3), keepdims=True)
    result: np.ndarray = ((1 - unsure) * mean + unsure * flat).astype(np.float32)
    return result


def _entropy(probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "x y z"]:
    """In nats, voxel by voxel."""
    result: np.ndarray = -sum(p * np.log(np.maximum(p, 1e-30)) for p in probabilities)
    return result


@dataclass(frozen=True, slots=True)
class _Voter:
    data: DataConfig
    recipe: TrainingConfig
    model: torch.nn.Module | None = None
    weights: str | None = None
    posterior: Posterior | None = None


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
    spread = None if posterior is None else _posterior(directory / "posterior.pt", model, expected=posterior)
    model.to(best_device()).eval()
    return _Voter(data, recipe, model, expected, spread)


def _known(kind: type[DataConfig] | type[TrainingConfig], record: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: record[one.name] for one in dataclasses.fields(kind) if one.name in record}


def _posterior(path: Path, model: torch.nn.Module, *, expected: str) -> Posterior:
    spread = copy.deepcopy(model)
    found = load_weights(path, spread, expected_hash=expected)
    return Posterior(tuple(deviation.detach() for deviation in spread.parameters()), seed=int(found[:15], 16))
