"""Trains the networks of an adaptation on one set of patients, each when it is first needed, and stores them.

``client.adapting.adapt`` calls it. A file is named by a hash of everything its weights depend on. An interrupted
adaptation therefore resumes, and never uses a training of other patients, another student or another recipe. The files
contain what was learnt from patients and are readable by the site's user only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from client.adapting.ways import TRAININGS, Way
from client.training.voter import LabelledScan
from common.canonical import digest, sha256_bytes, sha256_file
from common.config import DataConfig, TrainingConfig
from common.data.volume_cache import together
from common.models.averaged import Averaged
from common.models.fit import OnStep, Pull, best_device, fit
from common.models.unet import load_weights, network_for, save_weights, weights_to_bytes

HALF = 0.5
SEED = 1

OnSteps = Callable[[int, float], None]
"""Called with the steps done since the last call, and the loss (nan for a training read from its file)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all trainings of an adaptation have in common.

    Attributes:
        data: The student's labels, channels and grid.
        recipe: The student's recipe, the same for all trainings so that they can be compared.
        student: The student's network.
        start: Public weights from which the way ``own`` begins, because it does not use the student; None for random
            weights.
        strength: Weight of the penalty on the distance to the student's weights, in the way ``near``.
    """

    data: DataConfig
    recipe: TrainingConfig
    student: torch.nn.Module
    start: Path | None = None
    strength: float = 0.0


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
        self._made: dict[Way, torch.nn.Module] = {}

    def of(self, way: Way) -> torch.nn.Module:
        """Return the network that one way of adapting makes, ready to predict.

        Args:
            way: The way.

        Returns:
            The network.
        """
        trained = {each: self._once(each) for each in TRAININGS[way]}
        if way is Way.AVERAGED:
            return Averaged([trained[Way.OWN], trained[Way.TRAINED_ON]]).eval()
        if way is Way.HALF_WAY:
            return half_way(self._terms.student, copy.deepcopy(trained[Way.TRAINED_ON]))
        return trained[way] if trained else self._terms.student

    def _once(self, way: Way) -> torch.nn.Module:
        """Return the network of a training, which is trained or read once even if several ways of adapting use it."""
        if way not in self._made:
            self._made[way] = self._trained(way)
        return self._made[way]

    def _trained(self, way: Way) -> torch.nn.Module:
        terms = self._terms
        model = network_for(terms.recipe, terms.data, seed=SEED)
        name = self._name(way)
        path = self._folder / f"{name}.pt"
        if path.is_file():
            load_weights(path, model)
            self._on_step(terms.recipe.steps, math.nan)
            return model.to(best_device()).eval()
        if way is not Way.OWN:
            model.load_state_dict(terms.student.state_dict())
        elif terms.start is not None:
            load_weights(terms.start, model)
        pull = Pull(terms.student.state_dict(), terms.strength) if way is Way.NEAR else None
        checkpoint = self._folder / f"{name}.checkpoint.pt"
        fit(
            model.to(best_device()),
            together([scan.image for scan in self._scans]),
            together([scan.label for scan in self._scans]),
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

    def _name(self, way: Way) -> str:
        terms = self._terms
        facts = {
            "data": repr(terms.data),
            "recipe": repr(terms.recipe),
            "scans": [list(scan.hashes) for scan in self._scans],
            "way": str(way),
        }
        if way is Way.OWN:
            facts |= {} if terms.start is None else {"start": sha256_file(terms.start)}
        else:
            facts["student"] = sha256_bytes(weights_to_bytes(terms.student))
        if way is Way.NEAR:
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


def half_way(student: torch.nn.Module, trained: torch.nn.Module) -> torch.nn.Module:
    """Move a trained network's weights half way towards the student's, in place.

    Args:
        student: The student.
        trained: A network of the same architecture; it is changed.

    Returns:
        ``trained``.
    """
    begun = student.state_dict()
    with torch.no_grad():
        for name, weights in trained.state_dict().items():
            if weights.is_floating_point():
                weights.lerp_(begun[name].to(weights), HALF)
    return trained
