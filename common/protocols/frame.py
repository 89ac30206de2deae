"""The frame of a joint query: how the codes of a whole batch of volumes become one code, and how that is read back.

A few releases about N volumes instead of N releases: the sites' codes of all volumes are taken relative to a public
centre, projected on a public orthonormal basis of the volumes' codes together, weighted, and clipped as one vector. The
next round asks relative to what the releases so far say, so its radius is spread over what is still open. A frame is
public (made from public images, a public network, the codec and released answers), travels by content hash as
``QuerySpec.centre``, and shapes no guarantee: whatever it holds, the one vector is clipped to C afterwards. Refuses
shapes that do not fit, numbers that are not finite, bases that are not orthonormal and bytes it would not have written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.linalg import eigh

from common.canonical import check_hash, checked_fields, parse_float
from common.codecs.codec import CODEC_SCHEMA, check_code, check_noise_std, check_probabilities, frozen, pack, unpack
from common.codecs.pca import water_fill
from common.errors import InvalidInput
from common.reading import parsing

FRAME = "round-frame"
FILL = 1.0
"""Share of the radius that a code of the expected size fills."""

MAX_COORDINATES = 512
"""Directions at most: a frame's size is that many times the volumes' codes."""

SMALLEST_SHARE = 1e-9
"""Directions of less than this share of the largest variance hold only rounding."""

ORTHONORMAL = 1e-4
"""How far from orthonormal a basis read as float32 may be."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """``basis`` [k, n, m], orthonormal over the first m coordinates of the n volumes' codes together; ``variances`` [k]
    expected squares of the offsets along it, above 0; ``weights`` [k], 0 for the directions that this round leaves out;
    d of them are not. ``centre`` [n, l], the codes the volumes are taken relative to; ``temperature`` in (0, 1] that
    predictions are sharpened by; ``codec`` its codec's hash."""

    basis: Float[np.ndarray, "k n m"]
    variances: Float[np.ndarray, "k"]
    weights: Float[np.ndarray, "k"]
    centre: Float[np.ndarray, "n l"]
    temperature: float
    codec: str

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, frozen(getattr(self, name), dtype))
        check_hash(self.codec)
        fits = (
            self.basis.ndim == 3
            and self.centre.ndim == 2
            and self.basis.shape[1] == len(self.centre)
            and 1 <= self.basis.shape[2] <= self.centre.shape[1]
            and self.weights.shape == self.variances.shape == (len(self.basis),)
            and 1 <= len(self.basis) <= min(MAX_COORDINATES, math.prod(self.basis.shape[1:]))
        )
        if not fits:
            limit = f"basis [k ≤ n·m and {MAX_COORDINATES}, n, m], k weights, centre [n, l ≥ m]"
            raise InvalidInput("frame", value=self.basis.shape, limit=limit)
        if not all(np.isfinite(getattr(self, name)).all() for name in _DTYPES):
            raise InvalidInput("frame", limit="finite numbers")
        flat = self._flat(slice(None))
        if abs(flat @ flat.T - np.eye(len(flat))).max() > ORTHONORMAL:
            raise InvalidInput("frame's basis", limit="orthonormal rows")
        if self.variances.min() <= 0 or self.weights.min() < 0 or not self.weights.any():
            raise InvalidInput("frame's weights and variances", limit="numbers above 0, weights also 0 but not all")
        if not 0 < self.temperature <= 1:
            raise InvalidInput("frame's temperature", value=self.temperature, limit="above 0, at most 1")

    @property
    def volumes(self) -> int:
        return len(self.centre)

    @property
    def dimension(self) -> int:
        """Length d of the joint code."""
        return int(np.count_nonzero(self.weights))

    @property
    def _asked(self) -> Bool[np.ndarray, "k"]:
        return self.weights > 0

    def encode(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """The joint code of one voter's codes of all volumes, in their order: weights · basis · (codes - centre).

        Nothing in the result bounds its norm: only the clip does. InvalidInput for another shape or non-finite codes.
        """
        if not isinstance(codes, np.ndarray) or codes.shape != self.centre.shape or not np.isfinite(codes).all():
            raise InvalidInput(
                "codes of a joint query",
                value=getattr(codes, "shape", None),
                limit=f"finite, of shape {self.centre.shape}",
            )
        code: np.ndarray = self.along(codes) * self.weights[self._asked]
        return code

    def along(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """Project the codes' offsets from the centre onto this round's directions."""
        result: np.ndarray = self._flat(self._asked) @ (codes - self.centre)[:, : self.basis.shape[2]].ravel()
        return result

    def across(self, offsets: Float[np.ndarray, "d"]) -> Float[np.ndarray, "n l"]:
        """Offsets of the volumes' codes that lie so far along the basis: the way back from :meth:`along`."""
        result = np.zeros(self.centre.shape)
        result[:, : self.basis.shape[2]] = (offsets @ self._flat(self._asked)).reshape(self.basis.shape[1:])
        return result

    def read(self, mean_code: Float[np.ndarray, "d"], *, noise_std: float) -> Observation:
        """What a released mean code, with noise of ``noise_std`` on every coordinate, says about the offsets."""
        code, noise = check_code(mean_code, dimension=self.dimension), check_noise_std(noise_std)
        weights = self.weights[self._asked]
        return Observation(value=code / weights, variance=(noise / weights) ** 2)

    def estimate(self, seen: Observation) -> Float[np.ndarray, "n l"]:
        """The volumes' codes: posterior mean under what was ``seen`` and a Gaussian prior around the centre.

        Beyond the directions of this round, and where only noise was seen, the codes are the centre; without noise they
        are what was observed; in between Wiener's weight decides.
        """
        variances = self.variances[self._asked]
        result: np.ndarray = self.centre + self.across(seen.value * variances / (variances + seen.variance))
        return result

    def surprise(self, seen: Observation) -> float:
        """Σ value² / (variance expected of the offset + its noise's): d in the mean, χ² with d degrees of freedom,
        where offsets are the Gaussians that the frame expects."""
        return float((seen.value**2 / (self.variances[self._asked] + seen.variance)).sum())

    def silence(self, seen: Observation) -> float:
        """:meth:`surprise` in the mean where there are no offsets at all: what the noise alone makes."""
        return float(self.noise_shares(seen).sum())

    def noise_shares(self, seen: Observation) -> Float[np.ndarray, "d"]:
        """The noise's share of what is expected along each direction, 0 to 1."""
        result: np.ndarray = seen.variance / (self.variances[self._asked] + seen.variance)
        return result

    def after(self, seen: Observation, *, noise_std: float, radius: float) -> Frame:
        """The frame of the next round: centred on what is believed now, the radius spread over what is still open.

        Feedback makes every round worth more than a share of one: what is known already fills no radius (Schalkwijk &
        Kailath 1966). ``noise_std`` on the next mean code. Made of released numbers: post-processing.
        """
        variances = np.array(self.variances)
        asked = variances[self._asked]
        variances[self._asked] = asked * seen.variance / (asked + seen.variance)
        weights = _spread(variances, noise_std=noise_std, radius=radius)
        return replace(self, variances=variances, weights=weights, centre=self.estimate(seen))

    def sharpen(self, probabilities: Float[np.ndarray, "c x y z"]) -> Float[np.ndarray, "c x y z"]:
        """Probabilities to the power 1 / temperature, summing to 1: a code should hold shape, not hesitation.

        InvalidInput unless they are probabilities already: a power could hide that they are not.
        """
        values = check_probabilities(probabilities, labels=len(probabilities), grid=probabilities.shape[1:])
        return sharpen(values, temperature=self.temperature)

    def to_bytes(self) -> bytes:
        """The frame as bytes; the same frame gives the same bytes, so their SHA-256 is its name."""
        header = {"codec": self.codec, "name": FRAME, "schema": CODEC_SCHEMA, "temperature": self.temperature.hex()}
        return pack(header, {name: getattr(self, name) for name in _DTYPES})

    @classmethod
    def from_bytes(cls, data: bytes) -> Frame:
        """Read what :meth:`to_bytes` wrote; anything else is refused."""
        header, arrays = unpack(data)
        fields = checked_fields(header, {"codec": str, "name": str, "schema": int, "temperature": str})
        if fields["name"] != FRAME or arrays.keys() != _DTYPES.keys():
            raise InvalidInput("frame of a joint query", value=fields["name"], limit="a file a frame wrote")
        if any(arrays[name].dtype != dtype for name, dtype in _DTYPES.items()):
            raise InvalidInput("frame of a joint query", limit="a float32 basis, everything else float64")
        with parsing("frame of a joint query", limit="arrays a frame wrote"):
            frame = cls(codec=fields["codec"], temperature=parse_float(fields["temperature"]), **arrays)
            same = frame.to_bytes() == data
        if not same:
            raise InvalidInput("frame of a joint query", limit="exactly the bytes a frame writes")
        return frame

    def _flat(self, rows: slice | Bool[np.ndarray, "k"]) -> Float[np.ndarray, "r nm"]:
        result: np.ndarray = self.basis[rows].reshape(-1, math.prod(self.basis.shape[1:])).astype(np.float64)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Noisy offsets [d] along a frame's basis and their noise variances."""

    value: Float[np.ndarray, "d"]
    variance: Float[np.ndarray, "d"]


def plan_frame(
    *,
    kernel: Float[np.ndarray, "k k"],
    centre: Float[np.ndarray, "n l"],
    variances: Float[np.ndarray, "l"],
    residual: float,
    temperature: float,
    noise_std: float,
    radius: float,
    codec: str,
) -> Frame:
    """The frame of a joint query about these public volumes.

    ``kernel``: how the volumes' codes move together when a public network learns, over the first m coordinates of the n
    volumes in turn, k = n · m; only its shape counts, and it is what is expected of their offsets' covariance.
    ``centre``: what is publicly believed of the volumes' codes. ``variances``: of a code's coordinates over patients.
    ``residual``: the share of that variance the centre leaves open, > 0. ``noise_std``: on the mean code. The basis is
    the kernel's leading directions, at most :data:`MAX_COORDINATES`; the radius is spread over them by water-filling.
    InvalidInput unless the kernel is square over the volumes, finite and not zero.
    """
    if not 0 < residual <= 4:
        raise InvalidInput("residual share of variance", value=residual, limit="above 0, at most 4")
    volumes, total = len(centre), residual * len(centre) * float(variances.sum())
    size, rest = divmod(len(kernel), volumes)
    if kernel.shape != (len(kernel), len(kernel)) or rest or not 1 <= size <= len(variances):
        raise InvalidInput("kernel of a frame", value=kernel.shape, limit=f"square, a multiple of {volumes} volumes")
    trace = float(np.trace(kernel))
    if not np.isfinite(kernel).all() or trace <= 0:
        raise InvalidInput("kernel of a frame", value=trace, limit="finite, with a trace above 0")
    most = min(MAX_COORDINATES, len(kernel))
    values, vectors = eigh(kernel, subset_by_index=(len(kernel) - most, len(kernel) - 1))
    found = values[::-1] * (total / trace)
    kept = int((found > SMALLEST_SHARE * found[0]).sum())
    basis = vectors.T[::-1][:kept]
    basis = basis * np.sign(basis[np.arange(len(basis)), abs(basis).argmax(axis=1)])[:, None]
    return Frame(
        basis=basis.reshape(len(basis), volumes, -1),
        variances=found[:kept],
        weights=_spread(found[:kept], noise_std=noise_std, radius=radius),
        centre=centre,
        temperature=temperature,
        codec=codec,
    )


def _spread(variances: Float[np.ndarray, "k"], *, noise_std: float, radius: float) -> Float[np.ndarray, "k"]:
    """Weights that make offsets of these variances fill the radius with the least error left; 0 where none pays."""
    order = np.argsort(-variances, kind="stable")
    powers = np.empty_like(variances)
    powers[order] = water_fill(variances[order], noise_std=noise_std, power=(FILL * radius) ** 2)
    result: np.ndarray = np.sqrt(np.maximum(powers, 0) / variances)
    return result


def sharpen(probabilities: Float[np.ndarray, "c x y z"], *, temperature: float) -> Float[np.ndarray, "c x y z"]:
    """p^(1 / temperature), normalised in every voxel; 1 leaves them as they are."""
    powered = np.maximum(probabilities.astype(np.float64), 0) ** (1 / temperature)
    result: np.ndarray = powered / powered.sum(axis=0)
    return result


_DTYPES: dict[str, type[np.floating[Any]]] = {
    "basis": np.float32,
    "variances": np.float64,
    "weights": np.float64,
    "centre": np.float64,
}
