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
from itertools import count, takewhile
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from common.config import Study
from common.errors import QuorumNotReached, Refused
from common.evidence import SiteWords, is_word_of
from common.ledger.charges import RosterEntry
from common.masking import MaskedRoster, Member, is_signed
from common.messages import Offer
from common.peers import Peer
from common.privacy.mechanism import QuerySpec
from common.privacy.shares import Length, unmasked
from common.public_keys import point_of
from server.aggregation.aggregator import Aggregator
from server.aggregation.batch import Batch, Next, Opened
from server.aggregation.exchange import Transport
from server.ledger.server_draws import Draw, StoredAnswer
from server.study.spoiled import question, spoiled_draws
from server.study.workspace import Site


@dataclass(slots=True)
class _Sum:
    """What has come in for one draw: words added up by query, and whose are still missing.

    ``keep`` takes each site's signed words, which are the evidence of a dispute, before they are added.
    """

    draw: Draw
    missing: set[str]
    keep: Callable[[SiteWords], None]
    totals: dict[str, NDArray[np.uint64]] = field(default_factory=dict)

    def add(self, site: str, opened: Opened) -> None:
        """Add one site's words, once and only if they are of every query."""
        if site not in self.missing or opened.codes.keys() != {query.id for query in self.draw.queries}:
            return
        sent = {query: words.view(np.uint64) for query, words in opened.codes.items()}
        self.keep(SiteWords.of(site, self.draw.roster.id, sent, opened.signatures))
        self.missing.discard(site)
        for query, words in opened.codes.items():
            total = self.totals.setdefault(query, np.zeros(words.size, dtype=np.uint64))
            total += words.view(np.uint64)  # modulo 2⁶⁴


