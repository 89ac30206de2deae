"""Tests the federation in real containers: images, study, ledger, who sees what, teardown. `make test-docker`
runs it.

Needs a Docker engine and compose; `docker/engine.sh run` starts an engine where none answers.
"""

from __future__ import annotations

import json
import re
import subprocess
import tarfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests.docker.conftest import ENVIRONMENT
from tests.docker.scan import SCAN
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "consilium-test"
IMAGES = ("consilium-gateway:local", "consilium-server:local", "consilium-site:local", "consilium-dashboard:local")

pytestmark = pytest.mark.docker


class Compose:
    """Runs commands on the composition under test, as an operator would."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.docker = environment.get("DOCKER", "docker")

    def run(self, *words: str, check: bool = True, timeout_s: float = 300) -> str:
        done = subprocess.run(
            [self.docker, *words], env=self.environment, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def containers(self) -> dict[str, str]:
        """Return the running containers by service."""
        form = '{{.Label "com.docker.compose.service"}} {{.ID}}'
        label = f"label=com.docker.compose.project={PROJECT}"
        return dict(line.split() for line in self.run("ps", "--filter", label, "--format", form).splitlines())


@pytest.fixture(scope="module")
def compose(images: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    """Build everything, start it and run the study to its end; remove it afterwards in any case."""
    values = {
        **ENVIRONMENT,
        "COMPOSE_PROJECT_NAME": PROJECT,
        "OUT": str(tmp_path_factory.mktemp("out")),
        "CONSILIUM_QUERIES": "8",
        "CONSILIUM_STEPS": "60",
    }
    made = Compose(values)
    done = subprocess.run(
        ["make", "docker-demo"], cwd=ROOT, env=values, check=False, timeout=3600, capture_output=True, text=True
    )
    try:
        if done.returncode != 0:
            pytest.fail(f"the federation did not come up:\n{(done.stdout + done.stderr)[-6000:]}", pytrace=False)
        yield made
    finally:
        subprocess.run(["make", "docker-down"], cwd=ROOT, env=values, check=True, timeout=300)
    for kind in ("ps -a", "volume ls", "network ls"):
        left = made.run(*kind.split(), "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}")
        assert left == ""


def test_a_study_in_containers_ends_with_a_bundle_and_a_ledger_that_holds(compose: Compose) -> None:
    out = Path(compose.environment["OUT"])
    status = json.loads((out / "status.json").read_text(encoding="utf-8"))
    assert status["answers"] == status["planned_queries"] == 8
    assert 0 < status["epsilon"]["exact"] <= 8.0 < status["epsilon"]["rdp"]
    assert set(status["sites"]) == {"site-1", "site-2", "site-3"}
    assert "OK: " in (out / "verify.txt").read_text(encoding="utf-8")
    assert list((out / "bundle").rglob("*.pt"))


def test_every_daemon_is_healthy_and_no_process_is_root_s(compose: Compose) -> None:
    containers = compose.containers()
    assert len(containers) == 10
    for service, container in containers.items():

        def healthy(container: str = container) -> dict | None:
            state = json.loads(compose.run("inspect", container))[0]
            return state if state["State"]["Health"]["Status"] == "healthy" else None

        state = until(healthy, service, timeout_s=300, pause_s=2.0)  # the demo restarts the server while it copies
        assert state["HostConfig"]["ReadonlyRootfs"] is True
        users = compose.run("top", container, "-eo", "pid,uid,comm").splitlines()[1:]
        assert {line.split()[1] for line in users} == {"10001"}, (service, users)


def test_a_site_s_network_shows_the_gateway_s_one_port_and_nothing_of_the_server(compose: Compose) -> None:
    worker = compose.containers()["site-1-worker"]
    found = compose.run("exec", worker, "python3", "-c", SCAN, "gateway", timeout_s=600)
    assert json.loads(found) == [8443]
    for name in ("superlink", "server", "dashboard", "study", "site-2-worker", "site-2-node"):
        unknown = (
            f"import socket, sys\ntry: socket.getaddrinfo({name!r}, 8000)\nexcept OSError: sys.exit(0)\nsys.exit(1)"
        )
        compose.run("exec", worker, "python3", "-c", unknown)


def test_what_takes_messages_sees_neither_data_nor_models_and_the_gateway_no_ledger(compose: Compose) -> None:
    containers = compose.containers()
    code = "from pathlib import Path; print(sorted(str(p) for d in ('/site', '/study') for p in Path(d).rglob('*')))"

    def seen(service: str) -> str:
        return compose.run("exec", containers[service], "python3", "-c", code)

    assert "weights.pt" in seen("site-1-worker")
    assert ".nii.gz" in seen("site-1-worker")
    assert not re.search(r"weights|\.nii|ledger|data/", seen("site-1-node"))
    assert "worker.sock" in seen("site-1-node")
    assert not re.search(r"ledger|sealing|ca\.key|labels", seen("gateway"))


REACH = """
import json, os, socket, ssl, sys
from pathlib import Path
read = []
for path in Path("/study").rglob("*"):
    try:
        if path.is_file() and (b"PRIVATE KEY" in path.read_bytes() or path.suffix in (".key", ".secret")):
            read.append(str(path))
    except OSError:
        pass
