"""The papers' fully connected networks: forward, backward and DP-MAC's layer objectives, all in rank-one factors.

Layer k maps i = [z_{k−1}, 1] through u = W_kᵀ i to f(u); the last layer is linear and its loss is taken on u. For every
objective here the gradient of example n with respect to W_k is the outer product i_n ⊗ v_n, so its Frobenius norm is
‖i_n‖·‖v_n‖, and a clipped sum over a batch is one matrix product: no per-example matrix is ever formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from jaxtyping import Float

from client.training.private.clipped_sums import Parts
from common.errors import InvalidInput
from research.grid import SUMMED_NORM, grid_sum

ACTIVATIONS = ("relu", "softplus", "linear")
OUTPUTS = ("softmax", "bce", "mse")
INITIALS = ("he", "glorot")


@dataclass(frozen=True, slots=True)
class Shape:
    """Layer sizes from input to output, the hidden activation f, the output's loss, and how weights begin."""

    sizes: tuple[int, ...]
    activation: str = "relu"
    output: str = "softmax"
    initial: str = "he"

    def __post_init__(self) -> None:
        if len(self.sizes) < 2 or min(self.sizes) < 1:
            raise InvalidInput("layer sizes", value=self.sizes, limit="at least an input and an output")
        if self.activation not in ACTIVATIONS:
            raise InvalidInput("activation", value=self.activation, limit=", ".join(ACTIVATIONS))
        if self.output not in OUTPUTS:
            raise InvalidInput("output loss", value=self.output, limit=", ".join(OUTPUTS))
        if self.initial not in INITIALS:
            raise InvalidInput("initial weights", value=self.initial, limit=", ".join(INITIALS))

    @property
    def layers(self) -> int:
        return len(self.sizes) - 1

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"w{k}" for k in range(self.layers))


Layers = list[torch.Tensor]
"""One tensor a layer."""


def initial_weights(shape: Shape, *, seed: int, dtype: torch.dtype = torch.float32) -> Layers:
    """First weights from ``seed``, which is public: no data enters.

    ``he``: uniform, of variance 2 / inputs for ReLU, else 1 / inputs. ``glorot``: normal, of variance
    2 / (inputs + outputs): a signal does not grow on its way out of a narrow layer. The bias row is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    result = []
    for fan_in, fan_out in zip(shape.sizes, shape.sizes[1:], strict=False):
        if shape.initial == "glorot":
            weights = torch.randn(fan_in + 1, fan_out, generator=generator, dtype=torch.float64)
            weights *= sqrt(2 / (fan_in + fan_out))
        else:
            bound = sqrt(6 / fan_in) if shape.activation == "relu" else sqrt(3 / fan_in)
            weights = (2 * torch.rand(fan_in + 1, fan_out, generator=generator, dtype=torch.float64) - 1) * bound
        weights[-1] = 0
        result.append(weights.to(dtype))
    return result


def with_bias(z: Float[torch.Tensor, "n d"]) -> Float[torch.Tensor, "n d1"]:
    """[z, 1]."""
    return torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], dim=1)


def act(u: torch.Tensor, activation: str) -> torch.Tensor:
    """f(u)."""
    if activation == "relu":
        return torch.relu(u)
    return torch.nn.functional.softplus(u, threshold=40) if activation == "softplus" else u


def slope(u: torch.Tensor, activation: str) -> torch.Tensor:
    """f′(u); 0 at ReLU's kink."""
    if activation == "relu":
        return (u > 0).to(u.dtype)
    return torch.sigmoid(u) if activation == "softplus" else torch.ones_like(u)


def bend(u: torch.Tensor, activation: str) -> torch.Tensor:
    """f″(u)."""
    if activation != "softplus":
        return torch.zeros_like(u)
    s = torch.sigmoid(u)
    return s * (1 - s)


def forward(weights: Sequence[torch.Tensor], x: torch.Tensor, activation: str) -> tuple[Layers, Layers]:
    """(i_k, u_k) of every layer: its input with the bias entry, and its pre-activation."""
    inputs, preacts, z = [], [], x
    for k, w in enumerate(weights):
        inputs.append(with_bias(z))
        preacts.append(inputs[-1] @ w)
        z = act(preacts[-1], activation) if k < len(weights) - 1 else preacts[-1]
    return inputs, preacts


