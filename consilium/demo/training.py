"""Trains the teachers of all hospitals in parallel processes.

The demo calls it. An error of one site's training is raised with the site's name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import islice
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
from common.data.dataset import Dataset
from common.errors import DaemonFailed, InvalidInput

OnSteps = Callable[[int, int], None]
"""A function that is called with the number of steps done and the number of all steps, over all hospitals."""


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
    datasets: dict[str, Dataset] = {}
    planned: dict[str, tuple[VoterTask, ...]] = {}
    steps: dict[int, int] = {}

    with ExitStack() as locks:
        for directory in sites.values():
            locks.enter_context(writing_teachers({directory, load_site(directory).books_dir}))
        for number, (name, directory) in enumerate(sites.items()):
            with _naming(name):
                datasets[name], planned[name] = _plan(directory, seed=seed + number, private=private)
                record_trainings(directory, planned[name], again=False)
        tasks = [task for own in planned.values() for task in own]

        def on_step(place: int, step: int, _loss: float) -> None:
            steps[place] = step
            on_steps(sum(steps.values()), sum(task.steps for task in tasks))

        outcomes = iter(side_by_side(tasks, on_step, jobs=processes))
        reports = {}
        for name in sites:
            own = list(islice(outcomes, len(planned[name])))
            crash = next((outcome for outcome in own if isinstance(outcome, Crash)), None)
            if crash is not None:
                raise DaemonFailed(
                    f"site {name}: training of teacher {crash.voter} failed: {crash.reason}; to fix: run the same "
                    "command again, which resumes"
                )
            with _naming(name):
                reports[name] = site_report(own)
                record_trained(sites[name], planned[name], reports[name])
                record_cases(sites[name] / "teachers", datasets[name], reports[name].problems)
        return reports


def _plan(directory: Path, *, seed: int, private: PrivateSettings | None) -> tuple[Dataset, tuple[VoterTask, ...]]:
    config = load_site(directory)
    study = config.load_study()
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
