"""The codec ``paper-pca``: Algorithm 1 of Fay et al. 2021 with raw probabilities, principal components, plain decoding.

A study that uses this codec with the accountant ``paper`` has the noise of the paper's eq (15) at sensitivity √d/K,
where d = classes · voxels and K is the number of teachers. The codec has neither water-filling nor Wiener weights; the
length l of a code is the number of variances above the planned noise (the paper's eq (7)). The codec serves as a
baseline for ``pca``. Its sensitivity is so large that, at any budget that protects patients, the noise hides the
signal.

Three points differ from the algorithm in the paper, because that algorithm cannot be run as written:

1. The paper does not subtract a mean. Here the mean of the public maps is subtracted, so the zero code is the public
   mean shape.
2. A teacher's probabilities y ∈ [0, 1]^d only bound a *difference* of two codes, by √d. Here every code is clipped to
   norm C = √d/2, so the sensitivity is Δ = 2C = √d exactly, whatever a site sends.
3. The paper's eq (7) can leave no component. Here at least one stays. Decoded numbers are cut at 0 and normalised to
   probabilities.

The codec refuses every radius but √d/2, because with another radius the noise would not be that of the paper. It also
refuses grids whose maps do not fit in memory.
"""

from __future__ import annotations

import math
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
    read_header,
    write_codec,
)
from common.codecs.pca import check_dimension, principal_components
from common.config import CodecConfig
from common.data.label_maps import one_hot
from common.errors import InvalidInput
from common.protocol_terms import PLAIN, keys_of

MAX_NUMBERS = 1 << 20
"""The largest d = classes · voxels: every public map and copy is held with that many numbers while fitting."""

_TINY = 1e-6  # least decoded number, so that a voxel whose numbers are all negative can be normalised


