"""Logs who signed in, was refused or signed out, and the dashboard's events.

A line has the time, what happened, at which address, and the user's name where it is a known one: what somebody types
into the field of a name may be a password. At 4 MiB the file becomes ``sign-ins.jsonl.1``, so guessing fills no disk.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from common.security_log.events import Found
from common.security_log.follow import LinesSource, Source, utc_time
from common.security_log.sinks import RotatedFile
from server.postprocess.decisions import Verdict

SIGN_INS = "sign-ins.jsonl"
MAX_BYTES = 4 << 20


class SignInLog:
    """Appends to ``sign-ins.jsonl``; a full disk keeps nobody out and is no reason to fail."""

    def __init__(self, state: Path, *, now: Callable[[], datetime]) -> None:
        self._file = RotatedFile(state / SIGN_INS, max_bytes=MAX_BYTES, kept=1)
        self._now, self._lock = now, threading.Lock()

    def write(self, event: str, *, address: str, by: str = "password", user: str = "", role: str = "") -> None:
        """Append one line; ``user`` must be a known name or empty."""
        facts = {"user": user, "role": role, "by": by, "address": address or "unknown"}
        with self._lock, contextlib.suppress(OSError):
            self._file.send({"time": self._now().isoformat(), "event": event, **facts})


def read_sign_in(line: str) -> Found | None:
    """The event of a line of ``sign-ins.jsonl``."""
    record = json.loads(line)
    more = {"sign-in": ("role", "by"), "sign-out": ()}.get(record["event"], ("by",))
    facts = {name: record[name] for name in ("user", "address", *more) if record[name]}
    return Found(record["event"], utc_time(record["time"]), facts)


def read_decision(line: str) -> Found | None:
    """The event of a line of ``decisions.jsonl``; the note stays there."""
    record = json.loads(line)
    facts = {"user": record["user"], "label": record["label"], "verdict": str(Verdict(record["verdict"]))}
    return Found("label-decided", utc_time(record["time"]), facts)


def dashboard_sources(state: Path) -> list[Source]:
    """The files of a dashboard's state directory whose new lines go to the security log."""
    return [
        LinesSource(state / SIGN_INS, read=read_sign_in),
        LinesSource(state / "decisions.jsonl", read=read_decision),
    ]