def output_loss(u: torch.Tensor, y: torch.Tensor, output: str) -> Float[torch.Tensor, "n"]:
    """Loss of each example on the last pre-activation: squared error, Σ softplus(u) − yu, or cross-entropy."""
    if output == "mse":
        return (u - y).square().sum(dim=1)
    if output == "bce":
        return (torch.nn.functional.softplus(u, threshold=40) - y * u).sum(dim=1)
    return torch.logsumexp(u, dim=1) - (y * u).sum(dim=1)


def output_factor(u: torch.Tensor, y: torch.Tensor, output: str) -> torch.Tensor:
    """∂ loss / ∂u: 2(u − y), sigmoid(u) − y, softmax(u) − y."""
    if output == "mse":
        return 2 * (u - y)
    return (torch.sigmoid(u) if output == "bce" else torch.softmax(u, dim=1)) - y


def output_bend(u: torch.Tensor, output: str) -> torch.Tensor:
    """∂²loss / ∂u_h², per unit: 2, or s(1 − s). The softmax's units are coupled: refused."""
    if output == "softmax":
        raise InvalidInput("second order of a softmax output", limit="bce or mse", remedy="--set order=1")
    return torch.full_like(u, 2.0) if output == "mse" else bend(u, "softplus")


def backprop(weights: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor, shape: Shape) -> tuple[Layers, Layers]:
    """(i_k, v_k) with ∂loss_n/∂W_k = i_kn ⊗ v_kn: back-propagation in rank-one factors."""
    inputs, preacts = forward(weights, x, shape.activation)
    factors = [output_factor(preacts[-1], y, shape.output)]
    for k in range(len(weights) - 1, 0, -1):
        factors.append((factors[-1] @ weights[k][:-1].T) * slope(preacts[k - 1], shape.activation))
    return inputs, factors[::-1]


def rank_one_norms(inputs: torch.Tensor, factors: torch.Tensor) -> Float[torch.Tensor, "n"]:
    """‖i_n ⊗ v_n‖_F = ‖i_n‖·‖v_n‖, in float64."""
    return inputs.double().norm(dim=1) * factors.double().norm(dim=1)


def clipped_layer_sum(
    inputs: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    parts: Parts,
    names: Sequence[str],
    *,
    beside: int = 0,
) -> dict[str, torch.Tensor]:
    """The integer sum of clipped rank-one contributions, layer ``names[k]`` from factors k, parts as ``parts`` says.

    Same guarantee as :func:`client.training.private.clipped_sums.integer_sum`, by :func:`~research.grid.grid_sum`.
    ``beside``: coordinates that are released with these.
    """
    layer = {name: (i.double(), v.double()) for name, i, v in zip(names, inputs, factors, strict=True)}
    norms = {name: rank_one_norms(*pair) for name, pair in layer.items()}
    finite = torch.stack([torch.isfinite(norm) for norm in norms.values()]).all(dim=0)
    coordinates = beside + sum(i.shape[1] * v.shape[1] for i, v in layer.values())
    result = {}
    for index, members in enumerate(parts.names):
        norm = torch.stack([norms[name].square() for name in members]).sum(dim=0).sqrt()
        factor = torch.clamp(parts.clips[index] / norm, max=1.0) * (SUMMED_NORM / parts.scale(index))
        factor = torch.where(finite & torch.isfinite(factor), factor, torch.zeros_like(factor))
        for name in members:
            i, v = (torch.where(finite[:, None], pair, torch.zeros_like(pair)) for pair in layer[name])
            total = (i * factor[:, None]).T @ v
            whole = grid_sum(total.numpy().ravel(), coordinates=coordinates)
            result[name] = torch.from_numpy(whole).reshape(total.shape)
    return result


def residual_factor(z_out: torch.Tensor, u: torch.Tensor, activation: str) -> torch.Tensor:
    """v of DP-MAC's hidden objective T = (z − f(u))²: 2(f − z)f′, so that ∂T = i ⊗ v."""
    return 2 * (act(u, activation) - z_out) * slope(u, activation)


def residual_bend(z_out: torch.Tensor, u: torch.Tensor, activation: str) -> torch.Tensor:
    """∂²T/∂u² = 2[(f − z)f″ + f′²], so that ∂²T = that · iiᵀ; ReLU: 2·1[u > 0]."""
    f, first = act(u, activation), slope(u, activation)
    return 2 * ((f - z_out) * bend(u, activation) + first.square())
