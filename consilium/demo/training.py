"""Trains the teachers of all hospitals in parallel processes.

The demo calls it. An error of one site's training is raised with the site's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from client.data.cases import record_cases
from client.data.layouts import open_for_training
from client.policy import load_site
from client.site.books import writing_teachers
from client.training.command import site_tasks
from client.training.private.charge import record_trained, record_trainings
from client.training.private.settings import PrivateSettings
from client.training.side_by_side import side_by_side
from client.training.site import site_report
from client.training.task import Crash, SiteReport, VoterTask
from common.config import load_study
from common.data.dataset import Dataset
from common.errors import DaemonFailed, InvalidInput

OnSteps = Callable[[int, int], None]
"""A function that is called with the number of steps done and the number of all steps, over all hospitals."""


@dataclass
class _Steps:
    """Adds up the training steps of all voters and reports the sum to ``on_steps``."""

    tasks: list[VoterTask]
    on_steps: OnSteps
    done: dict[int, int] = field(default_factory=dict)

    def __call__(self, place: int, step: int, _loss: float) -> None:
        self.done[place] = step
        self.on_steps(sum(self.done.values()), sum(task.steps for task in self.tasks))


def train_all(
    sites: Mapping[str, Path],
    *,
    seed: int,
    processes: int,
    on_steps: OnSteps,
    private: PrivateSettings | None = None,
) -> dict[str, SiteReport]:
    """Train or resume the teachers of every site.

    Each training is recorded, and charged if it is private, before its first step.

    Args:
        sites: Directory of each hospital by name.
        seed: Seed of the assignment to voters and of the training for synthetic data; patients of other data are
            assigned at random.
        processes: Number of processes that train at the same time.
        on_steps: Called with the number of steps done and the number of all steps.
        private: Settings of the private trainings; None for the standard trainer.

    Returns:
        Each site's training report by name.

    Raises:
        InvalidInput: If a site's training is refused.
        DaemonFailed: If a voter's training did not finish.
    """
    with ExitStack() as locks:
        for directory in sites.values():
            locks.enter_context(writing_teachers({directory, load_site(directory).books_dir}))
        return _train_all(sites, seed=seed, processes=processes, on_steps=on_steps, private=private)


def _train_all(
    sites: Mapping[str, Path], *, seed: int, processes: int, on_steps: OnSteps, private: PrivateSettings | None
) -> dict[str, SiteReport]:
    datasets: dict[str, Dataset] = {}
    owners: list[str] = []
    tasks: list[VoterTask] = []
    planned_at: dict[str, tuple[VoterTask, ...]] = {}
    for number, (name, directory) in enumerate(sites.items()):
        with _naming(name):
            datasets[name], planned = _plan(directory, seed=seed + number, private=private)
            record_trainings(directory, planned, again=False)
        tasks += planned
        planned_at[name] = planned
        owners += [name] * len(planned)
    outcomes = side_by_side(processes)(tasks, _Steps(tasks, on_steps))
    reports = {}
    for name in sites:
        own = [outcome for owner, outcome in zip(owners, outcomes, strict=True) if owner == name]
        crash = next((outcome for outcome in own if isinstance(outcome, Crash)), None)
        if crash is not None:
            raise DaemonFailed(
                f"site {name}: training of teacher {crash.voter} failed: {crash.reason}; to fix: run the same "
                "command again, which resumes"
            )
        with _naming(name):
            reports[name] = site_report(own)
            record_trained(sites[name], planned_at[name], reports[name])
            record_cases(sites[name] / "teachers", datasets[name], reports[name].problems)
    return reports


def _plan(directory: Path, *, seed: int, private: PrivateSettings | None) -> tuple[Dataset, tuple[VoterTask, ...]]:
    config = load_site(directory)
    study = load_study(config.path(config.study))
    dataset = open_for_training(config.path(config.data), study.data, config.dataset)
    tasks = site_tasks(
        directory,
        config,
        study,
        dataset,
        trainer="standard" if private is None else private.strategy,
        private=private,
        seed=seed if dataset.synthetic else None,
    )
    return dataset, tasks


@contextmanager
def _naming(site: str) -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise InvalidInput(f"site {site}: {error}") from error
