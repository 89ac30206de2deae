"""A private strategy in one file: plain steps along the private mean. Registered by one line in test_strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from client.training.private.strategies_3d import VolumeSgd
from client.training.private.teachers import Setup


@dataclass(frozen=True)
class Constant:
    rate: float

    def __call__(self, step: int, steps: int) -> float:
        return self.rate


class Plain(VolumeSgd):
    """Per-patient gradients, one clip, no optimiser."""

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        with torch.no_grad():
            for name, leaf in self.leaves.items():
                leaf -= self.rate(step, steps) * mean[name]


def plain(setup: Setup) -> Plain:
    settings = setup.settings
    return Plain(setup.model, setup.patients, rate=Constant(settings.learning_rate), clip=settings.clip)
