"""Trains a site's teachers in this process, without the command's ledger: planned, run voter by voter, reported."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from client.records.lock import writing
from client.training.site import plan_site, site_report
from client.training.task import Crash, OnProgress, SiteReport, VoterOutcome, VoterTask
from client.training.voter import train_voter
from common.data.dataset import Dataset


def one_after_another(tasks: Sequence[VoterTask], on_progress: OnProgress, **_jobs: int) -> list[VoterOutcome | Crash]:
    """Train the voters in this process; an unexpected error of one voter ends all."""
    return [train_voter(task, on_step=partial(on_progress, place)) for place, task in enumerate(tasks)]


def train_site(
    dataset: Dataset,
    *,
    teachers: Path,
    run: Callable[[Sequence[VoterTask], OnProgress], list[VoterOutcome | Crash]] = one_after_another,
    on_progress: OnProgress = lambda voter, step, loss: None,
    **of: Any,
) -> SiteReport:
    """Assign patients and train every voter into ``teachers``; ``of`` are arguments of :func:`plan_site`."""
    with writing(teachers):
        return site_report(run(plan_site(dataset, teachers=teachers, **of), on_progress))
