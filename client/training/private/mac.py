"""Trains a 3D network by DP-MAC: coordinates at every hidden block, then a step on each block's weights.

MAC (Carreira-Perpiñán & Wang 2014) gives every hidden block k an output of its own, the coordinate z_k, and penalises
its distance from what the block computes. Block k computes the function f_k with the weights W_k; the last block K has
no coordinate. For one image of N voxels with labels y, with Z all its coordinates and W all weights,

    E(W, Z) = loss(f_K(parents of K; W_K), y) + μ/(2N) · Σ_k ‖z_k − f_k(parents of k; W_k)‖²

where a block's parents are the coordinates it reads, skip connections included. Here μ is the weight of the penalty,
not the μ of Gaussian differential privacy. One private step is

1. **Z-step**, never released: descend E over Z at the current weights. The descent is over the residuals e_k, with
   z_k = f_k(parents) + e_k, and begins at e = 0. The map between residuals and coordinates is one to one, so the
   objective is the same. With residuals, the loss changes every block in the first step already: the first direction is
   −∂loss/∂(output of k), as in back-propagation.
2. **W-step**: take the gradient of E at fixed Z with respect to each W_k. In DP-MAC's terms these gradients are the
   first-order Taylor coefficients Σ∂T of the terms T of E, centred at the current weights. A patient's
   coefficients are averaged over its images, clipped to norm Θ for each block, and released together with noise: one
   Gaussian mechanism of sensitivity √K·Θ. (DP-MAC's √(M·K)·Θ, with M = 1 vector of coefficients for each block.)

As μ grows, z approaches the forward pass, and the W-step's gradient approaches that of back-propagation times 1 − (1 −
rate)^steps. The Z-step reads only one patient's images and the (public) weights. Its results are discarded after the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isfinite

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch.func import grad

from client.training.private.blocks import Blocks, blocks_of
from client.training.private.gradients import PatientLoss, Weights, per_patient
from client.training.private.strategies_3d import Patients, StepTerms, VolumeSgd
from common.errors import InvalidInput
from common.models.fit import soft_dice_ce

Each = Callable[[torch.Tensor, torch.Tensor], Float[torch.Tensor, "k"]]
"""A function from logits and targets of k images to their k losses."""

Coordinates = dict[str, torch.Tensor]
"""By hidden block, the coordinates of a patient's k images, [k, channels, …]. # sensitive: never released"""


@dataclass(frozen=True, slots=True)
class Penalty:
    """The settings of DP-MAC's Z-step, the descent over a patient's coordinates.

    Attributes:
        mu: Weight μ of the penalty at the first step of the training.
        growth: Factor by which μ grows until the last step.
        steps: Number of descent steps.
        rate: Size of a descent step in units of N/μ, for images of N voxels.

    Raises:
        InvalidInput: If a value is out of range.
    """

    mu: float
    growth: float
    steps: int
    rate: float

    def __post_init__(self) -> None:
        if not (isfinite(self.mu) and self.mu > 0):
            raise InvalidInput("--mu", value=self.mu, limit="a finite number above 0")
        if not (isfinite(self.growth) and self.growth >= 1):
            raise InvalidInput("--mu-growth", value=self.growth, limit="a finite number, 1 or more")
        if self.steps < 1:
            raise InvalidInput(
                "--z-steps",
                value=self.steps,
                limit="1 or more",
                remedy="for a training without a descent over coordinates, use --strategy dp-sgd --per-layer",
            )
        if not 0 < self.rate <= 1:
            raise InvalidInput("--z-rate", value=self.rate, limit="above 0, at most 1")

    def at(self, step: int, steps: int) -> float:
        """Return μ at one step, interpolated geometrically.

        Args:
            step: Number of the step, from 0.
            steps: Number of planned steps.

        Returns:
            μ.
        """
        return self.mu * float(self.growth ** (min(step, steps - 1) / max(1, steps - 1)))


