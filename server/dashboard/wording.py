"""Writes counts, durations and events in words, as pages and alarms show them.

The views and the templates use it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.privacy.figures import epsilon_text

DECLINED = {
    "alarm": "its own ledger raised an alarm",
    "budget": "its budget does not cover the batch",
    "busy": "its worker was busy with another request",
    "daily-cap": "its own daily cap is reached",
    "left-out": "it left a sum incomplete, so this run continues without it",
    "ledger-contradicted": "it holds a signed head that this ledger does not contain",
    "malformed": "it could not read the offer; its software and the server's may differ",
    "not-allowed": "its policy does not allow these queries",
    "paused": "the site has paused the study, or its own ledger raised an alarm",
    "unavailable": "its worker is not running or has no teacher",
    "unknown-study": "it has not consented to this study, or to another edition of it",
    "wrong-codec": "the codec is not the one it consented to",
    "wrong-edition": "the queries belong to another edition of the study",
    "old-draw": "it knows a later draw (attempt at a sum) than this ledger does; the ledger may be an older copy",
    "stale": "the offer reached it long after it was made; somebody held it back, or a clock is wrong",
    "unknown-peers": "nobody there has confirmed enough of the other hospitals' keys (`consilium site peers`)",
    "wrong-mechanism": "the mechanism is not the one it consented to",
}
ACCOUNTANTS = {"exact": "exact Gaussian", "rdp": "Rényi DP", "paper": "paper's formula"}
MISSED = {"offline": "was not connected at the last offer", "deadline": "did not answer the last offer in time"}


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


def event_view(event: Mapping[str, Any]) -> EventView:
    """Describe an event of the event log in words.

    Args:
        event: The event.

    Returns:
        The description; for an unknown kind, the kind's name.
    """
    kind = event["event"]
    say = _EVENTS.get(kind)
    level = _LEVELS.get(kind, "info")
    if (kind == "offer-answered" and not event["accepted"]) or (kind == "answers-weighed" and event["warnings"]):
        level = "warning"
    return EventView(event["time"], kind, kind.replace("-", " ") if say is None else say(event), level)


def declined_words(reason: str) -> str:
    """Describe in words why a site declined an offer.

    Args:
        reason: The reason's word in the protocol.

    Returns:
        The description; an unknown reason is returned unchanged.
    """
    return DECLINED.get(reason, reason)


def many(count: int, one: str, several: str = "") -> str:
    """Return a count with its noun.

    Args:
        count: The count.
        one: The noun in the singular.
        several: The plural, if it is not the singular with an s.

    Returns:
        The text.

    >>> many(1, "code"), many(2, "query", "queries")
    ('1 code', '2 queries')
    """
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def duration(seconds: float) -> str:
    """Return a duration as text.

    Args:
        seconds: The duration in seconds.

    Returns:
        The text, in at most two units.

    >>> duration(0.4), duration(185), duration(7800)
    ('0.4 s', '3 min 5 s', '2 h 10 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def _offer(e: Mapping[str, Any]) -> str:
    reason = e["reason"]
    said = "accepted" if e["accepted"] else f"declined: {declined_words(reason)}"
    return f"{e['site']} {MISSED.get(reason, said)}"


def unwitnessed_words(reason: str) -> str:
    """Return the reason why a site has not countersigned the ledger's newest head, with what to do, in words.

    Args:
        reason: The reason as in the event ``witness-missing``.

    Returns:
        The words.

    >>> unwitnessed_words("no-reply")
    'it sent no reply (if it stays away, ask for its `consilium site status`)'
    """
    return _UNWITNESSED.get(reason, reason)


_UNWITNESSED = {
    "no-reply": "it sent no reply (if it stays away, ask for its `consilium site status`)",
    "gap": "it knows another row than the one at which the proof that it was sent begins",
    "stale": "it knows a newer row (if this ledger was restored from a backup, run `consilium ledger recover`)",
    "unsigned": "no key in its site.toml has signed that row (ask the hospital to compare `signing_key` with its kit)",
}


def _released(e: Mapping[str, Any]) -> str:
    return (
        f"{many(len(e['queries']), 'answer')} released by {many(len(e['roster']), 'site')}; "
        f"ε {epsilon_text(e['epsilon_exact'])} exact, {epsilon_text(e['epsilon_rdp'])} RDP"
    )


_EVENTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "run-started": lambda e: f"run {'resumed' if e['resumed'] else 'started'}",
    "stage-started": lambda e: f"stage {e['stage']} began",
    "stage-finished": lambda e: f"stage {e['stage']} done in {duration(e['seconds'])}",
    "offer-answered": _offer,
    "quorum-missed": lambda e: f"quorum missed: {many(e['accepted'], 'site')} accepted, {e['needed']} are needed",
    "batch-dispatched": lambda e: f"{many(e['queries'], 'query', 'queries')} asked of {many(e['sites'], 'site')}",
    "reply-received": lambda e: f"{e['site']} sent {many(e['codes'], 'code')} in {duration(e['seconds'])}",
    "reply-missing": lambda e: f"{e['site']} did not answer: {e['reason']}",
    "code-refused": lambda e: f"{e['site']}: {many(e['codes'], 'code')} refused: {e['reason']}",
    "released": _released,
    "budget-refused": lambda e: (
        f"{many(len(e['queries']), 'query', 'queries')} refused: the budget does not cover more"
    ),
    "draw-lost": lambda e: (
        f"a sum of {many(len(e['queries']), 'query', 'queries')} was lost; its charge remains: "
        + (
            "one of its sites sent something that is not a code"
            if e["reason"] == "spoiled"
            else f"{', '.join(e['sites'])} sent nothing"
        )
    ),
    "peers-unconfirmed": lambda e: f"{e['site']} has not confirmed the keys of {', '.join(e['peers'])}",
    "ledger-contradicted": lambda e: (
        f"{e['site']} holds a signed head of row {e['ledger_row']} that this ledger does not contain"
    ),
    "receipts-held": lambda e: f"{e['site']} holds its receipts up to row {e['ledger_row']}",
    "receipts-missing": lambda e: f"the receipts could not be sent to {e['site']}: {e['reason']}",
    "witnessed": lambda e: f"{e['site']} has countersigned the head of row {e['size']}",
    "witness-missing": lambda e: (
        f"{e['site']} has not confirmed the ledger up to its newest row, {e['size']}, because "
        f"{unwitnessed_words(e['reason'])}. Until it does, it cannot prove a later change of these rows. It is asked "
        "again at the end of the next run"
    ),
    "witness-disagrees": lambda e: (
        f"{e['site']} knows another history of the ledger {', '.join(e['ledgers'])} than the head of row {e['size']}"
    ),
    "label-decoded": lambda e: f"label of volume {e['volume'][:8]} decoded",
    "answers-weighed": lambda e: "; ".join(e["warnings"]) or "the size of the sites' summed answers is as expected",
    "student-pass": lambda e: f"pass {e['number']} of the student's training ended at step {e['step']:,}",
    "student-validated": lambda e: f"student at step {e['step']:,}: Dice {e['dice']:.3f}",
    "student-trained": lambda e: f"student trained in {duration(e['seconds'])}",
    "control-trained": lambda e: f"control {e['name'].replace('_', ' ')} trained in {duration(e['seconds'])}",
    "network-scored": lambda e: (
        f"{e['name'].replace('_', ' ')}: Dice {e['dice']:.3f} on {many(e['cases'], 'validation case')}"
    ),
    "bundle-exported": lambda e: f"bundle exported, {e['sha256'][:8]}",
    "verdict-taken": lambda e: f"{e['site']} finds student {e['bundle'][:8]} {e['word']}",
    "run-finished": lambda e: f"run finished in {duration(e['seconds'])}",
    "run-failed": lambda e: f"run failed: {e['reason']}",
}
_LEVELS = {
    "quorum-missed": "critical",
    "ledger-contradicted": "critical",
    "run-failed": "critical",
    "draw-lost": "warning",
    "peers-unconfirmed": "warning",
    "reply-missing": "warning",
    "code-refused": "warning",
    "budget-refused": "warning",
    "receipts-missing": "warning",
    "witness-missing": "warning",
    "witness-disagrees": "critical",
}
