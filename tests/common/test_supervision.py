"""Tests that daemons that end are started again after growing pauses, with real processes and a fake clock."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from common.errors import DaemonFailed
from common.process import DaemonSpec, ProcessGroup, base_env
from common.sockets import free_port
from common.supervision import (
    ASK_S,
    FACTS,
    LOG_MAX_BYTES,
    AnswerWatch,
    KeptRunning,
    Supervisor,
    deliberate,
    heartbeat,
    json_report,
    keep_running,
    keeping,
    last_words,
    standings,
    unrecorded,
)
from tests.waiting import until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ends processes by signals")


class World:
    """Holds a supervisor with a clock that moves only when the test moves it."""

    def __init__(self, group: ProcessGroup, folder: Path) -> None:
        self.group, self.folder, self.now = group, folder, 0.0
        self.facts: list[tuple[str, dict]] = []

    def spec(self, code: str, *, name: str = "one", ready: Callable[[], bool] | None = None) -> DaemonSpec:
        return DaemonSpec(
            role=name,
            name=name,
            argv=(sys.executable, "-S", "-c", code),
            env=base_env(),
            cwd=self.folder,
            log=self.folder / f"{name}.log",
            ready=ready,
            ready_timeout_s=5.0,
        )

    def supervisor(self, *kept: KeptRunning) -> Supervisor:
        report = lambda event, **facts: self.facts.append((event, facts))  # noqa: E731
        return Supervisor(self.group, kept, report=report, clock=lambda: self.now)

    def of(self, event: str) -> list[dict]:
        return [facts for name, facts in self.facts if name == event]

    def until(self, supervisor: Supervisor, done: Callable[[], bool]) -> None:
        until(lambda: done() or supervisor.step(), lambda: self.facts, pause_s=0.02)


@pytest.fixture
def world(tmp_path: Path):
    with ProcessGroup() as group:
        yield World(group, tmp_path)


SLEEP = "import time; time.sleep(600)"


def test_a_killed_daemon_comes_back_after_its_wait_and_not_before(world: World) -> None:
    supervisor = world.supervisor(KeptRunning(spec=lambda: world.spec(SLEEP), after_kill_s=45.0))
    supervisor.step()
    world.now = 1.0
    supervisor.step()
    assert supervisor.ready
    first = world.group.daemons[0].pid
    os.kill(first, signal.SIGKILL)
    world.until(supervisor, lambda: bool(world.of("daemon-ended")))
    assert world.of("daemon-ended")[0]["why"] == "signal 9"
    assert world.of("daemon-ended")[0]["again_in_s"] == 45.0
    world.now = 45.9
    supervisor.step()
    assert len(world.of("daemon-started")) == 1
    world.now = 46.1
    supervisor.step()
    assert len(world.of("daemon-started")) == 2
    assert world.group.daemons[0].pid != first


@pytest.mark.slow
def test_waits_double_up_to_a_minute_and_start_over_after_a_steady_time(world: World) -> None:
    code = "import os, sys, time\nif os.path.exists('steady'): time.sleep(600)\nsys.exit(3)"
    supervisor = world.supervisor(KeptRunning(spec=lambda: world.spec(code), first_s=5.0))
    for number in range(1, 7):
        world.until(supervisor, lambda number=number: len(world.of("daemon-ended")) == number)
        world.now += 60.0
    assert [facts["again_in_s"] for facts in world.of("daemon-ended")] == [5, 10, 20, 40, 60, 60]
    assert {facts["why"] for facts in world.of("daemon-ended")} == {"status 3"}
    (world.folder / "steady").touch()
    supervisor.step()
    world.now += 1.0
    supervisor.step()
    assert supervisor.ready
    world.now += 121.0
    supervisor.step()
    (world.folder / "steady").unlink()
    world.group.daemons[0].stop(grace_s=0.0)
    world.until(supervisor, lambda: len(world.of("daemon-ended")) == 7)
    assert world.of("daemon-ended")[-1]["again_in_s"] == 5


def test_a_daemon_that_never_gets_ready_is_stopped_and_tried_again(world: World) -> None:
    supervisor = world.supervisor(KeptRunning(spec=lambda: world.spec(SLEEP, ready=lambda: False)))
    supervisor.step()
    pid = world.group.daemons[0].pid
    world.now = 6.0
    supervisor.step()
    assert world.of("daemon-ended")[0]["why"] == "not ready after 5 s"
    assert not Path(f"/proc/{pid}").exists()
    assert not supervisor.ready


def test_the_first_time_they_start_in_order_and_later_each_by_itself(world: World) -> None:
    up = world.folder / "up"
    supervisor = world.supervisor(
        KeptRunning(spec=lambda: world.spec(SLEEP, name="first", ready=up.exists)),
        KeptRunning(spec=lambda: world.spec(SLEEP, name="second")),
    )
    supervisor.step()
    supervisor.step()
    assert [facts["daemon"] for facts in world.of("daemon-started")] == ["first"]
    up.touch()
    supervisor.step()
    world.now = 1.0
    supervisor.step()
    assert supervisor.ready
    up.unlink()
    for daemon in world.group.daemons:
        os.kill(daemon.pid, signal.SIGKILL)
    world.until(supervisor, lambda: len(world.of("daemon-ended")) == 2)
    world.now = 100.0
    supervisor.step()
    assert [facts["daemon"] for facts in world.of("daemon-started")][2:] == ["first", "second"]


def test_a_ready_daemon_that_loses_its_server_is_shown_offline_until_it_is_back(world: World) -> None:
    why = ["no heartbeat since noon"]
    supervisor = world.supervisor(KeptRunning(spec=lambda: world.spec(SLEEP), offline=lambda: why[0]))
    supervisor.step()
    world.now = 1.0
    supervisor.step()
    supervisor.step()
    assert world.of("daemon-offline") == [{"daemon": "one", "pid": world.group.daemons[0].pid, "why": why[0]}]
    for _ in range(3):
        supervisor.step()
    assert len(world.of("daemon-offline")) == 1  # logged once
    why[0] = ""
    supervisor.step()
    supervisor.step()
    assert len(world.of("daemon-ready")) == 2


def test_a_daemon_that_stays_offline_is_restarted(world: World) -> None:
    kept = KeptRunning(spec=lambda: world.spec(SLEEP), offline=lambda: "no heartbeat", offline_s=1800.0)
    supervisor = world.supervisor(kept)
    supervisor.step()
    world.now = 1.0
    supervisor.step()
    supervisor.step()
    pid = world.group.daemons[0].pid
    world.now += 1799.0
    supervisor.step()
    assert world.of("daemon-ended") == []
    world.now += 2.0
    supervisor.step()
    assert [facts["why"] for facts in world.of("daemon-ended")] == ["offline for 1800 s"]
    assert not Path(f"/proc/{pid}").exists()


ANSWERS = """
import socket
with socket.create_server(("127.0.0.1", {port})) as door:
    while True:
        there, _ = door.accept()
        there.sendall(b"x")
        there.close()
