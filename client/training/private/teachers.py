"""Training one voter's 3D network privately: from a part and settings to weights, the event spent, and a posterior.

The journal names the training; the caller opens it, so that the same journal can be charged in the site's ledger before
the first step. Refuses networks and losses that couple patients before anything is spent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch

from client.records.journal import TrainingJournal
from client.training.contract import Part
from client.training.private.bbb import Named, Prior
from client.training.private.descent import cosine
from client.training.private.engine import Strategy, run
from client.training.private.gradients import load_weights_into, plain_weights
from client.training.private.mac import Penalty, VolumeMac
from client.training.private.settings import STRATEGIES, PrivateSettings
from client.training.private.strategies_3d import Patients, VolumeBbb, VolumeSgd
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.models.fit import OnStep
from common.models.unet import build_unet, load_weights
from common.privacy.training import TrainingEvent
from common.registry import registered

S = TypeVar("S")

RARE = -2.5
"""Logit of every structure against background before the first step."""


@dataclass(frozen=True, slots=True)
class PrivatelyTrained:
    """The last iterate. ``deviations`` are the posterior's standard deviations by parameter name, for dp-bbb."""

    model: torch.nn.Module
    event: TrainingEvent
    applied: int
    seconds: float
    deviations: Named | None = None


def train_privately(
    part: Part,
    recipe: TrainingConfig,
    settings: PrivateSettings,
    journal: TrainingJournal,
    *,
    seed: int,
    start: Path | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> PrivatelyTrained:
    """Spend what is left of the journal's plan on a new network.

    ``seed`` sets the first weights and, for dp-bbb, the weight samples. It need be neither secret nor random: the
    guarantee holds at each. What must be is drawn elsewhere from the operating system: the noise and Poisson's coins
    anew in every step, the key of a fixed partition and of the patches with the journal.

    ``start``: a file of public weights to begin from instead. Every guarantee holds for any first weights that were
    made without these patients, whoever made them, so a start costs nothing; one made with them is another training.

    No loss is reported to ``on_step`` (nan): a loss on private patients is not part of what was paid for.
    """
    model = _network(part, recipe, seed)
    if start is not None:
        load_weights(start, model)
    patients = Patients(
        part.images,
        part.labels,
        part.slots,
        scans=settings.scans,
        classes=part.classes,
        patch=recipe.patch,
        modality_dropout=recipe.modality_dropout,
        key=journal.key,
    )
    if journal.plan.patients < len(set(part.slots)):
        raise InvalidInput("patients of a private training", value=len(set(part.slots)), limit="those of the plan")
    setup = Setup(model, patients, settings, journal.plan.patients, seed, start is not None)
    strategy: VolumeStrategy = registered(STRATEGIES[settings.strategy])(setup)
    told = None if on_step is None else lambda step: on_step(step, math.nan)
    spent = run(strategy, journal, checkpoint=checkpoint, on_step=told)
    fresh = _network(part, recipe, seed)
    load_weights_into(fresh, strategy.weights)
    fresh.eval()
    return PrivatelyTrained(fresh, spent.event, spent.applied, spent.seconds, strategy.deviations)


def check_network(recipe: TrainingConfig, settings: PrivateSettings, *, channels: int, classes: int) -> None:
    """Refuse a network or a setting that the strategy cannot train with, before anything is charged.

    Args:
        recipe: The study's recipe of a teacher.
        settings: The private training that is asked for.
        channels: Channels of an image.
        classes: Labels, background included.

    Raises:
        InvalidInput: As the strategy says it.
    """
    model = build_unet(recipe.channels, network=recipe.network, in_channels=channels, out_channels=classes)
    nobody = Patients(np.zeros((0, channels, 1, 1, 1)), np.zeros((0, 1, 1, 1)), (), classes=classes)
    registered(STRATEGIES[settings.strategy])(Setup(model, nobody, settings, 1, 0, False))


def _network(part: Part, recipe: TrainingConfig, seed: int) -> torch.nn.Module:
    """A fresh network that starts by answering "background": its output bias is a constant of ours, no statistic.

    Left at zero, the first half of a short private training goes into learning that structures are small.
    """
    model = build_unet(
        recipe.channels, network=recipe.network, in_channels=part.images.shape[1], out_channels=part.classes, seed=seed
    )
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv3d | torch.nn.ConvTranspose3d)]
    output = convolutions[-1].bias
    assert output is not None
    with torch.no_grad():
        output.copy_(torch.tensor([0.0] + [RARE] * (part.classes - 1)))
    return model


class VolumeStrategy(Strategy, Protocol):
    """A strategy on a 3D network. ``weights`` are the network it has come to, ``deviations`` its posterior's standard
    deviations by parameter name, None for a strategy that ends in one network."""

    @property
    def weights(self) -> dict[str, torch.Tensor]: ...
    @property
    def deviations(self) -> Named | None: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What a strategy is made of: ``slots`` is n; ``begun`` says that the model holds public weights already."""

    model: torch.nn.Module
    patients: Patients
    settings: PrivateSettings
    slots: int
    seed: int
    begun: bool

    def made(self, kind: Callable[..., S], **own: object) -> S:
        """A strategy of this kind with what all of them take from the settings, and its ``own``."""
        s = self.settings
        shared = {"rate": cosine(s.learning_rate), "clip": s.clip, "chunk": s.chunk, "method": s.method}
        return kind(self.model, self.patients, **shared, **own)


def sgd(setup: Setup) -> VolumeSgd:
    """DP-SGD: one clip of all parameters, or of every layer."""
    return setup.made(VolumeSgd, per_layer=setup.settings.per_layer)


def bbb(setup: Setup) -> VolumeBbb:
    """DP-BBB: a posterior of networks; around public weights where the model holds some."""
    s = setup.settings
    prior = Prior(s.temperature, s.prior_std, setup.slots, plain_weights(setup.model) if setup.begun else None)
    return setup.made(VolumeBbb, prior=prior, initial_std=s.initial_std, seed=setup.seed, per_layer=s.per_layer)


def mac(setup: Setup) -> VolumeMac:
    """DP-MAC: coordinates at every hidden block, one clip a block."""
    s = setup.settings
    return setup.made(VolumeMac, penalty=Penalty(s.mu, s.mu_growth, s.z_steps, s.z_rate), steps=s.steps)
