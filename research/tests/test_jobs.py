"""Parts run side by side: what they found stands in their own order, whichever ended first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from common.config import TrainingConfig
from common.data.split import SplitCounts
from common.privacy.mechanism import Unit
from research import jobs
from research.jobs import BenchJob, run_jobs
from research.roles import BenchData
from research.setting import Setting
from research.tests.patients import DATA

SMALL = TrainingConfig(channels=(4, 8), steps=1)
SETTING = Setting("pca", 2, 1, 8.0, 1e-3, Unit.PATIENT, 2, SMALL, SMALL)


def test_results_stand_in_the_order_of_the_parts_whichever_ends_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed JSON was in the order of completion, so a second run of two processes printed another text."""
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
