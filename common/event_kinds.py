"""Defines the kinds of events of the event log: fields, level and words.

:data:`EVENTS` has one entry for each kind; docs/events.md explains them. A kind that the security log also defines
(:mod:`common.security_log.events`) is sent to the log targets too. Refuses an event with a missing or invalid field.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from math import isfinite
from typing import Any

from common.errors import InvalidInput
from common.privacy.figures import epsilon_text
from common.wording import MISSED, declined_words, duration, many, unanswered_words, unwitnessed_words

MAX_TEXT = 4_000
MAX_ITEMS = 2_000
MAX_NUMBER = 2**53
"""Largest number accepted; float64, which JavaScript uses for all numbers, represents integers up to it exactly."""

Event = Mapping[str, Any]


def _text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_TEXT


def _texts(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= MAX_ITEMS and all(_text(item) for item in value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MAX_NUMBER


def _amount(value: Any) -> bool:
    return _number(value) and isfinite(value) and value >= 0


@dataclass(frozen=True, slots=True)
class EventKind:
    """A kind of event.

    Attributes:
        fields: A function for each field, by the field's name, that returns True if a value is valid. Fields that every
            event has are left out.
        words: Returns an event in words; None for routine events, which the list of recent events leaves out.
        level: ``info``, ``warning`` or ``critical``.
        optional: Like ``fields``, for fields that older logs lack.
    """

    fields: Mapping[str, Callable[[Any], bool]]
    words: Callable[[Event], str] | None = None
    level: str = "info"
    optional: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)


EVENTS: dict[str, EventKind] = {
    "run-started": EventKind(
        {"run": _text, "pid": _count, "resumed": _flag}, lambda e: f"run {'resumed' if e['resumed'] else 'started'}"
    ),
    "stage-started": EventKind({"stage": _text, "total": _count}, lambda e: f"stage {e['stage']} began"),
    "stage-progress": EventKind({"stage": _text, "done": _count, "total": _count}),
    "stage-finished": EventKind(
        {"stage": _text, "seconds": _amount}, lambda e: f"stage {e['stage']} done in {duration(e['seconds'])}"
    ),
    "offer-answered": EventKind(
        {"batch": _text, "site": _text, "accepted": _flag, "reason": _text},
        lambda e: f"{e['site']} {MISSED.get(e['reason']) or 'did not accept: ' + declined_words(e['reason'])}",
    ),
    "quorum-missed": EventKind(
        {"batch": _text, "accepted": _count, "needed": _count},
        lambda e: f"quorum missed: {many(e['accepted'], 'site')} accepted, {e['needed']} are needed",
        "critical",
    ),
    "batch-dispatched": EventKind(
        {"batch": _text, "attempt": _count, "sites": _count, "queries": _count},
        lambda e: f"{many(e['queries'], 'query', 'queries')} asked of {many(e['sites'], 'site')}",
        optional={"asked": _texts},
    ),
    "reply-received": EventKind(
        {"batch": _text, "attempt": _count, "site": _text, "codes": _count, "seconds": _amount},
        lambda e: f"{e['site']} sent {many(e['codes'], 'code')} in {duration(e['seconds'])}",
    ),
    "reply-missing": EventKind(
        {"batch": _text, "attempt": _count, "site": _text, "reason": _text},
        lambda e: f"{e['site']} did not answer: {unanswered_words(e['reason'])}",
        "warning",
    ),
    "site-slow": EventKind(
        {"batch": _text, "site": _text, "seconds": _amount, "usual_seconds": _amount},
        lambda e: (
            f"{e['site']} is slow: the run waited {duration(e['seconds'])} for it, and {duration(e['usual_seconds'])} "
            "(median) for the others"
        ),
        "warning",
    ),
    "code-refused": EventKind(
        {"batch": _text, "site": _text, "query": _text, "reason": _text, "codes": _count},
        lambda e: f"{e['site']}: {many(e['codes'], 'code')} refused: {e['reason']}",
        "warning",
    ),
    "released": EventKind(
        {"batch": _text, "queries": _texts, "roster": _texts, "voters": _count}
        | {"epsilon_exact": _amount, "epsilon_rdp": _amount, "delta": _amount, "unit": _text, "relation": _text},
        lambda e: (
            f"{many(len(e['queries']), 'answer')} released by {many(len(e['roster']), 'site')}; "
            f"ε {epsilon_text(e['epsilon_exact'])} exact, {epsilon_text(e['epsilon_rdp'])} RDP"
        ),
    ),
    "budget-refused": EventKind(
        {"batch": _text, "queries": _texts},
        lambda e: f"{many(len(e['queries']), 'query', 'queries')} refused: the budget does not cover more",
        "warning",
    ),
    "draw-lost": EventKind(
        {"batch": _text, "draw": _count, "queries": _texts, "sites": _texts, "reason": _text},
        lambda e: (
            f"a sum of {many(len(e['queries']), 'query', 'queries')} was lost; its charge remains: "
            + (
                "one of its sites sent something that is not a code"
                if e["reason"] == "spoiled"
                else f"{', '.join(e['sites'])} sent nothing"
            )
        ),
        "warning",
    ),
    "peers-unconfirmed": EventKind(
        {"site": _text, "peers": _texts},
        lambda e: f"{e['site']} has not confirmed the keys of {', '.join(e['peers'])}",
        "warning",
    ),
    "ledger-contradicted": EventKind(
        {"site": _text, "ledger_row": _count},
        lambda e: (
            f"{e['site']} states a head of row {e['ledger_row']} that this ledger does not contain: the ledger was "
            "rolled back or forked, or the statement is false; to fix: ask the site for its receipt of that row; if it "
            "has one, stop the study, and see `consilium ledger recover`"
        ),
        "critical",
    ),
    "receipts-held": EventKind({"site": _text, "ledger_row": _count}),
    "receipts-missing": EventKind(
        {"site": _text, "reason": _text},
        lambda e: f"{e['site']} did not confirm the receipts: it sent no reply or refused them",
        "warning",
    ),
    "witnessed": EventKind(
        {"site": _text, "size": _count}, lambda e: f"{e['site']} has countersigned the head of row {e['size']}"
    ),
    "witness-missing": EventKind(
        {"site": _text, "reason": _text, "size": _count},
        lambda e: (
            f"{e['site']} has not confirmed the ledger up to its newest row, {e['size']}, because "
            f"{unwitnessed_words(e['reason'])}. Until it does, it cannot prove a later change of these rows. It is "
            "asked again at the end of the next run"
        ),
        "warning",
    ),
    "witness-disagrees": EventKind(
        {"site": _text, "ledgers": _texts, "size": _count},
        lambda e: (
            f"{e['site']} knows another history of the ledger {', '.join(e['ledgers'])} than the head of row "
            f"{e['size']}"
        ),
        "critical",
    ),
    "label-decoded": EventKind({"volume": _text, "query": _text}),
    "answers-weighed": EventKind(
        {"surprise": _amount, "expected": _count, "chance": _amount, "volumes": _texts, "warnings": _texts},
        lambda e: "; ".join(e["warnings"]) or "the size of the sites' summed answers is as expected",
    ),
    "student-step": EventKind({"step": _count, "total": _count, "loss": _number}),
    "student-pass": EventKind(
        {"number": _count, "step": _count},
        lambda e: f"pass {e['number']} of the student's training ended at step {e['step']:,}",
    ),
    "student-validated": EventKind({"step": _count, "dice": _amount, "cases": _count}),
    "student-trained": EventKind(
        {"weights": _text, "seconds": _amount}, lambda e: f"student trained in {duration(e['seconds'])}"
    ),
    "control-trained": EventKind(
        {"name": _text, "weights": _text, "seconds": _amount},
        lambda e: f"control {e['name'].replace('_', ' ')} trained in {duration(e['seconds'])}",
    ),
    "network-scored": EventKind(
        {"name": _text, "dice": _amount, "cases": _count},
        lambda e: f"{e['name'].replace('_', ' ')}: Dice {e['dice']:.3f} on {many(e['cases'], 'validation case')}",
    ),
    "bundle-exported": EventKind({"sha256": _text}, lambda e: f"bundle exported, {e['sha256'][:8]}"),
    "verdict-taken": EventKind(
        {"site": _text, "word": _text, "bundle": _text},
        lambda e: f"{e['site']} finds student {e['bundle'][:8]} {e['word']}",
    ),
    "stop-requested": EventKind({"run": _text}, lambda e: "stop requested"),
    "run-finished": EventKind(
        {"run": _text, "seconds": _amount}, lambda e: f"run finished in {duration(e['seconds'])}"
    ),
    "run-failed": EventKind(
        {"run": _text, "reason": _text}, lambda e: f"run failed: {e['reason']}", "critical", {"code": _count}
    ),
}
"""Every kind of event, with its fields besides the common ones."""


@dataclass(frozen=True, slots=True)
class EventView:
    """One event of the log in words.

    Attributes:
        time: Time of the event, as the log states it.
        kind: Kind of the event.
        words: The event in words.
        level: ``info``, ``warning`` or ``critical``.
    """

    time: str
    kind: str
    words: str
    level: str


def event_words(event: Event) -> str:
    """Return an event of the event log in words; for an unknown or a routine kind, the kind's name."""
    kind = EVENTS.get(event["event"], EventKind({}))
    return kind.words(event) if kind.words else event["event"].replace("-", " ")


