"""``consilium bench``: what a recipe is worth, measured with its controls."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.config import JOINT_ROUNDS, MAX_JOINT_ROUNDS, OPEN, SEALED_SUM, DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from consilium.cli import options
from consilium.cli.options import names, triple

if TYPE_CHECKING:
    from rich.console import Console

    from consilium.research.roles import Source
    from consilium.research.setting import Setting

app = typer.Typer(help="Measure what a recipe is worth.")


Data = Annotated[Path, typer.Option("--data", help="A dataset, in any layout: private, public and validation cases.")]
Layout = Annotated[str, typer.Option("--layout", help="The data's layout; found by itself.")]
Sites = Annotated[
    Path | None,
    typer.Option("--sites", help="Table with the columns case_id and site: real hospitals, however uneven."),
]
Hospitals = Annotated[
    int | None, typer.Option("--hospitals", help="Sites, dealt at random; 8 where the data name none.", min=2)
]
PublicImages = Annotated[int, typer.Option("--public-images", help="Public volumes, without labels.", min=1)]
PublicMaps = Annotated[int, typer.Option("--public-maps", help="Public label maps, of other patients.", min=2)]
Paired = Annotated[int, typer.Option("--paired", help="Public volumes with their labels.", min=0)]
Grid = Annotated[str, typer.Option("--grid", help="Grid in voxels, e.g. 32,48,32; without it the public maps'.")]
Spacing = Annotated[str, typer.Option("--spacing", help="Voxel spacing in mm; without it the public maps'.")]
Labels = Annotated[str, typer.Option("--labels", help="Label names, background first; without it the data's.")]
Channels = Annotated[str, typer.Option("--channels", help="Channel names; without it the data's.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Budget ε of the whole study.")]
Delta = Annotated[float, typer.Option("--delta", help="Budget δ.")]
UnitHidden = Annotated[Unit, typer.Option("--unit", help="Whose presence is hidden.")]
TeacherSteps = Annotated[int, typer.Option("--teacher-steps", help="Training steps of a teacher.", min=1)]
StudentSteps = Annotated[int, typer.Option("--student-steps", help="Training steps of the student.", min=8)]
Jobs = Annotated[
    int | None, typer.Option("--jobs", help="Processes side by side, one thread each; without it one a core.", min=1)
]
Cache = Annotated[Path, typer.Option("--cache", help="Trained networks and finished cells; keep it to resume.")]
Out = Annotated[
    Path | None, typer.Option("--out", help="Write the table's JSON here as well, with data, command and commit.")
]
TableAsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]


class Recipe(StrEnum):
    """How answers are asked for: what structures look like, where they lie in all volumes together, or in each."""

    APPEARANCE = "appearance"
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
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field of those cells' recipes, e.g. order=2; such a cell is one of its own."),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 1,
    report_only: Annotated[bool, typer.Option("--report-only", help="Train nothing; tables of what is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    """Reproduce the DP-MAC paper's tables and figures with the product's private trainers, and compare them in 3D.

    Stop it and run it again at will: finished cells are kept, and the tables are of all that are there.
    Example: consilium bench papers --data data --out bench-out --seeds 3 --only mnist/dp-sgd
    Example: consilium bench papers --data data --out bench-out --only hippocampus
    Example: consilium bench papers --data data --out bench-out --only mnist/dp-mac/8 --set order=2 --set output=bce
    Example: consilium bench papers --data data --out bench-out --only hippocampus/dp-sgd/8 --set clip=0.05
    """
    from consilium.research.papers import papers as reproduce

    fields = dict(pair.partition("=")[::2] for pair in changes or ())
    made = reproduce(data, out, seeds=seeds, only=only, changes=fields, threads=threads, report_only=report_only)
    typer.echo(json.dumps(made.rows) if as_json else made.text, nl=as_json)


@app.command("utility")
def utility(
    data: Data,
    test: Annotated[
        Path | None, typer.Option("--test", help="A second dataset, read once at the end, to score on.")
    ] = None,
    layout: Layout = "auto",
    sites: Sites = None,
    hospitals: Hospitals = None,
    public_images: PublicImages = 30,
    public_maps: PublicMaps = 10,
    paired: Paired = 0,
    grid: Grid = "",
    spacing: Spacing = "",
    labels: Labels = "",
    channels: Channels = "",
    recipe: Annotated[Recipe | None, typer.Option(help="How the teachers are asked; without it the planner's.")] = None,
    voters: Annotated[
        int | None, typer.Option(help="Teachers a site, on disjoint patients; without it the planner's.", min=1)
    ] = None,
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-3,
    unit: UnitHidden = Unit.HOSPITAL,
    aggregation: Annotated[
        str, typer.Option(help="Whose noise is measured: open, the server's, or sealed-sum, the sites'.")
    ] = OPEN,
    colluders: options.Colluders = 1,
    queries: Annotated[int, typer.Option(help="Volumes asked about, one release each (recipe pca).", min=1)] = 16,
    rounds: Annotated[
        int, typer.Option(help="Rounds of a release about all volumes (recipe joint).", min=1, max=MAX_JOINT_ROUNDS)
    ] = JOINT_ROUNDS,
    teacher_steps: Annotated[int | None, typer.Option(help="Of a teacher [the recipe's].", min=1)] = None,
    student_steps: Annotated[int | None, typer.Option(help="Of the student [the recipe's].", min=8)] = None,
    seeds: Annotated[int, typer.Option(help="Repetitions; without --test each rotates the validation fifth.")] = 5,
    central: Annotated[bool, typer.Option("--central", help="Also DP-SGD on all patients in one place.")] = False,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Also the release with every volume's offset dealt to another.")
    ] = False,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds/--no-bounds", help="Also what protects nobody: teachers, all patients, a student without noise."
        ),
    ] = True,
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
    Example: consilium bench utility --data tumours --sites tumours/sites.csv --unit patient --delta 1e-5 --paired 8
    """
    from common.data.split import SplitCounts
    from consilium.research.jobs import ABLATION
    from consilium.research.roles import Source
    from consilium.research.setting import Setting
    from consilium.research.table import ablation_summary, render, render_ablation, summary
    from consilium.research.utility import OFFSETS, PARTS
    from server.planning.recommend import training_for

    if aggregation not in (OPEN, SEALED_SUM):
        raise InvalidInput("--aggregation", value=aggregation, limit=f"{OPEN}, {SEALED_SUM}")
    if paired and recipe not in (None, Recipe.JOINT):
        raise InvalidInput(
            "--paired", value=paired, limit=f"none with recipe {recipe}", remedy="recipe joint learns from them"
        )
    counts = SplitCounts(hospitals, public_images=public_images, label_maps=public_maps, paired=paired)
    source = _source(Source(data, counts, layout, sites, test, names(labels), names(channels)))
    patients = source.hospitals()
    voters = voters or _planned_voters(patients, Budget(epsilon, delta), unit)
    on = _study_data(source, grid=grid, spacing=spacing)
    recipe = recipe or _planned_recipe(source, on, paired=paired)
    joint = recipe is Recipe.JOINT
    teacher, student = _recipes(150, 600, joint=False) if recipe is Recipe.PCA else training_for(recipe)
    recipes = (
        replace(teacher, steps=teacher_steps or teacher.steps),
        replace(student, steps=student_steps or student.steps),
    )
    terms = (str(recipe), len(patients), voters, epsilon, delta, unit, queries)
    setting = Setting(*terms, *recipes, central, rounds, paired, None if aggregation == OPEN else colluders)
    measured = PARTS if bounds else tuple(part for part in PARTS if part != "bounds")
    parts = (ABLATION,) if ablate else (*measured, OFFSETS) if offsets and joint else measured
    rows = _measure(setting, parts, source=source, data=on, cache=cache, seeds=seeds, jobs=jobs)
    summed, rendered = (ablation_summary, render_ablation) if ablate else (summary, render)
    _print(summed(setting, rows), rendered, data=data, out=out, as_json=as_json)


