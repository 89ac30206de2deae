"""The papers' fully connected networks: forward pass, back-propagation and DP-MAC's layer objectives as rank-one
factors.

``mlp_strategies`` uses it. Layer k, with weights W_k and the activation f, maps its input i = [z_{k−1}, 1] (the output
of the layer before, or its coordinate in DP-MAC, and a bias entry) through the *pre-activation* u = W_kᵀ i to f(u). The
last layer is linear, and its loss is taken on u. For every objective here, the gradient of example n by W_k is the
outer product of two vectors, i_n ⊗ v_n; the *factor* v_n is the gradient by u. Its Frobenius norm is therefore
‖i_n‖·‖v_n‖, and a clipped sum over a batch is one matrix product; no per-example matrix is formed. It refuses unknown
activations, losses and initialisations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from jaxtyping import Float

from client.training.private.clipped_sums import ClippingPlan
from common.errors import InvalidInput
from research.grid import SUMMED_NORM, grid_sum

ACTIVATIONS = ("relu", "softplus", "linear")
OUTPUTS = ("softmax", "bce", "mse")
INITIALS = ("he", "glorot")


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """The structure of a network.

    Attributes:
        sizes: Layer sizes from input to output.
        activation: Hidden activation f.
        output: Loss of the output layer.
        initial: How initial weights are drawn.

    Raises:
        InvalidInput: For fewer than two sizes or an unknown name.
    """

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
        """Number of weight matrices."""
        return len(self.sizes) - 1

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the weight matrices, ``w0`` and so on."""
        return tuple(f"w{k}" for k in range(self.layers))


Layers = list[torch.Tensor]
"""One tensor for each layer."""


def initial_weights(shape: NetworkShape, *, seed: int, dtype: torch.dtype = torch.float32) -> Layers:
    """Draw initial weights; no data is used, so the seed may be public.

    ``he``: uniform with variance 2 / inputs for ReLU, else 1 / inputs. ``glorot``: normal with variance 2 / (inputs +
    outputs), so that a signal does not grow behind a narrow layer. The bias row is zero.

    Args:
        shape: The network.
        seed: The seed.
        dtype: Type of the weights.
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
    """Return [z, 1]: each row with a bias entry."""
    return torch.cat([z, torch.ones(len(z), 1, dtype=z.dtype)], dim=1)


def act(u: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation f(u) of pre-activations u."""
    if activation == "relu":
        return torch.relu(u)
    return torch.nn.functional.softplus(u, threshold=40) if activation == "softplus" else u


