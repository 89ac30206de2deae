"""Tests the text of the compose file, the image and their scripts: each service's volumes, networks and user."""

from __future__ import annotations

import importlib.util
import re
import shlex
import socket
import sys
import tempfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
import typer.main
import yaml

from common.supervision import json_report
from consilium.cli.main import app
from server.study.workspace import Workspace
from tests.small_servers import http_server, serving

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
SITES = ("site-1", "site-2", "site-3")
WORKERS = tuple(f"{site}-worker" for site in SITES)
NODES = tuple(f"{site}-node" for site in SITES)
DAEMONS = ("superlink", "server", "gateway", "dashboard", *WORKERS, *NODES)
SECRET = ("keys", "tls", "flower")
"""Volumes with keys, the certificate authority, and SuperLink's database and secrets."""
NETWORK = {"/study/flower": "flower", "/study/relay": "relay", "/study/gateway/run": "fleet"}
"""Mounts of SuperLink and the ServerApp: SuperLink's own files and two sockets."""
STUDY = {"/study": "study"} | {f"/study/{name}": name for name in ("objects", "gateway", *SECRET)} | NETWORK
ONE_SHOTS = ("prepare", "register", "study")
SCRIPTS = ("prepare.sh", "register.sh")


def volumes_of(name: str) -> dict[str, str]:
    """Return a service's mounts: volume by target."""
    return {target: volume for volume, target, *_ in (mount.split(":") for mount in SERVICES[name].get("volumes", ()))}


def test_the_services_are_the_parties_of_a_study() -> None:
    assert set(SERVICES) == {*DAEMONS, *ONE_SHOTS}


def test_the_compose_file_uses_only_what_both_generations_understand() -> None:
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"services", "networks", "volumes"}
    for service in SERVICES.values():
        assert not service.keys() & {"gpus", "develop", "post_start", "pre_stop", "extends", "build"}
        assert "start_interval" not in service.get("healthcheck", {})
        for condition in service.get("depends_on", {}).values():
            assert condition.keys() == {"condition"}


@pytest.mark.parametrize("name", SERVICES)
def test_no_service_has_a_privilege(name: str) -> None:
    service = SERVICES[name]
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] is True
    assert service["init"] is True
    assert not service.keys() & {"privileged", "cap_add", "devices", "pid", "ipc", "userns_mode", "group_add"}


@pytest.mark.parametrize("name", SERVICES)
def test_no_port_is_published_and_no_folder_of_the_host_is_mounted(name: str) -> None:
    assert "ports" not in SERVICES[name]
    assert set(volumes_of(name).values()) <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", SERVICES)
def test_no_secret_is_in_the_environment(name: str) -> None:
    environment = SERVICES[name].get("environment", {})
    assert not [key for key in environment if re.search("key|secret|token|passw", key, re.IGNORECASE)]
    assert environment.keys() <= {
        "TERM",
        "NO_COLOR",
        "OMP_NUM_THREADS",
        "CONSILIUM_QUERIES",
        "CONSILIUM_STEPS",
        "CONSILIUM_SEED",
    }


def test_a_party_sees_its_own_volumes_and_no_other() -> None:
    for number, site in enumerate(SITES, start=1):
        assert volumes_of(f"{site}-worker") == {"/site": site, "/site/node": f"node-{number}"}
    for name in ("server", "register", "study"):
        assert volumes_of(name) == STUDY


def test_what_takes_messages_from_outside_sees_neither_data_nor_models() -> None:
    for number, site in enumerate(SITES, start=1):
        assert volumes_of(f"{site}-node") == {"/site/node": f"node-{number}"}


def test_the_gateway_sees_no_ledger_and_writes_nothing() -> None:
    assert SERVICES["gateway"]["volumes"] == [
        "objects:/study/objects:ro",
        "gateway:/study/gateway:ro",
        "fleet:/study/gateway/run:ro",
    ]


