"""Runs the queries of one study: offers batches to sites, decrypts and checks their codes, and releases aggregates.

``pipeline.collect`` calls it. It imports neither Flower nor torch and opens no files. It sends messages through a
:class:`Transport`, stores charges and noisy answers in the ledger, and logs events in the event log. Each batch takes
these steps in order; the code repeats their numbers:

1. The batch is offered to the sites. Those that accept form its roster, which is fixed before any site computes.
2. The sites on the roster are asked for their codes until all have answered or ``collection.patience_s`` has passed.
3. Each code is decrypted, checked against its norm bound and added to a running sum.
4. The ledger charges the batch and only then stores the sums with noise: the release.

If a site fails after step 1, its code counts as zero and the roster stays unchanged, so that the roster reveals nothing
about data. If fewer sites than the quorum accept, nothing is requested or charged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from functools import partial
from itertools import count
from math import floor
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from common.canonical import digest
from common.config import Study
from common.errors import LedgerCorrupt, QuorumNotReached, Refused
from common.events import EventLog
from common.evidence import SiteCodes
from common.ledger.charges import RosterEntry, charge_of
from common.messages import AnyMessage, CodesReply, Offer, OfferReply, Part, Several
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.mechanism import AccountantName, QuerySpec
from common.privacy.quantise import within
from common.privacy.release import CodeSum
from common.sealing import SealContext, SealingKeys, unseal
from server.aggregation.batch import SITES_CHARGED, Answering, Batch, Decrypted, Remaining, issued_now, unusable_codes
from server.aggregation.exchange import Questions, Transport, exchange
from server.aggregation.presence import RETURN_S, Presence
from server.aggregation.receipts import ReceiptDelivery
from server.ledger.server_draws import StoredAnswer
from server.ledger.server_ledger import Ledger
from server.study.workspace import Site

REPLY_MARGIN_S = 30.0
"""Seconds allowed for a reply after the site's own deadline, because messages wait in queues in both directions."""


