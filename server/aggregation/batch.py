"""A batch of queries while it is asked: what was offered to whom, what came back, and what follows it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.masking import Member
from common.messages import Offer, OfferReply
from common.privacy.mechanism import QuerySpec


@dataclass(slots=True)
class Batch:
    """A batch to be offered to the sites ``able`` to pay for it, and what sites have said to it so far, by name.

    ``members``: of a sealed sum, once its roster is settled.
    """

    offer: Offer
    able: frozenset[str]
    answers: dict[str, str] = field(default_factory=dict)
    replies: dict[str, OfferReply] = field(default_factory=dict)
    members: tuple[Member, ...] | None = None

    @property
    def id(self) -> str:
        return self.offer.batch

    @property
    def queries(self) -> tuple[QuerySpec, ...]:
        return self.offer.queries


@dataclass(frozen=True, slots=True)
class Opened:
    """One reply's codes by query id, and the ids of those refused with the word why. # sensitive until noised"""

    codes: dict[str, NDArray[np.int64]]
    refused: dict[str, str]


@dataclass(frozen=True, slots=True)
class Next:
    """What follows a batch: the queries that are still open, and the batch of them that is offered already."""

    queries: tuple[QuerySpec, ...]
    ahead: Batch | None
    budget_ended: bool
