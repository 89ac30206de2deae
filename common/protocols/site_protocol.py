"""Defines the sites' half of a query protocol.

A protocol says what a study's queries are about (one public volume, all of them) and how the codes of a query's volumes
become the one code that a voter sends. Its other half, what the server asks and makes of the answers, is
:mod:`server.protocols.query_protocol`; both are registered in :mod:`common.protocol_terms`. A protocol shapes no
guarantee: whatever it makes of a voter's predictions is clipped to C afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from jaxtyping import Float

from common.codecs.codec import Codec
from common.config import Study
from common.privacy.mechanism import QuerySpec
from common.registry import registered

Fetch = Callable[[str], bytes]
"""Gets a public object by content hash, verified."""

ImageOf = Callable[[], Float[np.ndarray, "c x y z"]]
"""Gives a public volume's image on the study's grid, for who needs it."""


class Encoder(Protocol):
    """From one voter's predictions to its one code, for one query."""

    def of_volume(self, probabilities: Float[np.ndarray, "k x y z"], image: ImageOf) -> Float[np.ndarray, "l"]:
        """The unclipped code of one volume, of a voter's prediction; InvalidInput for what is none. # sensitive"""
        ...

    def of_voter(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """The unclipped code that a voter sends, of its codes of all the query's volumes in turn. # sensitive

        Nothing in the result bounds its norm: only the clip does.
        """
        ...


class SiteProtocol(Protocol):
    """A protocol at a site. Made without arguments; holds nothing."""

    def describes(self, query: QuerySpec) -> bool:
        """Whether this protocol asks such a query: as many volumes, and relative to what. Decided without data."""
        ...

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        """How a voter answers ``query``; ``fetch`` gets what else is public of it.

        InvalidInput where codec or objects do not fit the query's volumes or dimension.
        """
        ...


def site_protocol(study: Study) -> SiteProtocol:
    """The site's half of the study's protocol."""
    made: SiteProtocol = registered(study.codec.terms.site)()
    return made
