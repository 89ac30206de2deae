"""Tests that the results of parallel parts are in the order of the parts, whichever part ends first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from common.config import TrainingConfig
from common.data.split import SplitCounts
from common.errors import InvalidInput
from common.privacy.mechanism import Unit
from research import command, jobs
from research.command_shared import widths
from research.jobs import BenchJob, run_jobs
from research.roles import BenchData
from research.setting import Setting
from research.tests.patients import DATA

SMALL = TrainingConfig(channels=(4, 8), steps=1)
SETTING = Setting("pca", 2, 1, 8.0, 1e-3, Unit.PATIENT, 2, SMALL, SMALL)


def test_results_stand_in_the_order_of_the_parts_whichever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the order were that of completion, a second run with two processes would print another text."""
    last_has_ended = Event()

    def ended(job: BenchJob) -> dict[str, float]:
        if job.part == "second":
            assert last_has_ended.wait(600)
        if job.part == "third":
            last_has_ended.set()
        return {job.part: float(job.seed)}

    def threads(*, max_workers: int, **_processes: Any) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(max_workers)

    monkeypatch.setattr(jobs, "ProcessPoolExecutor", threads)
    monkeypatch.setattr(jobs, "run_job", ended)
    source = BenchData(Path("data"), SplitCounts(2))
    work = [[BenchJob(SETTING, source, DATA, Path("cache"), 7, part) for part in ("first", "second", "third")]]
    assert [list(row.items()) for row in run_jobs(work, jobs=2)] == [[("first", 7.0), ("second", 7.0), ("third", 7.0)]]


@pytest.mark.parametrize(("name", "value"), [("epsilon", 0.0), ("epsilon", 1e18), ("delta", 1.0), ("voters", 10**9)])
def test_terms_that_no_study_can_have_are_refused_before_anything_is_trained(
    tmp_path: Path, name: str, value: float
) -> None:
    setting, cache = replace(SETTING, **{name: value}), tmp_path / "cache"
    source = BenchData(tmp_path, SplitCounts(2))
    with pytest.raises(InvalidInput, match="allowed: "):
        command._measure(setting, ("bounds",), source=source, data=DATA, cache=cache, seeds=1, jobs=1)
    assert not cache.exists()


def test_a_width_that_is_no_list_of_integers_is_refused() -> None:
    for text in ("", "nan,1", "1.5,2", "a"):
        with pytest.raises(InvalidInput, match="--width"):
            widths(text)
    assert widths("16,32") == (16, 32)
