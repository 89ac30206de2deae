"""Runs the queries of a sealed study: adds up masked codes, and learns only the noisy sum of a whole roster.

``pipeline.collect`` calls it for studies whose ``privacy.aggregation`` is ``sealed-sum``. A *draw* is one attempt at a
batch of queries. It takes these steps in order; the code repeats their numbers:

1. The roster is fixed. It consists of sites that accepted the offer, gave a key for this draw and have confirmed each
   other's keys.
2. The draw is charged.
3. The sites are asked for their masked codes for ``collection.patience_s`` seconds. If one stays silent, the draw is
   lost but stays charged, and another draw is started without that site while the budget lasts. If the study needs
   that site, the draw stays open instead, and the run ends.
4. The masked codes are added. The masks cancel, and the noisy sum remains. It is checked and stored.

After a crash, an unfinished draw is requested again under the same roster, and the sites send the same masked codes. A
sum that honest sites cannot have produced is refused. Masked codes are integers modulo 2⁶⁴.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from common.config import Study
from common.errors import QuorumNotReached, Refused
from common.evidence import SiteCodes, is_word_of
from common.ledger.charges import RosterEntry
from common.masking import MaskedRoster, Member, is_signed
from common.messages import Offer
from common.peers import Peer
from common.privacy.mechanism import QuerySpec
from common.privacy.shares import Length, unmasked
from common.public_keys import point_of
from common.wording import many
from server.aggregation.aggregator import Aggregator
from server.aggregation.batch import SITES_CHARGED, Batch, Decrypted, Remaining, unusable_codes
from server.ledger.recovery import RECOVERED
from server.ledger.server_draws import Draw, StoredAnswer
from server.study.spoiled import question, spoiled_draws
from server.study.workspace import Site

RESTORED = " stated that it answered a draw unknown to this ledger; the queries are drawn again: study "
"""Text of a note in the ledger, after a site's name. It records that the server believed the site's statement that it
had answered a later draw than this ledger contains.
"""
_REDRAWN = re.compile(r"drawn again as draw (?P<draw>[0-9]{1,7}) of batch (?P<batch>[0-9a-f]{64})")
"""Note in the ledger about a batch that was offered again with a later draw number."""
MOST_BELIEVED = 3
"""How many times a study offers its queries again because one site alone states that it answered a later draw. After
that, a person must run `consilium ledger recover` before the study believes such a site again.
"""
MOST_AHEAD = 1_000
"""Largest difference between the draw number that was offered and a later one that one site alone states. A site that
states a larger one is not believed. A site may have answered draws that the server's ledger lacks because it was
restored. Without a limit, one dishonest site could use up all draw numbers.
"""
LATER_DRAW = (
    "; if a site still states a later draw after `consilium study resume`, ask its staff whether its ledger was "
    "restored; if it was, or the server's was, enter that site's receipts with `consilium ledger recover`, also if "
    "this ledger lacks none of them, then resume: the study believes the site again; if that does not help, this study "
    "can only go on without the site: bring back, or admit, other sites until they reach the quorum"
)
"""Remedy in an error: what a person can do if the study does not believe a site that states a later draw."""


@dataclass(slots=True)
class _Sum:
    """The masked codes received for one draw, added up by query.

    Attributes:
        draw: The draw that the masked codes answer.
        missing: Names of the sites whose codes are missing.
        keep: Stores a site's signed masked codes before they are added, as evidence in a dispute.
        totals: Uint64 sum by query id.
    """

    draw: Draw
    missing: set[str]
    keep: Callable[[SiteCodes], None]
    totals: dict[str, NDArray[np.uint64]] = field(default_factory=dict)

    def add(self, site: str, opened: Decrypted) -> None:
        """Add one site's masked codes, once, and only if there is one for every query."""
        if site not in self.missing or opened.codes.keys() != {query.id for query in self.draw.queries}:
            return
        sent = {query: words.view(np.uint64) for query, words in opened.codes.items()}
        self.keep(SiteCodes.of(site, self.draw.roster.id, sent, opened.signatures))
        self.missing.discard(site)
        for query, words in opened.codes.items():
            total = self.totals.setdefault(query, np.zeros(words.size, dtype=np.uint64))
            total += words.view(np.uint64)  # modulo 2⁶⁴


