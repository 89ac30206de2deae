"""Tests that pages work with hostile files where the dashboard reads, say what is wrong and claim nothing unknown."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sqlite3
import threading
import time
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from common.errors import InvalidInput
from common.events import EventLog
from common.ledger.rollback_guard import standing_path
from common.privacy.figures import epsilon_text
from server.dashboard.app import Options, create_app
from server.dashboard.ledger_fold import STANDING_MISSING
from server.dashboard.notify import FAILED, Webhook
from server.dashboard.read_model import Follower
from server.dashboard.reports import read_reports
from server.dashboard.rows import all_rows
from server.dashboard.tables import csv_lines, json_lines
from server.dashboard.views.alarms import Alarm
from server.dashboard.views.overview import overview
from server.ledger.backup import backup
from server.ledger.server_ledger import Ledger
from server.study.workspace import Workspace
from tests.dashboard_study import QUERIES, SITES
from tests.server.dashboard.conftest import PASSWORD, Clock, TestClient, looked_at
from tests.server.dashboard.hostile.files import LEDGERS, LINES, OLDER_COPY, REPORT, REPORTS, append_line
from tests.small_servers import http_server, serving

PAGES = ("/", "/study", "/sites", "/ledger", "/labels", "/student", "/studies", "/planner")
DATA = ("/api/overview", "/api/study", "/api/sites", "/metrics", *(f"/api/blocks{page}" for page in PAGES[1:]))


@pytest.fixture
def workspace(collected, tmp_path: Path) -> Workspace:
    """Return a copy of the study's directory that a test may damage."""
    shutil.copytree(collected.workspace.root, tmp_path / "study")
    return Workspace(tmp_path / "study")


def seen(workspace: Workspace, *, at: datetime | None = None):
    follower = Follower(workspace)
    follower.poll()
    reports = read_reports(workspace.root / "site-reports")
    return overview(follower, now=at or datetime.now(UTC), reports=reports)


def names(view) -> set[str]:
    return {alarm.name for alarm in view.alarms}


@pytest.mark.parametrize("what", REPORTS)
def test_a_bad_report_is_set_aside_and_named_and_the_others_are_read(tmp_path, what):
    (tmp_path / "east.json").write_text(json.dumps({**REPORT, "site": "east"}))
    REPORTS[what](tmp_path / "north.json")
    found = read_reports(tmp_path)
    assert found["east"].problem == ""
    assert found["east"].spent_epsilon == 4.0
    if what != "200,000 alarms":  # too large a file
        assert "north.json is set aside" in found["north"].problem
    assert found["north"].problem
    assert found["north"].spent_epsilon is None
    assert sum(len(alarm) for alarm in found["north"].alarms) < 10_000
    assert set(found) == {"east", "north"}


def test_a_report_names_a_few_alarms_and_how_many_more(tmp_path):
    (tmp_path / "north.json").write_text(json.dumps({**REPORT, "alarms": [f"alarm {n}" for n in range(500)]}))
    assert len(read_reports(tmp_path)["north"].alarms) == 21
    assert read_reports(tmp_path)["north"].alarms[-1] == "and 480 more"


@pytest.mark.parametrize("what", LINES)
def test_a_line_that_is_no_event_is_set_aside_and_what_follows_counts(workspace, what):
    before = seen(workspace)
    assert "event-log-damaged" not in names(before)
    append_line(workspace, LINES[what])
    EventLog(workspace.events_file, study=workspace.study().id).emit("run-failed", run="1", reason="quorum")
    view = seen(workspace)
    assert "event-log-damaged" in names(view)
    assert view.run.state == "failed"
    assert [site.codes for site in view.sites] == [site.codes for site in before.sites]


def test_an_event_log_that_is_no_file_is_told(workspace):
    workspace.events_file.unlink()
    workspace.events_file.mkdir()
    assert "event-log-damaged" in names(seen(workspace))


@pytest.mark.parametrize("what", LEDGERS)
def test_no_answer_is_promised_from_a_ledger_that_does_not_hold(workspace, what):
    for suffix in ("-wal", "-shm"):
        Path(f"{workspace.ledger_file}{suffix}").unlink(missing_ok=True)
    LEDGERS[what](workspace.ledger_file)
    view = seen(workspace)
    assert "ledger-broken" in names(view)
    for budget in (view.budget, *(site.budget for site in view.sites if site.budget)):
        assert budget.answers_left == 0
        assert budget.words.startswith("at least ε")
        assert "not known" in budget.words
        assert budget.doubt


