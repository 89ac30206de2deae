"""What the tests in containers share: an engine and images of this tree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = os.environ.get("DOCKER", "docker")


@pytest.fixture(scope="session")
def images() -> None:
    """The four images, built from this tree."""
    if subprocess.run([DOCKER, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker engine answers")
    done = subprocess.run(["make", "docker-image"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
