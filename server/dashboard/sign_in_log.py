"""Logs sign-ins, refused sign-ins and sign-outs, and converts this log and the label decisions to security events.

The sign-in pages write the log, and the security log reads it. A line has the time, the event and the address. It has
the user's name only if such a user exists, because text typed into the name field may be a password. At 4 MiB the file
is renamed to ``sign-ins.jsonl.1``, so guessing cannot fill the disk.
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
    """Appends to ``sign-ins.jsonl``. If writing fails, the line is lost, so a full disk does not prevent signing in.

    Args:
        state: The dashboard's own directory.
        now: Returns the current time.
    """

    def __init__(self, state: Path, *, now: Callable[[], datetime]) -> None:
        self._file = RotatedFile(state / SIGN_INS, max_bytes=MAX_BYTES, kept=1)
        self._now, self._lock = now, threading.Lock()

    def write(self, event: str, *, address: str, by: str = "password", user: str = "", role: str = "") -> None:
        """Append one line about a sign-in or sign-out.

        Args:
            event: ``sign-in``, ``sign-in-failed``, ``sign-in-delayed`` or ``sign-out``.
            address: The client's address.
            by: ``password`` or ``oidc``.
            user: Name of an existing user; empty for any other text.
            role: The user's role.
        """
        facts = {"user": user, "role": role, "by": by, "address": address or "unknown"}
        with self._lock, contextlib.suppress(OSError):
            self._file.send({"time": self._now().isoformat(), "event": event, **facts})


def read_sign_in(line: str) -> Found | None:
    """Convert a line of ``sign-ins.jsonl`` to an event of the security log."""
    record = json.loads(line)
    more = {"sign-in": ("role", "by"), "sign-out": ()}.get(record["event"], ("by",))
    facts = {name: record[name] for name in ("user", "address", *more) if record[name]}
    return Found(record["event"], utc_time(record["time"]), facts)


def read_decision(line: str) -> Found | None:
    """Convert a line of ``decisions.jsonl`` to an event of the security log, without the note."""
    record = json.loads(line)
    facts = {"user": record["user"], "label": record["label"], "verdict": str(Verdict(record["verdict"]))}
    return Found("label-decided", utc_time(record["time"]), facts)


def dashboard_sources(state: Path) -> list[Source]:
    """Return the files of a dashboard that the security log follows.

    Args:
        state: The dashboard's state directory.

    Returns:
        The logs of sign-ins and of decisions about labels.
    """
    return [
        LinesSource(state / SIGN_INS, read=read_sign_in),
        LinesSource(state / "decisions.jsonl", read=read_decision),
    ]
