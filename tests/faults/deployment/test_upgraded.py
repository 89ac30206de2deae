"""A study that an older version began goes on under this one, upgraded party by party."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import venv
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import pytest

from tests.faults.deployment.parts import QUERIES, SITES, Federation, federation, namespaces_work

pytestmark = [pytest.mark.faults, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[3]
OLDER = "cf80b2445d11141c0d41feb62a33fa33d75660f3"
"""The last commit of 0.1.0. What older ones say is not signed, and is not accepted."""


def installed(commit: str, root: Path) -> Path:
    """An environment with another commit's code on this one's dependencies: its interpreter."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"needs the history of the repository: {commit[:7]} is not there")
    code = root / "code"
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(code, filter="data")
    venv.create(root / "venv", symlinks=True, with_pip=False)
    python = root / "venv" / "bin" / "python"
    (packages,) = (root / "venv" / "lib").glob("python*/site-packages")
    folders = [str(code), *(folder for folder in sys.path if folder.endswith("-packages"))]
    (packages / "older.pth").write_text("\n".join(folders) + "\n")
    for script in Path(sys.executable).parent.glob("fl*w*r*"):  # Flower's commands, run by the older environment
        text = script.read_text(encoding="utf-8").split("\n", 1)[1]
        (python.parent / script.name).write_text(f"#!{python}\n{text}")
        (python.parent / script.name).chmod(0o755)
    where = subprocess.run(
        [python, "-P", "-c", "import client; print(client.__file__)"], capture_output=True, text=True, check=True
    )
    assert where.stdout.startswith(str(code))
    return python


@pytest.fixture
def older(tmp_path: Path) -> Iterator[Federation]:
    """Parties that an older version made and runs."""
    if not namespaces_work():
        pytest.skip("needs root and network namespaces")
    python, made = installed(OLDER, tmp_path / "older"), tmp_path / "made"
    make = "import sys; from pathlib import Path; from tests.faults.deployment.parts import make_parties; "
    made.mkdir()
    subprocess.run(
        [python, "-P", "-c", f"{make} make_parties(Path(sys.argv[1]))", str(made)],
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with federation(made, tmp_path / "parties") as parties:
        for party in parties.parties.values():
            party.python = str(python)
        yield parties


def runs(parties: Federation, name: str, role: str) -> str:
    """The program behind a daemon."""
    return Path(f"/proc/{parties.parties[name].pid(role)}/cmdline").read_bytes().split(b"\0")[0].decode()


def upgrade(parties: Federation, name: str) -> None:
    """What the guide says: stop, install, start."""
    party = parties.parties[name]
    assert parties.stop(name, signal.SIGTERM) == 0
    party.python, ready = sys.executable, party.count("all-ready")
    parties.start(name)
    parties.recorded(name, "all-ready", count=ready + 1)


def test_a_study_goes_on_while_its_parties_are_upgraded_one_after_the_other(older: Federation) -> None:
    """Site, server, the other sites, in the middle of one run; in between both versions speak to each other."""
    older.up()
    older.start_run()
    older.wait("released")
    before = older.workspace.study().id
    assert "/older/" in runs(older, "site-1", "worker")
    upgrade(older, "site-1")
    assert "/older/" not in runs(older, "site-1", "worker")
    older.wait("released", count=len(older.events("released")) + 1)
    upgrade(older, "server")
    older.finish_run()  # the operator's command is of the old version and may end with its server
    older.start_run()
    older.wait("released", count=len(older.events("released")) + 1)
    for name in SITES[1:]:
        upgrade(older, name)
    if older.finish_run(timeout_s=900.0) != 0:
        older.start_run()
        assert older.finish_run(timeout_s=900.0) == 0, older.tails()
    older.assert_whole()
    assert older.workspace.study().id == before
    for site in SITES:
        assert older.site_charges(site) == QUERIES
