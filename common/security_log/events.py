"""Defines the security log's schema: every kind of event, its severity, its fields, and the form of each field.

The followers (:mod:`common.security_log.follow`) make log lines with it. An event is one JSON object on one line. It is
made from records that exist already: the rows of a ledger, the lines of the event log, the daemons' logs. Every field
has a strict form: a hash, a name from the study's lists, a word of the protocol, a count, an address or a staff
member's sign-in name. No field takes free text, so a line cannot contain a note, path, error text, case or patient.
:func:`log_record` refuses unknown kinds, missing or additional fields, and values of another form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.errors import InvalidInput
from common.ledger.rows import check_time

LOG_SCHEMA = 1

SEVERITIES = {"alert": 1, "error": 3, "warning": 4, "notice": 5, "info": 6}
"""Number of each severity in RFC 5424, by its syslog name."""

FORMS = {
    "hash": r"[0-9a-f]{64}",
    "short": r"[0-9a-f]{1,64}",
    "name": r"[A-Za-z0-9._/-]{1,128}",
    "word": r"[A-Za-z][A-Za-z0-9._-]{0,63}",
    "user": r"[A-Za-z0-9._@-]{1,64}",
    "address": r"[0-9A-Za-z.:%_-]{1,64}",
    "amount": r"[0-9]{1,1024}(/[0-9]{1,1024})?",
    "count": None,
}
"""Form of a field's value, by name: a regular expression that must match the whole text; None for an integer >= 0."""


@dataclass(frozen=True)
class SecurityKind:
    """A kind of event.

    Attributes:
        severity: Key of :data:`SEVERITIES`.
        parties: Parties that log it: ``site``, ``server`` or ``dashboard``.
        said: What happened, in one sentence.
        written: Each field with its key of :data:`FORMS`; a field whose name ends in ``?`` is optional.
    """

    severity: str
    parties: tuple[str, ...]
    said: str
    written: str

    @cached_property
    def stated(self) -> dict[str, str]:
        """Key of :data:`FORMS` for each field, as ``written`` names it."""
        return dict(pair.split(":") for pair in self.written.split())

    @cached_property
    def fields(self) -> dict[str, str]:
        """Key of :data:`FORMS` for each field, including optional ones."""
        return {name.removesuffix("?"): form for name, form in self.stated.items()}

    @cached_property
    def required(self) -> frozenset[str]:
        """Fields that every event of the kind has."""
        return frozenset(name for name in self.stated if not name.endswith("?"))


_SITE, _SERVER, _BOTH, _DASHBOARD = ("site",), ("server",), ("site", "server"), ("dashboard",)