"""


@pytest.mark.slow
def test_a_frozen_daemon_is_offline_after_a_minute_without_an_answer_and_back_when_it_answers(world: World) -> None:
    port = free_port()

    patience_s = 5.0

    def answers() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), patience_s) as there:
            return there.recv(1) == b"x"
        return False

    watch = AnswerWatch("the gateway has not answered", answers, remedy="restart it", clock=lambda: world.now)
    spec = lambda: replace(world.spec(ANSWERS.format(port=port), ready=watch.ask), ready_timeout_s=1e9)  # noqa: E731
    supervisor = world.supervisor(KeptRunning(spec=spec, offline=watch))
    world.until(supervisor, lambda: supervisor.ready)

    def later(seconds: float) -> list[dict]:
        world.now += seconds
        supervisor.step()
        return world.of("daemon-offline")

    for count, end in enumerate((signal.SIGCONT, signal.SIGKILL)):
        pid, ready = world.group.daemons[0].pid, len(world.of("daemon-ready"))
        assert watch.ask()
        os.kill(pid, signal.SIGSTOP)
        patience_s = 0.05  # a frozen daemon never answers
        assert [len(later(ASK_S)) for _ in range(5)] == [count] * 5
        assert [len(later(ASK_S)) for _ in range(2)] == [count + 1] * 2
        patience_s = 5.0
        assert world.of("daemon-offline")[-1]["why"].startswith("the gateway ")
        assert world.of("daemon-offline")[-1]["why"].endswith("; to fix: restart it")
        os.kill(pid, end)
        world.until(supervisor, lambda ready=ready: len(later(1.0)) > 0 and len(world.of("daemon-ready")) > ready)
        assert len(later(1.0)) == count + 1


def test_one_older_log_is_kept(world: World) -> None:
    log = world.folder / "one.log"
    log.write_bytes(b"x" * (LOG_MAX_BYTES + 1))
    world.supervisor(KeptRunning(spec=lambda: world.spec(SLEEP))).step()
    assert log.stat().st_size == 0
    assert log.with_name("one.log.1").stat().st_size == LOG_MAX_BYTES + 1


def test_facts_are_lines_of_json_and_survive_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = json_report(tmp_path / "daemons.jsonl")
    report("daemon-started", daemon="worker", pid=7)
    (line,) = (tmp_path / "daemons.jsonl").read_text().splitlines()
    assert json.loads(line) | {"time": ""} == {"time": "", "event": "daemon-started", "daemon": "worker", "pid": 7}
    json_report(tmp_path / "daemons.jsonl" / "below-a-file")("stopped")
    assert json.loads(capsys.readouterr().err.splitlines()[-1])["event"] == "stopped"


@pytest.mark.slow
def test_sigterm_ends_everything_and_is_no_failure(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from common.process import DaemonSpec, ProcessGroup, base_env
from common.supervision import KeptRunning, Supervisor, json_report
root = Path({str(tmp_path)!r})
argv = (sys.executable, "-S", "-c", {SLEEP!r})
spec = DaemonSpec(role="one", name="one", argv=argv, env=base_env(), cwd=root, log=root / "log")
with ProcessGroup() as group:
    try:
        report = json_report(root / "facts")
        Supervisor(group, [KeptRunning(spec=lambda: spec)], report=report).run(on_ready=(root / "up").touch)
    except KeyboardInterrupt:
        pass
"""
    with subprocess.Popen([sys.executable, "-c", code], cwd=Path(__file__).parents[2]) as process:
        until((tmp_path / "up").exists)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0
    pid = json.loads((tmp_path / "facts").read_text().splitlines()[0])["pid"]
    assert not Path(f"/proc/{pid}").exists()


