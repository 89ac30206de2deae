"""Turns the server's records into security events, and sends them to log targets when run as a program.

The records are the ledger's rows, the event log, requests that the gateway refused, and the starts and ends of daemons.
An event contains only fields that its schema defines (:mod:`common.security_log.events`). The program follows the
records in a study's directory; ``supervisor.serve`` starts it if log targets are given. It needs permission to read the
ledger, but no key.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from common.document import Document
from common.ledger.charges import ReleaseRecord
from common.ledger.records import BooksRecord, LostRecord, PoolRecord, RecoveredRecord, ReuseRecord, StudyRecord
from common.ledger.sealed_records import AnswerRecord, LostDrawRecord
from common.security_log.events import KINDS, FoundEvent
from common.security_log.follow import Known, LedgerSource, LinesSource, Source, daemon_fact, logged_event, utc_time
from common.security_log.program import follow_program
from common.security_log.rows import Facts, shared_row
from common.supervision import FACTS
from server.study.workspace import Workspace

SILENT = frozenset({"roster"})
"""Kinds of ledger rows that give no security event. A roster needs none, because the event of each charge states the
number of sites.
"""

FROM_LEDGER = frozenset({"draw-lost"})
"""Kinds of the event log that give no security event, because a row of the ledger already gives the same event."""

_NAMES = {"ledger_row": "row", "size": "row", "sha256": "bundle", "reason": "decision"}
"""Maps a field's name in the event log to its name in the security log, where the two names differ."""

_LINES: Known = {
    ("server.operations.gateway", "refused"): (
        "request-refused",
        re.compile(r"reason=(?P<reason>\S+) path=.* peer=(?P<peer>\S*) more=(?P<more>\d+)(?: site=\S+)?"),
    ),
    ("server.operations.gateway", "certificate-renewed"): ("certificate-renewed", re.compile("")),
    ("server.operations.gateway", "certificate-unusable"): ("certificate-unusable", re.compile("")),
    ("server.aggregation.core", "connection-refused"): (
        "connection-refused",
        re.compile(r"uid=(?P<uid>\d+) gid=(?P<gid>\d+)"),
    ),
}


def read_row(record: Document) -> tuple[str, Facts] | None:
    """Return the security event of a row of the server's ledger.

    Args:
        record: The row's record.

    Returns:
        Name of the event and its facts, or None for a kind in :data:`SILENT`.
    """
    match record:
        case StudyRecord():
            return "study-registered", {"study": record.study_id}
        case PoolRecord():
            return "pool-declared", {"pool": record.declaration.pool}
        case BooksRecord():
            return "pool-books-named", {"pool": record.pool}
        case ReleaseRecord():
            facts: Facts = {"study": record.study_id, "query": record.query_id, "batch": record.batch_id}
            facts["sites"] = record.voters // record.query.mechanism.voters_per_site
            return "charge", facts | ({} if record.draw is None else {"draw": record.draw})
        case RecoveredRecord():
            charged = record.release
            return "charge-recovered", {"study": charged.study_id, "query": charged.query_id, "site": record.origin}
        case LostRecord():
            return "ledger-restored", {}
        case ReuseRecord():
            return "charge-reused", {"study": record.study_id, "queries": len(record.query_ids)}
        case AnswerRecord():
            return "answer-stored", {"query": record.query_id, "draw": record.draw}
        case LostDrawRecord():
            return "draw-lost", {"draw": record.draw, "queries": len(record.query_ids), "reason": record.reason}
    return shared_row(record)


def read_event(line: str) -> FoundEvent | None:
    """Return the security event of a line of the study's event log; None if the security log does not define its kind.

    Only fields that the schema defines are copied. A list is replaced by its length.
    """
    record: dict[str, Any] = json.loads(line)
    event = record["event"]
    if event not in KINDS or event in FROM_LEDGER:
        return None
    said = record | {new: record[old] for old, new in _NAMES.items() if old in record}
    facts = {name: said[name] for name in KINDS[event].fields if name in said}
    counted = {name: len(value) if isinstance(value, list) else value for name, value in facts.items()}
    return FoundEvent(event, utc_time(record["time"]), counted)


def server_sources(directory: Path) -> tuple[str, list[Source]]:
    """List the records in a study's directory that the security log follows.

    Args:
        directory: The study's directory.

    Returns:
        The study's name, and one source for each record.
    """
    workspace = Workspace(directory)
    flower = workspace.flower_dir / "logs"
    return workspace.study().name, [
        LedgerSource(workspace.ledger_file, role="server", read=read_row),
        LinesSource(workspace.events_file, read=read_event, rotates=False),
        LinesSource(flower / "gateway.log", read=lambda line: logged_event(line, _LINES)),
        LinesSource(workspace.root / "logs" / "core.log", read=lambda line: logged_event(line, _LINES)),
        LinesSource(workspace.root / "logs" / FACTS, read=daemon_fact),
        LinesSource(flower / FACTS, read=daemon_fact, name=f"network-{FACTS}"),
    ]


if __name__ == "__main__":
    follow_program("server", server_sources)
