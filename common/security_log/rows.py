"""Converts the kinds of rows that the server's and the sites' ledgers share to security events."""

from __future__ import annotations

from common.document import Document
from common.ledger.records import GenesisRecord, KeyRecord, NoteRecord, RefusalRecord

Facts = dict[str, str | int]


def shared_row(record: Document) -> tuple[str, Facts] | None:
    """Return the security event of a ledger row, if the row has a kind that server and site ledgers share.

    These kinds are the first row, a changed signing key, a note by a person or a command, and a refusal.

    Args:
        record: The row's record.

    Returns:
        The event's kind (a key of :data:`~common.security_log.events.KINDS`) and facts; None for a row of another kind.
    """
    match record:
        case GenesisRecord():
            return "ledger-begun", {"ledger": record.ledger_id}
        case KeyRecord():
            return "key-changed", {"key": record.public_key}
        case NoteRecord():
            return "note-written", {}
        case RefusalRecord():
            facts: Facts = {"reason": record.reason, "queries": len(record.query_ids)}
            facts |= {
                name: value
                for name, value in (
                    ("study", record.study_id),
                    ("pool", record.pool),
                    ("requested", record.requested),
                    ("remaining", record.remaining),
                )
                if value
            }
            return "charge-refused", facts
    return None
