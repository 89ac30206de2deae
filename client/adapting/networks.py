"""The networks that one set of a hospital's patients makes: each trained when it is asked for, and kept in a file.

A file is named by all that its weights depend on, so an interrupted adaptation goes on where it was and never takes a
training of other patients, another student or another recipe. The files hold what patients taught: they lie in a folder
of their own, for the site's user alone.
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
from common.models.fit import Pull, best_device, fit
from common.models.unet import load_weights, network_for, save_weights, weights_to_bytes

HALF = 0.5
SEED = 1

OnStep = Callable[[int, float], None]
"""Called with the steps that a training has gone since it was last called, and its loss (nan for one kept)."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What every training of an adaptation has in common.

    ``student``: its network. ``recipe``: the student's own, for every training, so that they compare. ``start``: public
    weights for the own network to begin from. ``strength``: of the pull towards the student.
    """

    data: DataConfig
    recipe: TrainingConfig
    student: torch.nn.Module
    start: Path | None = None
    strength: float = 0.0


class Networks:
    """Networks of ``scans``, trained into ``folder`` as they are asked for."""

    def __init__(self, terms: Terms, folder: Path, scans: Sequence[LabelledScan], *, on_step: OnStep) -> None:
        self._terms, self._folder, self._scans, self._on_step = terms, folder, tuple(scans), on_step
        self._made: dict[Way, torch.nn.Module] = {}

    def of(self, way: Way) -> torch.nn.Module:
        """The network of one way, ready to predict."""
        trained = {each: self._once(each) for each in TRAININGS[way]}
        if way is Way.AVERAGED:
            return Averaged([trained[Way.OWN], trained[Way.TRAINED_ON]]).eval()
        if way is Way.HALF_WAY:
            return half_way(self._terms.student, copy.deepcopy(trained[Way.TRAINED_ON]))
        return trained[way] if trained else self._terms.student

    def _once(self, way: Way) -> torch.nn.Module:
        """A training's network, trained or read once, whichever ways are made of it."""
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


def as_increments(show: OnStep) -> OnStep:
    """What takes the step that one training is at, and shows how many are new."""
    done = 0

    def on_step(step: int, loss: float) -> None:
        nonlocal done
        show(step - done, loss)
        done = step

    return on_step


def half_way(student: torch.nn.Module, trained: torch.nn.Module) -> torch.nn.Module:
    """``trained`` taken back to the middle between the two networks' weights, in place."""
    begun = student.state_dict()
    with torch.no_grad():
        for name, weights in trained.state_dict().items():
            if weights.is_floating_point():
                weights.lerp_(begun[name].to(weights), HALF)
    return trained