def test_a_ledger_that_is_cut_while_it_is_followed_stays_an_alarm(workspace):
    follower = Follower(workspace)
    follower.poll()
    LEDGERS["a row gone"](workspace.ledger_file)
    OLDER_COPY(workspace.ledger_file)
    for _ in range(2):
        follower.poll()
        view = overview(follower, now=datetime.now(UTC))
        assert "ledger-cut" in names(view)
        assert all("`consilium study stop`" in one.remedy for one in view.alarms if "Stop the run" in one.remedy)
        assert view.budget.answers_left == 0
        assert "cut" in view.budget.doubt


def test_an_older_copy_put_in_the_ledgers_place_is_an_alarm_and_its_figures_are_in_doubt(workspace, tmp_path):
    assert names(seen(workspace)).isdisjoint({"ledger-older", "standing-unread"})
    with Ledger.open(workspace.ledger_file) as ledger:
        newest = ledger.row_count
    backup(workspace.ledger_file, tmp_path / "newest.sqlite")
    OLDER_COPY(workspace.ledger_file)
    follower = Follower(workspace)
    follower.poll()
    view = overview(follower, now=datetime.now(UTC))
    (alarm,) = (alarm for alarm in view.alarms if alarm.name == "ledger-older")
    assert alarm.level == "critical"
    assert re.search(rf"row 8 .*row {newest}\b.*standing file", alarm.title)
    assert "consilium ledger recover" in alarm.remedy
    assert view.budget.answers_left == 0
    assert "names a row" in view.budget.doubt
    shutil.copy(tmp_path / "newest.sqlite", workspace.ledger_file)
    follower.poll()
    assert "ledger-older" not in names(overview(follower, now=datetime.now(UTC)))


def test_a_bundle_s_guarantee_is_called_unknown_and_not_over_if_the_ledger_s_standing_is_missing(workspace, state):
    """The standing is missing, for example, in an unpacked archive, although nothing is wrong with it."""
    folder = workspace.bundle_dir / "configs"
    folder.mkdir(parents=True, exist_ok=True)
    stated = {"budget_epsilon": 8, "epsilon": 8, "guarantee": "of before", "spent": "of before"}
    (folder / "privacy.json").write_text(json.dumps(stated))
    standing_path(workspace.ledger_file).unlink()
    with TestClient(create_app(Options(study=workspace.root, state=state)), base_url="http://localhost") as client:
        client.post("/login", data={"name": "ada", "password": PASSWORD})
        text = client.get("/student").text
    assert ">not known</span>" in text
    assert "no longer" not in text


@pytest.mark.parametrize("what", ["a directory", "brackets", "dangling link", "link to itself", "nothing", "no utf-8"])
def test_a_standing_that_cannot_be_read_is_an_alarm_and_a_doubt_about_every_figure(workspace, what):
    before = seen(workspace).budget
    kept = standing_path(workspace.ledger_file)
    kept.unlink()
    REPORTS[what](kept)
    view = seen(workspace)
    assert "standing-unread" in names(view)
    assert view.budget.words.startswith("at least ε")
    assert "cannot be read" in view.budget.doubt
    assert view.budget.epsilon == before.epsilon


def test_a_ledger_whose_standing_is_missing_is_an_alarm_and_its_figures_are_in_doubt(workspace):
    """The ledger may be a backup copy, which has no standing."""
    standing_path(workspace.ledger_file).unlink()
    view = seen(workspace)
    (alarm,) = (alarm for alarm in view.alarms if alarm.name == "ledger-older")
    assert STANDING_MISSING in alarm.title
    assert "If this is an unpacked archive" in alarm.remedy, "`study archive` leaves the standing out"
    assert view.budget.words.startswith("at least ε")
    assert view.budget.guaranteed is None
    assert "is missing" in view.budget.doubt


def test_every_page_answers_with_all_hostile_files_in_place_at_once(workspace, state):
    (workspace.root / "site-reports").mkdir()
    for number, lay in enumerate(REPORTS.values()):
        lay(workspace.root / "site-reports" / f"site-{number}.json")
    for line in LINES.values():
        append_line(workspace, line)
    LEDGERS["a body of brackets"](workspace.ledger_file)
    (state / "decisions.jsonl").write_text('{"seq": 1}\n')
    with TestClient(create_app(Options(study=workspace.root, state=state)), base_url="http://localhost") as client:
        client.post("/login", data={"name": "ada", "password": PASSWORD})
        while client.get("/api/overview").json()["ledger"]["problem"] is None:
            pass
        for path in (*PAGES, "/ledger/9", *DATA, "/api/ledger/rows/9", "/api/ledger"):
            answer = client.get(path)
            assert answer.status_code == 200, (path, answer.text)
            assert len(answer.content) < 300_000, path
        text = client.get("/").text
        assert "is set aside" in text
        assert "log is damaged" in text
        assert "at least" in text
        assert "not known" in text
        assert client.get("/healthz").status_code == 503
        left = [
            line for line in client.get("/metrics").text.splitlines() if line.startswith("pate_privacy_answers_left")
        ]
        assert [line.split()[-1] for line in left] == ["0.0"] * len(SITES)


