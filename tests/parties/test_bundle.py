"""Tests the offline bundle on two machines without this repository: a consortium and a hospital, each with
its part.

Each machine is a network namespace with a Docker engine of its own and default settings; one cable joins them. The
commands are those of docs/deployment.md. `make test-parties`; needs root, Docker, compose and iptables. If BUNDLE is
set, it names the folder of a bundle that `make bundle` made before.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests import waiting
from tests.docker.conftest import DOCKER, ROOT
from tests.docker.scan import SCAN
from tests.faults.deployment.parts import ip, namespaces_work

pytestmark = pytest.mark.docker

CONSORTIUM, HOSPITAL = "10.78.0.1", "10.78.0.2"
OWNERS = {"server": 20001, "site": 20002}
"""The administrators' user ids; the image does not know them, as on any machine."""
QUERIES = 4
PLAN = f"--labels background,anterior,posterior --spacing 1.4,1.4,1.4 --grid 32,32,32 --queries {QUERIES} --quorum 1"
CONNECTED_S = 600.0
ONE_THREAD = ("-e", "OMP_NUM_THREADS=1")


@dataclass
class Host:
    """Holds a machine with an engine, on which one party's administrator types."""

    name: str
    namespace: str
    folder: Path
    environment: dict[str, str]
    engine: subprocess.Popen[bytes] | None = None

    @property
    def owner(self) -> int:
        return OWNERS[self.name]

    @property
    def state(self) -> Path:
        return self.folder / "engine"

    def start_engine(self) -> None:
        self.state.mkdir()
        words = ["--host", f"unix://{self.state}/socket", "--data-root", str(self.state / "data")]
        words += ["--exec-root", str(self.state / "exec"), "--pidfile", str(self.state / "pid")]
        with (self.folder / "engine.log").open("wb") as log:
            inside = ["nsenter", f"--net=/run/netns/{self.namespace}"]
            self.engine = subprocess.Popen([*inside, "dockerd", *words], stdout=log, stderr=log)
        self.environment |= {"DOCKER_HOST": f"unix://{self.state}/socket"}
        until(lambda: self.types("docker", "info", check=False).returncode == 0, f"{self.name}'s engine", timeout_s=60)

    def stop_engine(self) -> None:
        if self.engine is not None:
            self.engine.terminate()
            self.engine.wait(90)
        subprocess.run(["rm", "-rf", str(self.state)], check=False)

    def types(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine, in the folder where the bundle was unpacked."""
        command = [DOCKER, *words[1:]] if words[0] == "docker" else list(words)
        done = subprocess.run(
            ["nsenter", f"--net=/run/netns/{self.namespace}", *command],
            cwd=self.folder / "bundle",
            env={**os.environ, **self.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert not check or done.returncode == 0, f"{' '.join(words)}\n{done.stdout}{done.stderr}"
        return done

    def compose(self, *words: str, check: bool = True) -> str:
        """Run ``docker compose -f server.yml`` or ``site.yml``, by whichever generation is installed."""
        v2 = subprocess.run([DOCKER, "compose", "version"], capture_output=True, check=False).returncode == 0
        start = ["docker", "compose"] if v2 else ["docker-compose"]
        return self.types(*start, "--file", f"{self.name}.yml", *words, check=check).stdout

    def healthy(self) -> dict[str, str]:
        """Return the health of each running service."""
        form = '{{.Label "com.docker.compose.service"}} {{.Status}}'
        lines = self.types("docker", "ps", "--format", form).stdout.splitlines()
        return {line.split()[0]: line.partition("(")[2].rstrip(")") for line in lines}


until = partial(waiting.until, timeout_s=300.0, pause_s=1.0)


@pytest.fixture(scope="module")
def hosts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """Yield two machines with the bundle's files, and nothing loaded."""
    if not namespaces_work() or shutil.which("iptables") is None:
        pytest.skip("needs root, network namespaces and iptables")
    scratch = tmp_path_factory.mktemp("parties")
    bundle = Path(os.environ.get("BUNDLE", scratch / "bundle")).absolute()
    if not bundle.exists():
        request.getfixturevalue("images")
        values = {**os.environ, "BUNDLE": str(bundle)}
        subprocess.run(["docker/bundle.sh"], cwd=ROOT, env=values, check=True, capture_output=True)
    made = []
    for name in ("server", "site"):
        folder = scratch / name
        folder.mkdir()
        shutil.copytree(bundle, folder / "bundle", copy_function=os.symlink)
        number = str(OWNERS[name])
        owner = {"CONSILIUM_UID": number, "CONSILIUM_GID": number, "COMPOSE_PROJECT_NAME": name}
        made.append(Host(name, f"cp{os.getpid() % 100000}{name[:2]}", folder, owner))
    try:
        for host in made:
            ip("netns", "add", host.namespace)
            ip("-n", host.namespace, "link", "set", "lo", "up")
        first, second = (host.namespace for host in made)
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, address in zip(made, (CONSORTIUM, HOSPITAL), strict=True):
            ip("-n", host.namespace, "addr", "add", f"{address}/24", "dev", "eth0")
            ip("-n", host.namespace, "link", "set", "eth0", "up")
            host.start_engine()
        yield made[0], made[1]
    finally:
        for host in made:
            with contextlib.suppress(Exception):
                host.compose("down", "--volumes", "--timeout", "40", check=False)
            host.stop_engine()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, check=False)
        shutil.rmtree(scratch)