def test_where_a_folder_was_moved_away_nothing_is_made_and_its_daemon_starts_again_once_it_is_back(
    world: World, tmp_path: Path
) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    spec = replace(world.spec("", ready=lambda: True), cwd=site / "work", log=site / "logs" / "one.log")
    supervisor = world.supervisor(KeptRunning(spec=lambda: spec))
    world.until(supervisor, lambda: bool(world.of("daemon-ended")))
    site.rename(elsewhere)
    world.now += 2.0
    supervisor.step()
    assert world.of("daemon-ended")[-1]["why"] == f"the folder {site} is gone; to fix: put it back"
    json_report(site / "logs" / "facts")("event")
    assert not site.exists()
    elsewhere.rename(site)
    world.now += 100.0
    supervisor.step()
    assert len(world.of("daemon-started")) == 2


def test_a_daemon_whose_port_is_taken_is_not_started_and_nothing_is_ready(world: World) -> None:
    taken = ["cannot listen on 0.0.0.0:8443: another program has it; to fix: end that program"]
    told: list[str] = []
    supervisor = world.supervisor(
        KeptRunning(spec=lambda: world.spec(SLEEP, ready=lambda: True), obstacle=lambda: taken[0] if taken else "")
    )
    for _ in range(3):
        supervisor.step()
        world.now += 0.1
    assert not supervisor.ready
    assert world.of("daemon-started") == told
    (ended,) = world.of("daemon-ended")
    assert ended["why"] == taken[0]
    assert "said" not in ended  # it never started, so its log is of an earlier start
    taken.clear()
    world.now = 2.0
    supervisor.step()
    supervisor.step()
    assert supervisor.ready


