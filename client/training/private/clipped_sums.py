"""Clipped sums over patients as exact integers, and their noise: what every private trainer releases.

A patient's contribution is a vector in K parts (all parameters, or one part a layer or block). Part k is clipped to Θ_k
and divided by Θ_k·r_k with Σ1/r_k² ≤ 1, so that the whole vector has norm at most 1: one Gaussian mechanism for all
parts (DP-MAC's Appendix I has r_k = √(MK)). The vector is then put on the integer grid 2⁻²⁴ by truncation toward zero,
its norm tested in exact integers, and summed in int64. The noise is the rounded Gaussian that protects releases
(:mod:`common.privacy.gaussian`): rounding commutes with integer shifts, so no floating-point caveat is left in the
mechanism. A patient with a NaN or infinite entry anywhere contributes zero.
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
from common.privacy.gaussian import Sampler as NoiseSampler
from common.privacy.gaussian import rounded_gaussian

RADIUS_INT = 1 << 24
"""R: a patient's whole vector of norm 1 in grid steps. Truncation moves a coordinate by less than 6e-8 of the norm."""

_SHRINK = 1 - 2.0**-17  # more than float32's rounding of a norm over a million entries; the integer test decides
_RETRY = 1 - 2.0**-10

Vectors = Mapping[str, torch.Tensor]
"""A patient's gradients by parameter name, [b, *shape] for b patients. Sensitive until noised."""


@dataclass(frozen=True, slots=True)
class Parts:
    """How a contribution is divided, clipped and scaled: ``names[k]`` are the entries of part k, Θ_k its norm bound.

    ``shares`` are r_k, by default √K for all; Σ1/r_k² above 1 is refused, since the whole vector's norm would be too.
    """

    names: tuple[tuple[str, ...], ...]
    clips: tuple[float, ...]
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.shares:
            object.__setattr__(self, "shares", (sqrt(len(self.names)),) * len(self.names))
        if not self.names or not len(self.names) == len(self.clips) == len(self.shares):
            raise InvalidInput("parts of a contribution", value=len(self.names), limit="one clip and one share each")
        if not all(isfinite(clip) and clip > 0 for clip in self.clips):
            raise InvalidInput("clipping norm", value=self.clips, limit="finite numbers above 0")
        if not sum(1 / share**2 for share in self.shares) <= 1 + 1e-9:
            raise InvalidInput("shares of the parts", value=self.shares, limit="sum of 1/r^2 at most 1")

    def scale(self, part: int) -> float:
        """Θ_k·r_k: what a grid step of R is worth in part k."""
        return self.clips[part] * self.shares[part]

    @property
    def order(self) -> tuple[str, ...]:
        return tuple(name for part in self.names for name in part)


def one_part(names: tuple[str, ...], clip: float) -> Parts:
    """All entries under one clip: DP-SGD and DP-BBB."""
    return Parts(names=(names,), clips=(clip,))


def integer_sum(
    vectors: Vectors, parts: Parts, *, counted: Bool[torch.Tensor, "b"] | None = None
) -> dict[str, Int64[torch.Tensor, "..."]]:
    """Σ over patients of the clipped, scaled, truncated contributions, by entry name.

    Guarantee: adding or removing one patient moves the concatenated sum by at most :data:`RADIUS_INT` in ℓ2, exactly.
    ``counted`` says whose vectors count, everybody's by default.
    Edge cases: a patient with a non-finite entry (or a norm beyond the dtype) counts as zero; no patient gives zeros.
    """
    norms = {name: torch.linalg.vector_norm(vectors[name].flatten(1), dim=1).double() for name in parts.order}
    used = torch.isfinite(torch.stack(list(norms.values()))).all(dim=0)
    if counted is not None:
        used = used & counted
    scaled: dict[str, torch.Tensor] = {}
    for index, names in enumerate(parts.names):
        norm = torch.stack([norms[name].square() for name in names]).sum(dim=0).sqrt()
        factor = torch.clamp(parts.clips[index] / norm, max=1.0) * (RADIUS_INT * _SHRINK / parts.scale(index))
        factor = torch.where(used & torch.isfinite(factor), factor, torch.zeros_like(factor))
        for name in names:
            entry = vectors[name] * _wide(factor, vectors[name])
            scaled[name] = torch.where(_wide(used, entry), entry, 0.0)
    # integers in float64: exact, as are their squares' sums, all below 2^53
    whole = {name: torch.trunc(entry).double() for name, entry in scaled.items()}
    while bool((over := _squares(whole) > RADIUS_INT**2).any()):
        for name in whole:
            scaled[name] = torch.where(_wide(over, scaled[name]), scaled[name] * _RETRY, scaled[name])
            whole[name] = torch.trunc(scaled[name]).double()
    return {name: entry.sum(dim=0).to(torch.int64) for name, entry in whole.items()}


def zeros_like(parameters: Vectors, parts: Parts) -> dict[str, Int64[torch.Tensor, "..."]]:
    """The sum over no patient: an empty batch is noised and charged like any other."""
    return {name: torch.zeros(parameters[name].shape, dtype=torch.int64) for name in parts.order}


def noised(
    total: Mapping[str, Int64[torch.Tensor, "..."]],
    parts: Parts,
    *,
    noise_multiplier: Fraction,
    expected: float,
    noise: NoiseSampler = rounded_gaussian,
) -> dict[str, Float[torch.Tensor, "..."]]:
    """(sum + N(0, z²R²))·Θ_k·r_k / (R·qn): the private mean, float64, divided by the constant qn.

    One fresh draw over the concatenation of all parts. ``noise`` is the production sampler; tests inject others.
    """
    sizes = [total[name].numel() for name in parts.order]
    drawn = torch.from_numpy(noise(sum(sizes), noise_multiplier * RADIUS_INT))
    result: dict[str, torch.Tensor] = {}
    pieces = dict(zip(parts.order, torch.split(drawn, sizes), strict=True))
    for index, names in enumerate(parts.names):
        worth = parts.scale(index) / (RADIUS_INT * expected)
        for name in names:
            result[name] = (total[name] + pieces[name].reshape(total[name].shape)).to(torch.float64) * worth
    return result


def silent(size: int, _noise_std: Fraction) -> Int64[np.ndarray, "l"]:
    """No noise: for trainings that claim no privacy (the ε = ∞ column of a table)."""
    return np.zeros(size, dtype=np.int64)


def _squares(entries: Vectors) -> Float[torch.Tensor, "b"]:
    """Σq² a patient."""
    flat = [entry.flatten(1) for entry in entries.values()]
    return torch.stack([torch.einsum("bd,bd->b", entry, entry) for entry in flat]).sum(dim=0)


def _wide(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[b] → [b, 1, …] in the dtype of ``like`` (booleans stay)."""
    shaped = values.reshape(-1, *(1,) * (like.dim() - 1))
    return shaped if shaped.dtype is torch.bool else shaped.to(like.dtype)