KINDS: dict[str, SecurityKind] = {
    # agreements and keys
    "ledger-begun": SecurityKind("notice", _BOTH, "A ledger was made.", "ledger:name"),
    "study-registered": SecurityKind("notice", _SERVER, "A study's terms were recorded.", "study:hash"),
    "study-consented": SecurityKind(
        "notice", _SITE, "A study was recorded, by a consent or by a recovery.", "study:hash pool:name"
    ),
    "pool-declared": SecurityKind("notice", _BOTH, "A pool's budget was declared or tightened.", "pool:name"),
    "pool-books-named": SecurityKind(
        "notice", _SERVER, "A pool was assigned to the site ledger that records its spending.", "pool:name"
    ),
    "key-changed": SecurityKind("notice", _BOTH, "The ledger's signing key was changed.", "key:hash"),
    "sealing-key-taken": SecurityKind("notice", _SITE, "A new sealing key of the server was accepted.", "key:hash"),
    "peer-confirmed": SecurityKind(
        "notice", _SITE, "A person confirmed another hospital's key.", "study:hash peer:name"
    ),
    "peer-distrusted": SecurityKind(
        "warning", _SITE, "A person withdrew the confirmation of another hospital's key.", "study:hash peer:name"
    ),
    "note-written": SecurityKind("info", _BOTH, "A note was recorded; its text stays in the ledger.", ""),
    # offers and charges
    "offer-answered": SecurityKind(
        "info",
        _BOTH,
        "An offer of queries was accepted or declined.",
        "batch:short decision:word site?:name queries?:count",
    ),
    "charge": SecurityKind(
        "notice",
        _BOTH,
        "A query was charged.",
        "study:hash query:hash pool?:name ledger?:name batch?:name sites?:count draw?:count",
    ),
    "charge-reused": SecurityKind(
        "notice", _SERVER, "A study reused the stored answers of another study.", "study:hash queries:count"
    ),
    "charge-recovered": SecurityKind(
        "warning", _SERVER, "A lost charge was entered from a site's receipt.", "study:hash query:hash site:name"
    ),
    "charge-refused": SecurityKind(
        "warning",
        _BOTH,
        "Queries were refused.",
        "study?:name reason:word queries:count pool?:name requested?:amount remaining?:amount",
    ),
    "quorum-missed": SecurityKind(
        "warning", _SERVER, "Too few sites accepted a batch.", "batch:name accepted:count needed:count"
    ),
    "training-charged": SecurityKind(
        "notice", _SITE, "A voter's training began and was charged in full.", "training:hash strategy:word private:word"
    ),
    "training-finished": SecurityKind(
        "info", _SITE, "A training run produced a teacher.", "training:hash teacher:hash"
    ),
    "teacher-brought": SecurityKind(
        "notice", _SITE, "The hospital installed a teacher that it had trained elsewhere.", "teacher:hash brought:word"
    ),
    "teachers-loaded": SecurityKind("info", _SITE, "The worker loaded teachers.", "teachers:hash"),
    # what leaves
    "codes-sent": SecurityKind("info", _SITE, "Codes left the site.", "batch:short attempt:count codes:count"),
    "answer-stored": SecurityKind("info", _SERVER, "The noisy sum of a draw was stored.", "query:hash draw:count"),
    "draw-lost": SecurityKind(
        "warning", _SERVER, "A charged draw ended without an answer.", "draw:count queries:count reason:word"
    ),
    "code-refused": SecurityKind("warning", _SERVER, "A site's code was refused.", "batch:name site:name reason:word"),
    "reply-missing": SecurityKind("warning", _SERVER, "A site did not reply.", "batch:name site:name reason:word"),
    "disclosure": SecurityKind(
        "alert",
        _SITE,
        "A draw's mask key was disclosed to an auditor.",
        "study:hash roster:hash auditor:hash queries:count mu_squared:amount",
    ),
    "bundle-exported": SecurityKind("notice", _SERVER, "A student was exported.", "bundle:hash"),
    "verdict-taken": SecurityKind(
        "notice", _SERVER, "A hospital's verdict on the student was received.", "site:name word:word bundle:hash"
    ),
    # vetoes, alarms, recoveries
    "veto": SecurityKind("warning", _SITE, "Staff paused, resumed or left a study.", "study:hash decision:word"),
    "patient-withdrawn": SecurityKind("notice", _SITE, "Staff withdrew a patient; the line does not say which.", ""),
    "receipt-filed": SecurityKind(
        "info", _SITE, "A receipt of the server agreed with the record.", "ledger:name row:count"
    ),
    "receipt-refused": SecurityKind("warning", _SITE, "A receipt was refused.", "reason:word"),
    "alarm": SecurityKind("alert", _SITE, "A signed receipt contradicts this site's record.", "ledger:name row:count"),
    "evidence-kept": SecurityKind(
        "warning", _SITE, "A receipt from before a recovery was kept as evidence.", "ledger:name row:count"
    ),
    "alarm-ended": SecurityKind("warning", _SITE, "A person ended an alarm.", "ledger:name"),
    "ledger-contradicted": SecurityKind(
        "alert", _SERVER, "A site holds a signed head that this ledger lacks.", "site:name row:count"
    ),
    "witnessed": SecurityKind("info", _SERVER, "A site countersigned the ledger's newest head.", "site:name row:count"),
    "witness-missing": SecurityKind(
        "warning",
        _BOTH,
        "A site, or some of the peers, did not countersign the head of a ledger.",
        "site?:name reason?:word row?:count ledger?:name peers?:count",
    ),
    "witness-disagrees": SecurityKind(
        "alert",
        _BOTH,
        "A witness holds a signed history of a ledger that differs from this one.",
        "site?:name row:count ledgers?:count",
    ),
    "receipts-missing": SecurityKind("warning", _SERVER, "A site did not confirm its receipts.", "site:name"),
    "peers-unconfirmed": SecurityKind(
        "warning", _SERVER, "A site has not confirmed all its peers.", "site:name peers:count"
    ),
    "ledger-restored": SecurityKind(
        "alert", _BOTH, "An older copy of the ledger was restored, and its missing charges were entered.", ""
    ),
    "ledger-changed": SecurityKind(
        "alert",
        _BOTH,
        "The ledger differs from the one logged before: it was restored, forked or damaged.",
        "row:count",
    ),
    "unreadable": SecurityKind("error", _BOTH, "A record could not be converted to this log's schema.", ""),
    # processes and requests
    "run-started": SecurityKind("info", _SERVER, "A run began.", "run:name"),
    "run-finished": SecurityKind("info", _SERVER, "A run finished.", "run:name"),
    "run-failed": SecurityKind("error", _SERVER, "A run failed.", "run:name"),
    "stop-requested": SecurityKind("notice", _SERVER, "Somebody asked the run to stop.", "run:name"),
    "message-refused": SecurityKind(
        "warning", _SITE, "A message or a part of a message was refused.", "cause:word part?:word"
    ),
    "message-failed": SecurityKind("error", _SITE, "A message could not be handled.", "cause:word"),
    "request-refused": SecurityKind(
        "warning", _SERVER, "The gateway refused a request.", "reason:word peer:address more:count"
    ),
    "connection-refused": SecurityKind(
        "alert", _SERVER, "Another user of this machine tried to connect to the server core.", "uid:count gid:count"
    ),
    "certificate-renewed": SecurityKind("info", _SERVER, "The gateway loaded a new certificate.", ""),
    "certificate-unusable": SecurityKind("error", _SERVER, "The gateway could not load a new certificate.", ""),
    "daemon-started": SecurityKind("info", _BOTH, "A daemon was started.", "daemon:word pid:count"),
    "daemon-ready": SecurityKind("info", _BOTH, "A daemon is ready.", "daemon:word pid:count"),
    "daemon-offline": SecurityKind(
        "warning",
        _BOTH,
        "A daemon runs, but does not answer, or does not reach its server or the target of its log.",
        "daemon:word pid:count",
    ),
    "daemon-ended": SecurityKind("warning", _BOTH, "A daemon ended and is started again.", "daemon:word"),
    # people at the dashboard
    "sign-in": SecurityKind("notice", _DASHBOARD, "Somebody signed in.", "user:user role:word by:word address:address"),
    "sign-in-failed": SecurityKind(
        "warning", _DASHBOARD, "A sign-in was refused.", "user?:user by:word address:address"
    ),
    "sign-in-delayed": SecurityKind(
        "warning", _DASHBOARD, "A sign-in was delayed after failed ones.", "user?:user by:word address:address"
    ),
    "sign-out": SecurityKind("info", _DASHBOARD, "Somebody signed out.", "user:user address:address"),
    "label-decided": SecurityKind(
        "notice", _DASHBOARD, "Somebody accepted or rejected a label.", "user:user label:hash verdict:word"
    ),
}
"""Every kind of event."""


