"""How the codes of all public volumes move together when a network learns: its empirical tangent kernel.

A teacher that begins from the public start and is trained for a few steps moves the codes of all volumes along the
start's own derivatives, K = J D⁻¹ Jᵀ with J the Jacobian of the codes by the weights (Jacot et al. 2018) and D the
scale an Adam step divides by. So what teachers can have to say about these volumes lies mostly in the kernel's leading
directions: with them few numbers need to be sent. Public: the start, the images and the codec. Refuses grids on which
the whole network cannot be differentiated at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float

from common.codecs import shapes
from common.codecs.pca import PcaCodec
from common.errors import InvalidInput
from common.models.fit import WHOLE_VOXELS

MAX_ROWS = 4096
"""A kernel's rows at most: of so many volumes that their codes together are longer, the leading coordinates count. Each
row costs a backward pass, and the kernel's directions the cube of their number."""

MAX_WEIGHTS = 1 << 15
"""Of a larger network this many weights, drawn at random, stand for all."""

_DRAW = 0


def tangent_kernel(
    model: torch.nn.Module,
    images: Float[np.ndarray, "n c x y z"],
    codec: PcaCodec,
    *,
    temperature: float,
    on_volume: Callable[[int], None] | None = None,
) -> Float[np.ndarray, "k k"]:
    """The kernel [n·m, n·m] over the first m = :func:`coordinates` of the volumes' codes in turn.

    ``temperature`` sharpens the predictions as the teachers' are. ``on_volume`` is called with the number of volumes
    done. The model is not changed.
    """
    if math.prod(images.shape[2:]) > WHOLE_VOXELS:
        raise InvalidInput(
            "voxels of a joint query's volumes",
            value=math.prod(images.shape[2:]),
            limit=f"at most {WHOLE_VOXELS}",
            remedy="set codec.joint = false, or a coarser data.grid",
        )
    device = next(model.parameters()).device
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    picks = drawn_weights(sum(weight.numel() for weight in weights))
    size = coordinates(codec.dimension, volumes=len(images))
    jacobian = np.empty((len(images) * size, len(picks)), dtype=np.float32)
    row = 0
    for done, image in enumerate(images, start=1):
        volume = torch.tensor(image, dtype=torch.float32, device=device)
        for code in _codes(model, volume, codec, size=size, temperature=temperature):
            gradients = torch.autograd.grad(code, weights, retain_graph=True)
            jacobian[row] = torch.cat([gradient.flatten() for gradient in gradients])[picks].cpu().numpy()
            row += 1
        if on_volume is not None:
            on_volume(done)
    step = np.sqrt(np.square(jacobian).mean(axis=0))
    jacobian /= np.sqrt(np.where(step > 0, step, 1))
    kernel: np.ndarray = (jacobian @ jacobian.T).astype(np.float64)
    return kernel


def coordinates(dimension: int, *, volumes: int) -> int:
    """How many leading coordinates of each volume's code a kernel covers: all, or as many as fit :data:`MAX_ROWS`."""
    return max(1, min(dimension, MAX_ROWS // volumes))


def _codes(
    model: torch.nn.Module, image: Float[torch.Tensor, "c x y z"], codec: PcaCodec, *, size: int, temperature: float
) -> Float[torch.Tensor, "m"]:
    """The ``size`` leading coordinates of ``codec.encode`` of the sharpened prediction, up to a constant,
    differentiable."""
    scale = np.sqrt(codec.powers / codec.variances)[:size]
    rows = codec.basis[:size].astype(np.float64) * codec.metric * scale.reshape(-1, 1, 1, 1, 1)
    factor = codec.grid[0] // codec.metric.shape[0]
    logits = model(image[None])
    pooled = torch.nn.functional.avg_pool3d(torch.softmax(logits / temperature, dim=1), factor)[0]
    logs = torch.log(pooled + shapes.PROBABILITY_FLOOR)
    basis = torch.tensor(rows.reshape(size, -1), dtype=torch.float32, device=image.device)
    result: torch.Tensor = basis @ (logs[1:] - logs[:1]).flatten()
    return result


def drawn_weights(count: int) -> torch.Tensor:
    """Which of a network's ``count`` weights the kernel is taken over: all of them, or a fixed draw."""
    if count <= MAX_WEIGHTS:
        return torch.arange(count)
    return torch.as_tensor(np.random.default_rng(_DRAW).choice(count, MAX_WEIGHTS, replace=False))
