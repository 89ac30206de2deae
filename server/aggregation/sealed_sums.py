"""The server core of a sealed study: it adds up words it cannot read, and has a sum once a whole roster has sent.

A draw is one attempt at it: a roster of sites that accepted and have confirmed each other's keys, charged before
anybody is asked. It waits for late sites as long as the study's patience; then it is lost, stays charged, and another
is begun without the sites that stayed silent, while the budget lasts. What a crash leaves open is asked for again,
under the same roster, for the same words. Refuses a sum that honest sites cannot have made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from common.config import Study
from common.errors import QuorumNotReached, Refused
from common.ledger.charges import RosterEntry
from common.masking import MaskedRoster, Member, is_proper, is_signed
from common.messages import Offer
from common.peers import Peer
from common.privacy.mechanism import QuerySpec
from common.privacy.shares import unmasked
from server.aggregation.aggregator import Aggregator
from server.aggregation.batch import Batch, Next, Opened
from server.aggregation.exchange import Transport
from server.ledger.server_draws import Draw, StoredAnswer
from server.study.workspace import Site


@dataclass(slots=True)
class _Sum:
    """What has come in for one draw: words added up by query, and whose are still missing. None of them is kept."""

    draw: Draw
    missing: set[str]
    totals: dict[str, NDArray[np.uint64]] = field(default_factory=dict)

    def add(self, site: str, opened: Opened) -> None:
        """Add one site's words, once and only if they are of every query."""
        if site not in self.missing or opened.codes.keys() != {query.id for query in self.draw.queries}:
            return
        self.missing.discard(site)
        for query, words in opened.codes.items():
            total = self.totals.setdefault(query, np.zeros(words.size, dtype=np.uint64))
            total += words.view(np.uint64)  # modulo 2⁶⁴


