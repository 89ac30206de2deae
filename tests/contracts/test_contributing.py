"""Tests that codec, protocol, private strategy and layout can be added from CONTRIBUTING alone and keep their
contracts.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
STEP = r"(Write|Add to `(\w+)` in)\s`([\w/]+\.py)`:\n\n```python\n(.*?)```"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a copy of the repository in which a contributor has typed exactly what CONTRIBUTING says."""
    folder = tmp_path_factory.mktemp("contributor")
    for name in ("client", "common", "consilium", "server", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    for what, registry, name, text in re.findall(STEP, TEXT, re.DOTALL):
        path = folder / name
        if what == "Write":
            assert not path.exists(), name
            path.write_text(text)
            continue
        source = path.read_text()
        begins = re.search(rf"(?m)^{registry}\b.*(?:\{{|\(\n +\{{)\n", source)
        assert begins is not None, registry
        path.write_text(source[: begins.end()] + text + source[begins.end() :])
    return folder


def test_every_code_block_of_contributing_is_a_step() -> None:
    steps = TEXT.split("## Add a codec")[1].split("\n## ")[0]
    assert len(re.findall("```python", steps)) == len(re.findall(STEP, TEXT, re.DOTALL)) == 13


@pytest.mark.slow
def test_the_examples_in_contributing_fulfil_their_contracts(copy: Path) -> None:
    names = ["codec_mirror", "protocol_pairs", "strategy_plain", "layout_side_by_side"]
    files = [f"tests/contracts/test_{name}.py" for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    first = {**os.environ, "PYTHONPATH": str(copy)}  # the copy's packages come before the installed ones
    done = subprocess.run(command, cwd=copy, env=first, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 40
