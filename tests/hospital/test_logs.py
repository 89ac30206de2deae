"""Tests what a hospital's IT reads from real daemons: rsyslog and systemd's journal get a site's and a
server's events.

Needs root, rsyslogd, systemd-journald and unshare. Run by make test-hospital.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.operations.daemons import LOG_MODULE as SITE_LOG
from common.security_log.program import log_daemon
from common.sockets import free_port
from server.operations.supervisor import LOG_MODULE as SERVER_LOG
from tests.dashboard_study import make_study_directory
from tests.federation import Federation
from tests.waiting import until

pytestmark = pytest.mark.hospital
JOURNALD = Path("/usr/lib/systemd/systemd-journald")
RSYSLOG = """
module(load="imudp")
module(load="imtcp")
module(load="imuxsock" SysSock.Use="off")
input(type="imudp" address="127.0.0.1" port="{udp}")
input(type="imtcp" address="127.0.0.1" port="{tcp}")
input(type="imuxsock" socket="{folder}/dev-log" createPath="on")
template(name="line" type="string" string="%syslogfacility-text%.%syslogseverity-text% %programname% %msg%\\n")
if $inputname == "imudp" then action(type="omfile" file="{folder}/udp" template="line")
if $inputname == "imtcp" then action(type="omfile" file="{folder}/tcp" template="line")
if $inputname == "imuxsock" then action(type="omfile" file="{folder}/local" template="line")
"""


@contextmanager
def rsyslogd(folder: Path) -> Iterator[tuple[int, int]]:
    program = shutil.which("rsyslogd")
    if program is None:
        pytest.skip("rsyslogd is not installed: apt install rsyslog")
    udp, tcp = free_port(), free_port()
    (folder / "rsyslog.conf").write_text(RSYSLOG.format(udp=udp, tcp=tcp, folder=folder))
    words = [program, "-n", "-f", str(folder / "rsyslog.conf"), "-i", str(folder / "rsyslog.pid")]
    with subprocess.Popen(words) as daemon:
        try:
            until(lambda: (folder / "dev-log").exists())
            time.sleep(1)
            yield udp, tcp
        finally:
            daemon.send_signal(signal.SIGTERM)


def lines(path: Path) -> list[tuple[str, dict]]:
    """Return facility and severity as rsyslog understood them, and the message as JSON."""
    if not path.exists():
        return []
    split = [line.split(" ", 2) for line in path.read_text().splitlines()]
    assert {program for _, program, _ in split} == {"consilium"}
    return [(priority, json.loads(text)) for priority, _, text in split]


def follow(module: str, directory: Path, targets: list[str]) -> subprocess.Popen[bytes]:
    """Start the log's daemon as `site up --log-to` and `server up --log-to` do."""
    daemon = log_daemon(directory, module=module, name="log", targets=targets)
    return subprocess.Popen(daemon.argv, env=dict(daemon.env), cwd=daemon.cwd)


def test_rsyslog_gets_every_event_of_a_site_and_a_server_also_those_while_it_was_away(tmp_path: Path) -> None:
    study = make_study_directory(tmp_path / "study")
    federation = Federation(tmp_path / "federation")
    site = tmp_path / "federation" / "site-0"
    (site / "site.toml").write_text(federation.site_toml("site-0", "pool-0"))
    federation.core().run(federation.transport)
    (tmp_path / "logs").mkdir()
    with rsyslogd(tmp_path / "logs") as (udp, tcp):
        targets = [f"tcp://127.0.0.1:{tcp}", f"udp://127.0.0.1:{udp}", f"file:{tmp_path}/site.jsonl"]
        of_site = follow(SITE_LOG, site, targets)
        of_server = follow(SERVER_LOG, study.workspace.root, [f"tcp://127.0.0.1:{tcp}"])
        try:
            until(lambda: (tmp_path / "site.jsonl").exists())
            study.collect()
            until(
                lambda: any(
                    one["event"] == "charge" and one["party"] == "server" for _, one in lines(tmp_path / "logs/tcp")
                )
            )
        finally:
            for one in (of_site, of_server):
                one.terminate()
                assert one.wait(20) == 0
    federation.site_ledgers["site-0"].decide(federation.study.id, "pause")  # meanwhile no log daemon listens
    with rsyslogd(tmp_path / "logs") as (_, tcp):
        again = follow(SITE_LOG, site, [f"file:{tmp_path}/site.jsonl"])
        try:
            until(lambda: '"veto"' in (tmp_path / "site.jsonl").read_text())
        finally:
            again.terminate()
            assert again.wait(20) == 0
    federation.close()
    kept = [json.loads(line) for line in (tmp_path / "site.jsonl").read_text().splitlines()]
    over_tcp = [one for _, one in lines(tmp_path / "logs/tcp") if one["party"] == "site"]
    assert over_tcp == kept[:-1] == [one for _, one in lines(tmp_path / "logs/udp")]
    assert kept[-1]["event"] == "veto"
    planned = federation.study.privacy.planned_queries
    assert [one["event"] for one in kept].count("charge") == planned
    priorities = {one["event"]: priority for priority, one in lines(tmp_path / "logs/tcp")}
    assert priorities["charge"] == "authpriv.notice"
    assert any(one["party"] == "server" and one["event"] == "offer-answered" for _, one in lines(tmp_path / "logs/tcp"))


IN_A_NAMESPACE = """
mkdir -p /run/systemd /run/log && mount -t tmpfs none /run/systemd && mount -t tmpfs none /run/log || exit 90
mkdir -p /run/systemd/journal /run/log/journal
{journald} & daemon=$!
for _ in $(seq 100); do [ -S /run/systemd/journal/socket ] && break; sleep 0.1; done
{python} -P -m client.operations.security_events {site} --to journald & follower=$!
for _ in $(seq 150); do
  journalctl -D /run/log/journal -o json CONSILIUM_EVENT=charge > {out} 2>/dev/null
  [ -s {out} ] && break; sleep 0.2
done
kill $follower; wait $follower
journalctl -D /run/log/journal -o json SYSLOG_IDENTIFIER=consilium > {out}
kill $daemon; wait $daemon; true
"""


def test_the_journal_gets_a_sites_events_and_selects_by_their_kind(tmp_path: Path) -> None:
    if not JOURNALD.exists() or shutil.which("unshare") is None or shutil.which("journalctl") is None:
        pytest.skip("systemd-journald or unshare is not installed: apt install systemd util-linux")
    federation = Federation(tmp_path / "federation")
    site = tmp_path / "federation" / "site-0"
    (site / "site.toml").write_text(federation.site_toml("site-0", "pool-0"))
    federation.core().run(federation.transport)
    federation.close()
    script = IN_A_NAMESPACE.format(journald=JOURNALD, python=sys.executable, site=site, out=tmp_path / "out")
    done = subprocess.run(["unshare", "-m", "--propagation", "private", "bash", "-c", script], check=False, timeout=90)
    assert done.returncode == 0
    entries = [json.loads(line) for line in (tmp_path / "out").read_text().splitlines()]
    charges = [entry for entry in entries if entry["CONSILIUM_EVENT"] == "charge"]
    assert len(charges) == federation.study.privacy.planned_queries
    for entry in charges:
        assert (entry["PRIORITY"], entry["CONSILIUM_NAME"], entry["_TRANSPORT"]) == ("5", "site-0", "journal")
        assert json.loads(entry["MESSAGE"])["event"] == "charge"
