"""The frame of a joint query: how the codes of a whole batch of volumes become one code, and how that is read back.

One release about N volumes instead of N releases: the sites' codes of all volumes are taken relative to a public
centre, rotated over the volumes so that what they share comes first, weighted, and clipped as one vector. A frame is
public (made from public images, the codec and earlier releases), travels by content hash as ``QuerySpec.centre``, and
shapes no guarantee: whatever it holds, the one vector is clipped to C afterwards. Refuses shapes that do not fit,
numbers that are not finite, rotations that are not orthonormal and bytes it would not have written.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from common.canonical import check_hash, checked_fields
from common.codecs.base import CODEC_SCHEMA, check_code, check_noise_std, pack, unpack
from common.codecs.pca import water_fill
from common.errors import InvalidInput

FRAME = "frame"
FILL = 1.0
"""Share of the radius that a code of the expected size fills."""

SHARED = 2.0
"""Prior variance of what all volumes share, in units of what one volume holds for itself."""

SIMILARITY_POWER = 3.0
"""How fast variance falls over the rotated volumes: with this power of the images' singular values."""

EVEN = 0.1
"""Share of the variance spread evenly over the rotated volumes, so that none is taken to hold nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """``rotation`` [n, n] orthonormal over the volumes; ``centre`` [n, l], codes the volumes are taken relative to;
    ``weights`` [n, l] ≥ 0 of the rotated coordinates, 0 for those that are not sent; ``codec`` its codec's hash."""

    rotation: Float[np.ndarray, "n n"]
    centre: Float[np.ndarray, "n l"]
    weights: Float[np.ndarray, "n l"]
    codec: str

    def __post_init__(self) -> None:
        for name in ("rotation", "centre", "weights"):
            array = np.array(getattr(self, name), dtype=np.float64, order="C")
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        check_hash(self.codec)
        volumes = len(self.rotation)
        if (
            self.rotation.shape != (volumes, volumes)
            or self.centre.ndim != 2
            or len(self.centre) != volumes
            or self.weights.shape != self.centre.shape
        ):
            raise InvalidInput("frame", value=self.centre.shape, limit="rotation [n, n], centre and weights [n, l]")
        if not all(np.isfinite(array).all() for array in (self.rotation, self.centre, self.weights)):
            raise InvalidInput("frame", limit="finite numbers")
        if abs(self.rotation @ self.rotation.T - np.eye(volumes)).max() > 1e-9:
            raise InvalidInput("frame's rotation", limit="orthonormal rows")
        if self.weights.min() < 0 or not self.weights.any():
            raise InvalidInput("frame's weights", limit="numbers ≥ 0, not all 0")

    @property
    def volumes(self) -> int:
        return len(self.centre)

    @property
    def dimension(self) -> int:
        """Length of the joint code: the coordinates that are sent."""
        return int((self.weights > 0).sum())

    def encode(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """The joint code of one voter's codes of all volumes, in their order: weights · rotation · (codes - centre).

        Nothing in the result bounds its norm: only the clip does. InvalidInput for another shape or non-finite codes.
        """
        if not isinstance(codes, np.ndarray) or codes.shape != self.centre.shape or not np.isfinite(codes).all():
            raise InvalidInput(
                "codes of a joint query",
                value=getattr(codes, "shape", None),
                limit=f"finite, of shape {self.centre.shape}",
            )
        sent = self.weights > 0
        result: np.ndarray = (self.rotation @ (codes - self.centre) * self.weights)[sent]
        return result

    def read(self, mean_code: Float[np.ndarray, "d"], *, noise_std: float) -> Observation:
        """What a released mean code, with noise of ``noise_std`` on every coordinate, says about the rotated codes."""
        code, noise = check_code(mean_code, dimension=self.dimension), check_noise_std(noise_std)
        sent = self.weights > 0
        value, variance = np.zeros(self.weights.shape), np.full(self.weights.shape, np.inf)
        value[sent] = code / self.weights[sent]
        variance[sent] = (noise / self.weights[sent]) ** 2
        return Observation(rotation=self.rotation, value=self.rotation @ self.centre + value, variance=variance)

    def to_bytes(self) -> bytes:
        """The frame as bytes; the same frame gives the same bytes, so their SHA-256 is its name."""
        header = {"codec": self.codec, "name": FRAME, "schema": CODEC_SCHEMA}
        return pack(header, {"rotation": self.rotation, "centre": self.centre, "weights": self.weights})

    @classmethod
    def from_bytes(cls, data: bytes) -> Frame:
        """Read what :meth:`to_bytes` wrote; anything else is refused."""
        header, arrays = unpack(data)
        fields = checked_fields(header, {"codec": str, "name": str, "schema": int})
        if fields["name"] != FRAME or arrays.keys() != {"rotation", "centre", "weights"}:
            raise InvalidInput("frame of a joint query", value=fields["name"], limit="a file a frame wrote")
        if any(array.dtype != np.float64 or array.ndim != 2 for array in arrays.values()):
            raise InvalidInput("frame of a joint query", limit="float64 matrices")
        frame = cls(codec=fields["codec"], **arrays)
        if frame.to_bytes() != data:
            raise InvalidInput("frame of a joint query", limit="exactly the bytes a frame writes")
        return frame


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """Noisy values [n, l] of the rotated codes and their noise variances, infinite where nothing was sent."""

    rotation: Float[np.ndarray, "n n"]
    value: Float[np.ndarray, "n l"]
    variance: Float[np.ndarray, "n l"]


def plan_frame(
    *,
    images: Float[np.ndarray, "n c x y z"],
    centre: Float[np.ndarray, "n l"],
    variances: Float[np.ndarray, "l"],
    residual: float,
    noise_std: float,
    radius: float,
    codec: str,
) -> Frame:
    """The frame of a joint query about these public volumes.

    ``centre``: what is publicly believed of the volumes' codes. ``variances``: of a code's coordinates over patients.
    ``residual``: the share of that variance the centre leaves open, > 0. ``noise_std``: on the mean code. The expected
    spread of the rotated offsets is :func:`prior_variances`; the radius is spread over it by water-filling.
    """
    if not 0 < residual <= 4:
        raise InvalidInput("residual share of variance", value=residual, limit="above 0, at most 4")
    rotation, shares = volume_rotation(images)
    prior = residual * np.outer(shares, variances)
    order = np.argsort(-prior, axis=None, kind="stable")
    powers = np.zeros(prior.size)
    powers[order] = water_fill(prior.ravel()[order], noise_std=noise_std, power=(FILL * radius) ** 2)
    weights = np.sqrt(powers.reshape(prior.shape) / prior)
    return Frame(rotation=rotation, centre=centre, weights=weights, codec=codec)


def prior_variances(
    images: Float[np.ndarray, "n c x y z"], variances: Float[np.ndarray, "l"], *, residual: float
) -> Float[np.ndarray, "n l"]:
    """Expected squares of the rotated offsets from the centre: ``residual`` · shares of the rows · ``variances``."""
    return residual * np.outer(volume_rotation(images)[1], variances)


def volume_rotation(
    images: Float[np.ndarray, "n c x y z"],
) -> tuple[Float[np.ndarray, "n n"], Float[np.ndarray, "n"]]:
    """An orthonormal rotation over the volumes, and the rows' expected shares of variance, n in all.

    Row 0 is the mean over the volumes; the others are the left singular vectors of the mean-free images: volumes that
    look alike have shapes alike, so the first few rows hold most of what tells the volumes apart. Public images only.
    Signs are fixed by each row's largest entry.
    """
    volumes = len(images)
    flat = images.reshape(volumes, -1).astype(np.float64)
    offsets = flat - flat.mean(axis=0)
    values, vectors = np.linalg.eigh(offsets @ offsets.T)
    order = np.argsort(-values, kind="stable")[: volumes - 1]  # the last is the mean's, of no variance
    rows = np.concatenate([np.full((1, volumes), volumes**-0.5), vectors[:, order].T])
    rows, _ = np.linalg.qr(rows.T)  # exactly orthonormal, also where images repeat
    rows = rows.T
    rows *= np.sign(rows[np.arange(volumes), np.abs(rows).argmax(axis=1)])[:, None]
    spread = np.sqrt(np.maximum(values[order], 0)) ** SIMILARITY_POWER
    apart = np.full(volumes - 1, 1 / max(1, volumes - 1))
    if spread.sum() > 0:
        apart = EVEN * apart + (1 - EVEN) * spread / spread.sum()
    shares = np.concatenate([[SHARED], apart]) if volumes > 1 else np.ones(1)
    return rows, volumes * shares / shares.sum()


def estimate(
    observations: list[Observation], *, expected: Float[np.ndarray, "n l"], variances: Float[np.ndarray, "n l"]
) -> Float[np.ndarray, "n l"]:
    """The volumes' codes: posterior mean under Gaussian ``observations`` and a prior N(expected, variances).

    ``expected`` [n, l] in the volumes' order; ``variances`` of its rotated coordinates. Several rounds about the same
    volumes pool. Without noise the result is what was observed, without observations what was expected; in between
    each coordinate has Wiener's weight.
    """
    if not observations:
        return np.array(expected)
    rotation = observations[0].rotation
    prior = rotation @ expected
    precision, total = 1 / variances, prior / variances
    for observation in observations:
        known = np.isfinite(observation.variance)
        exact = np.where(known, np.maximum(observation.variance, 1e-12 * variances), 1)
        precision = precision + np.where(known, 1 / exact, 0)
        total = total + np.where(known, observation.value / exact, 0)
    result: np.ndarray = rotation.T @ (total / precision)
    return result
