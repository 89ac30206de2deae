"""Defines the frame of a joint query, which combines the codes of many volumes into one code and decodes the answer.

A joint study makes a few releases about all N volumes together, instead of one release for each volume. Each release is
computed in these steps:

1. A public centre is subtracted from the codes of all volumes.
2. The offsets are projected on a public orthonormal basis of all volumes together.
3. The projections are weighted, and clipped as one vector.

The centre of the next release is the estimate from the releases so far, so the clipping radius is used for what is
still uncertain.

A frame is public: it is made from public images, a public network, the codec and released answers. It is sent by
content hash as ``QuerySpec.centre``. It does not affect the guarantee, because the vector is clipped to the same norm
for any frame. The server makes frames; sites encode with them. The module refuses shapes that do not match, numbers
that are not finite, bases that are not orthonormal, and bytes that :meth:`Frame.to_bytes` did not write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from scipy.linalg import eigh

from common.canonical import check_hash, checked_fields, parse_float
from common.codecs.codec import (
    CODEC_SCHEMA,
    check_code,
    check_noise_std,
    check_probabilities,
    frozen,
    pack,
    packed_as,
    unpack,
)
from common.codecs.pca import water_fill
from common.errors import SAME_VERSION, InvalidInput
from common.reading import parsing

FRAME = "round-frame"
FILL = 1.0
"""Root mean square norm of a joint code before clipping, as a share of the clipping radius."""

MAX_COORDINATES = 512
"""Largest number of directions in a frame. It limits a frame's size, because each direction has n · q numbers."""

SMALLEST_SHARE = 1e-9
"""Directions with less than this share of the largest variance contain only rounding errors."""

