"""Tests Consilium beside foreign packages of the same names: it refuses or warns (docs/adr/0021-installed-names.md)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
START = "from consilium.cli.main import main; main()"


def run(*arguments: str, cwd: Path, first: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line in an interpreter that searches ``first`` before it finds Consilium."""
    path = os.pathsep.join((str(first), str(ROOT)))
    return subprocess.run(
        [sys.executable, "-P", "-c", START, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("name", ["common", "client", "server"])
def test_a_foreign_package_ahead_on_the_path_runs_nothing(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("print('foreign code ran')\n", encoding="utf-8")
    done = run("--version", cwd=tmp_path, first=tmp_path)
    assert done.returncode != 0
    assert "foreign code ran" not in done.stdout
    assert f"the package {name!r} is loaded from" in done.stderr
    assert "virtual environment" in done.stderr


@pytest.mark.slow
def test_version_names_a_distribution_that_claims_one_of_our_names(tmp_path: Path) -> None:
    alone = run("--version", cwd=tmp_path, first=tmp_path)
    assert alone.returncode == 0, alone.stderr
    assert (alone.stdout.startswith("consilium "), alone.stderr) == (True, "")

    facts = tmp_path / "handy_things-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: handy-things\nVersion: 1.0\n", encoding="utf-8")
    (facts / "top_level.txt").write_text("common\nhandy\n", encoding="utf-8")
    beside = run("--version", cwd=tmp_path, first=tmp_path)
    assert beside.returncode == 0
    assert beside.stdout == alone.stdout
    assert "handy-things" in beside.stderr


@pytest.mark.parametrize("name", ["client", "common", "consilium", "server"])
def test_every_package_says_that_it_is_typed(name: str) -> None:
    assert (ROOT / name / "py.typed").is_file()


def test_a_user_id_without_a_name_can_import_consilium_and_then_monai() -> None:
    """A container may run under such a user id. MONAI asks ``getpass`` for the name when it is imported."""
    nameless = "def nobody(uid): raise KeyError(uid)\nimport pwd; pwd.getpwuid = nobody\n"
    asks = "import consilium, getpass, os; assert getpass.getuser() == str(os.getuid())"
    known = {name: value for name, value in os.environ.items() if name not in ("LOGNAME", "USER", "LNAME", "USERNAME")}
    done = subprocess.run(
        [sys.executable, "-c", nameless + asks], cwd=ROOT, env=known, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
