"""Holds the state of a batch of queries while it is offered and answered.

The aggregators of open and of sealed studies use it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import numpy as np
from numpy.typing import NDArray

from common.masking import MaskedRoster
from common.messages import AnyMessage, CodesReply, CodesRequest, Offer, OfferReply
from common.privacy.mechanism import QuerySpec
from common.privacy.release import CodeSum
from common.sealing import UNOPENED, WRONG_SIZE

SITES_CHARGED = (
    "the server charged nothing for this batch, but each site that accepted it has charged its own ledger; "
    "if the same offer is repeated, no site charges it again"
)
"""Part of an error text: which ledgers have charged an offer that misses the quorum."""
SLOW_FACTOR = 5
"""A site is slow if the run waits for it longer than this many times the median of the others, and :data:`SLOW_S`."""
SLOW_S = 60.0
"""A site for which the run waits no longer than this many seconds is not slow."""
LACKING = "missing"
"""Reason why a site's code counts as the zero code: its reply has other codes of the batch, but not this one."""
_PUT_BACK = (
    "restore the newest keys/sealing.key and the sealing.key.retired-… beside it (if they are lost: `consilium ledger "
    "rotate-sealing-key --lost`)"
)


def unusable_codes(refused: Mapping[str, str], *, opens: bool) -> str:
    """Return what a person does about sites whose codes were refused.

    A single site can send a code that no key opens, so the server's keys alone are named only if no code opened.

    Args:
        refused: By site, the one-word reason why its codes were refused.
        opens: True if a sealing key of the server opened the code of any site.

    Returns:
        The beginning of a remedy; empty if there are no such sites.
    """
    unopened = ", ".join(sorted(site for site, reason in refused.items() if reason == UNOPENED))
    others = ", ".join(f"{site} ({reason})" for site, reason in sorted(refused.items()) if reason != UNOPENED)
    text = ""
    if others:
        text = (
            f"the server refused codes of {others}: ask its staff which version of the software runs there and what "
            "they changed in it; "
        )
    if unopened and opens:
        text += (
            f"the sealing keys of this study open codes, but not those of {unopened}: ask its staff to compare the "
            "sealing key in site.toml with the server's (`consilium ledger rotate-sealing-key --again` writes the "
            f"notice for `consilium site take-sealing-key`); if keys/ was restored, {_PUT_BACK}; "
        )
    elif unopened:
        text += f"no sealing key of this study opens the codes of {unopened}: {_PUT_BACK}; "
    return text


