"""Writes and reads the event log: one JSON object per line, append-only.

A run writes it; the status command, the report and the dashboard read it. Every line has ``schema``, ``seq`` (from 1,
one for each line), ``time`` (UTC, ISO 8601), ``study`` (id) and ``event``; a blank line stands for a deleted event. The
further fields of each kind are in :data:`common.event_kinds.EVENTS`. No field holds a code, a seed, an un-noised value
or a patient's name. Refuses unknown kinds, missing or additional fields, and values other than scalars and lists of
strings.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from threading import Lock
from typing import Any

from common.clock import Clock, utc_now
from common.errors import InvalidInput
from common.event_kinds import EVENTS
from common.objects import append_line, write_atomically
from common.reading import lenient_json

EVENT_SCHEMA = 1


class EventLog:
    """Appends events to a file. The caller holds the study's lock, so one process writes; its threads may share it.

    Args:
        path: The log file.
        study: Id of the study.
        clock: Source of the events' times.
    """

    def __init__(self, path: Path, *, study: str, clock: Clock = utc_now) -> None:
        self._path, self._study, self._clock, self._writing = path, study, clock, Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        self._seq = sum(line.isspace() or _event(line) is not None for line in _lines(path))

    def emit(self, event: str, **facts: Any) -> None:
        """Append one event. The line is written in one call, so a reader never sees a part of it.

        Args:
            event: Kind of the event.
            **facts: Its fields.

        Raises:
            InvalidInput: If kind, fields or values are not allowed.
        """
        if event not in EVENTS:
            raise InvalidInput("event kind", value=event, limit=", ".join(sorted(EVENTS)))
        kind = EVENTS[event]
        if facts.keys() - kind.optional.keys() != kind.fields.keys():
            raise InvalidInput(f"fields of event {event}", value=sorted(facts), limit=str(sorted(kind.fields)))
        for name, value in facts.items():
            plain = value is None or isinstance(value, bool | int | float | str)
            if not plain and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
                raise InvalidInput(
                    f"type of event field {name}",
                    value=type(value).__name__,
                    limit="None, a bool, a number, a string or a list of strings",
                )
        with self._writing:
            record = {
                "schema": EVENT_SCHEMA,
                "seq": self._seq + 1,
                "time": self._clock().isoformat(timespec="milliseconds"),
                "study": self._study,
                "event": event,
                **facts,
            }
            try:
                line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
            except ValueError as error:
                raise InvalidInput(f"a number in event {event}", limit="a finite number") from error
            try:
                append_line(self._path, line.encode())
            except OSError as error:
                error.filename = error.filename or str(self._path)
                raise
            self._seq += 1


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Return every complete event in order. A line torn by a crash is skipped; a missing file is empty.

    Args:
        path: The log file.

    Returns:
        An iterator of events.
    """
    yield from (record for line in _lines(path) if (record := _event(line)) is not None)


def rewrite_events(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> int:
    """Delete or shorten events. Every other event keeps its number and its place in the file, where readers go on.

    A deleted event leaves a blank line of its length. A line that cannot be read keeps its length and loses its
    content.

    Args:
        path: The log file.
        change: Returns an event as it is to be kept, not longer than before; None to delete it.

    Returns:
        Number of deleted events.
    """
    lines, deleted = list[bytes](), 0
    for line in _lines(path):
        event = _event(line)
        kept = None if event is None else change(event)
        deleted += event is not None and kept is None
        if event is None or kept != event:
            text = b"" if kept is None else json.dumps(kept, ensure_ascii=False).encode()
            torn = event is None and not line.isspace()
            end = b"\n" if line.endswith(b"\n") else b""
            line = (b"{" if torn else text).ljust(len(line) - len(end), b"." if torn else b" ") + end
        lines.append(line)
    if lines:
        write_atomically(path, b"".join(lines))
    return deleted


class EventTail:
    """Reads the events appended to a file, each once.

    Args:
        path: The log file.
        from_end: True to start at the present end of the file instead of its beginning.
    """

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0

    def new(self) -> Iterator[dict[str, Any]]:
        """Return the complete events since the last call. An incomplete line is left for the next call.

        Returns:
            An iterator of events.
        """
        if not self._path.exists():
            return
        with self._path.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                if (record := _event(line)) is not None:
                    yield record


def _lines(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
        yield from stream


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        record = lenient_json(line)
        if not isinstance(record, dict) or record.get("schema") != EVENT_SCHEMA:
            return None
        if "time" in record:
            datetime.fromisoformat(record["time"])
    except (ValueError, TypeError):
        return None
    return record
