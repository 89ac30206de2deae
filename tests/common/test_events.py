"""Tests the event log: it refuses undocumented events, survives a torn line and numbers events without a gap."""

from __future__ import annotations

import json
import math
import re
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from threading import RLock

import pytest

from common.errors import InvalidInput
from common.event_kinds import EVENTS, event_words
from common.events import EVENT_SCHEMA, EventLog, EventTail, read_events, rewrite_events
from server.dashboard.event_fold import EventFold

PAGE = Path(__file__).resolve().parents[2] / "docs" / "events.md"
STUDY = "ab" * 32
SAMPLES = {"text": "some-text", "integer": 3, "number": 1.25, "flag": True, "list": ["a", "b"]}


def documented() -> dict[str, dict[str, str]]:
    """Return kind → field → type, as the table of the page states."""
    kinds = {}
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = re.fullmatch(r"\| `([a-z-]+)` \| (`.*?) \| .+ \|", line)
        if row:
            fields = [re.fullmatch(r"`(\w+)` (\w+)", field) for field in row[2].split(", ")]
            kinds[row[1]] = {field[1]: field[2] for field in fields if field}
            assert None not in fields, line
    return kinds


def open_log(path: Path, **changes: object) -> EventLog:
    clock = changes.get("clock", lambda: datetime(2026, 1, 14, 9, 41, 7, 312_000, tzinfo=UTC))
    return EventLog(path, study=STUDY, clock=clock)  # type: ignore[arg-type]


def test_the_page_lists_exactly_the_events_and_fields_of_the_code() -> None:
    assert {kind: frozenset(fields) for kind, fields in documented().items()} == {
        kind: entry.fields.keys() for kind, entry in EVENTS.items()
    }


