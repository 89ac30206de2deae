"""Runs the teacher worker: the site's long-lived process that holds models and data and answers the server's messages.

It trusts nothing that arrives. For every message it takes these steps:

1. Check that a server key listed in site.toml signed the message for this site.
2. Review an offer against the consented study and the site's own ledger, before any inference.
3. Answer a codes request only for queries that were accepted for this study and this server, and only while the staff
   has not paused or left the study and no alarm (a contradiction between ledgers) is in force. Studies of several
   servers can share this site's ledger. Refuse what a server says about another server's ledger or study.
4. Fetch public objects by content hash.
5. Compute every voter's code. A voter that fails counts as the zero code. If a public object cannot be read, all voters
   count as the zero code. The reason is only logged at the site.
6. Store the code, then seal and send it. A retry gets the stored code, unless a patient was withdrawn since.
7. Sign the reply with the key of the site's ledger.

Time is divided into ticks of fixed length. A reply to a codes request is sent a whole number of ticks after the
request, and contains the codes of all requested queries or of none. The only timing leak left is which tick the reply
arrives in.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from client.declined import Declined
from client.ledger.site_ledger import SiteLedger
from client.masked import check_roster, masked_code, unconfirmed_peers
from client.policy import Consent, SiteConfig, review
from client.witnessing import Witnessing
from common import __version__
from common.codecs.codec import Codec, load_codec
from common.config import DataConfig
from common.data.memory import ignoring_other_programs
from common.envelope import open_request, sign_reply
from common.errors import SAME_VERSION, ConsiliumError, InvalidInput, LedgerCorrupt, Refused
from common.evidence import sign_word
from common.ledger.receipts import Receipt
from common.ledger.records import ZERO_CODE, code_outcome
from common.masking import MaskedRoster, signed_mask_key
from common.messages import (
    MAX_DEADLINE_S,
    NO_HEAD,
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
from common.protocols.site_protocol import Encoder, Fetch, ImageOf, vote_of
from common.sealing import SealContext, seal
from common.witness.messages import WitnessRequest

log = logging.getLogger(__name__)

MAX_ALARMS, MAX_ALARM = 10, 200

Ask = Callable[[], NDArray[np.float32] | None]
"""Function that returns one voter's predicted probabilities, float32 [k, x, y, z].

It returns None for a voter without a teacher. If it raises, only this voter counts as the zero code."""


def shared_status(site: str, ledger: SiteLedger, *, conflicts: Sequence[str] = ()) -> str:
    """Return the status report that a site shares with the server's operator.

    It contains figures from the site's ledger: budget spent, queries accepted and refused, alarms. It contains nothing
    about patients.

    Args:
        site: The site's name.
        ledger: The site's ledger.
        conflicts: Contradictions found in other parties' ledgers, in words.

    Returns:
        JSON text of one object.
    """
    account = ledger.facts(site, conflicts=conflicts).account()
    alarms = [alarm[:MAX_ALARM] for alarm in account["alarms"][:MAX_ALARMS]]
    return json.dumps({**account, "version": __version__, "alarms": alarms})


class Voters(Protocol):
    """The interface through which the worker asks a site's teachers for predictions."""

    def predict(self, volume: bytes) -> Sequence[Ask]:
        """Return for each voter a function that computes the voter's prediction of a volume. # sensitive

        If this method raises, all voters count as the zero code. An exception must therefore depend on the public
        volume only. The function of a voter without a teacher must take as long as any other, so that timing does not
        reveal which voters have none. The functions are called one at a time, because m predictions of a large
        volume would not fit into memory.

        Args:
            volume: A public volume as NIfTI.

        Returns:
            The functions, in the voters' order.
        """


T = TypeVar("T")

VolumeCodes = Sequence[tuple[NDArray[np.float64] | None, bool]]
"""For each voter: its unclipped code of one volume, and whether it has a teacher; (None, False) if it failed.
# sensitive
"""


