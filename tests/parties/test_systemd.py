"""Tests the units under a real systemd: a site connects and answers, and its node can read neither data nor
models.

systemd is the init of one container, in which a server and a site run side by side as on a machine without containers.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests import waiting
from tests.attacks.thief import THIEF
from tests.docker.conftest import DOCKER, ROOT

pytestmark = pytest.mark.docker

NAME = "consilium-test-units"
STUDY, SITE, DATA = "/srv/consilium/study", "/srv/consilium/site", "/srv/data/north"
CORE, SUPERLINK, GATEWAY = "consilium-server", "consilium-superlink", "consilium-gateway"
WORKER, NODE = "consilium-site-worker", "consilium-site-node"
ROLES = {
    **dict.fromkeys(("client.operations.serve", "server.aggregation.core"), "consilium"),
    **dict.fromkeys(
        ("server.operations.superlink", "server.operations.fleet", "flower-superexec"), "consilium-superlink"
    ),
    "server.operations.gateway": "consilium-gateway",
    **dict.fromkeys(("client.app", "client.operations.supernode"), "consilium-node"),
}
"""Daemon → the user that it runs as."""
SMALL = [
    rf"/^\[{part}\]/,/^\[/ {{s/^channels = .*/channels = [4, 8]/; s/^steps = .*/steps = 4/}}"
    for part in ("teacher", "student")
]


class Machine:
    """Holds a machine whose init is systemd. ``fingerprint`` is what the site's administrator reads out."""

    fingerprint = ""

    def root(self, *words: str, check: bool = True) -> str:
        done = self._run(*words)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def denied(self, *words: str) -> bool:
        """Return whether a command fails for lack of permission."""
        done = self._run(*words)
        return done.returncode != 0 and "Permission denied" in done.stderr

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [DOCKER, "exec", "--env", "OMP_NUM_THREADS=1", NAME, *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)

    def consilium(self, *words: str) -> str:
        return self.root("runuser", "-u", "consilium", "--", "consilium", *words)

    def write(self, path: str, text: str) -> None:
        self.root("sh", "-c", 'mkdir -p "$(dirname "$0")" && printf %s "$1" >"$0"', path, text)

    def show(self, unit: str, fact: str) -> str:
        return self.root("systemctl", "show", "--property", fact, "--value", unit).strip()

    def processes(self) -> list[list[str]]:
        """Return user and command line of every running process."""
        lines = self.root("ps", "-eo", "user:32,args", "--no-headers").splitlines()
        return [line.split(maxsplit=1) for line in lines]

    def facts(self, path: str) -> list[dict]:
        return [json.loads(line) for line in self.root("cat", path, check=False).splitlines() if line.startswith("{")]


until = partial(waiting.until, timeout_s=180.0, pause_s=0.5)


