"""Runs a federation of real daemons, each in its own network, started by the command that its administrator
types.

Every party is in a network namespace. The server's namespace has a bridge, and each site is connected to it by one
cable, which a test can pull out. A party is a directory. The directories are made once, with phantoms and teachers of
four training steps, and are copied for every test.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from client.ledger.site_ledger import SiteLedger
from client.operations.staff_decisions import consent
from client.site.enrolment import SiteKit, create_site
from client.site.registry import STATE_DIR
from common.admission import read_request
from common.config import CodecConfig, CollectionConfig, DataConfig, PrivacyConfig, Study, TrainingConfig
from common.data.msd import read_dataset, write_dataset
from common.data.synthetic import study_data, write_phantoms
from common.privacy.mechanism import AccountantName
from consilium.demo.federation import introduce
from server.ledger.server_ledger import Ledger
from server.operations import provision
from server.study import create_study as setup
from server.study.workspace import Endpoint, Workspace
from tests.studies import made_study
from tests.trained_sites import train_site
from tests.waiting import events_of
from tests.worlds import make_privacy

SITES = ("site-1", "site-2", "site-3")
QUERIES, BATCH, PATIENTS = 16, 2, 2
PRIVACY = make_privacy(planned_queries=QUERIES)
RECIPE = TrainingConfig(channels=(4, 8), steps=4)
HOST, PORT, INTERNAL_PORT = "10.77.0.1", 8443, 8000
TRUTH_S = 180.0
"""Seconds within which an operator must see the true state."""
STARTED_S = 600.0
"""Seconds within which all parties must be up before a fault is tried; a busy machine loads torch slowly."""


def make_parties(
    root: Path,
    *,
    sites: Sequence[str] = SITES,
    privacy: PrivacyConfig = PRIVACY,
    patience_s: float = 240.0,
    scans: Path | None = None,
) -> Path:
    """Make the directories of a server and its sites, ready to be started; return ``root``.

    The data are phantoms, and each query is about one volume. If ``scans`` is given, the data are that dataset's, and
    the queries are joint.
    """
    needed, joint = len(sites) * PATIENTS + QUERIES + 8, scans is not None
    if scans is None:
        phantoms, terms = write_phantoms(root / "all", cases=needed, seed=1), study_data(2)
    else:
        phantoms = read_dataset(scans)
        terms = DataConfig(phantoms.labels, spacing_mm=(2.0, 2.0, 2.0), grid=(16, 24, 16), channels=phantoms.channels)
    cases = list(phantoms.labelled[:needed])
    study = Study(
        name="faults",
        data=terms,
        privacy=privacy,
        codec=CodecConfig(augmentations=20, max_dimension=8, joint=joint),
        teacher=RECIPE,
        student=RECIPE,
        collection=CollectionConfig(batch_size=BATCH, offer_deadline_s=60.0, deadline_s=45.0, patience_s=patience_s),
    )
    workspace = made_study(root / "server", study)
    rest = cases[len(sites) * PATIENTS :]
    setup.publish_volumes(workspace, [case.image for case in rest[:QUERIES]])
    setup.fit_study_codec(workspace, [case.label for case in rest[QUERIES:]], sites=len(sites))
    endpoint = Endpoint(host=HOST, port=PORT, internal_port=INTERNAL_PORT)
    provision.set_up_server(workspace, endpoint, now=datetime.now(UTC) - timedelta(days=60))
    for number, name in enumerate(sites):
        directory = root / name
        part = cases[number * PATIENTS : (number + 1) * PATIENTS]
        write_dataset(directory / "data", name=name, labels=phantoms.labels, channels=phantoms.channels, cases=part)
        provision.make_kit(workspace, name, root / "kits" / name)
        create_site(directory, pool=name, data=directory / "data", kit=SiteKit.load(root / "kits" / name))
        consent(directory, by="Ada", sheet="")
        train_site(
            read_dataset(directory / "data"),
            teachers=directory / "teachers",
            data=study.data,
            recipe=RECIPE,
            voters=1,
        )
    shutil.rmtree(root / "all", ignore_errors=True)
    return root


HOG = """
import os, sys, time
from pathlib import Path
kills, spare, counter = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
held = os.memfd_create("held")  # memory of no process, so that the kernel looks elsewhere
def take(size):
    for _ in range(size >> 20):
        os.write(held, bytes(1 << 20))