def test_the_page_lists_exactly_the_common_fields(tmp_path: Path) -> None:
    open_log(tmp_path / "events.jsonl").emit("bundle-exported", sha256="00")
    (record,) = read_events(tmp_path / "events.jsonl")
    page = PAGE.read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(\w+)` \| (?:text|integer) \|", page, re.M)
    assert list(record) == [*listed, "sha256"]
    assert re.search(rf"version of this page: {EVENT_SCHEMA}\b", page)


def test_every_documented_reason_of_a_missing_reply_is_shown_in_words() -> None:
    (line,) = (line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `reply-missing`"))
    reasons = re.findall(r"`([a-z]+)`(?= \(once a batch\):|:)", line)
    assert {"offline", "malformed", "unfinished", "patience"} <= {*reasons}
    for reason in reasons:
        said = event_words({"event": "reply-missing", "site": "north", "reason": reason})
        assert re.fullmatch(r"north did not answer: (it|its reply) .*", said), said


def test_no_event_has_a_field_that_would_overwrite_a_common_one() -> None:
    common = {"schema", "seq", "time", "study", "event"}
    assert [kind for kind, entry in EVENTS.items() if entry.fields.keys() & common] == []


def test_every_documented_event_can_be_written_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    kinds = documented()
    for kind, fields in kinds.items():
        log.emit(kind, **{name: SAMPLES[of] for name, of in fields.items()})
    records = list(read_events(path))
    assert [record["event"] for record in records] == list(kinds)
    assert [record["seq"] for record in records] == list(range(1, len(kinds) + 1))
    for record in records:
        assert record["study"] == STUDY
        assert record["time"] == "2026-01-14T09:41:07.312+00:00"
        assert {name: record[name] for name in kinds[record["event"]]} == {
            name: SAMPLES[of] for name, of in kinds[record["event"]].items()
        }


def test_an_unknown_kind_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(InvalidInput, match="event kind"):
        open_log(path).emit("code-seen", code="1")
    assert list(read_events(path)) == []


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"stage": "collect"},
        {"stage": "collect", "total": 3, "patient": "x"},
        {"stage": "collect", "total": [1, 2]},
        {"stage": "collect", "total": {"a": 1}},
        {"stage": b"collect", "total": 3},
        {"stage": "collect", "total": ("a", "b")},
    ],
)
def test_missing_extra_and_structured_fields_are_refused(tmp_path: Path, facts: dict[str, object]) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises(InvalidInput, match=r"fields? "):
        open_log(path).emit("stage-started", **facts)
    assert list(read_events(path)) == []


def test_a_loss_that_is_not_a_number_writes_no_line_that_json_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with pytest.raises((InvalidInput, ValueError)):
        open_log(path).emit("student-step", step=1, total=2, loss=math.nan)
    assert not path.exists() or path.read_bytes() == b""


def test_the_error_of_a_full_disk_names_the_log(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, study="s")
    path.symlink_to("/dev/full")
    with pytest.raises(OSError, match=f"No space left.*{path}"):
        log.emit("stop-requested", run="1")


def test_a_new_writer_counts_on_where_the_last_one_ended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "events.jsonl"
    for _ in range(3):
        log = open_log(path)
        log.emit("stop-requested", run="1")
        log.emit("stop-requested", run="2")
    assert [record["seq"] for record in read_events(path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", [b"{", b'{"schema": 1, "seq": 3, "ti', '{"a": "ε'.encode()[:-1], b"\x00\x00\x00"])
def test_a_line_torn_by_a_crash_is_skipped_and_swallows_no_later_event(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    log.emit("stop-requested", run="1")
    log.emit("stop-requested", run="2")
    with path.open("ab") as stream:
        stream.write(torn)
    assert [record["run"] for record in read_events(path)] == ["1", "2"]
    log.emit("stop-requested", run="3")
    assert [(record["seq"], record["run"]) for record in read_events(path)] == [(1, "1"), (2, "2"), (3, "3")]
    with path.open("ab") as stream:
        stream.write(torn)
    open_log(path).emit("stop-requested", run="4")
    assert [record["seq"] for record in read_events(path)] == [1, 2, 3, 4]


def test_deleted_events_leave_every_other_event_its_number_and_its_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    for run in ("1", "2", "ε3", "4"):
        log.emit("stop-requested", run=run)
    with path.open("ab") as stream:
        stream.write(b'{"schema": 1, "run": "2')
    log.emit("stop-requested", run="5")
    before, tail = path.read_bytes(), EventTail(path, from_end=True)
    assert rewrite_events(path, lambda event: None if event["run"] in ("2", "5") else event) == 2
    after = path.read_bytes()
    assert len(after) == len(before)
    assert after.index("ε3".encode()) == before.index("ε3".encode())
    assert b'"run": "2' not in after
    open_log(path).emit("stop-requested", run="6")
    assert [(record["seq"], record["run"]) for record in read_events(path)] == [(1, "1"), (3, "ε3"), (4, "4"), (6, "6")]
    assert [record["run"] for record in tail.new()] == ["6"]
    fold = EventFold(path)
    fold.step(RLock())
    assert fold.malformed == 0


def test_a_whole_line_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    open_log(path).emit("stop-requested", run="1")
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    open_log(path).emit("stop-requested", run="2")
    assert [(record["seq"], record["run"]) for record in read_events(path)] == [(1, "1"), (2, "2")]


def test_lines_of_another_schema_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"schema": EVENT_SCHEMA + 1, "event": "x"}) + "\n[1]\n", encoding="utf-8")
    assert list(read_events(path)) == []


def test_a_missing_log_is_empty_and_opening_one_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    assert list(read_events(path)) == []
    open_log(path)
    assert not path.exists()


def test_times_carry_their_offset(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    zone = timezone(timedelta(hours=2))
    open_log(path, clock=lambda: datetime(2026, 7, 1, 12, 0, tzinfo=zone)).emit("stop-requested", run="1")
    (record,) = read_events(path)
    assert datetime.fromisoformat(record["time"]) == datetime(2026, 7, 1, 10, 0, tzinfo=UTC)


def test_events_are_appended_and_never_rewritten(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = open_log(path)
    log.emit("stop-requested", run="1")
    before = path.read_bytes()
    log.emit("stop-requested", run="2")
    assert path.read_bytes().startswith(before)


def test_a_tail_reads_each_event_once_and_a_torn_line_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert list(tail.new()) == []
    log = EventLog(path, study=STUDY)
    for step in range(3):
        log.emit("student-step", step=step, total=3, loss=1.0)
    ended = EventTail(path, from_end=True)
    assert [event["step"] for event in tail.new()] == [0, 1, 2]
    with path.open("ab") as stream:
        stream.write(b'{"schema":1,"event":"torn')
    assert [*tail.new(), *ended.new()] == []
    with path.open("ab") as stream:
        stream.write(b'"}\n')
    assert [event["event"] for event in tail.new()] == ["torn"]
    EventLog(path, study=STUDY).emit("student-step", step=3, total=3, loss=1.0)
    assert [event["event"] for event in ended.new()] == ["torn", "student-step"]
    assert [event["step"] for event in tail.new()] == [3]


def test_a_tail_reads_only_what_was_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "events.jsonl", []
    log, tail = EventLog(path, study=STUDY), EventTail(path)
    loads = json.loads
    monkeypatch.setattr("common.events.json.loads", lambda line: read.append(line) or loads(line))
    for step in range(50):
        log.emit("student-step", step=step, total=50, loss=1.0)
        assert [event["step"] for event in tail.new()] == [step]
    assert len(read) == 50