def test_a_failed_pass_is_reported_and_the_next_one_follows(collected, monkeypatch):
    follower = Follower(collected.workspace)
    broken = threading.Event()
    broken.set()

    def read_small() -> bool:
        if broken.is_set():
            raise RuntimeError
        return False

    monkeypatch.setattr(follower, "_read_small", read_small)
    follower.start(every_s=0.01)
    try:
        for state in (True, False):
            while (follower.problem is not None) is not state:
                pass
            broken.clear()
        while follower.ledger.rows == 0:
            pass
    finally:
        follower.stop()


# --- alarms


def emit(workspace: Workspace, *events: tuple[str, dict]) -> None:
    log = EventLog(workspace.events_file, study=workspace.study().id)
    for name, facts in events:
        log.emit(name, **facts)


def test_a_site_that_holds_what_the_ledger_lacks_is_a_critical_alarm_until_it_accepts_again(workspace):
    emit(
        workspace,
        ("ledger-contradicted", {"site": "north", "ledger_row": 11}),
        ("offer-answered", {"batch": "b", "site": "north", "accepted": False, "reason": "ledger-contradicted"}),
    )
    view = seen(workspace)
    (alarm,) = (alarm for alarm in view.alarms if alarm.name == "ledger-contradicted")
    assert (alarm.level, alarm.site) == ("critical", "north")
    assert "row 11" in alarm.title
    assert "recover" in alarm.remedy
    assert "or the statement is false" in alarm.remedy
    accepted = {"batch": "c", "site": "north", "accepted": True, "reason": "accepted"}
    emit(workspace, ("offer-answered", accepted))
    assert "ledger-contradicted" not in names(seen(workspace))


@pytest.fixture
def open_study(study_half_way: Workspace, tmp_path: Path) -> Workspace:
    """Return a study that still wants answers."""
    shutil.copytree(study_half_way.root, tmp_path / "open")
    return Workspace(tmp_path / "open")


@pytest.fixture(scope="session")
def study_half_way(tmp_path_factory) -> Workspace:
    from tests.dashboard_study import make_study_directory

    return make_study_directory(tmp_path_factory.mktemp("open")).workspace


@pytest.mark.parametrize(
    ("reason", "name", "level"),
    [
        ("paused", "site-alarm", "warning"),
        ("withdrawn", "site-alarm", "warning"),
        ("left-out", "site-offline", "warning"),
        ("unknown-study", "site-declined", "warning"),
        ("wrong-codec", "site-declined", "warning"),
        ("a word of tomorrow", "site-declined", "warning"),
        ("offline", "site-offline", "warning"),
    ],
)
def test_a_declined_offer_is_an_alarm_with_its_reason(open_study, reason, name, level):
    emit(open_study, ("offer-answered", {"batch": "b", "site": "north", "accepted": False, "reason": reason}))
    (alarm,) = (alarm for alarm in seen(open_study).alarms if alarm.site == "north")
    assert (alarm.name, alarm.level) == (name, level)
    assert alarm.remedy


def test_a_quorum_that_depends_on_one_more_site_is_reported_before_it_is_missed(open_study):
    def away(site: str) -> tuple[str, dict]:
        return ("offer-answered", {"batch": "b", "site": site, "accepted": False, "reason": "offline"})

    assert "quorum-at-risk" not in names(seen(open_study))
    for site, level in (("north", "warning"), ("east", "critical")):  # 3 of 4 are needed
        emit(open_study, away(site))
        (alarm,) = (alarm for alarm in seen(open_study).alarms if alarm.name == "quorum-at-risk")
        assert alarm.level == level
        assert site in alarm.title


