"""``import consilium`` gives researchers these names with these parameters: documented, typed, cheap to import.

``python -m tests.consilium.test_api`` writes the snapshot anew.
"""

from __future__ import annotations

import doctest
import inspect
import json
import re
import subprocess
import sys
import tarfile
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import consilium

ROOT = Path(__file__).resolve().parents[2]
SNAPSHOT = Path(__file__).with_name("api.json")


def form(value: Any) -> str | list[str]:
    """What a caller writes: parameters with their types; an enumeration's values; a protocol's members;
    an error's exit code."""
    if isinstance(value, type) and issubclass(value, Enum):
        return [str(member.value) for member in value]
    if isinstance(value, type) and issubclass(value, Exception):
        return f"exit code {getattr(value, 'exit_code', None)}"
    if getattr(value, "_is_protocol", False):
        return sorted(name for name in vars(value) if not name.startswith("_"))
    return re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))


def promised() -> dict[str, str | list[str]]:
    return {name: form(getattr(consilium, name)) for name in consilium.__all__}


def test_names_and_parameters_are_what_the_snapshot_promises() -> None:
    """A change here is a change for everybody who builds on it: the CHANGELOG says so, then ``api.json`` follows."""
    assert promised() == json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    assert consilium.__all__ == sorted(consilium.__all__)


@pytest.mark.parametrize("name", consilium.__all__)
def test_every_public_name_is_documented(name: str) -> None:
    assert len(inspect.getdoc(getattr(consilium, name)) or "") > 40


def test_the_examples_in_the_document_run(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "golden" / "per-volume-0.1.0.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    document = str(ROOT / "docs" / "api.md")
    ledger = tmp_path / "study" / "ledger.sqlite"
    failed, tried = doctest.testfile(document, module_relative=False, globs={"ledger": ledger})
    assert (failed, tried > 30) == (0, True)


def test_importing_consilium_loads_nothing_and_its_names_neither_torch_nor_flower() -> None:
    program = (
        "import sys, consilium\n"
        "before = {'numpy', 'scipy', 'torch', 'flwr', 'dp_accounting', 'common.errors'} & set(sys.modules)\n"
        "names = [getattr(consilium, name) for name in consilium.__all__]\n"
        "print(sorted(before), sorted({'torch', 'monai', 'flwr'} & set(sys.modules)), len(names) > 40)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[] [] True\n"


def test_a_name_that_is_not_public_is_no_attribute() -> None:
    assert not hasattr(consilium, "check_schema")
    assert set(consilium.__all__) <= set(dir(consilium))


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(promised(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
