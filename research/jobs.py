"""Runs the parts of a benchmark's seeds in parallel processes of one thread each.

The commands of `consilium bench` call it. Each process always has one thread, because another number of threads would
split sums differently. This changes the last bits of results, and thereby the hashes under which further results are
stored. If a part fails, the run ends; finished parts are kept.
"""

from __future__ import annotations

import os
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from client.training.side_by_side import THREAD_SETTINGS
from common.config import DataConfig
from common.errors import InvalidInput
from research.ablation import ablate
from research.bench import Bench
from research.networks import measure_networks
from research.pate import measure_pate
from research.poison import measure
from research.roles import ROTATIONS, BenchData
from research.setting import Setting
from research.utility import run_part

ABLATION = "ablation"
POISON = "poison"
PATE = "pate"
NETWORKS = "networks"
REFRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One part of a benchmark.

    Attributes:
        setting: The row of the table.
        source: The dataset.
        data: The study's grid and labels.
        cache: Folder of stored results.
        seed: The seed.
        part: One of :data:`~research.utility.PARTS`, an optional part of the utility benchmark, or the name of another
            benchmark.
        seconds: Processor seconds of each training; only the part :data:`NETWORKS` uses it.
    """

    setting: Setting
    source: BenchData
    data: DataConfig
    cache: Path
    seed: int
    part: str
    seconds: float = 0.0


def run_jobs(work: list[list[BenchJob]], *, jobs: int) -> list[dict[str, float]]:
    """Run all parts of all seeds, and return the results of each seed.

    The first part of a seed trains networks that its other parts read, so these wait for it. Results are merged in the
    order of the parts, not in the order in which the parts end.

    Args:
        work: For each seed, its parts.
        jobs: Number of parallel processes.

    Returns:
        For each seed, the values of all parts by name.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results: list[list[dict[str, float]]] = [[{} for _ in parts] for parts in work]
    os.environ.update(dict.fromkeys(THREAD_SETTINGS, "1"))
    context = get_context("spawn")
    stages: SimpleQueue[tuple[int, str]] = context.SimpleQueue()
    with (
        Progress(*columns, console=Console(stderr=True)) as progress,
        ProcessPoolExecutor(max_workers=jobs, mp_context=context, initializer=_tell, initargs=(stages,)) as pool,
    ):
        bar = progress.add_task("", total=sum(map(len, work)))
        pending = {pool.submit(run_job, parts[0]): (row, 0) for row, parts in enumerate(work)}
        while pending:
            finished = wait(pending, timeout=REFRESH_S, return_when=FIRST_COMPLETED).done
            while not stages.empty():
                seed, stage = stages.get()
                progress.update(bar, description=f"seed {seed}: {stage}")
            for future in finished:
                row, part = pending.pop(future)
                results[row][part] = future.result()
                progress.advance(bar)
                if part == 0:
                    pending |= {pool.submit(run_job, job): (row, at) for at, job in enumerate(work[row]) if at > 0}
    return [{name: value for found in parts for name, value in found.items()} for parts in results]


_stages: SimpleQueue[tuple[int, str]] | None = None


def _tell(stages: SimpleQueue[tuple[int, str]]) -> None:
    """Set the queue to which :func:`run_job` reports its progress. Called once in each new process."""
    global _stages
    _stages = stages


def run_job(job: BenchJob) -> dict[str, float]:
    """Run one part in this process, on one thread, and return its values by name."""
    torch.set_num_threads(1)
    bench = _bench(job.setting, job.source, job.data, job.cache, job.seed)

    def report(stage: str) -> None:
        if _stages is not None:
            _stages.put((job.seed, stage))

    match job.part:
        case "ablation":
            return ablate(bench, report)
        case "poison":
            return measure(bench, report)
        case "pate":
            return measure_pate(bench, report)
        case "networks":
            return measure_networks(bench, job.seconds, report)
        case part:
            return run_part(bench, part, report)


@lru_cache(maxsize=ROTATIONS)
def _bench(setting: Setting, source: BenchData, data: DataConfig, cache: Path, seed: int) -> Bench:
    """Return the bench of a seed; cached, because reading the cases and fitting the codec take seconds."""
    roles = source.roles(data, seed=seed)
    largest = max(len(site) for site in roles.private)
    if largest < setting.voters:
        raise InvalidInput(
            "voters of a site",
            value=setting.voters,
            limit=f"at most {largest}, the number of cases of the largest site",
            remedy="give fewer --voters",
        )
    return Bench(setting, roles, data, seed=seed, cache=cache)
