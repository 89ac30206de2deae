"""The teacher worker: the site's long-lived process that holds models and data and answers the server's messages.

It trusts nothing that arrives: an offer is reviewed against the consented study and the site's own ledger before any
inference, a codes request is answered only for accepted queries and while neither a veto nor an alarm stands, public
objects are taken by content hash. After acceptance every failure of a query is the zero code, sealed like any other;
the reason stays in the site's log. A code is stored before it leaves, and a retry gets the stored one.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import grpc
import numpy as np
from numpy.typing import NDArray

from client.cases import has_trained, load_cases
from client.control import retired_voters
from client.policy import Consent, SiteConfig, load_site, review
from common.codecs.base import Codec, load_codec
from common.codecs.frame import Frame
from common.config import DataConfig, load_study
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt, Refused
from common.ledger.receipts import Receipt
from common.ledger.site import SiteLedger
from common.messages import (
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
from common.pki import shared
from common.privacy.mechanism import QuerySpec
from common.privacy.quantise import quantise
from common.sealing import SealContext, seal
from common.worker_api import HEALTH, SERVICE, channel_options

if TYPE_CHECKING:
    from client.teacher import Teachers

log = logging.getLogger(__name__)


class Voters(Protocol):
    """The site's teachers, as the worker needs them."""

    def predict(self, volume: bytes) -> Iterable[NDArray[np.float32] | None]:
        """One probability map [c, x, y, z] a voter for a public volume's bytes; None for an empty slot.

        Taken one at a time: m maps of a large volume would not fit.
        """


class _VolumeVoters:
    """Teachers that take a public volume's bytes."""

    def __init__(self, teachers: Teachers, data: DataConfig, *, silent: Callable[[], frozenset[int]]) -> None:
        self._teachers, self._data, self._silent = teachers, data, silent

    def predict(self, volume: bytes) -> Iterator[NDArray[np.float32] | None]:
        from common.data.volume import volume_from_bytes

        for voter, answer in enumerate(self._teachers.predict(volume_from_bytes(volume, self._data).image)):
            yield None if voter in self._silent() else answer  # silent: lost a patient since it was trained


Fetch = Callable[[str], bytes]
"""Gets a public object by content hash, verified."""