def slope(u: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation's derivative f′(u) at pre-activations u; it is 0 at ReLU's kink."""
    if activation == "relu":
        return (u > 0).to(u.dtype)
    return torch.sigmoid(u) if activation == "softplus" else torch.ones_like(u)


def bend(u: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation's second derivative f″(u) at pre-activations u."""
    if activation != "softplus":
        return torch.zeros_like(u)
    s = torch.sigmoid(u)
    return s * (1 - s)


def forward(weights: Sequence[torch.Tensor], x: torch.Tensor, activation: str) -> tuple[Layers, Layers]:
    """Return two lists with one tensor for each layer: its input with the bias entry, and its pre-activation.

    Args:
        weights: Weight matrices.
        x: Inputs [n, d].
        activation: Hidden activation.
    """
    inputs, preacts, z = [], [], x
    for k, w in enumerate(weights):
        inputs.append(with_bias(z))
        preacts.append(inputs[-1] @ w)
        z = act(preacts[-1], activation) if k < len(weights) - 1 else preacts[-1]
    return inputs, preacts


def output_loss(u: torch.Tensor, y: torch.Tensor, output: str) -> Float[torch.Tensor, "n"]:
    """Return the loss of each example: squared error, Σ(softplus(u) − yu), or cross-entropy with softmax.

    Args:
        u: Pre-activation of the last layer [n, k].
        y: Targets [n, k].
        output: ``mse``, ``bce`` or ``softmax``.
    """
    if output == "mse":
        return (u - y).square().sum(dim=1)
    if output == "bce":
        return (torch.nn.functional.softplus(u, threshold=40) - y * u).sum(dim=1)
    return torch.logsumexp(u, dim=1) - (y * u).sum(dim=1)


def output_factor(u: torch.Tensor, y: torch.Tensor, output: str) -> torch.Tensor:
    """Return the loss's gradient by the last pre-activation u, for targets y.

    By kind of output it is 2(u − y), sigmoid(u) − y, or softmax(u) − y.
    """
    if output == "mse":
        return 2 * (u - y)
    return (torch.sigmoid(u) if output == "bce" else torch.softmax(u, dim=1)) - y


def output_bend(u: torch.Tensor, output: str) -> torch.Tensor:
    """Return the loss's second derivative by each unit's last pre-activation u: 2, or s(1 − s) with s = sigmoid(u).

    Raises:
        InvalidInput: For softmax, whose units are coupled.
    """
    if output == "softmax":
        raise InvalidInput("second order of a softmax output", limit="bce or mse", remedy="--set order=1")
    return torch.full_like(u, 2.0) if output == "mse" else bend(u, "softplus")


def backprop(
    weights: Sequence[torch.Tensor], x: torch.Tensor, y: torch.Tensor, shape: NetworkShape
) -> tuple[Layers, Layers]:
    """Return input i and factor v of every layer: i ⊗ v is the gradient of an example's loss by the layer's weights.

    Args:
        weights: Weight matrices.
        x: Inputs [n, d].
        y: Targets [n, k].
        shape: The network.
    """
    inputs, preacts = forward(weights, x, shape.activation)
    factors = [output_factor(preacts[-1], y, shape.output)]
    for k in range(len(weights) - 1, 0, -1):
        factors.append((factors[-1] @ weights[k][:-1].T) * slope(preacts[k - 1], shape.activation))
    return inputs, factors[::-1]


def rank_one_norms(inputs: torch.Tensor, factors: torch.Tensor) -> Float[torch.Tensor, "n"]:
    """Return the Frobenius norm ‖i‖·‖v‖ of the outer product i ⊗ v of each example, in float64."""
    return inputs.double().norm(dim=1) * factors.double().norm(dim=1)


def clipped_layer_sum(
    inputs: Sequence[torch.Tensor],
    factors: Sequence[torch.Tensor],
    parts: ClippingPlan,
    names: Sequence[str],
    *,
    beside: int = 0,
) -> dict[str, torch.Tensor]:
    """Return the integer sum of clipped rank-one contributions of a batch.

    For each part, an example's i ⊗ v of all layers in the part are clipped together to the part's norm bound and
    divided by the part's scale. The sum over the batch is rounded to the grid (:func:`~research.grid.grid_sum`). Adding
    or removing one example therefore changes the integer sum of all parts by a norm of at most R, the number of grid
    steps in norm 1. An example with a non-finite norm contributes zero.

    Args:
        inputs: Input i of every layer, [n, d] each, with the bias entry.
        factors: Factor v of every layer, [n, h] each.
        parts: Clipping norms and the layers that each covers.
        names: Names of the layers.
        beside: Number of coordinates that are released together with these.

    Returns:
        Int64 sum of each layer, by name.
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
    """Return the factor v = 2(f − z)f′ of DP-MAC's hidden objective T = (z − f(u))², so that ∂T = i ⊗ v.

    Here z is the layer's coordinate and f its activation at the pre-activation u.
    """
    return 2 * (act(u, activation) - z_out) * slope(u, activation)


def residual_bend(z_out: torch.Tensor, u: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the second derivative of DP-MAC's hidden objective T = (z − f(u))² by u: 2[(f − z)f″ + f′²].

    For ReLU it is 2 where u > 0, else 0. Multiplied by iiᵀ, for the layer's input i, it is the second derivative of T
    by the weights.
    """
    f, first = act(u, activation), slope(u, activation)
    return 2 * ((f - z_out) * bend(u, activation) + first.square())
