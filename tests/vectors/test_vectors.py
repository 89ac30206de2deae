"""Tests that docs/vectors holds what the product computes, and that another implementation computes the same."""

from __future__ import annotations

import ast
import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.vectors import made

CHECKER = Path(__file__).with_name("checker.py")
ALLOWED = {
    *("base64", "hashlib", "itertools", "json", "math", "sys", "fractions", "pathlib", "numpy", "cryptography"),
}


@pytest.mark.parametrize("name", made.MADE)
def test_the_product_computes_the_vectors(name: str) -> None:
    for case in made.load(name)["cases"]:
        assert made.MADE[name](case["inputs"]) == case["values"]


@pytest.mark.parametrize("name", made.MADE)
def test_an_implementation_that_shares_no_code_computes_the_vectors(name: str) -> None:
    command = [sys.executable, "-I", str(CHECKER), str(made.FOLDER / f"{name}.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{name}.json: as specified\n"), done.stderr


def test_the_checker_is_a_hundred_lines_and_imports_nothing_of_the_product() -> None:
    text = CHECKER.read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name for node in found if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in found if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= ALLOWED
    code = [line for line in text.splitlines() if line.strip() and not line.startswith(("import ", "from ", '"""'))]
    assert len(code) <= 105


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of each text and number in the values of a case."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from places(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from places(item, (*path, number))
    else:
        yield path


@pytest.mark.parametrize("name", made.MADE)
def test_the_checker_sees_every_value_that_is_another(name: str, tmp_path: Path) -> None:
    sys.path.insert(0, str(CHECKER.parent))
    try:
        import checker  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(CHECKER.parent))
    document = made.load(name)
    checker.check(document)
    for path in places(document["cases"][0]["values"]):
        wrong = {**document, "cases": [copy.deepcopy(document["cases"][0])]}
        holder: Any = wrong["cases"][0]["values"]
        for step in path[:-1]:
            holder = holder[step]
        value = holder[path[-1]]
        if isinstance(value, int):
            holder[path[-1]] = value + 1
        else:
            middle = len(value) // 2
            holder[path[-1]] = value[:middle] + ("0" if value[middle] != "0" else "1") + value[middle + 1 :]
        with pytest.raises((AssertionError, ValueError, KeyError)):
            checker.check(wrong)


def test_every_file_of_vectors_is_described_and_made_here() -> None:
    page = (made.FOLDER.parent / "vectors.md").read_text(encoding="utf-8")
    files = sorted(path.stem for path in made.FOLDER.glob("*.json"))
    assert files == sorted(made.MADE)
    for name in files:
        assert f"`{name}.json`" in page
        document = made.load(name)
        assert (document["format"], document["what"]) == (1, name)
        for key in sorted({key for case in document["cases"] for key in (*case["inputs"], *case["values"])}):
            assert f"`{key}`" in page, (name, key)
        text = (made.FOLDER / f"{name}.json").read_text(encoding="utf-8")
        assert text == json.dumps(document, indent=1, ensure_ascii=False) + "\n"
