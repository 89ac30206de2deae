"""A batch of queries while it is asked: what was offered to whom, what came back, and what follows it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from common.masking import MaskedRoster
from common.messages import CodesReply, Offer, OfferReply
from common.privacy.mechanism import QuerySpec
from common.privacy.release import CodeSum


def issued_now(offer: Offer) -> Offer:
    """The offer as it goes out now: a message that is held back and brought later is known by its time."""
    return replace(offer, issued=time.time_ns() // 1_000_000)


@dataclass(slots=True)
class Batch:
    """A batch to be offered to the sites ``able`` to pay for it, and what sites have said to it so far, by name.

    ``roster``: of a sealed sum, once it is settled. ``unreached``: sites on the roster that were found offline
    when their codes were asked for.
    """

    offer: Offer
    able: frozenset[str]
    answers: dict[str, str] = field(default_factory=dict)
    replies: dict[str, OfferReply] = field(default_factory=dict)
    roster: MaskedRoster | None = None
    unreached: set[str] = field(default_factory=set)

    @property
    def id(self) -> str:
        return self.offer.batch

    @property
    def queries(self) -> tuple[QuerySpec, ...]:
        return self.offer.queries


@dataclass(frozen=True, slots=True)
class Opened:
    """One reply's codes by query id, the ids of those refused with the word why, and what the site signed of its codes,
    empty in an open study. # sensitive until noised"""

    codes: dict[str, NDArray[np.int64]]
    refused: dict[str, str]
    signatures: dict[str, bytes] = field(default_factory=dict)


def unusable(message: CodesReply, problem: str, *, batch: Batch, attempt: int) -> str:
    """Why a reply to one attempt has no codes to take: ``unfinished`` or ``problem``; empty if it has."""
    if (message.batch, message.attempt) != (batch.id, attempt):
        return problem
    known = {query.id for query in batch.queries}
    return (
        "unfinished" if not message.codes else "" if known.issuperset(query for query, _ in message.codes) else problem
    )


class Answering:
    """What the roster has said to each query of a batch so far: a running sum, and who needs no asking again.

    A site's first codes are its last: each is added once, and what was refused, or did not come with the others, counts
    as the zero code.
    """

    def __init__(self, queries: Sequence[QuerySpec], roster: Iterable[str]) -> None:
        names = frozenset(roster)
        self.sums = {query.id: CodeSum(query.mechanism) for query in queries}
        self._open = {query.id: set(names) for query in queries}
        self.heard: set[str] = set()
        """Sites of which a code was added."""

    def take(self, site: str, opened: Opened) -> None:
        """Take in one reply of a site: the codes of all queries or, while one is missing, none. # sensitive"""
        for query, code in opened.codes.items():
            if site in self._open[query]:
                self.sums[query].add(code)
                self.heard.add(site)
        if opened.codes or opened.refused:
            for sites in self._open.values():
                sites.discard(site)

    def missing(self, site: str) -> tuple[str, ...]:
        """The queries of which nothing came from a site yet."""
        return tuple(query for query, sites in self._open.items() if site in sites)

    @property
    def complete(self) -> bool:
        return not any(self._open.values())


@dataclass(frozen=True, slots=True)
class Next:
    """What follows a batch: the queries that are still open, and the batch of them that is offered already."""

    queries: tuple[QuerySpec, ...]
    ahead: Batch | None
    budget_ended: bool
