"""Tests docs/lab/papers.md: every item of the papers leads to existing code and to an existing test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutation.papers import CONSTANTS, ROWS
from tests.mutation.runner import KILLED, outcomes

ROOT = Path(__file__).resolve().parent.parent
LEAST_ITEMS = 25


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "lab" / "papers.md").read_text(encoding="utf-8").partition("## Item by item")[2]
    table = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_every_item_of_the_papers_leads_to_code_and_to_a_test_that_exists() -> None:
    folders = (ROOT / "tests", ROOT / "research" / "tests")
    tests = "\n".join(path.read_text(encoding="utf-8") for folder in folders for path in folder.rglob("test_*.py"))
    known = set(re.findall(r"^(?:async )?def (test_\w+)", tests, re.MULTILINE))
    found = rows()
    assert len(found) >= LEAST_ITEMS
    for item, code, test, _command, differs in found:
        assert (ROOT / code.strip("`")).is_file(), item
        assert test.strip("`") in known or (test == "–" and "not built" in differs), item
        assert differs, item


def test_every_row_has_a_wrong_line_of_its_code_for_its_test() -> None:
    held = {(mutant.file, mutant.test.rpartition("::")[2]) for mutant in ROWS}
    assert held == {(code.strip("`"), test.strip("`")) for _, code, test, *_ in rows() if test != "–"}


@pytest.mark.slow
def test_each_rows_test_fails_when_its_line_is_wrong() -> None:
    assert outcomes(ROWS, timeout_s=2400) == {mutant.name: KILLED for mutant in ROWS}


@pytest.mark.slow
def test_each_constant_of_the_papers_is_held_by_a_test() -> None:
    assert outcomes(CONSTANTS, timeout_s=2400) == {mutant.name: KILLED for mutant in CONSTANTS}
