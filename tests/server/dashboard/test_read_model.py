"""Tests that the dashboard states what ledger and log state, reads them as they grow and disturbs nobody."""

from __future__ import annotations

import shutil
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from common.events import EventLog, read_events
from common.privacy.mechanism import AccountantName
from common.wording import duration
from server.dashboard.ledger_fold import open_ledger
from server.dashboard.read_model import Follower
from server.dashboard.screens import environment
from server.dashboard.views.overview import overview
from server.dashboard.views.study import study_page
from server.ledger.server_ledger import Ledger
from server.study.status import study_status
from server.study.workspace import Workspace
from tests.dashboard_study import QUERIES, SITES, make_study_directory


def now() -> datetime:
    return datetime.now(UTC)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return make_study_directory(tmp_path_factory.mktemp("read-model"))


def copy(collected, to: Path) -> Workspace:
    """Return a copy of the study's directory that a test may change."""
    shutil.copytree(collected.workspace.root, to)
    return Workspace(to)


def told(collected, to: Path) -> tuple[Workspace, EventLog]:
    """Return a copy, and the event log to which a run would write."""
    workspace = copy(collected, to)
    return workspace, EventLog(workspace.events_file, study=workspace.study().id)


def followed(workspace: Workspace) -> Follower:
    follower = Follower(workspace)
    follower.poll()
    return follower


def test_an_empty_study_is_shown_as_one_that_has_spent_nothing(study):
    view = overview(followed(study.workspace), now=now())
    assert (view.answers, view.budget.epsilon, view.budget.share) == (0, 0, 0)
    assert view.budget.answers_left == QUERIES
    assert view.run.state == "none"
    assert [site.state for site in view.sites] == ["unseen"] * len(SITES)
    assert view.alarms == ()


def test_spending_is_the_ledgers_own_for_the_study_and_for_every_site(collected):
    view = overview(followed(collected.workspace), now=now())
    with Ledger.open(collected.workspace.ledger_file) as ledger:
        study = ledger.study_spending(collected.workspace.study().id).readings()
        pools = {pool.site: ledger.pool_spending(pool.pool).readings() for pool in ledger.pools()}
        head = ledger.head()
    assert view.answers == QUERIES
    assert view.budget.epsilon == study[AccountantName.EXACT].epsilon
    assert {reading.accountant: reading.epsilon for reading in view.budget.readings} == {
        str(name): one.epsilon for name, one in study.items()
    }
    assert {site.name: site.budget.epsilon for site in view.sites} == {
        name: found[AccountantName.EXACT].epsilon for name, found in pools.items()
    }
    assert view.budget.answers_left == 0
    assert (view.ledger.head, view.ledger.rows) == (head.hash, head.seq)


def test_the_curve_ends_at_the_ledgers_figures_and_accountants_keep_their_order(collected):
    curve = study_page(followed(collected.workspace)).curve
    with Ledger.open(collected.workspace.ledger_file) as ledger:
        spent = ledger.study_spending(collected.workspace.study().id).readings()
    assert [point.charges for point in curve] == list(range(1, QUERIES + 1))
    assert curve[-1].exact == spent[AccountantName.EXACT].epsilon
    assert curve[-1].rdp == spent[AccountantName.RDP].epsilon
    assert all(point.exact < point.rdp < point.paper for point in curve)
    assert all(float(point.exact_text) >= point.exact for point in curve)
    assert all(float(point.rdp_text) <= point.rdp * 1.001 for point in curve)
    assert [point.exact for point in curve] == sorted(point.exact for point in curve)


def test_rows_and_events_count_as_they_appear_and_none_twice(study, tmp_path):
    """Two reads give the same result as one read at the end."""
    follower = followed(study.workspace)
    assert follower.poll() is False
    before = follower.version
    study.collect()
    assert follower.poll() is True
    assert follower.version > before
    fresh = followed(study.workspace)
    moment = now()
    assert overview(follower, now=moment) == overview(fresh, now=moment)
    assert follower.events.lines == sum(1 for _ in read_events(study.workspace.events_file))
    assert {name: follower.events.sites[name].codes for name in SITES} == dict.fromkeys(SITES, QUERIES)