class SealedSums(Aggregator):
    """An :class:`Aggregator` that never holds a site's code."""

    _length: Length | None = None
    """How long the study's sums are together, once that was read from the ledger."""

    def open_queries(self) -> tuple[QuerySpec, ...]:
        """As for any study, those that were drawn least often first: they may be accepted already."""
        return tuple(sorted(super().open_queries(), key=lambda query: self._ledger.last_draw(query.id)))

    def run(self, transport: Transport, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """End the draws that an earlier process left open, then answer all open queries."""
        planned = {query.id for query in self._queries}
        for draw in self._ledger.open_draws(self._study.id):
            if {query.id for query in draw.queries} <= planned and not should_stop():
                self._resume(draw, transport)
        super().run(transport, should_stop=should_stop)

    # --- offering

    def _plan(
        self, queries: Sequence[QuerySpec], *, before: Batch | None = None, roster: Sequence[Site] = ()
    ) -> Batch | None:
        """As for any study, of queries that were drawn equally often.

        An offer has one number for the draws of all its queries. Beside a query that was drawn before, one that sites
        have accepted already would be offered in a later draw, and be charged to them again.
        """
        drawn = [self._ledger.last_draw(query.id) for query in queries]
        alike = tuple(query for query, _ in takewhile(lambda one: one[1] == drawn[0], zip(queries, drawn, strict=True)))
        return super()._plan(alike, before=before, roster=roster)

    def _sites_for(self, names: Iterable[str]) -> tuple[Site, ...]:
        by_name = {site.name: site for site in self._sites()}
        return tuple(by_name[name] for name in names if name in by_name)

    def _room(self, query: QuerySpec, in_flight: Mapping[str, int] = MappingProxyType({})) -> dict[Site, int]:
        """As for any study, without sites that left a draw incomplete in this run or have no key to be known by."""
        room = super()._room(query, in_flight)
        return {site: left for site, left in room.items() if site.name not in self._left_out and site.answer_key}

    def _unable(self, site: Site) -> str:
        return super()._unable(site) if site.answer_key or site.name in self._left_out else "unsigned"

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

        Of two that give the same one, or a twin of it, the later has copied it.
        """
        given: dict[bytes, str] = {}
        for name, reply in batch.replies.items():  # as they came
            if reply.mask is not None:
                given.setdefault(point_of(reply.mask.key), name)
        signed = []
        for site in accepted:
            mask, draw = batch.replies[site.name].mask, batch.offer.draw_id
            if (
                mask is not None
                and draw is not None
                and given[point_of(mask.key)] == site.name
                and is_signed(mask, draw, identity=site.answer_key, site=site.name)
            ):
                signed.append(site)
            else:
                self._note_answer(site, batch, "malformed")
        return signed

    def _mutual(self, sites: Sequence[Site], batch: Batch) -> tuple[Site, ...]:
        """The sites without those that have not confirmed each other.

        Whoever is unknown to more sites than may collude is left out, the most unknown first: an honest site says so,
        too. Otherwise it is whoever says so that is left out, or one word of a dishonest site would evict any other.
        """
        strangers = {site.name: set(batch.replies[site.name].unconfirmed or ()) for site in sites}
        for name, unknown in sorted(strangers.items()):
            if met := sorted(unknown & strangers.keys()):
                self._events.emit("peers-unconfirmed", site=name, peers=met)
        left = {site.name: site for site in sites}
        while left:
            unknown_to = {name: sum(name in strangers[other] for other in left) for name in left}
            unknown_there = {name: len(strangers[name] & left.keys()) for name in left}
            if not any(unknown_there.values()):
                break
            credible = {name: said for name, said in unknown_to.items() if said > self._study.privacy.colluders}
            against = credible or unknown_there
            del left[max(against, key=lambda name: (against[name], unknown_there[name], name))]
        return tuple(sorted(left.values(), key=lambda site: site.name))

    # --- adding up

    def _check_code(
        self, code: NDArray[np.int64], query: QuerySpec, *, batch: Batch, site: Site, signature: bytes
    ) -> None:
        """Refused (``unsigned``) for words that the site did not sign as its own for this roster and query.

        Masked words are any; the sum has a bound of its own.
        """
        of = {"query": query.id, "site": site.name, "identity": site.answer_key}
        if batch.roster is None or not is_word_of(code.view(np.uint64), signature, roster=batch.roster.id, **of):
            raise Refused("unsigned", "words without their site's signature over them")

    def _completed(
        self, batch: Batch, draw: Draw, roster: Sequence[Site], ahead: Batch | None, transport: Transport
    ) -> tuple[StoredAnswer, ...]:
        """Wait for the words of the whole roster; the answers, stored. None where the draw was lost."""
        summed, batch.roster = _Sum(draw, set(draw.roster.sites), self._keep_words), draw.roster
        wanted = tuple(query.id for query in draw.queries)
        until = self._clock() + self._study.collection.patience_s
        for attempt in count(1):
            waiting = {site.node_id: wanted for site in roster if site.name in summed.missing}
            if not summed.missing or (attempt > 1 and self._clock() >= until):
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
        """Each query's noisy sum, put on record. Raises once those that are sound are stored, if one was spoiled.

        Where the sums of the study are longer together than honest ones are, all of this draw are spoiled: a site that
        pushes a little in each was within what noise hides in every one.
        """
        sums: dict[str, NDArray[np.int64]] = {}
        together, sites = self._length or self._length_so_far(), len(draw.roster.members)
        for query in draw.queries:
            try:
                noisy = unmasked(totals[query.id], query.mechanism, sites=sites)
            except Refused:
                continue
            sums[query.id] = noisy
            together += Length.of(noisy, query.mechanism, sites=sites)
        if not together.is_honest:
            sums.clear()
        self._length = together if sums else None
        answers = [self._ledger.store_answer(query, draw.roster.draw, noisy) for query, noisy in sums.items()]
        if spoiled := [query for query in draw.queries if query.id not in sums]:
            self._lose(Draw(tuple(spoiled), draw.roster), "spoiled", sites=draw.roster.sites)
            raise Refused("sum-spoiled", question(self._ledger, self._study) or "sum-spoiled")
        return tuple(answers)

    def _length_so_far(self) -> Length:
        """How long the study's own sums are together, from the last spoiled draw on: those before were asked about."""
        spoiled = spoiled_draws(self._ledger, self._study)
        after = spoiled[-1].row if spoiled else 0
        total = Length()
        for answer in self._ledger.answers(self._study.id):
            if answer.seq > after and answer.study_id == self._study.id:
                total += Length.of(answer.noisy_sum, answer.query.mechanism, sites=len(answer.roster))
        return total

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
