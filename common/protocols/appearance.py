"""Encodes at the site what structures look like: which grey values a voter's structures have.

A public volume's code are sums over the voxels that the voter gives to each structure: how many, and of every channel
the values and their squares. Over all volumes they make the structure's mean and the logarithm of its spread: J · 2C
numbers for J structures and C channels, taken relative to a public frame and clipped as one vector. Values are first
made relative to what lies where public shapes are, volume by volume, so one look fits all. A structure that a voter
finds nowhere says nothing: it takes the frame's centre. Refuses frames of another shape.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy.ndimage import gaussian_filter

from common.codecs.codec import Codec, check_probabilities
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec
from common.protocols.frame import Frame
from common.protocols.site_protocol import Encoder, Fetch, ImageOf, SiteProtocol

LEAST_VOXELS = 20
"""Fewer of a structure in all volumes together say nothing of how it looks."""

LEAST_STD = 0.05
"""Added to every spread, so that its logarithm is finite; where structures are expected values have spread 1."""

WINDOW_BLUR = 2.0
"""Voxels that the public mean shape is blurred by: structures lie around it too, and"""

WINDOW_FLOOR = 0.1
"""they may lie anywhere: where public shapes share no place, the window is the whole volume."""


def window_of(codec: Codec) -> Float[np.ndarray, "x y z"]:
    """How much structures are expected somewhere: the public mean shape's foreground, blurred, and a floor."""
    mean = codec.decode(np.zeros(codec.dimension), noise_std=0.0)
    window: np.ndarray = gaussian_filter(1 - mean[0].astype(np.float64), WINDOW_BLUR) + WINDOW_FLOOR
    return window


def standardised(
    image: Float[np.ndarray, "c x y z"], window: Float[np.ndarray, "x y z"]
) -> Float[np.ndarray, "c x y z"]:
    """Every channel's values with mean 0 and spread 1 under the window. Float64; a channel of one value becomes 0.

    A volume's brightness, which differs between volumes more than structures do within one, is then the same for all.
    """
    values, weights = image.astype(np.float64), window / window.sum()
    values -= np.einsum("cxyz,xyz->c", values, weights)[:, None, None, None]
    std = np.sqrt(np.einsum("cxyz,xyz->c", np.square(values), weights))
    result: np.ndarray = values / np.where(std > 0, std, 1.0)[:, None, None, None]
    return result


class AppearanceSite(SiteProtocol):
    """See :class:`~common.protocols.site_protocol.SiteProtocol`.

    The frame is the query's centre, over one row of statistics.
    """

    def describes(self, query: QuerySpec) -> bool:
        return query.centre != "zero"

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        frame = Frame.from_bytes(fetch(query.centre))
        channels, rest = divmod(frame.centre.shape[1], 2 * (codec.labels - 1))
        if (frame.codec, frame.volumes, rest) != (query.codec, 1, 0) or channels < 1:
            raise InvalidInput("frame of an appearance query", limit="the query's codec, one row of statistics")
        if frame.dimension != query.mechanism.dimension:
            raise InvalidInput("code dimension", value=query.mechanism.dimension, limit=str(frame.dimension))
        return AppearanceEncoder(frame, window_of(codec), labels=codec.labels, channels=channels)


@dataclass(frozen=True, slots=True)
class AppearanceEncoder:
    """Statistics of a voter's structures relative to a frame, of values relative to a window."""

    frame: Frame
    window: Float[np.ndarray, "x y z"]
    labels: int
    channels: int

    def of_volume(self, probabilities: Float[np.ndarray, "k x y z"], image: ImageOf) -> Float[np.ndarray, "l"]:
        """Voxels, Σ values and Σ squares of every structure in turn, float64 [J · (1 + 2C)]. # sensitive"""
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
        sums = codes.sum(axis=0).reshape(self.labels - 1, 1 + 2 * self.channels)
        looks = np.array(self.frame.centre[0]).reshape(self.labels - 1, 2 * self.channels)
        for look, (voxels, *rest) in zip(looks, sums, strict=True):
            if voxels >= LEAST_VOXELS:
                mean, square = np.split(np.array(rest) / voxels, 2)
                std = np.sqrt(np.maximum(square - mean**2, 0))
                look[:] = np.concatenate([mean, np.log(std + LEAST_STD)])
        return self.frame.encode(looks.reshape(1, -1))