def test_superlink_and_the_serverapp_mount_neither_key_nor_ledger_and_the_core_has_no_network() -> None:
    assert volumes_of("superlink") == NETWORK
    for file in ("docker-compose.yml", "docker/server.yml"):
        services = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"]
        seen = {mount.rpartition(":")[2].rpartition("}")[2] for mount in services["superlink"]["volumes"]}
        assert {path.removeprefix("/study") for path in seen} == {"/flower", "/relay", "/gateway/run"}
        assert after(services["superlink"]["command"], "--only") == "network"
        assert after(services["server"]["command"], "--only") == "core"
        assert services["superlink"]["network_mode"] == services["server"]["network_mode"] == "none"


def test_the_dashboard_writes_nothing_but_its_own_decisions() -> None:
    mounts = SERVICES["dashboard"]["volumes"]
    assert [mount for mount in mounts if not mount.endswith(":ro")] == ["dashboard:/dashboard"]
    assert "study:/study:ro" in mounts


def test_neither_gateway_nor_dashboard_mounts_a_key_or_the_authority_or_superlinks_files() -> None:
    """A study's keys, its certificate authority and SuperLink's files have volumes that only other services mount."""
    study = Workspace(Path("/study"))
    kept = (study.sealing_key_file, study.signing_key_file, study.authority_dir, study.tls_dir, study.flower_dir)
    for name in SERVICES:
        targets = {Path(target) for target in volumes_of(name) if volumes_of(name)[target] in SECRET}
        if name in ("gateway", "dashboard") or name.startswith("site-"):
            assert not targets
        elif name == "superlink":
            assert targets == {study.flower_dir}
        else:
            assert all(any(path.is_relative_to(target) for target in targets) for path in kept)
    assert study.dashboard_tls_dir / "server.key" == Path(after(SERVICES["dashboard"]["command"], "--key"))
    assert study.gateway_dir / "server.key" == Path(after(SERVICES["gateway"]["command"], "--key"))
    assert set(volumes_of("gateway")) == {str(study.objects_dir), str(study.gateway_dir), str(study.fleet_dir)}


def test_of_superlink_the_gateway_has_a_socket_and_no_network_or_address() -> None:
    for file in ("docker-compose.yml", "docker/server.yml"):
        services = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))["services"]
        assert "networks" not in services["superlink"]
        joined = {name for name, one in services.items() if one.get("network_mode") == "service:superlink"}
        assert joined <= {"register", "study", "operator"}
        study = Workspace(Path("/study"))
        assert Path(after(services["gateway"]["command"], "--fleet")) == study.fleet_dir / "fleet.sock"
        assert not any("server:" in word or "8000" in word for word in services["gateway"]["command"])
        assert not set(services["gateway"]["networks"]) & set(services["dashboard"]["networks"])
        assert not [mount for mount in services["gateway"]["volumes"] if not mount.endswith(":ro")]


def test_of_a_study_behind_its_port_the_gateway_has_objects_nodes_and_socket() -> None:
    """The paths are those that `provision server --behind`, typed in the server's container, wrote for the gateway."""
    text = (ROOT / "docker" / "behind.yml").read_text(encoding="utf-8")
    services = yaml.safe_load(re.sub(r"\$\{(\w+)(:\?[^}]*)?\}", r"$\1", text))["services"]
    study = Workspace(Path("/study/$BEHIND"))
    assert list(services) == ["gateway"]
    assert services["gateway"]["volumes"] == [
        f"$STUDY_DIR/$BEHIND/{folder.name}:{folder}:ro" for folder in (study.objects_dir, study.gateway_dir)
    ]
    assert study.fleet_dir.is_relative_to(study.gateway_dir)
    assert study.nodes_file.is_relative_to(study.gateway_dir)


