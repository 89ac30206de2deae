"""Stores decisions about labels in an append-only file. Each line contains the hash of the line before.

A decision accepts or rejects the label of one public volume for training. The dashboard writes the file; training reads
it. A decision names the label's file by SHA-256, so it does not hold for a label with other content. The newest
decision on a volume counts; all earlier ones stay in the file. A file with a broken hash chain, an unknown field or an
unknown verdict is refused.
"""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from common.canonical import canonical_bytes, check_hash, sha256_bytes
from common.clock import utc_now
from common.document import FLAT, Document
from common.errors import InvalidInput
from common.ledger.rows import NO_HASH
from common.objects import read_regular, write_atomically
from common.reading import parse_json

MAX_NOTE_CHARACTERS = 500
MAX_BYTES = 1 << 28


class Verdict(StrEnum):
    """The decision about a label: ``accept`` to use it in training (the default), or ``reject`` to leave it out."""

    ACCEPT = "accept"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Decision(Document):
    """One decision of a user to accept or reject a volume's label.

    Attributes:
        seq: Number of the decision in its file, from 1.
        time: Time of the decision, in UTC (ISO 8601).
        user: Name of the user who decided.
        study: The study's id.
        volume: Hash of the volume.
        label: SHA-256 of the label's file.
        verdict: The decision.
        note: A remark of one line.
    """

    seq: int
    time: str
    user: str
    study: str
    volume: str
    label: str
    verdict: Verdict
    note: str


@dataclass(frozen=True, slots=True)
class _Line(Document):
    """One line of the file: a decision, and in ``previous`` the SHA-256 of the line before (zeros in the first)."""

    SCHEMA: ClassVar = ("decision", 1)

    decision: Annotated[Decision, FLAT]
    previous: str


def read_decisions(path: Path) -> tuple[Decision, ...]:
    """Return every decision in a file. A last line that a crash left incomplete is ignored.

    Args:
        path: The file.

    Returns:
        The decisions in order; empty if the file is missing.

    Raises:
        InvalidInput: If a line is unreadable or breaks the hash chain; the error names the first such line.
    """
    try:
        lines = read_regular(path, most_bytes=MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return ()
    found: list[Decision] = []
    previous = NO_HASH
    for number, line in enumerate(lines[:-1], start=1):  # a crash left text after the last newline incomplete
        try:
            read = _Line.from_json(parse_json(line, what="decision"))
            if read.previous != previous or read.decision.seq != number:
                raise InvalidInput("decision", limit="a number and hash that continue the line before")
        except InvalidInput as error:
            raise InvalidInput(
                f"line {number} of the decisions file is not valid",
                value=path.name,
                remedy="restore it from a backup; nothing was changed",
            ) from error
        found.append(read.decision)
        previous = sha256_bytes(line)
    return tuple(found)


def newest_decisions(decisions: tuple[Decision, ...], study: str) -> dict[str, Decision]:
    """Return the newest decision on each volume of a study.

    Args:
        decisions: Decisions in order.
        study: The study's id.

    Returns:
        Decisions by volume hash.
    """
    return {decision.volume: decision for decision in decisions if decision.study == study}


def rejected_labels(path: Path, study: str) -> frozenset[tuple[str, str]]:
    """Return the labels of a study whose newest decision is a rejection.

    Args:
        path: The decisions file.
        study: The study's id.

    Returns:
        Pairs of volume hash and SHA-256 of the label's file.

    Raises:
        InvalidInput: If the file is invalid.
    """
    newest = newest_decisions(read_decisions(path), study).values()
    return frozenset((one.volume, one.label) for one in newest if one.verdict is Verdict.REJECT)


def take_over(source: Path, target: Path) -> None:
    """Copy the dashboard's decisions file into the study's directory, where training reads it.

    Args:
        source: The dashboard's file.
        target: The study's file.

    Raises:
        InvalidInput: If ``source`` is missing or invalid, or lacks a decision that was copied before. A decision can be
            reversed by a later one but never removed.
    """
    if not source.is_file():
        raise InvalidInput(
            "decisions file",
            value=str(source),
            limit="an existing file",
            remedy="the dashboard's Labels page shows the command with the file's path",
        )
    decisions, known = read_decisions(source), read_decisions(target)
    if decisions[: len(known)] != known:
        raise InvalidInput(
            "decisions file",
            value=str(source),
            limit=f"a file that begins with the {len(known)} decisions that were copied before",
            remedy="give the newest decisions file of the dashboard; a decision can be reversed there, but not removed",
        )
    write_atomically(target, source.read_bytes(), mode=0o600)


class DecisionStore:
    """Appends decisions to one file. Several processes may write to it; a lock on the file lets one write at a time.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def decisions(self) -> tuple[Decision, ...]:
        """Return every decision in order; see :func:`read_decisions`."""
        return read_decisions(self.path)

    def decide(self, *, user: str, study: str, volume: str, label: str, verdict: Verdict, note: str = "") -> Decision:
        """Append a decision and sync it to disk, unless the newest decision on the label has the same verdict.

        Args:
            user: Name of the user who decides.
            study: The study's id.
            volume: Hash of the volume.
            label: SHA-256 of the label's file.
            verdict: The decision.
            note: A remark, one line of at most :data:`MAX_NOTE_CHARACTERS` characters.

        Returns:
            The appended decision, or the newest one if it has the same verdict.

        Raises:
            InvalidInput: If the note is too long or has control characters, or the file is invalid.
        """
        check_hash(volume), check_hash(label)
        if len(note) > MAX_NOTE_CHARACTERS or not note.isprintable():
            raise InvalidInput(
                "note", value=f"{len(note)} characters", limit=f"one line of at most {MAX_NOTE_CHARACTERS} characters"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            known = read_decisions(self.path)
            last = newest_decisions(known, study).get(volume)
            if last is not None and (last.label, last.verdict) == (label, verdict):
                return last
            content = stream.read()
            stream.truncate(content.rfind(b"\n") + 1)  # drop a line that a crash left incomplete
            lines = content[: content.rfind(b"\n") + 1].splitlines()
            decision = Decision(
                seq=len(known) + 1,
                time=utc_now().isoformat(timespec="seconds"),
                user=user,
                study=study,
                volume=volume,
                label=label,
                verdict=verdict,
                note=note,
            )
            line = _Line(decision, sha256_bytes(lines[-1]) if lines else NO_HASH)
            stream.write(canonical_bytes(line.to_json()) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        return decision