def folder_of(host: Host, *parts: str) -> Path:
    """Make a folder as the machine's administrator."""
    path = host.folder.joinpath(*parts)
    path.mkdir(mode=0o700)
    os.chown(path, host.owner, host.owner)
    return path


def consortium_opens(host: Host) -> None:
    """Set up a study with synthetic volumes, provision it, and start its daemons."""
    study = folder_of(host, "study")
    folder_of(host, "study", "dashboard")
    host.environment |= {"STUDY_DIR": str(study)}
    host.types("docker", "load", "--input", "images-server.tar.gz")

    def consilium(*words: str) -> str:
        return host.compose("run", "--rm", "-T", *ONE_THREAD, "server", *words)

    consilium("data", "synth", "--out", "/study/all", "--cases", "14", "--hospitals", "1", "--seed", "7")
    parts = f"--public-images {QUERIES} --label-maps 6 --validation 1 --test 1 --seed 7".split()
    consilium("data", "split", "--data", "/study/all", "--out", "/study/split", *parts)
    consilium("study", "init", "/study", "--name", "bundle", "--delta", "1e-3", *PLAN.split())
    recipe = (study / "study.toml").read_text(encoding="utf-8").split("[teacher]")
    sections = f"[teacher]{recipe[1]}".replace("[student]", "\n[student]")
    (study / "study.toml").write_text(recipe[0] + small(sections), encoding="utf-8")
    consilium("study", "publish", "/study", "--images", "/study/split/public/images")
    consilium("codec", "fit", "/study", "--label-maps", "/study/split/public/label-maps", "--sites", "1")
    consilium("provision", "server", "/study", "--host", CONSORTIUM)
    host.compose("up", "-d")
    until(lambda: set(host.healthy().values()) == {"healthy"} and len(host.healthy()) == 4, "the server's four parts")
    consilium("provision", "kit", "/study", "north", "--out", "/study/kits/north")


def small(sections: str) -> str:
    """Shorten recipes to a few steps, because these tests do not examine what is learnt."""
    lines = sections.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("steps ="):
            lines[number] = "steps = 4"
        if line.startswith("channels ="):
            lines[number] = "channels = [4, 8]"
    return "\n".join(lines) + "\n"


