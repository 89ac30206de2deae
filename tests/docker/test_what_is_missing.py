"""Tests that scripts in `docker/` name a missing requirement once, with what to install, before they start anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("bash", "sed", "dirname", "find", "cp", "mktemp", "mkdir", "rm", "seq", "sleep", "tail", "id", "touch")
NO_ENGINE = "#!/bin/sh\nexit 1\n"
"""A Docker client that finds no engine."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a folder that is the whole PATH: common tools, and a Docker client without an engine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    program(folder / "docker", NO_ENGINE)
    return folder


def program(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def refusal(path: Path, *words: str, **variables: str) -> str:
    """Run a script that must fail; return its output."""
    given = {"PATH": str(path), "DOCKER": str(path / "docker"), "ENGINE_DATA": str(path.parent / "engine")}
    done = subprocess.run(
        words, cwd=ROOT, env=given | variables, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout == ""
    return done.stderr


def engine(path: Path, **variables: str) -> str:
    """Return the refusal of `docker/engine.sh run`, which starts no command without an engine."""
    started = path.parent / "started"
    said = refusal(path, "docker/engine.sh", "run", "touch", str(started), **variables)
    assert not started.exists()
    return said


def test_without_a_client_engine_sh_says_what_to_install(path: Path) -> None:
    (path / "docker").unlink()
    (problem, fix) = engine(path, DOCKER="docker").splitlines()
    assert "no command `docker`" in problem
    assert "apt-get install docker.io" in fix


def test_without_dockerd_engine_sh_says_once_what_to_install(path: Path) -> None:
    (problem, fix) = engine(path).splitlines()
    assert "no `dockerd`" in problem
    for package in ("docker.io", "docker-compose", "mmdebstrap"):
        assert fix.count(package) == 1


def test_who_is_not_root_is_told_that_an_engine_needs_root(path: Path) -> None:
    program(path / "dockerd", NO_ENGINE)
    program(path / "id", "#!/bin/sh\necho 1000\n")
    assert "only root" in engine(path)


@pytest.mark.parametrize(
    "dockerd",
    [
        "#!/bin/sh\necho overlayfs is not supported >&2\nexit 1\n",
        "#!/bin/sh\necho waits for nothing >&2\nexec sleep 30\n",
    ],
    ids=["one that ends", "one that never answers"],
)
def test_a_command_is_not_run_beside_an_engine_that_does_not_answer(path: Path, dockerd: str) -> None:
    program(path / "dockerd", dockerd)
    program(path / "id", "#!/bin/sh\necho 0\n")
    *log, problem, fix = engine(path, ENGINE_TRIES="2").splitlines()
    assert log == [dockerd.split("echo ")[1].partition(" >&2")[0]]
    assert "does not answer" in problem
    assert fix.startswith("To fix: ")


def test_without_mmdebstrap_the_stand_in_of_the_base_image_says_what_to_install(path: Path) -> None:
    (problem, fix) = refusal(path, "docker/image.sh", BASE="python:3.11-slim").splitlines()
    assert problem.startswith("python:3.11-slim ")
    assert problem.endswith("needs mmdebstrap.")
    assert fix == "To fix: apt-get install mmdebstrap"


def test_a_base_image_by_digest_that_cannot_be_pulled_names_the_digest_and_the_stand_in(path: Path) -> None:
    """A stand-in never takes the place of an image that is named by its digest unless somebody asks for it."""
    digest = f"python@sha256:{'0' * 64}"
    program(path / "mmdebstrap", "#!/bin/sh\necho a stand-in was made >&2\nexit 1\n")
    (problem, fix) = refusal(path, "docker/image.sh", BASE=digest).splitlines()
    assert digest in problem
    assert "BASE=python:3.11-slim docker/image.sh" in fix


def test_without_compose_the_demo_says_what_to_install(path: Path) -> None:
    (problem, fix) = refusal(path, "docker/demo.sh", "up").splitlines()
    assert "neither" in problem
    assert "docker-compose" in fix


SHARED = """
import pytest

@pytest.fixture(scope="module")
def broken() -> None:
    raise RuntimeError("mmdebstrap is missing")

@pytest.mark.parametrize("number", range(9))
def test_with_it(broken: None, number: int) -> None: ...

def test_without_it() -> None: ...
"""


@pytest.mark.slow
def test_nine_tests_whose_shared_fixture_fails_print_its_error_once(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    (tmp_path / "test_shared.py").write_text(SHARED)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)  # its options leave out slow plugins
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    env = {name: value for name, value in os.environ.items() if name != "CI"}  # with CI set, pytest's summary is longer
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "1 passed, 9 errors" in done.stdout
    assert done.stdout.count("E       RuntimeError: mmdebstrap is missing") == 1
    assert done.stdout.count("the same error as in test_shared.py::test_with_it[0]") == 8
