"""Follows existing records and sends each event to every target, at least once after a crash or a lost connection.

The log processes of site, server and dashboard call it. A file stores how far each target has received the events
(:data:`Place`), so no event is lost while a target or this process is down. A line that is sent twice has the same
``name``, ``source`` and ``position`` both times. Ledgers are opened for reading only, and no key is needed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from common.canonical import checked_fields
from common.clock import utc_now
from common.document import Document
from common.errors import ConsiliumError, InvalidInput, LedgerCorrupt
from common.ledger.chain import Chain
from common.ledger.records import parse_record
from common.ledger.rows import Row, check_link, format_time
from common.objects import write_atomically
from common.reading import parse_json
from common.security_log.events import KINDS, FoundEvent, log_record
from common.security_log.sinks import Sink

log = logging.getLogger(__name__)

POLL_S = 1.0
ROWS_AT_ONCE = 500
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
MAX_LINE = 1 << 16
MAX_STATE_BYTES = 1 << 20

Place = list[str | int]
"""How far a source was read: a JSON list whose content only that source interprets; empty before the first event. A
source reads from the beginning if it cannot interpret the place, as after damage to the file of places.
"""


class Source(Protocol):
    """A record whose entries become events, in order."""

    name: str

    def after(self, place: Place) -> Iterator[tuple[int, FoundEvent | None, Place]]:
        """Iterate over the entries after a place.

        Args:
            place: Place that an earlier call yielded; empty for the beginning.

        Returns:
            An iterator of tuples (position of the entry; its event, or None if it is not logged; the place after it).
        """


ReadRow = Callable[[Document], tuple[str, dict[str, str | int]] | None]
"""Returns the kind and the facts of the event that a ledger's record describes; None if the record is not logged."""

_TOLD = "told"  # last item of a place after which the ledger could not be read; the problem is logged only once


class LedgerSource:
    """The committed rows of a ledger, each checked against the row before.

    If the row that was logged last has changed or is gone, the ledger was restored from a copy or forked. The source
    then yields ``ledger-changed``, and all rows again from the first. A damaged file yields ``ledger-changed`` only
    once, until further rows can be read.

    Args:
        path: The ledger.
        role: ``server`` or ``site``.
        read: Returns the kind and the facts of a row's event, or None if the row is not logged.
    """

    def __init__(self, path: Path, *, role: str, read: ReadRow) -> None:
        self.name, self._path, self._role, self._read = "ledger", path, role, read

    def after(self, place: Place) -> Iterator[tuple[int, FoundEvent | None, Place]]:
        """Iterate over the committed rows after a place; see :meth:`Source.after`.

        Args:
            place: Number and hash of the last row read; empty for the beginning.

        Returns:
            An iterator of (row number, event or None, place after the row). It yields nothing if there is no file.
        """
        if not self._path.exists():
            return
        try:
            with contextlib.closing(Chain.open(self._path, role=self._role, signing_key=None, clock=utc_now)) as chain:
                for position, found, at in self._rows(chain, place):
                    yield position, found, at
                    place = at
        except (LedgerCorrupt, InvalidInput, sqlite3.Error) as error:
            if _TOLD not in place:
                row = error.row if isinstance(error, LedgerCorrupt) and error.row is not None else 0
                yield (
                    row,
                    FoundEvent("ledger-changed", format_time(utc_now()), {"row": row}),
                    [*(place or [0, ""]), _TOLD],
                )

    def _rows(self, chain: Chain, place: Place) -> Iterator[tuple[int, FoundEvent | None, Place]]:
        before: Row | None = None
        match place:
            case [int(seq), str(known), *_] if 0 < seq < 1 << 63:
                found = chain.rows_between(seq - 1, seq)
                if found and found[0].hash == known:
                    before = found[0]
                else:
                    yield seq, FoundEvent("ledger-changed", format_time(utc_now()), {"row": seq}), []
        while rows := chain.rows_between(at := before.seq if before else 0, at + ROWS_AT_ONCE):
            for row in rows:
                check_link(self._role, row, before)
                yield row.seq, self._event(row), [row.seq, row.hash]
                before = row

    def _event(self, row: Row) -> FoundEvent | None:
        try:
            found = self._read(parse_record(self._role, row.kind, row.body))
        except ConsiliumError:
            found = "unreadable", {}
        return None if found is None else FoundEvent(found[0], row.time_utc, found[1])


