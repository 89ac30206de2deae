"""The server core: offers batches to sites, opens and checks their codes, releases through the ledger.

Free of Flower, torch and files: messages go through a :class:`Transport`, charges and noisy answers through the ledger,
facts into the event log. The roster of a release is decided before any site computes: sites that accepted the offer.
Whatever goes wrong at one of them afterwards counts as the zero code, with the roster unchanged, so participation says
nothing about data. Refuses a roster below quorum before anything is dispatched or charged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from math import floor
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from common.canonical import digest
from common.config import Study
from common.errors import InvalidInput, LedgerCorrupt, QuorumNotReached, Refused
from common.events import EventLog
from common.ledger.receipts import Position
from common.ledger.store import Candidate, Ledger, RosterEntry, StoredAnswer
from common.messages import (
    AnyMessage,
    CodesReply,
    CodesRequest,
    Offer,
    OfferReply,
    Receipts,
    ReceiptsReply,
    decode,
    encode,
)
from common.privacy.calibration import study_mechanism
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.mechanism import AccountantName, QuerySpec
from common.privacy.quantise import within
from common.privacy.release import noisy_sum
from common.sealing import SealContext, unseal
from server.workspace import CodecRecord, Site

REPLY_MARGIN_S = 30.0
"""What a reply may take beyond the site's own deadline: starting its process and the way back."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One node's answer to one message: its body, or an allow-listed word for why there is none."""

    node_id: int
    body: bytes | None
    problem: str = ""


class Transport(Protocol):
    """How bodies reach sites and come back; Flower's Grid in production, worker objects in tests."""

    def online(self) -> frozenset[int]:
        """Node ids that are connected now."""

    def exchange(self, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
        """Send one body to each node; yield exactly one reply a node, as they come, all within ``timeout_s``."""


def plan_queries(study: Study, *, codec: CodecRecord, volumes: Sequence[str]) -> tuple[QuerySpec, ...]:
    """One query a public volume, in order, for the first ``planned_queries`` of them."""
    mechanism = study_mechanism(study, dimension=codec.dimension)
    return tuple(
        QuerySpec(
            edition=study.privacy.edition,
            codec=codec.sha256,
            volumes=(volume,),
            round=1,
            centre="zero",
            weights="codec",
            mechanism=mechanism,
        )
        for volume in volumes[: study.privacy.planned_queries]
    )


class Aggregator:
    """The core of one study. Holds no state a crash could lose: what counts is in the ledger."""

    def __init__(
        self,
        *,
        study: Study,
        queries: Sequence[QuerySpec],
        sites: Sequence[Site],
        ledger: Ledger,
        sealing_key: X25519PrivateKey,
        events: EventLog,
        sampler: Sampler = rounded_gaussian,
        clock: Callable[[], float] = time.monotonic,
        retry_pause_s: float = 5.0,
    ) -> None:
        if len(sites) < study.privacy.quorum:
            raise QuorumNotReached(
                f"{len(sites)} sites are registered and the study's quorum is {study.privacy.quorum}; "
                "to fix: register more sites"
            )
        self._study, self._queries, self._sites = study, tuple(queries), tuple(sites)
        self._ledger, self._sealing_key, self._events = ledger, sealing_key, events
        self._sampler, self._clock = sampler, clock
        self._retry_pause_s = retry_pause_s
        self._held: dict[str, int] = {}
        self._contradicted: dict[str, int] = {}

    def open_queries(self) -> tuple[QuerySpec, ...]:
        """Planned queries that have no stored answer yet."""
        return tuple(query for query in self._queries if self._ledger.answer(query.id) is None)

    def answers(self) -> tuple[StoredAnswer, ...]:
        """Stored answers of the planned queries, in plan order."""
        found = (self._ledger.answer(query.id) for query in self._queries)
        return tuple(answer for answer in found if answer is not None)

    def run(self, transport: Transport, *, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Answer all open queries batch by batch, until done, stopped, out of budget or below quorum."""
        queries = self.open_queries()
        self._progress(len(queries))
        while queries:
            if should_stop():
                return
            sites, room = self._with_budget(queries[0])
            if len(sites) < self._study.privacy.quorum:
                self._events.emit("budget-refused", batch="", queries=[query.id for query in queries])
                break
            batch = queries[: min(self._study.collection.batch_size, room)]
            answered = self._run_batch(batch, sites, transport)
            queries = queries[answered:]
            self._progress(len(queries))
            if answered < len(batch):
                break
        self._send_receipts(self._sites, transport)

    def _progress(self, left: int) -> None:
        total = len(self._queries)
        self._events.emit("stage-progress", stage="collect", done=total - left, total=total)

    def _with_budget(self, query: QuerySpec) -> tuple[tuple[Site, ...], int]:
        """Sites whose pool has room for one more such query, and how many all of them have room for.

        Public state: an exhausted pool is left out before anything is offered. The ledger decides at the release.
        """
        protections = {pool.pool: pool.protection for pool in self._ledger.pools()}
        room: dict[Site, int] = {}
        for site in self._sites:
            in_all = self._ledger.remaining(site.pool) / query.mechanism.mu_squared(protections[site.pool])
            in_study = self._ledger.remaining(site.pool, self._study.id)
            in_study /= query.mechanism.mu_squared(self._study.privacy.protection)
            if (queries := min(floor(in_all), floor(in_study))) > 0:
                room[site] = queries
        return tuple(room), min(room.values(), default=0)

    def _run_batch(self, queries: Sequence[QuerySpec], sites: Sequence[Site], transport: Transport) -> int:
        batch = digest("batch", {"study": self._study.id, "queries": [query.id for query in queries]})
        roster = self._offer(batch, queries, sites, transport)
        quorum = self._study.privacy.quorum
        if len(roster) < quorum:
            self._events.emit("quorum-missed", batch=batch, accepted=len(roster), needed=quorum)
            self._send_receipts([site for site in sites if site.name in self._contradicted], transport)
            if self._contradicted:
                raise LedgerCorrupt(_contradiction(self._contradicted))
            raise QuorumNotReached(
                f"{len(roster)} of {len(self._sites)} sites accepted the batch and the quorum is {quorum}; nothing was "
                "dispatched or charged; to fix: see the sites' reasons in `consilium study status`, then resume"
            )
        codes = self._collect(batch, queries, roster, transport)
        released = self._release(batch, queries, roster, codes)
        self._send_receipts(roster, transport)
        return released

    def _offer(
        self, batch: str, queries: Sequence[QuerySpec], sites: Sequence[Site], transport: Transport
    ) -> tuple[Site, ...]:
        by_node = {site.node_id: site for site in sites}
        timeout_s = self._study.collection.offer_deadline_s
        offer = Offer(study=self._study.id, ledger=self._ledger.ledger_id, batch=batch, queries=tuple(queries))
        body = encode(offer)
        accepted: list[Site] = []
        online = self._await_sites(sites, transport, timeout_s=timeout_s)
        for site in self._sites:
            if site.node_id not in online:
                reason = "offline" if site in sites else "budget"
                self._events.emit("offer-answered", batch=batch, site=site.name, accepted=False, reason=reason)
        for reply in transport.exchange(dict.fromkeys(sorted(online), body), timeout_s=timeout_s):
            site, message = by_node[reply.node_id], _decoded(reply)
            reason = reply.problem or "malformed"
            if isinstance(message, OfferReply) and message.batch == batch:
                reason = message.reason if self._note_held(site, message) else "ledger-contradicted"
            self._events.emit(
                "offer-answered", batch=batch, site=site.name, accepted=reason == "accepted", reason=reason
            )
            if reason == "accepted":
                accepted.append(site)
        return tuple(sorted(accepted, key=lambda site: site.name))

    def _await_sites(self, sites: Sequence[Site], transport: Transport, *, timeout_s: float) -> frozenset[int]:
        """Nodes of these sites that are online, once all are or the time is up."""
        expected = frozenset(site.node_id for site in sites)
        until = self._clock() + timeout_s
        online = transport.online() & expected
        while online != expected and self._clock() < until:
            time.sleep(0.5)
            online = transport.online() & expected
        return online

    def _collect(
        self, batch: str, queries: Sequence[QuerySpec], roster: Sequence[Site], transport: Transport
    ) -> dict[tuple[str, str], NDArray[np.int64]]:
        """Opened and checked codes by (site, query id), asked for until all are in or patience is over.

        A site that cannot be reached is asked again, so an outage costs time and nothing else. Below quorum at the end,
        nothing is released or charged: a worker answers even a failure, so silence means an outage. # sensitive
        """
        codes: dict[tuple[str, str], NDArray[np.int64]] = {}
        collection = self._study.collection
        until = self._clock() + collection.patience_s
        for attempt in count(1):
            waiting = {
                site.node_id: missing
                for site in roster
                if (missing := tuple(query.id for query in queries if (site.name, query.id) not in codes))
            }
            if not waiting or self._clock() >= until:
                break
            reachable = {node: waiting[node] for node in sorted(transport.online() & waiting.keys())}
            if reachable:
                codes |= self._ask(batch, attempt, reachable, queries, roster, transport, until=until)
            if len(codes) < len(roster) * len(queries):
                time.sleep(max(0.0, min(self._retry_pause_s, until - self._clock())))
        answered, quorum = len({site for site, _ in codes}), self._study.privacy.quorum
        if answered < quorum:
            self._events.emit("quorum-missed", batch=batch, accepted=answered, needed=quorum)
            raise QuorumNotReached(
                f"{answered} of the {len(roster)} sites that accepted the batch sent codes and the quorum is {quorum}; "
                "nothing was released or charged; to fix: bring the sites back, then `consilium study resume`"
            )
        return codes

    def _ask(
        self,
        batch: str,
        attempt: int,
        missing: Mapping[int, tuple[str, ...]],
        queries: Sequence[QuerySpec],
        roster: Sequence[Site],
        transport: Transport,
        *,
        until: float,
    ) -> dict[tuple[str, str], NDArray[np.int64]]:
        """One attempt: ask each node for its missing codes. # sensitive until noised"""
        by_node = {site.node_id: site for site in roster}
        deadline_s = self._study.collection.deadline_s
        started = self._clock()
        bodies = {
            node: encode(
                CodesRequest(
                    study=self._study.id,
                    batch=batch,
                    attempt=attempt,
                    deadline_s=max(1, int(deadline_s)),
                    queries=wanted,
                )
            )
            for node, wanted in missing.items()
        }
        self._events.emit("batch-dispatched", batch=batch, attempt=attempt, sites=len(bodies), queries=len(queries))
        codes: dict[tuple[str, str], NDArray[np.int64]] = {}
        timeout_s = max(1.0, min(deadline_s + REPLY_MARGIN_S, until - started))
        for reply in transport.exchange(bodies, timeout_s=timeout_s):
            site = by_node[reply.node_id]
            received = self._open_reply(reply, batch=batch, attempt=attempt, site=site, queries=queries)
            if received is None:
                continue
            codes |= {(site.name, query): code for query, code in received.items()}
            self._events.emit(
                "reply-received",
                batch=batch,
                attempt=attempt,
                site=site.name,
                codes=len(received),
                seconds=round(self._clock() - started, 3),
            )
        return codes

    def _open_reply(
        self, reply: Reply, *, batch: str, attempt: int, site: Site, queries: Sequence[QuerySpec]
    ) -> dict[str, NDArray[np.int64]] | None:
        message = _decoded(reply)
        if not isinstance(message, CodesReply) or message.batch != batch or message.attempt != attempt:
            self._events.emit(
                "reply-missing", batch=batch, attempt=attempt, site=site.name, reason=reply.problem or "malformed"
            )
            return None
        by_id = {query.id: query for query in queries}
        opened = {}
        for query_id, sealed in message.codes:
            query = by_id.get(query_id)
            try:
                if query is None:
                    raise Refused("unknown-query")
                context = SealContext(study=self._study.id, query=query_id, site=site.name, attempt=attempt)
                code = unseal(
                    sealed, private_key=self._sealing_key, context=context, dimension=query.mechanism.dimension
                )
                if not within(code, bound_int=query.mechanism.site_radius_int):
                    raise Refused("code-norm")
            except Refused as error:
                self._events.emit("code-refused", batch=batch, site=site.name, query=query_id, reason=error.reason)
                continue
            opened[query_id] = code
        return opened

    def _release(
        self,
        batch: str,
        queries: Sequence[QuerySpec],
        roster: Sequence[Site],
        codes: Mapping[tuple[str, str], NDArray[np.int64]],
    ) -> int:
        candidates = []
        for query in queries:
            zero = np.zeros(query.mechanism.dimension, dtype=np.int64)
            summands = [codes.get((site.name, query.id), zero) for site in roster]
            candidates.append(
                Candidate(query=query, make_answer=partial(noisy_sum, summands, query.mechanism, sampler=self._sampler))
            )
        result = self._ledger.release_batch(
            study_id=self._study.id,
            batch_id=batch,
            roster=tuple(RosterEntry(site=site.name, pool=site.pool) for site in roster),
            candidates=candidates,
        )
        if result.answers:
            guarantees = self._ledger.study_guarantees(self._study.id)
            self._events.emit(
                "released",
                batch=batch,
                queries=[answer.query.id for answer in result.answers],
                roster=[site.name for site in roster],
                voters=len(roster) * self._study.privacy.voters_per_site,
                epsilon_exact=guarantees[AccountantName.EXACT].epsilon,
                epsilon_rdp=guarantees[AccountantName.RDP].epsilon,
                delta=self._study.privacy.delta,
                unit=str(self._study.privacy.unit),
                relation=str(self._study.privacy.relation),
            )
        if result.refused:
            self._events.emit("budget-refused", batch=batch, queries=list(result.refused))
        return len(result.answers)

    def _send_receipts(self, sites: Sequence[Site], transport: Transport) -> None:
        """Bring sites the receipts they miss. A site of which it is not known what it holds is asked first."""
        missing = {site.node_id: self._missing_receipts(site) for site in sites}
        waiting = {site.node_id: site for site in sites if missing[site.node_id] != ()}
        for _attempt in (1, 2):
            online = transport.online() & waiting.keys()
            bodies = {node: encode(Receipts(self._ledger.ledger_id, missing[node] or ())) for node in sorted(online)}
            for reply in (
                transport.exchange(bodies, timeout_s=self._study.collection.offer_deadline_s) if bodies else ()
            ):
                site, message = waiting[reply.node_id], _decoded(reply)
                if not isinstance(message, ReceiptsReply):
                    continue
                self._note_held(site, message)
                missing[reply.node_id] = self._missing_receipts(site)
                if missing[reply.node_id] == ():
                    self._events.emit("receipts-held", site=site.name, ledger_row=message.ledger_row)
                    del waiting[reply.node_id]
        for site in waiting.values():
            self._events.emit("receipts-missing", site=site.name, reason="no-reply-or-refused")

    def _missing_receipts(self, site: Site) -> tuple[str, ...] | None:
        """Receipts past what the site holds; None where that is not known and there are some."""
        held = self._held.get(site.name)
        receipts = self._ledger.site_receipts(site.name, after=held or 0)
        return None if held is None and receipts else tuple(receipt.render() for receipt in receipts)

    def _note_held(self, site: Site, message: OfferReply | ReceiptsReply) -> bool:
        """Whether the head a site holds is in the ledger. If not, nothing is released with the site, and it is sent all
        the receipts there are for it: what contradicts the one it holds is the site's to keep as evidence."""
        position = Position(message.ledger_row, message.ledger_head)
        if self._ledger.contains(position):
            self._held[site.name] = position.seq
            self._contradicted.pop(site.name, None)
            return True
        if self._contradicted.get(site.name) != position.seq:
            self._events.emit("ledger-contradicted", site=site.name, ledger_row=position.seq)
        self._held[site.name], self._contradicted[site.name] = 0, position.seq
        return False


def _contradiction(rows: Mapping[str, int]) -> str:
    held = ", ".join(f"{site} (row {row})" for site, row in sorted(rows.items()))
    return (
        f"this ledger does not contain signed heads that sites hold: {held}; it was rolled back or forked, and "
        "nothing is released with these sites; to fix: have them write their receipts (`consilium site heads --out`), "
        "enter the lost charges with `consilium ledger recover`, let each end its alarm (`consilium site recover`), "
        "then resume"
    )


def _decoded(reply: Reply) -> AnyMessage | None:
    try:
        return None if reply.body is None else decode(reply.body)
    except InvalidInput:
        return None