def issued_now(offer: Offer) -> Offer:
    """Return an offer stamped with the current time.

    A site compares the stamp with its clock, to recognise an offer that was held back and sent later.

    Args:
        offer: The offer; it is not modified.

    Returns:
        A copy whose ``issued`` is the current time in milliseconds since 1970.
    """
    return replace(offer, issued=time.time_ns() // 1_000_000)


@dataclass(slots=True)
class Batch:
    """A batch of queries, with the sites' answers to its offer so far.

    Attributes:
        offer: The offer as it goes to the sites.
        able: Names of the sites that can pay for the batch.
        answers: By site, ``accepted`` or the reason why the site declined.
        replies: By site, the whole reply to the offer.
        roster: In a sealed study the draw's roster, once it is fixed; otherwise None.
        unreached: Sites on the roster that were offline when their codes were requested.
        declined: Sites on the roster that replied to a request for codes, but not with codes that can be used. A site
            is not among them if it has not finished its codes, or if no key of the server opens them.
        waited: By site, the seconds that the run waited for it to come online, to answer the offer and to send codes.
    """

    offer: Offer
    able: frozenset[str]
    answers: dict[str, str] = field(default_factory=dict)
    replies: dict[str, OfferReply] = field(default_factory=dict)
    roster: MaskedRoster | None = None
    unreached: set[str] = field(default_factory=set)
    declined: set[str] = field(default_factory=set)
    waited: defaultdict[str, float] = field(default_factory=partial(defaultdict, float))

    @property
    def id(self) -> str:
        """Digest of the study's id and the ids of the batch's queries."""
        return self.offer.batch

    @property
    def queries(self) -> tuple[QuerySpec, ...]:
        """The queries, in the order of the plan."""
        return self.offer.queries

    def request(self, queries: tuple[str, ...], *, attempt: int, deadline_s: float) -> CodesRequest:
        """Return the message that asks a site of the roster for codes.

        Args:
            queries: Ids of the queries whose codes the site has not sent.
            attempt: Number of the attempt, from 1.
            deadline_s: Seconds that the site has.

        Returns:
            The message.
        """
        return CodesRequest(
            study=self.offer.study,
            ledger=self.offer.ledger,
            batch=self.id,
            attempt=attempt,
            deadline_s=max(1, int(deadline_s)),
            queries=queries,
            draw=self.offer.draw,
            members=None if self.roster is None else self.roster.members,
        )

    def note_unusable(
        self, site: str, message: AnyMessage | None, answer: CodesReply | None, opened: Decrypted | None
    ) -> str:
        """Note in :attr:`declined` if a site's reply to a request for codes contains no codes that can be used.

        Args:
            site: The site's name.
            message: The site's whole reply; None if it is missing or unreadable.
            answer: The part of the reply with the codes; None if there is none.
            opened: The decrypted codes; None if there is none.

        Returns:
            A one-word reason why codes of the reply were refused; empty if none was. ``sealed-code`` is returned only
            if it is the only reason.
        """
        refused = set() if opened is None else set(opened.refused.values())
        others = sorted(refused - {UNOPENED})
        unusable = opened is None or bool(refused - {UNOPENED, LACKING})
        if message is not None and unusable and (answer is None or answer.codes):
            self.declined.add(site)
        return next(iter((*others, *refused)), "")

    def slow(self, roster: Collection[str]) -> dict[str, tuple[float, float]]:
        """Return the sites that are slow by both :data:`SLOW_FACTOR` and :data:`SLOW_S`.

        Args:
            roster: Names of the sites on the roster.

        Returns:
            By site, the seconds that the run waited for it, and the median of the roster's other sites. Empty if the
            roster has no other site.
        """
        found = {}
        for site, seconds in sorted(self.waited.items()):
            others = [self.waited[name] for name in roster if name != site]
            if others and seconds > max(SLOW_S, SLOW_FACTOR * median(others)):
                found[site] = (round(seconds, 3), round(median(others), 3))
        return found


@dataclass(frozen=True, slots=True)
class Decrypted:
    """The decrypted codes of one reply. # sensitive until noised

    Attributes:
        codes: Int64 code by query id; masked in a sealed study.
        refused: By query id, a one-word reason why its code was refused, or that the reply lacks it.
        signatures: By query id, the site's signature over its masked code; empty in an open study.
    """

    codes: dict[str, NDArray[np.int64]]
    refused: dict[str, str]
    signatures: dict[str, bytes] = field(default_factory=dict)

    def refuse_lacking(self, queries: Sequence[str]) -> None:
        """Enter queries whose codes are not in the reply as refused. An honest site sends all codes or none.

        Args:
            queries: Ids of all queries of the batch.
        """
        self.refused.update(
            (query, LACKING) for query in queries if query not in self.codes.keys() | self.refused.keys()
        )

    @property
    def by_a_key(self) -> bool:
        """True if a sealing key of the server opened at least one code, used or refused."""
        return bool(self.codes) or bool(set(self.refused.values()) - {UNOPENED, WRONG_SIZE, LACKING})


class Answering:
    """A running sum for each query of a batch, and the sites that still have to answer.

    Only a site's first reply with codes or refusals counts; its later replies are ignored. A code that the first reply
    lacks, or that was refused, counts as the zero code.

    Args:
        queries: The batch's queries.
        roster: Names of the sites on the roster.
    """

    def __init__(self, queries: Sequence[QuerySpec], roster: Iterable[str]) -> None:
        names = frozenset(roster)
        self.sums = {query.id: CodeSum(query.mechanism) for query in queries}
        self._open = {query.id: set(names) for query in queries}
        self.heard: set[str] = set()
        """Names of the sites that sent at least one code that was added."""

    def take(self, site: str, opened: Decrypted) -> None:
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
        """Return the ids of the queries for which a site has sent nothing yet.

        Args:
            site: The site's name.

        Returns:
            Query ids, in the order of the batch; empty once the site has answered.
        """
        return tuple(query for query, sites in self._open.items() if site in sites)


@dataclass(frozen=True, slots=True)
class Remaining:
    """The work that is left after a batch.

    Attributes:
        queries: The queries that are still open.
        ahead: The next batch, if sites have been offered it already; otherwise None.
        budget_ended: True if the ledger refused a query of the batch because a budget does not suffice for it.
    """

    queries: tuple[QuerySpec, ...]
    ahead: Batch | None
    budget_ended: bool