def test_sites_are_up_while_they_answer_and_late_when_they_are_quiet(collected, tmp_path):
    workspace = copy(collected, tmp_path / "study")
    follower = followed(workspace)
    assert {site.state for site in overview(follower, now=now()).sites} == {"spent"}  # as `study status` states
    events = EventLog(workspace.events_file, study=workspace.study().id)
    events.emit("reply-missing", batch="b", attempt=1, site="north", reason="deadline")
    events.emit("offer-answered", batch="b", site="east", accepted=False, reason="offline")
    events.emit("offer-answered", batch="b", site="south", accepted=False, reason="paused")
    follower.poll()
    view = overview(follower, now=now())
    states = {site.name: site.state for site in view.sites}
    assert (states["north"], states["east"], states["south"]) == ("late", "offline", "declined")
    assert any("east" in alarm.title for alarm in view.alarms)
    for _ in range(2):
        events.emit("reply-missing", batch="b", attempt=2, site="north", reason="deadline")
    follower.poll()
    assert overview(follower, now=now()).sites[1].state == "offline"


def test_a_site_that_paused_during_a_sum_is_shown_as_declined_and_as_seen_only_when_it_replied(collected, tmp_path):
    workspace, events = told(collected, tmp_path / "study")
    heard = {site.name: site.last_seen for site in overview(followed(workspace), now=now()).sites}
    for attempt in (1, 2, 3):
        events.emit("reply-missing", batch="b", attempt=attempt, site="east", reason="refused")
    events.emit("offer-answered", batch="c", site="east", accepted=False, reason="left-out")
    view = overview(followed(workspace), now=now())
    assert {site.name: site.last_seen for site in view.sites} == heard
    events.emit("offer-answered", batch="c", site="east", accepted=False, reason="paused")
    view = overview(followed(workspace), now=now())
    (east,) = (site for site in view.sites if site.name == "east")
    assert (east.state, east.last_seen != heard["east"]) == ("declined", True)
    assert not [alarm.title for alarm in view.alarms if alarm.name == "site-offline" and alarm.site == "east"]


def test_a_missed_offer_is_not_declined_and_a_stage_in_which_a_run_ended_does_not_wait(collected, tmp_path):
    workspace, events = told(collected, tmp_path / "study")
    events.emit("run-started", run="2", pid=1, resumed=False)
    events.emit("stage-started", stage="collect", total=8)
    events.emit("offer-answered", batch="b", site="east", accepted=False, reason="offline")
    events.emit("run-failed", run="2", reason="quorum")
    view = overview(followed(workspace), now=now())
    east = next(site for site in view.sites if site.name == "east")
    assert (east.declined, east.missed) == (0, 1)
    assert [stage.state for stage in view.run.stages] == ["cut", *["waiting"] * 4]


def test_the_refusals_of_the_study_page_and_of_the_sites_page_are_one_count(collected, tmp_path):
    """A batch that is offered again counts as another offer. A refused reply may hold several codes."""
    workspace, events = told(collected, tmp_path / "study")
    events.emit("run-started", run="2", pid=1, resumed=False)
    for reason in ("paused", "paused", "daily-cap", "deadline"):
        events.emit("offer-answered", batch="b", site="east", accepted=False, reason=reason)
    events.emit("code-refused", batch="b", site="east", query="q", reason="code-norm", codes=2)
    follower = followed(workspace)
    assert study_page(follower).declined == (
        ("east", "daily-cap", 1),
        ("east", "deadline", 1),
        ("east", "paused", 2),
    )
    east = next(site for site in overview(follower, now=now()).sites if site.name == "east")
    assert (east.declined, east.missed, east.codes_refused) == (3, 1, 2)
    assert study_status(workspace).sites["east"].refused == 2


