"""DP-BBB's Gaussian posterior and its corrected step: Bayes by Backprop with a private likelihood gradient.

w = μ + s·ε with s = softplus(ρ), one ε for the whole batch. With G the private mean of the clipped −∇_w log p, n the
number of patients and λ the temperature of the KL to N(m, s0²); m is 0, or the public weights training began from:

    Δμ = G + (λ/n)·(μ − m)/s0²
    Δρ = [G ⊙ ε + (λ/n)·(s/s0² − 1/s)] ⊙ sigmoid(ρ)

The KL in closed form sees no data, so it costs nothing and enters every step once with weight 1/n relative to the mean
likelihood; ρ reuses G, which is post-processing. Privacy is that of DP-SGD on the w-gradients.
Source: Blundell et al. 2015; the published DP variant lacks ∇ log q in its μ-gradient and counts the KL once a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import expm1, isfinite, log
from typing import Any

import torch
from jaxtyping import Float

from client.training.private.descent import descend
from common.errors import InvalidInput

Named = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class WeightPosterior:
    """Independent normals over all weights: ``mean`` μ and ``rho`` ρ by parameter name, float64."""

    mean: Named
    rho: Named

    @classmethod
    def around(cls, mean: Mapping[str, torch.Tensor], *, std: float) -> WeightPosterior:
        """A posterior of standard deviation ``std`` everywhere."""
        if not isfinite(std) or std <= 0:
            raise InvalidInput("standard deviation of a posterior", value=std, limit="a finite number above 0")
        rho = log(expm1(std)) if std < 30 else std
        return cls(
            {name: w.detach().to(torch.float64).clone().requires_grad_() for name, w in mean.items()},
            {name: torch.full(w.shape, rho, dtype=torch.float64, requires_grad=True) for name, w in mean.items()},
        )

    def draw(self, generator: torch.Generator) -> Named:
        """ε ~ N(0, I) for every weight."""
        return {name: torch.randn(w.shape, generator=generator, dtype=torch.float64) for name, w in self.mean.items()}

    def at(self, draw: Mapping[str, torch.Tensor]) -> Named:
        """w = μ + softplus(ρ)·ε, detached."""
        return {name: (w + deviation(self.rho[name]) * draw[name]).detach() for name, w in self.mean.items()}

    def samples(self, count: int, *, seed: int) -> list[Named]:
        """``count`` weight samples, the same for the same seed: a prediction asked for twice is the same."""
        generator = torch.Generator().manual_seed(seed)
        return [self.at(self.draw(generator)) for _ in range(count)]


def deviation(rho: torch.Tensor) -> torch.Tensor:
    """s = softplus(ρ)."""
    return torch.nn.functional.softplus(rho, threshold=40)


@dataclass(frozen=True, slots=True)
class Prior:
    """N(m, ``std``²) on every weight, weighed by λ/n: ``temperature`` λ, n ``patients``, m ``centre`` (0 for None)."""

    temperature: float
    std: float
    patients: int
    centre: Named | None = None


def posterior_gradients(
    posterior: WeightPosterior, likelihood: Mapping[str, Float[torch.Tensor, "..."]], draw: Named, prior: Prior
) -> WeightPosterior:
    """(Δμ, Δρ) of the module, as a Posterior of gradients. ``likelihood`` is G, private already."""
    weight = prior.temperature / prior.patients
    mean, rho = {}, {}
    for name, g in likelihood.items():
        mu, r = posterior.mean[name].detach(), posterior.rho[name].detach()
        s = deviation(r)
        offset = mu if prior.centre is None else mu - prior.centre[name].to(mu.dtype)
        mean[name] = g + weight * offset / prior.std**2
        rho[name] = (g * draw[name] + weight * (s / prior.std**2 - 1 / s)) * torch.sigmoid(r)
    return WeightPosterior(mean, rho)


class PosteriorDescent:
    """A posterior on its way down: a weight sample, then Adam along the corrected step made of G at that sample.

    ``seed`` draws weights, which are no secret; the noise is not drawn here.
    """

    def __init__(self, posterior: WeightPosterior, prior: Prior, *, seed: int) -> None:
        self.posterior, self.prior = posterior, prior
        self.generator = torch.Generator().manual_seed(seed)
        self._draw: Named = {}
        self._leaves = [*posterior.mean.values(), *posterior.rho.values()]
        self._optimizer = torch.optim.Adam(self._leaves)

    def sample(self) -> Named:
        """w = μ + s·ε of this step."""
        self._draw = self.posterior.draw(self.generator)
        return self.posterior.at(self._draw)

    def apply(self, likelihood: Mapping[str, torch.Tensor], rate: float) -> None:
        """One step; ``likelihood`` is G at the weights last sampled."""
        moves = posterior_gradients(self.posterior, likelihood, self._draw, self.prior)
        descend(self._leaves, [*moves.mean.values(), *moves.rho.values()], self._optimizer, rate)

    def state(self) -> dict[str, Any]:
        return {
            "leaves": [leaf.detach().clone() for leaf in self._leaves],
            "optimizer": self._optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for leaf, saved in zip(self._leaves, state["leaves"], strict=True):
                leaf.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
