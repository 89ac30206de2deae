"""Tests the systemd units and the base image as written: users, limits, and the image it is built from."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNITS = sorted((ROOT / "docker" / "systemd").glob("*.service"))


def facts(unit: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in unit.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        name, sign, value = line.partition("=")
        if sign and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_every_unit_is_bounded_in_memory_and_processes_and_gains_no_right(unit: Path) -> None:
    said = facts(unit)
    assert re.fullmatch(r"[1-9][0-9]*[MG]", said["MemoryMax"][0])
    assert 0 < int(said["TasksMax"][0]) <= 1024
    assert said["NoNewPrivileges"] == ["yes"]
    assert said["CapabilityBoundingSet"] == [""]
    assert said["ProtectSystem"] == ["strict"]


def test_no_two_units_of_a_server_share_a_user_and_the_gateways_is_in_no_group_of_superlinks() -> None:
    users = {unit.stem: facts(unit)["User"][0] for unit in UNITS}
    assert len({users[f"consilium-{name}"] for name in ("server", "superlink", "gateway")}) == 3
    members = re.findall(r"^m (\S+)\s+(\S+)$", (ROOT / "docker/systemd/consilium.sysusers").read_text(), re.M)
    assert {user for user, _ in members} == {"consilium"}
    gateway = facts(ROOT / "docker/systemd/consilium-gateway.service")
    assert "SupplementaryGroups" not in gateway
    assert not [
        path for name in ("BindPaths", "BindReadOnlyPaths") for path in gateway.get(name, []) if "flower" in path
    ]


def test_the_group_of_the_gateway_is_given_nothing_of_superlinks() -> None:
    lines = (ROOT / "docker/systemd/consilium.tmpfiles").read_text(encoding="utf-8").splitlines()
    given = {line.split()[1]: line.split()[4] for line in lines if line.startswith("z")}
    secrets = [path for path in given if "/flower" in path or path.endswith("/relay")]
    assert any(path.endswith("operator.secret") for path in secrets)
    assert {given[path] for path in secrets} == {"consilium-superlink"}
    assert {given[path] for path in given if "/gateway" in path or path.endswith("/objects")} == {"consilium-gateway"}


def test_the_base_image_is_one_image_unless_somebody_says_otherwise() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "docker/Dockerfile").read_text(encoding="utf-8"), re.M)
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    script = (ROOT / "docker/image.sh").read_text(encoding="utf-8")
    assert "base=${BASE:-$(sed -n 's/^ARG BASE=//p' docker/Dockerfile)}" in script
