"""Defines wrong versions of private training, as published or as often written, as patches to the product's
code.

``test_private_training`` applies them; each must make its oracle fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from math import sqrt
from unittest.mock import patch

import numpy as np
import torch

from client.training.private import bbb, sampling
from client.training.private import clipped_sums as sums
from client.training.private import strategies_3d as volumes
from research import mlp, mlp_strategies, sensitivity


def printed_hidden_bounds(weights: np.ndarray, *, t: float) -> sensitivity.LayerBounds:
    """Return the bounds of appendices E to G of the DP-MAC paper.

    Two are changed so that all compare with what is released here. b1 and b2 are printed squared. Appendix G bounds
    ∂²T, and C is half of it, so its bound is halved. As a bound for C itself, the printed number holds.
    """
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


def only_its_own_layer(
    weights: Sequence[torch.Tensor], first: torch.Tensor, y: torch.Tensor, z: mlp.Layers, shape: mlp.NetworkShape
) -> mlp.Layers:
    """Leave out the next layer's term of a Z-step: 2(z_k − f_k) alone."""
    preacts = [mlp.with_bias(feed) @ w for feed, w in zip(z[:-1], weights[1:-1], strict=True)]
    values = [first, *(mlp.act(u, shape.activation) for u in preacts)]
    return [2 * (entry - value) for entry, value in zip(z, values, strict=True)]


def double_parts(names: tuple[tuple[str, ...], ...], clips: tuple[float, ...], *shares: object) -> sums.ClippingPlan:
    return sums.ClippingPlan(names, tuple(2 * clip for clip in clips), *shares)  # type: ignore[arg-type]


def printed_posterior_gradients(
    posterior: bbb.WeightPosterior,
    likelihood: dict[str, torch.Tensor],
    draw: dict[str, torch.Tensor],
    prior: bbb.Prior,
) -> bbb.WeightPosterior:
    """Take the published step: the prior's gradient at w without that of log q, and ∂q/∂θ where ∂ log q/∂θ is meant."""
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
    return bbb.WeightPosterior(mean, rho)


def row_chunks(self: volumes.Patients, batch: np.ndarray, size: int, *, turn: int = 0) -> Iterator[volumes.Chunk]:
    """Put every scan into a row of its own, so a patient with k scans is clipped k times."""
    rows = [row for slot in batch.tolist() for row in self._rows.get(slot, [])]
    for start in range(0, len(rows), size):
        picks = rows[start : start + size]
        filled = torch.ones(len(picks), dtype=torch.bool)
        yield volumes.Chunk(self.images[picks][:, None], self.targets[picks][:, None], filled)


def fixed_batches_for(event: object, *, patients: int, key: bytes, entropy: object = None) -> sampling.Sampler:
    """Return the same consecutive batches in every pass, although the event is charged as Poisson sampling."""
    return sampling.FixedPartition(patients, event.rate.denominator, key)  # type: ignore[attr-defined]


WRONG: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "printed bounds": lambda: patch.object(sensitivity, "hidden_bounds", printed_hidden_bounds),
    "a Z-step without the next layer": lambda: patch.object(mlp_strategies, "coordinate_gradients", only_its_own_layer),
    "a layer's clip doubled": lambda: patch.object(
        volumes, "layer_parts", lambda model, clip, was=volumes.layer_parts: was(model, 2 * clip)
    ),
    "a layer's clip doubled in the MLP": lambda: patch.object(mlp_strategies, "ClippingPlan", double_parts),
    "printed BBB": lambda: patch.object(bbb, "posterior_gradients", printed_posterior_gradients),
    "rows instead of patients": lambda: patch.object(volumes.Patients, "chunks", row_chunks),
    "fixed batches charged as Poisson": lambda: patch.object(sampling, "sampler_for", fixed_batches_for),
}
