"""DP-SGD, DP-MAC and DP-BBB on the papers' fully connected networks, as strategies of the private trainer.

``cells`` builds them. Data are tensors of all examples, one row each. Everything that a strategy computes from a batch
before the noisy sum is sensitive. What ``apply`` receives is private, and everything after it is post-processing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64

from client.training.private.bbb import PosteriorDescent, Prior, WeightPosterior
from client.training.private.clipped_sums import ClippingPlan, one_part
from client.training.private.descent import Rate, descend
from common.errors import InvalidInput
from research.grid import SUMMED_NORM, grid_sum
from research.mlp import (
    Layers,
    NetworkShape,
    act,
    backprop,
    clipped_layer_sum,
    forward,
    initial_weights,
    output_bend,
    output_factor,
    output_loss,
    residual_bend,
    residual_factor,
    slope,
    with_bias,
)
from research.sensitivity import hidden_bounds, output_bounds

OPTIMIZERS = ("adam", "sgd")
ROWS_AT_ONCE = 1000
"""Number of examples whose coordinates are optimised together; this many fit into a processor's cache."""


class _Descending:
    """A network's weights, initialised from a seed and moved by Adam or SGD, with the examples they learn from."""

    def __init__(
        self,
        shape: NetworkShape,
        x: Float[torch.Tensor, "n d"],
        y: Float[torch.Tensor, "n k"],
        *,
        rate: Rate,
        seed: int,
        optimizer: str = "adam",
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise InvalidInput("optimizer", value=optimizer, limit=", ".join(OPTIMIZERS))
        self.shape, self.x, self.y, self.rate = shape, x, y, rate
        self.weights = [w.requires_grad_() for w in initial_weights(shape, seed=seed, dtype=x.dtype)]
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(self.weights) if optimizer == "adam" else torch.optim.SGD(self.weights)
        )

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: weights and optimiser."""
        return {"weights": [w.detach().clone() for w in self.weights], "optimizer": self.optimizer.state_dict()}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint's state."""
        with torch.no_grad():
            for weight, saved in zip(self.weights, state["weights"], strict=True):
                weight.copy_(saved)
        self.optimizer.load_state_dict(state["optimizer"])


class MlpSgd(_Descending):
    """DP-SGD with one clipping norm for the whole network, or one for each layer; Adam or SGD on the private mean."""

    def __init__(
        self,
        shape: NetworkShape,
        x: Float[torch.Tensor, "n d"],
        y: Float[torch.Tensor, "n k"],
        *,
        clip: float,
        rate: Rate,
        seed: int,
        per_layer: bool = False,
        optimizer: str = "adam",
    ) -> None:
        super().__init__(shape, x, y, rate=rate, seed=seed, optimizer=optimizer)
        layers = tuple((name,) for name in shape.names)
        self.parts = ClippingPlan(layers, (clip,) * len(layers)) if per_layer else one_part(shape.names, clip)

    def total(self, batch: Int64[np.ndarray, "b"]) -> Mapping[str, torch.Tensor]:
        """Return the integer sum of the batch's clipped gradients, by layer. # sensitive until noised"""
        rows = torch.from_numpy(batch)
        with torch.no_grad():
            inputs, factors = backprop(self.weights, self.x[rows], self.y[rows], self.shape)
        return clipped_layer_sum(inputs, factors, self.parts, self.shape.names)

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        """Move the weights by the private mean gradient; post-processing."""
        descend(self.weights, [mean[name] for name in self.shape.names], self.optimizer, self.rate(step, steps))


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """Taylor terms of each example's layer objective T around the current weights ŵ of the layer.

    Attributes:
        inputs: Inputs i of the layer; the first derivative is ∂T = i ⊗ v.
        factors: The factors v in it.
        bends: Second derivatives s_h of T by the pre-activation of each unit h; that by the unit's weights is s_h·iiᵀ.
            Empty at order 1.
        constants: T − ŵ·∂T + ½ŵᵀ∂²Tŵ; empty at order 1.
    """

    inputs: torch.Tensor
    factors: torch.Tensor
    bends: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    constants: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True, slots=True)