class Worker:
    """Answers messages; free of gRPC, sockets and torch, so that tests drive the very object that serves."""

    def __init__(
        self, *, config: SiteConfig, consent: Consent, ledger: SiteLedger, voters: Voters, fetch: Fetch
    ) -> None:
        self._config, self._consent, self._ledger = config, consent, ledger
        self._voters, self._fetch = voters, fetch
        self._codecs: dict[str, Codec] = {}
        self._lock = threading.Lock()

    def handle(self, body: bytes) -> bytes:
        """The reply to one message. Raises :class:`Refused` or :class:`InvalidInput` for what deserves none."""
        message = decode(body)
        with self._lock:
            if not isinstance(message, Several):
                return encode(self._reply(message))
            replies = (self._reply_or_none(part) for part in message.parts)
            return encode(Several(tuple(reply for reply in replies if reply is not None)))

    def _reply(self, message: Part) -> Part:
        match message:
            case Offer():
                reason, held = self._decide(message), self._ledger.held(message.ledger)
                return OfferReply(message.batch, reason, ledger_row=held.seq, ledger_head=held.hash)
            case CodesRequest():
                return self._codes(message)
            case Receipts():
                self._file(message)
                held = self._ledger.held(message.ledger)
                return ReceiptsReply(ledger_row=held.seq, ledger_head=held.hash)
            case _:
                raise Refused("malformed", "a worker answers offers, codes requests and receipts")

    def _reply_or_none(self, message: Part) -> Part | None:
        """One part's reply; a part that is refused keeps no other from its own."""
        try:
            return self._reply(message)
        except ConsiliumError as error:
            log.warning("event=refused part=%s cause=%s", type(message).__name__, type(error).__name__)
            return None

    def _decide(self, offer: Offer) -> str:
        reason = review(offer, self._consent)
        if reason == "accepted" and (reason := self._config.allow.review(offer)) != "accepted":
            self._ledger.refuse(offer.study, offer.queries, "not-allowed")
        if reason == "accepted":
            try:
                self._ledger.reserve(offer.study, offer.queries)
            except Refused as error:
                reason = error.reason
        log.info("event=offer batch=%s queries=%d decision=%s", offer.batch[:12], len(offer.queries), reason)
        return reason

    def _codes(self, request: CodesRequest) -> CodesReply:
        if request.study != self._consent.study.id:
            raise Refused("unknown-study", "codes asked for another study than the one consented to")
        until = time.monotonic() + request.deadline_s
        sealed: list[tuple[str, bytes]] = []
        for query_id in request.queries:
            self._check_open(request)
            query = self._ledger.reserved(query_id)
            if query is None:
                raise Refused("not-accepted", f"query {query_id[:12]} was never accepted here")
            code = self._ledger.code(query_id)
            if code is None:
                if time.monotonic() >= until:
                    break
                code, outcome = self._answer(query)
                self._ledger.store_code(query_id, code, outcome=outcome)
            context = SealContext(study=request.study, query=query_id, site=self._config.site, attempt=request.attempt)
            self._check_open(request)
            sealed.append((query_id, seal(code, public_key=self._config.server.sealing_public_key, context=context)))
        log.info("event=codes batch=%s attempt=%d codes=%d", request.batch[:12], request.attempt, len(sealed))
        return CodesReply(batch=request.batch, attempt=request.attempt, codes=tuple(sealed))

    def _check_open(self, request: CodesRequest) -> None:
        """That no veto and no alarm stands; asked for every code, since one may be given while a batch is computed."""
        cause = self._ledger.stopped(request.study)
        if cause is not None:
            log.warning("event=stopped cause=%s batch=%s", cause, request.batch[:12])
            raise Refused("paused", f"nothing leaves this site now ({cause})")

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

        The zero code whatever goes wrong: after acceptance a failure must look like any other answer.
        """
        mechanism = query.mechanism
        total = np.zeros(mechanism.dimension, dtype=np.int64)
        try:
            codec, frame = self._codec(query), self._frame(query)
            codes = [self._encoded(codec, frame, volume, query) for volume in query.volumes]
            voters = list(zip(*codes, strict=True))
            if len(voters) > mechanism.voters_per_site:
                raise InvalidInput("voters", value=len(voters), limit=f"at most {mechanism.voters_per_site}")
        except Exception as error:  # noqa: BLE001
            log.warning("event=zero-code query=%s cause=%s", query.id[:12], type(error).__name__)
            return total, "zero-code"
        zero_votes = 0
        for slot, each in enumerate(voters):
            try:
                known = [code for code in each if code is not None]
                if len(known) < len(each):
                    raise InvalidInput("voter's codes", limit="one a volume")
                code = known[0] if frame is None else frame.encode(np.stack(known))
                total += quantise(code, radius_int=mechanism.radius_int)
            except Exception as error:  # noqa: BLE001  one voter's failure is that voter's zero code
                log.warning("event=zero-vote query=%s slot=%d cause=%s", query.id[:12], slot, type(error).__name__)
                zero_votes += 1
        return total, f"zero-votes-{zero_votes}" if zero_votes else "stored"

    def _encoded(
        self, codec: Codec, frame: Frame | None, volume: str, query: QuerySpec
    ) -> list[NDArray[np.float64] | None]:
        """Every voter's unclipped code of one public volume; None for a voter that has none. # sensitive"""
        codes: list[NDArray[np.float64] | None] = []
        for slot, probabilities in enumerate(self._voters.predict(self._fetch(volume))):
            try:
                if probabilities is None:
                    raise InvalidInput("voter", limit="a trained teacher in this slot")
                codes.append(codec.encode(probabilities if frame is None else frame.sharpen(probabilities)))
            except Exception as error:  # noqa: BLE001
                log.warning("event=no-code query=%s slot=%d cause=%s", query.id[:12], slot, type(error).__name__)
                codes.append(None)
        return codes

    def _codec(self, query: QuerySpec) -> Codec:
        if query.codec not in self._codecs:
            codec = load_codec(self._fetch(query.codec), expected_hash=query.codec)
            study = self._consent.study
            if codec.grid != study.data.grid or codec.labels != len(study.data.labels):
                raise InvalidInput("codec", limit="the study's grid and labels")
            self._codecs[query.codec] = codec
        codec = self._codecs[query.codec]
        if query.centre == "zero" and codec.dimension != query.mechanism.dimension:
            raise InvalidInput("code dimension", value=query.mechanism.dimension, limit=str(codec.dimension))
        return codec

    def _frame(self, query: QuerySpec) -> Frame | None:
        """The frame of a joint query, None for a query about one volume."""
        if query.centre == "zero":
            return None
        frame = Frame.from_bytes(self._fetch(query.centre))
        if (frame.codec, frame.volumes) != (query.codec, len(query.volumes)):
            raise InvalidInput("frame of a joint query", limit="the query's codec and volumes")
        if frame.dimension != query.mechanism.dimension:
            raise InvalidInput("code dimension", value=query.mechanism.dimension, limit=str(frame.dimension))
        return frame


