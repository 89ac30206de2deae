"""Defines the messages of server and sites about heads: a checkpoint with its proofs, and a site's reply.

Both are parts of :mod:`common.messages`, which signs and carries them. Nothing in them depends on a patient's data: a
site's own head counts only rows that the server knows of, and its root is blinded. Refuses too many or too long parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from common.document import Between, Count, Document, OneOf, Sha256
from common.errors import InvalidInput
from common.ledger.charges import SiteName
from common.witness.merkle import MAX_PROOF
from common.witness.notes import MAX_NOTE_BYTES, MAX_SIZE

MAX_WITNESSES = 256
MAX_SIZES = 64
"""Largest number of proofs that a site makes for one request. Peers for which it makes no proof get one in a later
round.
"""
MAX_NOTES_BYTES = 8 << 20
PROBLEMS = ("", "contradicts", "gap", "stale", "unknown", "unsigned")
"""Reasons why a head was not countersigned; empty if it was. ``contradicts``: another head of the same ledger is known.
``gap``: the proof starts at a size other than that of the known head. ``stale``: a newer head is known. ``unknown``:
the ledger's key was not confirmed. ``unsigned``: the ledger's key did not sign the head.
"""


def _check_note(note: bytes) -> None:
    if len(note) > MAX_NOTE_BYTES:
        raise InvalidInput("checkpoint", value=f"{len(note)} bytes", limit=f"at most {MAX_NOTE_BYTES} bytes")


def _note_bytes(items: list[object]) -> int:
    return sum(len(one) for item in items if isinstance(item, dict) for one in item.values() if isinstance(one, str))


Note = bytes
"""A checkpoint's text in UTF-8. Its type is bytes because signature lines begin with a dash that is not ASCII, and
texts in a message must be ASCII."""
Rows = Annotated[int, Between("rows of a checkpoint", 0, MAX_SIZE)]
Proof = Annotated[tuple[Sha256, ...], Count("hashes of a proof", most=MAX_PROOF)]
Problem = Annotated[str, OneOf("why a head was not countersigned", PROBLEMS)]


@dataclass(frozen=True, slots=True)
class ConsistencyProof(Document):
    """A Merkle proof that the first ``since`` rows of a ledger are the same in an earlier head and in its new head."""

    since: Rows
    proof: Proof


@dataclass(frozen=True, slots=True)
class PeerHead(Document):
    """The signed head of another site's ledger: its note, and a proof for each requested size that the rows up to that
    size are unchanged.
    """

    site: SiteName
    note: Note
    growths: Annotated[tuple[ConsistencyProof, ...], Count("proofs of a head", most=MAX_WITNESSES)]


@dataclass(frozen=True, slots=True)
class WitnessRequest(Document):
    """Asks a site to countersign the newest signed heads of the server's ledger and of its peers' ledgers.

    Attributes:
        study: Id of the study.
        ledger: Id of the server's ledger.
        note: The server's newest head.
        growth: Proof that this head contains all rows of the head that the site countersigned last.
        held_row: Newest row for which the site holds a receipt.
        held: Proof that this row is among the head's rows.
        heads: Heads of the site's peers.
        own: Head of the receiving site's ledger with its countersignatures so far; empty if there is none.
        own_since: Numbers of rows of those heads of the receiving site's ledger that its peers know. The reply proves
            that the ledger's newest head continues each of them.
    """

    study: Sha256
    ledger: SiteName
    note: Note
    growth: ConsistencyProof
    held_row: Rows
    held: Proof
    heads: Annotated[
        tuple[PeerHead, ...],
        Count("heads of a request", most=MAX_WITNESSES),
        Count("characters of heads", most=MAX_NOTES_BYTES, of=_note_bytes),
    ]
    own: Note
    own_since: Annotated[tuple[Rows, ...], Count("sizes of a request", most=MAX_SIZES)]

    def check(self) -> None:
        """Refuse notes that are too long."""
        for note in (self.note, self.own, *(head.note for head in self.heads)):
            _check_note(note)


@dataclass(frozen=True, slots=True)
class HeadReply(Document):
    """A site's reply about the head of one peer's ledger: a signature line, or the reason why there is none.

    ``site`` is the peer's name. ``size`` is the number of rows in the newest head of that ledger that the replying site
    knows.
    """

    site: SiteName
    line: bytes
    problem: Problem
    size: Rows

    def check(self) -> None:
        """Refuse a reply that has both a signature line and a problem, or neither."""
        _check_line(self.line, self.problem)


@dataclass(frozen=True, slots=True)
class WitnessReply(Document):
    """A site's reply to a :class:`WitnessRequest`.

    Attributes:
        line: Signature line for the head of the server's ledger; empty if the site did not countersign it.
        problem: Why the site did not countersign that head, a word of :data:`PROBLEMS`; empty if it did.
        size: Number of rows in the newest head of the server's ledger that the site knows.
        held_row: Newest row of the server's ledger for which the site holds a receipt.
        heads: The site's replies about its peers' heads.
        own: Newest head of the replying site's own ledger.
        own_growths: Proofs that this head continues the heads that peers know (``own_since`` of the request).
    """

    line: bytes
    problem: Problem
    size: Rows
    held_row: Rows
    heads: Annotated[tuple[HeadReply, ...], Count("heads of a reply", most=MAX_WITNESSES)]
    own: Note
    own_growths: Annotated[tuple[ConsistencyProof, ...], Count("proofs of a reply", most=MAX_WITNESSES)]

    def check(self) -> None:
        """Refuse a reply that has both a signature line and a problem, or neither, and a note that is too long."""
        _check_line(self.line, self.problem)
        _check_note(self.own)


def _check_line(line: bytes, problem: str) -> None:
    if len(line) > 512 or bool(line) == bool(problem):
        raise InvalidInput(
            "countersignature", value=f"{len(line)} bytes", limit="a signature line, or the reason why there is none"
        )
