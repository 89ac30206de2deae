"""Defines what server and sites exchange about heads: a checkpoint with its proofs, and a site's reply.

Both are parts of :mod:`common.messages`, which signs and carries them. Nothing in them depends on a patient's data: of
a site's own head the rows are counted that the server knows of, and its root is blinded.
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
"""Proofs that a site makes for one request; peers at other sizes are asked for theirs in a later round."""
MAX_NOTES_BYTES = 8 << 20
PROBLEMS = ("", "contradicts", "gap", "stale", "unknown", "unsigned")
"""Why a head was not countersigned: another one of the same ledger is known, its proof starts elsewhere, a newer one
is known, nobody confirmed its key, or it is not signed by it. Empty where it was."""


def _check_note(note: bytes) -> None:
    if len(note) > MAX_NOTE_BYTES:
        raise InvalidInput("checkpoint", value=f"{len(note)} bytes", limit=f"at most {MAX_NOTE_BYTES}")


def _note_bytes(items: list[object]) -> int:
    return sum(len(one) for item in items if isinstance(item, dict) for one in item.values() if isinstance(one, str))


Note = bytes
"""A checkpoint's text in UTF-8: a message's line is ASCII, and signature lines begin with a dash that is not."""
Rows = Annotated[int, Between("rows of a checkpoint", 0, MAX_SIZE)]
Proof = Annotated[tuple[Sha256, ...], Count("hashes of a proof", most=MAX_PROOF)]
Problem = Annotated[str, OneOf("why a head was not countersigned", PROBLEMS)]


@dataclass(frozen=True, slots=True)
class Growth(Document):
    """A proof that a head keeps the first ``since`` rows."""

    since: Rows
    proof: Proof


@dataclass(frozen=True, slots=True)
class PeerHead(Document):
    """The head of another site's own ledger: its note, and proofs from the sizes that were asked for."""

    site: SiteName
    note: Note
    growths: Annotated[tuple[Growth, ...], Count("proofs of a head", most=MAX_WITNESSES)]


@dataclass(frozen=True, slots=True)
class WitnessRequest(Document):
    """Asks a site to countersign the server's newest head, with the proof since the size it countersigned last.

    ``held_row`` is the newest row the site holds a receipt of, ``held`` the proof that it is among the head's rows.
    ``own`` is the site's own head as countersigned so far, or empty; ``own_since`` are the sizes its peers know.
    """

    study: Sha256
    ledger: SiteName
    note: Note
    growth: Growth
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
        for note in (self.note, self.own, *(head.note for head in self.heads)):
            _check_note(note)


@dataclass(frozen=True, slots=True)
class HeadSaid(Document):
    """What a site says to one peer's head: a signature line, or why there is none; and the size it knows."""

    site: SiteName
    line: bytes
    problem: Problem
    size: Rows

    def check(self) -> None:
        _check_line(self.line, self.problem)


@dataclass(frozen=True, slots=True)
class WitnessReply(Document):
    """What a site says to the server's head, and to its peers'; ``own`` is its own head."""

    line: bytes
    problem: Problem
    size: Rows
    held_row: Rows
    heads: Annotated[tuple[HeadSaid, ...], Count("heads of a reply", most=MAX_WITNESSES)]
    own: Note
    own_growths: Annotated[tuple[Growth, ...], Count("proofs of a reply", most=MAX_WITNESSES)]

    def check(self) -> None:
        _check_line(self.line, self.problem)
        _check_note(self.own)


def _check_line(line: bytes, problem: str) -> None:
    if len(line) > 512 or bool(line) == bool(problem):
        raise InvalidInput(
            "countersignature", value=f"{len(line)} bytes", limit="a signature line, or why there is none"
        )