ORTHONORMAL = 1e-4
"""Largest deviation of a float32 basis from orthonormality."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A public basis, centre and weights, by which the codes of n volumes are combined into one code of d numbers.

    Attributes:
        basis: Orthonormal directions over the first q coordinates of the n volumes' codes together. Float32
            [r, n, q] for r directions.
        variances: Expected square of the projection of the codes minus ``centre`` on each direction, above 0, [r].
        weights: Factor for the projection on each direction, [r]. Exactly d factors are above 0. The others are 0,
            because this round does not use their directions.
        centre: The code that is subtracted from each volume's code, [n, l] for codes of length l.
        temperature: Temperature with which predictions are sharpened (:func:`sharpen`), in (0, 1].
        codec: Content hash of the codec.

    Raises:
        InvalidInput: If shapes do not match, a value is outside its range, or the basis is not orthonormal.
    """

    basis: Float[np.ndarray, "r n q"]
    variances: Float[np.ndarray, "r"]
    weights: Float[np.ndarray, "r"]
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
            limit = (
                f"a basis of shape [r, n, q] with r at most n·q and {MAX_COORDINATES}, r weights and variances, and a "
                "centre of shape [n, l] with l at least q"
            )
            raise InvalidInput("frame", value=self.basis.shape, limit=limit)
        if not all(np.isfinite(getattr(self, name)).all() for name in _DTYPES):
            raise InvalidInput("frame", limit="finite numbers")
        flat = self._flat(slice(None))
        if abs(flat @ flat.T - np.eye(len(flat))).max() > ORTHONORMAL:
            raise InvalidInput("frame's basis", limit="orthonormal rows")
        if self.variances.min() <= 0 or self.weights.min() < 0 or not self.weights.any():
            raise InvalidInput(
                "frame's weights and variances",
                limit="variances above 0; weights of 0 or above, at least one of them above 0",
            )
        if not 0 < self.temperature <= 1:
            raise InvalidInput("frame's temperature", value=self.temperature, limit="above 0, at most 1")

    @property
    def volumes(self) -> int:
        """Number n of volumes."""
        return len(self.centre)

    @property
    def dimension(self) -> int:
        """Length d of the joint code."""
        return int(np.count_nonzero(self.weights))

    @property
    def _asked(self) -> Bool[np.ndarray, "r"]:
        return self.weights > 0

    def encode(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """Return the joint code of one voter: weights · basis · (codes − centre). # sensitive

        The norm of the result is not bounded; the caller clips it.

        Args:
            codes: The voter's codes of all volumes in the query's order, [n, l].

        Returns:
            Float64 array of shape [d].

        Raises:
            InvalidInput: If the shape is another or a value is not finite.
        """
        if type(codes) is not np.ndarray or codes.shape != self.centre.shape or not np.isfinite(codes).all():
            raise InvalidInput(
                "codes of a joint query",
                value=getattr(codes, "shape", None),
                limit=f"finite, of shape {self.centre.shape}",
            )
        code: np.ndarray = self.along(codes) * self.weights[self._asked]
        return code

    def along(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """Project the codes' offsets from the centre onto this round's directions (those with a weight above 0).

        Args:
            codes: Codes of all volumes, [n, l].

        Returns:
            Array of shape [d].
        """
        result: np.ndarray = self._flat(self._asked) @ (codes - self.centre)[:, : self.basis.shape[2]].ravel()
        return result

    def across(self, offsets: Float[np.ndarray, "d"]) -> Float[np.ndarray, "n l"]:
        """Return the volumes' offsets from the centre that have the given projections, and none on other directions.

        It inverts :meth:`along` on this round's directions.

        Args:
            offsets: Projections on this round's directions, [d].

        Returns:
            Offsets of the codes, [n, l].
        """
        result = np.zeros(self.centre.shape)
        result[:, : self.basis.shape[2]] = (offsets @ self._flat(self._asked)).reshape(self.basis.shape[1:])
        return result

    def read(self, mean_code: Float[np.ndarray, "d"], *, noise_std: float) -> Observation:
        """Convert a released mean code to noisy projections of the offsets, by dividing by the weights.

        The offsets are the volumes' mean codes minus this round's centre.

        Args:
            mean_code: The released mean code, [d].
            noise_std: Standard deviation of the noise on each of its coordinates.

        Returns:
            The projections with their noise variances.

        Raises:
            InvalidInput: If an argument is not finite or of another shape.
        """
        code, noise = check_code(mean_code, dimension=self.dimension), check_noise_std(noise_std)
        weights = self.weights[self._asked]
        return Observation(value=code / weights, variance=(noise / weights) ** 2)

    def estimate(self, seen: Observation) -> Float[np.ndarray, "n l"]:
        """Return the posterior mean of the volumes' codes, given an observation and a Gaussian prior around the centre.

        Each observed offset is multiplied by Wiener's weight: 1 without noise, towards 0 with much noise. Along
        directions that this round leaves out, the result is the centre.

        Args:
            seen: The observation of this round.

        Returns:
            Codes of all volumes, [n, l].
        """
        variances = self.variances[self._asked]
        result: np.ndarray = self.centre + self.across(seen.value * variances / (variances + seen.variance))
        return result

    def surprise(self, seen: Observation) -> float:
        """Return how large an observation is, compared with what the frame expects.

        The result is Σ value² / (expected variance of the offset + variance of its noise). If the offsets are Gaussian
        with the frame's variances, it is χ² distributed with :attr:`dimension` degrees of freedom.

        Args:
            seen: The observation of this round.

        Returns:
            The sum.
        """
        return float((seen.value**2 / (self.variances[self._asked] + seen.variance)).sum())

    def noise_surprise(self, seen: Observation) -> float:
        """Return the expectation of :meth:`surprise` if all offsets are 0 and the observation is only noise.

        Args:
            seen: The observation of this round.

        Returns:
            The expectation, from 0 to :attr:`dimension`.
        """
        return float(self.noise_shares(seen).sum())

    def noise_shares(self, seen: Observation) -> Float[np.ndarray, "d"]:
        """Return the noise's share of the expected variance along each direction.

        Args:
            seen: The observation of this round.

        Returns:
            Array of shape [d], from 0 to 1.
        """
        result: np.ndarray = seen.variance / (self.variances[self._asked] + seen.variance)
        return result

    def after(self, seen: Observation, *, noise_std: float, radius: float) -> Frame:
        """Return the frame of the next round, centred on the estimate so far, with new weights.

        The radius is spread over the directions that are still uncertain. The part of a code that is known already is
        subtracted with the centre and takes none of the radius (Schalkwijk & Kailath 1966). Rounds that all use the
        same centre would spend the radius on it again. The frame is computed from released numbers, so it is
        post-processing.

        Args:
            seen: The observation of this round.
            noise_std: Standard deviation of the noise on each coordinate of the next mean code.
            radius: Clipping norm C.

        Returns:
            The next frame.
        """
        variances = np.array(self.variances)
        asked = variances[self._asked]
        variances[self._asked] = asked * seen.variance / (asked + seen.variance)
        weights = _spread(variances, noise_std=noise_std, radius=radius)
        return replace(self, variances=variances, weights=weights, centre=self.estimate(seen))

    def sharpen(self, probabilities: Float[np.ndarray, "k x y z"]) -> Float[np.ndarray, "k x y z"]:
        """Raise probabilities to the power 1 / temperature and normalise them, so that codes describe shape, not
        uncertainty.

        Args:
            probabilities: Class probabilities, [k, x, y, z].

        Returns:
            Probabilities of the same shape.

        Raises:
            InvalidInput: If the input holds no probabilities. The input is checked, because after the power and the
                normalisation invalid numbers could look valid.
        """
        values = check_probabilities(probabilities, labels=len(probabilities), grid=probabilities.shape[1:])
        return sharpen(values, temperature=self.temperature)

    def to_bytes(self) -> bytes:
        """Return the frame as bytes. The same frame gives the same bytes, so their SHA-256 names it."""
        header = {"codec": self.codec, "name": FRAME, "schema": CODEC_SCHEMA, "temperature": self.temperature.hex()}
        return pack(header, {name: getattr(self, name) for name in _DTYPES})

    @classmethod
    def from_bytes(cls, data: bytes) -> Frame:
        """Read the bytes that :meth:`to_bytes` wrote.

        Args:
            data: The bytes.

        Returns:
            The frame.

        Raises:
            InvalidInput: If the bytes are not exactly those that :meth:`to_bytes` returns for the frame in them.
        """
        header, arrays = unpack(data)
        fields = checked_fields(header, {"codec": str, "name": str, "schema": int, "temperature": str})
        if fields["name"] != FRAME:
            raise InvalidInput(
                "kind of file, in the header of a joint query's frame",
                value=fields["name"],
                limit=FRAME,
                remedy=SAME_VERSION,
            )
        if arrays.keys() != _DTYPES.keys():
            names, limit = ", ".join(sorted(arrays)), ", ".join(sorted(_DTYPES))
            raise InvalidInput("arrays of a frame of a joint query", value=names, limit=limit, remedy=SAME_VERSION)
        if any(arrays[name].dtype != dtype for name, dtype in _DTYPES.items()):
            raise InvalidInput("frame of a joint query", limit="a float32 basis, everything else float64")
        with parsing("frame of a joint query", limit="the arrays of a frame"):
            frame = cls(codec=fields["codec"], temperature=parse_float(fields["temperature"]), **arrays)
            same = packed_as(frame.to_bytes(), data)
        if not same:
            raise InvalidInput(
                "bytes of a joint query's frame", limit="exactly those that this version writes", remedy=SAME_VERSION
            )
        return frame

    def _flat(self, rows: slice | Bool[np.ndarray, "r"]) -> Float[np.ndarray, "rows nq"]:
        result: np.ndarray = self.basis[rows].reshape(-1, math.prod(self.basis.shape[1:])).astype(np.float64)
        return result


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """What a release tells about the volumes, along a frame's directions.

    Attributes:
        value: Noisy projections of the offsets from the centre, [d].
        variance: Variances of their noise, [d].
    """

    value: Float[np.ndarray, "d"]
    variance: Float[np.ndarray, "d"]


def plan_frame(
    *,
    kernel: Float[np.ndarray, "nq nq"],
    centre: Float[np.ndarray, "n l"],
    variances: Float[np.ndarray, "l"],
    residual: float,
    temperature: float,
    noise_std: float,
    radius: float,
    codec: str,
) -> Frame:
    """Make the first frame of a joint query about n public volumes.

    The basis consists of the kernel's eigenvectors with the largest eigenvalues, at most :data:`MAX_COORDINATES`.
    Water-filling spreads the radius over them.

    Args:
        kernel: Expected covariance of the offsets of all volumes' codes from the centre, up to a factor,
            [n · q, n · q]. It covers the first q coordinates of each volume, one volume after another. It describes how
            the codes change together when a public network is trained.
        centre: Public estimate of the volumes' codes, [n, l].
        variances: Variances of a code's coordinates over patients, [l].
        residual: Expected square of the offsets from the centre, divided by these variances. Above 0, at most 4.
        temperature: Temperature with which predictions are sharpened.
        noise_std: Standard deviation of the noise on each coordinate of the mean code.
        radius: Clipping norm C.
        codec: Content hash of the codec.

    Returns:
        The frame.

    Raises:
        InvalidInput: If the kernel is not square over the volumes, not finite or zero, or ``residual`` is out of range.
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


def _spread(variances: Float[np.ndarray, "r"], *, noise_std: float, radius: float) -> Float[np.ndarray, "r"]:
    """Return a frame's weights: those that minimise the error after decoding, for the given radius.

    ``variances`` are the expected squares of the projections on the directions. A weight is 0 if its direction would
    not reduce the error.
    """
    order = np.argsort(-variances, kind="stable")
    powers = np.empty_like(variances)
    powers[order] = water_fill(variances[order], noise_std=noise_std, power=(FILL * radius) ** 2)
    result: np.ndarray = np.sqrt(np.maximum(powers, 0) / variances)
    return result


def sharpen(probabilities: Float[np.ndarray, "k x y z"], *, temperature: float) -> Float[np.ndarray, "k x y z"]:
    """Return the probabilities to the power 1 / temperature, normalised in every voxel.

    Args:
        probabilities: Shape [k, x, y, z].
        temperature: In (0, 1]; 1 changes nothing.

    Returns:
        Float64 array of the same shape.

    >>> sharpen(np.array([0.75, 0.25]).reshape(2, 1, 1, 1), temperature=0.5).ravel()
    array([0.9, 0.1])
    """
    powered = np.maximum(probabilities.astype(np.float64), 0) ** (1 / temperature)
    result: np.ndarray = powered / powered.sum(axis=0)
    return result


_DTYPES: dict[str, type[np.floating[Any]]] = {
    "basis": np.float32,
    "variances": np.float64,
    "weights": np.float64,
    "centre": np.float64,
}
