"""Tests slow and broken networks, full disks and moved servers: results stay right, and messages name the cause."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.deployment.parts import QUERIES, SITES, STARTED_S, TRUTH_S, Federation, MemoryGroup

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def test_a_site_that_is_cut_off_for_three_minutes_is_waited_for_and_answers_everything(parties: Federation) -> None:
    parties.up()
    parties.start_run()
    parties.wait("released")
    parties.pull_cable("site-1")
    away = time.monotonic()
    parties.until(lambda: missed(parties, "site-1"), "the operator reads that site-1 is away", timeout_s=TRUTH_S)
    time.sleep(max(180.0 - (time.monotonic() - away), 0.0))
    parties.plug_cable("site-1")
    assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
    parties.assert_whole()
    for site in SITES:
        assert parties.site_charges(site) == QUERIES


def test_a_run_completes_with_one_site_away_and_one_slow(parties: Federation) -> None:
    """Site-3 never takes part. Site-2 has 50 kB/s through its proxy."""
    for name in ("server", "site-1"):
        parties.start(name)
        if name == "server":
            parties.recorded("server", "all-ready", count=1, timeout_s=STARTED_S)
            for site in SITES:
                parties.admit(site)
    proxy = parties.inside_in_background(
        "site-2",
        sys.executable,
        str(Path(__file__).with_name("http_proxy.py")),
        "3128",
        str(parties.root / "p"),
        "50000",
    )
    try:
        parties.start("site-2", env={"HTTPS_PROXY": "http://127.0.0.1:3128"})
        for name in ("site-1", "site-2"):
            parties.recorded(name, "all-ready", count=1, timeout_s=STARTED_S)
        parties.start_run()
        parties.wait("released", timeout_s=400)
        assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
        parties.assert_whole()
        rosters = {tuple(event["roster"]) for event in parties.events("released")}
        assert rosters == {("site-1", "site-2")}  # an absent site is in no release and charges nothing
        assert parties.site_charges("site-1") == parties.site_charges("site-2") == QUERIES
        assert parties.site_charges("site-3") == 0
    finally:
        proxy.terminate()
        proxy.wait()


@contextlib.contextmanager
def small_disk(folder: Path, *, spare_mb: int = 24) -> Iterator[Path]:
    """Put ``folder`` on a small file system of its own; yield the file that fills this file system."""
    aside = folder.with_name(folder.name + ".aside")
    folder.rename(aside)
    folder.mkdir()
    used = sum(path.stat().st_size for path in aside.rglob("*") if path.is_file()) >> 20
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={used + spare_mb}m", "tmpfs", str(folder)], check=True)
    try:
        shutil.copytree(aside, folder, dirs_exist_ok=True, symlinks=True)
        yield folder / "filler"
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def fill(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as stream:
        while stream.write(b"\0" * 4096):
            pass
    assert shutil.disk_usage(filler.parent).free < 4096


def test_a_full_disk_at_the_server_stops_the_study_and_room_lets_it_go_on(parties: Federation) -> None:
    with small_disk(parties.root / "server") as filler:
        parties.up()
        parties.start_run()
        parties.wait("released")
        fill(filler)
        assert parties.run is not None
        assert parties.run.wait(2 * TRUTH_S) != 0  # it gives up and says so; nothing is RUNNING for ever
        assert "error" in (parties.root / "server.out").read_text()
        filler.unlink()
        parties.start_run()
        assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
        parties.assert_whole()
        for site in SITES:
            assert parties.site_charges(site) == QUERIES


def test_a_full_disk_at_a_site_is_seen_by_the_operator_and_room_lets_it_answer(parties: Federation) -> None:
    with small_disk(parties.root / "site-1") as filler:
        parties.up()
        parties.start_run()
        parties.wait("released")
        fill(filler)
        parties.until(lambda: missed(parties, "site-1"), "the operator reads that site-1 fails", timeout_s=TRUTH_S)
        filler.unlink()
        assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
        parties.assert_whole()
        for site in SITES[1:]:
            assert parties.site_charges(site) == QUERIES
        assert parties.site_charges("site-1") <= QUERIES


@contextlib.contextmanager
def own_limit(parties: Federation, name: str) -> Iterator[MemoryGroup]:
    """Within the context, a party that is started runs in a cgroup of its own. The cgroup has no limit yet."""
    group = MemoryGroup.make(f"consilium-{parties.tag}")
    if group is None:
        pytest.skip("needs cgroups with memory limits")
    parties.parties[name].limits = group
    try:
        yield group
    finally:
        parties.close()
        group.folder.rmdir()


def test_a_site_out_of_memory_is_named_to_both_operators_and_answers_when_there_is_room(parties: Federation) -> None:
    """The site's processes share a memory limit with one that takes all memory, so the kernel kills the worker."""
    with own_limit(parties, "site-1") as group:
        parties.up()
        parties.start_run()
        parties.wait("released")
        worker = parties.parties["site-1"].pid("worker")
        pages = int(Path(f"/proc/{worker}/statm").read_text().split()[1])
        group.limit(group.held() + (64 << 20))
        hog = group.starve(spare=int(0.6 * pages * os.sysconf("SC_PAGE_SIZE")))
        try:
            parties.until(lambda: short_of_memory(parties, "site-1", "worker"), "the site's own log", timeout_s=TRUTH_S)
            parties.until(lambda: missed(parties, "site-1"), "the operator reads that site-1 fails", timeout_s=TRUTH_S)
            assert group.kills() > 0
        finally:
            hog.kill()
            hog.wait()
        assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
        parties.assert_whole()
        for site in SITES[1:]:
            assert parties.site_charges(site) == QUERIES
        assert parties.site_charges("site-1") <= QUERIES