class MacTerms:
    """What DP-MAC releases of a layer, and how coordinates and weights are optimised.

    Attributes:
        clip: Clipping norm Θ of one example's ∂T, the first derivative of the layer objective T.
        z_rate: Learning rate of the coordinates.
        z_steps: Steps of the coordinates.
        w_steps: Steps of the weights on the noisy quadratic (order 2).
        curvature_clip: Bound of one example's ½∂²T; with it the sum ½Σ∂²T is released as well (order 2).
        value_bound: Bound of the constant term of one example's T; with it the constants' sum is released as a third
            coefficient, which no optimiser needs.
        t: Norm bound T. Projects every z and layer input to norm T, so that the corrected analytic sensitivities hold
            too; the smaller of the two bounds is used.

    Raises:
        InvalidInput: For ``value_bound`` without ``curvature_clip``.
    """

    clip: float
    z_rate: float
    z_steps: int = 30
    w_steps: int = 1
    curvature_clip: float | None = None
    value_bound: float | None = None
    t: float | None = None

    def __post_init__(self) -> None:
        if self.value_bound is not None and self.curvature_clip is None:
            raise InvalidInput(
                "partitions of DP-MAC", limit="1 (g), 2 (g, C) or 3 (a, g, C)", remedy="set curvature_clip as well"
            )


