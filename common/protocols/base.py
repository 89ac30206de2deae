"""What a query protocol is to a site, and where all protocols are registered.

A protocol says what a study's queries are about (one public volume, all of them) and how the codes of a query's volumes
become the one code that a voter sends. Its other half, what the server asks and makes of the answers, is
:mod:`server.protocols.base`. A protocol shapes no guarantee: whatever it makes of a voter's predictions is clipped to C
afterwards. Refuses a protocol that is not registered.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np
from jaxtyping import Float

from common.codecs.base import Codec
from common.config import Study
from common.errors import InvalidInput
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


@dataclass(frozen=True, slots=True)
class Halves:
    """``module:class`` of a protocol's two halves; each is imported on use, and a site never imports the server's."""

    site: str
    server: str


PROTOCOLS: Mapping[str, Halves] = MappingProxyType(
    {
        "per-volume": Halves("common.protocols.per_volume:PerVolumeSite", "server.protocols.per_volume:PerVolume"),
        "appearance": Halves(
            "common.protocols.appearance:AppearanceSite", "server.protocols.appearance.protocol:Appearance"
        ),
        "joint": Halves("common.protocols.joint.site:JointSite", "server.protocols.joint.protocol:Joint"),
    }
)
"""Every protocol by its name (:func:`protocol_name`)."""


def protocol_name(study: Study) -> str:
    """The protocol that a study's terms name: ``codec.joint`` for the two that every version knows."""
    return study.codec.protocol or ("joint" if study.codec.joint else "per-volume")


def halves(study: Study) -> Halves:
    """The study's protocol in the registry; an unknown name is refused."""
    name = protocol_name(study)
    if name not in PROTOCOLS:
        raise InvalidInput("codec.protocol", value=name, limit=", ".join(sorted(PROTOCOLS)))
    return PROTOCOLS[name]


def site_protocol(study: Study) -> SiteProtocol:
    """The site's half of the study's protocol."""
    made: SiteProtocol = registered(halves(study).site)()
    return made
