"""States what every private strategy promises. A test inherits :class:`StrategyContract` and names the strategy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from client.records.journal import TrainingJournal
from client.training.contract import VoterData
from client.training.private.clipped_sums import RADIUS_INT
from client.training.private.settings import STRATEGIES, PrivateSettings
from client.training.private.strategies_3d import Patients
from client.training.private.teachers import Setup, VolumeStrategy, train_privately
from common.config import TrainingConfig
from common.errors import InvalidInput
from common.models.fit import predict
from common.models.unet import build_unet
from common.registry import registered

CLIP = 1e-3
RECIPE = TrainingConfig(channels=(2, 4))
SLOTS, CLASSES, GRID = 4, 2, (8, 8, 8)


def part(*, odd: float | None = None, patients: int = SLOTS) -> VoterData:
    """Return patients with one scan each and empty last slots; ``odd`` fills the last image with this value."""
    rng = np.random.default_rng(0)
    labels = (rng.random((SLOTS, *GRID)) < 0.3).astype(np.uint8)
    images = (labels + rng.normal(0, 0.3, labels.shape)).astype(np.float32)[:, None]
    if odd is not None:
        images[-1], labels[-1] = odd, 1
    return VoterData(images[:patients], labels[:patients], CLASSES)


def length(total: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float((total[name] - other[name]).double().square().sum()) for name in total))


class StrategyContract:
    """Tests a strategy's promises; a subclass sets ``name``."""

    name: str
    per_layer = False

    @classmethod
    def settings(cls) -> PrivateSettings:
        return PrivateSettings(cls.name, 4.0, 1e-3, steps=3, chunk=2, clip=CLIP, per_layer=cls.per_layer)

    @classmethod
    def strategy(cls, data: VoterData) -> VolumeStrategy:
        torch.set_num_threads(1)
        patients = Patients(data.images, data.labels, data.slots, scans=1, classes=CLASSES, patch=(), key=b"k" * 32)
        model = build_unet(RECIPE.channels, in_channels=1, out_channels=CLASSES, seed=1)
        made: VolumeStrategy = registered(STRATEGIES[cls.name].make)(
            Setup(model, patients, cls.settings(), SLOTS, seed=1, begun=False)
        )
        return made

    def test_one_patient_moves_the_sum_by_no_more_than_the_noise_is_scaled_to(self) -> None:
        everybody = np.arange(SLOTS)
        total = self.strategy(part()).total(everybody)
        for odd in (0.0, 1e6, -1e6):
            assert length(total, self.strategy(part(odd=odd)).total(everybody)) <= 2 * RADIUS_INT
        assert length(total, self.strategy(part(patients=SLOTS - 1)).total(everybody)) <= RADIUS_INT

    def test_a_long_gradient_is_as_long_as_the_clip_and_no_longer(self) -> None:
        """For one patient, in the gradient's own units, the length is the requested clip, over all parameters or every
        layer.
        """
        strategy = self.strategy(part())
        total, parts = strategy.total(np.array([0])), strategy.parts
        assert (len(parts.names) > 1) == self.per_layer
        for index, names in enumerate(parts.names):
            long = torch.cat([total[name].double().flatten() for name in names]).norm() * parts.scale(index)
            assert float(long) / RADIUS_INT == pytest.approx(CLIP, rel=1e-3)

    def test_a_patient_of_no_numbers_counts_as_nobody(self) -> None:
        everybody = np.arange(SLOTS)
        total = self.strategy(part(odd=math.nan)).total(everybody)
        assert length(total, self.strategy(part(patients=SLOTS - 1)).total(everybody)) == 0

    def test_a_sum_is_of_integers_and_nobodys_is_zero(self) -> None:
        total = self.strategy(part()).total(np.arange(0))
        assert all(entry.dtype == torch.int64 and not entry.any() for entry in total.values())

    def test_its_state_brings_it_back(self) -> None:
        first, again = self.strategy(part()), self.strategy(part())
        mean = {name: torch.full(entry.shape, 0.01) for name, entry in first.total(np.arange(SLOTS)).items()}
        first.apply(mean, step=1, steps=3)
        again.restore(first.state())
        for name, weight in first.weights.items():
            assert torch.equal(weight, again.weights[name])
        assert length(first.total(np.arange(SLOTS)), again.total(np.arange(SLOTS))) == 0

    def test_a_training_spends_its_plan_and_tells_no_loss(self, tmp_path: Path) -> None:
        settings, told = self.settings(), []
        journal = TrainingJournal.open(tmp_path / "journal", settings.plan(patients=SLOTS), identity="a")
        done = train_privately(
            part(), RECIPE, settings, journal, seed=1, on_step=lambda step, loss: told.append((step, loss))
        )
        assert (done.steps, done.event and done.event.steps) == (3, 3)
        assert [step for step, _ in told] == [1, 2, 3]
        assert all(math.isnan(loss) for _, loss in told)
        np.testing.assert_allclose(predict(done.model, part().images[0]).sum(axis=0), 1, atol=1e-4)

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(InvalidInput, match=self.name):
            PrivateSettings("magic", 4.0, 1e-3)