@pytest.mark.slow
def test_what_a_daemon_said_last_is_in_the_line_and_of_a_site_only_its_own_error(world: World) -> None:
    own, other = "print('error: no room; to fix: make room'); print('bye')", "print('Error in the case of Mrs X')"
    cases = (("server", own, last_words), ("site", own, deliberate), ("silent", other, deliberate))
    for name, code, explain in cases:
        code = f"import sys; {code}; sys.exit(3)"
        kept = KeptRunning(spec=lambda name=name, code=code: world.spec(code, name=name), explain=explain)
        supervisor = world.supervisor(kept)
        world.until(supervisor, lambda name=name: any(f["daemon"] == name for f in world.of("daemon-ended")))
    *quoted, silent = world.of("daemon-ended")
    assert [facts["said"] for facts in quoted] == ["error: no room; to fix: make room"] * 2
    assert "said" not in silent


def test_an_error_of_an_earlier_start_is_not_quoted_for_this_one(world: World) -> None:
    (world.folder / "one.log").write_text("error: of yesterday\n")
    supervisor = world.supervisor(KeptRunning(spec=lambda: world.spec("import sys; sys.exit(3)")))
    world.until(supervisor, lambda: bool(world.of("daemon-ended")))
    assert "said" not in world.of("daemon-ended")[0]


@pytest.mark.slow
def test_daemons_that_are_kept_already_are_not_kept_twice_and_who_looks_sees_how_each_stands(tmp_path: Path) -> None:
    code = "print('error: no room; to fix: make room', flush=True); raise SystemExit(3)"
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from common import supervision
from common.process import DaemonSpec, base_env
from common.supervision import KeptRunning, keep_running
supervision.BEAT_S = 0.1
root = Path({str(tmp_path)!r})
def kept(name, code):
    argv = (sys.executable, "-S", "-c", code)
    spec = DaemonSpec(role=name, name=name, argv=argv, env=base_env(), cwd=root, log=root / f"{{name}}.log")
    return KeptRunning(spec=lambda: spec, first_s=30.0)