def objective(
    blocks: Blocks,
    each: Each,
    weights: Weights,
    patches: torch.Tensor,
    targets: torch.Tensor,
    z: Coordinates,
    mu: float,
) -> Float[torch.Tensor, "k"]:
    """Return MAC's objective for each of a patient's images: the loss plus the penalty on the coordinates.

    Each block receives its parents' coordinates, so no block's weights enter another block's term; the gradient with
    respect to the weights is therefore the W-step's.

    Args:
        blocks: The network's blocks.
        each: Loss of each image.
        weights: Parameters by name.
        patches: Images [k, c, x, y, z].
        targets: One-hot targets [k, l, x, y, z].
        z: Coordinates by block.
        mu: Weight μ of the penalty.

    Returns:
        The objective of each image, [k].
    """
    gaps: list[torch.Tensor] = []

    def visit(name: str, output: torch.Tensor) -> torch.Tensor:
        if name not in z:
            return output
        gaps.append((z[name] - output).square().flatten(1).sum(dim=1))
        return z[name]

    loss = each(blocks.run(weights, patches, visit), targets)
    return loss + mu / (2 * _voxels(patches)) * torch.stack(gaps).sum(dim=0)


def coordinates(
    blocks: Blocks, each: Each, weights: Weights, patches: torch.Tensor, targets: torch.Tensor, mu: float, how: Penalty
) -> Coordinates:
    """Run the Z-step on one patient: descend the :func:`objective` over the coordinates at fixed weights.

    The coordinates of each image follow from that image alone, so a patient's coordinates depend on no other patient.

    Args:
        blocks: The network's blocks.
        each: Loss of each image.
        weights: Parameters by name.
        patches: Images [k, c, x, y, z].
        targets: One-hot targets [k, l, x, y, z].
        mu: Weight μ of the penalty.
        how: Number and size of the descent steps.

    Returns:
        Coordinates by block. # sensitive: never released
    """
    voxels = _voxels(patches)
    e = {name: torch.zeros(shape, dtype=patches.dtype) for name, shape in blocks.shapes(patches.shape).items()}

    def energy(residuals: Coordinates) -> torch.Tensor:
        logits = blocks.run(weights, patches, lambda name, f: f + residuals[name] if name in residuals else f)
        length = torch.stack([r.square().sum() for r in residuals.values()]).sum()
        return each(logits, targets).sum() + mu / (2 * voxels) * length

    for _ in range(how.steps):
        slopes = grad(energy)(e)
        e = {name: r - how.rate * voxels / mu * slopes[name] for name, r in e.items()}
    z: Coordinates = {}

    def visit(name: str, f: torch.Tensor) -> torch.Tensor:
        if name not in e:
            return f
        z[name] = f + e[name]
        return z[name]

    blocks.run(weights, patches, visit)
    return z


def mac_loss(blocks: Blocks, each: Each, *, mu: float, how: Penalty) -> PatientLoss:
    """Return the loss whose gradient the W-step clips.

    The loss is the :func:`objective` at the coordinates that the patient's Z-step found, averaged over
    the patient's images.

    Args:
        blocks: The network's blocks.
        each: Loss of each image.
        mu: Weight μ of the penalty.
        how: Number and size of the descent steps.

    Returns:
        The patient's loss as a function of weights, patches and targets.
    """

    def loss(weights: Weights, patches: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        still = {name: w.detach() for name, w in weights.items()}
        z = coordinates(blocks, each, still, patches, targets, mu, how)
        return objective(blocks, each, weights, patches, targets, z, mu).mean()

    return loss


def _voxels(patches: torch.Tensor) -> int:
    """Return the number of voxels of one image."""
    return int(np.prod(patches.shape[2:]))


class VolumeMac(VolumeSgd):
    """DP-MAC on a 3D network: a Z-step, then clipped first-order coefficients for every block, then Adam on their mean.

    Args:
        model: The network.
        patients: The voter's scans.
        terms: How a step is taken. Its clip is the norm bound Θ of every block's coefficients.
        penalty: Settings of the Z-step.
        steps: Number of planned steps, over which μ grows.

    Raises:
        InvalidInput: If the network is not a graph of blocks, or makes patients' gradients depend on each other.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        patients: Patients,
        terms: StepTerms,
        *,
        penalty: Penalty,
        steps: int,
    ) -> None:
        super().__init__(model, patients, terms)
        self.blocks, self.penalty, self.steps = blocks_of(model), penalty, steps
        self.parts = self.blocks.parts(terms.clip)

    def total(self, batch: Int64[np.ndarray, "b"]) -> Mapping[str, torch.Tensor]:
        """Return the clipped integer sum of patients' gradients of the :func:`objective`. # sensitive until noised

        The sum is over the patients in the given slots. The penalty has this step's weight.
        """
        mu = self.penalty.at(self.turn + 1, self.steps)
        self.gradients = per_patient(mac_loss(self.blocks, soft_dice_ce, mu=mu, how=self.penalty))
        return super().total(batch)
