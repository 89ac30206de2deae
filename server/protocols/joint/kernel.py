"""Computes how the codes of all public volumes change together when a network learns: its empirical tangent kernel.

``Joint.prepare`` calls it. A teacher is the public start trained for a few steps, so its codes differ from the start's
mostly along the leading directions of the kernel K = J D⁻¹ Jᵀ. Here J is the Jacobian of the codes with respect to the
weights (Jacot et al. 2018), and D is a diagonal matrix: the scale by which an Adam step divides each weight's gradient.
Few numbers therefore suffice to describe what teachers can contribute. The kernel depends only on public data: the
start, the images and the codec. A network with layers other than those that ``build_unet`` makes is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float

from common.codecs import shapes
from common.codecs.codec import LinearCodec

MAX_ROWS = 4096
"""Largest number of rows of a kernel. If all codes together are longer, only the leading coordinates of each are used.

Each row costs a backward pass, and the time of the eigendecomposition grows with the cube of the number of rows.
"""

MAX_WEIGHTS = 1 << 15
"""Largest number of weights that the kernel uses; of a larger network, this many weights are chosen at random."""

_DRAW = 0

ROWS_AT_ONCE = 16
"""Rows computed in one backward pass; more need more memory and are no faster."""

Convolution: TypeAlias = torch.nn.Conv3d | torch.nn.ConvTranspose3d


def tangent_kernel(
    model: torch.nn.Module,
    images: Float[np.ndarray, "n c x y z"],
    codec: LinearCodec,
    *,
    temperature: float,
    on_volume: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "nq nq"]:
    """Return the kernel of n volumes, [n·q, n·q], over the first q = :func:`coordinates` numbers of each volume's code.

    Args:
        model: The public start; it is not changed.
        images: Public volumes, float [n, c, x, y, z].
        codec: The study's codec.
        temperature: Temperature that sharpens the predictions; it is the same as for the teachers.
        on_volume: Called with the number of volumes done.

    Returns:
        Float64 array, symmetric.

    Raises:
        TypeError: If the network has other layers than :func:`~common.models.unet.build_unet` makes.
    """
    device = next(model.parameters()).device
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    picks = drawn_weights(sum(weight.numel() for weight in weights))
    size = coordinates(codec.dimension, volumes=len(images))
    jacobian = np.empty((len(images) * size, len(picks)), dtype=np.float32)
    row = 0
    for done, image in enumerate(images, start=1):
        volume = torch.tensor(image, dtype=torch.float32, device=device)
        slopes = _slopes(model, volume, codec, size=size, temperature=temperature)
        for part in slopes.split(ROWS_AT_ONCE):
            rows = weight_gradients(model, volume, part)
            jacobian[row : row + len(part)] = torch.cat([rows[weight] for weight in weights], dim=1)[:, picks].cpu()
            row += len(part)
        if on_volume is not None:
            on_volume(done)
    step = np.sqrt(np.square(jacobian).mean(axis=0))
    jacobian /= np.sqrt(np.where(step > 0, step, 1))
    kernel: np.ndarray = (jacobian @ jacobian.T).astype(np.float64)
    return kernel


def coordinates(dimension: int, *, volumes: int) -> int:
    """Return how many leading coordinates of each volume's code a kernel covers, within :data:`MAX_ROWS`.

    Args:
        dimension: Length of a code.
        volumes: Number of volumes.

    Returns:
        The number of coordinates, at least 1.

    >>> coordinates(64, volumes=128)
    32
    """
    return max(1, min(dimension, MAX_ROWS // volumes))


def _slopes(
    model: torch.nn.Module, image: Float[torch.Tensor, "c x y z"], codec: LinearCodec, *, size: int, temperature: float
) -> Float[torch.Tensor, "q k x y z"]:
    """Differentiate the first ``size`` coordinates of the sharpened prediction's code with respect to the logits."""
    scale = np.sqrt(codec.powers / codec.variances)[:size]
    rows = codec.basis[:size].astype(np.float64) * codec.metric * scale.reshape(-1, 1, 1, 1, 1)
    factor = codec.grid[0] // codec.metric.shape[0]
    with torch.no_grad():
        logits = model(image[None])
    logits.requires_grad_()
    pooled = torch.nn.functional.avg_pool3d(torch.softmax(logits / temperature, dim=1), factor)[0]
    logs = torch.log(pooled + shapes.PROBABILITY_FLOOR)
    basis = torch.tensor(rows.reshape(size, -1), dtype=torch.float32, device=image.device)
    codes = basis @ (logs[1:] - logs[:1]).flatten()
    return torch.cat([torch.autograd.grad(code, logits, retain_graph=True)[0] for code in codes])


