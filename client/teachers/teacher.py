"""Loads a site's trained teachers once, and asks them for predictions.

The worker calls it. A teacher may be missing or broken, may differ from the recorded one, or may be made for another
grid or other labels. Only its voter then has no teacher, and the site still takes part. The fact that a site takes part
therefore reveals nothing about its patients. A directory where no training was ever started is refused. Predictions are
sensitive until they are encoded, summed and noised.
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
from common.reading import parsing
from common.system_errors import explain, system_cause

log = logging.getLogger(__name__)

Ask = Callable[[], np.ndarray | None]
"""Function that returns one voter's float32 probabilities [k, x, y, z], or None for a voter without a teacher.

If it raises, only this voter counts as the zero code."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """One voter's network.

    Attributes:
        model: The network.
        recipe: The recipe it was trained with.
        served: Hash of everything an answer depends on (:func:`~client.records.served.served_hash`).
        posterior: For dp-bbb, the distribution of weights around ``model``; the predictions of sampled networks are
            averaged.
    """

    model: torch.nn.Module
    recipe: TrainingConfig = field(default_factory=TrainingConfig)
    served: str = ""
    posterior: Posterior | None = None

    def predict(self, image: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "k x y z"]:
        """Predict one volume. # sensitive

        Args:
            image: z-scored volume [c, x, y, z] on the study's grid.

        Returns:
            Class probabilities, float32 [k, x, y, z].
        """
        patch, amp = self.recipe.patch, self.recipe.amp
        if self.posterior is None:
            return predict(self.model, image, patch=patch, amp=amp)
        return averaged(predict(network, image, patch=patch, amp=amp) for network in self.posterior.around(self.model))


@dataclass(frozen=True, slots=True)
class Teachers:
    """The teachers of all voters of a site.

    Attributes:
        data: Labels, channels and grid that they were trained for.
        voters: The teacher of each voter; None for a voter without a teacher.
        stand_in: Network with random weights in the teachers' architecture. It runs for a voter without a teacher and
            its output is discarded, so that such a voter takes as long as one with a teacher.
        problems: By voter, the reason why its teacher could not be loaded.
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
        """Load every voter's teacher that can be loaded.

        Teachers that the hospital trained elsewhere and added are not loaded here, but by :mod:`client.foreign`. Their
        voters have no teacher in the result.

        Args:
            directory: A site's folder ``teachers``.
            data: Labels, channels and grid that they must be trained for; by default those of the first teacher.
            voters: Number of voters of the study; by default the number found.
            recipe: The study's recipe of a teacher, from which the stand-in is made.

        Returns:
            The teachers.

        Raises:
            InvalidInput: If no training was started here, or if ``data`` is None and no teacher can be loaded.
        """
        numbers = [int(path.name.removeprefix("voter-")) for path in directory.glob("voter-[0-9][0-9][0-9]")]
        if not numbers and not (directory / "slots.json").exists():
            raise InvalidInput("no teacher was trained yet", value=str(directory), remedy="run `consilium site train`")
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
                        "the teacher was trained for other labels, channels, spacing or grid",
                        value=f"voter {voter}",
                        remedy="run `consilium site train` with this study",
                    )
            except Exception as error:  # noqa: BLE001  any error concerns this voter only
                problems[voter] = _reason(error)
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
        """The network of each voter; None for a voter without a teacher."""
        return tuple(None if voter is None else voter.model for voter in self.voters)

    @property
    def served(self) -> tuple[str, ...]:
        """The hash of each voter's teacher, as :func:`~client.records.served.served_hash` returns it.

        It is empty for a voter without a teacher.
        """
        return tuple(voter.served if voter else "" for voter in self.voters)

    def without(self, silent: Collection[int]) -> Teachers:
        """Return these teachers without those of some voters.

        Args:
            silent: Numbers of the voters whose teachers are removed.

        Returns:
            The teachers.
        """
        voters = tuple(None if number in silent else voter for number, voter in enumerate(self.voters))
        return dataclasses.replace(self, voters=voters)

    def ask(self, image: Float[np.ndarray, "c x y z"]) -> tuple[Ask, ...]:
        """Return one function for each voter that computes its prediction of a volume when called.

        A prediction is computed only when its function is called, so m voters need the memory of one. # sensitive

        Args:
            image: z-scored volume [c, x, y, z] on the study's grid.

        Returns:
            The functions, in the voters' order.

        Raises:
            InvalidInput: If the volume, which is public, has another shape.
        """
        expected = (len(self.data.channels), *self.data.grid)
        if image.shape != expected:
            raise InvalidInput("shape of a public volume", value=image.shape, limit=f"{expected}, the study's shape")
        return tuple(partial(self._answer, voter, image) for voter in self.voters)

    def predict(self, image: Float[np.ndarray, "c x y z"]) -> Iterator[Float[np.ndarray, "k x y z"] | None]:
        """Return the voters' predictions of a volume, computed one after the other. # sensitive

        Args:
            image: z-scored volume [c, x, y, z] on the study's grid.

        Returns:
            An iterator over the voters, with the class probabilities of each, float32 [k, x, y, z]; None for a voter
            without a teacher.

        Raises:
            InvalidInput: If the volume has another shape.
        """
        return (ask() for ask in self.ask(image))

    def _answer(self, voter: Teacher | None, image: Float[np.ndarray, "c x y z"]) -> np.ndarray | None:
        if voter is not None:
            return voter.predict(image)
        if self.stand_in is not None:
            self.stand_in.predict(image)
        return None


