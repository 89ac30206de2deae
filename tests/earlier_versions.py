"""Makes environments with an earlier version's code, for tests that continue from its files."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
from io import BytesIO
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OLDER = "cf80b2445d11141c0d41feb62a33fa33d75660f3"
"""The last commit of 0.1.0. Messages of older versions are not signed, and are refused."""
RELEASED = "50af04f179035765e00a9dfdac4acb0f8fc6ea1c"
"""The commit of release 0.2.0."""


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive by the filter ``data``, which Python before 3.11.4 does not know."""
    archive.extractall(folder, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))


def installed(commit: str, root: Path) -> Path:
    """Return the interpreter of an environment with another commit's code and this environment's dependencies."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True, check=False)
    if archive.returncode != 0:
        pytest.skip(f"needs the history of the repository: {commit[:7]} is not there")
    code = root / "code"
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        unpack(files, code)
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
