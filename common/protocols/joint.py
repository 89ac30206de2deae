"""The site's half of a joint query: sharpens predictions, and combines the codes of all volumes by the query's frame.

A *frame* is the public centre, axes and weights of one round. Called by the site's worker. Refuses a frame made for
another codec, another number of volumes or another dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from common.codecs.codec import Codec
from common.errors import InvalidInput
from common.privacy.mechanism import QuerySpec
from common.protocols.frame import Frame
from common.protocols.site_protocol import Encoder, Fetch, ImageOf, SiteProtocol


class JointSite(SiteProtocol):
    """The site's half of the joint protocol; the query's centre is the hash of its frame."""

    def describes(self, query: QuerySpec) -> bool:
        """Return whether the query has a centre (:meth:`SiteProtocol.describes`)."""
        return query.centre != "zero"

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        """Return the encoder of the query's frame (:meth:`SiteProtocol.encoder`)."""
        frame = Frame.from_bytes(fetch(query.centre))
        if (frame.codec, frame.volumes) != (query.codec, len(query.volumes)):
            raise InvalidInput(
                "frame of a joint query", limit="one made for the query's codec and its number of volumes"
            )
        if frame.dimension != query.mechanism.dimension:
            raise InvalidInput("code dimension", value=query.mechanism.dimension, limit=str(frame.dimension))
        return FrameEncoder(codec, frame)


@dataclass(frozen=True, slots=True)
class FrameEncoder:
    """Encodes sharpened predictions with the codec, and combines the codes of all volumes by a frame."""

    codec: Codec
    frame: Frame

    def of_volume(self, probabilities: Float[np.ndarray, "k x y z"], image: ImageOf) -> Float[np.ndarray, "l"]:
        """Encode the sharpened prediction (:meth:`Encoder.of_volume`). # sensitive"""
        return self.codec.encode(self.frame.sharpen(probabilities))

    def of_voter(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """Combine the codes by the frame (:meth:`Encoder.of_voter`). # sensitive"""
        return self.frame.encode(codes)