@pytest.fixture(scope="module")
def machine(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """Set up server and site as the guide says, with units installed and nothing started."""
    flags = os.environ.get("DOCKER_BUILD_FLAGS", "").split()
    dockerfile = Path(__file__).with_name("systemd.Dockerfile")
    subprocess.run(
        [DOCKER, "build", *flags, "--tag", NAME, "--file", str(dockerfile), str(ROOT / "docker" / "systemd")],
        env={**os.environ, "DOCKER_BUILDKIT": "1"},
        capture_output=True,
        check=True,
        timeout=600,
    )
    rights = [word for one in ("SYS_ADMIN", "SYS_PTRACE", "NET_ADMIN") for word in ("--cap-add", one)]
    rights += ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"]
    places = ["--tmpfs", "/run", "--tmpfs", "/run/lock", "--volume", "/sys/fs/cgroup:/sys/fs/cgroup:ro"]
    subprocess.run([DOCKER, "rm", "--force", NAME], capture_output=True, check=False)
    started = [DOCKER, "run", "--detach", "--name", NAME, "--network", "none", "--env", "container=docker"]
    subprocess.run([*started, *rights, *places, NAME], capture_output=True, check=True, timeout=60)
    try:
        one = Machine()
        until(lambda: "running" in one.root("systemctl", "is-system-running", check=False), "systemd is up")
        set_up(one)
        yield one
    finally:
        subprocess.run([DOCKER, "rm", "--force", NAME], capture_output=True, check=True, timeout=60)


def set_up(one: Machine) -> None:
    one.consilium("data", "synth", "--out", "/tmp/all", "--cases", "24", "--hospitals", "1", "--seed", "0")
    parts = ["--public-images", "4", "--label-maps", "8", "--validation", "1", "--test", "1", "--seed", "0"]
    one.consilium("data", "split", "--data", "/tmp/all", "--out", "/tmp/split", *parts)
    plan = ["--queries", "4", "--quorum", "1", "--delta", "1e-3", "--grid", "32,32,32", "--spacing", "1.4,1.4,1.4"]
    one.consilium("study", "init", STUDY, "--name", "units", "--labels", "background,anterior,posterior", *plan)
    one.root("sed", "-i", *(f"--expression={small}" for small in SMALL), f"{STUDY}/study.toml")
    one.consilium("study", "publish", STUDY, "--images", "/tmp/split/public/images")
    one.consilium("codec", "fit", STUDY, "--label-maps", "/tmp/split/public/label-maps", "--sites", "1")
    one.consilium("provision", "server", STUDY, "--host", "127.0.0.1")
    one.consilium("provision", "kit", STUDY, "north", "--out", "/tmp/kit")
    one.root("install", "-d", "-o", "consilium", "-g", "consilium", "-m", "0700", DATA)
    one.root("sh", "-c", f"cp -r /tmp/split/sites/hospital-01/. {DATA} && chown -R consilium: {DATA}")
    one.root("rm", "-r", "/tmp/all", "/tmp/split")
    said = one.consilium("site", "init", "--kit", "/tmp/kit", "--data", DATA, "--site-dir", SITE)
    one.fingerprint = said.splitlines()[-1]
    one.consilium("site", "consent", "--site-dir", SITE, "--by", "A. Noether", "--yes")
    one.consilium("site", "train", "--site-dir", SITE)
    one.root("systemd-tmpfiles", "--create")


def test_systemd_finds_nothing_wrong_with_the_units(machine: Machine) -> None:
    units = " ".join(f"/etc/systemd/system/{unit}.service" for unit in (CORE, SUPERLINK, GATEWAY, WORKER, NODE))
    assert machine.root("sh", "-c", f"systemd-analyze verify {units} 2>&1").strip() == ""


def test_units_started_by_systemd_connect_and_answer_a_study_and_end_cleanly(machine: Machine) -> None:
    machine.root("systemctl", "start", CORE, SUPERLINK, GATEWAY)
    for logs in (f"{STUDY}/logs", f"{STUDY}/flower/logs"):
        until(lambda logs=logs: ready(machine, f"{logs}/daemons.jsonl"), "the server is up")
    request = f"{SITE}/request.json"
    whom = ("--site", "north", "--pool", "north", "--fingerprint", machine.fingerprint)
    machine.consilium("provision", "approve", STUDY, request, *whom)
    assert "FAIL" not in machine.consilium("site", "doctor", "--site-dir", SITE)
    machine.root("systemctl", "start", WORKER, NODE)
    until(lambda: ready(machine, f"{SITE}/node/logs/daemons.jsonl"), "the site is connected")
    assert "north: admitted, online" in machine.consilium("provision", "list", STUDY)

    users = {role: {user for user, line in machine.processes() if role in line} for role in ROLES}
    assert users == {role: {user} for role, user in ROLES.items()}
    seen_by_the_node(machine)
    seen_by_the_gateway(machine)
    taken_by_an_app(machine)
    machine.consilium("study", "run", STUDY)
    status = json.loads(machine.consilium("study", "status", STUDY, "--json"))
    assert status["answers"] == 4
    machine.consilium("verify", f"{STUDY}/ledger.sqlite")

    # systemd restarts a killed unit; a stopped unit ends with status 0 and leaves no process.
    machine.root("systemctl", "kill", "--signal", "KILL", NODE)
    until(lambda: machine.show(NODE, "NRestarts") == "1", "systemd starts the node again")
    machine.root("systemctl", "stop", NODE, WORKER, GATEWAY, SUPERLINK, CORE)
    for unit in (NODE, WORKER, GATEWAY, SUPERLINK, CORE):
        assert (machine.show(unit, "Result"), machine.show(unit, "ExecMainStatus")) == ("success", "0"), unit
    assert not [line for user, line in machine.processes() if user.startswith("consilium")]


def seen_by_the_node(machine: Machine) -> None:
    """Check that the node's user and unit can read nothing of the site except ``node/``."""
    as_node = ("runuser", "-u", "consilium-node", "--")
    for path in (DATA, f"{SITE}/teachers", f"{SITE}/site.toml", f"{SITE}/site-ledger.sqlite", f"{STUDY}/keys"):
        assert machine.denied(*as_node, "ls", path), path
    inside = ("nsenter", "--mount", "--target", machine.show(NODE, "MainPID"))
    found = machine.root(*inside, "find", "/srv", "-type", "f").splitlines()
    assert f"{SITE}/node/link.json" in found
    assert not [path for path in found if not path.startswith(f"{SITE}/node/")]
    assert machine.denied(*inside, *as_node, "touch", f"{SITE}/node/keys/x")


def seen_by_the_gateway(machine: Machine) -> None:
    """Check that the gateway's user can read neither SuperLink's files nor the operators' secret, and its unit sees
    none.
    """
    as_gateway = ("runuser", "-u", "consilium-gateway", "--")
    for path in (f"{STUDY}/flower/operator.secret", f"{STUDY}/flower/superlink.db", f"{STUDY}/keys", f"{STUDY}/relay"):
        assert machine.denied(*as_gateway, "ls", path), path
    inside = ("nsenter", "--mount", "--target", machine.show(GATEWAY, "MainPID"))
    found = machine.root(*inside, "find", "/srv", "-type", "f").splitlines()
    assert f"{STUDY}/gateway/nodes.json" in found
    assert not [path for path in found if not path.startswith((f"{STUDY}/gateway/", f"{STUDY}/objects/"))]
    assert machine.show(GATEWAY, "MemoryMax") == str(1 << 30)


APP = "/tmp/thief"


def taken_by_an_app(machine: Machine) -> None:
    """Check that an app submitted with the operators' secret runs as SuperLink's user and reads neither key
    nor ledger.
    """
    wanted = ("keys/sealing.key", "keys/ledger.key", "tls/authority/ca.key", "ledger.sqlite")
    for name, text in (THIEF | {"run.toml": f'study = "{STUDY}"\nout = "{STUDY}/flower/stolen"\n'}).items():
        machine.write(f"{APP}/{name}", text)
    machine.root("chmod", "-R", "a+rX", APP)
    home = f"FLWR_HOME={STUDY}/keys/flower"
    submitted = ("flwr", "run", APP, "consilium", "--run-config", f"{APP}/run.toml")
    machine.root("runuser", "-u", "consilium", "--", "env", home, *submitted)
    until(lambda: machine.root("cat", f"{STUDY}/flower/stolen", check=False), "the app ran")
    assert machine.root("cat", f"{STUDY}/flower/stolen").split() == ["flower/operator.secret"]
    for path in (*wanted, "keys/flower/credentials.yaml"):
        assert machine.denied("runuser", "-u", "consilium-superlink", "--", "cat", f"{STUDY}/{path}"), path


def ready(machine: Machine, path: str) -> bool:
    return any(fact["event"] == "all-ready" for fact in machine.facts(path))