keep_running(root, [kept("good", {SLEEP!r}), kept("bad", {code!r})])
"""
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        expected = {"good": "ready", "bad": "ended"}
        until(
            lambda: {one.daemon: one.state for one in standings([tmp_path])} == expected, lambda: standings([tmp_path])
        )
        bad = standings([tmp_path])[1]
        assert (bad.why, bad.said) == ("status 3", "error: no room; to fix: make room")
        assert "no room; to fix: make room" in bad.line
        with pytest.raises(DaemonFailed, match="are running already"):
            keep_running(tmp_path, [])
        lock = tmp_path / "daemons.lock"
        os.utime(lock, (0, 0))
        until(lambda: lock.stat().st_mtime, "the next heartbeat")
        process.kill()
    assert {one.state for one in standings([tmp_path])} == {"stopped"}
    assert standings([tmp_path / "none"]) == ()


def test_a_stopped_daemon_is_stopped_since_its_keeper_stopped_and_not_since_it_started(tmp_path: Path) -> None:
    facts = [
        {"time": "2026-11-24T08:00:00+00:00", "event": "daemon-ready", "daemon": "worker"},
        {"time": "2026-11-24T17:30:00+00:00", "event": "stopped"},
    ]
    (tmp_path / FACTS).write_text("".join(json.dumps(fact) + "\n" for fact in facts))
    (tmp_path / "daemons.lock").touch()
    (one,) = standings([tmp_path])
    assert (one.state, one.since) == ("stopped", "2026-11-24T17:30:00+00:00")
    (tmp_path / FACTS).write_text(json.dumps(facts[0]) + "\n")  # a killed process records no end
    (one,) = standings([tmp_path])
    assert "last heard of" in one.line


def test_a_killed_daemon_was_last_heard_of_when_its_keeper_beat_last_and_not_when_it_started(tmp_path: Path) -> None:
    with keeping(tmp_path):
        fact = {"time": "2026-11-24T08:00:00+00:00", "event": "daemon-ready", "daemon": "core"}
        (tmp_path / FACTS).write_text(json.dumps(fact) + "\n")
        heartbeat(tmp_path)
        beaten = (tmp_path / "daemons.lock").stat().st_mtime
        assert [one.state for one in standings([tmp_path])] == ["ready"]
    (one,) = standings([tmp_path])
    assert (one.state, datetime.fromisoformat(one.since).timestamp()) == ("stopped", pytest.approx(beaten, abs=0.01))


def test_a_fact_that_a_full_disk_cut_off_hides_no_later_one(tmp_path: Path) -> None:
    """Otherwise `server status` would not show that the daemon started later."""
    with keeping(tmp_path):
        report = json_report(tmp_path / FACTS)
        report("daemon-started", daemon="superexec", pid=1, log="log")
        report("daemon-ready", daemon="superexec", pid=1, seconds=7.1)
        os.truncate(tmp_path / FACTS, (tmp_path / FACTS).stat().st_size - 20)
        assert [one.state for one in standings([tmp_path])] == ["starting"]
        report("daemon-ready", daemon="superexec", pid=2, seconds=9.2)
        assert [one.state for one in standings([tmp_path])] == ["ready"]


def test_a_supervisor_beats_while_it_keeps_daemons(tmp_path: Path) -> None:
    beats = []

    def beat() -> None:
        beats.append(None)
        raise KeyboardInterrupt

    with ProcessGroup() as group, pytest.raises(KeyboardInterrupt):
        Supervisor(group, [], report=lambda event, **facts: None).run(on_beat=beat)
    assert beats == [None]


def test_a_log_whose_lock_is_gone_still_says_what_ran(tmp_path: Path) -> None:
    """In a copy of a site's folder the daemons were started once, so the status must not say that they never were."""
    fact = {"time": "2026-11-24T08:00:00+00:00", "event": "daemon-ready", "daemon": "worker"}
    (tmp_path / FACTS).write_text(json.dumps(fact) + "\n")
    assert [(one.daemon, one.state) for one in standings([tmp_path])] == [("worker", "stopped")]


def test_without_a_record_nothing_is_claimed_about_daemons(tmp_path: Path) -> None:
    said = unrecorded([tmp_path / "logs"], command="consilium site up")
    assert said.startswith("`consilium site up` ")
    assert "`consilium demo`" in said

    def closed(*_: object) -> None:
        raise PermissionError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", closed)
        said = unrecorded([tmp_path / "logs"], command="consilium site up")
    assert said.startswith("not known")
    assert f"user {os.getuid()} cannot read {tmp_path / 'logs' / FACTS}" in said


def test_a_daemon_that_the_next_start_has_not_come_to_yet_is_stopped(tmp_path: Path) -> None:
    report = json_report(tmp_path / FACTS)
    for daemon in ("worker", "launcher"):
        report("daemon-ready", daemon=daemon)
    with keeping(tmp_path):  # the party was killed before, so no record states an end
        report("daemon-started", daemon="worker")
        assert {one.daemon: one.state for one in standings([tmp_path])} == {"worker": "starting", "launcher": "stopped"}