def test_a_server_out_of_memory_starts_again_what_the_kernel_ended_and_the_study_goes_on(parties: Federation) -> None:
    with own_limit(parties, "server") as group:
        parties.up()
        parties.start_run()
        parties.wait("released")
        said = parties.root / "server.out"
        group.limit(group.held() + (64 << 20))
        hog = group.starve(spare=0)
        try:
            parties.until(
                lambda: short_of_memory(parties, "server") or "ServerApp ended unexpectedly" in said.read_text(),
                "the operator reads what was ended",
                timeout_s=TRUTH_S,
            )
            assert group.kills() > 0
        finally:
            hog.kill()
            hog.wait()
            group.limit(1 << 40)  # the student needs more memory than the limit of the shortage
        if parties.finish_run(timeout_s=900.0) != 0:
            parties.start_run()
            assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
        parties.assert_whole()
        for site in SITES:
            assert parties.site_charges(site) == QUERIES


def short_of_memory(parties: Federation, name: str, role: str = "") -> bool:
    """Return whether a party's own log states that a daemon ended for want of memory."""
    ended = [fact for fact in parties.parties[name].records() if fact["event"] == "daemon-ended"]
    return any(fact["daemon"].startswith(role) and "memory" in fact["why"] for fact in ended)


def test_a_server_moved_to_a_new_host_from_its_backup_goes_on_with_the_same_sites(parties: Federation) -> None:
    """The backup is the folder of the stopped study. The host name that the sites know then points to the new host."""
    parties.up()
    parties.start_run()
    parties.wait("released", count=2)
    parties.stop("server", signal.SIGTERM)
    parties.finish_run()
    backup = parties.root / "backup.tar"
    subprocess.run(["tar", "-C", str(parties.root), "-cf", str(backup), "server"], check=True)
    before = {q for event in parties.events("released") for q in event["queries"]}
    shutil.rmtree(parties.root / "server")
    subprocess.run(["tar", "-C", str(parties.root), "-xf", str(backup)], check=True)
    ready = parties.parties["server"].count("all-ready")
    parties.start("server")
    parties.recorded("server", "all-ready", count=ready + 1)
    parties.start_run()
    assert parties.finish_run(timeout_s=900.0) == 0, parties.tails()
    parties.assert_whole()
    after = [q for event in parties.events("released") for q in event["queries"]]
    assert before <= set(after)
    for site in SITES:
        assert parties.site_charges(site) == QUERIES
        assert parties.parties[site].count("daemon-started", "worker") == 1


def missed(parties: Federation, site: str) -> bool:
    """Return whether the study's log states that a site does not answer."""
    answers = [*parties.events("reply-missing"), *parties.events("offer-answered")]
    return any(event["site"] == site and event.get("reason") not in (None, "accepted") for event in answers)