@pytest.mark.parametrize("study", [".", "studies/second"])
def test_what_the_dashboard_of_a_folder_must_not_see_is_hidden_from_it(study: str) -> None:
    text = (ROOT / "docker" / "server.yml").read_text(encoding="utf-8").replace("${STUDY:-.}", study)
    dashboard = yaml.safe_load(text)["services"]["dashboard"]
    hidden = [Path(mount.partition(":")[0]) for mount in dashboard["tmpfs"]]
    books, own = Workspace(Path("/study")), Workspace(Path("/study", study))
    for one in (books, own):
        secret = (one.sealing_key_file, one.signing_key_file, one.authority_dir, one.flower_dir, one.gateway_dir)
        for path in (*secret, one.relay_dir):
            assert any(path.is_relative_to(folder) for folder in hidden), path
        for path in (one.ledger_file, one.events_file, one.labels_dir, one.dashboard_tls_dir):
            assert not any(path.is_relative_to(folder) for folder in hidden), path
    assert Path(after(dashboard["command"], "--key")) == own.dashboard_tls_dir / "server.key"


def after(words: list[str], option: str) -> str:
    """Return the value of an option in a command."""
    return words[words.index(option) + 1]


def test_what_sees_several_parties_volumes_has_no_network() -> None:
    parties = {name: {volume.replace("node", "site") for volume in volumes_of(name).values()} for name in SERVICES}
    several = [
        n for n, seen in parties.items() if len({v for v in seen if v.startswith("site")}) + ("study" in seen) > 1
    ]
    assert several == ["prepare"]
    assert SERVICES["prepare"]["network_mode"] == "none"


def test_a_site_shares_a_network_with_the_gateway_alone() -> None:
    for site in SITES:
        members = {name for name in SERVICES if site in SERVICES[name].get("networks", ())}
        assert members == {f"{site}-worker", f"{site}-node", "gateway"}
        for part in ("worker", "node"):
            assert SERVICES[f"{site}-{part}"]["networks"] == [site]


def test_the_dashboard_is_on_a_network_of_its_own() -> None:
    assert [name for name in SERVICES if "dashboard" in SERVICES[name].get("networks", ())] == ["dashboard"]
    assert SERVICES["dashboard"]["networks"] == ["dashboard"]


def test_no_network_leads_outside() -> None:
    assert all(network == {"internal": True} for network in COMPOSE["networks"].values())
    for service in SERVICES.values():
        assert "networks" in service or service["network_mode"] in ("none", "service:superlink")


def test_daemons_are_watched_and_restarted_and_one_shots_are_not() -> None:
    for name in DAEMONS:
        assert SERVICES[name]["restart"] == "unless-stopped"
        assert SERVICES[name]["healthcheck"]["test"][:3] == ["CMD", "python3", "/opt/consilium/health.py"]
    for name in ONE_SHOTS:
        assert "restart" not in SERVICES[name]


def test_one_stage_waits_for_the_other() -> None:
    def waits(name: str) -> dict[str, str]:
        return {other: value["condition"] for other, value in SERVICES[name].get("depends_on", {}).items()}

    assert waits("dashboard") == {"server": "service_healthy"}
    for name in ("superlink", "server", "gateway"):
        assert waits(name) == {"prepare": "service_completed_successfully"}
    assert waits("register") == {"superlink": "service_healthy", "gateway": "service_healthy"}
    for site in SITES:
        assert waits(f"{site}-worker") == {"register": "service_completed_successfully"}
        assert waits(f"{site}-node") == {f"{site}-worker": "service_healthy"}
    assert waits("study") == dict.fromkeys(("server", "superlink", *NODES), "service_healthy")


