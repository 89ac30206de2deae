"""Tests that docs/lab/performance.md shows what `make bench` recorded, and that a worse ratio is noticed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.run import PARTS, RATIO, RESOLUTION, RESULTS, Figure, figure, memory_mib

ROOT = Path(__file__).parent.parent


def test_the_table_in_the_performance_page_is_what_was_recorded() -> None:
    text = run.PAGE.read_text(encoding="utf-8")
    assert text == run.page(text), "docs/lab/performance.md is old: python -m benchmarks.run --table writes it anew"


@pytest.mark.parametrize("result", run.all_recorded(), ids=lambda result: result["part"])
def test_a_recorded_result_says_where_of_what_and_how_well_it_was_measured(result: dict[str, object]) -> None:
    assert result.keys() == {"part", "commit", "machine", "versions", "figures"}
    assert result["figures"]
    for one in result["figures"]:  # type: ignore[attr-defined]
        assert Figure(**one).spread >= 0
    assert "/" not in json.dumps(result["machine"])


def test_every_part_is_a_module_and_every_result_is_of_a_part() -> None:
    assert all(find_spec(module) is not None for module in PARTS.values())
    assert {path.stem for path in RESULTS.glob("*.json")} <= PARTS.keys()


def test_every_command_line_of_a_benchmark_starts_it_as_a_module() -> None:
    """``python benchmarks/NAME.py`` finds none of the packages, because its folder is then the first on the path."""
    pages = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "Makefile"]
    named = [found for page in pages for found in re.findall(r"python (?:-m )?(benchmarks\S\w+)", page.read_text())]
    assert named
    assert [name for name in named if "/" in name or find_spec(name) is None] == []


def test_a_process_s_peak_memory_is_its_own_and_not_its_parent_s() -> None:
    held = bytearray(200 << 20)
    program = "from benchmarks.run import memory_mib; print(memory_mib('VmHWM'))"
    own = float(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, cwd=ROOT).stdout)
    assert 1 < own < len(held) / 2**20 <= memory_mib()


def test_only_a_ratio_that_is_worse_by_more_than_the_larger_spread_is_worse() -> None:
    before = figure("one", [1.0, 1.1, 1.2], RATIO)
    assert (before.value, before.spread) == (1.1, 0.1)
    assert not replace(before, value=1.19).worse_than(before)
    assert replace(before, value=1.21).worse_than(before)
    assert not replace(before, value=1.21, spread=0.2).worse_than(before)
    assert not replace(before, value=0.5).worse_than(before)
    assert figure("steady", [2.0, 2.001], RATIO).spread == pytest.approx(2.0 * RESOLUTION, rel=1e-3)
    assert figure("once", [2.0], RATIO).spread == pytest.approx(0.2)
    assert figure("seconds", [2.0, 2.002], "s").spread == pytest.approx(0.001)
    better = replace(before, more_is_better=True)
    assert replace(better, value=0.5).worse_than(better)
    assert not replace(before, value=9.0, unit="s").worse_than(replace(before, unit="s"))


def test_a_part_that_got_worse_fails_and_keeps_what_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "RESULTS", tmp_path)
    measured = [Figure("one", 1.0, RATIO, 0.1), Figure("seconds", 3.0, "s")]
    monkeypatch.setattr("benchmarks.sampler.figures", lambda: iter(measured))
    assert run.run("sampler", accept=False) == []
    assert run.recorded("sampler") == {one.name: one for one in measured}
    measured[0] = Figure("one", 1.5, RATIO, 0.1)
    assert run.run("sampler", accept=False) == ["sampler: one was 1 and is 1.5"]
    assert run.recorded("sampler")["one"].value == 1.0
    assert run.run("sampler", accept=True) == []
    assert run.recorded("sampler")["one"].value == 1.5
