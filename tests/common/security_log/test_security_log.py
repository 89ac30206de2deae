"""Tests the security log: every kind of row has an event with a schema, and no line reveals anything about a
patient.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import socketserver
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.operations import security_events as of_site
from client.operations.daemons import trouble
from common.canonical import canonical_text
from common.clock import utc_now
from common.config import render_study
from common.errors import InvalidInput
from common.event_kinds import EVENTS
from common.events import EventLog, rewrite_events
from common.ledger.chain import Chain
from common.ledger.keys import create_signing_key
from common.ledger.records import KINDS as ROW_KINDS
from common.ledger.records import parse_record
from common.security_log import sinks
from common.security_log.events import KINDS, FoundEvent, json_schema, log_record
from common.security_log.follow import (
    LedgerSource,
    LinesSource,
    LogFollower,
    daemon_fact,
    failing_targets,
    logged_event,
    send_all,
)
from common.security_log.program import STATE, kept_log, not_accepted_of, with_backlog
from common.security_log.rows import shared_row
from common.security_log.sinks import RotatedFile, open_sink
from common.supervision import DaemonStanding
from server.operations import security_events as of_server
from tests.common.ledger.golden_world import SINCE, live
from tests.conftest import ROOT
from tests.security_log_reference import PAGE, VALID, Kept, page
from tests.worlds import make_study

GOLDEN = json.loads((ROOT / "tests" / "common" / "ledger" / "golden.json").read_text())
READ = {"site": of_site, "server": of_server}
PATIENT = "Meier-Anna-1961"
TIME = "2026-11-24T12:00:00.000000Z"


def bodies(role: str) -> dict[str, str]:
    """Return a body of every kind of row of this role; the tested code made none of them."""
    found = {kind: body for kind, body, _ in GOLDEN[role]}
    found.setdefault("key", next(body for kind, body, _ in GOLDEN["server"] if kind == "key"))
    if role == "site":
        found["superseded"] = found["receipt"]
    return found | {kind: canonical_text(body) for kind, body in SINCE[role].items()}


@pytest.mark.parametrize("role", ["site", "server"])
def test_every_kind_of_row_is_an_event_in_the_schema_or_named_as_none(role: str) -> None:
    seen = set()
    for kind, body in bodies(role).items():
        found = READ[role].read_row(parse_record(role, kind, body))
        if found is None:
            assert kind in READ[role].SILENT
            continue
        seen.add(kind)
        VALID.validate(
            log_record(FoundEvent(found[0], TIME, found[1]), party=role, name="n", source="ledger", position=1)
        )
    assert seen | READ[role].SILENT == ROW_KINDS[role].keys()
    assert not seen & READ[role].SILENT


def test_every_kind_of_the_event_log_that_the_schema_defines_becomes_an_event_with_all_its_fields() -> None:
    for event, kind in EVENTS.items():
        fields: dict[str, Any] = dict.fromkeys(kind.fields, "a" * 64) | {"accepted": 1, "needed": 2, "peers": ["x"]}
        fields |= {"reason": "late", "word": "better", "ledger_row": 7, "run": "12", "size": 9}
        fields |= {"ledgers": ["server"]}
        line = json.dumps({"time": "2026-11-24T12:00:00.000+00:00", "event": event, **fields})
        found = of_server.read_event(line)
        if event not in KINDS or event in of_server.FROM_LEDGER:
            assert found is None
            continue
        assert found is not None
        VALID.validate(log_record(found, party="server", name="n", source="events.jsonl", position=1))


def test_the_schema_in_the_documents_is_the_one_that_is_kept() -> None:
    assert json_schema() == VALID.schema
    VALID.check_schema(VALID.schema)
    assert PAGE.read_text() == page(PAGE.read_text())


@given(st.sampled_from(sorted(KINDS)), st.text(min_size=1), st.data())
@pytest.mark.slow
def test_no_field_takes_free_text(event: str, text: str, data: st.DataObject) -> None:
    kind = KINDS[event]
    made: dict[str, Any] = {"count": 1, "amount": "7/3", "short": "ab", "hash": "a" * 64}
    facts: dict[str, Any] = {field: made.get(form, "x") for field, form in kind.fields.items()}
    party = kind.parties[0]
    record = log_record(FoundEvent(event, TIME, facts), party=party, name="n", source="s", position=1)
    VALID.validate(record)
    spoiled = data.draw(st.sampled_from(sorted(facts))) if facts else "patient"
    with pytest.raises(InvalidInput):  # no form allows a space, which sentences and names contain
        log_record(
            FoundEvent(event, TIME, facts | {spoiled: f"{text} {PATIENT}"}),
            party=party,
            name="n",
            source="s",
            position=1,
        )


# --- following


def ledgers(folder: Path) -> dict[str, LedgerSource]:
    """Return both ledgers of a history that uses every kind of row, as sources."""
    live(folder)
    return {
        "site": LedgerSource(folder / "site-ledger.sqlite", role="site", read=of_site.read_row),
        "server": LedgerSource(folder / "ledger.sqlite", role="server", read=of_server.read_row),
    }


@pytest.mark.parametrize("role", ["site", "server"])
def test_every_charge_on_record_is_logged_once_with_its_own_time(tmp_path: Path, role: str) -> None:
    source, sink = ledgers(tmp_path)[role], Kept()
    follower = LogFollower([source], {"kept": sink}, party=role, name="n", state=tmp_path / "state")
    follower.step()
    follower.step()
    kind = {"site": "reservation", "server": "release"}[role]
    name = {"site": "site-ledger.sqlite", "server": "ledger.sqlite"}[role]
    with contextlib.closing(sqlite3.connect(tmp_path / name)) as file:
        on_record = file.execute("SELECT seq, time_utc FROM rows WHERE kind = ? ORDER BY seq", (kind,)).fetchall()
    logged = [(one["position"], one["time"]) for one in sink.records if one["event"] == "charge"]
    assert logged == on_record
    assert on_record


def test_a_target_that_was_away_gets_what_it_missed_and_a_restart_sends_nothing_again(tmp_path: Path) -> None:
    source, away, there = ledgers(tmp_path)["site"], Kept(), Kept()
    away.away = True
    make = lambda: LogFollower(  # noqa: E731
        [source], {"a": away, "b": there}, party="site", name="n", state=tmp_path / "state"
    )
    first = make()
    first.step()
    assert away.records == [] != there.records
    (failing,) = failing_targets(tmp_path / "state")
    assert (failing.target, failing.waiting) == ("a", len(there.records))
    away.away = False
    second, before = make(), len(there.records)
    second.step()
    assert away.records == there.records
    assert len(there.records) == before
    assert failing_targets(tmp_path / "state") == ()


def test_a_target_that_refuses_is_shown_with_its_cause_since_when_and_how_many_lines_wait(tmp_path: Path) -> None:
    source, logs = ledgers(tmp_path)["site"], tmp_path / "logs"
    with socket.create_server(("127.0.0.1", 0)) as free:
        target = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    kept = kept_log(tmp_path, module="none", name="north", targets=[target])
    assert kept.offline() == ""
    one = DaemonStanding("log north", "offline", utc_now().isoformat(), "as it was when it began")
    make = lambda: LogFollower([source], {target: open_sink(target)}, party="site", name="n", state=logs / STATE)  # noqa: E731
    make().step()
    (failing,) = failing_targets(logs / STATE)
    waiting = send_all([source], party="site", name="n", sink=Kept())
    make().step()  # after a restart
    assert failing_targets(logs / STATE) == (failing,)
    assert failing.waiting == waiting > 1
    for word in (target, failing.since[:10], "refused", f"{waiting} lines", "to fix: "):
        assert word in kept.offline()
    (shown,) = with_backlog([one], tmp_path)
    assert kept.offline() in shown.line
    said, remedy = trouble(shown, tmp_path)
    assert failing.sentence in said
    assert "to fix" not in said
    assert kept.offline().endswith(f"to fix: {remedy}")
    LogFollower([source], {target: Kept()}, party="site", name="n", state=logs / STATE).step()
    assert kept.offline() == ""


@pytest.mark.parametrize("target", ["syslog", "journald", "file:/proc/none/log"])
def test_a_target_on_this_machine_that_is_missing_names_what_to_do(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sinks, "DEV_LOG", str(tmp_path / "none"))
    monkeypatch.setattr(sinks, "JOURNAL", str(tmp_path / "none"))
    source = ledgers(tmp_path)["server"]
    LogFollower([source], {target: open_sink(target)}, party="server", name="n", state=tmp_path / "logs" / STATE).step()
    (failing,) = failing_targets(tmp_path / "logs" / STATE)
    assert failing.cause == "No such file or directory"
    assert "--log-to" in sinks.remedy_of(target)


def test_a_ledger_put_back_from_a_copy_or_damaged_is_an_alert(tmp_path: Path) -> None:
    path, key = tmp_path / "site-ledger.sqlite", create_signing_key(tmp_path / "key")
    chain = Chain.create(path, role="site", genesis={"site": "n"}, signing_key=key, clock=utc_now)
    note = lambda text: append(chain, {"text": text})  # noqa: E731
    note("one")
    chain.close()
    copy = path.read_bytes()
    chain = Chain.open(path, role="site", signing_key=key, clock=utc_now)
    list(chain.new_rows())
    note("two")
    chain.close()
    sink = Kept()
    follower = LogFollower(
        [LedgerSource(path, role="site", read=of_site.read_row)], {"k": sink}, party="site", name="n", state=None
    )
    follower.step()
    assert sink.events == ["ledger-begun", "note-written", "note-written"]
    path.write_bytes(copy)
    follower.step()
    assert sink.events[3:] == ["ledger-changed", "ledger-begun", "note-written"]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as file:
        for (name,) in file.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            file.execute(f"DROP TRIGGER {name}")
        file.execute("UPDATE rows SET body = replace(body, 'one', 'two')")
    fresh = Kept()
    other = LogFollower(
        [LedgerSource(path, role="site", read=of_site.read_row)], {"k": fresh}, party="site", name="n", state=None
    )
    other.step()
    other.step()
    assert fresh.events == ["ledger-begun", "ledger-changed"]


def append(chain: Chain, body: dict[str, object]) -> None:
    with chain.transaction():
        list(chain.new_rows())
        chain.append("note", body)


@pytest.mark.parametrize(
    "place", [["x", "y"], [3], [None, None], [[1], [2]], [2**70, "a" * 64], [-1, -1], "ab", {"a": 1}]
)
def test_a_damaged_file_of_places_sends_every_event_again(tmp_path: Path, place: object) -> None:
    lines = tmp_path / "daemons.jsonl"
    lines.write_text('{"time": "2026-11-24T12:00Z", "event": "daemon-started", "daemon": "worker n", "pid": 1}\n')
    sources = [ledgers(tmp_path)["site"], LinesSource(lines, read=daemon_fact)]
    whole, sink, state = Kept(), Kept(), tmp_path / "state"
    LogFollower(sources, {"k": whole}, party="site", name="n", state=None).step()
    if place == [-1, -1]:
        place = [lines.stat().st_ino, -1]
    state.write_text(json.dumps({"k": {source.name: place for source in sources}}))
    LogFollower(sources, {"k": sink}, party="site", name="n", state=state).step()
    assert sink.events == whole.events
    assert "daemon-started" in whole.events


@pytest.mark.parametrize("field", ["target", "since", "cause", "waiting"])
def test_a_damaged_file_of_failing_targets_names_none(tmp_path: Path, field: str) -> None:
    failing, state = {"target": "syslog", "since": TIME, "cause": "refused", "waiting": 3}, tmp_path / STATE
    state.with_suffix(".failing").write_text(json.dumps([failing]))
    assert "3 lines wait" in not_accepted_of(state)
    state.with_suffix(".failing").write_text(json.dumps([failing | {field: {}}]))
    assert not_accepted_of(state) == ""


def test_a_log_that_was_rotated_is_read_to_its_end_first(tmp_path: Path) -> None:
    path = tmp_path / "daemons.jsonl"
    line = lambda pid: json.dumps(  # noqa: E731
        {"time": "2026-11-24T12:00:00.000+00:00", "event": "daemon-started", "daemon": "worker n", "pid": pid}
    )
    sink = Kept()
    follower = LogFollower([LinesSource(path, read=daemon_fact)], {"k": sink}, party="site", name="n", state=None)
    path.write_text(line(1) + "\n" + line(2))  # its last line has no end yet
    follower.step()
    with path.open("a") as stream:
        stream.write("\n" + line(3) + "\n")
    path.replace(f"{path}.1")
    path.write_text(line(4) + "\n")
    follower.step()
    assert [record["pid"] for record in sink.records] == [1, 2, 3, 4]


def test_events_that_were_deleted_let_the_follower_go_on_and_send_no_line_again(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log, sink = EventLog(path, study="s"), Kept()
    (tmp_path / "study.toml").write_text(render_study(make_study()))
    source = next(one for one in of_server.server_sources(tmp_path)[1] if one.name == path.name)
    follower = LogFollower([source], {"k": sink}, party="server", name="n", state=None)
    for run in ("1", "2"):
        log.emit("run-failed", run=run, reason="a")
    follower.step()
    rewrite_events(path, lambda event: None if event["run"] == "1" else event)
    EventLog(path, study="s").emit("run-failed", run="3", reason="a")
    follower.step()
    assert [record["run"] for record in sink.records] == ["1", "2", "3"]


# --- nothing about a patient


def test_nothing_that_a_site_wrote_about_a_patient_is_in_a_line(tmp_path: Path) -> None:
    """A note, an error and a traceback in the worker's log, and a path of a daemon's log each name a patient."""
    path, key = tmp_path / "site-ledger.sqlite", create_signing_key(tmp_path / "key")
    chain = Chain.create(path, role="site", genesis={"site": "n"}, signing_key=key, clock=utc_now)
    append(chain, {"text": PATIENT})
    append(chain, json.loads(bodies("site")["patient"]) | {"text": PATIENT})  # a body that fits no kind
    chain.close()
    log, stamp = tmp_path / "worker.log", "2026-11-24 12:00:00,000"
    log.write_text(
        f"{stamp} WARNING client.worker event=refused part=Offer cause={PATIENT} case\n"
        f"{stamp} WARNING client.worker event=unheard-of case={PATIENT}\n"
        f"{stamp} ERROR client.worker {PATIENT} event=refused part=Offer cause=Refused\n"
        f"Traceback (most recent call last):\nValueError: {PATIENT}.nii.gz\n"
        f"{stamp} WARNING client.worker event=refused part=Offer cause=Refused\n"
    )
    (tmp_path / "daemons.jsonl").write_text(
        json.dumps(
            {
                "time": "2026-11-24T12:00:00.000+00:00",
                "event": "daemon-ended",
                "daemon": "worker n",
                "why": f"status 1: {PATIENT}",
                "said": PATIENT,
                "log": f"/data/{PATIENT}",
            }
        )
        + "\n"
    )
    sink = Kept()
    sources = [
        LedgerSource(path, role="site", read=of_site.read_row),
        LinesSource(log, read=lambda line: logged_event(line, of_site._LINES)),
        LinesSource(tmp_path / "daemons.jsonl", read=daemon_fact),
    ]
    send_all(sources, party="site", name="n", sink=sink)
    assert sink.events == ["ledger-begun", "note-written", "unreadable", "message-refused", "daemon-ended"]
    assert PATIENT not in json.dumps(sink.records)


def test_what_a_stranger_asks_the_gateway_for_cannot_forge_a_line() -> None:
    forged = "/x peer=192.0.2.1 more=0 reason=known"
    line = (
        "2026-11-24 12:00:00,000 WARNING server.operations.gateway "
        f"event=refused reason=unsigned path={forged} peer=198.51.100.7 more=3"
    )
    found = logged_event(line, of_server._LINES)
    assert found is not None
    assert found.facts == {"reason": "unsigned", "peer": "198.51.100.7", "more": 3}


def test_a_line_of_a_daemons_log_has_the_time_of_this_machine_in_utc() -> None:
    line = "2026-11-24 12:00:00,250 INFO client.worker event=codes batch=abc attempt=1 codes=4"
    found = logged_event(line, of_site._LINES)
    assert found is not None
    stated = datetime.fromtimestamp(datetime(2026, 11, 24, 12, 0, 0, 250_000).timestamp(), UTC)
    assert found.time == stated.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


# --- targets


def a_record(number: int = 1) -> dict[str, Any]:
    return log_record(FoundEvent("note-written", TIME, {}), party="site", name="n", source="ledger", position=number)


def test_a_file_is_rotated_whole_lines_at_a_time_and_so_many_are_kept(tmp_path: Path) -> None:
    sink = RotatedFile(tmp_path / "log" / "site.jsonl", max_bytes=600, kept=2)
    for number in range(1, 41):
        sink.send(a_record(number))
    files = sorted(path.name for path in (tmp_path / "log").iterdir())
    assert files == ["site.jsonl", "site.jsonl.1", "site.jsonl.2"]
    lines = [
        json.loads(line) for name in reversed(files) for line in (tmp_path / "log" / name).read_text().splitlines()
    ]
    assert [line["position"] for line in lines] == list(range(41 - len(lines), 41))
    assert all(path.stat().st_size <= 600 for path in (tmp_path / "log").iterdir())


@pytest.mark.parametrize("umask", [0o077, 0o022, 0])
def test_the_group_of_a_log_file_may_read_it_and_others_may_not_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    """The server's systemd unit has UMask=0077."""
    before = os.umask(umask)
    try:
        RotatedFile(tmp_path / "site.jsonl").send(a_record(1))
    finally:
        os.umask(before)
    assert (tmp_path / "site.jsonl").stat().st_mode & 0o777 == 0o640


