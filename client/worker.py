"""Runs the teacher worker: the site's long-lived process that holds models and data and answers the server's messages.

It trusts nothing that arrives. For every message it takes these steps:

1. Check that a key in site.toml signed the message for this site, whoever carried it.
2. Review an offer against the consented study and the site's own ledger, before any inference.
3. Answer a codes request only for queries that were accepted for this study and this server, and only while no veto and
   no alarm is in force.
4. Fetch public objects by content hash.
5. Compute every voter's code. A voter that fails counts as the zero code; if something public fails, all voters do. The
   reason stays in the site's log.
6. Store the code, then seal and send it. A retry gets the stored code, unless a patient was withdrawn since.
7. Sign the reply with the key of the site's ledger.

A reply leaves at a whole number of ticks after the request, with the codes of all queries asked for or of none. The
only timing leak left is which tick the reply arrives in.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from client.declined import Declined
from client.ledger.site_ledger import SiteLedger
from client.masked import check_roster, masked_code, strangers
from client.policy import Consent, SiteConfig, review
from client.witnessing import Witnessing
from common import __version__
from common.codecs.codec import Codec, load_codec
from common.config import DataConfig
from common.envelope import answered, open_asked
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt, Refused
from common.evidence import sign_word
from common.ledger.receipts import Receipt
from common.masking import MaskedRoster, signed_mask_key
from common.messages import (
    MAX_DEADLINE_S,
    CodesReply,
    CodesRequest,
    Offer,
    OfferReply,
    Part,
    Receipts,
    ReceiptsReply,
    Several,
    decode,
    encode,
)
from common.peers import Peer
from common.privacy.gaussian import Sampler, rounded_gaussian
from common.privacy.mechanism import QuerySpec
from common.protocols.site_protocol import Encoder, Fetch, ImageOf
from common.protocols.vote import vote_of
from common.sealing import SealContext, seal
from common.witness.messages import WitnessRequest

log = logging.getLogger(__name__)

MAX_ALARMS, MAX_ALARM = 10, 200

Ask = Callable[[], NDArray[np.float32] | None]
"""Asks one voter: its probabilities [c, x, y, z], or None for an empty slot. Whatever it raises is that voter's own."""


def shared_status(site: str, ledger: SiteLedger) -> str:
    """A site's own account for the server's operator, as JSON: what its books say of queries, nothing of patients."""
    alarms = [alarm[:MAX_ALARM] for alarm in ledger.alarms()[:MAX_ALARMS]]
    return json.dumps({"site": site, "version": __version__, **ledger.account(), "alarms": alarms})


class Voters(Protocol):
    """The site's teachers, as the worker needs them."""

    def predict(self, volume: bytes) -> Sequence[Ask]:
        """One question a voter about a public volume's bytes, in the voters' order, each put when its turn comes.

        What this itself raises must depend on the volume alone: it silences all voters. An empty slot's question takes
        as long as another's. Put one at a time: m maps of a large volume would not fit.
        """


T = TypeVar("T")