class Aggregator:
    """Runs the queries of one open study. All state that must survive a crash is in the ledger.

    Args:
        study: The study.
        queries: The planned queries to answer.
        sites: Returns the sites registered now. It is called before every batch, so a site may join during a run.
        ledger: The study's ledger, with its signing key.
        sealing_key: Private keys that decrypt the sites' codes.
        events: The event log.
        sampler: Draws the noise; the default draws Gaussian noise rounded to integers.
        clock: Returns seconds.
        retry_pause_s: Pause between two attempts to reach missing sites.
        before: Number of planned queries that were answered in earlier rounds. It is only used to report progress.
        keep_status: Stores the report that a site shares about itself.
        store_codes: Stores a site's signed masked codes (sealed studies only).
        after: The aggregator of this run's previous round; sites that it did not wait for any more are not waited for
            in this round.

    Raises:
        QuorumNotReached: If fewer sites than the quorum are registered.
    """

    def __init__(
        self,
        *,
        study: Study,
        queries: Sequence[QuerySpec],
        sites: Callable[[], Sequence[Site]],
        ledger: Ledger,
        sealing_key: SealingKeys,
        events: EventLog,
        sampler: Sampler = rounded_gaussian,
        clock: Callable[[], float] = time.monotonic,
        retry_pause_s: float = 5.0,
        before: int = 0,
        keep_status: Callable[[Site, str], None] = lambda site, text: None,
        store_codes: Callable[[SiteCodes], None] = lambda codes: None,
        after: Aggregator | None = None,
    ) -> None:
        self._study, self._queries, self._sites = study, tuple(queries), sites
        self._ledger, self._sealing_key, self._events = ledger, sealing_key, events
        self._sampler, self._clock = sampler, clock
        self._retry_pause_s, self._before = retry_pause_s, before
        self._store_codes = store_codes
        self._receipts = ReceiptDelivery(ledger, events, keep_status=keep_status)
        self._presence: Presence = Presence(study, clock=clock) if after is None else after._presence
        self._refused: dict[str, str] = {}
        self._opens = False
        self._left_out: frozenset[str] = frozenset() if after is None else after._left_out
        self._believed: frozenset[str] = frozenset() if after is None else after._believed  # only in sealed sums
        self._transport: Transport
        self._check_registered()

    def open_queries(self) -> tuple[QuerySpec, ...]:
        """Return the planned queries that have no stored answer yet."""
        return tuple(query for query in self._queries if self._ledger.answer(query.id) is None)

    def answers(self) -> tuple[StoredAnswer, ...]:
        """Return the stored answers of the planned queries, in plan order."""
        found = (self._ledger.answer(query.id) for query in self._queries)
        return tuple(answer for answer in found if answer is not None)

    def run(self, transport: Transport, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Answer all open queries batch by batch, until done, stopped or out of budget.

        A batch is offered in the message that asks for the previous batch's codes, and its receipts travel in the
        message that asks for the next batch's codes. This saves messages, each of which waits in queues that are
        polled.

        Args:
            transport: Carries messages to and from the sites.
            should_stop: Asked before every batch.

        Raises:
            QuorumNotReached: If too few sites accept a batch or send codes; nothing of that batch is charged.
            LedgerCorrupt: If the quorum is missed and a site holds a signed head that this ledger does not contain.
            Refused: ``sum-spoiled`` if a sealed sum cannot come from honest sites; the draw's other sums are stored.
        """
        self._transport = transport
        self._finish_open(should_stop)
        queries = self.open_queries()
        self._progress(len(queries))
        ahead: Batch | None = None
        while queries and not should_stop():
            batch = ahead or self._plan(queries)
            if batch is None:
                self._end(queries)
                break
            after = self._answer(batch, queries[len(batch.queries) :])
            queries, ahead = after.queries, after.ahead
            self._progress(len(queries))
            if after.budget_ended:
                break
        self._send_receipts(silent=self._presence.silent)

    def _finish_open(self, should_stop: Callable[[], bool]) -> None:
        """Hook for sealed sums, which finish draws that an earlier process left open; an open study has none."""

    def _answer(self, batch: Batch, later: Sequence[QuerySpec]) -> Remaining:
        """Request and release one batch (steps 1 to 4).

        Returns:
            The queries that are still open, and the next batch, which was offered in the request for this one's codes.
        """
        roster = self._settle(batch)  # step 1
        ahead = self._plan(later, before=batch, roster=roster)
        sums = self._collect(batch, roster, ahead)  # steps 2 and 3
        answered = self._release(batch, roster, sums)  # step 4
        return Remaining((*batch.queries[answered:], *later), ahead, budget_ended=answered < len(batch.queries))

    def _check_registered(self) -> None:
        if (registered := len(self._sites())) < self._study.privacy.quorum:
            raise QuorumNotReached(
                f"registered sites: {registered}, fewer than the study's quorum of "
                f"{self._study.privacy.quorum}; to fix: admit more sites with `consilium provision approve`"
                f"{self._or_finish()}"
            )

    def _end(self, queries: Sequence[QuerySpec]) -> None:
        """Log that the run ends before these queries because the budgets of a quorum are used up.

        Raises:
            QuorumNotReached: If too few sites are registered, because some were revoked during the run.
        """
        self._check_registered()
        self._events.emit("budget-refused", batch="", queries=[query.id for query in queries])

    def _send_receipts(self, *, silent: Container[str] = ()) -> None:
        timeout_s = self._study.collection.offer_deadline_s
        self._receipts.send(self._sites(), self._transport, timeout_s=timeout_s, silent=silent)

    def _progress(self, left: int) -> None:
        done = self._before + len(self._queries) - left
        self._events.emit("stage-progress", stage="collect", done=done, total=self._study.privacy.planned_queries)

    def _plan(
        self, queries: Sequence[QuerySpec], *, before: Batch | None = None, roster: Sequence[Site] = ()
    ) -> Batch | None:
        """Return the next batch, or None if too few sites have budget left.

        The batch consists of the first ``queries``: at most ``collection.batch_size``, and at most as many as every
        site with budget left can pay for. If ``before`` is given, it is a batch that the sites on ``roster`` have
        accepted and that is not charged yet. Its cost is then subtracted from what these sites have left.
        """
        in_flight = {site.name: len(before.queries) for site in roster} if before else {}
        room = self._room(queries[0], in_flight) if queries else {}
        if len(room) < self._study.privacy.quorum:
            return None
        chosen = tuple(queries[: min(self._study.collection.batch_size, *room.values())])
        return Batch(self._offer(chosen, tuple(room)), able=frozenset(site.name for site in room))

    def _offer(self, queries: tuple[QuerySpec, ...], _able: tuple[Site, ...]) -> Offer:
        batch = digest("batch", {"study": self._study.id, "queries": [query.id for query in queries]})
        return Offer(study=self._study.id, ledger=self._ledger.ledger_id, batch=batch, queries=queries)

    def _room(self, query: QuerySpec, in_flight: Mapping[str, int] = MappingProxyType({})) -> dict[Site, int]:
        """Return, for each site, how many more queries its pool can pay for if each costs as much as ``query``.

        ``in_flight`` contains, by site name, the number of queries that the site has accepted and that are not charged
        yet; they are subtracted. Sites that can pay for none are left out. So are sites that let
        ``collection.patience_s`` pass in this run without sending codes, if the remaining sites reach the quorum. Only
        public state is used. The ledger makes the final decision at the release.
        """
        protections = {pool.pool: pool.protection for pool in self._ledger.pools()}
        room: dict[Site, int] = {}
        for site in self._sites():
            if site.pool not in protections:  # the site is being registered at this moment
                continue
            in_all = self._ledger.remaining(site.pool) / charge_of(
                query.mechanism, protections[site.pool], self._study.privacy.protection
            )
            in_study = self._ledger.remaining(site.pool, self._study.id)
            in_study /= query.mechanism.mu_squared(self._study.privacy.protection)
            if (queries := min(floor(in_all), floor(in_study)) - in_flight.get(site.name, 0)) > 0:
                room[site] = queries
        others = {site: queries for site, queries in room.items() if site.name not in self._left_out}
        return others if len(others) >= self._study.privacy.quorum else room

    # --- step 1: offering

    def _settle(self, batch: Batch) -> tuple[Site, ...]:
        """Return the batch's roster: the sites that are online, can pay for the batch and accept it.

        Sites that have not answered the offer yet are asked now. A silent site gave no usable reply to its newest
        message. It is first asked for its newest receipt. It gets the offer if it replies, or if the others do not
        reach the quorum. It is asked first because a site pays for each offer that it accepts, even if its answer comes
        too late.

        Raises:
            QuorumNotReached: If the roster is smaller than the quorum.
            LedgerCorrupt: If the roster is smaller than the quorum, and a site holds a signed head that this ledger
                does not contain.
        """
        room = self._room(batch.queries[0])
        able = [site for site, queries in room.items() if queries >= len(batch.queries)]
        by_node = {site.node_id: site for site in able}
        online = self._presence.await_sites(able, batch, self._transport)
        for site in self._sites():
            if site.node_id not in online:
                self._note_answer(site, batch, "offline" if site in able else self._unable(site))
        undecided = [by_node[node] for node in sorted(online) if by_node[node].name not in batch.answers]
        was_silent = [site for site in undecided if site.name in self._presence.silent]
        for heard in self._receipts.ask(
            was_silent, self._transport, timeout_s=min(RETURN_S, self._study.collection.offer_deadline_s)
        ):
            self._presence.note_answered(heard)
        silent = [site for site in undecided if site.name in self._presence.silent]
        self._offer_to([site for site in undecided if site not in silent], batch)
        if list(batch.answers.values()).count("accepted") < self._study.privacy.quorum:
            self._offer_to(silent, batch)
        else:
            for site in silent:
                self._note_answer(site, batch, "deadline")
        roster = [site for site in able if batch.answers.get(site.name) == "accepted"]
        if len(roster) < self._study.privacy.quorum:
            self._below_quorum(batch, len(roster))
            if self._receipts.contradicted:
                raise LedgerCorrupt(self._receipts.contradiction())
            raise QuorumNotReached(
                f"only {len(roster)} of {len(self._sites())} sites accepted the batch of queries, fewer than the "
                f"quorum of {self._study.privacy.quorum}; no site was asked for an answer, and {SITES_CHARGED}; "
                "to fix: the table of `consilium study status` says why the others did not accept, and docs/runbook.md "
                "what each reason means; have these sites remove the cause, or admit more sites, then "
                f"`consilium study resume`{self._or_finish()}"
            )
        return tuple(sorted(roster, key=lambda site: site.name))

    def _offer_to(self, sites: Sequence[Site], batch: Batch) -> None:
        """Offer a batch to sites, and record their answers and which of them gave none."""
        if not sites:
            return
        offer = issued_now(batch.offer)
        offers = {site.node_id: (site, lambda: offer) for site in sites}
        deadline_s, started = self._study.collection.offer_deadline_s, self._clock()
        for heard in exchange(self._transport, offers, sign=self._ledger.sign, timeout_s=deadline_s):
            batch.waited[heard.site.name] += self._clock() - started
            self._presence.note_answered(heard)
            self._hear(heard.site, heard.message, batch, problem=heard.problem or "malformed")

    def _or_finish(self) -> str:
        """Return how a person ends the study with the stored answers, for the remedy of a missed quorum."""
        stored = len(self.answers())
        if not stored:
            return ""
        return (
            f"; or finish with the stored answers ({stored}), which charges nothing: `consilium student train`, "
            "then `consilium student export`"
        )

    def _unable(self, site: Site) -> str:
        """Return why a site gets no offer: ``left-out`` if it sent no codes in time earlier in this run, otherwise
        ``budget``.
        """
        return "left-out" if site.name in self._left_out else "budget"

    def _hear(self, site: Site, message: AnyMessage | None, batch: Batch, *, problem: str = "") -> None:
        """Record a site's answer to the offer of a batch.

        If the site states a signed head (hash of a ledger row) that the ledger does not contain,
        ``ledger-contradicted`` is recorded as its answer. If the message does not answer this offer, ``problem`` is
        recorded, unless it is empty; ``malformed`` as ``unreadable``, because a site says the former of an offer.
        """
        if isinstance(message, OfferReply) and message.batch == batch.id:
            batch.replies[site.name] = message
            held = self._receipts.record_head(site, message)
            self._note_answer(site, batch, message.reason if held else "ledger-contradicted")
        elif problem:
            self._note_answer(site, batch, "unreadable" if problem == "malformed" else problem)

    def _note_answer(self, site: Site, batch: Batch, reason: str) -> None:
        batch.answers[site.name] = reason
        accepted = reason == "accepted"
        self._events.emit("offer-answered", batch=batch.id, site=site.name, accepted=accepted, reason=reason)

    def _below_quorum(self, batch: Batch, accepted: int) -> None:
        """Log slow sites and that the quorum was missed. Send the sites the receipts that they lack: the run ends here.

        Sites that left an offer unanswered are included, because only a site's last statement tells whether its ledger
        contradicts this one.
        """
        self._note_slow(batch, batch.able)
        self._events.emit("quorum-missed", batch=batch.id, accepted=accepted, needed=self._study.privacy.quorum)
        self._send_receipts()

    # --- steps 2 and 3: requesting, checking and adding

    def _collect(self, batch: Batch, roster: Sequence[Site], ahead: Batch | None) -> dict[str, CodeSum]:
        """Ask for codes until all have arrived or ``patience_s`` has passed; return their sums by query id.

        A site that cannot be reached is asked again, so an outage costs only time. A code that was refused counts as
        zero and is not requested again. A site whose computation fails still replies, so a missing reply means an
        outage. If fewer sites than the quorum have answered at the end, nothing is released or charged. # sensitive
        """
        answering = Answering(batch.queries, (site.name for site in roster))
        attempt = self._gather(batch, roster, ahead, answering.missing, answering.take)
        for name in [site.name for site in roster if answering.missing(site.name)]:
            self._left_out |= {name}
            self._events.emit("reply-missing", batch=batch.id, attempt=attempt, site=name, reason="patience")
        answered, quorum = len(answering.heard), self._study.privacy.quorum
        if answered < quorum:
            self._below_quorum(batch, answered)
            raise QuorumNotReached(
                f"only {answered} of the {len(roster)} sites that accepted the batch of queries answered in time, "
                f"fewer than the quorum of {quorum}; nothing was released, and {SITES_CHARGED}; to fix: "
                f"{unusable_codes(self._refused, opens=self._opens)}bring the other sites back online, "
                "then `consilium study resume`"
            )
        return answering.sums

    def _gather(
        self,
        batch: Batch,
        roster: Sequence[Site],
        ahead: Batch | None,
        missing: Callable[[str], tuple[str, ...]],
        take: Callable[[str, Decrypted], None],
    ) -> int:
        """Ask sites for their missing codes until none is missing or ``patience_s`` has passed.

        ``missing`` is a function that returns the ids of the queries for which a site has sent nothing yet. ``take`` is
        called with a site's name and the codes of its reply. At least one attempt is made, even if the time has passed.
        A site that is offline is logged once for each batch. A site that is revoked meanwhile is not waited for. At the
        end, each site that is slow by :meth:`Batch.slow` is logged.

        Returns:
            The number of attempts made, plus one.
        """
        started = self._clock()
        until, arrived = started + self._study.collection.patience_s, dict[str, float]()

        def take_timed(name: str, opened: Decrypted) -> None:
            arrived[name] = self._clock() - started
            take(name, opened)

        for attempt in count(1):
            registered = {site.node_id for site in self._sites()}
            expected = [site for site in roster if site.node_id in registered]
            waiting = {site.node_id: codes for site in expected if (codes := missing(site.name))}
            if not waiting or (attempt > 1 and self._clock() >= until):  # make at least one attempt
                break
            online = self._transport.online()
            for site in roster:
                if site.node_id in waiting.keys() - online and site.name not in batch.unreached:
                    batch.unreached.add(site.name)
                    self._events.emit(
                        "reply-missing", batch=batch.id, attempt=attempt, site=site.name, reason="offline"
                    )
            if reachable := {node: waiting[node] for node in sorted(online & waiting.keys())}:
                self._ask(batch, attempt, reachable, roster, ahead, take_timed, started=started, until=until)
            if any(missing(site.name) for site in expected):
                time.sleep(max(0.0, min(self._retry_pause_s, until - self._clock())))
        for site in expected:
            batch.waited[site.name] += self._clock() - started if missing(site.name) else arrived.get(site.name, 0.0)
        self._note_slow(batch, [site.name for site in expected])
        return attempt

    def _note_slow(self, batch: Batch, roster: Collection[str]) -> None:
        """Log each site that is slow by :meth:`Batch.slow`, once for a batch."""
        for name, (seconds, usual) in batch.slow(roster).items():
            self._events.emit("site-slow", batch=batch.id, site=name, seconds=seconds, usual_seconds=usual)
        batch.waited.clear()

    def _ask(
        self,
        batch: Batch,
        attempt: int,
        missing: Mapping[int, tuple[str, ...]],
        roster: Sequence[Site],
        ahead: Batch | None,
        take: Callable[[str, Decrypted], None],
        *,
        started: float,
        until: float,
    ) -> None:
        """Ask sites once for the codes that they have not sent yet, and offer the next batch at the same time.

        ``missing`` gives, for each node id, the ids of the queries whose codes this node has not sent. ``ahead`` is the
        next batch, or None. When a reply arrives, its codes are passed to ``take`` and not stored elsewhere. The first
        attempt began at ``started``.

        The call returns when every node in ``missing`` has replied. It returns earlier in two cases: at the time
        ``until``, or when ``collection.deadline_s`` and :data:`REPLY_MARGIN_S` seconds have passed since the sites were
        asked. # sensitive until noised
        """
        questions = self._questions(batch, attempt, missing, roster, ahead)
        deadline_s = self._study.collection.deadline_s
        asked = [site.name for site in roster if site.node_id in missing]
        facts = {"batch": batch.id, "attempt": attempt, "sites": len(asked), "queries": len(batch.queries)}
        self._events.emit("batch-dispatched", **facts, asked=asked)
        timeout_s, owing = max(1.0, min(deadline_s + REPLY_MARGIN_S, until - self._clock())), set(missing)
        for heard in exchange(self._transport, questions, sign=self._ledger.sign, timeout_s=timeout_s):
            self._presence.note_answered(heard)
            site, parts = heard.site, heard.parts
            for part in parts:
                if ahead is not None:
                    self._hear(site, part, ahead)
                self._receipts.record_receipts(site, part)
            if site.node_id not in missing:
                continue
            answer = next((part for part in parts if isinstance(part, CodesReply)), None)
            problem = heard.problem or ("refused" if answer is None else "malformed")
            opened = self._open_reply(answer, problem, batch=batch, attempt=attempt, site=site)
            if reason := batch.note_unusable(site.name, heard.message, answer, opened):
                self._refused[site.name] = reason
            if opened is not None:
                self._opens |= opened.by_a_key
                take(site.name, opened)
                self._events.emit(
                    "reply-received",
                    batch=batch.id,
                    attempt=attempt,
                    site=site.name,
                    codes=len(opened.codes),
                    seconds=round(self._clock() - started, 3),
                )
            owing.discard(site.node_id)
            if not owing:
                break

    def _questions(
        self,
        batch: Batch,
        attempt: int,
        missing: Mapping[int, tuple[str, ...]],
        roster: Sequence[Site],
        ahead: Batch | None,
    ) -> Questions:
        """Return the message that each node gets in one attempt.

        It contains the receipts that the site lacks, a request for its missing codes, and the offer of the batch
        ``ahead`` if the site has not answered this offer yet. A silent site that owes no codes gets nothing.
        """
        by_node = {site.node_id: site for site in (*self._sites(), *roster)}
        undecided = ahead.able - ahead.answers.keys() if ahead else frozenset()
        online = self._transport.online() & by_node.keys() if ahead else frozenset()
        not_silent = undecided - self._presence.silent
        offered = {node for node in online if by_node[node].name in (undecided if node in missing else not_silent)}
        offer = issued_now(ahead.offer) if ahead else None

        def question(node: int) -> Several:
            parts: list[Part] = self._receipts.owed(by_node[node])
            if node in missing:
                deadline_s = self._study.collection.deadline_s
                parts.append(batch.request(missing[node], attempt=attempt, deadline_s=deadline_s))
            if offer is not None and node in offered:
                parts.append(offer)
            return Several(tuple(parts))

        return {node: (by_node[node], partial(question, node)) for node in sorted(missing.keys() | offered)}

    def _check_code(
        self, code: NDArray[np.int64], query: QuerySpec, *, batch: Batch, site: Site, signature: bytes
    ) -> None:
        """Refuse (``code-norm``) a site's code if its norm exceeds the bound for its voters' clipped codes."""
        if not within(code, bound_int=query.mechanism.site_radius_int):
            raise Refused(
                "code-norm",
                "the norm of the site's code exceeds the bound for honest voters; to fix: ask the site for its "
                "version and its changes to the software",
            )

    def _open_reply(
        self, message: CodesReply | None, problem: str, *, batch: Batch, attempt: int, site: Site
    ) -> Decrypted | None:
        by_id = {query.id: query for query in batch.queries}
        if (
            message is not None
            and (message.batch, message.attempt) == (batch.id, attempt)
            and by_id.keys() >= {query_id for query_id, _ in message.codes}
        ):
            problem = "" if message.codes else "unfinished"
        if message is None or problem:
            self._events.emit("reply-missing", batch=batch.id, attempt=attempt, site=site.name, reason=problem)
            return None
        opened = Decrypted({}, {})
        signatures = message.signatures or (b"",) * len(message.codes)
        for (query_id, sealed), signature in zip(message.codes, signatures, strict=True):
            query = by_id[query_id]
            context = SealContext(study=self._study.id, query=query_id, site=site.name, attempt=attempt)
            dimension = query.mechanism.dimension
            try:
                code = unseal(sealed, private_key=self._sealing_key, context=context, dimension=dimension)
                self._check_code(code, query, batch=batch, site=site, signature=signature)
            except Refused as error:
                opened.refused[query_id] = error.reason
                continue
            opened.codes[query_id], opened.signatures[query_id] = code, signature
        opened.refuse_lacking(tuple(by_id))
        if opened.refused:
            query_id, reason = next(iter(opened.refused.items()))
            self._events.emit(
                "code-refused", batch=batch.id, site=site.name, query=query_id, reason=reason, codes=len(opened.refused)
            )
        return opened

    # --- step 4: releasing

    def _release(self, batch: Batch, roster: Sequence[Site], sums: Mapping[str, CodeSum]) -> int:
        result = self._ledger.release_batch(
            study_id=self._study.id,
            batch_id=batch.id,
            roster=tuple(RosterEntry(site=site.name, pool=site.pool) for site in roster),
            queries=batch.queries,
            draw=lambda query: sums[query.id].released(sites=len(roster), sampler=self._sampler),
        )
        if result.answers:
            self._note_released(batch, result.answers, roster)
        if result.refused:
            self._events.emit("budget-refused", batch=batch.id, queries=list(result.refused))
        return len(result.answers)

    def _note_released(self, batch: Batch, answers: Sequence[StoredAnswer], roster: Sequence[Site]) -> None:
        guarantees = self._ledger.study_spending(self._study.id).readings()
        self._events.emit(
            "released",
            batch=batch.id,
            queries=[answer.query.id for answer in answers],
            roster=[site.name for site in roster],
            voters=len(roster) * self._study.privacy.voters_per_site,
            epsilon_exact=guarantees[AccountantName.EXACT].epsilon,
            epsilon_rdp=guarantees[AccountantName.RDP].epsilon,
            delta=self._study.privacy.delta,
            unit=str(self._study.privacy.unit),
            relation=str(self._study.privacy.relation),
        )