class SealedSums(Aggregator):
    """An :class:`Aggregator` that receives only masked codes. It takes the same arguments."""

    _length: Length | None = None
    """Joint norm of all the study's noisy sums, in units of their noise; None until it is computed from the ledger."""

    def open_queries(self) -> tuple[QuerySpec, ...]:
        """Return the open queries, those with the fewest draws first, because sites may have accepted these already."""
        return tuple(sorted(super().open_queries(), key=lambda query: self._ledger.books.last_draw(query.id)))

    def _finish_open(self, should_stop: Callable[[], bool]) -> None:
        planned = {query.id for query in self._queries}
        for draw in self._ledger.open_draws(self._study.id):
            if {query.id for query in draw.queries} <= planned and not should_stop():
                self._resume(draw)

    # --- steps 1 and 2: offering and charging

    def _plan(
        self, queries: Sequence[QuerySpec], *, before: Batch | None = None, roster: Sequence[Site] = ()
    ) -> Batch | None:
        """Return the next batch by :meth:`Aggregator._plan`, but only with queries that have had equally many draws.

        The batch is taken from the beginning of ``queries``, up to the first query whose newest draw has another
        number. An offer has one draw number for all its queries. If a query that sites have accepted already were
        offered together with a query that has had more draws, it would get a later number, and the sites would charge
        it again.
        """
        drawn = [self._ledger.books.last_draw(query.id) for query in queries]
        alike = tuple(query for query, _ in takewhile(lambda one: one[1] == drawn[0], zip(queries, drawn, strict=True)))
        return super()._plan(alike, before=before, roster=roster)

    def _room(self, query: QuerySpec, in_flight: Mapping[str, int] = MappingProxyType({})) -> dict[Site, int]:
        """Return what :meth:`Aggregator._room` returns, without sites that cannot take part in a draw.

        These are the sites that left a draw incomplete in this run, and those registered without a signing key.
        """
        room = super()._room(query, in_flight)
        return {site: left for site, left in room.items() if site.name not in self._left_out and site.answer_key}

    def _end(self, queries: Sequence[QuerySpec]) -> None:
        """End the run before these queries because too few sites are left.

        Raises:
            QuorumNotReached: If the sites with budget left reach the quorum only together with sites that left a draw
                incomplete in this run.
        """
        waits = (
            "; the server has already charged the sum that still needs their answers; this sum stays open, and asking "
            "for it again charges nothing"
        )
        able = tuple(site for site in super()._room(queries[0]) if site.answer_key)
        silent = [site for site in able if site.name in self._left_out]
        if len(able) < self._study.privacy.quorum:
            super()._end(queries)
            return
        batch = Batch(self._offer(tuple(queries), able), able=frozenset())
        for site in silent:
            self._note_answer(site, batch, "left-out")
        left = len(able) - len(silent)
        self._below_quorum(batch, left)
        raise QuorumNotReached(
            f"these sites accepted queries in this run, but did not answer them in time: "
            f"{', '.join(sorted(site.name for site in silent))}; without them, {many(left, 'site')} with budget can "
            f"take part, and the quorum is {self._study.privacy.quorum}"
            f"{waits if self._ledger.open_draws(self._study.id) else ''}; to fix: "
            f"{unusable_codes(self._refused, opens=self._opens)}bring these sites back online or admit others, "
            f"then `consilium study resume`{self._or_finish()}"
        )

    def _unable(self, site: Site) -> str:
        return super()._unable(site) if site.answer_key or site.name in self._left_out else "unsigned"

    def _offer(self, queries: tuple[QuerySpec, ...], able: tuple[Site, ...], *, draw: int = 0) -> Offer:
        """Return the offer of the next draw of these queries, naming the sites that may be on its roster."""
        plain = super()._offer(queries, able)
        peers = tuple(sorted((Peer(site.name, site.answer_key) for site in able), key=lambda peer: peer.site))
        drawn = max(self._ledger.books.last_draw(query.id) for query in queries)
        number = max(draw, 1 + drawn, self._noted_draws.get(plain.batch, 0))
        return replace(plain, draw=number, peers=peers)

    @cached_property
    def _noted_draws(self) -> dict[str, int]:
        """The draw number, by batch id, of each batch that was offered again with a higher draw number.

        The numbers are read once in a run, from the notes in the ledger. The next run offers the same number, not a
        higher one, because sites that accepted that draw have already charged it to their own ledgers.
        """
        found = filter(None, (_REDRAWN.fullmatch(text) for text in self._ledger.notes()))
        return {one["batch"]: int(one["draw"]) for one in found}

    def _redrawn(self, batch: Batch, *, draw: int) -> Batch:
        """Note a later draw number for a batch in the ledger, and return the batch with this number."""
        able = tuple(site for site in self._sites() if site.name in batch.able)
        again = Batch(self._offer(batch.queries, able, draw=draw), able=batch.able)
        offered = again.offer.draw or draw
        self._ledger.note(f"drawn again as draw {offered} of batch {batch.id}")
        self._noted_draws[batch.id] = offered
        return again

    def _answer(self, batch: Batch, later: Sequence[QuerySpec]) -> Remaining:
        """Make one draw (steps 1 to 4).

        If the draw is lost, its queries are put behind ``later``, because sites may have accepted the next batch, which
        is taken from ``later``.

        Returns:
            The queries that have no answer yet, and the next batch if it was offered during this draw.
        """
        try:
            batch, roster, masks = self._masked_roster(batch)  # step 1
        except QuorumNotReached:
            if not self._spent_at_sites(batch):
                raise
            self._events.emit("budget-refused", batch=batch.id, queries=[query.id for query in batch.queries])
            return Remaining((*batch.queries, *later), None, budget_ended=True)
        entries = tuple(RosterEntry(site=site.name, pool=site.pool) for site in roster)
        # step 2
        result = self._ledger.charge_draw(study_id=self._study.id, roster=entries, masks=masks, queries=batch.queries)
        if result.refused:
            self._events.emit("budget-refused", batch=batch.id, queries=list(result.refused))
        ahead = None if result.refused else self._plan(later)
        left = [query for query in batch.queries if query.id in result.refused]
        if result.draw is not None and not self._completed(batch, result.draw, roster, ahead):
            left += result.draw.queries
            ahead = None if self._ledger.open_draws(self._study.id) else ahead  # an open draw ends the run
        return Remaining((*later, *left), ahead, budget_ended=bool(result.refused))

    def _spent_at_sites(self, batch: Batch) -> bool:
        """Return whether the quorum was missed because too many sites declined for lack of budget in their own ledgers.

        A site's own ledger may have less left than the server's, because it charges every offer that the site accepts.
        The server cannot check this reason. It is therefore believed only if more than max(t, 1) sites state it, where
        t is the number of sites that may collude, and only if the study has an answer already.
        """
        answers = list(batch.answers.values())
        said = answers.count("budget")
        credible = said > max(1, self._study.privacy.colluders) and bool(self.answers())
        return credible and said > len(answers) - self._study.privacy.quorum

    def _masked_roster(self, batch: Batch) -> tuple[Batch, tuple[Site, ...], MaskedRoster]:
        """Offer the batch, and choose the sites of the draw's roster.

        A site is on the roster if it accepted the offer, gave a mask key for this draw, and remains after
        :meth:`_mutual` has excluded the sites whose long-term keys were not confirmed by people.

        A site declines a draw number that it has answered already. This ledger may not know that draw, because a ledger
        was restored from a copy. If too few sites accept for this reason, the batch is offered a second time, with a
        higher draw number. There is no third offer, because every honest site charges its own ledger for each offer.

        Returns:
            The batch that the sites accepted, the sites of the roster, and the roster with their mask keys.

        Raises:
            QuorumNotReached: If fewer sites than the quorum remain.
        """
        redrawn = False
        while True:
            try:
                accepted = self._settle(batch)
            except QuorumNotReached as error:
                newest = -1 if redrawn else self._newest_draw(batch)
                if newest < (batch.offer.draw or 0):
                    raise _named(error, batch) from error
                batch, redrawn = self._redrawn(batch, draw=newest + 1), True
                continue
            roster = self._mutual(self._with_keys(accepted, batch), batch)
            if len(roster) < self._study.privacy.quorum:
                self._below_quorum(batch, len(roster))
                raise QuorumNotReached(
                    f"only {len(roster)} of the {len(accepted)} sites that accepted have confirmed each other's keys, "
                    f"fewer than the quorum of {self._study.privacy.quorum}; {SITES_CHARGED}; to fix: have the sites "
                    "compare and confirm the missing keys with `consilium site peers`, then `consilium study resume`"
                    f"{self._or_finish()}"
                )
            members = tuple(Member(site.name, mask) for site in roster if (mask := batch.replies[site.name].mask))
            offer = batch.offer
            return batch, roster, MaskedRoster(offer.study, offer.ledger, offer.batch, offer.draw or 0, members)

    def _newest_draw(self, batch: Batch) -> int:
        """Return the number of the newest draw that sites state they have answered, if it is credible; otherwise -1.

        A site that declines a draw with the reason ``old-draw`` states the number of the last draw that it answered.
        The t sites that may collude can state any number. The max(t, 1) largest numbers are therefore ignored, and the
        next largest is returned, unless it is smaller than the number of the draw just offered.

        If that gives no number, a single site may still be right, because its ledger or this one may have been restored
        from a copy. A site is believed if its number is that of the draw just offered, or one of the
        :data:`MOST_AHEAD` after it. A site is believed once in a run and :data:`MOST_BELIEVED` times in a study,
        because each time all other sites charge their own ledgers for one more draw. Notes in this ledger record each
        time. The count starts again from 0 when a person recovers this ledger.
        """
        said = {name: reply.last_draw or 0 for name, reply in batch.replies.items() if reply.reason == "old-draw"}
        named = sorted(said.values(), reverse=True)[max(1, self._study.privacy.colluders) :]
        offered = batch.offer.draw or 0
        if named and named[0] >= offered:
            return named[0]
        notes, of = self._ledger.notes(), f"{RESTORED}{self._study.id}"
        notes = notes[max((row for row, text in enumerate(notes, start=1) if RECOVERED in text), default=0) :]
        restored = {name for name, number in said.items() if 0 <= number - offered <= MOST_AHEAD} - self._believed
        believed = sorted(name for name in restored if notes.count(f"{name}{of}") < MOST_BELIEVED)
        for name in believed:  # noted before any site is asked for the draw, which it charges to itself
            self._ledger.note(f"{name}{of}")
        self._believed |= {*believed}
        return max((said[name] for name in believed), default=-1)

    def _with_keys(self, accepted: Sequence[Site], batch: Batch) -> list[Site]:
        """Return the sites that gave a validly signed mask key of their own for this draw; the others are left out.

        No site sends its masked code if the roster contains an invalid key. If two sites give the same key, or two
        encodings of one key, the site that replied later has copied it and is left out.
        """
        given: dict[bytes, str] = {}
        for name, reply in batch.replies.items():  # in order of arrival
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
                self._note_answer(site, batch, "unreadable")
        return signed

    def _mutual(self, sites: Sequence[Site], batch: Batch) -> tuple[Site, ...]:
        """Leave out sites one by one until all remaining sites have confirmed each other's keys; return the remaining
        sites.

        Let t be the number of sites that may collude, or 1 if that is more. If more than t sites have not confirmed the
        key of a site A, at least one of them is honest, so A is left out. If this holds for several sites, the one
        whose key the most sites have not confirmed is left out first. If it holds for none, the site that has not
        confirmed the largest number of keys is left out. The sites with these keys stay, because a single dishonest
        site could otherwise exclude any site.
        """
        unconfirmed = {site.name: set(batch.replies[site.name].unconfirmed or ()) for site in sites}
        for name, unknown in sorted(unconfirmed.items()):
            if met := sorted(unknown & unconfirmed.keys()):
                self._events.emit("peers-unconfirmed", site=name, peers=met)
        left = {site.name: site for site in sites}
        while left:
            unknown_to = {name: sum(name in unconfirmed[other] for other in left) for name in left}
            unknown_there = {name: len(unconfirmed[name] & left.keys()) for name in left}
            if not any(unknown_there.values()):
                break
            credible = {
                name: count for name, count in unknown_to.items() if count > max(1, self._study.privacy.colluders)
            }
            against = credible or unknown_there
            del left[max(against, key=lambda name: (against[name], unknown_there[name], name))]
        return tuple(sorted(left.values(), key=lambda site: site.name))

    # --- steps 3 and 4: requesting, adding and storing

    def _check_code(
        self, code: NDArray[np.int64], query: QuerySpec, *, batch: Batch, site: Site, signature: bytes
    ) -> None:
        """Refuse (``unsigned``) a masked code that the site did not sign as its own for this roster and query.

        Its norm is not checked: a masked code looks like random integers, and only the unmasked sum has a norm bound.
        """
        of = {"query": query.id, "site": site.name, "identity": site.answer_key}
        if batch.roster is None or not is_word_of(code.view(np.uint64), signature, roster=batch.roster.id, **of):
            raise Refused(
                "unsigned",
                "the masked code is not signed for this draw by the site that sent it; to fix: compare the site's "
                "key in `consilium provision list` with the site's own",
            )

    def _completed(
        self, batch: Batch, draw: Draw, roster: Sequence[Site], ahead: Batch | None
    ) -> tuple[StoredAnswer, ...]:
        """Wait for the masked codes of the whole roster; return the stored answers, or none if some are missing.

        If some are missing, the draw is recorded as lost in two cases: enough other sites remain for the quorum, or a
        missing site cannot complete the draw any more, because it declined to send its masked code or was revoked.
        Otherwise the draw stays open, so that the next run asks for the same sum without another charge.
        """
        summed, batch.roster = _Sum(draw, set(draw.roster.sites), self._store_codes), draw.roster
        wanted = tuple(query.id for query in draw.queries)
        attempt = self._gather(batch, roster, ahead, lambda site: wanted if site in summed.missing else (), summed.add)
        if summed.missing:
            self._left_out |= summed.missing
            waited_for = summed.missing & {site.name for site in self._sites()} - batch.declined
            goes_on = len(self._room(draw.queries[0])) >= self._study.privacy.quorum
            if goes_on or waited_for < summed.missing:
                self._lose(draw, "incomplete", sites=summed.missing)
                return ()
            for name in sorted(summed.missing):
                self._events.emit("reply-missing", batch=batch.id, attempt=attempt, site=name, reason="patience")
            return ()
        answers = self._store(draw, summed.totals)
        self._note_released(batch, answers, roster)
        return answers

    def _store(self, draw: Draw, totals: dict[str, NDArray[np.uint64]]) -> tuple[StoredAnswer, ...]:
        """Unmask, check and store each query's noisy sum.

        Each sum is checked by its norm. Then the joint norm of all the study's sums is checked: if it exceeds what
        honest sites can produce, all sums of this draw are refused. The joint check detects a site that adds so little
        to each sum that the noise hides it in a single one.

        Raises:
            Refused: ``sum-spoiled`` if a sum was refused. The other sums are stored before.
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
        """Return the joint norm of the sums that were stored after the study's last spoiled draw.

        Sums from before that draw are left out, because they were part of the check that failed then.
        """
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

    def _resume(self, draw: Draw) -> None:
        """Request the masked codes of an open draw again; sites send the codes they stored, or compute them now."""
        by_name = {site.name: site for site in self._sites()}
        roster = tuple(by_name[name] for name in draw.roster.sites if name in by_name)
        if len(roster) < len(draw.roster.members):
            self._lose(draw, "incomplete", sites=set(draw.roster.sites) - {site.name for site in roster})
            return
        offer = Offer(draw.roster.study, draw.roster.ledger, draw.roster.batch, draw.queries, draw.roster.draw, ())
        self._completed(Batch(offer, able=frozenset(draw.roster.sites)), draw, roster, None)


def _named(error: QuorumNotReached, batch: Batch) -> QuorumNotReached:
    """Return the error with a text before it that names the sites which declined for a reason the server cannot check.

    These reasons are a lack of budget in the site's own ledger, and a later draw that the site has answered. If a site
    states a later draw, its remedy is added at the end.
    """
    words = {"budget": "lack of budget", "old-draw": "having answered a later draw"}
    said = [f"{site} states {words[reason]}" for site, reason in sorted(batch.answers.items()) if reason in words]
    remedy = LATER_DRAW if "old-draw" in batch.answers.values() else ""
    return QuorumNotReached("; ".join((*said, str(error))) + remedy) if said else error


def aggregator_of(study: Study) -> type[Aggregator]:
    """Return the class that runs a study's queries.

    Args:
        study: The study.

    Returns:
        :class:`SealedSums` for a sealed study, else :class:`Aggregator`.
    """
    return SealedSums if study.privacy.sealed else Aggregator
