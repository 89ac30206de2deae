"""``consilium bench``: what a recipe is worth, measured with its controls."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from consilium.bench.papers import papers

if TYPE_CHECKING:
    from consilium.bench.utility import Setting

app = typer.Typer(help="Measure what a recipe is worth.")
app.command("papers")(papers)


class Recipe(StrEnum):
    """How answers are asked for: one release about all volumes, or one a volume."""

    JOINT = "joint"
    PCA = "pca"


@dataclass(frozen=True, slots=True)
class Job:
    """One seed of one setting, as a worker process gets it."""

    setting: Setting
    data: Path
    test: Path | None
    cache: Path
    seed: int
    ablate: bool = False


@app.callback()
def _bench() -> None:
    """A group also while it has one command."""


@app.command("utility")
def utility(
    data: Annotated[Path, typer.Option("--data", help="An MSD dataset: private, public and validation cases.")],
    test: Annotated[
        Path | None, typer.Option("--test", help="A second MSD dataset, read once at the end, to score on.")
    ] = None,
    recipe: Annotated[Recipe, typer.Option(help="How the teachers are asked.")] = Recipe.JOINT,
    hospitals: Annotated[int, typer.Option(help="Sites.", min=2)] = 8,
    voters: Annotated[
        int | None, typer.Option(help="Teachers a site, on disjoint patients; without it the planner's.", min=1)
    ] = None,
    epsilon: Annotated[float, typer.Option(help="Budget ε of the whole study.")] = 8.0,
    delta: Annotated[float, typer.Option(help="Budget δ.")] = 1e-3,
    unit: Annotated[Unit, typer.Option(help="Whose presence is hidden.")] = Unit.HOSPITAL,
    queries: Annotated[int, typer.Option(help="Volumes asked about, one release each (recipe pca).", min=1)] = 16,
    teacher_steps: Annotated[int, typer.Option(help="Training steps of a teacher.", min=1)] = 150,
    student_steps: Annotated[int, typer.Option(help="Training steps of the student.", min=8)] = 600,
    seeds: Annotated[int, typer.Option(help="Repetitions; without --test each rotates the validation fifth.")] = 5,
    central: Annotated[bool, typer.Option("--central", help="Also DP-SGD on all patients in one place.")] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Instead: the student without each idea of the recipe.")
    ] = False,
    jobs: Annotated[int, typer.Option(help="Seeds run side by side, one thread each.", min=1)] = 1,
    cache: Annotated[Path, typer.Option(help="Trained networks and finished cells; keep it to resume.")] = Path(
        "bench-cache"
    ),
    out: Annotated[Path | None, typer.Option("--out", help="Write the table's JSON here as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Train teachers and students at one setting and compare the student with its controls, paired over seeds.

    Example: consilium bench utility --data Task04_Hippocampus --hospitals 8 --epsilon 8 --delta 1e-3 --seeds 5
    """
    from common.config import TrainingConfig
    from common.data.msd import read_dataset
    from common.privacy.gain import recommend
    from consilium.bench.roles import patients_a_site
    from consilium.bench.table import ablation_summary, render, render_ablation, summary
    from consilium.bench.utility import Setting

    if voters is None:
        patients = patients_a_site(len(read_dataset(data).labelled), hospitals=hospitals, held_out=test is None)
        voters = recommend(
            budget=Budget(epsilon, delta),
            accountant=AccountantName.EXACT,
            protection=Protection(unit, Relation.REPLACE_ONE),
            hospitals=hospitals,
            patients=patients,
        ).voters
    setting = Setting(
        recipe=str(recipe),
        hospitals=hospitals,
        voters=voters,
        epsilon=epsilon,
        delta=delta,
        unit=unit,
        queries=queries,
        teacher=TrainingConfig(steps=teacher_steps, learning_rate=5e-3 if recipe is Recipe.JOINT else 1e-2),
        student=TrainingConfig(steps=student_steps, learning_rate=2e-3),
        central=central,
    )
    cache.mkdir(parents=True, exist_ok=True)
    work = [Job(setting=setting, data=data, test=test, cache=cache, seed=seed, ablate=ablate) for seed in range(seeds)]
    rows = _run(work, jobs=jobs)
    document = ablation_summary(setting, rows) if ablate else summary(setting, rows)
    text = json.dumps(document, indent=1)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        console = Console(file=sys.stdout, highlight=False)
        (render_ablation if ablate else render)(document, console)


def _run(work: list[Job], *, jobs: int) -> list[dict[str, float]]:
    """Every seed's Dice by arm; one bar, a seed at a time or ``jobs`` of them in one-thread processes."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results: dict[int, dict[str, float]] = {}
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with Progress(*columns, console=Console(stderr=True)) as progress:
        bar = progress.add_task("seeds", total=len(work))
        if jobs == 1:
            for job in work:
                results[job.seed] = run_job(
                    job, report=lambda stage, seed=job.seed: progress.update(bar, description=f"seed {seed}: {stage}")
                )
                progress.advance(bar)
        else:
            with ProcessPoolExecutor(max_workers=jobs, mp_context=get_context("spawn")) as pool:
                futures = {pool.submit(run_job, job): job.seed for job in work}
                for future in as_completed(futures):
                    results[futures[future]] = future.result()
                    progress.advance(bar)
    return [results[job.seed] for job in work]


def run_job(job: Job, *, report: object = None) -> dict[str, float]:
    """One seed, in this process, on one thread."""
    import torch

    from common.config import DataConfig
    from common.data.msd import read_dataset
    from consilium.bench.ablation import ablate
    from consilium.bench.roles import deal_roles, load_cases
    from consilium.bench.utility import Bench

    torch.set_num_threads(1)
    data = DataConfig(labels=read_dataset(job.data).labels, spacing_mm=(1.0, 1.0, 1.0), grid=(32, 48, 32))
    test = None if job.test is None else load_cases(job.test, data)
    roles = deal_roles(load_cases(job.data, data), hospitals=job.setting.hospitals, seed=job.seed, test=test)
    smallest = min(len(site) for site in roles.private)
    if smallest < job.setting.voters:
        raise InvalidInput("voters a site", value=job.setting.voters, limit=f"at most the {smallest} cases of a site")
    bench = Bench(job.setting, roles, data, seed=job.seed, cache=job.cache)
    tell = report if callable(report) else lambda _stage: None
    return ablate(bench, tell) if job.ablate else bench.run(tell)