@pytest.mark.parametrize(
    ("file", "parts"),
    [("site.yml", {"worker", "node"}), ("server.yml", {"superlink", "server", "operator", "gateway", "dashboard"})],
)
def test_what_a_party_runs_alone_has_no_privilege_and_one_port_at_most(file: str, parts: set[str]) -> None:
    services = yaml.safe_load((ROOT / "docker" / file).read_text(encoding="utf-8"))["services"]
    assert set(services) == parts
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["read_only"] is service["init"] is True
        assert service["user"].startswith("${CONSILIUM_UID:-10001}")
        published = [port for port in service.get("ports", []) if not port.startswith("127.0.0.1:")]
        assert len(published) == (name == "gateway")
        mounts = [mount.rpartition("}")[2] if mount.endswith(":ro") else mount for mount in service["volumes"]]
        assert all(mount.endswith(":ro") for mount in mounts) or name != "gateway"
    if file == "site.yml":
        assert [mount.rpartition(":")[2] for mount in services["node"]["volumes"]] == ["/site/node"]


@pytest.mark.parametrize("unit", sorted((ROOT / "docker" / "systemd").glob("*.service")), ids=lambda path: path.stem)
def test_systemd_runs_commands_that_exist_without_privilege(unit: Path) -> None:
    text = unit.read_text(encoding="utf-8")
    apart = unit.stem.endswith(("node", "superlink", "gateway"))
    user = unit.stem.replace("-site", "") if apart else "consilium"
    if unit.stem == "consilium-gateway":
        (started,) = re.findall(r"^ExecStart=\S+/python -P -m (\S+) ", text, re.MULTILINE)
        assert importlib.util.find_spec(started) is not None
    else:
        (line,) = re.findall(r"^ExecStart=\S+/consilium (.*)$", text, re.MULTILINE)
        assert_command_exists(shlex.split(line))
    for needed in (
        f"User={user}",
        f"Group={user}",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
    ):
        assert f"\n{needed}\n" in text
    if "node" in unit.stem:
        assert "\nTemporaryFileSystem=/srv" in text
        assert "\nBindPaths=/srv/consilium/site/node\n" in text
    if "superlink" in unit.stem:
        assert "\nTemporaryFileSystem=/srv" in text
        seen = re.findall(r"^Bind(?:ReadOnly)?Paths=/srv/consilium/study/(.*)$", text, re.MULTILINE)
        assert set(seen) == {"flower", "gateway/run", "relay"}
    if unit.stem == "consilium-server":
        assert "\nPrivateNetwork=yes\n" in text


def test_the_list_of_contents_names_what_is_installed() -> None:
    sbom = module("sbom")
    found = {entry["name"]: entry for entry in sbom.python_components(sys.executable, {"cryptography": "a" * 64})}
    assert found["cryptography"]["purl"] == f"pkg:pypi/cryptography@{metadata.version('cryptography')}"
    assert found["cryptography"]["hashes"] == [{"alg": "SHA-256", "content": "a" * 64}]
    assert "hashes" not in found["numpy"]


def test_the_image_ends_as_another_user_than_root_and_takes_only_what_is_named() -> None:
    text = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:10001"]
    last = [line for line in text.splitlines() if line.startswith("FROM ")][4:]
    assert last == [
        "FROM common AS gateway",
        "FROM common AS party",
        "FROM party AS site",
        "FROM party AS dashboard",
        "FROM party AS server",
    ]
    assert not re.search(r"^ADD ", text, re.MULTILINE)
    rules = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(rule for rule in rules if not rule.startswith("#")) == "*"
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE)
    for source in " ".join(copied).split():
        assert f"!{source.rstrip('/')}" in rules
        assert (ROOT / source).exists() or source == "README.md"


def commands_in_scripts() -> Iterator[tuple[str, list[str]]]:
    for script in SCRIPTS:
        text = (ROOT / "docker" / script).read_text(encoding="utf-8").replace("\\\n", " ")
        for line in text.splitlines():
            if line.strip().startswith("consilium "):
                yield script, shlex.split(line.strip().rstrip("&"))[1:]
    for name, service in SERVICES.items():
        if "entrypoint" not in service and name not in ("gateway", "dashboard"):
            yield name, service["command"]


