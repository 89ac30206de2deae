"""Writes tables and ledger rows as JSON, and as CSV in which a spreadsheet program interprets no value as a formula.

The API uses it.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from fastapi.responses import Response

from server.dashboard.labels import LabelView
from server.dashboard.rows import row_body
from server.dashboard.views.sites import SiteView


def csv_response(name: str, rows: Sequence[dict[str, Any]]) -> Response:
    """Return a table as CSV; an empty table has no columns.

    Args:
        name: Name of the file, without its ending.
        rows: The rows, all with the same keys.

    Returns:
        The response, which a browser saves as a file.
    """
    names = tuple(rows[0]) if rows else ()
    text = "".join(csv_lines(names, ([row[key] for key in names] for row in rows)))
    return Response(text, media_type="text/csv; charset=utf-8", headers=attached(f"{name}.csv"))


def csv_lines(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    """Yield lines of CSV, the header first.

    Args:
        names: Names of the columns.
        rows: Values of each row, in the columns' order.

    Yields:
        Each line.
    """
    for row in chain([names], rows):
        stream = io.StringIO()
        csv.writer(stream).writerow([_cell(value) for value in row])
        yield stream.getvalue()


def _cell(value: Any) -> Any:
    """Return a value for a CSV cell; an apostrophe is put before a text that a spreadsheet would read as a formula."""
    if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t", "\r"):
        return f"'{value}"
    return value


def json_lines(rows: Iterable[tuple[int, str, str, str, str, str]]) -> Iterator[str]:
    """Write ledger rows as a JSON list with one row on each line.

    Args:
        rows: (seq, time, kind, body, prev_hash, hash) of each row.

    Yields:
        Parts of the text.
    """
    yield "["
    for number, (seq, time, kind, body, prev_hash, row_hash) in enumerate(rows):
        fact = {"seq": seq, "time_utc": str(time), "kind": str(kind), "body": row_body(body)}
        fact |= {"prev_hash": str(prev_hash), "hash": str(row_hash)}
        yield ("," if number else "") + "\n" + json.dumps(fact, ensure_ascii=False)
    yield "\n]\n"


def flat_site(site: SiteView) -> dict[str, Any]:
    """Return a site as one row of a table.

    Args:
        site: The site.

    Returns:
        Values by column.
    """
    facts = {name: value for name, value in asdict(site).items() if name not in ("budget", "exhausted")}
    budget = site.budget
    return facts | {
        "epsilon_spent": None if budget is None else budget.epsilon,
        "epsilon_budget": None if budget is None else budget.budget,
        "accountant": None if budget is None else budget.accountant,
        "delta": None if budget is None else budget.delta,
        "unit": None if budget is None else budget.unit,
        "relation": None if budget is None else budget.relation,
        "answers_left": None if budget is None else budget.answers_left,
        "at_least": None if budget is None else budget.doubt,
    }


def flat_label(label: LabelView) -> dict[str, Any]:
    """Return a label as one row of a table.

    Args:
        label: The label.

    Returns:
        Values by column.
    """
    facts = label.facts
    return {
        "number": label.number,
        "volume": label.volume,
        "state": label.state,
        "verdict": label.verdict,
        "confidence": None if facts is None else facts.confidence,
        "agreement_with_student": None if facts is None else facts.agreement,
        "decided_by": None if label.decision is None else label.decision.user,
        "decided": None if label.decision is None else label.decision.time,
    }


def attached(name: str) -> dict[str, str]:
    """Return the header that makes a browser save a response as a file.

    Args:
        name: Name of the file; other characters than ASCII letters, digits, ``.``, ``_`` and ``-`` are replaced.

    Returns:
        The header.

    >>> attached("a b.csv")
    {'content-disposition': 'attachment; filename="a-b.csv"'}
    """
    safe = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in name)
    return {"content-disposition": f'attachment; filename="{safe}"'}