def weight_gradients(
    model: torch.nn.Module, image: Float[torch.Tensor, "c x y z"], slopes: Float[torch.Tensor, "r k x y z"]
) -> dict[torch.nn.Parameter, Float[torch.Tensor, "r w"]]:
    """Propagate each of r gradients of the logits back to all weights. The result is that of r backward passes.

    Each convolution is run forward once, because all r rows have the same image. In the backward pass the r gradients
    are processed together, with one matrix product for a layer's weights (``make bench PARTS=kernel`` measures the
    gain).

    Args:
        model: The network.
        image: One volume [c, x, y, z].
        slopes: r gradients of the logits, each of k classes: [r, k, x, y, z].

    Returns:
        For each weight, its flattened gradients [r, w].

    Raises:
        TypeError: If the network has other layers than :func:`~common.models.unet.build_unet` makes.
    """
    found: dict[torch.nn.Parameter, torch.Tensor] = {}
    whole: dict[torch.nn.Module, torch.Tensor] = {}

    def single(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        whole[layer] = inputs[0]
        return inputs[0][:1].detach()

    def shared(layer: Convolution, _inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _SharedRows.apply(whole.pop(layer), layer.weight, output.detach(), layer, found)
        return result

    def bent(layer: torch.nn.PReLU, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        below = inputs[0].detach().clamp(max=0)
        output.register_hook(
            lambda slope: found.update({layer.weight: (slope * below).flatten(1).sum(1, keepdim=True)})
        )

    hooks = []
    for layer in model.modules():
        match layer:
            case torch.nn.Conv3d() | torch.nn.ConvTranspose3d():
                hooks += [layer.register_forward_pre_hook(single), layer.register_forward_hook(shared)]
            case torch.nn.PReLU(num_parameters=1):
                hooks.append(layer.register_forward_hook(bent))
            case _ if next(layer.parameters(recurse=False), None) is not None:
                raise TypeError(f"no gradients for {type(layer).__name__}")
    try:
        logits = model(image.expand(len(slopes), *image.shape))
        torch.autograd.grad(logits, list(model.parameters()), slopes, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    return found


class _SharedRows(torch.autograd.Function):  # type: ignore[misc]
    """A convolution of a batch that holds copies of one input.

    The forward pass repeats the output that was computed for one copy. The backward pass stores, for each copy, the
    gradient with respect to the layer's weights in ``found``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        _weight: torch.Tensor,
        output: torch.Tensor,
        layer: Convolution,
        found: dict[torch.nn.Parameter, torch.Tensor],
    ) -> torch.Tensor:
        ctx.inputs, ctx.layer, ctx.found = inputs, layer, found
        return output.expand(len(inputs), *output.shape[1:]).clone()

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        layer, inputs = ctx.layer, ctx.inputs
        weight, how = layer.weight.detach(), (layer.stride, layer.padding)
        before = None
        if isinstance(layer, torch.nn.ConvTranspose3d):
            rows = _windows(slopes, layer) @ inputs[0].detach().flatten(1).T
            rows = rows.transpose(1, 2)
            before = torch.nn.functional.conv3d(slopes, weight, None, *how)
        else:
            rows = slopes.flatten(2) @ _windows(inputs[:1].detach(), layer)[0].T
            if ctx.needs_input_grad[0]:
                before = torch.nn.grad.conv3d_input(inputs.shape, weight, slopes, *how)
        ctx.found[layer.weight] = rows.flatten(1)
        if layer.bias is not None:
            ctx.found[layer.bias] = slopes.flatten(2).sum(dim=2)
        return before, None, None, None, None


def _windows(volumes: Float[torch.Tensor, "n c x y z"], layer: Convolution) -> Float[torch.Tensor, "n w p"]:
    """Return the voxels that a convolution's window covers at each of its positions, for each volume."""
    padding = [n for side in reversed(layer.padding) for n in (side, side)]
    seen = torch.nn.functional.pad(volumes, padding)
    for axis, (size, step) in enumerate(zip(layer.kernel_size, layer.stride, strict=True), start=2):
        seen = seen.unfold(axis, size, step)
    return seen.permute(0, 1, 5, 6, 7, 2, 3, 4).flatten(5).flatten(1, 4)


def drawn_weights(count: int) -> torch.Tensor:
    """Return the indices of the weights that the kernel uses: all of them, or a fixed random choice.

    Args:
        count: Number of the network's weights.

    Returns:
        Int64 tensor of at most :data:`MAX_WEIGHTS` indices.
    """
    if count <= MAX_WEIGHTS:
        return torch.arange(count)
    return torch.as_tensor(np.random.default_rng(_DRAW).choice(count, MAX_WEIGHTS, replace=False))