def test_a_site_that_delays_the_run_is_named_with_how_often_how_long_and_the_factor(open_study):
    assert "site-slow" not in names(seen(open_study))
    emit(open_study, ("run-started", {"run": "1", "pid": 1, "resumed": False}))
    for number in range(3):
        slow = {"batch": str(number), "site": "north", "seconds": 1_150.0 + number, "usual_seconds": 25.0}
        emit(open_study, ("site-slow", slow))
    view = seen(open_study)
    (alarm,) = (alarm for alarm in view.alarms if alarm.name == "site-slow")
    assert (alarm.level, alarm.site) == ("warning", "north")
    assert "3 batches" in alarm.title
    assert "19 min 12 s, 46 times the others' median of 25 s" in alarm.title
    assert "provision revoke" in alarm.remedy
    assert [site.name for site in view.sites if site.slow] == ["north"]
    emit(open_study, ("run-started", {"run": "2", "pid": 1, "resumed": True}))
    assert "site-slow" not in names(seen(open_study)), "the newest run has not waited"


def test_the_site_whose_codes_a_run_waits_for_is_shown_with_how_long(open_study):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    log = EventLog(open_study.events_file, study=open_study.study().id, clock=lambda: start)
    log.emit("run-started", run="1", pid=1, resumed=False)
    log.emit("stage-started", stage="collect", total=8)
    for site in ("north", "south"):
        log.emit("offer-answered", batch="b", site=site, accepted=True, reason="accepted")
    log.emit("batch-dispatched", batch="b", attempt=1, sites=2, queries=1, asked=["north", "south"])
    log.emit("reply-received", batch="b", attempt=1, site="south", codes=1, seconds=1.0)
    with open_study.locked():  # a run is at work
        words = {site.name: site.words for site in seen(open_study, at=start + timedelta(minutes=7)).sites}
    assert words["north"] == "the run has waited 7 min for its codes"
    assert "waited" not in words["south"]


def test_a_site_unheard_for_long_raises_an_alarm_while_others_are_heard(open_study):
    start = datetime(2026, 1, 1, tzinfo=UTC)
    times = iter([start, start, start + timedelta(hours=3)])
    log = EventLog(open_study.events_file, study=open_study.study().id, clock=lambda: next(times))
    log.emit("run-started", run="1", pid=1, resumed=False)
    for site in ("north", "south"):
        log.emit("reply-received", batch="b", attempt=1, site=site, codes=1, seconds=1.0)
    away = {alarm.site for alarm in seen(open_study, at=start + timedelta(hours=4)).alarms if alarm.name == "site-away"}
    assert away == {"north", "east", "west"}


def test_alarms_are_in_the_metrics_by_name(workspace, state):
    emit(workspace, ("ledger-contradicted", {"site": "north", "ledger_row": 11}))
    options = Options(study=workspace.root, state=state, metrics_token="m" * 20)
    wanted, text = 'pate_alarm{level="critical",name="ledger-contradicted",site="north"} 1.0', ""
    with TestClient(create_app(options), base_url="http://localhost") as client:
        for _ in range(500):  # other alarms are there before the events have been read
            text = client.get("/metrics", headers={"authorization": "Bearer " + "m" * 20}).text
            if wanted in text:
                break
            time.sleep(0.02)
    assert wanted in text


# --- the webhook


class _Hook(BaseHTTPRequestHandler):
    got: list[bytes]
    status = 204

    def do_POST(self) -> None:
        self.got.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(self.status)
        self.send_header("location", "http://127.0.0.1:1/elsewhere")
        self.end_headers()


@pytest.fixture
def hook():
    handler = type("Hook", (_Hook,), {"got": []})
    with serving(http_server(handler)) as server:
        yield handler, f"http://127.0.0.1:{server.server_port}/secret-path"


def test_the_webhook_gets_names_of_alarms_as_they_begin_and_end_and_nothing_else(hook):
    handler, url = hook
    clock = Clock()
    webhook = Webhook(url, study="trial", clock=clock)
    alarm = Alarm("site-offline", "warning", "north was not connected", "Ask.", "north")
    webhook.tell([])
    webhook.tell([alarm])
    webhook.tell([alarm, FAILED])
    webhook.tell([])
    told = [json.loads(body) for body in handler.got]
    named = [{"name": "site-offline", "level": "warning"}]
    assert told == [
        {"study": "trial", "began": named, "ended": [], "standing": 1},
        {"study": "trial", "began": [], "ended": named, "standing": 0},
    ]
    assert "north" not in str(handler.got)


@pytest.mark.parametrize("status", [500, 302])
def test_a_message_that_the_webhook_refuses_is_sent_again_and_to_no_other_address(hook, status):
    handler, url = hook
    clock = Clock()
    webhook = Webhook(url, study="trial", clock=clock)
    handler.status = status
    alarm = Alarm("site-offline", "warning", "north was not connected", "Ask.", "north")
    webhook.tell([alarm])
    assert webhook.failing
    webhook.tell([alarm])
    assert len(handler.got) == 1
    handler.status, clock.now = 204, clock.now + 61
    webhook.tell([alarm])
    assert len(handler.got) == 2
    assert not webhook.failing


