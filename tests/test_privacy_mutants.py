"""Tests that the list of mutants, their recorded outcomes and docs/lab/privacy-mutants.md agree; a sample runs anew."""

from __future__ import annotations

import ast
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest
import ruff

from tests import privacy_mutants
from tests.mutation.runner import KILLED, outcomes
from tests.privacy_mutants import ROWS

ROOT = Path(__file__).resolve().parent.parent
SAMPLE = {row.area: row.mutant for row in reversed(ROWS)}
"""The first mutant of every area."""


@cache
def names_in(path: str) -> frozenset[str]:
    """Return the names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_mutant_changes_production_and_names_a_test_that_exists() -> None:
    assert len({row.mutant.name for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.mutant.changed() != (ROOT / row.mutant.file).read_text(encoding="utf-8")
        path, _, test = row.mutant.test.partition("::")
        assert test.partition("[")[0] in names_in(path), row.mutant.name


def undefined_names(folder: Path) -> set[tuple[str, str]]:
    """Return names that files of a folder use but nothing defines, each with the file's number before it."""
    words = ["check", "--isolated", "--no-cache", "--select", "F821", "--output-format", "concise", str(folder)]
    done = subprocess.run([ruff.find_ruff_bin(), *words], capture_output=True, text=True, check=False)
    return set(re.findall(r"(\d+\.py):.*Undefined name (`.*`)", done.stdout))


def test_no_mutant_is_noticed_for_a_name_that_is_not_there(tmp_path: Path) -> None:
    """A changed line that cannot run would fail every test, even one that does not test its promise."""
    for folder in ("before", "after"):
        (tmp_path / folder).mkdir()
    for number, row in enumerate(ROWS):
        (tmp_path / "before" / f"{number}.py").write_text((ROOT / row.mutant.file).read_text(encoding="utf-8"))
        (tmp_path / "after" / f"{number}.py").write_text(row.mutant.changed(), encoding="utf-8")
    (tmp_path / "after" / "999.py").write_text("print(not_there)\n")
    assert undefined_names(tmp_path / "after") - undefined_names(tmp_path / "before") == {("999.py", "`not_there`")}


def test_the_page_is_what_was_seen_of_these_very_mutants_and_a_test_fails_for_each() -> None:
    seen = privacy_mutants.recorded()
    assert {name: found["row"] for name, found in seen.items()} == {
        row.mutant.name: privacy_mutants.as_run(row) for row in ROWS
    }
    assert {found["test"] for found in seen.values()} == {KILLED}
    assert privacy_mutants.TABLE.read_text(encoding="utf-8") == privacy_mutants.page(seen), (
        "docs/lab/privacy-mutants.md is old: python -m tests.privacy_mutants --page writes it anew"
    )


@pytest.mark.slow
def test_the_tests_of_the_page_fail_for_a_mutant_of_every_area() -> None:
    assert outcomes(list(SAMPLE.values()), timeout_s=2400) == {mutant.name: KILLED for mutant in SAMPLE.values()}
