"""Tests killing and stopping every process of a federation during a study: nothing is lost or charged twice."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.faults.deployment.parts import BATCH, QUERIES, SITES, TRUTH_S, Federation

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROLES = {
    "worker": "site-1",
    "gateway": "server",
    "fleet": "server",
    "launcher": "site-2",
    "superlink": "server",
    "supernode": "site-3",
    "superexec": "server",
    "core": "server",
}


def assert_everything_was_answered_once(parties: Federation) -> None:
    assert parties.finish_run() == 0, parties.tails()
    parties.assert_whole()
    for site in SITES:
        assert parties.site_charges(site) == QUERIES


def serverapp(parties: Federation) -> int:
    """Return the pid of the newest run's process in the core, which ends with its ServerApp; 0 if it has ended."""
    runs = parties.events("run-started")
    return int(runs[-1]["pid"]) if runs and not none_alive([runs[-1]["pid"]]) else 0


def last_of_the_supernode(parties: Federation, site: str) -> str:
    """Return the kind of the newest event about a site's SuperNode."""
    facts = parties.parties[site].records()
    return str([fact["event"] for fact in facts if fact.get("daemon", "").startswith("supernode")][-1])


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "sigterm"])
def test_every_process_in_turn_ends_in_mid_study_and_nothing_is_lost_or_doubled(
    parties: Federation, signum: signal.Signals
) -> None:
    parties.up()
    parties.start_run()
    parties.wait("released")
    for role, name in ROLES.items():
        party = parties.parties[name]
        ended, ready = party.count("daemon-ended", role), party.count("daemon-ready", role)
        os.kill(party.pid(role), signum)
        parties.recorded(name, "daemon-ended", role, count=ended + 1, timeout_s=30)
        parties.recorded(name, "daemon-ready", role, count=ready + 1, timeout_s=TRUTH_S)
    # If superexec or core ends in order, the ServerApp ends too, and the run goes on once it is submitted again.
    parties.until(lambda: serverapp(parties) or parties.events("run-finished"), "a run is on", timeout_s=TRUTH_S)
    started = len(parties.events("run-started"))
    if not parties.events("run-finished"):
        os.kill(serverapp(parties), signum)
        parties.wait("run-started", count=started + 1, timeout_s=TRUTH_S)  # the server submits it again by itself
    assert_everything_was_answered_once(parties)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "sigterm"])
def test_a_whole_party_that_ends_in_mid_study_is_started_again_by_its_init_and_goes_on(
    parties: Federation, signum: signal.Signals
) -> None:
    """The supervisor and all its processes end, and the same command runs again, as systemd does after a reboot."""
    parties.up()
    parties.start_run()
    for number, name in enumerate(("site-1", "server"), start=1):
        parties.wait("released", count=number)
        party = parties.parties[name]
        daemons = [fact["pid"] for fact in party.records() if fact["event"] == "daemon-started"]
        status = parties.stop(name, signum)
        assert status == (0 if signum == signal.SIGTERM else -signal.SIGKILL)
        all_gone = partial(none_alive, daemons)
        parties.until(all_gone, "no daemon outlives its party", timeout_s=30)
        ready = party.count("all-ready")
        parties.start(name)
        parties.recorded(name, "all-ready", count=ready + 1, timeout_s=TRUTH_S)
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


def none_alive(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_sites_say_that_they_are_offline_while_the_gateway_is_frozen_and_come_back_by_themselves(
    parties: Federation,
) -> None:
    parties.up()
    parties.start_run()
    parties.wait("released")
    gateway = parties.parties["server"].pid("gateway")
    os.kill(gateway, signal.SIGSTOP)
    try:
        for site in SITES:
            parties.recorded(site, "daemon-offline", "supernode", count=1, timeout_s=TRUTH_S)
            said = parties.command("site", "status", "--site-dir", str(parties.root / site))
            assert "offline since" in said.stdout, said.stdout + said.stderr
            assert "no heartbeat since" in said.stdout
        listed = parties.command("server", "status", str(parties.workspace.root))
        assert f"sites: 0 of {len(SITES)} online" in listed.stdout, listed.stdout + listed.stderr
        assert "gateway: offline since" in listed.stdout
        assert listed.returncode == 7
    finally:
        os.kill(gateway, signal.SIGCONT)
    for site in SITES:
        parties.until(
            lambda site=site: last_of_the_supernode(parties, site) == "daemon-ready",
            f"{site} is online again",
            timeout_s=TRUTH_S,
        )
    listed = parties.command("server", "status", str(parties.workspace.root))
    assert f"sites: {len(SITES)} of {len(SITES)} online" in listed.stdout, listed.stdout + listed.stderr
    assert_everything_was_answered_once(parties)