@pytest.mark.parametrize("url", ["http://example.org/x", "ftp://localhost/x", "file:///etc/passwd", "x", "https://"])
def test_alarms_cross_no_network_in_the_clear(url):
    with pytest.raises(InvalidInput, match="alarm-webhook") as refused:
        Webhook(url, study="trial", clock=Clock())
    assert "secret" not in str(refused.value)


def test_all_answers_are_in_the_hostile_study(workspace):
    assert seen(workspace).answers == QUERIES


def test_while_the_ledger_is_in_doubt_figures_of_spending_are_lower_bounds_and_nothing_is_guaranteed(workspace, state):
    LEDGERS["a row changed"](workspace.ledger_file)
    with TestClient(create_app(Options(study=workspace.root, state=state)), base_url="http://localhost") as client:
        client.post("/login", data={"name": "ada", "password": PASSWORD})
        while client.get("/api/overview").json()["ledger"]["problem"] is None:
            pass
        spent = epsilon_text(client.get("/api/overview").json()["budget"]["epsilon"])
        for path in ("/", "/sites", "/studies", "/study"):
            main = client.get(path).text.partition("<main")[2]
            text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", main))
            before = re.split(rf"ε {re.escape(spent)}\b", text)[:-1]
            assert before, path
            assert all(words.rstrip().endswith("at least") for words in before), path
            assert "still asked" not in text, path
        assert "ε spent, at least" in text
        assert "gate, guaranteed" not in text
        assert "is a lower bound" in text
        assert "every query fitted" not in text
        assert "in progress" not in text


def test_characters_that_are_not_seen_or_turn_others_around_are_shown_by_number_on_every_page(workspace, state):
    """Such characters stand in an event, a site's report and a decision's note. A reader must see all text in order."""
    hidden = "\u202e\u2066\u200b\u2028\x1b\x85"
    fields = {"batch": hidden, "site": f"north{hidden}", "accepted": False, "reason": f"good {hidden} day"}
    event = {"schema": 1, "seq": 9, "time": datetime.now(UTC).isoformat(), "study": "s", "event": "offer-answered"}
    with workspace.events_file.open("a") as log:
        log.write(json.dumps(event | fields) + "\n")
    workspace.reports_dir.mkdir(exist_ok=True)
    (workspace.reports_dir / "north.json").write_text(json.dumps({**REPORT, "version": hidden, "alarms": [hidden]}))
    with looked_at(Options(study=workspace.root, state=state)) as client:
        for path in ("/", "/study", "/sites"):
            text = client.get(path).text
            assert "\\u202e\\u2066\\u200b\\u2028\\u001b\\u0085" in text, path
            assert not set(hidden) & set(text), path


@pytest.mark.parametrize("what", LEDGERS)
def test_invalid_rows_come_with_the_others_in_both_tables(workspace, what):
    """This holds for files that open as a database. Others are refused, and nothing is sent."""
    LEDGERS[what](workspace.ledger_file)
    try:
        rows = list(all_rows(workspace.ledger_file, kind=None, text=""))
    except (sqlite3.Error, InvalidInput):
        return
    told = json.loads("".join(json_lines(rows)))
    assert len(told) == len(rows) == len(list(csv.reader(csv_lines((), rows)))) - 1
    assert all(type(row["body"]) is dict for row in told)


@pytest.mark.parametrize("what", ["brackets", "a pipe", "a device", "no utf-8", "a directory", "nothing"])
def test_pages_stand_over_any_file_of_the_study_and_of_their_own_that_is_none(workspace, state, what):
    """Each page answers without an internal error and names the file that cannot be read."""
    report = {"study": {"id": workspace.study().id}, "student": {"dice": {"mean": 10**400}}, "controls": {}}
    (workspace.root / "report.json").write_text(json.dumps(report))
    with looked_at(Options(study=workspace.root, state=state)) as client:
        for name in ("public.json", "codec.json", "sites.json", "report.json"):
            (workspace.root / name).unlink(missing_ok=True)
            REPORTS[what](workspace.root / name)
        REPORTS[what](state / "decisions.jsonl")
        for path in (*PAGES, *DATA):
            answer = client.get(path)
            assert answer.status_code in (200, 400), (path, answer.text)
        assert client.get("/").status_code == 200
        (state / "users.json").unlink()
        REPORTS[what](state / "users.json")
        assert client.get("/healthz").json()["users_readable"] is False
        assert client.post("/login", data={"name": "ada", "password": PASSWORD}).status_code == 400
