"""Wrong versions of private training, as published or as often written: each is a patch to the product's own code.

Used by ``test_private_training``, where each must turn its oracle red.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from math import sqrt
from unittest.mock import patch

import numpy as np
import torch
from torch.func import functional_call

from client.training.private import bbb, gradients, sampling
from client.training.private import strategies_3d as volumes
from common.models.fit import soft_dice_ce
from consilium.research import sensitivity


def printed_hidden_bounds(weights: np.ndarray, *, t: float) -> sensitivity.LayerBounds:
    """Appendices E to G of the DP-MAC paper, word for word; b1 and b2 are printed squared, C without its ½."""
    m, alpha, beta = sensitivity._checked(weights, t)
    columns = np.linalg.norm(weights, axis=0)
    norm = np.linalg.norm
    a1 = t**2 + 2 * t * norm(alpha) + norm(beta) ** 2
    a2 = 2 * t * (t * norm(beta * columns) + (alpha * beta * columns).sum())
    a3 = t**2 / 4 * (t * norm(columns**2) + ((4 * beta**2 + alpha) * columns**2).sum())
    cross = min(alpha.sum(), sqrt(len(m)) * (alpha * beta**2).max())
    b1 = 2 * t**2 * (norm(alpha * beta) ** 2 + 2 * t * cross + t**2)
    b2 = t**4 / 8 * (t**2 * norm(weights) ** 2 + norm((4 * beta**2 + alpha) * columns) ** 2)
    c = t**2 / 2 * sqrt(t**2 + norm(4 * beta**2 + alpha) ** 2) / 2
    return sensitivity.LayerBounds(
        a1=float(a1), a=float(a1 + a2 + a3), b1=sqrt(b1), b2=sqrt(b2), b=sqrt(b1 + b2), c=float(c)
    )


def naive_mac_gradients(
    model: torch.nn.Module, blocks: volumes.Blocks, *, eta: float, method: str = "vmap"
) -> volumes.Gradients:
    """MAC carried to 3D as it stands: Adam moves the coordinates, and moved coordinates feed the next block."""
    names = blocks.names[:-1]
    state: dict[str, object] = {"z": None}
    made: dict[str, torch.Tensor] = {}

    def after(name: str) -> Callable[..., torch.Tensor]:
        def hook(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
            made[name] = output
            z = state["z"]
            return z[name] if isinstance(z, dict) else output

        return hook

    for name, module in model.named_modules():
        if name in names:
            module.register_forward_hook(after(name))

    def objective(
        weights: gradients.Weights, z: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
    ) -> torch.Tensor:
        state["z"] = z
        loss = soft_dice_ce(functional_call(model, dict(weights), (x,)), y).mean()
        return loss + sum((z[name] - made[name]).square().sum() for name in names)

    def one(weights: gradients.Weights, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        state["z"] = None
        with torch.no_grad():
            functional_call(model, dict(weights), (x,))
        z = {name: made[name].clone().requires_grad_() for name in names}
        optimizer = torch.optim.Adam(z.values(), lr=eta)
        for _ in range(30):
            optimizer.zero_grad()
            objective(weights, z, x, y).backward()
            optimizer.step()
        leaves = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        fixed = {name: value.detach() for name, value in z.items()}
        found = torch.autograd.grad(objective(leaves, fixed, x, y), list(leaves.values()))
        return dict(zip(leaves, found, strict=True))

    def every(
        weights: gradients.Weights, images: torch.Tensor, targets: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        rows = [one(weights, x, y) for x, y in zip(images, targets, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}, torch.zeros(len(rows))

    return every


def printed_posterior_gradients(
    posterior: bbb.Posterior,
    likelihood: dict[str, torch.Tensor],
    draw: dict[str, torch.Tensor],
    prior: bbb.Prior,
) -> bbb.Posterior:
    """The published step: the prior's gradient at w without that of log q, and ∂q/∂θ where ∂ log q/∂θ is meant."""
    weight = prior.temperature / prior.patients
    mean, rho = {}, {}
    for name, g in likelihood.items():
        mu, r = posterior.mean[name].detach(), posterior.rho[name].detach()
        s = bbb.deviation(r)
        w = mu + s * draw[name]
        g_bar = g + weight * w / prior.std**2
        density = torch.exp(-draw[name].square() / 2) / (s * sqrt(2 * np.pi))
        mean[name] = g_bar + weight * density * draw[name] / s
        by_s = weight * density * (draw[name].square() - 1) / s
        rho[name] = (g_bar * draw[name] + by_s) * torch.sigmoid(r)
    return bbb.Posterior(mean, rho)


def row_chunks(self: volumes.Patients, batch: np.ndarray, size: int, *, turn: int = 0) -> Iterator[volumes.Chunk]:
    """Every scan a row of its own: a patient with k scans is clipped k times."""
    rows = [row for slot in batch.tolist() for row in self._rows.get(slot, [])]
    for start in range(0, len(rows), size):
        picks = rows[start : start + size]
        filled = torch.ones(len(picks), dtype=torch.bool)
        yield volumes.Chunk(self.images[picks][:, None], self.targets[picks][:, None], filled)


def fixed_batches_for(event: object, *, patients: int, key: bytes, entropy: object = None) -> sampling.Sampler:
    """Consecutive batches, the same every pass, whatever the event says they are charged as."""
    return sampling.FixedPartition(patients, event.rate.denominator, key)  # type: ignore[attr-defined]


WRONG: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "printed bounds": lambda: patch.object(sensitivity, "hidden_bounds", printed_hidden_bounds),
    "naive 3D MAC": lambda: patch.object(volumes, "mac_gradients", naive_mac_gradients),
    "printed BBB": lambda: patch.object(bbb, "posterior_gradients", printed_posterior_gradients),
    "rows instead of patients": lambda: patch.object(volumes.Patients, "chunks", row_chunks),
    "fixed batches charged as Poisson": lambda: patch.object(sampling, "sampler_for", fixed_batches_for),
}