listening = []
for name in ("localhost", "superlink", "server", "register", "study", "prepare"):
    for port in (8000, 8001):
        try:
            socket.create_connection((name, port), timeout=1).close()
            listening.append(f"{name}:{port}")
        except OSError:
            pass
ledger, database = (bool(list(Path("/study").rglob(name))) for name in ("ledger.sqlite", "superlink.db"))
print(json.dumps({"read": sorted(read), "listening": listening, "ledger": ledger, "database": database}))
"""
"""Reports which keys, ledgers and parts of SuperLink a process in a container can reach."""

ASK = """
import socket
client = socket.socket(socket.AF_UNIX)
client.connect("/study/gateway/run/fleet.sock")
client.sendall(b"POST /v1/control/%s HTTP/1.1\\r\\nhost: s\\r\\ncontent-length: 0\\r\\nconnection: close\\r\\n\\r\\n")
print(client.recv(4096).split()[1].decode())
"""


def test_from_a_stolen_gateway_neither_key_nor_ledger_nor_control_route_is_in_reach(compose: Compose) -> None:
    gateway = compose.containers()["gateway"]
    found = json.loads(compose.run("exec", gateway, "python3", "-c", REACH))
    assert found == {"read": ["/study/gateway/server.key"], "listening": [], "ledger": False, "database": False}
    for route in ("start-run", "list-nodes", "register-node"):
        assert compose.run("exec", gateway, "python3", "-c", ASK % route).strip() == "404"


def test_an_app_in_superlinks_container_finds_neither_key_nor_ledger(compose: Compose) -> None:
    """SuperLink runs every submitted app as the user of its own processes."""
    found = json.loads(compose.run("exec", compose.containers()["superlink"], "python3", "-c", REACH))
    assert found["read"] == ["/study/flower/" + name for name in ("operator.secret", "server.key", "superexec.secret")]
    assert found["ledger"] is False
    assert found["listening"] == ["localhost:8000"]


def test_the_core_listens_on_no_network(compose: Compose) -> None:
    found = json.loads(compose.run("exec", compose.containers()["server"], "python3", "-c", REACH))
    assert found["listening"] == []
    assert found["ledger"] is True


def test_from_a_stolen_dashboard_neither_key_nor_control_route_is_in_reach(compose: Compose) -> None:
    found = json.loads(compose.run("exec", compose.containers()["dashboard"], "python3", "-c", REACH))
    assert found == {"read": ["/study/dashboard-tls/server.key"], "listening": [], "ledger": True, "database": False}


def test_no_layer_holds_a_secret_and_each_image_lists_its_contents(compose: Compose) -> None:
    for image in IMAGES:
        saved = subprocess.run(
            [compose.docker, "save", image], env=compose.environment, check=True, capture_output=True, timeout=600
        ).stdout
        found = 0
        with tarfile.open(fileobj=BytesIO(saved)) as layers:
            for layer in layers:
                if not layer.name.endswith("layer.tar"):
                    continue
                stream = layers.extractfile(layer)
                assert stream is not None
                with tarfile.open(fileobj=stream) as files:
                    found += assert_no_secret(files, image)
        assert found > 1000
        history = compose.run("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
        assert not re.search(r"(?i)token|passw|://[^/ ]*:[^/ ]*@", history)
        listed = json.loads(
            compose.run(
                "run", "--rm", "--network", "none", "--entrypoint", "cat", image, "/opt/consilium/sbom/sbom.json"
            )
        )
        assert listed["bomFormat"] == "CycloneDX"
        names = {entry["name"] for entry in listed["components"]}
        assert {"cryptography", "consilium", "libc6"} <= names
        assert ("torch" in names) == ("gateway" not in image)


def assert_no_secret(files: tarfile.TarFile, image: str) -> int:
    """Check that a layer has no private key and no credential; return how many files were checked."""
    count = 0
    for entry in files:
        if not entry.isfile() or not re.match(r"(\./)?(opt/consilium|study|site|root|home|tmp|etc)/", entry.name):
            continue
        count += 1
        name = Path(entry.name).name
        assert name not in (".netrc", ".pypirc", "pip.conf", "id_rsa", "credentials"), entry.name
        package = entry.name.partition("/site-packages/")[2].partition("/")[0]
        if package and package not in ("client", "common", "consilium", "server"):
            continue  # others' packages carry keys of their own test suites
        stream = files.extractfile(entry)
        assert stream is not None
        assert not re.search(rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\n[A-Za-z0-9+/]", stream.read()), (
            f"{image}: {entry.name}"
        )
    return count
