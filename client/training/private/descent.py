"""Steps along private gradients: learning-rate schedules and optimisers. All of it is post-processing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi

import torch

Rate = Callable[[int, int], float]
"""(step, steps) → learning rate."""


def descend(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rate: float,
) -> None:
    """One optimiser step of the given learning rate along private gradients."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.to(weight.dtype)
    optimizer.step()


def cosine(start: float) -> Rate:
    """From ``start`` down to a hundredth of it."""
    return lambda step, steps: start * (0.505 + 0.495 * cos(pi * step / max(1, steps)))
