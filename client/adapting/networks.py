"""Trains the networks of an adaptation on one set of patients, each when it is first needed, and stores them.

``client.adapting.adapt`` calls it. A file is named by a hash of everything its weights depend on. An interrupted
adaptation therefore resumes, and never uses a training of other patients, another student or another recipe. The files
contain what was learnt from patients and are readable by the site's user only.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from client.adapting.ways import TRAININGS, HomeTraining, Way
from client.training.voter import LabelledScan
from common.canonical import digest, sha256_bytes, sha256_file
from common.config import DataConfig, TrainingConfig
from common.data.volume_cache import together
from common.models.averaged import Averaged
from common.models.fit import OnStep, Pull, best_device, fit
from common.models.unet import load_weights, network_for, save_weights, weights_to_bytes

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
        start: Public weights from which the training ``own`` begins, because it does not use the student; None for
            random weights.
        strength: Weight of the penalty on the distance to the student's weights, in the training ``near``.
        public: Public volumes with the labels that the student predicts, for the training ``rehearsed``; may be empty.
    """

    data: DataConfig
    recipe: TrainingConfig
    student: torch.nn.Module
    start: Path | None = None
    strength: float = 0.0
    public: tuple[LabelledScan, ...] = ()


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

    def of(self, way: Way) -> torch.nn.Module:
        """Return the network that one way of adapting makes, ready to predict.

        Args:
            way: The way.

        Returns:
            The network.
        """
        trained = {each: self._once(each) for each in TRAININGS[way]}
        student = self._terms.student
        match way:
            case Way.STUDENT:
                return student
            case Way.HALF_WAY:
                return mean_weights({student: 1, trained[HomeTraining.TRAINED_ON]: 1})
            case Way.MERGED:
                return _merged(student, trained)
            case Way.AVERAGED:
                return Averaged([trained[HomeTraining.OWN], trained[HomeTraining.TRAINED_ON]]).eval()
            case Way.AVERAGED_MERGED:
                return Averaged([trained[HomeTraining.OWN], _merged(student, trained)]).eval()
        (only,) = trained.values()
        return only

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
        if training is not HomeTraining.OWN:
            model.load_state_dict(terms.student.state_dict())
        elif terms.start is not None:
            load_weights(terms.start, model)
        pull = Pull(terms.student.state_dict(), terms.strength) if training is HomeTraining.NEAR else None
        scans = rehearsed(self._scans, terms.public) if training is HomeTraining.REHEARSED else self._scans
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
            facts["public"] = [list(scan.hashes) for scan in terms.public]
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


def rehearsed(scans: Sequence[LabelledScan], public: Sequence[LabelledScan]) -> list[LabelledScan]:
    """Mix a hospital's scans with public volumes in about equal numbers; repeat the scans if they are fewer.

    The public volumes have the labels that the student predicts. So a training does not forget what the student learned
    (learning without forgetting, Li and Hoiem 2016).

    Args:
        scans: The hospital's scans, at least one.
        public: Public volumes with the student's labels.

    Returns:
        The scans of the training.
    """
    return [*scans] * max(1, round(len(public) / len(scans))) + [*public]


def mean_weights(shares: Mapping[torch.nn.Module, int]) -> torch.nn.Module:
    """Return a network whose weights are a weighted mean of other networks' weights (Wortsman et al. 2022).

    Args:
        shares: The networks, all of one architecture, with their shares.

    Returns:
        A new network, ready to predict.
    """
    total, states = sum(shares.values()), {model: model.state_dict() for model in shares}
    result = copy.deepcopy(next(iter(shares)))
    with torch.no_grad():
        for name, weights in result.state_dict().items():
            if weights.is_floating_point():
                weights.copy_(sum(states[model][name] * (share / total) for model, share in shares.items()))
    return result.eval()


def _merged(student: torch.nn.Module, trained: Mapping[HomeTraining, torch.nn.Module]) -> torch.nn.Module:
    return mean_weights({student: 1, trained[HomeTraining.REHEARSED]: 1, trained[HomeTraining.TRAINED_ON]: 2})
