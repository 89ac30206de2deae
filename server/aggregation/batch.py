"""Holds the state of a batch of queries while it is offered and answered; the aggregators keep it here."""

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
    """Return the offer with the current time, by which a site recognises a message that was held back and replayed."""
    return replace(offer, issued=time.time_ns() // 1_000_000)


@dataclass(slots=True)
class Batch:
    """A batch of queries, with the sites' answers to its offer so far.

    Attributes:
        offer: The offer as it goes to the sites.
        able: Names of the sites that can pay for the batch.
        answers: By site, ``accepted`` or the reason why not.
        replies: By site, the whole reply to the offer.
        roster: In a sealed sum, the roster once it is fixed.
        unreached: Sites on the roster that were offline when their codes were requested.
    """

    offer: Offer
    able: frozenset[str]
    answers: dict[str, str] = field(default_factory=dict)
    replies: dict[str, OfferReply] = field(default_factory=dict)
    roster: MaskedRoster | None = None
    unreached: set[str] = field(default_factory=set)

    @property
    def id(self) -> str:
        """Digest of the study and its query ids."""
        return self.offer.batch

    @property
    def queries(self) -> tuple[QuerySpec, ...]:
        """The queries, in the order of the plan."""
        return self.offer.queries


@dataclass(frozen=True, slots=True)
class Opened:
    """The opened codes of one reply. # sensitive until noised

    Attributes:
        codes: Int64 code by query id; masked in a sealed study.
        refused: By query id, the word why its code was refused.
        signatures: By query id, the site's signature over its masked code; empty in an open study.
    """

    codes: dict[str, NDArray[np.int64]]
    refused: dict[str, str]
    signatures: dict[str, bytes] = field(default_factory=dict)


def unusable(message: CodesReply, problem: str, *, batch: Batch, attempt: int) -> str:
    """Return the word why a reply has no codes to accept, or an empty string if it has.

    Args:
        message: The reply.
        problem: The word for a reply to another batch or attempt, or with an unknown query.
        batch: The batch that was asked for.
        attempt: The attempt it was asked in.

    Returns:
        ``problem``, ``unfinished`` for a reply without codes, or an empty string.
    """
    if (message.batch, message.attempt) != (batch.id, attempt):
        return problem
    known = {query.id for query in batch.queries}
    return (
        "unfinished" if not message.codes else "" if known.issuperset(query for query, _ in message.codes) else problem
    )


class Answering:
    """A running sum for each query of a batch, and the sites that still have to answer.

    The first reply of a site that has codes or refusals is its last. Each code is added once; a code that was refused
    or did not come with the others counts as the zero code.

    Args:
        queries: The batch's queries.
        roster: Names of the sites on the roster.
    """

    def __init__(self, queries: Sequence[QuerySpec], roster: Iterable[str]) -> None:
        names = frozenset(roster)
        self.sums = {query.id: CodeSum(query.mechanism) for query in queries}
        self._open = {query.id: set(names) for query in queries}
        self.heard: set[str] = set()
        """Sites of which at least one code was added."""

    def take(self, site: str, opened: Opened) -> None:
        """Add the codes of one reply of a site. # sensitive

        Args:
            site: The site's name; codes of a site that has answered before are ignored.
            opened: The reply's codes. A reply without codes and refusals changes nothing.
        """
        for query, code in opened.codes.items():
            if site in self._open[query]:
                self.sums[query].add(code)
                self.heard.add(site)
        if opened.codes or opened.refused:
            for sites in self._open.values():
                sites.discard(site)

    def missing(self, site: str) -> tuple[str, ...]:
        """Return the ids of the queries for which nothing has come from a site yet."""
        return tuple(query for query, sites in self._open.items() if site in sites)

    @property
    def complete(self) -> bool:
        """True once every site has answered."""
        return not any(self._open.values())


@dataclass(frozen=True, slots=True)
class Next:
    """What follows a batch.

    Attributes:
        queries: The queries that are still open.
        ahead: The batch of them that has been offered already, if any.
        budget_ended: True if the ledger refused a query of the batch for want of budget.
    """

    queries: tuple[QuerySpec, ...]
    ahead: Batch | None
    budget_ended: bool
