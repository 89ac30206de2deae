"""Countersigns the newest heads of the server's and other hospitals' ledgers, if they extend the known ones.

A *head* is the signed hash of a ledger's newest row. The worker calls this module for each witness request. It
countersigns a head only if three conditions hold:

1. The ledger's own key signed the head.
2. In the server's ledger, the rows under the head include the newest row for which this site has a receipt.
3. The rows under the head include every row under the head of that ledger that this site countersigned before.

It refuses further ledgers of a server once :data:`MAX_UNRECEIPTED` of them have sent this site no receipt, because each
takes space on the disk and a dishonest server can invent any number.

If a ledger shows two contradicting histories, the site countersigns only the one it knows and keeps both as evidence.
If the ledger is the server's, the site also answers nothing more until a person has looked into it. The reply also
contains the head of the site's own ledger. This head reveals only how many queries the site accepted and how many
receipts it holds, which the server knows already (:func:`common.witness.memory.blinded`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from client.ledger.site_ledger import SiteLedger
from common.errors import Refused
from common.ledger.keys import public_hex
from common.witness.memory import HEADS, SHOWN, HeadMemory, blinded
from common.witness.merkle import has_leaf, prove_growth, root
from common.witness.messages import ConsistencyProof, HeadReply, PeerHead, WitnessReply, WitnessRequest
from common.witness.notes import CheckpointNote, note_in, origin_of, witness_name

log = logging.getLogger(__name__)
MAX_UNRECEIPTED = 16
"""Largest number of server ledgers whose newest head this site stores before they have sent it a receipt."""
_MISSING = (
    "event=witness-missing ledger=%s peers=%d says='%d of the other hospitals have not confirmed the ledger of the "
    "server, so they cannot prove a later change of it; if every run says this, ask them for `consilium site status`'"
)


class Witnessing:
    """Answers the server's requests to countersign heads (:class:`~common.witness.messages.WitnessRequest`).

    Args:
        folder: Folder in which this site stores the heads it has seen.
        site: This site's name.
        ledger: The site's ledger.
        server_keys: Keys with which the server may sign.
        now: Clock, in seconds since 1970.
    """

    def __init__(
        self,
        folder: Path,
        *,
        site: str,
        ledger: SiteLedger,
        server_keys: tuple[Ed25519PublicKey, ...],
        now: Callable[[], float] = time.time,
    ) -> None:
        self.memory = HeadMemory(folder)
        self._site, self._ledger, self._now = site, ledger, now
        self._gaps = 0
        """Number of requests in a row whose proof did not begin at the row that this site knows."""
        self._server_keys = tuple(public_hex(key) for key in server_keys)

    def answer(self, request: WitnessRequest) -> WitnessReply:
        """Check the heads in a request and countersign those that pass.

        Args:
            request: The server's request.

        Returns:
            The countersignatures, the problems found, and the head of this site's own ledger.

        Raises:
            Refused: ``too-many-ledgers`` if the ledger is new and :data:`MAX_UNRECEIPTED` is reached. Nothing is
                stored.
        """
        with self.memory.alone():
            return self._answer(request)

    def _answer(self, request: WitnessRequest) -> WitnessReply:
        self._check_room(request.ledger)
        peers = self._ledger.peers(request.study)
        origin = origin_of("server", request.ledger)
        before = self.memory.note(origin)
        line, problem = self._server(request, origin)
        said = tuple(self._peer(head, peers) for head in request.heads if head.site != self._site)
        self._gaps = self._gaps + 1 if problem == "gap" else 0
        missing = sorted(peers)
        if line:
            missing = self._keep_server(request, origin, peers, before=before)
        elif self._gaps == 1:  # the server learns from this reply where its proof must begin, and asks again
            missing = []
        if missing:
            log.warning(_MISSING, request.ledger, len(missing), len(missing))
        own, growths = self._own(request)
        held = self._ledger.held(request.ledger)
        return WitnessReply(line, problem, self.memory.size(origin), held.seq, said, own, growths)

    def _check_room(self, ledger_id: str) -> None:
        known = self.memory.server_ledgers()
        if ledger_id in known or self._ledger.held(ledger_id).seq:
            return
        unreceipted = sum(not self._ledger.held(other).seq for other in known)
        if unreceipted >= MAX_UNRECEIPTED:
            log.warning("event=witness-refused reason=too-many-ledgers ledgers=%d", unreceipted)
            raise Refused(
                "too-many-ledgers",
                f"the server has shown {unreceipted} ledgers that never sent this site a receipt, and at most "
                f"{MAX_UNRECEIPTED} are countersigned; to fix: ask the server's operator why; then move "
                f"{self.memory.folder / HEADS} away, and heads are countersigned anew",
            )

    def _server(self, request: WitnessRequest, origin: str) -> tuple[bytes, str]:
        note = _signed_alone(_read(request.note, origin), self._server_keys)
        if note is None:
            return b"", "unsigned"
        held = self._ledger.held(request.ledger)
        if held.seq > note.size:
            return b"", "stale"
        if held.seq != request.held_row:
            return b"", "gap"
        if problem := self.memory.judge(note, (request.growth,)):
            return b"", self._log_contradiction(problem, note)
        leaf = bytes.fromhex(held.hash)
        if held.seq and not has_leaf(request.held, leaf=leaf, index=held.seq - 1, size=note.size, of=note.root):
            self.memory.keep_conflict(note)
            return b"", self._log_contradiction("contradicts", note)
        return self._cosign(note), ""

    def _peer(self, head: PeerHead, peers: Mapping[str, str]) -> HeadReply:
        key, note = peers.get(head.site), _read(head.note, "")
        if key is None or note is None:
            return HeadReply(head.site, b"", "unknown" if key is None else "unsigned", 0)
        alone = _signed_alone(note, (key,))
        if not note.origin.startswith(origin_of("site", "")) or alone is None:
            return HeadReply(head.site, b"", "unsigned", self.memory.size(note.origin))
        if note.origin == origin_of("site", self._ledger.ledger_id):  # this site's ledger id, signed with another key
            return HeadReply(head.site, b"", self._log_contradiction("contradicts", note), 0)
        others = [other for site, other in peers.items() if site != head.site]
        name = self.memory.place(note, key, others=others)
        size = self.memory.size(name)
        other = self.memory.other_ledger(alone, key, name=name)
        problem = "contradicts" if other else self.memory.judge(alone, head.growths, name=name)
        if problem:
            return HeadReply(head.site, b"", self._log_contradiction(problem, note), size)
        line = self._cosign(note, name=name)
        self.memory.keep(note, name=name)
        return HeadReply(head.site, line, "", note.size)

    def _cosign(self, note: CheckpointNote, *, name: str = "") -> bytes:
        self.memory.remember(note, name=name)  # before the signature leaves
        return note.cosign(
            self._ledger.sign,
            name=witness_name(self._site),
            key=self._ledger.public_key,
            time=int(self._now()),
        ).line.encode()

    def _keep_server(
        self, request: WitnessRequest, origin: str, peers: Mapping[str, str], *, before: CheckpointNote | None
    ) -> list[str]:
        """Store the server's signed head; return the confirmed hospitals whose countersignature is missing.

        A head that this site sees for the first time cannot have the others' signatures yet, because all sites are
        asked for them at the same time. So the head ``before`` it is checked instead, if there was one.
        """
        note = _read(request.note, origin)
        assert note is not None
        self.memory.keep(note)
        checked = note if before is not None and before.same_head(note) else before
        if checked is None:
            return []
        return [site for site, key in peers.items() if checked.cosigned_at(name=witness_name(site), key=key) is None]

    def _own(self, request: WitnessRequest) -> tuple[bytes, tuple[ConsistencyProof, ...]]:
        origin, key = origin_of("site", self._ledger.ledger_id), self._ledger.public_key
        told = _read(request.own, origin)
        if told is not None and told.is_signed(key):
            self.memory.keep(told)
        leaves = blinded(self._ledger.row_hashes(kinds=SHOWN), self.memory.folder, make=True)
        note = CheckpointNote(origin, len(leaves), root(leaves)).signed(self._ledger.sign, key=key)
        sizes = sorted({since for since in request.own_since if 0 < since <= len(leaves)})
        return note.render().encode(), tuple(
            ConsistencyProof(since, tuple(prove_growth(leaves, since))) for since in sizes
        )

    def _log_contradiction(self, problem: str, note: CheckpointNote) -> str:
        if problem == "contradicts":
            log.error("event=witness-disagrees size=%d remedy=docs/ledger.md", note.size)
        return problem


def _signed_alone(note: CheckpointNote | None, keys: Iterable[str]) -> CheckpointNote | None:
    """Return a head with one signature by one of its ledger's keys and no other; None if there is none.

    A head that contradicts another is stored in this form, because a dishonest server can add any number of lines.
    """
    alone = () if note is None else (replace(note, signatures=(one,)) for one in note.signatures)
    return next((one for one in alone if any(one.is_signed(key) for key in keys)), None)


def _read(text: bytes, origin: str) -> CheckpointNote | None:
    """Return the checkpoint (signed ledger head) that a text contains.

    Returns None if the text contains no checkpoint, or one of another ledger than ``origin``. An empty ``origin``
    stands for any ledger.
    """
    note = note_in(text)
    return note if note is not None and origin in ("", note.origin) else None
