"""Reads the ledger's rows as they are stored, without checking them: a page of rows, one row, or all rows.

The Ledger page and the API use it. The file is opened for reading only. Unknown kinds and long search texts are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InvalidInput
from common.ledger.records import KINDS as RECORDS
from common.ledger.row_text import row_text
from common.ledger.rows import SignedHead
from common.privacy.figures import delta_text, epsilon_text
from common.reading import parse_json
from server.dashboard.ledger_fold import open_ledger

KINDS = tuple(RECORDS["server"])
MOST_ON_A_PAGE = 500
MAX_TEXT = 128
MOST_ROWS = 2**62
SEARCHED = 10_000
"""Largest number of rows that a request with a filter searches; searching a large file as a whole takes seconds."""

MAX_SHOWN = 2_000
HEX_FLOAT = re.compile(r"-?0x[01](\.[0-9a-f]{1,13})?p[+-][0-9]{1,4}")


@dataclass(frozen=True, slots=True)
class RowView:
    """A row of the ledger as a list of rows shows it.

    Attributes:
        seq: Number of the row.
        time: Time of the row, in UTC.
        kind: Kind of the row, one of :data:`KINDS`.
        subject: The row's content in a few words.
        hash: The row's hash, which the next row contains.
    """

    seq: int
    time: str
    kind: str
    subject: str
    hash: str


@dataclass(frozen=True, slots=True)
class RowPage:
    """A page of rows, newest first.

    Attributes:
        rows: The rows of this page.
        older: Value of ``before`` for the next older page; None at the end.
        newer: Value of ``after`` for the next newer page; None at the end.
        newest: Number of the ledger's newest row.
    """

    rows: tuple[RowView, ...]
    older: int | None
    newer: int | None
    newest: int


@dataclass(frozen=True, slots=True)
class RowDetail:
    """One row in full.

    ``head`` is the first signed head (signed row hash) that covers the row; None if no head covers it yet.
    """

    seq: int
    time: str
    kind: str
    subject: str
    prev_hash: str
    hash: str
    body: dict[str, Any]
    head: SignedHead | None


def row_page(
    ledger: Path, *, kind: str | None, text: str, before: int | None, after: int | None, limit: int
) -> RowPage:
    """Return a page of matching rows.

    With a filter, at most :data:`SEARCHED` rows are searched. The page may then have few rows or none, although further
    pages have some.

    Args:
        ledger: The ledger's file.
        kind: Only rows of this kind.
        text: Only rows whose body contains this text, or whose hash equals it.
        before: Only rows with a smaller number than this.
        after: Only rows with a larger number than this.
        limit: Largest number of rows.

    Returns:
        The page, newest row first.

    Raises:
        InvalidInput: If the kind is unknown, or the text is too long or contains a null character.
    """
    where, values = _where(kind, text)
    reach = SEARCHED if values else MOST_ROWS
    columns = f"SELECT seq, time_utc, kind, body, hash FROM rows WHERE {where} AND seq > ? AND seq < ? ORDER BY seq"
    with closing(open_ledger(ledger)) as db:
        newest = int(db.execute("SELECT coalesce(max(seq), 0) FROM rows").fetchone()[0])
        if after is not None and before is None:
            low, high = after, min(after + reach, newest) + 1
            found = db.execute(f"{columns} LIMIT ?", (*values, low, high, limit)).fetchall()[::-1]
        else:
            high = newest + 1 if before is None else min(before, newest + 1)
            low = max(0, high - 1 - reach)
            found = db.execute(f"{columns} DESC LIMIT ?", (*values, low, high, limit)).fetchall()
        rows = tuple(_view(row) for row in found)
        full = len(rows) == limit
        first, last = (rows[0].seq, rows[-1].seq) if rows else (high, low)
        if before is None and after is not None:
            first, last = first if full else high - 1, last if rows else low + 1
        elif not full:
            last = low + 1

        def any_between(low: int, high: int) -> bool:
            sql = f"SELECT EXISTS (SELECT 1 FROM rows WHERE {where} AND seq > ? AND seq < ?)"
            return bool(db.execute(sql, (*values, low, high)).fetchone()[0])

        past = max(0, last - 1 - reach)
        older = last if past or any_between(past, last) else None
        ahead = first + reach + 1
        newer = first if ahead <= newest or any_between(first, ahead) else None
    return RowPage(rows, older, newer, newest)


def row_detail(ledger: Path, seq: int, *, ledger_id: str) -> RowDetail | None:
    """Return one row with its body.

    Args:
        ledger: The ledger's file.
        seq: Number of the row.
        ledger_id: The ledger's id, which its signed heads contain.

    Returns:
        The row; None if there is no such row.
    """
    with closing(open_ledger(ledger)) as db:
        found = db.execute(
            "SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE seq = ?", (seq,)
        ).fetchone()
        if found is None:
            return None
        head = db.execute(
            "SELECT seq, hash, public_key, signature FROM heads WHERE seq >= ? ORDER BY seq LIMIT 1", (seq,)
        ).fetchone()
    number, time, kind, body, prev_hash, row_hash = found
    parsed = row_body(body)
    return RowDetail(
        seq=number,
        time=str(time),
        kind=str(kind),
        subject=_shown_text(kind, parsed),
        prev_hash=str(prev_hash),
        hash=str(row_hash),
        body=parsed,
        head=None if head is None else SignedHead("server", ledger_id, *head),
    )


def newest_head(ledger: Path, *, ledger_id: str) -> SignedHead | None:
    """Return the newest signed head.

    Args:
        ledger: The ledger's file.
        ledger_id: The ledger's id, which its signed heads contain.

    Returns:
        The head; None if there is none yet.
    """
    with closing(open_ledger(ledger)) as db:
        found = db.execute("SELECT seq, hash, public_key, signature FROM heads ORDER BY seq DESC LIMIT 1").fetchone()
    return None if found is None else SignedHead("server", ledger_id, *found)


def in_words(value: Any, name: str = "") -> Any:
    """Convert a row's body for display: add decimals to float64 values, which ledgers store in hexadecimal.

    Args:
        value: The body, or a part of it.
        name: Key of this part in the body; it decides how a number is rounded.

    Returns:
        The same structure; a text such as ``0x1.0p+3`` becomes ``8 (0x1.0p+3)``.
    """
    match value:
        case dict():
            return {key: in_words(one, str(key)) for key, one in value.items()}
        case list():
            return [in_words(one, name) for one in value]
        case str() if HEX_FLOAT.fullmatch(value):
            number = float.fromhex(value)
            text = (
                delta_text(number)
                if "delta" in name
                else epsilon_text(number)
                if "epsilon" in name
                else f"{number:.10g}"
            )
            return f"{text} ({value})"
    return value


def all_rows(ledger: Path, *, kind: str | None, text: str) -> Iterator[tuple[int, str, str, str, str, str]]:
    """Iterate over all matching rows, oldest first.

    Arguments and the file are checked before this function returns, because a streaming response cannot report an error
    once it has begun.

    Args:
        ledger: The ledger's file.
        kind: Only rows of this kind.
        text: Only rows whose body contains this text, or whose hash equals it.

    Returns:
        An iterator of (seq, time, kind, body, prev_hash, hash).

    Raises:
        InvalidInput: If the kind is unknown, or the text is too long or contains a null character.
    """
    where, values = _where(kind, text)
    open_ledger(ledger).close()
    return _all_where(ledger, where, values)


def _all_where(ledger: Path, where: str, values: tuple[str, ...]) -> Iterator[tuple[int, str, str, str, str, str]]:
    seen = 0
    while True:
        with closing(open_ledger(ledger)) as db:
            sql = f"SELECT seq, time_utc, kind, body, prev_hash, hash FROM rows WHERE {where} AND seq > ?"
            found = db.execute(f"{sql} ORDER BY seq LIMIT 500", (*values, seen)).fetchall()
        if not found:
            return
        yield from found
        seen = found[-1][0]


def _view(row: tuple[int, str, str, str, str]) -> RowView:
    seq, time, kind, body, row_hash = row
    return RowView(seq, str(time), str(kind), _shown_text(kind, row_body(body)), str(row_hash))


def row_body(body: str) -> dict[str, Any]:
    """Parse a row's body for display.

    Args:
        body: The stored body.

    Returns:
        The JSON object. A body that is not a JSON object is returned as text under the key ``not a row's body``.
    """
    body = str(body)  # a file that replaced the ledger may contain any type
    try:
        found = parse_json(body.encode("utf-8", "replace"), what="a row's body")
    except InvalidInput:
        found = None
    return found if isinstance(found, dict) else {"not a row's body": body[:MAX_SHOWN]}


def _shown_text(kind: str, body: dict[str, Any]) -> str:
    try:
        return row_text(kind, body)[:MAX_SHOWN]
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, InvalidInput):
        return "not a valid body of such a row"


def _where(kind: str | None, text: str) -> tuple[str, tuple[str, ...]]:
    if kind is not None and kind not in KINDS:
        raise InvalidInput("kind of row", value=kind, limit=", ".join(KINDS))
    if len(text) > MAX_TEXT or "\0" in text:
        raise InvalidInput(
            "text to search for",
            value=f"{len(text)} characters",
            limit=f"at most {MAX_TEXT} characters, without a null character",
        )
    parts: list[str] = ["1"]
    values: list[str] = []
    if kind is not None:
        parts.append("kind = ?")
        values.append(kind)
    if text:
        parts.append("(instr(body, ?) OR hash = ?)")
        values += [text, text]
    return " AND ".join(parts), tuple(values)
