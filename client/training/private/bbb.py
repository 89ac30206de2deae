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

import torch
from jaxtyping import Float

from common.errors import InvalidInput

Named = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Posterior:
    """Independent normals over all weights: ``mean`` μ and ``rho`` ρ by parameter name, float64."""

    mean: Named
    rho: Named

    @classmethod
    def around(cls, mean: Mapping[str, torch.Tensor], *, std: float) -> Posterior:
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


def posterior_gradients(
    posterior: Posterior,
    likelihood: Mapping[str, Float[torch.Tensor, "..."]],
    draw: Mapping[str, torch.Tensor],
    *,
    temperature: float,
    prior_std: float,
    patients: int,
    centre: Mapping[str, torch.Tensor] | None = None,
) -> Posterior:
    """(Δμ, Δρ) of the module, as a Posterior of gradients. ``likelihood`` is G, private already; ``centre`` is m."""
    weight = temperature / patients
    mean, rho = {}, {}
    for name, g in likelihood.items():
        mu, r = posterior.mean[name].detach(), posterior.rho[name].detach()
        s = deviation(r)
        offset = mu if centre is None else mu - centre[name].to(mu.dtype)
        mean[name] = g + weight * offset / prior_std**2
        rho[name] = (g * draw[name] + weight * (s / prior_std**2 - 1 / s)) * torch.sigmoid(r)
    return Posterior(mean, rho)


def entropy_uncertainty(probabilities: Float[torch.Tensor, "s k ..."]) -> Float[torch.Tensor, "..."]:
    """Mutual information between label and weights, in [0, 1]: entropy of the mean minus mean entropy, over log k."""
    mean = probabilities.mean(dim=0)
    total = -torch.xlogy(mean, mean).sum(dim=0)
    inner = -torch.xlogy(probabilities, probabilities).sum(dim=1).mean(dim=0)
    return ((total - inner) / log(probabilities.shape[1])).clamp(0, 1)
