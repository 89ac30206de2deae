"""Trains the networks of an adaptation on one set of patients, each when it is first needed, and stores them.

``client.adapting.adapt`` calls it. A file is named by a hash of everything its weights depend on. An interrupted
adaptation therefore resumes, and never uses a training of other patients, another student or another recipe. The files
contain what was learnt from patients and are readable by the site's user only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from client.adapting.methods import TRAININGS, HomeTraining, Method
from client.training.voter import LabelledScan
from common.canonical import digest, sha256_bytes, sha256_file
from common.config import DataConfig, TrainingConfig
from common.data.volume_cache import read, together
from common.models.averaged import Averaged
from common.models.fit import OnStep, Pull, best_device, fit, predict
from common.models.unet import load_weights, network_for, save_weights, weights_to_bytes

SEED = 1

OnSteps = Callable[[int, float], None]
"""Called with the number of steps since the last call, and the loss (nan for a training read from its file)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all trainings of an adaptation have in common.

    Attributes:
        data: The student's labels, channels and grid.
        recipe: The student's recipe, the same for all trainings so that they can be compared.
        student: The student's network.
        start: Public weights from which the training ``own`` begins; None for random weights. ``own`` does not use the
            student.
        strength: Weight of the penalty on the distance to the student's weights, in the training ``near``.
        public: Public images by their hash, each as an array or as its file in the cache. The training ``rehearsed``
            uses them. May be empty.
    """

    data: DataConfig
    recipe: TrainingConfig
    student: torch.nn.Module
    start: Path | None = None
    strength: float = 0.0
    public: Mapping[str, np.ndarray | Path] = field(default_factory=dict)


class Networks:
    """The networks of every way of adapting, trained on one set of scans when they are first needed.

    Args:
        terms: What all trainings have in common.
        folder: Where trainings are stored.
        scans: The scans.
        on_step: Called with the number of steps since its last call, and the loss.
    """

    def __init__(self, terms: Terms, folder: Path, scans: Sequence[LabelledScan], *, on_step: OnSteps) -> None:
        self._terms, self._folder, self._scans, self._on_step = terms, folder, tuple(scans), on_step
        self._made: dict[HomeTraining, torch.nn.Module] = {}

    def of(self, way: Method) -> torch.nn.Module:
        """Return the network that one way of adapting makes, ready to predict.

        Args:
            way: The way.

        Returns:
            The network.
        """
        match way:
            case Method.STUDENT:
                return self._terms.student
            case Method.HALF_WAY:
                return _mean_weights([self._terms.student, self._once(HomeTraining.TRAINED_ON)])
            case Method.MERGED:
                return _mean_weights([self.of(Method.HALF_WAY), self._once(HomeTraining.REHEARSED)])
            case Method.AVERAGED:
                return Averaged([self._once(HomeTraining.OWN), self._once(HomeTraining.TRAINED_ON)]).eval()
            case Method.AVERAGED_REHEARSED:
                return Averaged([self._once(HomeTraining.OWN), self._once(HomeTraining.REHEARSED)]).eval()
        (only,) = TRAININGS[way]
        return self._once(only)

    def _once(self, training: HomeTraining) -> torch.nn.Module:
        """Return the network of a training, which is trained or read once even if several ways of adapting use it."""
        if training not in self._made:
            self._made[training] = self._trained(training)
        return self._made[training]

    def _trained(self, training: HomeTraining) -> torch.nn.Module:
        terms = self._terms
        model = network_for(terms.recipe, terms.data, seed=SEED)
        name = self._name(training)
        path = self._folder / f"{name}.pt"
        if path.is_file():
            load_weights(path, model)
            self._on_step(terms.recipe.steps, math.nan)
            return model.to(best_device()).eval()
        scans = self._scans
        if training is HomeTraining.REHEARSED:
            half_way = self.of(Method.HALF_WAY)
            model.load_state_dict(half_way.state_dict())
            scans = beside_public(scans, labelled(terms.public, half_way, terms.recipe))
        elif training is not HomeTraining.OWN:
            model.load_state_dict(terms.student.state_dict())
        elif terms.start is not None:
            load_weights(terms.start, model)
        pull = Pull(terms.student.state_dict(), terms.strength) if training is HomeTraining.NEAR else None
        checkpoint = self._folder / f"{name}.checkpoint.pt"
        fit(
            model.to(best_device()),
            together([scan.image for scan in scans]),
            together([scan.label for scan in scans]),
            terms.recipe,
            seed=SEED,
            classes=len(terms.data.labels),
            pull=pull,
            checkpoint=checkpoint,
            on_step=as_increments(self._on_step),
        )
        save_weights(path, model, mode=0o600)
        checkpoint.unlink(missing_ok=True)
        return model.eval()

    def _name(self, training: HomeTraining) -> str:
        terms = self._terms
        facts = {
            "data": repr(terms.data),
            "recipe": repr(terms.recipe),
            "scans": [list(scan.hashes) for scan in self._scans],
            "way": str(training),
        }
        if training is HomeTraining.OWN:
            facts |= {} if terms.start is None else {"start": sha256_file(terms.start)}
        else:
            facts["student"] = sha256_bytes(weights_to_bytes(terms.student))
        if training is HomeTraining.REHEARSED:
            facts |= {"public": list(terms.public), "begins": str(Method.HALF_WAY)}
        if training is HomeTraining.NEAR:
            facts["strength"] = repr(terms.strength)
        return digest("adapted-training", facts)[:32]


def as_increments(show: OnSteps) -> OnStep:
    """Wrap a callback that expects the steps since its last call, so that it can be called with all steps so far.

    Args:
        show: Called with the number of steps since its last call, and the loss.

    Returns:
        A function of the number of steps so far, and the loss.
    """
    done = 0

    def on_step(step: int, loss: float) -> None:
        nonlocal done
        show(step - done, loss)
        done = step

    return on_step


def labelled(
    public: Mapping[str, np.ndarray | Path], network: torch.nn.Module, recipe: TrainingConfig
) -> tuple[LabelledScan, ...]:
    """Return public volumes with the label maps that a network predicts for them.

    Args:
        public: Public volumes by their hash, or the files that hold them in the cache.
        network: The network.
        recipe: The recipe it was trained by.

    Returns:
        The volumes with label maps, in the order of ``public``.
    """
    scans = []
    for name, image in public.items():
        found = predict(network, read(image), patch=recipe.patch, amp=recipe.amp)
        scans.append(LabelledScan(image, found.argmax(axis=0).astype(np.uint8), (name,)))
    return tuple(scans)


def beside_public(scans: Sequence[LabelledScan], public: Sequence[LabelledScan]) -> tuple[LabelledScan, ...]:
    """Join a hospital's scans and public volumes in about equal numbers.

    If the hospital has fewer scans than there are public volumes, its scans are repeated.

    The public volumes keep a training of a few patients from forgetting what the student learned (learning without
    forgetting, Li and Hoiem 2016).

    Args:
        scans: The hospital's scans, at least one.
        public: Public volumes with predicted label maps.

    Returns:
        The scans of the training.
    """
    return (*scans,) * max(1, round(len(public) / len(scans))) + (*public,)


def _mean_weights(models: Sequence[torch.nn.Module]) -> torch.nn.Module:
    """Return a network whose weights are the mean of other networks' weights (Wortsman et al. 2022).

    The networks have one architecture. The new network is ready to predict.
    """
    states = [model.state_dict() for model in models]
    result = copy.deepcopy(models[0])
    with torch.no_grad():
        for name, weights in result.state_dict().items():
            if weights.is_floating_point():
                weights.copy_(sum(state[name] for state in states) / len(states))
    return result.eval()
