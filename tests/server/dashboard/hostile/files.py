"""Makes hostile files by name; each function damages a study's directory. Large files are made here, not stored."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from server.study.workspace import Workspace

_AT = {"delta": 1e-5, "unit": "hospital", "relation": "replace-one"}
REPORT: dict[str, Any] = {
    "site": "north",
    "pool": "north/patients",
    "cap": {"accountant": "exact", "epsilon": 8.0, "delta": 1e-5},
    "spent": {name: {"epsilon": 4.0, "accountant": name, **_AT} for name in ("exact", "rdp", "paper")},
    "queries_accepted": 4,
    "codes_stored": 4,
    "receipted": 4,
    "alarms": [],
}


def _text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content, encoding="utf-8")


def _with(**changed: Any) -> Callable[[Path], object]:
    return _text(json.dumps({**REPORT, **changed}))


REPORTS: Mapping[str, Callable[[Path], object]] = {
    "brackets": _text("[" * 100_000),
    "braces": _text('{"a":' * 50_000),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "a directory": lambda path: path.mkdir(),
    "a pipe": lambda path: os.mkfifo(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "200,000 alarms": _with(alarms=["x"] * 200_000),
    "alarms that are no list": _with(alarms={"a": 1}),
    "one alarm of a megabyte": _with(alarms=["x" * 1_000_000]),
    "for another site": _with(site="south"),
    "for a site that is a list": _with(site=["north"]),
    "not a number": _text(json.dumps(REPORT).replace("4.0", "NaN")),
    "infinite": _with(spent={**REPORT["spent"], "exact": {**REPORT["spent"]["exact"], "epsilon": 1e308 * 10}}),
    "a number of 5,000 digits": _text(json.dumps(REPORT).replace('"codes_stored": 4', '"codes_stored": ' + "9" * 5000)),
    "a large count": _with(codes_stored=2**70),
    "a negative count": _with(codes_stored=-1),
    "strategies that are numbers in a dict": _with(trainings={"count": 1, "strategies": {}, "guarantees": []}),
    "guarantees that are text": _with(trainings={"count": 1, "strategies": [], "guarantees": "abc"}),
    "shared that is a list": _with(shared=["a"]),
    "a list": _text("[]"),
    "null": _text("null"),
    "nothing": _text(""),
    "no utf-8": lambda path: path.write_bytes(b"\xff\xfe{}"),
    "surrogates": _text('{"site": "\\ud800"}'),
    "half a character in an alarm": _with(alarms=["\ud800"]),
    "half a character in a name": _with(shared={"\udfff": 1}),
    "an account of a truth": _with(shared={"a": True}),
    "an amount without end": _text(json.dumps({**REPORT, "shared": {"a": 0}}).replace('{"a": 0}', '{"a": 1e999}')),
}
"""Files put at ``site-reports/north.json``; none of them is a report of the site north."""


def _event(**fields: Any) -> bytes:
    return json.dumps({"schema": 1, "seq": 1, "time": "2026-01-14T09:41:07.312+00:00", "study": "s", **fields}).encode()


LINES: Mapping[str, bytes] = {
    "brackets": b"[" * 100_000 + b"]" * 100_000,
    "no kind": _event(),
    "a kind that is a list": _event(event=["released"]),
    "no site": _event(event="ledger-contradicted", ledger_row=3),
    "a site that is a dict": _event(event="offer-answered", batch="b", site={"a": 1}, accepted=True, reason="accepted"),
    "a batch that is a list": _event(event="released", batch=["b"], queries=["q"], roster=[]),
    "a stage that is a number": _event(event="stage-started", stage=7, total=1),
    "progress in words": _event(event="stage-progress", stage="collect", done="half", total="all"),
    "progress below nothing": _event(event="stage-progress", stage="collect", done=-5, total=4),
    "asked sites that are a number": _event(
        event="batch-dispatched", batch="b", attempt=1, sites=1, queries=1, asked=5
    ),
    "seconds in words": _event(event="reply-received", batch="b", attempt=1, site="north", codes=1, seconds="soon"),
    "seconds without end": _event(event="stage-finished", stage="collect", seconds=0).replace(b": 0}", b": 1e999}"),
    "seconds that are no number": _event(event="stage-finished", stage="collect", seconds=0).replace(
        b": 0}", b": NaN}"
    ),
    "a count of 4,000 digits": _event(event="stage-started", stage="collect", total=10**4000),
    "a time in words": _event(event="run-started", run="1", pid=1, resumed=False, time="yesterday"),
    "a time of no zone": _event(event="run-started", run="1", pid=1, resumed=False, time="2026-01-14T09:41:07"),
    "warnings of numbers": _event(
        event="answers-weighed", surprise=1.0, expected=1, chance=0.5, volumes=[], warnings=[1, 2]
    ),
    "half a character": _event(event="run-failed", run="1", reason="\ud800"),
    "half a character in a kind": _event(event="\udc00"),
    "a reason of a megabyte": _event(event="run-failed", run="1", reason="x" * 900_000),
    "a line of two megabytes": _event(event="run-failed", run="1", reason="x" * 2_000_000),
    "queries that are a number": _event(event="budget-refused", batch="b", queries=4),
    "a flag in words": _event(event="offer-answered", batch="b", site="north", accepted="yes", reason="accepted"),
    "a list in a line": b'["released"]\n{}'.splitlines()[0] + b" }",
}
"""Lines of an event log that are no events."""


def append_line(workspace: Workspace, line: bytes) -> None:
    with workspace.events_file.open("ab") as stream:
        stream.write(line + b"\n")


def _change(sql: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        connection = sqlite3.connect(path)
        triggers = connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in triggers:
            connection.execute(f"DROP TRIGGER {name}")
        connection.executescript(sql)
        connection.commit()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()

    return change


def _overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(at)
        stream.write(content)


LEDGERS: Mapping[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "no database": lambda path: path.write_bytes(b"not a database" * 1000),
    "a directory": lambda path: (path.unlink(), path.mkdir()),
    "damaged pages": lambda path: _overwrite(path, 4096, b"\xff" * (path.stat().st_size - 4096)),
    "a row changed": _change("UPDATE rows SET body = replace(body, 'batch', 'botch') WHERE seq = 9"),
    "a row gone": _change("DELETE FROM rows WHERE seq = 9"),
    "a body that is a list": _change("UPDATE rows SET body = '[1]' WHERE seq = 9"),
    "a body of brackets": _change(f"UPDATE rows SET body = '{'[' * 100_000}' WHERE seq = 9"),
    "a body of half a character": _change('UPDATE rows SET body = \'{"batch_id": "\\ud800"}\' WHERE seq = 9'),
    "bytes in a text": _change("UPDATE rows SET body = CAST(x'ff00fe' AS TEXT) WHERE seq = 9"),
    "values of other types": _change(
        "CREATE TABLE loose AS SELECT * FROM rows; DROP TABLE rows; ALTER TABLE loose RENAME TO rows;"
        "UPDATE rows SET body = x'ff00fe', time_utc = 5, hash = x'00', kind = 1.5 WHERE seq = 9"
    ),
    "a body of no text": _change("UPDATE rows SET body = '' WHERE seq = 9"),
    "a kind nobody knows": _change("UPDATE rows SET kind = 'gift' WHERE seq = 9"),
    "a time in words": _change("UPDATE rows SET time_utc = 'yesterday' WHERE seq = 9"),
    "no tables": _change("DROP TABLE rows"),
}
"""Changes of a ledger file; row 9 of 14 is a release."""
OLDER_COPY = _change("DELETE FROM rows WHERE seq > 8")