def test_two_parties_with_the_bundle_alone_connect_in_ten_minutes_and_answer_a_study(hosts: tuple[Host, Host]) -> None:
    server, site = hosts
    consortium_opens(server)
    data = folder_of(site, "data")
    folder_of(site, "site")
    signing_key = server.folder / "study" / "keys" / "ledger.key"
    subprocess.run([ROOT / "docker" / "sign.sh", site.folder / "bundle", signing_key], check=True)
    shutil.copytree(server.folder / "study" / "kits" / "north", site.folder / "bundle" / "kit")
    site.environment |= {"SITE_DIR": str(site.folder / "site"), "DATA_DIR": str(data / "north")}
    patients = server.folder / "study" / "split" / "sites"
    shutil.copytree(next(patients.iterdir()), data / "north")
    subprocess.run(["chown", "-R", f"{site.owner}:{site.owner}", str(data)], check=True)
    kit = ("--volume", f"{site.folder}/bundle/kit:/kit:ro")

    started = time.monotonic()  # the hospital's administrator begins, with bundle and kit
    public = ("-pubin", "-inkey", "kit/consortium.pem")
    site.types("openssl", "pkeyutl", "-verify", "-rawin", *public, "-sigfile", "SHA256SUMS.sig", "-in", "SHA256SUMS")
    site.types("sha256sum", "--check", "SHA256SUMS")
    site.types("docker", "load", "--input", "images-site.tar.gz")
    run = ("run", "--rm", "-T", *ONE_THREAD)
    said = site.compose(*run, *kit, "worker", "site", "init", "--kit", "/kit", "--data", "/data", "--site-dir", "/site")
    fingerprint = said.splitlines()[-1]
    doctor = site.compose(*run, "worker", "site", "doctor", "--site-dir", "/site", check=False)
    failed = [line.split()[1] for line in doctor.splitlines() if line.startswith("FAIL")]
    assert sorted(failed) == ["admission:", "consent:", "teachers:"]
    # The request goes by mail; the consortium is told the fingerprint over the telephone.
    request = shutil.copy(site.folder / "site" / "request.json", server.folder / "study" / "request.json")
    os.chown(request, server.owner, server.owner)
    whom = ("--site", "north", "--pool", "north", "--fingerprint", fingerprint)
    operator = ("run", "--rm", "-T", *ONE_THREAD, "operator")
    approve = ("provision", "approve", "/study", "/study/request.json", *whom)
    server.compose(*operator, *approve)
    site.compose(*run, "worker", "site", "consent", "--site-dir", "/site", "--by", "A. Noether", "--yes")
    site.compose(*run, "worker", "site", "train", "--site-dir", "/site")
    site.compose("up", "-d")
    listed = (*operator, "provision", "list", "/study")
    until(lambda: "north: admitted, online" in server.compose(*listed), "the site is connected", timeout_s=CONNECTED_S)
    took = time.monotonic() - started
    print(f"connected {took:.0f} s after the bundle and the kit were there")
    assert took < CONNECTED_S
    until(lambda: site.healthy() == {"worker": "healthy", "node": "healthy"}, "both parts of the site are healthy")

    assert reached(site, "worker", CONSORTIUM) == reached(site, "node", CONSORTIUM) == [8443]
    assert reached(server, "gateway", HOSPITAL) == []  # nothing listens at the hospital
    seen = site.compose(
        "exec", "-T", "node", "find", "/site", "/data", "-name", "*.nii.gz", "-o", "-name", "*.pt", check=False
    )
    assert seen == ""
    for host, services in ((server, ("superlink", "server", "gateway", "dashboard")), (site, ("worker", "node"))):
        for service in services:
            container = host.compose("ps", "-q", service).strip()
            users = host.types("docker", "top", container, "-eo", "pid,uid,comm").stdout.splitlines()[1:]
            assert {line.split()[1] for line in users} == {str(host.owner)}, (service, users)

    server.compose(*operator, "study", "run", "/study")
    status = json.loads(server.compose("exec", "-T", "server", "consilium", "study", "status", "/study", "--json"))
    assert status["answers"] == status["planned_queries"] == QUERIES
    server.compose("exec", "-T", "server", "consilium", "verify", "/study/ledger.sqlite")
    a_second_study_at_the_same_port(server, site)


def a_second_study_at_the_same_port(server: Host, site: Host) -> None:
    """Check that one gateway serves both studies: the doctor is admitted to the second, and the first's sites stay
    online.
    """
    run, second = ("run", "--rm", "-T", *ONE_THREAD), "/study/studies/second"
    plan = ["--name", "second", "--ledger", "/study", "--delta", "1e-3"]
    server.compose(*run, "server", "study", "init", second, *plan, *PLAN.split())
    server.compose(*run, "server", "study", "publish", second, "--images", "/study/split/public/images")
    server.compose(
        *run, "server", "codec", "fit", second, "--label-maps", "/study/split/public/label-maps", "--sites", "1"
    )
    server.compose(*run, "server", "provision", "server", second, "--behind", "/study")
    server.environment |= {"BEHIND": "studies/second"}
    server.compose("--file", "behind.yml", "up", "-d", "gateway")
    first = dict(server.environment)
    server.environment |= {"STUDY": "studies/second", "COMPOSE_PROJECT_NAME": "second"}
    server.compose("up", "-d", "server", "superlink")
    server.compose(*run, "server", "provision", "kit", second, "north", "--out", f"{second}/kits/north")
    shutil.copytree(server.folder / "study" / "studies" / "second" / "kits" / "north", site.folder / "bundle" / "kit-2")
    kit = ("--volume", f"{site.folder}/bundle/kit-2:/kit:ro")
    said = site.compose(*run, *kit, "worker", "site", "join", "--from", "/site", "--kit", "/kit")
    request = shutil.copy(site.folder / "site" / "studies" / "second" / "request.json", server.folder / "study")
    os.chown(request, server.owner, server.owner)
    whom = ("--site", "north", "--pool", "north", "--fingerprint", said.splitlines()[-1])
    server.compose(*run, "operator", "provision", "approve", second, "/study/request.json", *whom)
    doctor = site.compose(*run, "worker", "site", "doctor", "--site-dir", "/site/studies/second", check=False)
    failed = [line.split()[1] for line in doctor.splitlines() if line.startswith("FAIL")]
    assert sorted(failed) == ["consent:", "teachers:"], doctor
    server.environment.clear()
    server.environment.update(first)
    listed = server.compose(*run, "operator", "provision", "list", "/study")
    assert "north: admitted, online" in listed


def reached(host: Host, service: str, address: str) -> list[int]:
    """Return every port of ``address`` that takes a connection from inside a service's container."""
    return list(json.loads(host.compose("exec", "-T", service, "python3", "-c", SCAN, address)))