class SealedSums(Aggregator):
    """An :class:`Aggregator` that never holds a site's code."""

    _left_out: frozenset[str] = frozenset()

    def run(self, transport: Transport, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """End the draws that an earlier process left open, then answer all open queries."""
        planned = {query.id for query in self._queries}
        for draw in self._ledger.open_draws(self._study.id):
            if {query.id for query in draw.queries} <= planned and not should_stop():
                self._resume(draw, transport)
        super().run(transport, should_stop=should_stop)

    # --- offering

    def _sites_for(self, names: Iterable[str]) -> tuple[Site, ...]:
        by_name = {site.name: site for site in self._sites()}
        return tuple(by_name[name] for name in names if name in by_name)

    def _room(self, query: QuerySpec, in_flight: Mapping[str, int] = MappingProxyType({})) -> dict[Site, int]:
        """As for any study, without sites that left a draw incomplete in this run or have no key to be known by."""
        room = super()._room(query, in_flight)
        return {site: left for site, left in room.items() if site.name not in self._left_out and site.answer_key}

    def _unable(self, site: Site) -> str:
        if site.name in self._left_out:
            return "left-out"
        return super()._unable(site) if site.answer_key else "unsigned"

    def _offer(self, queries: tuple[QuerySpec, ...], able: tuple[Site, ...], *, draw: int = 0) -> Offer:
        """The next draw of these queries, offered to the sites that may be on its roster."""
        plain = super()._offer(queries, able)
        peers = tuple(sorted((Peer(site.name, site.answer_key) for site in able), key=lambda peer: peer.site))
        number = max(draw, 1 + max(self._ledger.last_draw(query.id) for query in queries))
        return replace(plain, draw=number, peers=peers)

    def _redrawn(self, batch: Batch, *, draw: int) -> Batch:
        """The same queries, offered in a later draw."""
        able = tuple(site for site in self._sites() if site.name in batch.able)
        return Batch(self._offer(batch.queries, able, draw=draw), able=batch.able)

    def _answer(self, batch: Batch, later: Sequence[QuerySpec], transport: Transport) -> Next:
        """As for any study; what a lost draw was to answer is asked after the rest, which may be accepted already."""
        try:
            batch, roster, masks = self._masked_roster(batch, transport)
        except QuorumNotReached:
            if not self._spent_at_sites(batch):
                raise
            self._events.emit("budget-refused", batch=batch.id, queries=[query.id for query in batch.queries])
            return Next((*batch.queries, *later), None, budget_ended=True)
        entries = tuple(RosterEntry(site=site.name, pool=site.pool) for site in roster)
        result = self._ledger.charge_draw(study_id=self._study.id, roster=entries, masks=masks, queries=batch.queries)
        if result.refused:
            self._events.emit("budget-refused", batch=batch.id, queries=list(result.refused))
        ahead = None if result.refused else self._plan(later)
        left = [query for query in batch.queries if query.id in result.refused]
        if result.draw is not None and not self._completed(batch, result.draw, roster, ahead, transport):
            left += result.draw.queries
        return Next((*later, *left), ahead, budget_ended=bool(result.refused))

    def _spent_at_sites(self, batch: Batch) -> bool:
        """Whether too few accepted because the sites' own ledgers have no room: each charges what it accepts."""
        answers = list(batch.answers.values())
        return answers.count("budget") > len(answers) - self._study.privacy.quorum

    def _masked_roster(self, batch: Batch, transport: Transport) -> tuple[Batch, tuple[Site, ...], MaskedRoster]:
        """Who adds up: sites that accepted, gave a key for this draw, and have confirmed each other.

        A site that knows a later draw than this ledger is offered one after that. Raises when too few are left.
        """
        while True:
            try:
                accepted = self._settle(batch, transport)
            except QuorumNotReached:
                newest = self._newest_draw(batch)
                if newest < (batch.offer.draw or 0):
                    raise
                batch = self._redrawn(batch, draw=newest + 1)
                continue
            roster = self._mutual(self._with_keys(accepted, batch), batch)
            if len(roster) < self._study.privacy.quorum:
                self._below_quorum(batch, len(roster), transport)
                raise QuorumNotReached(
                    f"{len(roster)} of the {len(accepted)} sites that accepted have confirmed each other's keys and "
                    f"the study needs {self._study.privacy.quorum}; nothing was charged; to fix: have them run "
                    "`consilium site peers`, then "
                    "`consilium study resume`"
                )
            members = tuple(Member(site.name, mask) for site in roster if (mask := batch.replies[site.name].mask))
            offer = batch.offer
            return batch, roster, MaskedRoster(offer.study, offer.ledger, offer.batch, offer.draw or 0, members)

    def _newest_draw(self, batch: Batch) -> int:
        """The newest draw that a site will not answer again, by one honest site at least; -1 if none says so."""
        declined = [reply for reply in batch.replies.values() if reply.reason == "old-draw"]
        named = sorted((reply.last_draw or 0 for reply in declined), reverse=True)
        honest = named[self._study.privacy.colluders :]  # the colluders may name any number
        return honest[0] if honest else -1

    def _with_keys(self, accepted: Sequence[Site], batch: Batch) -> list[Site]:
        """Those of the sites that gave a key of their own for this draw: with another on it nobody sends a word.

        Of two that give the same one the later has copied it.
        """
        given: dict[str, str] = {}
        for name, reply in batch.replies.items():  # as they came
            if reply.mask is not None:
                given.setdefault(reply.mask.key, name)
        signed = []
        for site in accepted:
            mask, draw = batch.replies[site.name].mask, batch.offer.draw_id
            if (
                mask is not None
                and draw is not None
                and given[mask.key] == site.name
                and is_proper(mask)
                and is_signed(mask, draw, identity=site.answer_key, site=site.name)
            ):
                signed.append(site)
            else:
                self._note_answer(site, batch, "malformed")
        return signed

    def _mutual(self, sites: Sequence[Site], batch: Batch) -> tuple[Site, ...]:
        """The sites without those that others have not confirmed: whoever stands in most ways is left out first."""
        strangers = {site.name: set(batch.replies[site.name].unconfirmed or ()) for site in sites}
        for name, unknown in sorted(strangers.items()):
            if met := sorted(unknown & strangers.keys()):
                self._events.emit("peers-unconfirmed", site=name, peers=met)
        left = {site.name: site for site in sites}
        while left:
            unknown_to = {name: sum(name in strangers[other] for other in left) for name in left}
            against = {name: unknown_to[name] + len(strangers[name] & left.keys()) for name in left}
            worst = max(left, key=lambda name: (against[name], unknown_to[name], name))
            if against[worst] == 0:
                break
            del left[worst]
        return tuple(sorted(left.values(), key=lambda site: site.name))

    # --- adding up

    def _check_code(self, code: NDArray[np.int64], query: QuerySpec) -> None:
        """Nothing: masked words are any. The sum has a bound of its own."""

    def _completed(
        self, batch: Batch, draw: Draw, roster: Sequence[Site], ahead: Batch | None, transport: Transport
    ) -> tuple[StoredAnswer, ...]:
        """Wait for the words of the whole roster; the answers, stored. None where the draw was lost."""
        summed, batch.members = _Sum(draw, set(draw.roster.sites)), draw.roster.members
        wanted = tuple(query.id for query in draw.queries)
        until = self._clock() + self._study.collection.patience_s
        for attempt in count(1):
            waiting = {site.node_id: wanted for site in roster if site.name in summed.missing}
            if not summed.missing or self._clock() >= until:
                break
            reachable = self._reachable(batch, attempt, waiting, roster, transport)
            if reachable:
                self._ask(batch, attempt, reachable, roster, ahead, transport, summed.add, until=until)
            if summed.missing:
                time.sleep(max(0.0, min(self._retry_pause_s, until - self._clock())))
        if summed.missing:
            self._left_out |= summed.missing
            self._lose(draw, "incomplete", sites=summed.missing)
            return ()
        answers = self._store(draw, summed.totals)
        self._note_released(batch, answers, roster)
        return answers

    def _store(self, draw: Draw, totals: dict[str, NDArray[np.uint64]]) -> tuple[StoredAnswer, ...]:
        """Each query's noisy sum, put on record. Raises once those that are sound are stored, if one was spoiled."""
        answers: list[StoredAnswer] = []
        spoiled: list[QuerySpec] = []
        for query in draw.queries:
            try:
                noisy = unmasked(totals[query.id], query.mechanism, sites=len(draw.roster.members))
            except Refused:
                spoiled.append(query)
                continue
            answers.append(self._ledger.store_answer(query.id, draw.roster.draw, noisy))
        if spoiled:
            self._lose(Draw(tuple(spoiled), draw.roster), "spoiled", sites=draw.roster.sites)
            raise Refused(
                "sum-spoiled",
                f"a site of the roster {', '.join(draw.roster.sites)} spoiled {len(spoiled)} of {len(draw.queries)} "
                "sums: they are larger than honest codes with their noise can be, are charged and not released; to "
                "fix: find the site (its version, `consilium site doctor`), or `consilium provision revoke` the one in "
                "doubt, then `consilium study resume`",
            )
        return tuple(answers)

    def _lose(self, draw: Draw, reason: str, *, sites: Iterable[str]) -> None:
        self._ledger.lose_draw(draw, reason)
        self._events.emit(
            "draw-lost",
            batch=draw.roster.batch,
            draw=draw.roster.draw,
            queries=[query.id for query in draw.queries],
            sites=sorted(sites),
            reason=reason,
        )

    def _resume(self, draw: Draw, transport: Transport) -> None:
        """Ask for an open draw again: every site has the words it sent, or makes them now."""
        roster = self._sites_for(draw.roster.sites)
        if len(roster) < len(draw.roster.members):
            self._lose(draw, "incomplete", sites=set(draw.roster.sites) - {site.name for site in roster})
            return
        offer = Offer(draw.roster.study, draw.roster.ledger, draw.roster.batch, draw.queries, draw.roster.draw, ())
        self._completed(Batch(offer, able=frozenset(draw.roster.sites)), draw, roster, None, transport)


def aggregator_of(study: Study) -> type[Aggregator]:
    """Which core runs a study."""
    return SealedSums if study.privacy.sealed else Aggregator