def test_a_line_that_a_full_disk_cut_off_spoils_no_later_line(tmp_path: Path) -> None:
    path = tmp_path / "site.jsonl"
    sink = RotatedFile(path)
    sink.send(a_record(1))
    os.truncate(path, path.stat().st_size - 20)
    sink.send(a_record(2))
    assert json.loads(path.read_text().splitlines()[-1])["position"] == 2


@contextmanager
def datagrams(path: Path) -> Iterator[Callable[[], bytes]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as at:
        at.bind(str(path))
        at.settimeout(5)
        yield lambda: at.recv(1 << 16)


def test_the_journal_gets_fields_to_select_by_and_syslog_gets_its_own_form(tmp_path: Path) -> None:
    record = a_record()
    with datagrams(tmp_path / "j") as received:
        sinks.Journal(str(tmp_path / "j")).send(record)
        fields = dict(line.split("=", 1) for line in received().decode().splitlines())
    assert json.loads(fields.pop("MESSAGE")) == record
    assert fields["PRIORITY"] == "6"
    assert (fields["SYSLOG_IDENTIFIER"], fields["CONSILIUM_EVENT"]) == ("consilium", "note-written")
    with datagrams(tmp_path / "s") as received:
        sinks.LocalSyslog(str(tmp_path / "s")).send(record)
        head, _, text = received().decode().partition(": ")
    assert head.startswith("<86>consilium[")  # authpriv.info
    assert json.loads(text) == record


@pytest.mark.slow
def test_a_syslog_server_over_tcp_gets_rfc_5424_by_length_also_after_it_was_away() -> None:
    received: list[bytes] = []
    came = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = b""
            while (one := self.rfile.read(1)) not in (b" ", b""):
                length += one
            received.append(self.rfile.read(int(length)))
            came.set()  # the handler then closes the connection

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sink = open_sink(f"tcp://127.0.0.1:{server.server_address[1]}")
        for number in (1, 2):
            came.clear()
            sink.send(a_record(number))
            assert came.wait(600)
            threading.Event().wait(0.05)
        sink.close()
        server.shutdown()
    for number, text in enumerate(received, start=1):
        priority, stamp, _host, name, _pid, event, data, line = text.decode().split(" ", 7)
        assert (priority, stamp, name, event, data) == ("<86>1", TIME, "consilium", "note-written", "-")
        assert json.loads(line) == a_record(number)
    assert len(received) == 2


@pytest.mark.parametrize(
    "word",
    ["", "file:", "http://x:1", "udp://x", "tcp://:514", "tcp://x:0x1", "tcp://x:99999", "udp://a:1/b", "syslogd"],
)
def test_a_target_of_an_unknown_form_is_refused_with_the_known_forms(word: str) -> None:
    with pytest.raises(InvalidInput, match="journald"):
        open_sink(word)


def test_rows_both_ledgers_have_are_read_alike() -> None:
    for kind in ("genesis", "note", "key", "refusal"):
        body = bodies("server")[kind]
        record = parse_record("server", kind, body)
        assert shared_row(record) == of_server.read_row(record)
