"""The federation in containers, for real: image, study, ledger, teardown. Needs a Docker engine and compose."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "consilium-test"

pytestmark = pytest.mark.docker


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment for make; whatever happens, the federation is removed."""
    values = {
        **os.environ,
        "COMPOSE_PROJECT_NAME": PROJECT,
        "OUT": str(tmp_path / "out"),
        "CONSILIUM_QUERIES": "8",
        "CONSILIUM_STEPS": "60",
    }
    docker = values.get("DOCKER", "docker")
    if subprocess.run([docker, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker engine answers")
    yield values
    subprocess.run(["make", "docker-down"], cwd=ROOT, env=values, check=True, timeout=180)
    for kind in ("ps -a", "volume ls", "network ls"):
        left = subprocess.run(
            [docker, *kind.split(), "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}"],
            capture_output=True,
            check=True,
            text=True,
        )
        assert left.stdout == ""


def test_a_study_in_containers_ends_with_a_bundle_and_a_ledger_that_holds(environment: dict[str, str]) -> None:
    done = subprocess.run(
        ["make", "docker-demo"], cwd=ROOT, env=environment, check=False, timeout=1200, capture_output=True, text=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    out = Path(environment["OUT"])
    status = json.loads((out / "status.json").read_text(encoding="utf-8"))
    assert status["answers"] == status["planned_queries"] == 8
    assert 0 < status["epsilon"]["exact"] <= 8.0 < status["epsilon"]["rdp"]
    assert set(status["sites"]) == {"site-1", "site-2", "site-3"}
    assert "OK: " in (out / "verify.txt").read_text(encoding="utf-8")
    assert list((out / "bundle").rglob("*.pt"))
