"""Runs the core process that tests kill at a named point, from the first offer to the bundle.

``python -m tests.faults.kill_parts`` imports everything once. For every line that it reads, it forks a process and
prints how this process ended. A line names a study's directory, the folder of its sites' sockets, and a point. The
points are reached from outside the code under test: an event is written, a function that production calls is entered or
left, or SQLite is about to run a statement. No production code knows of the points.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import common.ledger.chain as chain
import common.models.fit as fit
import common.models.student_bundle as student_bundle
from common.events import EventLog
from common.privacy.release import CodeSum
from server.aggregation.exchange import Reply
from server.aggregation.pipeline import run_study
from server.ledger.server_ledger import Ledger
from server.postprocess import bundle  # here, so that a forked process does not have to
from server.protocols import student_fit
from server.study.workspace import Workspace
from tests.faults.ledger.crash_parts import Sockets

__all__ = ["POINTS", "student_fit"]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def on_call(number: int, *, then: Callable[[], None] = die) -> Callable[[], None]:
    """Return a function that calls ``then`` when it is called for the ``number``-th time."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == number:
            then()

    return count


def around(
    owner: Any, name: str, *, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **named: Any) -> Any:
        before()
        result = original(*args, **named)
        after()
        return result

    setattr(owner, name, wrapped)


def event(kind: str, number: int) -> Callable[[], None]:
    """Return the point just after the ``number``-th event of a kind was written."""

    def arm() -> None:
        reached, emit = on_call(number), EventLog.emit

        def watched(log: EventLog, said: str, /, **facts: Any) -> None:
            emit(log, said, **facts)
            if said == kind:
                reached()

        EventLog.emit = watched  # type: ignore[method-assign]

    return arm


def exchanged(number: int) -> Callable[[], None]:
    """Return the point at which all sites have answered the ``number``-th message and the core has read no answer."""

    def arm() -> None:
        reached, exchange = on_call(number), Sockets.exchange

        def watched(transport: Sockets, bodies: Mapping[int, bytes], *, timeout_s: float) -> Iterator[Reply]:
            replies = list(exchange(transport, bodies, timeout_s=timeout_s))
            reached()
            return iter(replies)

        Sockets.exchange = watched  # type: ignore[assignment,method-assign]

    return arm


def statement(beginning: str, number: int) -> Callable[[], None]:
    """Return the point before SQLite commits the ``number``-th transaction with a statement that begins with
    ``beginning``.
    """

    def arm() -> None:
        connect, seen, pending = chain.connect, 0, False

        def trace(sql: str) -> None:
            nonlocal seen, pending
            if sql.startswith(beginning):
                pending = True
            elif sql == "COMMIT" and pending:
                seen, pending = seen + 1, False
                if seen == number:
                    die()

        def traced(*args: Any, **named: Any) -> sqlite3.Connection:
            connection = connect(*args, **named)
            connection.set_trace_callback(trace)
            return connection

        chain.connect = traced

    return arm


# A run has three batches of two queries, and three sites.
POINTS: dict[str, Callable[[], None]] = {
    "first offer answered, nothing read": exchanged(1),
    "one site's answer to the offer read": event("offer-answered", 1),
    "second batch about to be sent": event("batch-dispatched", 2),
    "codes of the second batch computed, none read": exchanged(3),
    "one site's codes of the second batch read": event("reply-received", 4),
    "before the charge": lambda: around(Ledger, "release_batch", before=on_call(2)),
    "noise drawn, one row written, not committed": lambda: around(CodeSum, "released", after=on_call(4)),
    "charge, answers and head written, about to commit": statement("INSERT INTO heads", 2),
    "committed, not yet said": lambda: around(Ledger, "release_batch", after=on_call(2)),
    "all released, last receipts not sent": event("released", 3),
    "receipts at one site": event("receipts-held", 7),
    "one label decoded": event("label-decoded", 1),
    "checkpoint in the middle of the student": lambda: around(fit, "save_checkpoint", after=on_call(1)),
    "one control trained": event("control-trained", 1),
    "half a bundle written": lambda: around(student_bundle, "write_atomically", after=on_call(2)),
    "bundle written, not yet said": lambda: around(bundle, "export_bundle", after=on_call(1)),
}


def run(root: Path, sockets: Path, point: str) -> None:
    workspace = Workspace(root)
    draws = os.open(root / "draws", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    released = CodeSum.released

    def recorded(*args: Any, **named: Any) -> Any:
        drawn = released(*args, **named)
        os.write(draws, drawn.tobytes().hex().encode() + b"\n")
        return drawn

    CodeSum.released = recorded  # type: ignore[method-assign]
    fit.CHECKPOINT_EVERY = 2
    if point:
        POINTS[point]()
    transport = Sockets({site.node_id: sockets / f"{site.name}.sock" for site in workspace.sites()})
    run_study(workspace, transport, run="1")


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        root, sockets, point = line.rstrip("\n").split("\t")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                run(Path(root), Path(sockets), point)
                status = 0
            except Exception:  # noqa: BLE001  the parent tells the test, which shows it
                traceback.print_exc()
            finally:
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
