"""Trains one voter's 3D network privately: from patients and settings to weights, the event spent, and a posterior.

``client.training.private.trainer`` calls it. The caller opens the journal, so that it can charge the training in the
site's ledger before the first step. It refuses, before anything is spent, networks and losses that make one patient's
gradient depend on another patient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from client.records.journal import TrainingJournal
from client.training.contract import TrainedVoter, VoterData
from client.training.private.bbb import Named, Prior
from client.training.private.descent import cosine
from client.training.private.engine import Strategy, run
from client.training.private.gradients import load_weights_into, plain_weights
from client.training.private.mac import Penalty, VolumeMac
from client.training.private.settings import STRATEGIES, PrivateSettings
from client.training.private.strategies_3d import Patients, StepTerms, VolumeBbb, VolumeSgd
from common.config import DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.models.fit import OnStep
from common.models.unet import load_weights, network_for, network_of
from common.registry import registered

RARE = -2.5
"""Output bias of every structure relative to background before the first step."""


def train_privately(
    part: VoterData,
    recipe: TrainingConfig,
    settings: PrivateSettings,
    journal: TrainingJournal,
    *,
    seed: int,
    start: Path | None = None,
    checkpoint: Path | None = None,
    on_step: OnStep | None = None,
) -> TrainedVoter:
    """Train a new network with the steps that the journal's plan has left.

    The seed need be neither secret nor random, because the guarantee holds for each seed. The operating system supplies
    what must be random: the noise and the Poisson sampling of every step, and, once for each journal, the key from
    which the partition and the patches are drawn. The guarantee holds for any first weights made without these
    patients, so a public start costs nothing.

    Args:
        part: The voter's patients.
        recipe: The study's recipe of a teacher.
        settings: The private settings.
        journal: Where steps are charged.
        seed: Seed of the first weights and, for dp-bbb, of the weight samples.
        start: File of public weights to begin from; None for random ones.
        checkpoint: File from which to resume; None to store none.
        on_step: Called after each step with its number and nan, because the charge does not cover showing a loss on
            private patients.

    Returns:
        The network of the last step, and what it spent. Its steps are those that moved the weights.

    Raises:
        InvalidInput: If the part has more patients than the plan, the start has other weights, or the strategy refuses
            the network.
    """
    model = untrained(part, recipe, seed=seed)
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
        raise InvalidInput(
            "patients of a private training",
            value=len(set(part.slots)),
            limit=f"at most {journal.plan.patients}, the number of the plan",
        )
    setup = Setup(model, patients, settings, journal.plan.patients, seed, start is not None)
    strategy: VolumeStrategy = registered(STRATEGIES[settings.strategy].make)(setup)
    told = None if on_step is None else lambda step: on_step(step, math.nan)
    spent = run(strategy, journal, checkpoint=checkpoint, on_step=told)
    fresh = untrained(part, recipe, seed=seed)
    load_weights_into(fresh, strategy.weights)
    fresh.eval()
    return TrainedVoter(fresh, spent.applied, None, spent.seconds, spent.event, strategy.deviations)


def check_network(recipe: TrainingConfig, settings: PrivateSettings, data: DataConfig) -> None:
    """Refuse a network, a grid or a setting that the strategy cannot train with, before anything is charged.

    Args:
        recipe: The study's recipe of a teacher.
        settings: The private training that is asked for.
        data: The study's channels, labels and grid.

    Raises:
        InvalidInput: If the strategy refuses the network or a setting, or the network cannot take volumes of the grid
            or the recipe's patches of them.
    """
    recipe.check_grid(data.grid)
    model, classes = network_for(recipe, data), len(data.labels)
    images, labels = np.zeros((0, len(data.channels), *data.grid)), np.zeros((0, *data.grid))
    no_patients = Patients(images, labels, (), classes=classes, patch=recipe.patch)
    registered(STRATEGIES[settings.strategy].make)(Setup(model, no_patients, settings, 1, 0, False))


def untrained(part: VoterData, recipe: TrainingConfig, *, seed: int) -> torch.nn.Module:
    """Return a new network whose output bias favours background; the bias is a constant, not a statistic of data.

    With a bias of zero, the first half of a short private training only learns that structures are small.

    Args:
        part: The patients, of which only the numbers of channels and classes are used.
        recipe: The recipe of the training.
        seed: Seed of the first weights.

    Returns:
        The network.
    """
    model = network_of(recipe, channels=part.images.shape[1], classes=part.classes, seed=seed)
    convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv3d | torch.nn.ConvTranspose3d)]
    output = convolutions[-1].bias
    assert output is not None
    with torch.no_grad():
        output.copy_(torch.tensor([0.0] + [RARE] * (part.classes - 1)))
    return model


class VolumeStrategy(Strategy, Protocol):
    """A strategy on a 3D network, whose weights can be read."""

    @property
    def weights(self) -> dict[str, torch.Tensor]: ...
    @property
    def deviations(self) -> Named | None: ...


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs from which a strategy is built.

    Attributes:
        model: The network.
        patients: The voter's scans.
        settings: The private settings.
        slots: Number of slots n.
        seed: Seed of weight samples.
        begun: True if the network already holds public weights.
    """

    model: torch.nn.Module
    patients: Patients
    settings: PrivateSettings
    slots: int
    seed: int
    begun: bool

    @property
    def terms(self) -> StepTerms:
        """How a strategy with these settings takes a step."""
        s = self.settings
        return StepTerms(cosine(s.learning_rate), s.clip, s.chunk, s.per_layer)


def sgd(setup: Setup) -> VolumeSgd:
    """Make the DP-SGD strategy, with one clip for all parameters or one for each layer.

    Args:
        setup: Its inputs.

    Returns:
        The strategy.
    """
    return VolumeSgd(setup.model, setup.patients, setup.terms)


def bbb(setup: Setup) -> VolumeBbb:
    """Make the DP-BBB strategy, which learns a normal distribution of each weight.

    The prior is centred at the public weights if training begins from them, otherwise at 0.

    Args:
        setup: Its inputs.

    Returns:
        The strategy.
    """
    s = setup.settings
    prior = Prior(s.temperature, s.prior_std, setup.slots, plain_weights(setup.model) if setup.begun else None)
    return VolumeBbb(setup.model, setup.patients, setup.terms, prior=prior, initial_std=s.initial_std, seed=setup.seed)


def mac(setup: Setup) -> VolumeMac:
    """Make the DP-MAC strategy: auxiliary coordinates at the output of every hidden block, and one clip for each block.

    Args:
        setup: Its inputs.

    Returns:
        The strategy.
    """
    s = setup.settings
    penalty = Penalty(s.mu, s.mu_growth, s.z_steps, s.z_rate)
    return VolumeMac(setup.model, setup.patients, setup.terms, penalty=penalty, steps=s.steps)
