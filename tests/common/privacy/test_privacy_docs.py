"""Tests that docs/privacy.md describes the code: its tests and modules exist, and its table is computed."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from common.privacy.accounting import epsilon_by

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "privacy.md").read_text()


def test_every_test_the_guide_names_exists() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    names = set(re.findall(r"`(test_\w+)`", TEXT))
    assert len(names) > 15
    assert {name for name in names if f"def {name}(" not in sources} == set()


def test_every_line_of_code_the_guide_names_exists() -> None:
    table = TEXT.split("## Theorem, line, test")[1].split("\n## ")[0]
    names = set(re.findall(r"`([a-z_]+)\.([A-Za-z_.]+)`", table))
    assert len(names) > 8
    for module, attribute in names:
        value: object = importlib.import_module(f"common.privacy.{module}")
        for part in attribute.split("."):
            value = getattr(value, part)


def test_every_file_the_guide_names_exists() -> None:
    names = set(re.findall(r"`((?:tests|common|server|client|consilium)/[\w/.]+)`", TEXT))
    assert names
    assert {name for name in names if not (ROOT / name).exists()} == set()


def test_every_name_that_the_guide_finds_in_a_file_stands_there() -> None:
    found = re.findall(r"((?:`[\w.]+`(?:, | and )?)+) in `([\w/]+\.py)`", TEXT)
    assert len(found) > 20
    for names, file in found:
        text = (ROOT / file).read_text()
        for name in re.findall(r"`(?:\w+\.)*(\w+)`", names):
            assert re.search(rf"^\s*(?:(?:async )?def|class) {name}\b|^{name}\b", text, re.M), f"{name} in {file}"


def test_the_published_table_is_what_the_accountants_compute() -> None:
    rows = re.findall(r"^\| (\d), (1e-\d) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, flags=re.M)
    assert len(rows) == 8
    for epsilon, delta, paper, rdp, exact, ratio in rows:
        for name, factor in (("paper", paper), ("rdp", rdp), ("exact", exact)):
            assert epsilon_by(name, 1 / float(factor) ** 2, float(delta)) == pytest.approx(float(epsilon), rel=5e-6)
        assert float(paper) / float(exact) == pytest.approx(float(ratio), abs=6e-4)
