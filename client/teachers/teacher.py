"""A site's trained teachers, loaded once and asked for predictions.

Whether one can be loaded is that voter's alone: one that is missing, broken, not what its training recorded or of
another study's grid or labels leaves an empty slot, and the site takes part all the same, so that participation says
nothing of what any voter was trained on. Refuses only a directory where no training was ever begun, which is a person's
doing. Predictions are sensitive until coded, summed and noised.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from client.records.declared import has_foreign
from client.records.served import served_hash
from client.records.voter_files import TRAIN_SCHEMA, voter_directory
from common.calibration import entropy
from common.canonical import check_schema
from common.config import DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.models.fit import best_device, predict
from common.models.unet import load_weights, network_for

log = logging.getLogger(__name__)

Ask = Callable[[], np.ndarray | None]
"""Asks one voter: its probabilities float32[k, x, y, z], or None for an empty slot. Whatever it raises is its own."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """One voter's network. ``weights`` is the SHA-256 of the weights' file that was read, ``served`` names all that an
    answer depends on (:func:`~client.records.served.served_hash`); with a ``posterior`` (dp-bbb) networks drawn around
    it are averaged."""

    model: torch.nn.Module
    recipe: TrainingConfig = field(default_factory=TrainingConfig)
    weights: str = ""
    served: str = ""
    posterior: Posterior | None = None

    def predict(self, image: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "k x y z"]:
        """Class probabilities (float32) of one z-scored volume on the grid."""
        patch, amp = self.recipe.patch, self.recipe.amp
        if self.posterior is None:
            return predict(self.model, image, patch=patch, amp=amp)
        return averaged(predict(network, image, patch=patch, amp=amp) for network in self.posterior.around(self.model))


@dataclass(frozen=True, slots=True)
class Teachers:
    """``voters[i]`` is voter i, None where there is no teacher; ``problems`` says why one could not be loaded.

    ``stand_in``: random weights in the teachers' own architecture. An empty slot is answered for by it, and its answer
    thrown away, so that it takes as long as a real one.
    """

    data: DataConfig
    voters: tuple[Teacher | None, ...]
    stand_in: Teacher | None = None
    problems: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        data: DataConfig | None = None,
        voters: int | None = None,
        recipe: TrainingConfig | None = None,
    ) -> Teachers:
        """Load every voter below ``directory`` (a site's ``teachers``) that can be loaded.

        ``data`` is what they must be trained for, ``voters`` how many the study has, ``recipe`` its teachers'; by
        default these are what is found. InvalidInput where no training was begun, and without ``data`` where no teacher
        can be loaded. A voter whose teacher the hospital brought is an empty slot here (:mod:`client.foreign`).
        """
        numbers = [int(path.name.removeprefix("voter-")) for path in directory.glob("voter-[0-9][0-9][0-9]")]
        if not numbers and not (directory / "slots.json").exists():
            raise InvalidInput("no teachers", value=str(directory), remedy="run `consilium site train`")
        count = max(numbers, default=-1) + 1 if voters is None else voters
        found: dict[int, Teacher] = {}
        problems: dict[int, str] = {}
        for voter in range(count):
            if has_foreign(directory, voter):
                continue
            try:
                trained_for, teacher = load_teacher(voter_directory(directory, voter))
                if trained_for != (data := data or trained_for):
                    raise InvalidInput(
                        "teacher is trained for other labels, channels, spacing or grid",
                        value=f"voter {voter}",
                        remedy="run `consilium site train` with this study",
                    )
            except Exception as error:  # noqa: BLE001  whatever it is, it is this voter's alone
                problems[voter] = str(error) if isinstance(error, InvalidInput) else type(error).__name__
                log.warning("event=no-teacher voter=%d cause=%s", voter, type(error).__name__)
                continue
            if teacher is not None:
                found[voter] = teacher
        if data is None:
            raise InvalidInput(
                "no teacher can be loaded",
                value=next(iter(problems.values()), None),
                remedy="run `consilium site doctor`",
            )
        return cls(
            data=data,
            voters=tuple(found.get(voter) for voter in range(count)),
            stand_in=_stand_in(data, next(iter(found.values()), None), recipe or TrainingConfig()),
            problems=problems,
        )

    @property
    def models(self) -> tuple[torch.nn.Module | None, ...]:
        return tuple(None if voter is None else voter.model for voter in self.voters)

    @property
    def weights(self) -> tuple[str | None, ...]:
        """SHA-256 of each voter's weights."""
        return tuple(None if voter is None else voter.weights for voter in self.voters)

    @property
    def served(self) -> tuple[str, ...]:
        """What each voter answers with (:func:`~client.records.served.served_hash`), empty for an empty slot."""
        return tuple(voter.served if voter else "" for voter in self.voters)

    def without(self, silent: Collection[int]) -> Teachers:
        """These teachers with the slots of some voters empty."""
        voters = tuple(None if number in silent else voter for number, voter in enumerate(self.voters))
        return dataclasses.replace(self, voters=voters)

    def ask(self, image: Float[np.ndarray, "c x y z"]) -> tuple[Ask, ...]:
        """One question a voter about one z-scored volume on the grid, to be put when its turn comes.

        Each is computed when it is asked for: m voters of a large volume need the memory of one. InvalidInput for a
        volume of another shape, which is public.
        """
        expected = (len(self.data.channels), *self.data.grid)
        if image.shape != expected:
            raise InvalidInput("volume's shape", value=image.shape, limit=str(expected))
        return tuple(partial(self._answer, voter, image) for voter in self.voters)

    def predict(self, image: Float[np.ndarray, "c x y z"]) -> Iterator[Float[np.ndarray, "k x y z"] | None]:
        """The answers to :meth:`ask`, one after the other."""
        return (ask() for ask in self.ask(image))

    def _answer(self, voter: Teacher | None, image: Float[np.ndarray, "c x y z"]) -> np.ndarray | None:
        if voter is not None:
            return voter.predict(image)
        if self.stand_in is not None:
            self.stand_in.predict(image)
        return None


def _stand_in(data: DataConfig, like: Teacher | None, recipe: TrainingConfig) -> Teacher:
    """A network nobody trained, as large as the teachers and asked like them."""
    recipe = recipe if like is None else like.recipe
    model = network_for(recipe, data, seed=0)
    still = tuple(torch.zeros_like(parameter) for parameter in model.parameters())
    drawn = Posterior(still, seed=0) if like is not None and like.posterior is not None else None
    return Teacher(model.to(best_device()).eval(), recipe, posterior=drawn)


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
    inner = entropy(mean)
    for sample in each:
        mean += sample
        inner += entropy(sample)
        count += 1
    mean /= count
    inner /= count
    unsure = np.clip((entropy(mean) - inner) / np.log(len(mean)), 0, 1)
    flat = mean.mean(axis=(1, 2, 3), keepdims=True)
    result: np.ndarray = ((1 - unsure) * mean + unsure * flat).astype(np.float32)
    return result


def load_teacher(directory: Path) -> tuple[DataConfig, Teacher | None]:
    """One voter's teacher and what it was trained for; no teacher if its training came to its end without one.

    InvalidInput for one that is not trained to the end or is not what its training recorded.
    """
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
        return data, None
    model = network_for(recipe, data)
    weights = load_weights(directory / "weights.pt", model, expected_hash=expected)
    spread = None if posterior is None else _posterior(directory / "posterior.pt", model, expected=posterior)
    model.to(best_device()).eval()
    return data, Teacher(model, recipe, weights, served_hash(weights, posterior), spread)


def _known(kind: type[DataConfig] | type[TrainingConfig], record: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: record[one.name] for one in dataclasses.fields(kind) if one.name in record}


def _posterior(path: Path, model: torch.nn.Module, *, expected: str) -> Posterior:
    spread = copy.deepcopy(model)
    found = load_weights(path, spread, expected_hash=expected)
    return Posterior(tuple(deviation.detach() for deviation in spread.parameters()), seed=int(found[:15], 16))
