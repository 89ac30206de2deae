"""Training every hospital's teachers side by side: one process a hospital at a time, one thread each.

Two-thread training under load is slower than one-thread processes side by side, so that is how it runs. Refuses nothing
of its own: what a site's training refuses is raised here with the site's name.
"""

from __future__ import annotations

import multiprocessing
import os
import queue as queues
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common.errors import ConsiliumError

OnSteps = Callable[[int, int], None]
"""Called with steps done and steps in all, over all hospitals."""


def train_all(sites: Mapping[str, Path], *, seed: int, processes: int, on_steps: OnSteps) -> dict[str, dict[str, Any]]:
    """Train (or resume) the teachers of every site directory; returns each site's training report."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        steps = manager.Queue()
        with ProcessPoolExecutor(max_workers=processes, mp_context=context) as pool:
            futures = {
                name: pool.submit(_train, directory, seed + number, steps)
                for number, (name, directory) in enumerate(sites.items())
            }
            try:
                _report(futures, steps, on_steps)
                return {name: _result(name, future) for name, future in futures.items()}
            except BaseException:
                for future in futures.values():
                    future.cancel()
                for process in list(pool._processes.values()):  # the pool has no public way to end its children
                    process.terminate()
                raise


def _train(directory: Path, seed: int, steps: Any) -> dict[str, Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from client.policy import load_site
    from client.training.site import train_site
    from common.config import load_study
    from common.data.msd import read_dataset

    torch.set_num_threads(1)
    config = load_site(directory)
    study = load_study(config.path(config.study))
    voters = study.privacy.voters_per_site
    total = study.teacher.steps * voters
    report = train_site(
        read_dataset(config.path(config.data)),
        teachers=directory / "teachers",
        data=study.data,
        recipe=study.teacher,
        voters=voters,
        seed=seed,
        on_progress=lambda voter, step, _loss: steps.put((directory.name, voter * study.teacher.steps + step, total)),
    )
    return report.to_json()


def _report(futures: Mapping[str, Future[dict[str, Any]]], steps: Any, on_steps: OnSteps) -> None:
    done: dict[str, int] = {}
    each = 0
    while not all(future.done() for future in futures.values()):
        for future in futures.values():
            if future.done() and future.exception() is not None:
                return
        try:
            site, step, each = steps.get(timeout=0.5)
        except queues.Empty:
            continue
        done[site] = step
        on_steps(sum(done.values()), each * len(futures))
    if each:
        on_steps(each * len(futures), each * len(futures))


def _result(name: str, future: Future[dict[str, Any]]) -> dict[str, Any]:
    try:
        return future.result()
    except ConsiliumError as error:
        raise type(error)(f"site {name}: {error}") from error
