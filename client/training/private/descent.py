"""Applies optimiser steps along private gradients, with a learning-rate schedule. All of it is post-processing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import cos, pi

import torch

Rate = Callable[[int, int], float]
"""A function from step and number of steps to the learning rate."""


def descend(
    weights: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rate: float,
) -> None:
    """Take one optimiser step along private gradients.

    Args:
        weights: The parameters; they are changed in place.
        gradients: Their private gradients, in the same order.
        optimizer: The optimiser of these parameters.
        rate: Learning rate of this step.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient.to(weight.dtype)
    optimizer.step()


def cosine(start: float) -> Rate:
    """Return a cosine schedule from ``start`` down to a hundredth of it.

    Args:
        start: First learning rate.

    Returns:
        The schedule.
    """
    return lambda step, steps: start * (0.505 + 0.495 * cos(pi * step / max(1, steps)))