@dataclass(frozen=True, slots=True, eq=False)
class PaperPcaCodec:
    """The fitted codec (:class:`~common.codecs.codec.Codec`): a projection to l principal components and back.

    With the components as rows of the matrix A_l, the code of probabilities y is A_l (y − mean), and the decoded map of
    a code z is mean + A_lᵀ z.

    Attributes:
        basis: The rows of A_l, float32 [l, k, x, y, z].
        mean: Mean of the public maps, float64 [k, x, y, z].
        radius: Clipping norm C = √d/2, with d = classes · voxels.
        provenance: Which public label maps it was fitted on.

    Raises:
        InvalidInput: If shapes do not match, a value is not finite, or the radius is not √d/2.
    """

    basis: Float[np.ndarray, "l k x y z"]
    mean: Float[np.ndarray, "k x y z"]
    radius: float
    provenance: Provenance
    name: ClassVar[str] = "paper-pca"

    def __post_init__(self) -> None:
        for field, dtype in _DTYPES.items():
            object.__setattr__(self, field, frozen(getattr(self, field), dtype))
        if self.basis.ndim != 5 or len(self.basis) < 1 or self.basis.shape[1:] != self.mean.shape:
            raise InvalidInput("paper-pca codec", limit="arrays of matching shapes")
        if not (np.isfinite(self.basis).all() and np.isfinite(self.mean).all()) or len(self.mean) < 2:
            raise InvalidInput("paper-pca codec", limit="arrays of finite numbers for two classes or more")
        _check_radius(self.radius, numbers=self.mean.size)

    @property
    def dimension(self) -> int:
        """Length l of a code."""
        return len(self.basis)

    @property
    def linear(self) -> None:
        """None: protocols do not use this codec's basis."""
        return None

    @property
    def labels(self) -> int:
        """Number of classes, the background included."""
        return len(self.mean)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Shape of a volume in voxels."""
        x, y, z = self.mean.shape[1:]
        return x, y, z

    def encode(self, probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "l"]:
        """Encode class probabilities (:meth:`Codec.encode`): subtract the mean and project to the components.

        Returns:
            Float64 array [l], not yet clipped.

        Raises:
            InvalidInput: If the array has another shape or holds no probabilities.
        """
        values = check_probabilities(probabilities, labels=self.labels, grid=self.grid)
        code: np.ndarray = self.basis.reshape(self.dimension, -1).astype(np.float64) @ (values - self.mean).ravel()
        return code

    def decode(self, mean_code: Float[np.ndarray, "l"], *, noise_std: float) -> Float[np.ndarray, "k x y z"]:
        """Decode a mean code (:meth:`Codec.decode`) as mean + A_lᵀ z, cut at 0 and normalised.

        ``noise_std`` is checked, and has no influence on the result.
        """
        code = check_code(mean_code, dimension=self.dimension)
        check_noise_std(noise_std)
        change = (code @ self.basis.reshape(self.dimension, -1).astype(np.float64)).reshape(self.mean.shape)
        values = np.maximum(self.mean + change, _TINY)
        result: np.ndarray = (values / values.sum(axis=0, keepdims=True)).astype(np.float32)
        return result

    def to_bytes(self) -> bytes:
        """Return the codec as bytes (:meth:`Codec.to_bytes`)."""
        return write_codec(self, {field: getattr(self, field) for field in _DTYPES}, grid=False)

    @classmethod
    def from_parts(cls, header: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> PaperPcaCodec:
        """Rebuild the codec (:meth:`Codec.from_parts`)."""
        return cls(**read_header(header, grid=False, arrays=arrays, dtypes=_DTYPES))

    @classmethod
    def fit(
        cls,
        label_maps: Sequence[UInt8[np.ndarray, "x y z"]],
        *,
        labels: int,
        config: CodecConfig,
        provenance: Provenance,
    ) -> PaperPcaCodec:
        """Fit the mean to the maps, and the components to the maps and their augmented copies.

        Raises:
            InvalidInput: If the radius is another one, the maps are too large or all alike, or have too few components.
        """
        numbers = labels * int(np.prod(label_maps[0].shape))
        _check_radius(config.radius, numbers=numbers)
        if numbers > MAX_NUMBERS:
            raise InvalidInput(
                "numbers in a map, classes times voxels",
                value=numbers,
                limit=f"at most {MAX_NUMBERS} for paper-pca",
                remedy="choose a smaller grid and a larger spacing",
            )
        exact = [one_hot(m, labels) for m in label_maps]
        copies = shapes.augmented(label_maps, labels=labels, copies=config.augmentations, seed=provenance.seed)
        samples = np.stack([m.ravel() for m in (*exact, *copies)])
        basis, variances = principal_components(samples, most=config.max_dimension)
        kept = config.dimension or max(1, int((variances > provenance.noise_std**2).sum()))  # eq (7) may keep none
        check_dimension(kept, available=len(variances))
        return cls(
            basis=basis[:kept].reshape(kept, *exact[0].shape),
            mean=np.stack(exact).mean(axis=0, dtype=np.float64),
            radius=float(config.radius),
            provenance=provenance,
        )


def paper_radius(*, labels: int, grid: Sequence[int]) -> float:
    """Return the clipping norm C = √d/2, with d = classes · voxels.

    With it the sensitivity is Δ = 2C = √d, as in eq (4) of Fay et al. 2021.

    Args:
        labels: Number of classes.
        grid: Shape of a volume in voxels.

    Returns:
        The radius.

    >>> paper_radius(labels=2, grid=(8, 8, 8))
    16.0
    """
    return math.sqrt(labels * math.prod(grid)) / 2


def codec_terms(name: str, *, labels: int, grid: Sequence[int], protocol: str = PLAIN) -> CodecConfig:
    """Return the default settings of a codec for a protocol.

    Args:
        name: Key of the codec registry. ``paper-pca`` accepts one radius only, which is set here.
        labels: Number of classes.
        grid: Shape of a volume in voxels.
        protocol: Name of the query protocol.

    Returns:
        The settings.

    Raises:
        InvalidInput: If a name is unknown.
    """
    radius = paper_radius(labels=labels, grid=grid) if name == PaperPcaCodec.name else 1.0
    return CodecConfig(name=name, radius=radius, **keys_of(protocol))


def _check_radius(radius: float, *, numbers: int) -> None:
    expected = math.sqrt(numbers) / 2
    if not math.isclose(radius, expected, rel_tol=1e-9):
        raise InvalidInput(
            "codec.radius of paper-pca",
            value=radius,
            limit=f"√d/2 = {expected!r}",
            remedy="set this radius, or use the codec pca",
        )


_DTYPES: dict[str, type[np.floating[Any]]] = {"basis": np.float32, "mean": np.float64}
