"""Implements joint queries at a site: sharpens predictions, and combines the codes of all volumes by the query's frame.

A *frame* is the public centre, axes and weights of one round (:mod:`common.protocols.frame`). The site's worker calls
this module. It refuses a frame made for another codec, another number of volumes or another dimension.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from common.codecs.codec import Codec
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec
from common.protocols.frame import Frame
from common.protocols.site_protocol import Encoder, Fetch, FramedSite, ImageOf, check_dimension


class JointSite(FramedSite):
    """The joint protocol at a site: one query covers all public volumes."""

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        """Return the encoder of the query's frame.

        Raises:
            InvalidInput: If the frame was made for another codec or another number of volumes, or has another dimension
                than the query.
        """
        frame = Frame.from_bytes(fetch(query.centre))
        if (frame.codec, frame.volumes) != (query.codec, len(query.volumes)):
            raise InvalidInput(
                "frame of a joint query", limit="a frame made for the query's codec and number of volumes"
            )
        check_dimension(query, frame.dimension, whose="frame")
        return FrameEncoder(codec, frame)


@dataclass(frozen=True, slots=True)
class FrameEncoder:
    """Encodes sharpened predictions with the codec, and combines the codes of all volumes by a frame."""

    codec: Codec
    frame: Frame

    @property
    def volume_key(self) -> Hashable:
        """The frame's temperature, because a volume's code depends on nothing else of the frame."""
        return "joint", self.frame.temperature

    def of_volume(self, probabilities: Float[np.ndarray, "k x y z"], image: ImageOf) -> Float[np.ndarray, "l"]:
        """Encode the sharpened prediction of one volume. # sensitive"""
        return self.codec.encode(self.frame.sharpen(probabilities))

    def of_voter(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """Combine the codes of all volumes by the frame. # sensitive"""
        return self.frame.encode(codes)
