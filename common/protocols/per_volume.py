"""Implements, at a site, the protocol with one query for each public volume: a voter sends its code of that volume.

The site's worker calls this module. It refuses a query whose dimension is not the codec's.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from common.codecs.codec import Codec
from common.privacy.mechanism import QuerySpec
from common.protocols.site_protocol import Encoder, Fetch, ImageOf, SiteProtocol, check_dimension


class PerVolumeSite(SiteProtocol):
    """The per-volume protocol at a site; see :class:`~common.protocols.site_protocol.SiteProtocol`."""

    def describes(self, query: QuerySpec) -> bool:
        """Return whether a query belongs to this protocol.

        Returns:
            True if it has one volume and its ``centre`` names no frame.
        """
        return query.centre == "zero" and len(query.volumes) == 1

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        """Return the codec as encoder."""
        check_dimension(query, codec.dimension, whose="codec")
        return PlainEncoder(codec)


@dataclass(frozen=True, slots=True)
class PlainEncoder:
    """Encodes the prediction of one volume with the codec, unchanged."""

    codec: Codec

    @property
    def volume_key(self) -> Hashable:
        """A constant, because a volume's code depends only on the prediction and the codec."""
        return "per-volume"

    def of_volume(self, probabilities: Float[np.ndarray, "k x y z"], image: ImageOf) -> Float[np.ndarray, "l"]:
        """Encode the prediction of one volume. # sensitive"""
        return self.codec.encode(probabilities)

    def of_voter(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "l"]:
        """Return the code of the only volume. # sensitive"""
        (code,) = codes
        result: np.ndarray = code
        return result