class Worker:
    """Answers the server's messages. It uses no gRPC, sockets or torch, so tests run the same object that serves.

    Args:
        config: The site's policy.
        consent: The consented study.
        ledger: The site's ledger.
        voters: The teachers.
        fetch: Gets a public object by its hash.
        teachers: Digest of the loaded teachers, from the ledger.
        loaded_at: The ledger's row count before the teachers were loaded. A voter that lost a patient since then is
            asked like the others, and its answer is discarded.
        tick_s: A reply to a codes request is sent a multiple of this period, in seconds, after the request; 0 sends
            it at once.
        sampler: Draws the site's noise share in a sealed sum.
        note_peers: Called with the peers (other hospitals) that an offer names.
        declined: File of the newest declined offer.
        clock: Monotonic clock, in seconds.
        now: Clock, in seconds since 1970.
        sleep: Function that waits for some seconds; it returns true if it ended early because the worker is being
            stopped.
        witness: Countersigns the heads of other parties' ledgers; None if this site is no witness.
        elsewhere: Given the ids of the ledger's studies, returns the ids of other servers' studies and ledgers.

    Raises:
        InvalidInput: If ``tick_s`` is out of range, or if the server has replaced the sealing key in ``site.toml``.
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
        elsewhere: Callable[[Collection[str]], Collection[str]] = lambda _: frozenset(),
    ) -> None:
        if not 0 <= tick_s <= MAX_DEADLINE_S:
            raise InvalidInput(
                "tick_s",
                value=tick_s,
                limit=f"0 to {MAX_DEADLINE_S} seconds; a reply is sent a multiple of this period after the request",
            )
        ledger.check_sealing_key(config.server.sealing_key)
        self._config, self._consent, self._ledger = config, consent, ledger
        self._voters, self._fetch, self._teachers = voters, fetch, teachers
        self._loaded_at = ledger.row_count if loaded_at is None else loaded_at
        self._sampler, self._note_peers = sampler, note_peers
        self._witness, self._elsewhere, self._away = witness, elsewhere, cache(elsewhere)
        self._tick_s, self._clock, self._now, self._sleep = tick_s, clock, now, sleep
        self._declined = Declined(consent.study.collection, path=declined, now=now())
        self._codecs: dict[str, Codec] = {}
        self._volume_codes: dict[Hashable, VolumeCodes] = {}
        self._lock = threading.Lock()

    def answer(self, message: bytes) -> bytes:
        """Return the signed reply to a signed message (:mod:`common.envelope`).

        Args:
            message: The message.

        Returns:
            The reply.

        Raises:
            Refused: If the server did not sign the message for this site (then the message is not read), and for the
                reasons in :meth:`handle`.
            InvalidInput: If the message cannot be read.
            LedgerCorrupt: If a receipt in the message contradicts the site's record.
        """
        return self.sign_reply(self.handle(self.open_request(message)), request=message)

    def open_request(self, message: bytes) -> bytes:
        """Check a message's signature and return its body.

        Args:
            message: The message.

        Returns:
            The body.

        Raises:
            Refused: If the server did not sign it for this site.
        """
        return open_request(message, keys=self._config.server.signing_public_keys, site=self._config.site)

    def sign_reply(self, body: bytes, *, request: bytes) -> bytes:
        """Sign a body as this site's reply.

        Args:
            body: The reply's body.
            request: The message that is answered.

        Returns:
            The signed reply.
        """
        return sign_reply(body, sign=self._ledger.sign, site=self._config.site, request=request)

    def handle(self, body: bytes) -> bytes:
        """Handle the body of a message whose signature was checked, and return the body of the reply, not yet signed.

        The reply to a request for codes, or its refusal, waits until a whole number of seconds (a tick) has passed
        since the request, so that its time reveals little. Other messages are handled meanwhile. The codes are read and
        encrypted at the end of the tick, so a pause or a withdrawal during the wait still takes effect.

        Args:
            body: The message's body.

        Returns:
            The reply's body.

        Raises:
            Refused: If the message must not be answered.
            InvalidInput: If the message cannot be read.
            LedgerCorrupt: If a receipt in the message contradicts the site's record.
        """
        arrived, message = self._clock(), decode(body)
        parts = message.parts if isinstance(message, Several) else (message,)
        try:
            with self._lock:
                self._away = cache(self._elsewhere)  # the files of the pool's other studies are read once for a message
                begun = [_attempt(partial(self._begin, part, arrived=arrived), part) for part in parts]
        finally:
            if any(isinstance(part, CodesRequest) for part in parts):
                self._wait_for_tick(arrived)
        with self._lock:
            replies = [
                one if isinstance(one, ConsiliumError) else _attempt(one, part)
                for one, part in zip(begun, parts, strict=True)
            ]
        if isinstance(message, Several):  # a refused part does not prevent the replies to the other parts
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
            raise Refused(
                "stopping",
                "the worker was stopped before this reply was due; to fix: `consilium site up` starts it again",
            )

    def _begin(self, message: Part, *, arrived: float) -> Callable[[], Part]:
        """Do the slow part of a message's work, and return a function that makes the reply."""
        match message:
            case Offer():
                reply = self._offered(message)
                return lambda: reply
            case CodesRequest():
                self._compute(message, until=arrived + message.deadline_s)
                return partial(self._sealed, message)
            case Receipts():
                self._check_server(message.ledger)
                self._file(message)
                held = self._ledger.held(message.ledger)
                status = self._status() if self._config.share.status else None
                return lambda: ReceiptsReply(ledger_row=held.seq, ledger_head=held.hash, status=status)
            case WitnessRequest() if self._witness is not None and message.study == self._consent.study.id:
                self._check_server(message.ledger)
                said = self._witness.answer(message)
                return lambda: said
            case _:
                raise Refused(
                    "malformed",
                    "this kind of message is not answered; a worker answers offers, codes requests, receipts and "
                    f"heads; to fix: {SAME_VERSION}",
                )

    def _check_server(self, ledger_id: str, *, study_id: str = "") -> None:
        """Refuse what this worker's server says about the ledger or a study of another server.

        Args:
            ledger_id: Id of the ledger that the server speaks of.
            study_id: Id of the study in a receipt.

        Raises:
            Refused: ``unknown-study``.
        """
        own, elsewhere = self._consent.study.id, self._away(frozenset(self._ledger.books.studies))
        if study_id in elsewhere or self._ledger.belongs_elsewhere(ledger_id, study_id=own, elsewhere=elsewhere):
            log.warning("event=refused cause=another-server ledger=%s", ledger_id)
            raise Refused(
                "unknown-study",
                f"ledger {ledger_id}, or a study in its receipts, belongs to another study's server; to fix: if it is "
                "the same server with a new key, also list the earlier key in server.more_signing_keys of site.toml",
            )

    def _check_ledger(self, ledger_id: str) -> None:
        """Refuse an offer that names another ledger than the server's kit did.

        Raises:
            Refused: ``unknown-study``.
        """
        if (stated := self._config.server.ledger) and ledger_id != stated:
            log.warning("event=refused cause=another-ledger ledger=%s", ledger_id)
            raise Refused(
                "unknown-study",
                f"ledger {ledger_id} is not {stated}, which the startup kit names; to fix: ask the consortium; if its "
                "server has another ledger now, write its id into server.ledger of site.toml",
            )

    def _status(self) -> str:
        conflicts = () if self._witness is None else self._witness.memory.conflicts()
        return shared_status(self._config.site, self._ledger, conflicts=conflicts)

    def _offered(self, offer: Offer) -> OfferReply:
        """Accept or decline an offer.

        In a sealed sum the reply also states this site's mask key, and the other hospitals whose keys the staff has not
        confirmed.
        """
        try:
            self._check_ledger(offer.ledger)
            self._check_server(offer.ledger)
        except Refused as error:
            return OfferReply(offer.batch, error.reason, ledger_row=0, ledger_head=NO_HEAD)
        study, peers = offer.study, offer.peers or ()
        unknown: tuple[str, ...] = ()
        if peers and study == self._consent.study.id:
            self._note_peers(peers)
            unknown = unconfirmed_peers(peers, me=self._config.site, confirmed=self._ledger.peers(study))
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
        last = self._ledger.last_draw(offer.queries, study_id=self._consent.study.id)
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
                log.info("event=declined reason=%s cause=%s", reason, error)
        log.info("event=offer batch=%s queries=%d decision=%s", offer.batch[:12], len(offer.queries), reason)
        return reason

    def _compute(self, request: CodesRequest, *, until: float) -> None:
        """Compute and store the code of every requested query that has no stored code yet, until the deadline."""
        for query_id in request.queries:
            query = self._accepted(request, query_id)
            while self._ledger.code(query_id) is None:  # repeat if a patient was withdrawn meanwhile
                if self._clock() >= until:
                    return
                computed_at = self._ledger.row_count
                code, outcome = self._answer(query)
                self._ledger.store_code(
                    query_id, code, outcome=outcome, teachers=self._teachers, computed_at=computed_at
                )

    def _sealed(self, request: CodesRequest) -> CodesReply:
        """Return the sealed codes of all requested queries, or of none if one is missing.

        The number of codes therefore does not reveal how long each one took. If one is missing, the server asks again
        and gets all of them once they are computed. In a sealed sum the codes are masked.
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
        """Sign the site's masked code, so that the site cannot deny it later."""
        of = {"roster": roster.id, "query": query.id, "site": self._config.site}
        return sign_word(words.view(np.uint64), **of, sign=self._ledger.sign)

    def _seal(self, code: NDArray[np.int64], query: QuerySpec, request: CodesRequest) -> bytes:
        context = SealContext(study=request.study, query=query.id, site=self._config.site, attempt=request.attempt)
        return seal(code, public_key=self._config.server.sealing_public_key, context=context)

    def _masked(self, queries: tuple[QuerySpec, ...], roster: MaskedRoster) -> dict[QuerySpec, NDArray[np.int64]]:
        """Return the queries' codes with this site's noise share, under the roster's masks.

        They are computed and stored once for each draw; a retry gets the stored ones.
        """
        private = self._ledger.mask_key(roster.draw_id)
        make = partial(masked_code, roster=roster, me=self._config.site, private=private, sampler=self._sampler)
        words = self._ledger.masked(queries, roster, make=make)
        return {query: words[query.id].view(np.int64) for query in queries}

    def _accepted(self, request: CodesRequest, query_id: str) -> QuerySpec:
        """Return the query if its code may be sent to this server now.

        Raises Refused if the query was accepted for another study or server, or while :meth:`_check_open` refuses. This
        is checked for every code, because the staff may pause the study while a batch is computed.
        """
        if request.study != self._consent.study.id:
            raise Refused(
                "unknown-study",
                "the server asked for codes of a study this site has not consented to; to fix: `consilium site "
                "consent`, if staff agree",
            )
        self._check_open(request)
        key = self._config.server.sealing_key
        asked = {"study_id": request.study, "ledger": request.ledger, "sealing_key": key}
        return self._ledger.accepted(query_id, **asked, draw=request.draw)

    def _check_open(self, request: CodesRequest) -> None:
        """Raise Refused while the staff has paused or left the study, or while an alarm is in force."""
        cause = self._ledger.stopped(request.study)
        cause = cause or ("fork" if self._forked() else None)
        if cause is not None:
            log.warning("event=stopped cause=%s batch=%s", cause, request.batch[:12])
            raise Refused(
                "paused",
                f"this site sends no answers for this study now; cause: {cause}; to fix: see `consilium site status`",
            )

    def _forked(self) -> bool:
        """Tell whether the server signed two contradicting histories of its ledger."""
        return self._witness is not None and self._witness.memory.server_forked

    def _file(self, message: Receipts) -> None:
        """Check and store receipts. A receipt that contradicts the record is an alarm and stops all answers."""
        keys = self._config.server.signing_public_keys
        checked = set[tuple[str, str]]()
        for text in message.receipts:
            receipt = Receipt.parse(text)
            signer = next((key for key in keys if receipt.is_genuine(key)), keys[0])
            try:
                if (of := (receipt.ledger_id, receipt.study_id)) not in checked:
                    self._check_server(receipt.ledger_id, study_id=receipt.study_id)
                    checked.add(of)
                self._ledger.record_receipt(receipt, public_key=signer)
            except Refused as error:
                log.info("event=receipt-refused reason=%s", error.reason)
            except LedgerCorrupt as error:
                log.error("event=alarm problem=%r remedy=docs/ledger.md", str(error))
                raise

    def _answer(self, query: QuerySpec) -> tuple[NDArray[np.int64], str]:
        """Compute the site's integer code, which is the sum over its voters. # sensitive

        The second value tells the site's ledger how the code was made (:class:`~common.ledger.records.CodeRecord`).
        If a public object (codec, frame, volume) cannot be read, all voters count as the zero code, which reveals
        nothing about a patient. If the computation for one voter fails, only that voter counts as the zero code. Once a
        query is accepted, the server must not be able to tell a failure from any other answer.

        A volume's size is compared with the free memory of this worker's container, or with the machine's whole memory,
        and not with what other programs leave free. A training that runs meanwhile takes memory that depends on its
        patients' scans, and no patient may change the votes of all voters.
        """
        mechanism = query.mechanism
        total = np.zeros(mechanism.dimension, dtype=np.int64)
        try:
            encoder = self._consent.protocol.encoder(query, self._codec(query), fetch=self._fetch)
            with ignoring_other_programs():
                codes = self._encoded(encoder, query)
            silent = self._ledger.withdrawn_voters(after=self._loaded_at)
        except Exception as error:  # noqa: BLE001
            why = str(error) if isinstance(error, ConsiliumError) else ""  # concerns public objects only
            log.warning("event=zero-code query=%s cause=%s problem=%r", query.id[:12], type(error).__name__, why)
            return total, ZERO_CODE
        without, failed = 0, []
        for slot, each in enumerate(zip(*codes, strict=True)):
            try:
                known = [code for code, _ in each if code is not None]
                if len(known) < len(each):
                    raise InvalidInput("voter's codes", limit="one code for each volume")
                vote = vote_of(encoder, known, mechanism)
            except Exception as error:  # noqa: BLE001  a voter that fails counts as the zero code
                log.warning("event=zero-vote query=%s slot=%d cause=%s", query.id[:12], slot, type(error).__name__)
                failed.append(slot)
                continue
            if slot in silent or not all(votes for _, votes in each):  # no teacher, or one of a withdrawn patient
                log.warning("event=zero-vote query=%s slot=%d cause=no-teacher", query.id[:12], slot)
                without += 1
                continue
            total += vote
        return total, code_outcome(without=without, failed=failed)

    def _encoded(self, encoder: Encoder, query: QuerySpec) -> list[VolumeCodes]:
        """Return the voters' codes, volume by volume. # sensitive

        The next query reuses the codes of the volumes that it also asks for; other codes are deleted. Failures are kept
        too. Otherwise the time of a later round would show the server that a voter failed.
        """
        keys = {volume: (query.codec, encoder.volume_key, volume) for volume in query.volumes}
        self._volume_codes = {key: self._volume_codes[key] for key in keys.values() if key in self._volume_codes}
        for volume, key in keys.items():
            if key not in self._volume_codes:
                self._volume_codes[key] = self._of_volume(encoder, volume, query)
        return [self._volume_codes[keys[volume]] for volume in query.volumes]

    def _of_volume(self, encoder: Encoder, volume: str, query: QuerySpec) -> VolumeCodes:
        """Compute the codes of one public volume by each of the study's m voters. # sensitive

        A voter that must not vote is asked as well, so that the time does not reveal it. Exactly m voters are asked,
        even if fewer or more teachers are on disk.
        """
        content = self._fetch(volume)
        image = cache(partial(_image, content, self._consent.study.data))
        asks = list(self._voters.predict(content))
        codes: list[tuple[NDArray[np.float64] | None, bool]] = []
        for slot in range(query.mechanism.voters_per_site):
            try:
                codes.append(self._code(asks[slot] if slot < len(asks) else _nobody, encoder, image))
            except Exception as error:  # noqa: BLE001
                log.warning("event=no-code query=%s slot=%d cause=%s", query.id[:12], slot, type(error).__name__)
                codes.append((None, False))
        return codes

    def _code(self, ask: Ask, encoder: Encoder, image: ImageOf) -> tuple[NDArray[np.float64], bool]:
        """Return one voter's unclipped code of one volume, and whether the voter has a teacher.

        Without a teacher the uniform prediction is encoded. The prediction itself is deleted when this returns.
        # sensitive
        """
        answer = ask()
        return encoder.of_volume(self._uniform() if answer is None else answer, image), answer is not None

    def _uniform(self) -> NDArray[np.float32]:
        """Return the prediction for a voter without a teacher: all labels equally likely."""
        data = self._consent.study.data
        return np.full((len(data.labels), *data.grid), 1 / len(data.labels), dtype=np.float32)

    def _codec(self, query: QuerySpec) -> Codec:
        if query.codec not in self._codecs:
            codec = load_codec(self._fetch(query.codec), expected_hash=query.codec)
            study = self._consent.study
            if codec.grid != study.data.grid or codec.labels != len(study.data.labels):
                raise InvalidInput("codec", limit="a codec for the study's grid and number of labels")
            self._codecs[query.codec] = codec
        return self._codecs[query.codec]


def _image(content: bytes, data: DataConfig) -> NDArray[np.float32]:
    from common.data.volume import volume_from_bytes  # imports torch, which the teachers have loaded by now

    return volume_from_bytes(content, data).image


def _nobody() -> None:
    """Stand for a voter beyond the number of teachers at the site; return None, as a voter without a teacher does."""


def _attempt(make: Callable[[], T], part: Part) -> T | ConsiliumError:
    """Call ``make`` and return its result, or the ConsiliumError that it raised as a value."""
    try:
        return make()
    except ConsiliumError as error:
        log.warning("event=refused part=%s cause=%s", type(part).__name__, type(error).__name__)
        return error
