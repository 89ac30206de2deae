"""Provides an engine and images of this tree to the tests in containers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCKER = os.environ.get("DOCKER", "docker")
ENVIRONMENT = {"BASE": "python:3.11-slim", **os.environ}
"""Environment of every command that builds images; without a registry, a stand-in replaces the base image."""


@pytest.fixture(scope="session")
def images() -> None:
    """Build the four images from this tree."""
    if subprocess.run([DOCKER, "info"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker engine answers")
    done = subprocess.run(
        ["make", "docker-image"], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=3600
    )
    if done.returncode != 0:
        pytest.fail(f"the images were not built:\n{(done.stdout + done.stderr)[-6000:]}", pytrace=False)
