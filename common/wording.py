"""Writes counts, times, durations and reasons in words.

The kinds of events (:mod:`common.event_kinds`), the dashboard's views and its templates use it.
"""

from __future__ import annotations

from datetime import datetime

DECLINED = {
    "budget": "its budget does not cover the batch",
    "busy": "its worker was busy with another request",
    "daily-cap": "its own daily cap is reached",
    "left-out": "it sent no codes in time earlier in this run, so the run continues without it",
    "ledger-contradicted": "it holds a signed head that this ledger does not contain",
    "malformed": "it could not read the offer; its software and the server's may differ",
    "paused": "the site has paused the study, or its own ledger raised an alarm",
    "unsigned": "its reply was not signed with the key that it was registered with",
    "unavailable": "its worker does not run, does not answer, or has no teacher",
    "unreadable": "its reply did not arrive completely, or the server could not use it",
    "unknown-study": (
        "it has not consented to this study or edition, or it accepted one of these queries for another study or for "
        "another ledger of the server"
    ),
    "wrong-codec": "the codec is not the one it consented to",
    "wrong-edition": "the queries belong to another edition of the study",
    "old-draw": "it states a later draw (attempt at a sum) than this ledger has; one of the two may be an older copy",
    "stale": "the offer reached it long after it was made; somebody held it back, or a clock is wrong",
    "unknown-peers": "nobody there has confirmed enough of the other hospitals' keys (`consilium site peers`)",
    "withdrawn": "the site has left the study for good",
    "wrong-mechanism": "the mechanism is not the one it consented to",
}
ACCOUNTANTS = {"exact": "exact Gaussian", "rdp": "Rényi DP", "paper": "paper's formula"}
UNANSWERED = {
    "deadline": "nothing came in time",
    "malformed": "its reply did not arrive completely or could not be read",
    "offline": "it was offline when its codes were asked for, or went offline then",
    "refused": "it refuses to send codes now; `consilium site status` there says why, such as a pause",
    "patience": "it sent nothing for as long as the study waits (patience_s)",
    "unavailable": "it sent no answer: its worker does not run, or does not answer",
    "unfinished": "it is still computing",
    "unsigned": "its reply was not signed with its key",
}
"""What the reasons of the event ``reply-missing`` mean."""
MISSED = {"offline": "was not connected at the last offer", "deadline": "did not answer the last offer in time"}


def declined_words(reason: str) -> str:
    """Describe in words why a site declined an offer.

    Args:
        reason: The reason's word in the protocol.

    Returns:
        The description; an unknown reason is returned unchanged.
    """
    return DECLINED.get(reason) or _flower_words(reason)


def unanswered_words(reason: str) -> str:
    """Describe in words why a site sent no codes.

    Args:
        reason: The reason's word in the event ``reply-missing``.

    Returns:
        The description; an unknown reason is returned unchanged.

    >>> unanswered_words("flower-2")
    'its network process sent error 2 of Flower; its `node/logs/` name the cause'
    """
    return UNANSWERED.get(reason) or _flower_words(reason)


def _flower_words(reason: str) -> str:
    name, _, number = reason.partition("-")
    if name != "flower":
        return reason
    return f"its network process sent error {number} of Flower; its `node/logs/` name the cause"


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


def local_time(time: str) -> str:
    """Return a time in this machine's time zone, with the zone's name, because files and other sites use UTC.

    Args:
        time: A time in ISO 8601 with its offset from UTC.

    Returns:
        The text, such as ``2026-11-21 14:09:55 CET``.
    """
    return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


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