def killed():
    words = counter.read_text().split()
    return int(words[words.index("oom_kill") + 1])
while killed() == kills:
    take(1 << 20)
take(spare)
time.sleep(600)
"""
"""Takes memory until the kernel has killed a process of the group, then ``spare`` bytes more, and stays."""


@dataclass(frozen=True)
class MemoryGroup:
    """Limits memory by a cgroup of version 1 or 2."""

    folder: Path
    old: bool

    @classmethod
    def make(cls, name: str) -> MemoryGroup | None:
        """Make a group; return None if this machine offers no memory limits."""
        root = Path("/sys/fs/cgroup")
        old = (root / "memory" / "memory.limit_in_bytes").exists()
        made = cls((root / "memory" if old else root) / name, old)
        try:
            made.folder.mkdir()
        except OSError:
            return None
        return made if made.counter.exists() else None

    @property
    def counter(self) -> Path:
        """Return the file in which the kernel counts the group's processes that it killed for lack of memory."""
        return self.folder / ("memory.oom_control" if self.old else "memory.events")

    @property
    def enter(self) -> tuple[str, ...]:
        """Return the start of a command line that runs the rest of it in the group."""
        return ("sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs"))

    def kills(self) -> int:
        words = self.counter.read_text().split()
        return int(words[words.index("oom_kill") + 1])

    def held(self) -> int:
        """Return the memory in bytes of the group's processes, without memory that can be read again from files."""
        words = (self.folder / "memory.stat").read_text().split()
        return int(words[words.index("total_rss" if self.old else "anon") + 1])

    def limit(self, size: int) -> None:
        if not self.old:
            (self.folder / "memory.swap.max").write_text("0")
        (self.folder / ("memory.limit_in_bytes" if self.old else "memory.max")).write_text(str(size))

    def starve(self, *, spare: int) -> subprocess.Popen[bytes]:
        """Start another process in the group, which takes all memory up to the limit except for ``spare``."""
        words = [sys.executable, "-c", HOG, str(self.kills()), str(spare), str(self.counter)]
        return subprocess.Popen([*self.enter, *words])


@dataclass
class Party:
    """Holds one party's processes: the one that its administrator started, and the daemons below it."""

    name: str
    namespace: str
    facts: Path
    python: str = sys.executable
    """The interpreter that runs this party's version of Consilium."""
    limits: MemoryGroup | None = None
    """The memory group of the party's processes, if the party has a limit of its own."""
    process: subprocess.Popen[bytes] | None = None

    def pid(self, role: str) -> int:
        """Return the pid of the running daemon of a role, as the supervisor's log states it."""
        for fact in reversed(self.records()):
            if fact["event"] == "daemon-started" and fact["daemon"].startswith(role):
                os.kill(fact["pid"], 0)
                return int(fact["pid"])
        raise LookupError(role)

    def records(self) -> list[dict]:
        if not self.facts.exists():
            return []
        return [json.loads(line) for line in self.facts.read_text(encoding="utf-8").splitlines()]

    def count(self, event: str, role: str = "") -> int:
        return sum(f["event"] == event and f.get("daemon", "").startswith(role) for f in self.records())


