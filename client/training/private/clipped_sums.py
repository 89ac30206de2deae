"""Sums clipped patient vectors as exact integers and adds noise; this is what every private trainer releases.

1. A patient's contribution is a vector in K parts (all parameters, or one part for each layer or block). Part k is
   clipped to norm Θ_k and divided by Θ_k·r_k. The numbers r_k, the *shares*, satisfy Σ1/r_k² ≤ 1, so the whole vector
   has norm at most 1 and one Gaussian mechanism covers all parts. (DP-MAC, Appendix I, has r_k = √(MK), for M vectors
   in each of K layers.)
2. The vector is truncated toward zero onto the integer grid 2⁻²⁴, its norm is tested in exact integers, and the vectors
   are summed in int64.
3. The noise is the same rounded Gaussian as for releases (:mod:`common.privacy.gaussian`). Rounding commutes with
   integer shifts, so the noise has no floating-point error. Each patient's vector must not depend on who else is in the
   batch (:mod:`client.training.private.strategies_3d`).

A patient with a NaN or infinite entry contributes zero. It refuses parts for which Σ1/r_k² exceeds 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isfinite, sqrt

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64

from common.errors import InvalidInput
from common.privacy.gaussian import MAX_SIZE, rounded_gaussian
from common.privacy.gaussian import Sampler as NoiseSampler

RADIUS_INT = 1 << 24
"""R, the number of grid steps in norm 1. Truncation changes a coordinate by less than 6e-8 of the norm."""

_SHRINK = 1 - 2.0**-17  # margin above float32's rounding of a norm over a million entries; the integer test decides
_RETRY = 1 - 2.0**-10

Vectors = Mapping[str, torch.Tensor]
"""Gradients by parameter name, of shape [b, *shape] for b patients. Sensitive until noised."""


@dataclass(frozen=True, slots=True)
class ClippingPlan:
    """How a patient's contribution to a sum is divided into parts, clipped and scaled.

    Attributes:
        names: For each part, the names of the parameters (entries of the vector) in it.
        clips: Norm bound Θ_k of each part k.
        shares: The factor r_k of each part k; by default √K, for K parts. Σ1/r_k² must not exceed 1, which bounds the
            whole vector's norm by 1.

    Raises:
        InvalidInput: If there is no part, a part lacks a clip or share, a clip is not finite and positive, or the
            shares are too small.
    """

    names: tuple[tuple[str, ...], ...]
    clips: tuple[float, ...]
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.shares:
            object.__setattr__(self, "shares", (sqrt(len(self.names)),) * len(self.names))
        if not self.names or not len(self.names) == len(self.clips) == len(self.shares):
            raise InvalidInput(
                "parts of a contribution", value=len(self.names), limit="at least one, each with one clip and one share"
            )
        if not all(isfinite(clip) and clip > 0 for clip in self.clips):
            raise InvalidInput("clipping norm", value=self.clips, limit="finite numbers above 0")
        if not sum(1 / share**2 for share in self.shares) <= 1 + 1e-9:
            raise InvalidInput(
                "shares r of the parts", value=self.shares, limit="shares whose sum of 1/r^2 is at most 1"
            )

    def scale(self, part: int) -> float:
        """Return Θ_k·r_k, a part's norm bound times its share.

        A patient's part is divided by this factor before the sum, and the noisy sum is multiplied by it. In the sum, a
        whole contribution has norm at most 1, which is :data:`RADIUS_INT` grid steps.

        Args:
            part: Number k of the part.

        Returns:
            The factor.
        """
        return self.clips[part] * self.shares[part]

    @property
    def order(self) -> tuple[str, ...]:
        """The entry names of all parts, in order."""
        return tuple(name for part in self.names for name in part)


def one_part(names: tuple[str, ...], clip: float) -> ClippingPlan:
    """Return a division with a single part: all entries are clipped together, as in DP-SGD and DP-BBB.

    Args:
        names: Names of the entries.
        clip: Norm bound Θ of the whole contribution.

    Returns:
        The parts.
    """
    return ClippingPlan(names=(names,), clips=(clip,))


def integer_sum(
    vectors: Vectors, parts: ClippingPlan, *, counted: Bool[torch.Tensor, "b"] | None = None
) -> dict[str, Int64[torch.Tensor, "..."]]:
    """Sum the clipped, scaled and truncated contributions over patients.

    Guarantee: adding or removing one patient moves the concatenated sum by at most :data:`RADIUS_INT` in ℓ2, exactly. A
    patient with a non-finite entry counts as zero, and so does one whose norm or scaling factor is not finite in the
    dtype.

    Args:
        vectors: Gradients by entry name, each of shape [b, *shape]. # sensitive
        parts: How a contribution is divided and clipped.
        counted: Which patients count, of shape [b]; None for all.

    Returns:
        int64 sums by entry name, in grid steps of 2⁻²⁴; zeros for no patient. # sensitive until noised
    """
    norms = {name: torch.linalg.vector_norm(vectors[name].flatten(1), dim=1).double() for name in parts.order}
    used = torch.isfinite(torch.stack(list(norms.values()))).all(dim=0)
    if counted is not None:
        used = used & counted
    scaled: dict[str, torch.Tensor] = {}
    for index, names in enumerate(parts.names):
        norm = torch.stack([norms[name].square() for name in names]).sum(dim=0).sqrt()
        factor = torch.clamp(parts.clips[index] / norm, max=1.0) * (RADIUS_INT * _SHRINK / parts.scale(index))
        for name in names:
            fits = used & torch.isfinite(factor.to(vectors[name].dtype))
            entry = vectors[name] * _wide(torch.where(fits, factor, 0.0), vectors[name])
            scaled[name] = torch.where(_wide(used, entry), entry, 0.0)
    # integers in float64 are exact, and so are the sums of their squares: all are below 2^53
    whole = {name: torch.trunc(entry).double() for name, entry in scaled.items()}
    while bool((over := _squares(whole) > RADIUS_INT**2).any()):
        for name in whole:
            scaled[name] = torch.where(_wide(over, scaled[name]), scaled[name] * _RETRY, scaled[name])
            whole[name] = torch.trunc(scaled[name]).double()
    return {name: entry.sum(dim=0).to(torch.int64) for name, entry in whole.items()}


def zeros_like(parameters: Vectors, parts: ClippingPlan) -> dict[str, Int64[torch.Tensor, "..."]]:
    """Return the sum of an empty batch: zeros. Noise is added to it, and it is charged, as for every other batch.

    Args:
        parameters: Tensors with the entries' shapes.
        parts: How a contribution is divided.

    Returns:
        int64 zeros by entry name.
    """
    return {name: torch.zeros(parameters[name].shape, dtype=torch.int64) for name in parts.order}


def noised(
    total: Mapping[str, Int64[torch.Tensor, "..."]],
    parts: ClippingPlan,
    *,
    noise_multiplier: Fraction,
    expected: float,
    noise: NoiseSampler = rounded_gaussian,
) -> dict[str, Float[torch.Tensor, "..."]]:
    """Add rounded Gaussian noise to a sum of contributions, and scale it to their private mean.

    The mean of part k is (sum + noise)·Θ_k·r_k / (R·q·n). The noise has standard deviation z·R on every coordinate and
    is drawn anew, once for all parts together. Θ_k is the part's norm bound, r_k its share (:class:`ClippingPlan`), and
    R = :data:`RADIUS_INT` the number of grid steps in norm 1.

    Args:
        total: int64 sums by entry name. # sensitive until noised
        parts: How a contribution is divided.
        noise_multiplier: The noise multiplier z.
        expected: Expected number q·n of patients of a step: the sampling rate q times the number n of slots.
        noise: The noise sampler; tests inject another one.

    Returns:
        The private mean by entry name, float64.
    """
    sizes = [total[name].numel() for name in parts.order]
    blocks = [min(MAX_SIZE, sum(sizes) - start) for start in range(0, sum(sizes), MAX_SIZE)]
    drawn = torch.cat([torch.from_numpy(noise(size, noise_multiplier * RADIUS_INT)) for size in blocks])
    result: dict[str, torch.Tensor] = {}
    pieces = dict(zip(parts.order, torch.split(drawn, sizes), strict=True))
    for index, names in enumerate(parts.names):
        worth = parts.scale(index) / (RADIUS_INT * expected)
        for name in names:
            result[name] = (total[name] + pieces[name].reshape(total[name].shape)).to(torch.float64) * worth
    return result


def silent(size: int, _noise_std: Fraction) -> Int64[np.ndarray, "l"]:
    """Return zeros instead of noise, for trainings that claim no privacy (the ε = ∞ column of a table).

    Args:
        size: Number of entries.
        _noise_std: Ignored.

    Returns:
        int64 zeros of shape [l].
    """
    return np.zeros(size, dtype=np.int64)


def _squares(entries: Vectors) -> Float[torch.Tensor, "b"]:
    """Return the sum of squares of each patient."""
    flat = [entry.flatten(1) for entry in entries.values()]
    return torch.stack([torch.einsum("bd,bd->b", entry, entry) for entry in flat]).sum(dim=0)


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape [b] to [b, 1, …] in the dtype of ``like``; booleans stay booleans."""
    shaped = values.reshape(-1, *(1,) * (like.dim() - 1))
    return shaped if shaped.dtype is torch.bool else shaped.to(like.dtype)
