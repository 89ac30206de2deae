"""Every process of a federation killed and stopped in the middle of a study: nothing is lost or charged twice."""

from __future__ import annotations

import os
import signal

import pytest

from tests.faults.deployment.parts import BATCH, QUERIES, SITES, TRUTH_S, Federation

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROLES = {
    "superlink": "server",
    "superexec": "server",
    "gateway": "server",
    "worker": "site-1",
    "launcher": "site-1",
    "supernode": "site-1",
}


def pid_of(parties: Federation, role: str) -> int:
    if role == "serverapp":
        return int(parties.events("run-started")[-1]["pid"])
    return parties.parties[ROLES[role]].pid(role)


def assert_everything_was_answered_once(parties: Federation) -> None:
    assert parties.finish_run() == 0, parties.tails()
    parties.assert_whole()
    for site in SITES:
        assert parties.site_charges(site) == QUERIES


@pytest.mark.parametrize("role", ["serverapp", *ROLES])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "sigterm"])
def test_a_process_that_ends_in_mid_study_loses_and_doubles_nothing(
    parties: Federation, role: str, signum: signal.Signals
) -> None:
    parties.up()
    parties.start_run()
    parties.wait("released")  # the first of four batches
    os.kill(pid_of(parties, role), signum)
    if role in ROLES:
        party = parties.parties[ROLES[role]]
        parties.until(lambda: party.count("daemon-ended", role) > 0, f"the end of {role} is on record", timeout_s=30)
        parties.until(lambda: party.count("daemon-ready", role) > 1, f"{role} is back", timeout_s=TRUTH_S)
    assert_everything_was_answered_once(parties)


@pytest.mark.parametrize("name", ["server", "site-1"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "sigterm"])
def test_a_whole_party_that_ends_in_mid_study_is_started_again_by_its_init_and_goes_on(
    parties: Federation, name: str, signum: signal.Signals
) -> None:
    """What systemd or Docker does after a reboot: the supervisor and all below it end, and the command runs again."""
    parties.up()
    parties.start_run()
    parties.wait("released")
    daemons = [
        fact["pid"] for fact in parties.parties[name].records() if fact["event"] == "daemon-started"
    ]  # all of them live, none was replaced
    status = parties.stop(name, signum)
    assert status == (0 if signum == signal.SIGTERM else -signal.SIGKILL)
    parties.until(lambda: not [pid for pid in daemons if alive(pid)], "no daemon outlives its party", timeout_s=30)
    ready = parties.parties[name].count("all-ready")
    parties.start(name)
    parties.until(lambda: parties.parties[name].count("all-ready") > ready, f"{name} is back", timeout_s=TRUTH_S)
    if parties.finish_run() != 0:  # the operator's command may have given up while its server was away
        parties.start_run()
    assert_everything_was_answered_once(parties)


def test_the_operator_s_own_command_may_die(parties: Federation) -> None:
    parties.up()
    parties.start_run()
    parties.wait("released")
    assert parties.run is not None
    os.killpg(parties.run.pid, signal.SIGKILL)
    parties.wait("released", count=QUERIES // BATCH)  # the ServerApp goes on without it
    parties.until(lambda: parties.events("run-finished"), "the run ends by itself")
    parties.assert_whole()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
