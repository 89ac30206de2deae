"""Implements DP-BBB: a Gaussian posterior of the weights, and its step from a private likelihood gradient.

The posterior of a weight has mean μ and standard deviation s = softplus(ρ); training changes the parameters μ and ρ.
The weights of a step are w = μ + s·ε, with standard normal values ε that are the same for the whole batch. Let G be the
private mean of the patients' clipped gradients −∇_w log p (−log p is a patient's loss), n the number of patients, and
λ the temperature of the KL divergence to the prior N(m, s0²), where m is 0 or the public weights from which training
began. The gradients for μ and ρ are then

    Δμ = G + (λ/n)·(μ − m)/s0²
    Δρ = [G ⊙ ε + (λ/n)·(s/s0² − 1/s)] ⊙ sigmoid(ρ)

The closed-form KL uses no data, so it costs no privacy; it enters every step with weight 1/n relative to the mean
likelihood. ρ reuses G, which is post-processing. The privacy is that of DP-SGD on the gradients of w.

Source: Blundell et al. 2015. The published DP variant lacks ∇ log q in its μ-gradient, and adds the whole KL in every
batch.
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
    """Independent normal distributions of all weights.

    Attributes:
        mean: Means μ of the weights by parameter name, float64.
        rho: ρ by parameter name, float64; a weight's standard deviation is softplus(ρ).
    """

    mean: Named
    rho: Named

    @classmethod
    def around(cls, mean: Mapping[str, torch.Tensor], *, std: float) -> WeightPosterior:
        """Return a posterior with the same standard deviation for every weight.

        Args:
            mean: Mean weights by parameter name.
            std: Standard deviation, finite and above 0.

        Returns:
            The posterior.

        Raises:
            InvalidInput: If ``std`` is out of range.
        """
        if not isfinite(std) or std <= 0:
            raise InvalidInput("standard deviation of a posterior", value=std, limit="a finite number above 0")
        rho = log(expm1(std)) if std < 30 else std
        return cls(
            {name: w.detach().to(torch.float64).clone().requires_grad_() for name, w in mean.items()},
            {name: torch.full(w.shape, rho, dtype=torch.float64, requires_grad=True) for name, w in mean.items()},
        )

    def draw(self, generator: torch.Generator) -> Named:
        """Draw an independent standard normal value ε for every weight.

        Args:
            generator: Source of randomness.

        Returns:
            ε by parameter name.
        """
        return {name: torch.randn(w.shape, generator=generator, dtype=torch.float64) for name, w in self.mean.items()}

    def at(self, draw: Mapping[str, torch.Tensor]) -> Named:
        """Return the weights w = μ + softplus(ρ)·ε, detached: the mean plus standard deviation times draw.

        Args:
            draw: Standard normal values ε by parameter name, from :meth:`draw`.

        Returns:
            The weights w by parameter name.
        """
        return {name: (w + deviation(self.rho[name]) * draw[name]).detach() for name, w in self.mean.items()}

    def samples(self, count: int, *, seed: int) -> list[Named]:
        """Draw weight samples; the same seed gives the same samples, so a repeated prediction is the same.

        Args:
            count: Number of samples.
            seed: Seed.

        Returns:
            The samples.
        """
        generator = torch.Generator().manual_seed(seed)
        return [self.at(self.draw(generator)) for _ in range(count)]


def deviation(rho: torch.Tensor) -> torch.Tensor:
    """Return the standard deviations softplus(ρ) of weights.

    Args:
        rho: The posterior's parameters ρ.

    Returns:
        The standard deviations, of the same shape.
    """
    return torch.nn.functional.softplus(rho, threshold=40)


@dataclass(frozen=True, slots=True)
class Prior:
    """The prior of every weight, a normal distribution, and the factor λ/n of the KL divergence to it.

    Attributes:
        temperature: Temperature λ of the KL divergence.
        std: Standard deviation s0 of the prior.
        patients: Number n of patients.
        centre: Means m of the prior by parameter name; None for 0.
    """

    temperature: float
    std: float
    patients: int
    centre: Named | None = None


def posterior_gradients(
    posterior: WeightPosterior, likelihood: Mapping[str, Float[torch.Tensor, "..."]], draw: Named, prior: Prior
) -> WeightPosterior:
    """Compute the gradients Δμ and Δρ by which a step changes a posterior, by the equations in the module's docstring.

    Args:
        posterior: The current posterior.
        likelihood: Private mean G of the clipped likelihood gradients, by parameter name.
        draw: Standard normal values ε with which the weights of this step were drawn.
        prior: The prior.

    Returns:
        The gradients, in the form of a posterior.
    """
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
    """Updates a posterior: samples the weights, then takes an Adam step with the private likelihood gradient at them.

    Args:
        posterior: The posterior; it is changed in place.
        prior: The prior.
        seed: Seed of the weight samples. It is not secret; privacy noise is drawn elsewhere.
    """

    def __init__(self, posterior: WeightPosterior, prior: Prior, *, seed: int) -> None:
        self.posterior, self.prior = posterior, prior
        self.generator = torch.Generator().manual_seed(seed)
        self._draw: Named = {}
        self._leaves = [*posterior.mean.values(), *posterior.rho.values()]
        self._optimizer = torch.optim.Adam(self._leaves)

    def sample(self) -> Named:
        """Draw the weights of this step from the posterior.

        Returns:
            The weights by parameter name.
        """
        self._draw = self.posterior.draw(self.generator)
        return self.posterior.at(self._draw)

    def apply(self, likelihood: Mapping[str, torch.Tensor], rate: float) -> None:
        """Take one Adam step of the posterior.

        Args:
            likelihood: Private mean of the clipped likelihood gradients at the weights last sampled.
            rate: Learning rate.
        """
        moves = posterior_gradients(self.posterior, likelihood, self._draw, self.prior)
        descend(self._leaves, [*moves.mean.values(), *moves.rho.values()], self._optimizer, rate)

    def state(self) -> dict[str, Any]:
        """Return everything that a resumed training needs: posterior, optimiser and generator."""
        return {
            "leaves": [leaf.detach().clone() for leaf in self._leaves],
            "optimizer": self._optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore a saved state."""
        with torch.no_grad():
            for leaf, saved in zip(self._leaves, state["leaves"], strict=True):
                leaf.copy_(saved)
        self._optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