def test_a_batch_without_an_answer_is_in_progress_only_while_a_run_is(collected, tmp_path):
    workspace, events = told(collected, tmp_path / "study")
    events.emit("run-started", run="2", pid=1, resumed=False)
    events.emit("offer-answered", batch="b", site="east", accepted=True, reason="accepted")
    follower = Follower(workspace)

    def outcome() -> str:
        follower.poll()
        facts = {"study": study_page(follower), "overview": overview(follower, now=now())}
        return environment().get_template("blocks/study_batches.html").render(facts)

    with workspace.locked():
        assert "in progress" in outcome()
    assert "in progress" not in outcome()
    events.emit("run-failed", run="2", reason="quorum")
    assert "not released" in outcome()


def test_every_fault_is_an_alarm_with_a_remedy(collected, tmp_path):
    workspace, events = told(collected, tmp_path / "study")
    events.emit("quorum-missed", batch="b", accepted=1, needed=3)
    said = ["left has 0.1 times the volume in the labels", "Ask sites."]
    events.emit("answers-weighed", surprise=9.0, expected=40, chance=0.001, volumes=["left 0.1"], warnings=said)
    events.emit("code-refused", batch="b", site="west", query="q", reason="code-norm", codes=1)
    events.emit("receipts-missing", site="north", reason="no-reply-or-refused")
    events.emit("run-failed", run="1", reason="quorum")
    view = overview(followed(workspace), now=now())
    said = " ".join(alarm.title for alarm in view.alarms)
    for words in (
        "Quorum missed: 1 site accepted, 3 are needed",
        "labels are implausible",
        "west: 1 code refused",
        "north holds no receipts",
        "failed: quorum",
    ):
        assert words in said
    assert all(alarm.remedy for alarm in view.alarms)
    assert [alarm.level for alarm in view.alarms] == sorted(
        (alarm.level for alarm in view.alarms), key=["critical", "warning", "info"].index
    )


def test_a_silent_run_raises_an_alarm_and_a_live_one_does_not(collected):
    with collected.workspace.locked():
        follower = followed(collected.workspace)
    quiet = [alarm.title for alarm in overview(follower, now=now()).alarms]
    assert not any("said nothing" in title for title in quiet)
    late = overview(follower, now=now() + timedelta(hours=2))
    assert any("nothing for 2 h" in alarm.title for alarm in late.alarms)


def test_a_run_whose_lock_is_free_has_died_however_far_it_got(collected, tmp_path):
    workspace, events = told(collected, tmp_path / "study")
    events.emit("stage-started", stage="student", total=100)
    events.emit("student-step", step=90, total=100, loss=0.5)
    follower = Follower(workspace)
    with workspace.locked():  # the kernel frees it when its process is killed
        follower.poll()
        assert overview(follower, now=now()).run.state == "running"
    assert follower.poll()
    view = overview(follower, now=now())
    assert (view.run.state, view.run.short) == ("died", "Run died")
    assert "consilium study resume" in view.run.words
    (student,) = (stage for stage in view.run.stages if stage.name == "student")
    assert (student.state, student.eta_s) == ("cut", None)
    assert "The run died" in [alarm.title for alarm in view.alarms if alarm.level == "critical"]


def test_a_run_that_a_person_stopped_is_shown_as_stopped_also_once_it_has_ended(collected, tmp_path):
    workspace = copy(collected, tmp_path / "study")
    events = EventLog(workspace.events_file, study=workspace.study().id)
    for event in ({"event": "stop-requested"}, {"event": "run-finished", "seconds": 3.0}):
        events.emit(event.pop("event"), run="1", **event)
    run = overview(followed(workspace), now=now()).run
    assert (run.state, run.short, run.ended is None) == ("stopped", "Run stopped", False)
    assert study_status(workspace).state == "stopped"


def test_one_cause_makes_one_banner_that_leaves_nothing_out(collected, tmp_path):
    workspace, events = told(collected, tmp_path / "study")
    events.emit("run-started", run="2", pid=1, resumed=True)
    for site in SITES[:2]:
        events.emit("offer-answered", batch="b", site=site, accepted=False, reason="offline")
    events.emit("quorum-missed", batch="b", accepted=2, needed=3)
    events.emit("run-failed", run="2", reason="no quorum; to fix: `consilium site status`")
    view = overview(followed(workspace), now=now())
    (banner,) = (one for one in view.banners if one.head.level == "critical")
    assert banner.head.name == "run-failed"
    assert {"quorum-missed", "site-offline"} <= {alarm.name for alarm in banner.also}
    assert "quorum-missed" in [one.kind for one in view.recent], "although two sites accepted"
    shown = [alarm for one in view.banners for alarm in (one.head, *one.also)]
    assert sorted(shown, key=repr) == sorted(view.alarms, key=repr)