@dataclass
class Federation:
    """Holds all parties, with copies of their directories below ``root``."""

    root: Path
    tag: str
    sites: Sequence[str] = SITES
    parties: dict[str, Party] = field(default_factory=dict)
    run: subprocess.Popen[bytes] | None = None

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root / "server")

    # -- network ------------------------------------------------------------------------------------------------

    def wire(self) -> None:
        """Connect the network namespaces: one bridge for the server, one cable to each site."""
        hub = f"{self.tag}h"
        ip("netns", "add", hub)
        ip("-n", hub, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "br0", "type", "bridge")
        ip("-n", hub, "addr", "add", f"{HOST}/24", "dev", "br0")
        ip("-n", hub, "link", "set", "br0", "up")
        self.parties["server"] = Party("server", hub, self.root / "server" / "logs" / "daemons.jsonl")
        for number, name in enumerate(self.sites, start=1):
            space, cable = f"{self.tag}{number}", f"v{self.tag}{number}"
            ip("netns", "add", space)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", hub, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", hub, "link", "set", cable, "master", "br0", "up")
            ip("-n", space, "addr", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            self.parties[name] = Party(name, space, self.root / name / "logs" / "daemons.jsonl")

    def pull_cable(self, site: str) -> None:
        ip("-n", f"{self.tag}h", "link", "set", f"v{self.tag}{site[-1]}", "down")

    def plug_cable(self, site: str) -> None:
        ip("-n", f"{self.tag}h", "link", "set", f"v{self.tag}{site[-1]}", "up")

    def inside(self, party: str, *command: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
        """Run a command in a party's network and wait for its end."""
        words = ["ip", "netns", "exec", self.parties[party].namespace, *command]
        return subprocess.run(words, capture_output=True, text=True, timeout=300, check=False, **kwargs)  # type: ignore[call-overload,no-any-return]

    def inside_in_background(self, party: str, *command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["ip", "netns", "exec", self.parties[party].namespace, *command])

    # -- daemons ------------------------------------------------------------------------------------------------

    def start(self, name: str, *, env: dict[str, str] | None = None) -> Party:
        """Start a party with the command that its administrator types."""
        party = self.parties[name]
        if name == "server":
            words = ["server", "up", str(self.workspace.root), "--bind", HOST]
        else:
            words = ["site", "up", "--site-dir", str(self.root / name)]
        party.process = self._spawn(party, words, env=env)
        return party

    def _spawn(
        self, party: Party, words: Sequence[str], *, env: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        into = party.limits.enter if party.limits and party.process is None else ()
        with (self.root / f"{party.name}.out").open("ab") as log:
            return subprocess.Popen(
                [*into, "ip", "netns", "exec", party.namespace, *consilium(*words, python=party.python)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(env or {})},
            )

    def up(self, sites: Sequence[str] | None = None) -> None:
        """Start the server, admit the sites, start ``sites`` (by default all), and wait until they are connected."""
        sites = self.sites if sites is None else sites
        self.start("server")
        self.recorded("server", "all-ready", count=1, timeout_s=STARTED_S)
        known = {site.name for site in self.workspace.registered()}
        for name in self.sites:
            if name not in known:
                self.admit(name)
        if self.workspace.study().privacy.sealed:
            introduce(self.workspace, {name: self.root / name for name in self.sites})
        for name in sites:
            self.start(name)
        for name in sites:
            self.recorded(name, "all-ready", count=1, timeout_s=STARTED_S)

    def admit(self, name: str) -> None:
        request = self.root / name / "request.json"
        asked = read_request(request)
        done = self.command(
            *("provision", "approve", str(self.workspace.root), str(request)),
            *("--site", name, "--pool", asked.pool, "--fingerprint", asked.fingerprint),
        )
        assert done.returncode == 0, done.stderr

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the server's network, as the operator does."""
        return self.inside("server", *consilium(*words, python=self.parties["server"].python))

    def start_run(self) -> None:
        self.run = self._spawn(self.parties["server"], ["study", "run", str(self.workspace.root)])

    def finish_run(self, *, timeout_s: float = 420.0) -> int:
        assert self.run is not None
        return self.run.wait(timeout_s)

    def stop(self, name: str, signum: signal.Signals = signal.SIGTERM) -> int:
        party = self.parties[name]
        assert party.process is not None
        party.process.send_signal(signum)
        status = party.process.wait(60)
        party.process = None
        return status

    def close(self) -> None:
        """End all processes of this federation, also hung or half-started ones."""
        begun = [self.run, *(party.process for party in self.parties.values())]
        processes = [process for process in begun if process is not None]
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        for party in self.parties.values():
            left = subprocess.run(["ip", "netns", "pids", party.namespace], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                with contextlib.suppress(OSError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", party.namespace], capture_output=True, check=False)
        for process in processes:
            process.wait(30)  # it was killed if it had not ended

    # -- checks -------------------------------------------------------------------------------------------------

    def until(self, true: Callable[[], object], what: str, *, timeout_s: float = 180.0) -> float:
        """Wait until a condition holds; return how many seconds this took."""
        started = time.monotonic()
        while not true():
            ended = [party.name for party in self.parties.values() if party.process and party.process.poll()]
            assert not ended, f"{ended} ended while waiting: {what}\n{self.tails()}"
            assert time.monotonic() - started < timeout_s, f"not within {timeout_s:g} s: {what}\n{self.tails()}"
            time.sleep(0.2)
        return time.monotonic() - started

    def events(self, kind: str) -> list[dict]:
        return events_of(self.workspace.events_file, kind)

    def wait(self, kind: str, *, count: int = 1, timeout_s: float = 180.0) -> dict:
        self.until(lambda: len(self.events(kind)) >= count, f"{count} {kind}", timeout_s=timeout_s)
        return self.events(kind)[-1]

    def recorded(self, name: str, event: str, role: str = "", *, count: int, timeout_s: float = 180.0) -> float:
        """Wait until a party's log has an event ``count`` times; return how many seconds this took."""
        what = f"{count} {event} {role} at {name}"
        return self.until(lambda: self.parties[name].count(event, role) >= count, what, timeout_s=timeout_s)

    def tails(self) -> str:
        texts = [f"{path.name}:\n" + path.read_text(errors="replace")[-1500:] for path in self.root.glob("*.out")]
        return "\n".join(texts)

    def assert_whole(self, *, answers: int = QUERIES, releases: int = QUERIES // BATCH) -> None:
        """Check the study's ledgers: each answer stored and charged once, none beyond the plan, all verified, no run
        active.
        """
        with Ledger.open(self.workspace.ledger_file) as ledger:
            study = self.workspace.study()
            stored = ledger.answers(study.id)
            exact = ledger.study_spending(study.id).readings()[AccountantName.EXACT].epsilon
        assert len({answer.query.id for answer in stored}) == len(stored) == answers
        assert 8 * 0.999 <= exact <= 8 or answers < QUERIES
        released = [query for event in self.events("released") for query in event["queries"]]
        assert len(released) == len(set(released)) <= answers  # a killed process may lose an event, but no answer
        verified = self.command("verify", str(self.workspace.ledger_file))
        assert verified.returncode == 0, verified.stdout + verified.stderr
        status = json.loads(self.command("study", "status", str(self.workspace.root), "--json").stdout)
        assert status["running"] is False
        assert status["answers"] == answers

    def site_charges(self, site: str) -> int:
        """Return the number of queries that a site's own ledger has charged."""
        with SiteLedger.read(self.root / site / "site-ledger.sqlite") as ledger:
            return ledger.facts(site).accepted


PROGRAM = """
try:
    from consilium.cli.main import main
except ImportError:  # release 0.1.0
    from consilium.cli import main
main()
"""


def consilium(*words: str, python: str = sys.executable) -> list[str]:
    return [python, "-P", "-c", PROGRAM, *words]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def namespaces_work() -> bool:
    """Return whether this user may create network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"cx{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        ip("netns", "del", name)
    return made


@contextlib.contextmanager
def federation(made: Path, root: Path, *, sites: Sequence[str] = SITES) -> Iterator[Federation]:
    """Start a copy of the parties in networks of their own, and remove everything at the end.

    Each copy has a list of pools of its own, like another machine, because a site refuses to run as a copy of a listed
    one.
    """
    shutil.copytree(made, root, dirs_exist_ok=True)
    one = Federation(root, tag=f"c{os.getpid() % 100000}", sites=sites)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_DIR, str(root.with_name(f"{root.name}-state")))
        try:
            one.wire()
            yield one
        finally:
            one.close()
