"""Defines the interface of a query protocol at a site, and makes a voter's vote from the codes that it returns.

A protocol determines which public volumes a query covers (one, or all of them), and how a voter's codes of these
volumes become the one code that it sends. The site's worker and a study in memory (:mod:`consilium.memory`) call this
interface; the server's interface is :mod:`server.protocols.query_protocol`. Implementations of both are registered in
:mod:`common.protocol_terms`. A protocol does not affect the guarantee, because :func:`vote_of` clips every code that it
computes. That function refuses codes that are not finite or have another length.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int64

from common.codecs.codec import Codec
from common.config import Study
from common.errors import InvalidInput
from common.privacy.mechanism import Mechanism, QuerySpec
from common.privacy.quantise import quantise
from common.registry import registered

Fetch = Callable[[str], bytes]
"""A function that returns a public object by its content hash, after verifying the hash."""

ImageOf = Callable[[], Float[np.ndarray, "c x y z"]]
"""A function that returns a public volume's image on the study's grid."""


class Encoder(Protocol):
    """Turns one voter's predictions into its one code, for one query."""

    @property
    def volume_key(self) -> Hashable:
        """A value that identifies how :meth:`of_volume` encodes.

        Encoders of one codec with equal keys return the same code for the same prediction and image. A site then
        computes a volume's codes once for all rounds that ask for them.
        """
        ...

    def of_volume(self, probabilities: Float[np.ndarray, "k x y z"], image: ImageOf) -> Float[np.ndarray, "l"]:
        """Return the unclipped code of one volume from a voter's prediction. # sensitive

        Args:
            probabilities: Class probabilities, [k, x, y, z].
            image: Returns the volume's image on the study's grid; encoders that need no image do not call it.

        Returns:
            Float array of shape [l].

        Raises:
            InvalidInput: If the probabilities are invalid.
        """
        ...

    def of_voter(self, codes: Float[np.ndarray, "n l"]) -> Float[np.ndarray, "d"]:
        """Return the unclipped code that a voter sends. # sensitive

        The norm of the result is not bounded; the caller clips it.

        Args:
            codes: The voter's codes of all the query's volumes in turn, [n, l].

        Returns:
            Float array of shape [d].
        """
        ...


class SiteProtocol(Protocol):
    """A query protocol at a site. It is created without arguments and has no state."""

    def describes(self, query: QuerySpec) -> bool:
        """Return whether a query belongs to this protocol, judged by its number of volumes and ``centre`` alone.

        Args:
            query: The query.

        Returns:
            True if the protocol can answer it.
        """
        ...

    def encoder(self, query: QuerySpec, codec: Codec, *, fetch: Fetch) -> Encoder:
        """Return the encoder with which voters answer a query.

        Args:
            query: The query.
            codec: The study's codec.
            fetch: Gets other public objects of the query by content hash.

        Returns:
            The encoder.

        Raises:
            InvalidInput: If the codec or an object does not fit the query's volumes or dimension.
        """
        ...


class FramedSite(SiteProtocol):
    """The site's part of a protocol whose queries name a frame: ``QuerySpec.centre`` holds the frame's content hash."""

    def describes(self, query: QuerySpec) -> bool:
        return query.centre != "zero"


def check_dimension(query: QuerySpec, dimension: int, *, whose: str) -> None:
    """Refuse a query whose code does not have a given length.

    Args:
        query: The query.
        dimension: The length that it must have.
        whose: Name of the object that has this length, for the error: the codec or the frame.

    Raises:
        InvalidInput: If its length differs.
    """
    if query.mechanism.dimension != dimension:
        raise InvalidInput(
            "code dimension", value=query.mechanism.dimension, limit=f"{dimension}, the {whose}'s dimension"
        )


def site_protocol(study: Study) -> SiteProtocol:
    """Return the implementation of a study's protocol for sites.

    Args:
        study: The study.

    Returns:
        A new instance, imported from the registry on first use.
    """
    made: SiteProtocol = registered(study.codec.terms.site)()
    return made


def vote_of(encoder: Encoder, codes: Sequence[Float[np.ndarray, "l"]], mechanism: Mechanism) -> Int64[np.ndarray, "d"]:
    """Return one voter's vote on a query: its combined code as integers, clipped. # sensitive

    Args:
        encoder: The query's encoder, which combines the codes of all its volumes.
        codes: The voter's unclipped codes of the query's volumes, in the query's order.
        mechanism: The query's mechanism, which states the clipping norm and the dimension d.

    Returns:
        int64 array of shape [d], of norm at most ``mechanism.radius_int``.

    Raises:
        InvalidInput: If a code is not finite, or the combined code has another length than d.
    """
    vote = quantise(encoder.of_voter(np.stack(codes)), radius_int=mechanism.radius_int)
    if vote.shape != (mechanism.dimension,):
        raise InvalidInput("shape of a voter's code", value=vote.shape, limit=str((mechanism.dimension,)))
    return vote