class LinesSource:
    """The complete lines of a log file that grows and may be rotated: renamed to ``NAME.1``, with a new file begun.

    Args:
        path: The file.
        read: Returns the event of a line, or None if the line is not logged.
        name: Name of the source in the log; by default the file's name.
        rotates: False for a file that is never rotated. A new file of that name has the old lines at their old places.
    """

    def __init__(
        self, path: Path, *, read: Callable[[str], FoundEvent | None], name: str = "", rotates: bool = True
    ) -> None:
        self.name, self._path, self._read, self._rotates = name or path.name, path, read, rotates

    def after(self, place: Place) -> Iterator[tuple[int, FoundEvent | None, Place]]:
        """Iterate over the complete lines after a place; see :meth:`Source.after`.

        After a rotation the rest of ``NAME.1`` comes first. A line that ``read`` cannot parse yields no event.

        Args:
            place: Inode of the file and byte offset in it; empty for the beginning.

        Returns:
            An iterator of (byte offset after the line, event or None, place after the line). It yields nothing if
            there is no file.
        """
        inode = offset = 0
        match place:
            case [int(known), int(seen)] if seen >= 0:
                inode, offset = known, seen
        with contextlib.suppress(OSError):
            now = self._path.stat()
            if inode and now.st_ino != inode and self._rotates:
                older = self._path.with_name(f"{self._path.name}.1")
                with contextlib.suppress(OSError):
                    if older.stat().st_ino == inode:
                        yield from self._lines(older, inode, offset)
                offset = 0
            elif now.st_size < offset:
                offset = 0
            yield from self._lines(self._path, now.st_ino, offset)

    def _lines(self, path: Path, inode: int, offset: int) -> Iterator[tuple[int, FoundEvent | None, Place]]:
        with path.open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                found = None
                if len(line) <= MAX_LINE:
                    with contextlib.suppress(ConsiliumError, ValueError, KeyError, TypeError, RecursionError):
                        found = self._read(line.decode("utf-8", "replace").rstrip("\n"))
                yield offset, found, [inode, offset]


@dataclass(frozen=True, slots=True)
class FailingTarget:
    """A target that does not accept lines: since when, why, and how many lines wait for it."""

    target: str
    since: str
    cause: str
    waiting: int

    @property
    def sentence(self) -> str:
        """A sentence with the target, since when and why it fails, and how many lines wait to be sent."""
        lines = "line waits" if self.waiting == 1 else "lines wait"
        return (
            f"target {self.target} accepts no line since {self.since[:19].replace('T', ' ')} UTC ({self.cause}); "
            f"{self.waiting} {lines} here and will be sent"
        )


def failing_targets(state: Path) -> tuple[FailingTarget, ...]:
    """Return the targets that did not accept their last line.

    Args:
        state: The file in which :class:`LogFollower` stores how far each target has received the events. The failing
            targets are listed in the file beside it, with the ending ``failing``.

    Returns:
        The targets; none if nothing is recorded or readable.
    """
    with contextlib.suppress(OSError, InvalidInput, TypeError):
        data = _failing_file(state).read_bytes()[:MAX_STATE_BYTES]
        stored = parse_json(data, what="failing targets of the security log")
        return tuple(FailingTarget(**checked_fields(one, get_type_hints(FailingTarget))) for one in stored)
    return ()


def _failing_file(state: Path) -> Path:
    return state.with_suffix(".failing")


class LogFollower:
    """Sends the events of sources to targets, and stores how far each target has received them.

    Args:
        sources: The sources.
        sinks: The targets, by their text on the command line (:data:`~common.security_log.sinks.TARGETS`).
        party: ``site``, ``server`` or ``dashboard``.
        name: Name of the site or the study, in every line.
        state: File that stores, for each target and source, how far the target has received the events; None to start
            at the beginning every time. The file beside it, with the ending ``failing``, lists the targets that do not
            accept lines (:func:`failing_targets`).
    """

    def __init__(
        self, sources: Sequence[Source], sinks: Mapping[str, Sink], *, party: str, name: str, state: Path | None
    ) -> None:
        self._sources, self._sinks, self._party, self._name = tuple(sources), dict(sinks), party, name
        self._state = state
        self._places = _load(state)
        self._due: dict[str, tuple[float, float]] = {}
        kept = () if state is None else failing_targets(state)
        self._failing = {one.target: one for one in kept if one.target in self._sinks}

    def step(self) -> int:
        """Send the new events to each target.

        A target that failed is tried again after 1 s, then 2 s, 4 s, … up to 60 s.

        Returns:
            Number of lines sent.
        """
        return sum(self._send_to(target, sink) for target, sink in self._sinks.items())

    def run(self, *, stop: Callable[[float], object]) -> None:
        """Call :meth:`step` repeatedly until stopped, and once more at the end.

        Args:
            stop: Waits for the given number of seconds; returns True to stop.
        """
        while not stop(POLL_S):
            self.step()
        self.step()

    def _send_to(self, target: str, sink: Sink) -> int:
        wait_s, due = self._due.get(target, (0.0, 0.0))
        if time.monotonic() < due:
            return 0
        places, sent, waiting, moved = self._places.setdefault(target, {}), 0, 0, False
        failed: OSError | None = None
        try:
            for source in self._sources:
                for position, found, place in source.after(places.get(source.name, [])):
                    if found is not None and failed is None:
                        try:
                            sink.send(self._record(found, source.name, position))
                            sent += 1
                        except OSError as error:
                            failed = error
                    if failed is not None:  # the lines after the one that failed are only counted
                        waiting += found is not None
                        continue
                    moved |= places.get(source.name) != place
                    places[source.name] = place
        except OSError as error:
            failed = failed or error
        if failed is None:
            if self._due.pop(target, None):
                log.info("event=log-target-back target=%s", target)
        else:
            wait_s = min(max(2 * wait_s, FIRST_WAIT_S), LONGEST_WAIT_S)
            self._due[target] = (wait_s, time.monotonic() + wait_s)
            log.warning("event=log-target-failed target=%s cause=%s", target, type(failed).__name__)
        self._note(target, failed, waiting)
        if moved:
            self._save()
        return sent

    def _note(self, target: str, failed: OSError | None, waiting: int) -> None:
        """Store since when and why a target fails and how many lines wait, or that it works again; only if this
        changed.
        """
        before = self._failing.pop(target, None)
        if failed is not None:
            since = format_time(utc_now()) if before is None else before.since
            cause = failed.strerror or type(failed).__name__
            self._failing[target] = FailingTarget(target, since, cause, waiting)
        if before != self._failing.get(target) and self._state is not None:
            text = json.dumps([asdict(one) for one in self._failing.values()])
            with contextlib.suppress(OSError):
                write_atomically(_failing_file(self._state), text.encode(), mode=0o640)

    def _record(self, found: FoundEvent, source: str, position: int) -> dict[str, Any]:
        of = {"party": self._party, "name": self._name, "source": source, "position": position}
        try:
            return log_record(found, **of)  # type: ignore[arg-type]
        except InvalidInput:
            return log_record(FoundEvent("unreadable", format_time(utc_now()), {}), **of)  # type: ignore[arg-type]

    def _save(self) -> None:
        if self._state is not None:
            with contextlib.suppress(OSError):  # if the disk is full, the lines are sent again after a restart
                write_atomically(self._state, json.dumps(self._places).encode(), mode=0o600)


