"""The linear codec ``pca``: principal components of public shapes, water-filled weights, Wiener decoding.

The codec follows Fay et al. 2021, Algorithm 1, with four changes:

1. The public mean shape is subtracted.
2. The components are those of log-ratios, which are bounded; the paper's logits are not.
3. Water-filling spreads the radius over the coordinates and chooses the length l of a code, which is at least 1. It
   replaces the threshold of the paper's eq (7). If the study's protocol uses frames (joint, appearance), the frame
   spreads the radius instead: the codec then keeps every component, and the coordinates' variances are proportional
   to those of the components.
4. Decoding shrinks every coordinate by its signal-to-noise ratio.

Everything is computed from public label maps, the planned noise and a seed. The planner and the joint protocol use the
functions of this module too. Label maps that are all alike are refused. :mod:`common.codecs.codec` explains the letters
of the arrays' shapes.
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
from common.data.label_maps import one_hot
from common.errors import InvalidInput

FILL = 0.8
"""Root mean square norm of a code as a share of the radius, √Σp = FILL · C. It is below 1 so that fewer codes of
above-average norm are clipped."""

METRIC_FLOOR = 0.02
SMALLEST_VARIANCE = 1e-9  # as a share of the largest; smaller variances are rounding errors


@dataclass(frozen=True, slots=True, eq=False)
class PcaCodec:
    """The fitted linear codec (:class:`~common.codecs.codec.LinearCodec`): the code consists of w_i · z_i.

    Here z_i are a shape's coordinates: ``centre`` + Σ z_i · ``basis``_i / ``metric`` are its log-ratios. The weights
    are w_i = √(p_i / λ_i), from the variances λ_i of the z_i and p_i of the code's coordinates.

    Attributes:
        basis: Directions, float32 [l, s, u, v, w]. :meth:`fit` makes them orthonormal, so that decoding without noise
            inverts encoding; this is not checked, and no bound on a code depends on it.
        centre: Log-ratios of the public mean shape, float64 [s, u, v, w].
        metric: Weight of each voxel, float64 [u, v, w]: √(1 − Σ_j p̄_j² + .02), where p̄_j is the mean probability of
            class j. Voxels whose label is uncertain weigh most.
        variances: Variances λ_i of z_i over public shapes, [l].
        powers: Variances p_i of the code's coordinates over public shapes, [l]; their sum is at most C².
        radius: Clipping norm C.
        grid: Shape of a volume in voxels.
        provenance: Which public label maps it was fitted on.

    Raises:
        InvalidInput: If shapes do not match, or a value is outside its range.
    """

    basis: Float[np.ndarray, "l s u v w"]
    centre: Float[np.ndarray, "s u v w"]
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
            and self.variances.ndim == self.powers.ndim == 1
            and self.basis.shape[0] == len(self.variances) == len(self.powers) >= 1
            and self.centre.ndim == 4
            and self.basis.shape[1:] == self.centre.shape
            and self.centre.shape[1:] == self.metric.shape
            and is_pooled(self.grid, self.metric.shape)
        )
        if not fits or not all(np.isfinite(array).all() for array in arrays):
            raise InvalidInput("arrays of a pca codec", limit="arrays of finite numbers whose shapes match")
        if min(self.metric.min(), self.variances.min(), self.powers.min()) <= 0:
            raise InvalidInput("a pca codec's metric, variances or powers", limit="numbers above 0")
        if not 0 < float(self.powers.sum()) <= self.radius**2:
            raise InvalidInput(
                "pca codec: power", value=float(self.powers.sum()), limit=f"at most C² = {self.radius**2}"
            )

    @property
    def dimension(self) -> int:
        """Length l of a code."""
        return len(self.powers)

    @property
    def labels(self) -> int:
        """Number of classes, the background included."""
        return len(self.centre) + 1

    @property
    def linear(self) -> PcaCodec:
        """The codec itself, because it is linear."""
        return self

    @property
    def _factor(self) -> int:
        return self.grid[0] // int(self.metric.shape[0])

    def encode(self, probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "l"]:
        """Encode class probabilities (:meth:`Codec.encode`): weights · basis · metric · (log-ratios − centre).

        Returns:
            Float64 array [l], not yet clipped.

        Raises:
            InvalidInput: If the array has another shape or holds no probabilities.
        """
        values = check_probabilities(probabilities, labels=self.labels, grid=self.grid)
        offset = (shapes.to_log_ratios(values, factor=self._factor) - self.centre) * self.metric
        code: np.ndarray = self.basis.reshape(self.dimension, -1).astype(np.float64) @ offset.ravel()
        code *= np.sqrt(self.powers / self.variances)
        return code

    def decode(self, mean_code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "k x y z"]:
        """Decode a mean code (:meth:`Codec.decode`).

        Each coordinate is shrunk by Wiener's weight p / (p + σ²), where p is the coordinate's variance (``powers``).
        """
        code = check_code(mean_code, dimension=self.dimension)
        shrunk = code * self.powers / (self.powers + check_noise_std(noise_std) ** 2)
        coordinates = shrunk * np.sqrt(self.variances / self.powers)
        offset = (coordinates @ self.basis.reshape(self.dimension, -1).astype(np.float64)).reshape(self.centre.shape)
        return shapes.to_probabilities(self.centre + offset / self.metric, factor=self._factor)

    def to_bytes(self) -> bytes:
        """Return the codec as bytes (:meth:`Codec.to_bytes`)."""
        return write_codec(self, {field: getattr(self, field) for field in _DTYPES}, grid=True)

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PcaCodec:
        """Rebuild the codec (:meth:`Codec.from_parts`).

        Args:
            header: The header of the codec's bytes.
            arrays: The arrays ``basis``, ``centre``, ``metric``, ``variances`` and ``powers``.
        """
        return cls(**read_header(header, grid=True, arrays=arrays, dtypes=_DTYPES))

    @classmethod
    def fit(
        cls,
        label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
        *,
        labels: int,
        config: CodecConfig,
        provenance: Provenance,
    ) -> PcaCodec:
        """Fit centre and metric to the maps, and the components to the maps and their augmented copies.

        The components come from the samples' Gram matrix in float64, so there are at most as many components as
        samples. Maps are pooled one after another, so memory holds one full map and all coarse ones. On grids pooled by
        4 or 8, copies are deformed at half that pooling.

        Raises:
            InvalidInput: If the maps are all alike or have fewer components than ``config.dimension``.
        """
        grid = label_maps[0].shape
        factor = shapes.pooling_factor(grid, labels=labels)
        coarse = factor // 2 if factor > 2 else 1
        exact = [shapes.pool(one_hot(m, labels).astype(np.float64), factor=factor) for m in label_maps]
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
    exact: Sequence[Float[np.ndarray, "k x y z"]], *, factor: int
) -> tuple[Float[np.ndarray, "s u v w"], Float[np.ndarray, "u v w"]]:
    """Return the log-ratios of the public mean shape on the coarse grid, and the voxels' weights.

    A voxel's weight is √(1 − Σ_j p̄_j² + .02), where p̄_j is the mean probability of class j.

    Args:
        exact: Public maps as class probabilities, [k, x, y, z].
        factor: Pooling factor.

    Returns:
        Centre [s, u, v, w] and metric [u, v, w].
    """
    mean_shape = np.stack(exact).mean(axis=0, dtype=np.float64)
    doubt = 1 - (shapes.pool(mean_shape, factor=factor) ** 2).sum(axis=0)
    return shapes.to_log_ratios(mean_shape, factor=factor), np.sqrt(np.maximum(doubt, 0) + METRIC_FLOOR)


def principal_components(
    samples: Float[np.ndarray, "n d"], *, most: int
) -> tuple[Float[np.ndarray, "l d"], Float[np.ndarray, "l"]]:
    """Return orthonormal principal components and their variances, largest first, in float64.

    They are computed from the n × n Gram matrix, since the number n of samples is far below the number d of values in
    each sample. Components without variance are left out. The largest entry of each component is positive, so the
    result does not depend on the solver's choice of sign.

    Args:
        samples: Array of shape [n, d].
        most: Largest number of components to return.

    Returns:
        Components [l, d] and variances [l].

    Raises:
        InvalidInput: If the samples are all alike.
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
    """Return the variance of each coordinate of a code. The variances add up to ``power``.

    Args:
        variances: Variances of the components, in descending order, positive.
        config: The study's codec settings. If ``dimension`` is set, exactly that many coordinates are used, and the
            power is divided as if there were no noise.
        noise_std: Planned standard deviation of the noise on the mean code, in the code's units.
        power: Sum of the result, in squared units of the code.

    Returns:
        Variances of the code's coordinates; 0 for the components that are left out.

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
    """Refuse a code dimension that is larger than the number of components.

    Args:
        dimension: Code length that the study asks for.
        available: Number of components of its public label maps.

    Raises:
        InvalidInput: If ``dimension`` is larger.
    """
    if dimension > available:
        raise InvalidInput(
            "codec.dimension",
            value=dimension,
            limit=f"at most {available}, the components of these public label maps",
            remedy="lower it, or give more maps or augmentations",
        )


def water_fill(variances: Float[np.ndarray, "l"], *, noise_std: float, power: float) -> Float[np.ndarray, "l"]:
    """Return the variances p_i of the code's coordinates that leave the least error after decoding, with Σp =
    ``power``.

    They minimise Σ λ_i σ² / (p_i + σ²), for components of variance λ_i and noise of variance σ². The solution is p_i =
    max(0, √(λ_i σ² / ν) − σ²), where ν is chosen so that Σp = ``power``.

    Args:
        variances: Variances λ_i of the components, positive and in descending order, shape [l].
        noise_std: Standard deviation σ of the noise on the mean code, in the code's units. For σ = 0 the result is the
            limit, p_i ∝ √λ_i.
        power: Sum of the result.

    Returns:
        Array of shape [l]. The first entry is always above 0.

    Source: reverse water-filling for the linear channel (Lee & Petersen 1976); cf. Fay et al. 2021, eq (7).

    >>> water_fill(np.array([4.0, 1.0]), noise_std=0.0, power=3.0)
    array([2., 1.])
    """
    roots = np.sqrt(variances)
    noise = noise_std**2
    counts = np.arange(1, len(roots) + 1)
    lowest = roots * (power + counts * noise) / np.cumsum(roots) - noise  # p_k if the first k alone were active
    result: np.ndarray = np.zeros_like(roots)
    if not (lowest > 0).any():  # the noise is so large that rounding loses the power beside it
        result[0] = power
        return result
    active = int(np.flatnonzero(lowest > 0)[-1]) + 1
    result[:active] = roots[:active] * (power + active * noise) / roots[:active].sum() - noise
    return result


_DTYPES: dict[str, type[np.floating[Any]]] = {
    "basis": np.float32,
    "centre": np.float64,
    "metric": np.float64,
    "variances": np.float64,
    "powers": np.float64,
}