def _stand_in(data: DataConfig, like: Teacher | None, recipe: TrainingConfig) -> Teacher:
    """Return an untrained network like the teachers', so that a voter without a teacher takes as long as the others."""
    recipe = recipe if like is None else like.recipe
    model = network_for(recipe, data, seed=0)
    still = tuple(torch.zeros_like(parameter) for parameter in model.parameters())
    drawn = Posterior(still, seed=0) if like is not None and like.posterior is not None else None
    return Teacher(model.to(best_device()).eval(), recipe, posterior=drawn)


SAMPLES = 10
"""Number of networks drawn from a posterior and averaged."""


@dataclass(frozen=True, slots=True)
class Posterior:
    """A normal distribution of networks around a teacher's weights, with a standard deviation for every parameter.

    Attributes:
        deviations: Standard deviations, in the order of the parameters.
        seed: Seed of the draws, from the file's hash. The draws depend on the weights only, so a repeated query gets
            the same answer.
    """

    deviations: tuple[torch.Tensor, ...]
    seed: int

    def around(self, model: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """Yield :data:`SAMPLES` copies of a network with other weights, one after the other.

        The weights of a copy are drawn from normal distributions around the network's own weights, with
        ``deviations`` as their standard deviations. The draws are the same at every call.

        Args:
            model: The network whose weights are the means.

        Yields:
            The networks.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for _ in range(SAMPLES):
            network = copy.deepcopy(model)
            with torch.no_grad():
                for parameter, deviation in zip(network.parameters(), self.deviations, strict=True):
                    parameter += (deviation * torch.randn(deviation.shape, generator=generator)).to(parameter.device)
            yield network.eval()


def averaged(samples: Iterable[Float[np.ndarray, "k x y z"]]) -> Float[np.ndarray, "k x y z"]:
    """Average sampled predictions, and pull voxels on which they disagree toward the volume's mean prediction.

    For each voxel the result is (1 − u)·p + u·p̄. Here p is the mean prediction, p̄ its mean over all voxels, and u in
    [0, 1] the mutual information between label and weights divided by log k, for k labels. The result is still a
    distribution over labels. The more uncertain the posterior is, the smaller is the norm of the resulting code.

    Args:
        samples: Class probabilities [k, x, y, z]; at least one.

    Returns:
        Float32 [k, x, y, z].
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


def _reason(error: Exception) -> str:
    """Return why a teacher cannot be loaded, with the remedy of a full disk or a missing permission."""
    cause = system_cause(error)
    if isinstance(cause, OSError):
        return "; to fix: ".join(explain(cause))
    return str(error) if isinstance(error, InvalidInput) else type(error).__name__


def load_teacher(directory: Path) -> tuple[DataConfig, Teacher | None]:
    """Load one voter's teacher, with the labels, channels and grid that it was trained for.

    Args:
        directory: The voter's folder.

    Returns:
        The data's description and the teacher; None for the teacher if training finished without one.

    Raises:
        InvalidInput: If the training is unfinished, or the weights are not those on record.
    """
    with parsing("the teacher's training is not finished", value=directory.name, remedy="run `consilium site train`"):
        record = json.loads((directory / "train.json").read_text(encoding="utf-8"))
        check_schema("teacher", record["schema"], known=TRAIN_SCHEMA)
        # A field that an older version did not record gets its default, which is what that version used.
        data = DataConfig(**_known(DataConfig, record["data"]))
        recipe = TrainingConfig(**_known(TrainingConfig, record["recipe"]))
        expected, posterior = record["report"]["weights"], record.get("posterior")
    if expected is None:
        return data, None
    model = network_for(recipe, data)
    weights = load_weights(directory / "weights.pt", model, expected_hash=expected)
    spread = None if posterior is None else _posterior(directory / "posterior.pt", model, expected=posterior)
    model.to(best_device()).eval()
    return data, Teacher(model, recipe, served_hash(weights, posterior), spread)


def _known(kind: type[DataConfig] | type[TrainingConfig], record: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: record[one.name] for one in dataclasses.fields(kind) if one.name in record}


def _posterior(path: Path, model: torch.nn.Module, *, expected: str) -> Posterior:
    spread = copy.deepcopy(model)
    found = load_weights(path, spread, expected_hash=expected)
    return Posterior(tuple(deviation.detach() for deviation in spread.parameters()), seed=int(found[:15], 16))