def serve(worker: Worker, *, socket: Path) -> grpc.Server:
    """Start serving ``worker`` on a Unix socket; returns the started server.

    Only this user can open it, or, in a folder that was given to a group, that group.
    """

    def handle(body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return worker.handle(body)
        except ConsiliumError as error:
            log.warning("event=refused cause=%s", type(error).__name__)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "refused")
        except Exception as error:  # noqa: BLE001  the text may hold patients' data
            log.error("event=failed cause=%s", type(error).__name__)
            context.abort(grpc.StatusCode.INTERNAL, "failed")
        raise AssertionError("unreachable")

    def health(_body: bytes, _context: grpc.ServicerContext) -> bytes:
        return b"ok"

    server = grpc.server(ThreadPoolExecutor(max_workers=4), options=channel_options())
    methods = {
        "Handle": grpc.unary_unary_rpc_method_handler(handle),
        HEALTH.rsplit("/", 1)[1]: grpc.unary_unary_rpc_method_handler(health),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
    socket.unlink(missing_ok=True)
    before = os.umask(0o117 if shared(socket.parent) else 0o177)
    try:
        if server.add_insecure_port(f"unix:{socket}") == 0:
            raise InvalidInput("worker socket", value=str(socket), limit="a path of at most 100 bytes, writable")
        server.start()
    finally:
        os.umask(before)
    return server


def open_worker(directory: Path) -> Worker:
    """The worker of a site's directory, with its models loaded."""
    from client.fetch import PublicObjects  # torch and TLS only where a real worker runs
    from client.teacher import Teachers

    config = load_site(directory)
    study = load_study(config.path(config.study))
    ledger = SiteLedger.open(directory / "site-ledger.sqlite", config.pool, caps=config.caps, site=config.site)
    ledger.consent(study)
    if has_trained(directory):  # before anything is accepted
        ledger.state_identity(load_cases(directory).patient_identity)
    loaded_at, retired = ledger.row_count, retired_voters(directory / "teachers")
    teachers = Teachers.load(directory / "teachers")
    objects = PublicObjects(config)
    return Worker(
        config=config,
        consent=Consent.of(study),
        ledger=ledger,
        voters=_VolumeVoters(teachers, study.data, silent=lambda: retired | ledger.withdrawn_voters(after=loaded_at)),
        fetch=objects.get,
    )


def run_worker(directory: Path, *, socket: Path) -> None:
    """Serve until SIGTERM or SIGINT."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = serve(open_worker(directory), socket=socket)
    log.info("event=ready")
    stop.wait()
    server.stop(grace=2).wait()


def main() -> None:
    """``python -m client.worker --site-dir DIR --socket PATH``: serve until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(description="Consilium's teacher worker")
    parser.add_argument("--site-dir", type=Path, required=True)
    parser.add_argument("--socket", type=Path)
    arguments = parser.parse_args()
    run_worker(arguments.site_dir, socket=arguments.socket or arguments.site_dir / "worker.sock")


if __name__ == "__main__":
    main()