class Worker:
    """Answers messages; free of gRPC, sockets and torch, so that tests drive the very object that serves.

    ``teachers`` is the digest of what the voters were loaded from, as the ledger gave it, and ``loaded_at`` the
    ledger's row count before they were: a voter that lost a patient since is asked like the others, and its answer
    thrown away. ``sampler`` draws the site's share of the noise where the study's sum is sealed, and ``note_peers``
    hears whom the server would have on its roster. ``declined`` is the file that keeps the newest declined offer over a
    restart. ``sleep`` may end early and give true, which says that the worker is being stopped.
    """

    def __init__(
        self,
        *,
        config: SiteConfig,
        consent: Consent,
        ledger: SiteLedger,
        voters: Voters,
        fetch: Fetch,
        teachers: str = "",
        loaded_at: int | None = None,
        tick_s: float = 0.0,
        sampler: Sampler = rounded_gaussian,
        note_peers: Callable[[Sequence[Peer]], None] = lambda _: None,
        declined: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
        sleep: Callable[[float], object] = time.sleep,
        witness: Witnessing | None = None,
    ) -> None:
        if not 0 <= tick_s <= MAX_DEADLINE_S:
            raise InvalidInput("tick of a worker's replies", value=tick_s, limit=f"0 to {MAX_DEADLINE_S} seconds")
        self._config, self._consent, self._ledger = config, consent, ledger
        self._voters, self._fetch, self._teachers = voters, fetch, teachers
        self._loaded_at = ledger.row_count if loaded_at is None else loaded_at
        self._sampler, self._note_peers = sampler, note_peers
        self._witness = witness
        self._tick_s, self._clock, self._now, self._sleep = tick_s, clock, now, sleep
        self._declined = Declined(consent.study.collection, path=declined, now=now())
        self._codecs: dict[str, Codec] = {}
        self._lock = threading.Lock()

    def answer(self, message: bytes) -> bytes:
        """The signed reply to a message that the server signed for this site (:mod:`common.envelope`).

        Refused for any other, before it is read. Raises what :meth:`handle` raises.
        """
        return self.replied(self.handle(self.asked(message)), request=message)

    def asked(self, message: bytes) -> bytes:
        """What the server asks; Refused for what it did not sign for this site."""
        return open_asked(message, keys=self._config.server.signing_public_keys, site=self._config.site)

    def replied(self, body: bytes, *, request: bytes) -> bytes:
        """``body`` signed as this site's reply to ``request``."""
        return answered(body, sign=self._ledger.sign, site=self._config.site, request=request)

    def handle(self, body: bytes) -> bytes:
        """The reply to what the server asks; both without their signatures.

        Raises :class:`Refused` or :class:`InvalidInput` for what deserves none.

        Where codes are asked for, reply and refusal alike wait for the end of a tick, without keeping other messages
        from being handled. Only then are the codes read and sealed: a veto or a withdrawal given meanwhile holds.
        """
        arrived, message = self._clock(), decode(body)
        parts = message.parts if isinstance(message, Several) else (message,)
        try:
            with self._lock:
                begun = [_attempt(partial(self._begin, part, arrived=arrived), part) for part in parts]
        finally:
            if any(isinstance(part, CodesRequest) for part in parts):
                self._wait_for_tick(arrived)
        with self._lock:
            replies = [
                one if isinstance(one, ConsiliumError) else _attempt(one, part)
                for one, part in zip(begun, parts, strict=True)
            ]
        if isinstance(message, Several):  # a part that is refused keeps no other from its own reply
            return encode(Several(tuple(reply for reply in replies if not isinstance(reply, ConsiliumError))))
        (reply,) = replies
        if isinstance(reply, ConsiliumError):
            raise reply
        return encode(reply)

    def _wait_for_tick(self, arrived: float) -> None:
        if self._tick_s == 0:
            return
        spent = self._clock() - arrived
        ticks = max(1, math.ceil(spent / self._tick_s))
        if self._sleep(max(0.0, ticks * self._tick_s - spent)):
            raise Refused("stopping", "the worker was stopped before this reply was due")

    def _begin(self, message: Part, *, arrived: float) -> Callable[[], Part]:
        """Do all of a message's work that may take long; what is given back makes the reply."""
        match message:
            case Offer():
                reply = self._offered(message)
                return lambda: reply
            case CodesRequest():
                self._compute(message, until=arrived + message.deadline_s)
                return partial(self._sealed, message)
            case Receipts():
                self._file(message)
                held = self._ledger.held(message.ledger)
                status = shared_status(self._config.site, self._ledger) if self._config.share.status else None
                return lambda: ReceiptsReply(ledger_row=held.seq, ledger_head=held.hash, status=status)
            case WitnessRequest() if self._witness is not None and message.study == self._consent.study.id:
                said = self._witness.answer(message)
                return lambda: said
            case _:
                raise Refused(
                    "malformed",
                    "this kind of message is not answered; a worker answers offers, codes requests, receipts and heads",
                )

    def _offered(self, offer: Offer) -> OfferReply:
        """The site's word on an offer; in a sealed sum with its mask key, and the peers nobody here has confirmed."""
        study, peers = offer.study, offer.peers or ()
        unknown: tuple[str, ...] = ()
        if peers and study == self._consent.study.id:
            self._note_peers(peers)
            unknown = strangers(peers, me=self._config.site, confirmed=self._ledger.peers(study))
        reason = self._declined.reason(offer, now=self._now()) or self._decide(offer, unknown)
        self._declined.note(offer, reason)
        draw, mask = offer.draw_id, None
        if reason == "accepted" and draw is not None:
            try:
                private = self._ledger.mask_key(draw)
                mask = signed_mask_key(private, draw, sign=self._ledger.sign, site=self._config.site)
            except Refused as error:
                reason = error.reason
        held = self._ledger.held(offer.ledger)
        reply = OfferReply(offer.batch, reason, ledger_row=held.seq, ledger_head=held.hash)
        if draw is None:
            return reply
        last = self._ledger.last_draw(offer.queries)
        return dataclasses.replace(reply, mask=mask, unconfirmed=unknown, last_draw=last)

    def _decide(self, offer: Offer, unknown: tuple[str, ...]) -> str:
        reason = review(offer, self._consent)
        if reason == "accepted" and (reason := self._config.allow.review(offer)) != "accepted":
            self._ledger.refuse(offer.study, offer.queries, "not-allowed")
        confirmed = None if offer.peers is None else len(offer.peers) - len(unknown)
        if reason == "accepted" and confirmed is not None and confirmed < self._consent.study.privacy.quorum:
            reason = "unknown-peers"
        if reason == "accepted" and self._forked():
            reason = "paused"
        if reason == "accepted":
            try:
                key = self._config.server.sealing_key
                self._ledger.reserve(offer.study, offer.queries, ledger=offer.ledger, sealing_key=key, draw=offer.draw)
            except Refused as error:
                reason = error.reason
        log.info("event=offer batch=%s queries=%d decision=%s", offer.batch[:12], len(offer.queries), reason)
        return reason

    def _compute(self, request: CodesRequest, *, until: float) -> None:
        """Store the code of every query asked for that has none yet, as far as the time allows."""
        for query_id in request.queries:
            query = self._accepted(request, query_id)
            while self._ledger.code(query_id) is None:  # again where a patient was withdrawn while it was computed
                if self._clock() >= until:
                    return
                computed_at = self._ledger.row_count
                code, outcome = self._answer(query)
                self._ledger.store_code(
                    query_id, code, outcome=outcome, teachers=self._teachers, computed_at=computed_at
                )

    def _sealed(self, request: CodesRequest) -> CodesReply:
        """The codes of all queries asked for, sealed; of none while one is missing, which another attempt goes on with.

        So their number says nothing of how long each took. In a sealed sum they leave under masks.
        """
        roster = request.roster
        if roster is not None:
            privacy, confirmed = self._consent.study.privacy, self._ledger.peers(request.study)
            check_roster(roster, me=self._config.site, confirmed=confirmed, privacy=privacy)
        found: dict[QuerySpec, NDArray[np.int64]] = {}
        for query_id in request.queries:
            query = self._accepted(request, query_id)
            code = self._ledger.code(query_id)
            if code is None:
                found.clear()
                break
            found[query] = code
        if roster is not None and found:
            found = self._masked(tuple(found), roster)
        sealed = tuple((query.id, self._seal(code, query, request)) for query, code in found.items())
        log.info("event=codes batch=%s attempt=%d codes=%d", request.batch[:12], request.attempt, len(sealed))
        signatures = (
            None if roster is None else tuple(self._signed(words, query, roster) for query, words in found.items())
        )
        return CodesReply(batch=request.batch, attempt=request.attempt, codes=sealed, signatures=signatures)

    def _signed(self, words: NDArray[np.int64], query: QuerySpec, roster: MaskedRoster) -> bytes:
        """This site's own signature over its words, so that it cannot deny them."""
        of = {"roster": roster.id, "query": query.id, "site": self._config.site}
        return sign_word(words.view(np.uint64), **of, sign=self._ledger.sign)

    def _seal(self, code: NDArray[np.int64], query: QuerySpec, request: CodesRequest) -> bytes:
        context = SealContext(study=request.study, query=query.id, site=self._config.site, attempt=request.attempt)
        return seal(code, public_key=self._config.server.sealing_public_key, context=context)

    def _masked(self, queries: tuple[QuerySpec, ...], roster: MaskedRoster) -> dict[QuerySpec, NDArray[np.int64]]:
        """The queries' codes with this site's noise, under the masks of this roster: one message for a draw, ever."""
        private = self._ledger.mask_key(roster.draw_id)
        make = partial(masked_code, roster=roster, me=self._config.site, private=private, sampler=self._sampler)
        words = self._ledger.masked(queries, roster, make=make)
        return {query: words[query.id].view(np.int64) for query in queries}

    def _accepted(self, request: CodesRequest, query_id: str) -> QuerySpec:
        """The query, if its code may leave for who asks. Refused for another study or server than it was accepted for,
        and while a veto or an alarm stands: looked up for every code, since one may be given while a batch is computed.
        """
        if request.study != self._consent.study.id:
            raise Refused("unknown-study", "the server asked for codes of a study this site has not consented to")
        self._check_open(request)
        key = self._config.server.sealing_key
        asked = {"study_id": request.study, "ledger": request.ledger, "sealing_key": key}
        return self._ledger.accepted(query_id, **asked, draw=request.draw)

    def _check_open(self, request: CodesRequest) -> None:
        """That no veto and no alarm stands."""
        cause = self._ledger.stopped(request.study)
        cause = cause or ("fork" if self._forked() else None)
        if cause is not None:
            log.warning("event=stopped cause=%s batch=%s", cause, request.batch[:12])
            raise Refused("paused", f"nothing leaves this site now ({cause})")

    def _forked(self) -> bool:
        """Whether the server signed two histories of its ledger."""
        return self._witness is not None and self._witness.memory.server_forked

    def _file(self, message: Receipts) -> None:
        """Check and keep receipts. One that contradicts the site's record is an alarm, which stops all answers."""
        keys = self._config.server.signing_public_keys
        for text in message.receipts:
            receipt = Receipt.parse(text)
            signer = next((key for key in keys if receipt.is_genuine(key)), keys[0])
            try:
                self._ledger.record_receipt(receipt, public_key=signer)
            except Refused as error:
                log.info("event=receipt-refused reason=%s", error.reason)
            except LedgerCorrupt as error:
                log.error("event=alarm problem=%r remedy=docs/ledger.md", str(error))
                raise

    def _answer(self, query: QuerySpec) -> tuple[NDArray[np.int64], str]:
        """The site's integer code, the sum over its voters, and a word for the site's own record. # sensitive

        What cannot be read of what is public (codec, frame, a volume) is the zero code of all voters, which says
        nothing of a patient; whatever goes wrong in one voter's slot is the zero code of that voter alone. After
        acceptance a failure must look like any other answer.
        """
        mechanism = query.mechanism
        total = np.zeros(mechanism.dimension, dtype=np.int64)
        try:
            encoder = self._consent.protocol.encoder(query, self._codec(query), fetch=self._fetch)
            codes = [self._encoded(encoder, volume, query) for volume in query.volumes]
        except Exception as error:  # noqa: BLE001
            log.warning("event=zero-code query=%s cause=%s", query.id[:12], type(error).__name__)
            return total, "zero-code"
        zero_votes = 0
        for slot, each in enumerate(zip(*codes, strict=True)):
            try:
                known = [code for code, _ in each if code is not None]
                if len(known) < len(each):
                    raise InvalidInput("voter's codes", limit="one code for each volume")
                vote = vote_of(encoder, known, mechanism)
                if not all(votes for _, votes in each):
                    raise InvalidInput("voter", limit="a voter with a teacher whose patients are all still in the pool")
                total += vote
            except Exception as error:  # noqa: BLE001  one voter's failure is that voter's zero code
                log.warning("event=zero-vote query=%s slot=%d cause=%s", query.id[:12], slot, type(error).__name__)
                zero_votes += 1
        return total, f"zero-votes-{zero_votes}" if zero_votes else "stored"

    def _encoded(
        self, encoder: Encoder, volume: str, query: QuerySpec
    ) -> list[tuple[NDArray[np.float64] | None, bool]]:
        """The unclipped code of one public volume in each of the study's m slots, and whether the slot may vote.

        None where the voter failed. A slot that may not vote is coded all the same: it takes the time of the others.
        There are m whatever was found on disk: beyond m nobody is asked. # sensitive
        """
        content = self._fetch(volume)
        image = cache(partial(_image, content, self._consent.study.data))
        asks = list(self._voters.predict(content))
        silent = self._ledger.withdrawn_voters(after=self._loaded_at)
        codes: list[tuple[NDArray[np.float64] | None, bool]] = []
        for slot in range(query.mechanism.voters_per_site):
            try:
                code, votes = self._code(asks[slot] if slot < len(asks) else _nobody, encoder, image)
                codes.append((code, votes and slot not in silent))
            except Exception as error:  # noqa: BLE001
                log.warning("event=no-code query=%s slot=%d cause=%s", query.id[:12], slot, type(error).__name__)
                codes.append((None, False))
        return codes

    def _code(self, ask: Ask, encoder: Encoder, image: ImageOf) -> tuple[NDArray[np.float64], bool]:
        """One voter's unclipped code of one volume, that of nobody's prediction in an empty slot, and which it is.

        The map itself is gone when this returns. # sensitive
        """
        answer = ask()
        return encoder.of_volume(self._uniform() if answer is None else answer, image), answer is not None

    def _uniform(self) -> NDArray[np.float32]:
        """Nobody's prediction: every label as likely as the others."""
        data = self._consent.study.data
        return np.full((len(data.labels), *data.grid), 1 / len(data.labels), dtype=np.float32)

    def _codec(self, query: QuerySpec) -> Codec:
        if query.codec not in self._codecs:
            codec = load_codec(self._fetch(query.codec), expected_hash=query.codec)
            study = self._consent.study
            if codec.grid != study.data.grid or codec.labels != len(study.data.labels):
                raise InvalidInput("codec", limit="the study's grid and labels")
            self._codecs[query.codec] = codec
        return self._codecs[query.codec]


def _image(content: bytes, data: DataConfig) -> NDArray[np.float32]:
    from common.data.volume import volume_from_bytes  # torch, which the teachers have loaded by now

    return volume_from_bytes(content, data).image


def _nobody() -> None:
    """Asks a slot that the site has no voter for."""


def _attempt(make: Callable[[], T], part: Part) -> T | ConsiliumError:
    """What ``make`` gives, or the refusal that it raised."""
    try:
        return make()
    except ConsiliumError as error:
        log.warning("event=refused part=%s cause=%s", type(part).__name__, type(error).__name__)
        return error
