"""Decisions about labels: an append-only file of the dashboard's own, each line holding the hash of the one before.

A decision is about one volume's label as it is (its file's SHA-256): a label decoded anew is open again. The newest
decision counts, every earlier one stays readable. Refuses a file whose chain is broken, unknown fields and decisions.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from common.canonical import canonical_bytes, check_hash
from common.clock import utc_now
from common.document import FLAT, Document
from common.errors import InvalidInput
from common.objects import read_regular, write_atomically
from common.reading import parse_json

MAX_NOTE_CHARACTERS = 500
MAX_BYTES = 1 << 28
NO_HASH = "0" * 64


class Verdict(StrEnum):
    """What is to become of a label: used in training (as without any decision), or left out."""

    ACCEPT = "accept"
    REJECT = "reject"


@dataclass(frozen=True, slots=True)
class Decision(Document):
    """One line: who decided what about which label (``label`` is its file's SHA-256), and when (UTC, ISO 8601)."""

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
    """``previous`` is the SHA-256 of the line before."""

    SCHEMA: ClassVar = ("decision", 1)

    decision: Annotated[Decision, FLAT]
    previous: str


def read_decisions(path: Path) -> tuple[Decision, ...]:
    """Every decision in order; a missing file is empty. InvalidInput names the first line that does not hold."""
    try:
        lines = read_regular(path, most_bytes=MAX_BYTES).split(b"\n")
    except FileNotFoundError:
        return ()
    found: list[Decision] = []
    previous = NO_HASH
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was torn by a crash
        try:
            read = _Line.from_json(parse_json(line, what="decision"))
            if read.previous != previous or read.decision.seq != number:
                raise InvalidInput("decision", limit="one that follows from the line before")
        except InvalidInput as error:
            raise InvalidInput(
                f"decisions file, line {number}",
                value=path.name,
                remedy="restore it from a backup; nothing was changed",
            ) from error
        found.append(read.decision)
        previous = hashlib.sha256(line).hexdigest()
    return tuple(found)


def standing(decisions: tuple[Decision, ...], study: str) -> dict[str, Decision]:
    """The newest decision on each volume of a study."""
    return {decision.volume: decision for decision in decisions if decision.study == study}


def rejected_labels(path: Path, study: str) -> frozenset[tuple[str, str]]:
    """(volume, SHA-256 of the label's file) of every label of this study that stands rejected."""
    newest = standing(read_decisions(path), study).values()
    return frozenset((one.volume, one.label) for one in newest if one.verdict is Verdict.REJECT)


def take_over(source: Path, target: Path) -> None:
    """Copy a decisions file to where training looks for it. InvalidInput for one that is missing or does not hold, and
    for one that lacks decisions taken over before: a decision can be reversed by a later one, never dropped."""
    if not source.is_file():
        raise InvalidInput(
            "decisions file", value=str(source), limit="a file", remedy="see the dashboard's Labels page"
        )
    decisions, known = read_decisions(source), read_decisions(target)
    if decisions[: len(known)] != known:
        raise InvalidInput(
            "decisions file", value=str(source), limit=f"one that goes on from the {len(known)} taken over before"
        )
    write_atomically(target, source.read_bytes(), mode=0o600)


class DecisionStore:
    """Appends to one file; several writers take turns by its lock."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def path(self) -> Path:
        return self._path

    def decisions(self) -> tuple[Decision, ...]:
        return read_decisions(self._path)

    def decide(self, *, user: str, study: str, volume: str, label: str, verdict: Verdict, note: str = "") -> Decision:
        """Append a decision and return it; the same verdict on the same label again returns the one that stands."""
        check_hash(volume), check_hash(label)
        if len(note) > MAX_NOTE_CHARACTERS or not note.isprintable():
            raise InvalidInput("note", value=len(note), limit=f"one line of at most {MAX_NOTE_CHARACTERS} characters")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "r+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            known = read_decisions(self._path)
            last = standing(known, study).get(volume)
            if last is not None and (last.label, last.verdict) == (label, verdict):
                return last
            content = stream.read()
            stream.truncate(content.rfind(b"\n") + 1)  # a line torn by a crash was never a decision
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
            line = _Line(decision, hashlib.sha256(lines[-1]).hexdigest() if lines else NO_HASH)
            stream.write(canonical_bytes(line.to_json()) + b"\n")
            stream.flush()
            os.fsync(stream.fileno())
        return decision
