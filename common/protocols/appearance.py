"""Encodes the appearance of structures: statistics of the grey values of the structures that a voter segments.

For each public volume and each structure, a voter computes three sums over the voxels that it labels as this structure:
the number of voxels, the sum of their values and the sum of the squares, the last two for every channel. These sums are
added over all volumes. They give the mean and the logarithm of the standard deviation of each structure's values in
each channel. For J structures and C channels these are J · 2C numbers. A public frame (centre and weights) turns them
into one vector, which is then clipped.

Each volume's values are first scaled to mean 0 and standard deviation 1, so that one set of statistics fits all
volumes. Mean and standard deviation are weighted: voxels near the public mean shape weigh most (the window of
:func:`window_of`). If a voter finds a structure in fewer than :data:`LEAST_VOXELS` voxels, the frame's centre is used
for that structure. The site's worker calls this module through
:class:`~common.protocols.site_protocol.SiteProtocol`. It refuses frames of another shape.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.ndimage import gaussian_filter

from common.codecs.codec import Codec, check_probabilities
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec
from common.protocols.frame import Frame
from common.protocols.site_protocol import Encoder, Fetch, FramedSite, ImageOf, check_dimension

LEAST_VOXELS = 20
"""Least number of voxels of a structure, in all volumes together, from which its statistics are computed."""

LEAST_STD = 0.05
"""Added to every standard deviation so that its logarithm is finite. A standardised image has standard deviation 1."""

WINDOW_BLUR = 2.0
"""Standard deviation, in voxels, of the blur of the public mean shape, because structures also lie near it."""

WINDOW_FLOOR = 0.1
"""Smallest weight of a voxel. If public shapes do not overlap, the window is nearly the whole volume."""


def window_of(codec: Codec) -> Float[np.ndarray, "x y z"]:
    """Return each voxel's weight for the standardisation of images: the blurred public mean shape, plus a floor.

    Args:
        codec: The study's codec, whose zero code is the public mean shape.

    Returns:
        Positive weights, float64 [x, y, z].
    """
    mean = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    window: np.ndarray = gaussian_filter(1 - mean[0].astype(np.float64), WINDOW_BLUR) + WINDOW_FLOOR
    return window


def standardised(
    image: Float[np.ndarray, "c x y z"], window: Float[np.ndarray, "x y z"]
) -> Float[np.ndarray, "c x y z"]:
    """Scale every channel to weighted mean 0 and weighted standard deviation 1, with the window's weights.

    Brightness differs between volumes more than structures differ within one; standardising removes that difference.

    Args:
        image: Shape [c, x, y, z].
        window: Weights, shape [x, y, z].

    Returns:
        Float64 array of shape [c, x, y, z]; a channel of one value becomes 0.
    """
    values, weights = image.astype(np.float64), window / window.sum()
    values -= np.einsum("cxyz,xyz->c", values, weights)[:, None, None, None]
    std = np.sqrt(np.einsum("cxyz,xyz->c", np.square(values), weights))
    result: np.ndarray = values / np.where(std > 0, std, 1.0)[:, None, None, None]
    return result


class AppearanceSite(FramedSite):
    """The appearance protocol at a site: one query asks for the grey values of structures in all public volumes.

    The centre of a query's frame has one row, because the statistics of all volumes are added.
    """

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        """Return the encoder of the query's frame.

        Raises:
            InvalidInput: If the frame was made for another codec, has more than one row of statistics, or has another
                dimension than the query.
        """
        frame = Frame.from_bytes(fetch(query.centre))
        channels, rest = divmod(frame.centre.shape[1], 2 * (codec.labels - 1))
        if (frame.codec, frame.volumes, rest) != (query.codec, 1, 0) or channels < 1:
            raise InvalidInput(
                "frame of an appearance query", limit="a frame for the query's codec, with one row of statistics"
            )
        check_dimension(query, frame.dimension, whose="frame")
        return AppearanceEncoder(frame, window_of(codec), labels=codec.labels, channels=channels)


@dataclass(frozen=True, slots=True)
class AppearanceEncoder:
    """Computes statistics of a voter's structures, relative to a frame.

    Attributes:
        frame: The query's frame, over one row of statistics.
        window: Weights of :func:`window_of`.
        labels: Number of classes.
        channels: Number of image channels.
    """

    frame: Frame
    window: Float[np.ndarray, "x y z"]
    labels: int
    channels: int

    @property
    def volume_key(self) -> Hashable:
        """The number of channels, because a volume's sums depend on nothing else of the frame."""
        return "appearance", self.channels

    def of_volume(self, probabilities: Float[np.ndarray, "k x y z"], image: ImageOf) -> Float[np.ndarray, "l"]:
        """Return a volume's sums for one structure after another: voxels, values and squares of values. # sensitive

        Returns:
            Float64 array of shape [J · (1 + 2C)], for J structures and C channels.

        Raises:
            InvalidInput: If the prediction or the image has another shape, or the prediction holds no probabilities.
        """
        grid = (self.window.shape[0], self.window.shape[1], self.window.shape[2])
        found = check_probabilities(probabilities, labels=self.labels, grid=grid).argmax(axis=0)
        values = image()
        if values.shape != (self.channels, *grid):
            raise InvalidInput("image of an appearance query", value=values.shape, limit=f"{self.channels} channels")
        values, rows = standardised(values, self.window), []
        for structure in range(1, self.labels):
            inside = values[:, found == structure]
            rows.append(np.concatenate([[inside.shape[1]], inside.sum(axis=1), np.square(inside).sum(axis=1)]))
        return np.concatenate(rows)

    def of_voter(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """Return the unclipped code of a voter: means and log standard deviations, encoded by the frame. # sensitive

        Args:
            codes: The sums of each volume by :meth:`of_volume`, [n, J · (1 + 2C)].

        Returns:
            Float64 array of shape [d], where d is the frame's dimension.
        """
        sums = codes.sum(axis=0).reshape(self.labels - 1, 1 + 2 * self.channels)
        looks = np.array(self.frame.centre[0]).reshape(self.labels - 1, 2 * self.channels)
        for look, (voxels, *rest) in zip(looks, sums, strict=True):
            if voxels >= LEAST_VOXELS:
                mean, square = np.split(np.array(rest) / voxels, 2)
                std = np.sqrt(np.maximum(square - mean**2, 0))
                look[:] = np.concatenate([mean, np.log(std + LEAST_STD)])
        return self.frame.encode(looks.reshape(1, -1))
