"""docs/papers.md: every item of the papers leads to code that is there and to a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

from tests import papers_tables

ROOT = Path(__file__).resolve().parent.parent
LEAST_ITEMS = 25


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").partition("## Item by item")[2]
    table = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_every_item_of_the_papers_leads_to_code_and_to_a_test_that_exists() -> None:
    tests = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    known = set(re.findall(r"^(?:async )?def (test_\w+)", tests, re.MULTILINE))
    found = rows()
    assert len(found) >= LEAST_ITEMS
    for item, code, test, _command, differs in found:
        assert (ROOT / code.strip("`")).is_file(), item
        assert test.strip("`") in known or (test == "–" and "not built" in differs), item
        assert differs, item


def test_measured_tables_are_the_recorded_results_and_none_is_left_out() -> None:
    text = papers_tables.DOCUMENT.read_text(encoding="utf-8")
    shown = {mark[2] for mark in papers_tables.TABLE.finditer(text)}
    assert shown == {path.stem for path in papers_tables.RESULTS.glob("*.json")}
    assert text == papers_tables.page(text), "docs/papers.md is old: python -m tests.papers_tables writes it anew"
