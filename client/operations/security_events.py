"""Makes security events from a site's records: its ledger's rows, its worker's log, and its daemons' starts and ends.

`site up --log-to` starts it as a program, which follows a site's directory and sends the events to the given targets.
From a row only the fields of the schema are used (:mod:`common.security_log.events`): no slot, no patient's hash, no
note, no code, and nothing about a case.
"""

from __future__ import annotations

import re
from pathlib import Path

from client.policy import load_site
from common.canonical import rational
from common.document import Document
from common.ledger.records import (
    AlarmRecord,
    CapsRecord,
    ConsentRecord,
    DecisionRecord,
    ReceiptRecord,
    RecoveryRecord,
    ReservationRecord,
    RestoredRecord,
    SealingKeyRecord,
    SupersededRecord,
)
from common.ledger.sealed_records import DisclosureRecord, PeerRecord
from common.ledger.teacher_records import ForeignRecord, PatientRecord, TeachersRecord, TrainedRecord, TrainingRecord
from common.security_log.follow import Known, LedgerSource, LinesSource, Source, daemon_fact, logged_event
from common.security_log.program import follow_program
from common.security_log.rows import Facts, shared_row
from common.supervision import FACTS

SILENT = frozenset({"code", "mask-key", "masked", "deal", "drawn", "identity"})
"""Kinds of ledger rows that give no security event. Codes give one when they are sent; the other kinds are internal or
concern patients."""

_LINES: Known = {
    ("client.worker", "offer"): (
        "offer-answered",
        re.compile(r"batch=(?P<batch>\S+) queries=(?P<queries>\d+) decision=(?P<decision>\S+)"),
    ),
    ("client.worker", "codes"): (
        "codes-sent",
        re.compile(r"batch=(?P<batch>\S+) attempt=(?P<attempt>\d+) codes=(?P<codes>\d+)"),
    ),
    ("client.worker", "refused"): ("message-refused", re.compile(r"part=(?P<part>\w+) cause=(?P<cause>\w+)")),
    ("client.worker", "receipt-refused"): ("receipt-refused", re.compile(r"reason=(?P<reason>\S+)")),
    ("client.witnessing", "witness-missing"): (
        "witness-missing",
        re.compile(r"ledger=(?P<ledger>\S+) peers=(?P<peers>\d+)(?: says='.*')?"),
    ),
    ("client.witnessing", "witness-disagrees"): (
        "witness-disagrees",
        re.compile(r"size=(?P<row>\d+) remedy=docs/ledger.md"),
    ),
    ("client.operations.serve", "refused"): ("message-refused", re.compile(r"cause=(?P<cause>\w+)")),
    ("client.operations.serve", "failed"): ("message-failed", re.compile(r"cause=(?P<cause>\w+)")),
}


def read_row(record: Document) -> tuple[str, Facts] | None:
    """Return the event of a row of a site's ledger.

    Args:
        record: The row's content.

    Returns:
        Name and facts of the event; None for a kind in :data:`SILENT`.
    """
    match record:
        case ConsentRecord():
            return "study-consented", {"study": record.study_id, "pool": record.pool}
        case CapsRecord():
            return "pool-declared", {"pool": record.declaration.pool}
        case ReservationRecord():
            facts: Facts = {"study": record.study_id, "query": record.query_id, "pool": record.pool}
            facts |= {"ledger": record.ledger} if record.ledger else {}
            return "charge", facts | ({} if record.draw is None else {"draw": record.draw})
        case DecisionRecord():
            return "veto", {"study": record.study_id, "decision": record.decision}
        case DisclosureRecord():
            return "disclosure", {
                "study": record.study_id,
                "roster": record.masks,
                "auditor": record.auditor,
                "queries": record.queries,
                "mu_squared": rational(record.mu_squared),
            }
        case PeerRecord():
            event = "peer-confirmed" if record.key else "peer-distrusted"
            return event, {"study": record.study_id, "peer": record.site}
        case PatientRecord():
            return "patient-withdrawn", {}
        case TrainingRecord():
            private = "yes" if record.events else "no"
            return "training-charged", {
                "training": record.training_id,
                "strategy": record.strategy,
                "private": private,
            }
        case TrainedRecord():
            return "training-finished", {"training": record.training_id, "teacher": record.served}
        case ForeignRecord():
            return "teacher-brought", {"teacher": record.served, "brought": record.brought}
        case TeachersRecord():
            return "teachers-loaded", {"teachers": record.digest}
        case SealingKeyRecord():
            return "sealing-key-taken", {"key": record.sealing_key}
        case ReceiptRecord():
            return "receipt-filed", _of(record)
        case AlarmRecord():
            return "alarm", _of(record)
        case SupersededRecord():
            return "evidence-kept", _of(record)
        case RecoveryRecord():
            return "alarm-ended", {"ledger": record.ledger_id}
        case RestoredRecord():
            return "ledger-restored", {}
    return shared_row(record)


def _of(record: ReceiptRecord | AlarmRecord | SupersededRecord) -> Facts:
    return {"ledger": record.receipt.head.ledger_id, "row": record.receipt.head.seq}


def site_sources(directory: Path) -> tuple[str, list[Source]]:
    """Return the records of a site whose new entries become security events.

    Args:
        directory: The site's directory.

    Returns:
        The site's name and the sources.
    """
    config = load_site(directory)
    sources: list[Source] = [LedgerSource(config.ledger_file, role="site", read=read_row)]
    sources += [LinesSource(directory / "logs" / "worker.log", read=lambda line: logged_event(line, _LINES))]
    sources += [LinesSource(directory / "logs" / FACTS, read=daemon_fact)]
    sources += [LinesSource(directory / "node" / "logs" / FACTS, read=daemon_fact, name=f"node-{FACTS}")]
    return config.site, sources


if __name__ == "__main__":
    follow_program("site", site_sources)