@dataclass(frozen=True, slots=True)
class FoundEvent:
    """An event read from a source.

    Attributes:
        event: Its kind, a key of :data:`KINDS`.
        time: Its time in UTC, in the ledgers' format ``2026-01-31T12:00:00.000000Z``.
        facts: Its fields by name.
    """

    event: str
    time: str
    facts: Mapping[str, str | int]


def log_record(found: FoundEvent, *, party: str, name: str, source: str, position: int) -> dict[str, Any]:
    """Return an event as the JSON object of a log line.

    Args:
        found: The event.
        party: Party that logs the event: ``site``, ``server`` or ``dashboard``.
        name: Name of the site or the study.
        source: Name of the record from which the event was read.
        position: Position of the event in that record. ``name``, ``source`` and ``position`` together identify an
            event, so that a line sent twice can be recognised.

    Returns:
        The object.

    Raises:
        InvalidInput: If the schema does not allow the event.
    """
    kind = KINDS.get(found.event)
    if kind is None or party not in kind.parties:
        raise InvalidInput("kind of security event", value=found.event, limit=f"a kind of event that a {party} logs")
    if not kind.required <= found.facts.keys() <= kind.fields.keys():
        raise InvalidInput(f"fields of {found.event}", value=sorted(found.facts), limit=str(sorted(kind.stated)))
    for field, value in found.facts.items():
        _check(field, value, kind.fields[field])
    check_time(found.time)
    for field, value in (("name", name), ("source", source)):
        _check(field, value, "name")
    return {
        "schema": LOG_SCHEMA,
        "time": found.time,
        "severity": kind.severity,
        "party": party,
        "name": name,
        "source": source,
        "position": position,
        "event": found.event,
        **found.facts,
    }


def line_of(record: Mapping[str, Any]) -> str:
    """Return a record as one line of ASCII, without a line end.

    Args:
        record: The result of :func:`log_record`.

    Returns:
        JSON text.
    """
    return json.dumps(record, allow_nan=False)


def json_schema() -> dict[str, Any]:
    """Return the schema as JSON Schema, with one object for each kind of event."""
    forms = {
        form: {"type": "integer", "minimum": 0} if pattern is None else {"type": "string", "pattern": f"^{pattern}$"}
        for form, pattern in FORMS.items()
    }
    common = {
        "schema": {"const": LOG_SCHEMA},
        "time": {"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z$"},
        "name": {"$ref": "#/$defs/name"},
        "source": {"$ref": "#/$defs/name"},
        "position": {"$ref": "#/$defs/count"},
    }
    kinds = []
    for event, kind in KINDS.items():
        own = {field: {"$ref": f"#/$defs/{form}"} for field, form in kind.fields.items()}
        fixed = {"severity": {"const": kind.severity}, "party": {"enum": list(kind.parties)}, "event": {"const": event}}
        kinds.append(
            {
                "title": kind.said,
                "type": "object",
                "properties": {**common, **fixed, **own},
                "required": [*common, *fixed, *sorted(kind.required)],
                "additionalProperties": False,
            }
        )
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A line of Consilium's security log",
        "oneOf": kinds,
        "$defs": forms,
    }


def _check(field: str, value: object, form: str) -> None:
    pattern = FORMS[form]
    if pattern is None:
        fits = type(value) is int and value >= 0
    else:
        fits = isinstance(value, str) and re.fullmatch(pattern, value) is not None
    if not fits:
        raise InvalidInput(f"field {field} of a security event", limit=f"a {form}: {pattern or 'whole number from 0'}")