@pytest.mark.parametrize(("where", "words"), list(commands_in_scripts()))
def test_every_command_is_one_that_consilium_has(where: str, words: list[str]) -> None:
    assert_command_exists(words, where=where)


DOCUMENTED = re.findall(
    r"^ *\$ consilium (.*)$",
    re.sub(r"\\\n\s*", " ", (ROOT / "docs" / "deployment.md").read_text(encoding="utf-8")),
    re.MULTILINE,
)


@pytest.mark.parametrize("line", DOCUMENTED)
def test_every_command_in_the_deployment_guide_exists(line: str) -> None:
    assert len(DOCUMENTED) > 10
    assert_command_exists(shlex.split(line))


def assert_command_exists(words: list[str], *, where: str = "") -> None:
    command: click.Command = typer.main.get_command(app)
    context = click.Context(command)
    rest = list(words)
    while hasattr(command, "get_command") and not (rest[0].startswith("-") and command.invoke_without_command):
        found = command.get_command(context, rest.pop(0))
        assert found is not None, f"{where}: no such command: {words}"
        command, context = found, click.Context(found, parent=context)
    known = {name: parameter for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    given = [word for word in rest if word.startswith("--")]
    assert set(given) <= set(known), f"{where}: {words}"
    required = [
        parameter for parameter in command.params if parameter.required and parameter.param_type_name == "option"
    ]
    assert all(set(parameter.opts) & set(given) for parameter in required), f"{where}: {words}"


def module(name: str) -> ModuleType:
    """Import a script of the containers, which belongs to no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docker" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture(scope="module")
def health() -> ModuleType:
    return module("health")


class _Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()


@pytest.fixture
def supernode(tmp_path: Path) -> Iterator[Path]:
    """Yield a process table that contains a SuperNode which answers."""
    with serving(http_server(_Healthy)) as server:
        for pid, words in {
            "1": ["/sbin/docker-init", "--", "consilium", "site", "up"],
            "7": [
                *("python", "-P", "-m", "client.operations.supernode", "contact"),
                *("--host", "127.0.0.1", "--port", str(server.server_port), ""),
            ],
        }.items():
            (tmp_path / pid).mkdir()
            (tmp_path / pid / "cmdline").write_bytes("\0".join(words).encode())
        yield tmp_path


def test_a_worker_is_healthy_when_it_listens(health: ModuleType) -> None:
    with tempfile.TemporaryDirectory() as folder:  # a Unix socket's path must be short
        (Path(folder) / "run").mkdir()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
            worker.bind(f"{folder}/run/worker.sock")
            with pytest.raises(OSError):  # bound, and nobody listens
                health.check_worker(Path(folder))
            worker.listen()
            health.check_worker(Path(folder))


def test_a_node_is_healthy_when_it_answers_and_was_let_in(health: ModuleType, supernode: Path, tmp_path: Path) -> None:
    report = json_report(tmp_path / "logs" / "daemons.jsonl")
    report("daemon-ready", daemon="launcher north", pid=1)
    with pytest.raises(OSError, match="let the SuperNode in"):
        health.check_node(tmp_path, supernode)
    report("daemon-ready", daemon="supernode north", pid=2)
    health.check_node(tmp_path, supernode)
    report("daemon-ended", daemon="supernode north", why="signal 9")
    report("daemon-ready", daemon="launcher north", pid=3)
    with pytest.raises(OSError, match="let the SuperNode in"):
        health.check_node(tmp_path, supernode)
    (supernode / "7" / "cmdline").write_bytes(b"sleep\0007")
    with pytest.raises(OSError, match="no SuperNode"):
        health.check_node(tmp_path, supernode)


def test_the_health_check_ends_with_a_status(health: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert health.main([]) == 2
    assert health.main(["server"]) == 1  # there is no /study here
    assert "unhealthy" in capsys.readouterr().err