class MlpMac(_Descending):
    """DP-MAC with the releases of ``terms``."""

    def __init__(
        self,
        shape: NetworkShape,
        x: Float[torch.Tensor, "n d"],
        y: Float[torch.Tensor, "n k"],
        terms: MacTerms,
        *,
        rate: Rate,
        seed: int,
    ) -> None:
        if terms.t is not None and shape.activation != "softplus":
            raise InvalidInput(
                "analytic sensitivities",
                value=shape.activation,
                limit="softplus layers",
                remedy="--set activation=softplus",
            )
        super().__init__(shape, x, y, rate=rate, seed=seed)
        self.terms = terms

    @property
    def parts(self) -> ClippingPlan:
        """Clipping norms of the parts of a release: one part for each of M coefficients of each of K layers.

        Each part is divided by its clipping norm and by √(MK), so that all parts of one example together have norm at
        most 1. With a norm bound T, the analytic sensitivities are computed from the current weights, which are public.
        """
        of = self.terms
        names, clips = [], []
        for k, name in enumerate(self.shape.names):
            given = (("", of.clip), (".c", of.curvature_clip), (".a", of.value_bound))
            for (ending, clip), bound in zip(given, self._bounds(k), strict=True):
                if clip is not None:
                    names.append((name + ending,))
                    clips.append(min(clip, bound))
        return ClippingPlan(tuple(names), tuple(clips))

    def _bounds(self, k: int) -> tuple[float, float, float]:
        """Return the analytic sensitivities of a layer's coefficients; infinite without a norm bound T."""
        if self.terms.t is None:
            return inf, inf, inf
        weights = self.weights[k].detach().double().numpy()
        if k < self.shape.layers - 1:
            hidden = hidden_bounds(weights, t=self.terms.t)
            return hidden.g, hidden.c, hidden.a
        if self.shape.output != "bce":
            raise InvalidInput("analytic sensitivities of the output", value=self.shape.output, limit="bce")
        output = output_bounds(weights, t=self.terms.t)
        return output.g, output.c, output.a

    def coordinates(self, x: torch.Tensor, y: torch.Tensor) -> Layers:
        """Return the coordinates z_1 … z_K of these examples after the Z-step; they are never released.

        The Z-step is ``z_steps`` steps of Adam on Σ_k‖z_k − f_k(z_{k−1})‖² + output loss, where f_k is what layer k
        computes. It starts from the forward pass. The objective is a sum over examples and Adam works entry by entry,
        so no example influences another.

        Args:
            x: Inputs [n, d].
            y: Targets [n, k].
        """
        rows = zip(x.split(ROWS_AT_ONCE), y.split(ROWS_AT_ONCE), strict=True)
        each = [self._coordinates(*some) for some in rows]
        return [torch.cat(layer) for layer in zip(*each, strict=True)]

    def _coordinates(self, x: torch.Tensor, y: torch.Tensor) -> Layers:
        weights = [w.detach() for w in self.weights]
        _, preacts = forward(weights, x, self.shape.activation)
        z = [act(u, self.shape.activation).clone() for u in preacts[:-1]]
        if not z:
            return z
        first = act(preacts[0], self.shape.activation)  # depends on data only, not on coordinates: constant
        adam = torch.optim.Adam(z, lr=self.terms.z_rate, fused=True)
        for _ in range(self.terms.z_steps):
            for entry, gradient in zip(z, coordinate_gradients(weights, first, y, z, self.shape), strict=True):
                entry.grad = gradient
            adam.step()
        return z

    def layer_terms(self, x: torch.Tensor, y: torch.Tensor, z: Layers) -> list[LayerTerms]:
        """Return the per-example Taylor terms of every layer's objective at the current weights.

        Args:
            x: Inputs [n, d].
            y: Targets [n, k].
            z: Coordinates, as :meth:`coordinates` returns them.
        """
        feeds, f, result = [x, *z], self.shape.activation, []
        for k, w in enumerate(self.weights):
            i = self._projected(with_bias(feeds[k]))
            u = i @ w.detach()
            hidden = k < self.shape.layers - 1
            target = self._projected(z[k]) if hidden else y
            factor = residual_factor(target, u, f) if hidden else output_factor(u, y, self.shape.output)
            if self.terms.curvature_clip is None:
                result.append(LayerTerms(i, factor))
                continue
            bends = residual_bend(target, u, f) if hidden else output_bend(u, self.shape.output)
            value = (target - act(u, f)).square().sum(dim=1) if hidden else output_loss(u, y, self.shape.output)
            constant = value - (u * factor).sum(dim=1) + (u.square() * bends).sum(dim=1) / 2
            result.append(LayerTerms(i, factor, bends, constant))
        return result

    def _projected(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.terms.t is None else onto_ball(rows, self.terms.t)

    def total(self, batch: Int64[np.ndarray, "b"]) -> Mapping[str, torch.Tensor]:
        """Return the integer sum of the batch's clipped coefficients, by part. # sensitive until noised"""
        rows = torch.from_numpy(batch)
        x, y = self.x[rows], self.y[rows]
        parts, names = self.parts, self.shape.names
        bound = {name: (parts.clips[k], parts.shares[k]) for k, (name,) in enumerate(parts.names)}
        with torch.no_grad():
            terms = self.layer_terms(x, y, self.coordinates(x, y))
            first = ClippingPlan(
                tuple((name,) for name in names),
                tuple(bound[name][0] for name in names),
                tuple(bound[name][1] for name in names),
            )
            inputs, factors = [t.inputs for t in terms], [t.factors for t in terms]
            whole = sum(w.numel() for w in self.weights)
            curvatures = sum(w.shape[0] ** 2 * w.shape[1] for w in self.weights)
            beside = curvatures * (self.terms.curvature_clip is not None)
            beside += len(names) * (self.terms.value_bound is not None)
            result = clipped_layer_sum(inputs, factors, first, names, beside=beside)
            for name, term in zip(names, terms, strict=True):
                if self.terms.curvature_clip is not None:
                    result[f"{name}.c"] = _curvature_sum(
                        term.inputs, term.bends, *bound[f"{name}.c"], coordinates=whole + beside
                    )
                if self.terms.value_bound is not None:
                    result[f"{name}.a"] = _value_sum(term.constants, *bound[f"{name}.a"])
        return {name: result[name] for name in parts.order}

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        """Move the weights by the private mean coefficients; post-processing."""
        rate = self.rate(step, steps)
        start = [w.detach().clone() for w in self.weights]
        for _ in range(self.terms.w_steps):
            gradients = []
            for k, name in enumerate(self.shape.names):
                gradient = mean[name]
                if self.terms.curvature_clip is not None:
                    moved = (self.weights[k].detach() - start[k]).double()
                    gradient = gradient + 2 * torch.einsum("hde,eh->dh", _symmetric(mean[f"{name}.c"]), moved)
                gradients.append(gradient)
            descend(self.weights, gradients, self.optimizer, rate)

    def gradient_ratios(self, x: torch.Tensor, y: torch.Tensor) -> tuple[float, ...]:
        """Return the norm of each layer's summed gradient, divided by that of the last layer.

        Small ratios show vanishing gradients. The sums have no noise: use public data only.
        """
        with torch.no_grad():
            terms = self.layer_terms(x, y, self.coordinates(x, y))
            norms = [float((t.inputs.double().T @ t.factors.double()).norm()) for t in terms]
        return tuple(norm / norms[-1] for norm in norms)


class MlpBbb:
    """DP-BBB: one weight sample for each step, DP-SGD's clipped sum at that sample, and the KL term, which needs no
    data.
    """

    def __init__(
        self,
        shape: NetworkShape,
        x: Float[torch.Tensor, "n d"],
        y: Float[torch.Tensor, "n k"],
        *,
        clip: float,
        rate: Rate,
        seed: int,
        prior: Prior,
        initial_std: float,
    ) -> None:
        self.shape, self.x, self.y, self.rate = shape, x, y, rate
        self.parts = one_part(shape.names, clip)
        start = dict(zip(shape.names, initial_weights(shape, seed=seed, dtype=torch.float64), strict=True))
        self.descent = PosteriorDescent(WeightPosterior.around(start, std=initial_std), prior, seed=seed + 1)

    @property
    def posterior(self) -> WeightPosterior:
        """The current posterior of the weights."""
        return self.descent.posterior

    def total(self, batch: Int64[np.ndarray, "b"]) -> Mapping[str, torch.Tensor]:
        """Return the integer sum of the batch's clipped gradients at one weight sample. # sensitive until noised"""
        sample, rows = self.descent.sample(), torch.from_numpy(batch)
        with torch.no_grad():
            weights = [sample[name].to(self.x.dtype) for name in self.shape.names]
            inputs, factors = backprop(weights, self.x[rows], self.y[rows], self.shape)
        return clipped_layer_sum(inputs, factors, self.parts, self.shape.names)

    def apply(self, mean: Mapping[str, torch.Tensor], *, step: int, steps: int) -> None:
        """Move the posterior by the private mean gradient; post-processing."""
        self.descent.apply(mean, self.rate(step, steps))

    def state(self) -> dict[str, Any]:
        return self.descent.state()

    def restore(self, state: dict[str, Any]) -> None:
        self.descent.restore(state)


def coordinate_gradients(
    weights: Sequence[torch.Tensor], first: torch.Tensor, y: torch.Tensor, z: Layers, shape: NetworkShape
) -> Layers:
    """Return the gradient of Σ_k‖z_k − f_k(z_{k−1})‖² + output loss by every coordinate z_k.

    It is 2(z_k − f_k), plus the gradient through layer k + 1; f_k is what layer k computes.

    Args:
        weights: Weight matrices.
        first: Activation of the first layer for the examples, [n, h].
        y: Targets.
        z: Coordinates.
        shape: The network.
    """
    preacts = [torch.addmm(w[-1], feed, w[:-1]) for feed, w in zip(z, weights[1:], strict=True)]
    values = [first, *(act(u, shape.activation) for u in preacts[:-1])]
    over = [entry - value for entry, value in zip(z, values, strict=True)]
    back = [(rest * slope(u, shape.activation), -2) for rest, u in zip(over[1:], preacts, strict=False)]
    back.append((output_factor(preacts[-1], y, shape.output), 1))
    return [
        torch.addmm(rest, factor, w[:-1].T, beta=2, alpha=sign)
        for rest, (factor, sign), w in zip(over, back, weights[1:], strict=True)
    ]


def onto_ball(rows: torch.Tensor, radius: float) -> torch.Tensor:
    """Project each row onto the ball of norm ``radius``."""
    norms = rows.norm(dim=1, keepdim=True)
    return rows * torch.clamp(radius / norms.clamp_min(1e-30), max=1.0)


def _curvature_sum(i: torch.Tensor, s: torch.Tensor, clip: float, share: float, *, coordinates: int) -> torch.Tensor:
    """Return the sum over a batch of each example's clipped half second derivatives by a layer's weights, as integers.

    The sum for unit h is Σ_n c_n·½·s_nh·i_n·i_nᵀ. The vector i_n is the layer's input for example n. The number s_nh is
    the second derivative of the example's objective by the pre-activation of unit h. The factor c_n reduces the norm
    ½‖i_n‖²‖s_n‖ of an example's term to at most ``clip``.

    Args:
        i: Inputs i_n of the layer, [n, D].
        s: Second derivatives s_nh, [n, h].
        clip: Largest norm of one example's term.
        share: Factor r by which this sum is reduced, because it is released together with other sums. It is divided by
            ``clip``·r and multiplied by :data:`SUMMED_NORM`. The sum of 1/r² over all released sums is at most 1.
        coordinates: Number of coordinates of the whole release, for the rounding.

    Returns:
        Int64 array [h, D, D], in the integer steps of :func:`grid_sum`.
    """
    i, s = i.double(), s.double()
    norm = i.square().sum(dim=1) * s.norm(dim=1) / 2
    factor = torch.clamp(clip / norm, max=1.0) * (SUMMED_NORM / (clip * share))
    good = torch.isfinite(factor) & torch.isfinite(norm)
    factor = torch.where(good, factor, torch.zeros_like(factor))
    i, s = (torch.where(good[:, None], entry, torch.zeros_like(entry)) for entry in (i, s))
    total = torch.einsum("nh,nd,ne->hde", s * (factor / 2)[:, None], i, i)
    return torch.from_numpy(grid_sum(total.numpy().ravel(), coordinates=coordinates)).reshape(total.shape)


def _value_sum(values: torch.Tensor, clip: float, share: float) -> torch.Tensor:
    kept = torch.nan_to_num(values.double(), nan=0.0, posinf=0.0, neginf=0.0).clamp(-clip, clip)
    total = (kept * (SUMMED_NORM / (clip * share))).sum()
    return torch.from_numpy(grid_sum(total.reshape(1).numpy(), coordinates=1))


def _symmetric(c: torch.Tensor) -> torch.Tensor:
    return (c + c.transpose(1, 2)) / 2