def _load(state: Path | None) -> dict[str, dict[str, Place]]:
    if state is None or not state.exists():
        return {}
    try:
        found = parse_json(state.read_bytes()[:MAX_STATE_BYTES], what="state of the security log")
        return {
            str(target): {str(source): list(place) for source, place in places.items()}
            for target, places in found.items()
        }
    except (InvalidInput, AttributeError, TypeError):
        log.warning("event=log-state-unreadable starting=anew")
        return {}


def utc_time(text: str) -> str:
    """Convert an ISO 8601 time to UTC, in the ledgers' format.

    Args:
        text: The time; a time without a zone is local time.

    Returns:
        The time in UTC, with microseconds and ``Z``.

    Raises:
        ValueError: If the text is not ISO 8601.
    """
    return format_time(datetime.fromisoformat(text).astimezone(UTC))


def daemon_fact(line: str) -> FoundEvent | None:
    """Return the event of a line of ``daemons.jsonl``, which records the states of daemons.

    Args:
        line: The line.

    Returns:
        The event; None unless the line records that a daemon started, became ready, went offline or ended.

    Raises:
        InvalidInput: If the line is not JSON.
    """
    fact = parse_json(line, what="fact about a daemon")
    event = fact.get("event")
    if event not in ("daemon-started", "daemon-ready", "daemon-offline", "daemon-ended"):
        return None
    facts: dict[str, str | int] = {"daemon": str(fact["daemon"]).partition(" ")[0]}
    if event != "daemon-ended":
        facts["pid"] = fact["pid"]
    return FoundEvent(event, utc_time(fact["time"]), facts)


Known = Mapping[tuple[str, str], tuple[str, re.Pattern[str]]]
"""Log lines that are events. The key is the logger's name and the word after ``event=``; the value is the kind of event
and a pattern for the rest of the line, whose named groups are the event's facts."""


def logged_event(line: str, known: Known) -> FoundEvent | None:
    """Return the event of a line of a daemon's own log (:class:`common.plain.PlainFormatter`).

    Args:
        line: The line.
        known: The log lines that are events, in the form of :data:`Known`.

    Returns:
        The event; None for a line that is not in ``known``.
    """
    words = line.split(" ", 5)
    if len(words) < 5 or not words[4].startswith("event="):
        return None
    kind = known.get((words[3], words[4].removeprefix("event=")))
    said = kind and kind[1].fullmatch(words[5] if len(words) > 5 else "")
    if not kind or not said:
        return None
    forms = KINDS[kind[0]].fields
    given = {name: value for name, value in said.groupdict().items() if value is not None}
    facts: dict[str, str | int] = {name: int(text) if forms[name] == "count" else text for name, text in given.items()}
    return FoundEvent(kind[0], utc_time(f"{words[0]} {words[1].replace(',', '.')}"), facts)


def send_all(sources: Sequence[Source], *, party: str, name: str, sink: Sink) -> int:
    """Send all events of the sources to one target, from the beginning.

    Args:
        sources: The sources.
        party: ``site``, ``server`` or ``dashboard``.
        name: Name of the site or the study, in every line.
        sink: The target.

    Returns:
        Number of lines sent.
    """
    return LogFollower(sources, {"once": sink}, party=party, name=name, state=None).step()
