"""Tests that private strategies keep one contract; adding another takes one file and one line."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from client.training.private import teachers
from client.training.private.mac import Penalty
from client.training.private.settings import PrivateSettings
from client.training.private.strategies_3d import Patients
from client.training.private.teachers import Setup, bbb, mac, sgd
from common.models.fit import predict
from common.models.unet import build_unet
from tests.contracts.strategy_contract import CLASSES, RECIPE, SLOTS, StrategyContract, part


class TestDpSgd(StrategyContract):
    name = "dp-sgd"


class TestDpSgdWithAClipALayer(StrategyContract):
    name = "dp-sgd"
    per_layer = True


class TestDpMac(StrategyContract):
    """Tests that DP-MAC clips each block, whichever option is given."""

    name = "dp-mac"
    per_layer = True


class TestDpBbbWithAClipALayer(StrategyContract):
    name = "dp-bbb"
    per_layer = True


class TestDpBbb(StrategyContract):
    name = "dp-bbb"


def setup(settings: PrivateSettings, *, begun: bool = False) -> Setup:
    data = part()
    patients = Patients(data.images, data.labels, data.slots, scans=1, classes=CLASSES, patch=(), key=b"k" * 32)
    model = build_unet((2, 4), in_channels=1, out_channels=CLASSES, seed=1)
    return Setup(model, patients, settings, SLOTS, seed=1, begun=begun)


def test_what_is_asked_for_is_what_a_strategy_trains_with() -> None:
    """The settings are no strategy's defaults. The test reads them from the training that was made with them."""
    asked = partial(PrivateSettings, epsilon=4.0, delta=1e-3, learning_rate=0.07, clip=0.3, steps=9)
    posterior = bbb(setup(asked("dp-bbb", temperature=0.6, prior_std=0.7, initial_std=0.4)))
    prior = posterior.descent.prior
    assert (prior.temperature, prior.std, prior.patients, prior.centre) == (0.6, 0.7, SLOTS, None)
    assert all(torch.allclose(s, torch.full_like(s, 0.4)) for s in posterior.deviations.values())
    coordinates = mac(setup(asked("dp-mac", mu=7.0, mu_growth=3.0, z_steps=4, z_rate=0.9)))
    assert (coordinates.penalty, coordinates.steps) == (Penalty(7.0, 3.0, 4, 0.9), 9)
    plain = sgd(setup(asked("dp-sgd")))
    for made in (posterior, coordinates, plain):
        assert made.rate(0, 9) == pytest.approx(0.07)
        assert made.parts.clips == (0.3,) * len(made.parts.clips)


def test_an_untrained_private_network_predicts_mostly_background() -> None:
    """Otherwise half of a short training would be spent on learning that structures are small."""
    first = teachers.untrained(part(), RECIPE, seed=1)
    assert predict(first, part().images[0])[1].mean() < 0.15


@pytest.mark.parametrize("begun", [True, False])
def test_a_posterior_from_a_public_start_is_held_to_that_start(begun: bool) -> None:
    """Without any gradient from patients, Adam's first step moves each mean towards the prior's centre.

    With a public start the centre is the start itself, so the mean does not move; otherwise it is 0.
    """
    settings = PrivateSettings("dp-bbb", 4.0, 1e-3, steps=3, temperature=1.0)
    given = setup(settings, begun=begun)
    before = {name: weight.detach().clone() for name, weight in given.model.named_parameters()}
    made = bbb(given)
    made.total(np.array([], dtype=np.int64))
    made.apply({name: torch.zeros_like(w, dtype=torch.float64) for name, w in before.items()}, step=0, steps=3)
    for name, weight in made.weights.items():
        moved = weight - before[name]
        if begun:
            assert float(moved.abs().max()) == 0, name
        else:
            there = before[name].abs() > 1e-3
            assert torch.equal(moved[there].sign(), -before[name][there].sign()), name