@app.command("pate")
def pate(
    data: Data,
    layout: Layout = "auto",
    sites: Sites = None,
    hospitals: Annotated[int, typer.Option(help="K: teachers, one a hospital.", min=2)] = 8,
    queries: Annotated[int, typer.Option(help="N: volumes asked about.", min=2)] = 80,
    public_maps: PublicMaps = 10,
    grid: Grid = "64,64,64",
    spacing: Spacing = "",
    labels: Labels = "",
    channels: Channels = "",
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-3,
    network: Annotated[str, typer.Option(help="Of teachers, student and DP-SGD.")] = "paper-unet",
    width: Annotated[str, typer.Option("--width", help="Feature maps a level.")] = "32,64,128,256,320",
    teacher_steps: TeacherSteps = 4000,
    student_steps: StudentSteps = 4000,
    seeds: Annotated[int, typer.Option(help="Repetitions; each rotates the validation fifth.", min=1)] = 3,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """The experiment of the PATE paper beside its printed numbers: both algorithms, DP-SGD, and the controls it lacks.

    Stop it and run it again at will. At the defaults it is the paper's size; smaller ones say so by their options.
    Example: consilium bench pate --data Task01_BrainTumour --spacing 3,3,3
    Example: consilium bench pate --data TCGA_LGG --grid 64,64,32 --queries 12 --network unet --width 16,32,64
    """
    from common.data.split import SplitCounts
    from consilium.research.jobs import PATE
    from consilium.research.pate import pate_markdown, pate_summary
    from consilium.research.roles import Source
    from consilium.research.setting import Setting

    counts = SplitCounts(hospitals, public_images=queries, label_maps=public_maps)
    source = _source(Source(data, counts, layout, sites, None, names(labels), names(channels)))
    shape = {"channels": tuple(int(part) for part in names(width)), "network": network, "augmentation": "rotate-mirror"}
    teacher = TrainingConfig(steps=teacher_steps, **shape)  # type: ignore[arg-type]
    student = TrainingConfig(steps=student_steps, learning_rate=2e-3, **shape)  # type: ignore[arg-type]
    terms = (len(source.hospitals()), 1, epsilon, delta, Unit.HOSPITAL, queries)
    setting = Setting("paper-ae", *terms, teacher, student)
    on = _study_data(source, grid=grid, spacing=spacing)
    rows = _measure(setting, (PATE,), source=source, data=on, cache=cache, seeds=seeds, jobs=jobs)
    document = pate_summary(setting, on, rows)
    _print(document, _text(pate_markdown), data=data, out=out, as_json=as_json)


@app.command("networks")
def networks(
    data: Data,
    layout: Layout = "auto",
    sites: Sites = None,
    public_images: PublicImages = 16,
    public_maps: PublicMaps = 10,
    grid: Grid = "",
    spacing: Spacing = "",
    labels: Labels = "",
    channels: Channels = "",
    seconds: Annotated[float, typer.Option(help="Processor seconds of every training.", min=1)] = 60,
    seeds: Annotated[int, typer.Option(help="Repetitions; each rotates the validation fifth.", min=1)] = 3,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """The networks a study may name, as teacher and as student, each trained for the same processor time.

    Example: consilium bench networks --data Task04_Hippocampus --seconds 60 --seeds 3
    """
    from common.data.split import SplitCounts
    from consilium.research.jobs import NETWORKS
    from consilium.research.networks import networks_markdown, networks_summary
    from consilium.research.roles import Source
    from consilium.research.setting import Setting

    counts = SplitCounts(2, public_images=public_images, label_maps=public_maps)
    source = Source(data, counts, layout, sites, None, names(labels), names(channels))
    on = _study_data(source, grid=grid, spacing=spacing)
    terms = (2, 1, 8.0, 1e-3, Unit.HOSPITAL, public_images)
    setting = Setting("pca", *terms, *_recipes(TrainingConfig().steps, 8, joint=False))
    rows = _measure(setting, (NETWORKS,), source=source, data=on, cache=cache, seeds=seeds, jobs=jobs, seconds=seconds)
    document = networks_summary(setting, on, seconds, rows)
    _print(document, _text(networks_markdown), data=data, out=out, as_json=as_json)


@app.command("poison")
def poison(
    data: Data,
    layout: Layout = "auto",
    sites: Sites = None,
    hospitals: Hospitals = None,
    public_images: PublicImages = 30,
    public_maps: PublicMaps = 10,
    grid: Grid = "",
    spacing: Spacing = "",
    labels: Labels = "",
    channels: Channels = "",
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
    from common.data.split import SplitCounts
    from consilium.research.jobs import POISON
    from consilium.research.poison import poison_summary, render_poison
    from consilium.research.roles import Source
    from consilium.research.setting import Setting

    counts = SplitCounts(hospitals, public_images=public_images, label_maps=public_maps)
    source = _source(Source(data, counts, layout, sites, None, names(labels), names(channels)))
    recipes = _recipes(teacher_steps, student_steps, joint=True)
    setting = Setting("joint", len(source.hospitals()), voters, epsilon, delta, unit, 16, *recipes, rounds=rounds)
    on = _study_data(source, grid=grid, spacing=spacing)
    rows = _measure(setting, (POISON,), source=source, data=on, cache=cache, seeds=seeds, jobs=jobs)
    _print(poison_summary(setting, rows), render_poison, data=data, out=out, as_json=as_json)


def _recipes(teacher_steps: int, student_steps: int, *, joint: bool) -> tuple[TrainingConfig, TrainingConfig]:
    teacher = TrainingConfig(steps=teacher_steps, learning_rate=5e-3 if joint else 1e-2)
    return teacher, TrainingConfig(steps=student_steps, learning_rate=2e-3)


def _source(source: Source) -> Source:
    """With the usual number of hospitals where neither the data nor anybody says how many."""
    from consilium.research.roles import HOSPITALS

    named = {case.hospital for case in source.read().labelled}
    if source.sites is None and source.counts.hospitals is None and (None in named or len(named) < 2):
        return replace(source, counts=replace(source.counts, hospitals=HOSPITALS))
    return source


def _study_data(source: Source, *, grid: str, spacing: str) -> DataConfig:
    return source.study_data(
        grid=triple(grid, int, what="--grid") if grid else None,
        spacing_mm=triple(spacing, float, what="--spacing") if spacing else None,
    )


def _planned_recipe(source: Source, data: DataConfig, *, paired: int) -> Recipe:
    """The planner's for the first seed's public label maps."""
    from common.data.volume import load_label
    from server.planning.public_shapes import LEAST_MAPS, mean_shape_dice
    from server.planning.recommend import protocol_for

    maps = [case.label for case in source.split(source.read(), seed=0).label_maps if case.label is not None]
    if paired or len(maps) < LEAST_MAPS:
        return Recipe.JOINT
    return Recipe(protocol_for(mean_shape_dice([load_label(each, data) for each in maps], labels=len(data.labels))))


def _planned_voters(patients: Sequence[int], budget: Budget, unit: Unit) -> int:
    """As many as suit the hospital in the middle."""
    from server.planning.recommend import recommend

    return recommend(
        budget=budget,
        accountant=AccountantName.EXACT,
        protection=Protection(unit, Relation.REPLACE_ONE),
        hospitals=len(patients),
        patients=sorted(patients)[len(patients) // 2],
    ).voters


def _measure(
    setting: Setting,
    parts: Sequence[str],
    *,
    source: Source,
    data: DataConfig,
    cache: Path,
    seeds: int,
    jobs: int | None,
    seconds: float = 0.0,
) -> list[dict[str, float]]:
    from client.training.side_by_side import default_jobs
    from consilium.research.jobs import Job, run_jobs

    cache.mkdir(parents=True, exist_ok=True)
    work = [[Job(setting, source, data, cache, seed, part, seconds) for part in parts] for seed in range(seeds)]
    return run_jobs(work, jobs=jobs or default_jobs(seeds * len(parts)))


def _text(made: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any], Console], None]:
    return lambda document, console: console.out(made(document), end="", highlight=False)


def _print(
    document: dict[str, Any],
    render: Callable[[dict[str, Any], Console], None],
    *,
    data: Path,
    out: Path | None,
    as_json: bool,
) -> None:
    from rich.console import Console

    if out is not None:
        out.write_text(json.dumps(_made_by(data) | document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        typer.echo(json.dumps(document, indent=1))
    else:
        render(document, Console(file=sys.stdout, highlight=False))


def _made_by(data: Path) -> dict[str, str]:
    """What a recorded result says of itself, without a path of this machine: data, command line and commit."""
    words = [re.sub(r"(^|=)/.*/", r"\1", word) for word in sys.argv[1:]]
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    said = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "data": data.resolve().name,
        "command": shlex.join(["consilium", *words]),
        "commit": said.stdout.strip() or "unknown",
    }
