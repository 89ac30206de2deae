"""``consilium bench``: what a recipe is worth, measured with its controls."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from common.config import JOINT_ROUNDS, MAX_JOINT_ROUNDS, TrainingConfig
from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit

if TYPE_CHECKING:
    from consilium.research.setting import Setting

app = typer.Typer(help="Measure what a recipe is worth.")


Data = Annotated[Path, typer.Option("--data", help="An MSD dataset: private, public and validation cases.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Budget ε of the whole study.")]
Delta = Annotated[float, typer.Option("--delta", help="Budget δ.")]
UnitHidden = Annotated[Unit, typer.Option("--unit", help="Whose presence is hidden.")]
TeacherSteps = Annotated[int, typer.Option("--teacher-steps", help="Training steps of a teacher.", min=1)]
StudentSteps = Annotated[int, typer.Option("--student-steps", help="Training steps of the student.", min=8)]
Jobs = Annotated[
    int | None, typer.Option("--jobs", help="Processes side by side, one thread each; without it one a core.", min=1)
]
Cache = Annotated[Path, typer.Option("--cache", help="Trained networks and finished cells; keep it to resume.")]
Out = Annotated[Path | None, typer.Option("--out", help="Write the table's JSON here as well.")]
TableAsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]


class Recipe(StrEnum):
    """How answers are asked for: one release about all volumes, or one a volume."""

    JOINT = "joint"
    PCA = "pca"


@app.callback()
def _bench() -> None:
    """Research: its code is in no wheel and no image."""
    if importlib.util.find_spec("consilium.research") is None:
        raise InvalidInput(
            "consilium bench without its research code", remedy="in a clone of the repository, `pip install -e .`"
        )


@app.command("papers")
def papers(
    data: Annotated[Path, typer.Option("--data", help="Folder with mnist, usps and Task04_Hippocampus.")],
    out: Annotated[Path, typer.Option("--out", help="Results go here, and are taken from here again.")],
    seeds: Annotated[int, typer.Option(help="Seeds a cell.", min=1)] = 3,
    only: Annotated[str, typer.Option(help="Only cells whose name contains this, e.g. mnist/dp-mac/8.")] = "",
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing; tables of what is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    """Reproduce the DP-MAC paper's tables and figure with the product's private trainers, and compare them in 3D.

    Stop it and run it again at will: finished cells are kept, and the tables are of all that are there.
    Example: consilium bench papers --data data --out bench-out --seeds 3 --only mnist/dp-sgd
    Example: consilium bench papers --data data --out bench-out --only hippocampus
    """
    from consilium.research.papers import papers as reproduce

    made = reproduce(data, out, seeds=seeds, only=only, threads=threads, report_only=report_only)
    typer.echo(json.dumps(made.rows) if as_json else made.text, nl=as_json)


@app.command("utility")
def utility(
    data: Data,
    test: Annotated[
        Path | None, typer.Option("--test", help="A second MSD dataset, read once at the end, to score on.")
    ] = None,
    recipe: Annotated[Recipe, typer.Option(help="How the teachers are asked.")] = Recipe.JOINT,
    hospitals: Annotated[int, typer.Option(help="Sites.", min=2)] = 8,
    voters: Annotated[
        int | None, typer.Option(help="Teachers a site, on disjoint patients; without it the planner's.", min=1)
    ] = None,
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-3,
    unit: UnitHidden = Unit.HOSPITAL,
    queries: Annotated[int, typer.Option(help="Volumes asked about, one release each (recipe pca).", min=1)] = 16,
    rounds: Annotated[
        int, typer.Option(help="Rounds of a release about all volumes (recipe joint).", min=1, max=MAX_JOINT_ROUNDS)
    ] = JOINT_ROUNDS,
    teacher_steps: TeacherSteps = 150,
    student_steps: StudentSteps = 600,
    seeds: Annotated[int, typer.Option(help="Repetitions; without --test each rotates the validation fifth.")] = 5,
    central: Annotated[bool, typer.Option("--central", help="Also DP-SGD on all patients in one place.")] = False,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Also the release with every volume's offset dealt to another.")
    ] = False,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Instead: the student without each idea of the recipe.")
    ] = False,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """Train teachers and students at one setting and compare the student with its controls, paired over seeds.

    Example: consilium bench utility --data Task04_Hippocampus --hospitals 8 --epsilon 8 --delta 1e-3 --seeds 5
    """
    from consilium.research.jobs import ABLATION
    from consilium.research.setting import Setting
    from consilium.research.table import ablation_summary, render, render_ablation, summary
    from consilium.research.utility import OFFSETS, PARTS

    joint = recipe is Recipe.JOINT
    voters = voters or _planned_voters(data, Budget(epsilon, delta), unit, hospitals=hospitals, held_out=test is None)
    recipes = _recipes(teacher_steps, student_steps, joint=joint)
    setting = Setting(str(recipe), hospitals, voters, epsilon, delta, unit, queries, *recipes, central, rounds)
    parts = (ABLATION,) if ablate else (*PARTS, OFFSETS) if offsets and joint else PARTS
    rows = _measure(setting, parts, data=data, test=test, cache=cache, seeds=seeds, jobs=jobs)
    summed, rendered = (ablation_summary, render_ablation) if ablate else (summary, render)
    _print(summed(setting, rows), rendered, out=out, as_json=as_json)


@app.command("poison")
def poison(
    data: Data,
    hospitals: Annotated[int, typer.Option(help="Sites.", min=3)] = 8,
    voters: Annotated[int, typer.Option(help="Teachers a site, on disjoint patients; a site poisons all.", min=1)] = 1,
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-3,
    unit: UnitHidden = Unit.HOSPITAL,
    rounds: Annotated[
        int, typer.Option(help="Rounds of a release about all volumes.", min=1, max=MAX_JOINT_ROUNDS)
    ] = JOINT_ROUNDS,
    teacher_steps: TeacherSteps = 150,
    student_steps: StudentSteps = 600,
    seeds: Annotated[int, typer.Option(help="Repetitions; each rotates the validation fifth.", min=1)] = 3,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """What one and two poisoned sites do to the labels and the student of a joint study, paired over seeds.

    With a cache of `consilium bench utility` at the same setting nothing but the poisoned students is trained.
    Example: consilium bench poison --data Task04_Hippocampus --hospitals 8 --epsilon 8 --delta 1e-3 --seeds 3
    """
    from consilium.research.jobs import POISON
    from consilium.research.poison import poison_summary, render_poison
    from consilium.research.setting import Setting

    recipes = _recipes(teacher_steps, student_steps, joint=True)
    setting = Setting("joint", hospitals, voters, epsilon, delta, unit, 16, *recipes, rounds=rounds)
    rows = _measure(setting, (POISON,), data=data, test=None, cache=cache, seeds=seeds, jobs=jobs)
    _print(poison_summary(setting, rows), render_poison, out=out, as_json=as_json)


def _recipes(teacher_steps: int, student_steps: int, *, joint: bool) -> tuple[TrainingConfig, TrainingConfig]:
    teacher = TrainingConfig(steps=teacher_steps, learning_rate=5e-3 if joint else 1e-2)
    return teacher, TrainingConfig(steps=student_steps, learning_rate=2e-3)


def _planned_voters(data: Path, budget: Budget, unit: Unit, *, hospitals: int, held_out: bool) -> int:
    from common.data.msd import read_dataset
    from consilium.research.roles import patients_a_site
    from server.planning.recommend import recommend

    return recommend(
        budget=budget,
        accountant=AccountantName.EXACT,
        protection=Protection(unit, Relation.REPLACE_ONE),
        hospitals=hospitals,
        patients=patients_a_site(len(read_dataset(data).labelled), hospitals=hospitals, held_out=held_out),
    ).voters


def _measure(
    setting: Setting, parts: Sequence[str], *, data: Path, test: Path | None, cache: Path, seeds: int, jobs: int | None
) -> list[dict[str, float]]:
    from client.training.side_by_side import default_jobs
    from consilium.research.jobs import Job, run_jobs

    cache.mkdir(parents=True, exist_ok=True)
    work = [[Job(setting, data, test, cache, seed, part) for part in parts] for seed in range(seeds)]
    return run_jobs(work, jobs=jobs or default_jobs(seeds * len(parts)))


def _print(
    document: dict[str, Any], render: Callable[[dict[str, Any], Console], None], *, out: Path | None, as_json: bool
) -> None:
    text = json.dumps(document, indent=1)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        typer.echo(text)
    else:
        render(document, Console(file=sys.stdout, highlight=False))