def event_view(event: Event) -> EventView:
    """Describe an event of the event log: its time, kind, words and level."""
    kind = EVENTS.get(event["event"], EventKind({}))
    warned = event.get("accepted") is False or event.get("warnings")
    return EventView(event["time"], event["event"], event_words(event), "warning" if warned else kind.level)


def check_event(event: Event) -> None:
    """Check that an event of the event log has every field that docs/events.md lists, with valid values.

    Args:
        event: The event; if its kind is unknown, only the kind and the time are checked.

    Raises:
        InvalidInput: If a field is missing or has an invalid value.
    """
    kind, time = event.get("event"), event.get("time")
    if not isinstance(kind, str) or not isinstance(time, str) or len(kind) + len(time) > MAX_TEXT:
        raise InvalidInput("event of the event log", limit="an object whose fields event and time are short texts")
    try:
        moment = datetime.fromisoformat(time)
    except ValueError as error:
        raise InvalidInput("time of an event", limit="a date and time in ISO 8601") from error
    if moment.tzinfo is None:
        raise InvalidInput("time of an event", limit="a date and time in ISO 8601 with the offset from UTC")
    known = EVENTS.get(kind, EventKind({}))
    for name, holds in (*known.fields.items(), *known.optional.items()):
        if not holds(event.get(name)) and (name in event or name in known.fields):
            raise InvalidInput(f"field {name} of a {kind} event", limit="a value as docs/events.md describes it")
