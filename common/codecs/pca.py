"""The linear codec: public mean shape, principal components of public shapes, water-filled weights, Wiener decoding.

Follows Fay et al. 2021, Algorithm 1, with four changes. The mean is subtracted (a public one); the components are taken
of log-ratios, which are bounded, where the paper's logits are not; the radius is spread over the coordinates by
water-filling, which also chooses l and never chooses 0, in place of eq (7)'s threshold; and decoding shrinks every
coordinate by its signal-to-noise ratio. All of it comes from public label maps, the planned noise and a seed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float, UInt8

from common.codecs import shapes
from common.codecs.codec import (
    Provenance,
    check_code,
    check_noise_std,
    check_probabilities,
    frozen,
    is_pooled,
    read_header,
    write_codec,
)
from common.config import CodecConfig
from common.errors import InvalidInput

FILL = 0.8
"""Share of the radius filled in the mean square, √Σp = FILL · C: room for codes longer than the average one."""

METRIC_FLOOR = 0.02
SMALLEST_VARIANCE = 1e-9  # of the largest: below lies only rounding


@dataclass(frozen=True, slots=True, eq=False)
class PcaCodec:
    """``centre`` + Σ z_i · ``basis``_i / ``metric`` in the space of log-ratios; the code is w_i · z_i.

    ``variances`` λ_i are those of z_i over public shapes; ``powers`` p_i those of the code's coordinates, so
    w_i = √(p_i / λ_i). ``metric`` is √(1 - Σ_c p̄_c² + .02) of the public mean shape p̄: voxels whose label is in doubt
    count most.
    """

    basis: Float[np.ndarray, "l k u v w"]
    centre: Float[np.ndarray, "k u v w"]
    metric: Float[np.ndarray, "u v w"]
    variances: Float[np.ndarray, "l"]
    powers: Float[np.ndarray, "l"]
    radius: float
    grid: tuple[int, int, int]
    provenance: Provenance
    name: ClassVar[str] = "pca"

    def __post_init__(self) -> None:
        for field, dtype in _DTYPES.items():
            object.__setattr__(self, field, frozen(getattr(self, field), dtype))
        object.__setattr__(self, "grid", tuple(self.grid))
        arrays = [getattr(self, field) for field in _DTYPES]
        fits = (
            self.basis.ndim == 5
            and self.basis.shape[0] == len(self.variances) == len(self.powers) >= 1
            and self.centre.ndim == 4
            and self.basis.shape[1:] == self.centre.shape
            and self.centre.shape[1:] == self.metric.shape
            and is_pooled(self.grid, self.metric.shape)
        )
        if not fits or not all(np.isfinite(array).all() for array in arrays):
            raise InvalidInput("pca codec", limit="finite arrays of matching shapes")
        if min(self.metric.min(), self.variances.min(), self.powers.min()) <= 0:
            raise InvalidInput("pca codec", limit="metric, variances and powers above 0")
        if not 0 < float(self.powers.sum()) <= self.radius**2:
            raise InvalidInput(
                "pca codec: power", value=float(self.powers.sum()), limit=f"at most C² = {self.radius**2}"
            )

    @property
    def dimension(self) -> int:
        return len(self.powers)

    @property
    def labels(self) -> int:
        return len(self.centre) + 1

    @property
    def linear(self) -> PcaCodec:
        return self

    @property
    def _factor(self) -> int:
        return self.grid[0] // int(self.metric.shape[0])

    def encode(self, probabilities: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "l"]:
        """See :class:`~common.codecs.codec.Codec`: w · basis · metric · (log-ratios - centre)."""
        values = check_probabilities(probabilities, labels=self.labels, grid=self.grid)
        offset = (shapes.to_log_ratios(values, factor=self._factor) - self.centre) * self.metric
        code: np.ndarray = self.basis.reshape(self.dimension, -1).astype(np.float64) @ offset.ravel()
        code *= np.sqrt(self.powers / self.variances)
        return code

    def decode(self, mean_code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "c x y z"]:
        """See :class:`~common.codecs.codec.Codec`. Each coordinate is shrunk by p_i / (p_i + σ²), Wiener's weight."""
        code = check_code(mean_code, dimension=self.dimension)
        shrunk = code * self.powers / (self.powers + check_noise_std(noise_std) ** 2)
        coordinates = shrunk * np.sqrt(self.variances / self.powers)
        offset = (coordinates @ self.basis.reshape(self.dimension, -1).astype(np.float64)).reshape(self.centre.shape)
        return shapes.to_probabilities(self.centre + offset / self.metric, factor=self._factor)

    def to_bytes(self) -> bytes:
        return write_codec(self, {field: getattr(self, field) for field in _DTYPES}, grid=True)

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PcaCodec:
        fields = read_header(header, grid=True, arrays=arrays, dtypes=_DTYPES)
        if arrays["metric"].ndim != 3 or arrays["variances"].ndim != 1 or arrays["powers"].ndim != 1:
            raise InvalidInput("pca codec", limit="finite arrays of matching shapes")
        return cls(**fields)

    @classmethod
    def fit(
        cls,
        label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
        *,
        labels: int,
        config: CodecConfig,
        provenance: Provenance,
    ) -> PcaCodec:
        """Centre and metric from the maps as they are; components from the maps and their augmented copies.

        The components are those of the samples' Gram matrix in float64: at most one a sample. Maps are pooled one after
        the other, so memory is that of one map and of the coarse ones; on grids pooled by 4 or 8, copies are deformed
        at half that resolution.
        """
        grid = label_maps[0].shape
        factor = shapes.pooling_factor(grid, labels=labels)
        coarse = factor // 2 if factor > 2 else 1
        exact = [shapes.pool(shapes.one_hot(m, labels=labels).astype(np.float64), factor=factor) for m in label_maps]
        centre, metric = centre_and_metric(exact, factor=1)
        copies = shapes.augmented(
            label_maps, labels=labels, copies=config.augmentations, seed=provenance.seed, coarse=coarse
        )
        ratios = [shapes.to_log_ratios(m, factor=1) for m in exact]
        ratios += [shapes.to_log_ratios(m.astype(np.float64), factor=factor // coarse) for m in copies]
        samples = np.stack([(r * metric).ravel() for r in ratios])
        basis, variances = principal_components(samples, most=config.max_dimension)
        power = (FILL * config.radius) ** 2
        if config.terms.framed:
            powers = power * variances / variances.sum()
        else:
            powers = coordinate_powers(variances, config=config, noise_std=provenance.noise_std, power=power)
        kept = powers > 0
        return cls(
            basis=basis[kept].reshape(-1, labels - 1, *metric.shape),
            centre=centre,
            metric=metric,
            variances=variances[kept],
            powers=powers[kept],
            radius=float(config.radius),
            grid=(grid[0], grid[1], grid[2]),
            provenance=provenance,
        )


def centre_and_metric(
    exact: Sequence[Float[np.ndarray, "c x y z"]], *, factor: int
) -> tuple[Float[np.ndarray, "k u v w"], Float[np.ndarray, "u v w"]]:
    """The public mean shape's log-ratios on the coarse grid, and the voxels' weights √(1 - Σ_c p̄_c² + .02)."""
    mean_shape = np.stack(exact).mean(axis=0, dtype=np.float64)
    doubt = 1 - (shapes.pool(mean_shape, factor=factor) ** 2).sum(axis=0)
    return shapes.to_log_ratios(mean_shape, factor=factor), np.sqrt(np.maximum(doubt, 0) + METRIC_FLOOR)


def principal_components(
    samples: Float[np.ndarray, "n d"], *, most: int
) -> tuple[Float[np.ndarray, "l d"], Float[np.ndarray, "l"]]:
    """Orthonormal components and their variances, largest first, at most ``most``; float64.

    By the n × n Gram matrix, since n is far below d. Components of no variance are left out; each has its largest entry
    positive, so the result does not depend on the solver's choice of sign. Samples that are all alike are refused.
    """
    offsets = samples - samples.mean(axis=0)
    values, vectors = np.linalg.eigh(offsets @ offsets.T / len(samples))
    values, vectors = values[::-1], vectors[:, ::-1]
    kept = min(most, int((values > SMALLEST_VARIANCE * max(values[0], 0.0)).sum()))
    if kept == 0 or values[0] <= 0:
        raise InvalidInput("public label maps are all alike", remedy="give maps of different patients")
    basis = vectors[:, :kept].T @ offsets / np.sqrt(len(samples) * values[:kept, None])
    largest = np.abs(basis).argmax(axis=1)
    basis *= np.sign(basis[np.arange(kept), largest])[:, None]
    return basis, values[:kept]


def coordinate_powers(
    variances: Float[np.ndarray, "l"], *, config: CodecConfig, noise_std: float, power: float
) -> Float[np.ndarray, "l"]:
    """Divide a code's power over its coordinates.

    Args:
        variances: Variances of the components, in descending order, positive.
        config: The study's codec; with ``dimension`` just so many coordinates are used, by the rule for no noise.
        noise_std: Planned noise on the mean code, in the code's units.
        power: Sum of the result, in squared units of the code.

    Returns:
        Variances p_i of the code's coordinates; 0 for the components that are left out.

    Raises:
        InvalidInput: If the public label maps have fewer components than ``dimension``.
    """
    if not config.dimension:
        return water_fill(variances, noise_std=noise_std, power=power)
    check_dimension(config.dimension, available=len(variances))
    result: np.ndarray = np.zeros_like(variances)
    result[: config.dimension] = water_fill(variances[: config.dimension], noise_std=0.0, power=power)
    return result


def check_dimension(dimension: int, *, available: int) -> None:
    """Raise InvalidInput if a study asks for more coordinates than its public label maps have components."""
    if dimension > available:
        raise InvalidInput(
            "codec.dimension",
            value=dimension,
            limit=f"at most {available}, the components of these public label maps",
            remedy="lower it, or give more maps or augmentations",
        )


def water_fill(variances: Float[np.ndarray, "l"], *, noise_std: float, power: float) -> Float[np.ndarray, "l"]:
    """The variances p_i of the code's coordinates, Σp = ``power``, that leave the least error after decoding.

    Minimises Σ λ_i σ² / (p_i + σ²): p_i = max(0, √(λ_i σ² / ν) - σ²) with ν set by the sum. ``variances`` in
    descending order, positive. The first is always above 0, so l ≥ 1. With σ = 0 it is the limit, p_i ∝ √λ_i.
    Source: reverse water-filling for the linear channel (Lee & Petersen 1976); cf. Fay et al. 2021, eq (7).
    """
    roots = np.sqrt(variances)
    noise = noise_std**2
    counts = np.arange(1, len(roots) + 1)
    lowest = roots * (power + counts * noise) / np.cumsum(roots) - noise  # p_k were the first k coordinates active
    active = int(np.flatnonzero(lowest > 0)[-1]) + 1
    result: np.ndarray = np.zeros_like(roots)
    result[:active] = roots[:active] * (power + active * noise) / roots[:active].sum() - noise
    return result


_DTYPES: dict[str, type[np.floating[Any]]] = {
    "basis": np.float32,
    "centre": np.float64,
    "metric": np.float64,
    "variances": np.float64,
    "powers": np.float64,
}