def test_implausible_answers_raise_an_alarm_of_a_short_title_with_every_finding_beside_the_remedy(collected, tmp_path):
    workspace = copy(collected, tmp_path / "study")
    said = ["all answers together are larger than expected", "liver has 9 times its volume", "Ask sites."]
    weighed = {"surprise": 1.0, "expected": 9, "chance": 0.001, "volumes": [], "warnings": said}
    EventLog(workspace.events_file, study=workspace.study().id).emit("answers-weighed", **weighed)
    (alarm,) = (one for one in overview(followed(workspace), now=now()).alarms if one.name == "answers-implausible")
    assert alarm.title == "The answers or the labels are implausible"
    assert alarm.remedy == "all answers together are larger than expected; liver has 9 times its volume. Ask sites."


def test_a_stage_says_how_far_it_is_and_about_how_long_it_takes(collected, tmp_path):
    workspace = copy(collected, tmp_path / "study")
    start = datetime(2030, 1, 1, tzinfo=UTC)
    times = iter([start, start + timedelta(seconds=30)])
    events = EventLog(workspace.events_file, study=workspace.study().id, clock=lambda: next(times))
    events.emit("stage-started", stage="student", total=100)
    events.emit("student-step", step=25, total=100, loss=0.5)
    with workspace.locked():
        view = overview(followed(workspace), now=start + timedelta(seconds=30))
    stage = next(stage for stage in view.run.stages if stage.name == "student")
    assert (stage.state, stage.done, stage.total) == ("active", 25, 100)
    assert stage.eta_s == pytest.approx(90)


def test_a_changed_row_raises_an_alarm_and_the_rows_before_it_stay_shown(collected, tmp_path):
    workspace = copy(collected, tmp_path / "study")
    with sqlite3.connect(workspace.ledger_file) as connection:
        for name in ("rows", "heads"):
            for (trigger,) in connection.execute(
                "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = ?", (name,)
            ).fetchall():
                connection.execute(f"DROP TRIGGER {trigger}")
        connection.execute("UPDATE rows SET body = replace(body, 'batch', 'botch') WHERE seq = 9")
    connection.close()
    view = overview(followed(workspace), now=now())
    assert "row 9" in view.ledger.problem
    assert view.ledger.rows == 8
    assert view.alarms[0].level == "critical"
    assert "row 9" in view.alarms[0].title


def test_the_ledger_is_opened_for_reading_only_and_only_during_a_pass(collected):
    connection = open_ledger(collected.workspace.ledger_file)
    try:
        for pragma in ("ON", "OFF"):
            connection.execute(f"PRAGMA query_only = {pragma}")
            with pytest.raises(sqlite3.OperationalError, match="readonly database"):
                connection.execute("INSERT INTO heads VALUES (999, 'x', 'x', 'x')")
    finally:
        connection.close()


def test_reading_leaves_no_file_beside_a_ledger_that_nobody_has_open(collected, tmp_path):
    workspace = copy(collected, tmp_path / "study")
    sqlite3.connect(workspace.ledger_file).execute("PRAGMA wal_checkpoint(TRUNCATE)").connection.close()
    for suffix in ("-wal", "-shm"):
        Path(f"{workspace.ledger_file}{suffix}").unlink(missing_ok=True)
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in workspace.root.iterdir()}
    assert followed(workspace).ledger.rows > QUERIES
    after = {path.name: (path.stat().st_mtime_ns, path.stat().st_size) for path in workspace.root.iterdir()}
    assert after == before


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.42, "0.4 s"), (12.4, "12 s"), (59.96, "1 min"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (360000, "4 d 4 h")],
)
def test_durations_read_as_a_person_says_them(seconds, words):
    assert duration(seconds) == words
