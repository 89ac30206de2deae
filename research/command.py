"""Defines ``consilium bench``, which measures what a recipe is worth compared with its controls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.config import JOINT_ROUNDS, OPEN, SEALED_SUM, DataConfig, TrainingConfig
from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from common.protocol_terms import MAX_JOINT_ROUNDS
from consilium.cli import options
from consilium.cli.options import names
from consilium.cli.say import say
from research.command_private import private
from research.command_shared import SEEDS, Channels, Labels, Layout, Spacing, Width, as_text, show, study_data, widths

if TYPE_CHECKING:
    from research.roles import BenchData
    from research.setting import Setting

app = typer.Typer(help="Measure what a recipe is worth.")


Data = Annotated[Path, typer.Option("--data", help="A dataset, in any layout: private, public and validation cases.")]
Sites = Annotated[
    Path | None,
    typer.Option("--sites", help="Table with the columns case_id and site, which names the hospital of each case."),
]
Hospitals = Annotated[
    int | None,
    typer.Option(
        "--hospitals",
        help="Number of hospitals, to which patients are assigned at random; 8 if the data name no hospitals.",
        min=2,
    ),
]
PublicImages = Annotated[int, typer.Option("--public-images", help="Number of public volumes without labels.", min=1)]
PublicMaps = Annotated[
    int,
    typer.Option(
        "--public-maps",
        help="Number of public label maps; their patients have no public volume and are at no hospital.",
        min=2,
    ),
]
Paired = Annotated[
    int, typer.Option("--paired", help="Number of public volumes that are published with their label maps.", min=0)
]
PairedFrom = Annotated[
    str,
    typer.Option(
        "--paired-from",
        help="Name of the hospital that publishes the pairs; it trains no teacher and is not scored.",
    ),
]
Grid = Annotated[str, typer.Option("--grid", help="Grid in voxels, e.g. 32,48,32; by default that of the public maps.")]
Epsilon = Annotated[float, typer.Option("--epsilon", help="Budget ε of the whole study.")]
Delta = Annotated[float, typer.Option("--delta", help="Budget δ.")]
UnitHidden = Annotated[Unit, typer.Option("--unit", help="Unit of privacy: patient or hospital.")]
TeacherSteps = Annotated[int, typer.Option("--teacher-steps", help="Training steps of a teacher.", min=1)]
StudentSteps = Annotated[int, typer.Option("--student-steps", help="Training steps of the student.", min=8)]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", help="Number of parallel processes, one thread each; by default one per core.", **options.CORES
    ),
]
Cache = Annotated[
    Path,
    typer.Option(
        "--cache",
        help="Folder for trained networks and finished cells; keep it to resume.",
        callback=options.folder_to_write,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="Also write the table as JSON to this file, with data, command and commit.",
        callback=options.file_to_write,
    ),
]
Rotations = Annotated[
    int, typer.Option("--seeds", help="Number of repetitions; each uses another fifth for validation.", **SEEDS)
]
TableAsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")]


class RecipeName(StrEnum):
    """What the teachers are asked about the public volumes.

    ``appearance`` asks how structures look, ``joint`` where they lie in all volumes together, ``pca`` where they lie in
    each volume.
    """

    APPEARANCE = "appearance"
    JOINT = "joint"
    PCA = "pca"


app.command("private")(private)


@app.command("papers")
def papers(
    data: Annotated[Path, typer.Option("--data", help="Folder with mnist, usps and Task04_Hippocampus.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="Folder for results; results already there are used again.", callback=options.folder_to_write
        ),
    ],
    seeds: Annotated[
        int,
        typer.Option(help="Number of seeds with which each cell (data set, method and ε) is trained.", **SEEDS),
    ] = 3,
    only: Annotated[str, typer.Option(help="Run only cells whose name contains this text, e.g. mnist/dp-mac/8.")] = "",
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Change a field of these cells' recipes, e.g. order=2; results are kept as cells of their own.",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads.", **options.CORES)] = 1,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing; print tables of the finished cells.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    """Reproduce the DP-MAC paper's tables and figures with the product's private trainers, and compare them in 3D.

    The run can be stopped and started again: finished cells are kept, and the tables contain all finished cells.
    Example: consilium bench papers --data data --out bench-out --seeds 3 --only mnist/dp-sgd Example: consilium bench
    papers --data data --out bench-out --only hippocampus Example: consilium bench papers --data data --out bench-out
    --only mnist/dp-mac/8 --set order=2 --set output=bce Example: consilium bench papers --data data --out bench-out
    --only hippocampus/dp-sgd/8 --set clip=0.05
    """
    from research.papers import papers as reproduce

    fields = dict(pair.partition("=")[::2] for pair in changes or ())
    made = reproduce(data, out, seeds=seeds, only=only, changes=fields, threads=threads, report_only=report_only)
    say(json.dumps(made.rows) if as_json else made.text, nl=as_json)


@app.command("utility")
def utility(
    data: Data,
    test: Annotated[
        Path | None, typer.Option("--test", help="A second dataset to score on; it is read once, at the end.")
    ] = None,
    layout: Layout = "auto",
    sites: Sites = None,
    hospitals: Hospitals = None,
    public_images: PublicImages = 30,
    public_maps: PublicMaps = 10,
    paired: Paired = 0,
    paired_from: PairedFrom = "",
    grid: Grid = "",
    spacing: Spacing = "",
    labels: Labels = "",
    channels: Channels = "",
    recipe: Annotated[
        RecipeName | None,
        typer.Option(help="What the study asks its teachers and how; by default what the planner recommends."),
    ] = None,
    voters: Annotated[
        int | None,
        typer.Option(
            help="Teachers of each site, on disjoint patients; by default the planner's recommendation.", min=1
        ),
    ] = None,
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-3,
    unit: UnitHidden = Unit.HOSPITAL,
    aggregation: Annotated[
        str, typer.Option(help="Who adds the noise: open (the server) or sealed-sum (the sites).")
    ] = OPEN,
    colluders: options.Colluders = 1,
    queries: Annotated[int, typer.Option(help="Volumes asked about, one release each (recipe pca).", min=1)] = 16,
    rounds: Annotated[
        int, typer.Option(help="Rounds of a release about all volumes (recipe joint).", min=1, max=MAX_JOINT_ROUNDS)
    ] = JOINT_ROUNDS,
    teacher_steps: Annotated[
        int | None, typer.Option(help="Training steps of a teacher; by default the recipe's.", min=1)
    ] = None,
    student_steps: Annotated[
        int | None, typer.Option(help="Training steps of the student; by default the recipe's.", min=8)
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(help="Number of repetitions; without --test each uses another fifth for validation.", **SEEDS),
    ] = 5,
    central: Annotated[
        bool,
        typer.Option(
            "--central",
            help="Also train with DP-SGD: one network on all patients, and one per hospital, kept near their mean.",
        ),
    ] = False,
    offsets: Annotated[
        bool, typer.Option("--offsets", help="Also run a control with the releases shuffled between volumes.")
    ] = False,
    home: Annotated[
        bool,
        typer.Option(
            "--home", help="Also adapt the student at each hospital, in every way of adapting that `site adapt` knows."
        ),
    ] = False,
    home_choice: Annotated[
        bool,
        typer.Option(
            "--home-choice",
            help="Do what --home does and also choose one way for each hospital by cross-validation, as `site adapt` "
            "does. Takes about six times as long as --home.",
        ),
    ] = False,
    bounds: Annotated[
        bool,
        typer.Option(
            "--bounds/--no-bounds",
            help="Also train networks without privacy, which show what could be reached: the teachers, one network "
            "on all patients, and students of the answers without noise, of the teachers' mean predictions, and "
            "of the public volumes' true labels.",
        ),
    ] = True,
    ablate: Annotated[
        bool, typer.Option("--ablate", help="Instead, train the student without each idea of the recipe in turn.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            help="Score the patients held back from the choice of recipes. The run is entered in the register of "
            "reports before it begins.",
        ),
    ] = False,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """Train teachers and students at one setting, and compare the student with its controls seed by seed.

    A hash of a patient's name decides whether the patient is scored here or with --report. Nobody is scored in both.
    Example: consilium bench utility --data Task04_Hippocampus --hospitals 8 --epsilon 8 --delta 1e-3 --seeds 5
    Example: consilium bench utility --data tumours --sites tumours/sites.csv --unit patient --delta 1e-5 --paired 8
    """
    from common.data.split import SplitCounts
    from research.home import CHOSEN, HOME
    from research.jobs import ABLATION
    from research.reports import DEVELOPMENT, REGISTER, REPORT, Register
    from research.roles import BenchData
    from research.setting import Setting
    from research.table import ablation_summary, render, render_ablation, summary
    from research.utility import OFFSETS, PARTS
    from server.planning.recommend import protocol_for, training_for

    if aggregation not in (OPEN, SEALED_SUM):
        raise InvalidInput("--aggregation", value=aggregation, limit=f"{OPEN}, {SEALED_SUM}")
    if aggregation == OPEN and colluders != 1:
        remedy = f"add --aggregation {SEALED_SUM}, or leave --colluders out"
        raise InvalidInput("--colluders", value=colluders, limit=f"only with --aggregation {SEALED_SUM}", remedy=remedy)
    if paired and recipe not in (None, RecipeName.JOINT):
        raise InvalidInput(
            "--paired",
            value=paired,
            limit=f"0 with --recipe {recipe}",
            remedy="choose --recipe joint, or leave out --paired",
        )
    if report and ablate:
        raise InvalidInput("--report with --ablate", limit="one of them", remedy="choose on development cases")
    counts = SplitCounts(hospitals, public_images=public_images, label_maps=public_maps, paired=paired)
    scored = REPORT if report else DEVELOPMENT
    terms_of_data = (data, counts, layout, sites, test, names(labels), names(channels))
    source = _source(BenchData(*terms_of_data, paired_from=paired_from, scored=scored))
    patients = source.hospitals()
    voters = voters or _planned_voters(patients, Budget(epsilon, delta), unit)
    on = study_data(source, grid=grid, spacing=spacing)
    mean_shape = _mean_shape(source, on, paired=paired)
    recipe = recipe or RecipeName(protocol_for(mean_shape))
    joint = recipe is RecipeName.JOINT
    teacher, student = (
        _recipes(150, 600, joint=False) if recipe is RecipeName.PCA else training_for(recipe, mean_shape=mean_shape)
    )
    recipes = (
        replace(teacher, steps=teacher_steps or teacher.steps),
        replace(student, steps=student_steps or student.steps),
    )
    terms = (str(recipe), len(patients), voters, epsilon, delta, unit, queries)
    setting = Setting(*terms, *recipes, central, rounds, paired, None if aggregation == OPEN else colluders)
    measured = PARTS if bounds else tuple(part for part in PARTS if part != "bounds")
    at_home = CHOSEN if home_choice else HOME
    further = ((OFFSETS, offsets and joint), (at_home, home or home_choice))
    parts = (ABLATION,) if ablate else (*measured, *(part for part, wanted in further if wanted))
    said: dict[str, object] = {"scored": scored}
    register = Register(REGISTER, data=data.resolve().name, names=source.names()) if report else None
    if register is not None:
        said["report"] = register.begin(setting, seeds=seeds)
    rows = _measure(setting, parts, source=source, data=on, cache=cache, seeds=seeds, jobs=jobs)
    summed, rendered = (ablation_summary, render_ablation) if ablate else (summary, render)
    show(summed(setting, rows) | said, rendered, data=data, out=out, as_json=as_json)
    if register is not None:
        register.finish()


@app.command("pate")
def pate(
    data: Data,
    layout: Layout = "auto",
    sites: Sites = None,
    hospitals: Annotated[int, typer.Option(help="Number of hospitals K, each with one teacher.", min=2)] = 8,
    queries: Annotated[int, typer.Option(help="Number N of volumes to ask about.", min=2)] = 80,
    public_maps: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of public label maps, of patients whose volumes no query is about; with 0 the label maps "
            "of the N volumes asked about are public, as in the paper.",
        ),
    ] = 0,
    test_cases: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of cases to score on, chosen at random for every seed; with 0 every seed scores on another "
            "fifth of the cases.",
        ),
    ] = 84,
    grid: Grid = "64,64,64",
    spacing: Spacing = "",
    labels: Labels = "",
    channels: Channels = "",
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-3,
    network: Annotated[str, typer.Option(help="Network of the teachers, the student and DP-SGD.")] = "paper-unet",
    width: Width = "32,64,128,256,320",
    teacher_steps: TeacherSteps = 4000,
    student_steps: StudentSteps = 4000,
    seeds: Annotated[
        int, typer.Option(help="Number of repetitions; each assigns the cases to their roles anew.", **SEEDS)
    ] = 3,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """Repeat the PATE paper's experiment, with both algorithms, DP-SGD and controls, beside the paper's own numbers.

    The run can be stopped and started again. At the defaults the 484 cases of Task01 are divided as in the paper: 8
    teachers with 40 cases each, 80 cases to ask about, on whose label maps the codec is fitted, and 84 cases to score
    on. The options make smaller experiments.
    Example: consilium bench pate --data Task01_BrainTumour --spacing 3,3,3
    Example: consilium bench pate --data TCGA_LGG --grid 64,64,32 --queries 12 --public-maps 10 --test-cases 0
    """
    from common.data.split import SplitCounts
    from research.jobs import PATE
    from research.pate import pate_markdown, pate_summary
    from research.roles import BenchData
    from research.setting import Setting

    counts = SplitCounts(hospitals, public_images=queries, label_maps=public_maps)
    source = _source(BenchData(data, counts, layout, sites, None, names(labels), names(channels), test_cases))
    shape = {"channels": widths(width), "network": network, "augmentation": "rotate-mirror"}
    teacher = TrainingConfig(steps=teacher_steps, **shape)  # type: ignore[arg-type]
    student = TrainingConfig(steps=student_steps, learning_rate=2e-3, **shape)  # type: ignore[arg-type]
    terms = (len(source.hospitals()), 1, epsilon, delta, Unit.HOSPITAL, queries)
    setting = Setting("paper-ae", *terms, teacher, student)
    on = study_data(source, grid=grid, spacing=spacing)
    rows = _measure(setting, (PATE,), source=source, data=on, cache=cache, seeds=seeds, jobs=jobs)
    document = pate_summary(setting, on, rows)
    show(document, as_text(pate_markdown), data=data, out=out, as_json=as_json)


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
    seconds: Annotated[float, typer.Option(help="Processor seconds of every training.", min=1, max=604_800)] = 60,
    seeds: Rotations = 3,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """Compare the networks a study may name, as teacher and as student, at equal processor time.

    Example: consilium bench networks --data Task04_Hippocampus --seconds 60 --seeds 3
    """
    from common.data.split import SplitCounts
    from research.jobs import NETWORKS
    from research.networks import networks_markdown, networks_summary
    from research.roles import BenchData
    from research.setting import Setting

    counts = SplitCounts(2, public_images=public_images, label_maps=public_maps)
    source = BenchData(data, counts, layout, sites, None, names(labels), names(channels))
    on = study_data(source, grid=grid, spacing=spacing)
    terms = (2, 1, 8.0, 1e-3, Unit.HOSPITAL, public_images)
    setting = Setting("pca", *terms, *_recipes(TrainingConfig().steps, 8, joint=False))
    rows = _measure(setting, (NETWORKS,), source=source, data=on, cache=cache, seeds=seeds, jobs=jobs, seconds=seconds)
    document = networks_summary(setting, on, seconds, rows)
    show(document, as_text(networks_markdown), data=data, out=out, as_json=as_json)


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
    voters: Annotated[
        int,
        typer.Option(
            help="Teachers of each site, on disjoint patients; a poisoned site poisons all of its teachers.", min=1
        ),
    ] = 1,
    epsilon: Epsilon = 8.0,
    delta: Delta = 1e-3,
    unit: UnitHidden = Unit.HOSPITAL,
    rounds: Annotated[
        int, typer.Option(help="Rounds of a release about all volumes.", min=1, max=MAX_JOINT_ROUNDS)
    ] = JOINT_ROUNDS,
    teacher_steps: TeacherSteps = 150,
    student_steps: StudentSteps = 600,
    seeds: Rotations = 3,
    jobs: Jobs = None,
    cache: Cache = Path("bench-cache"),
    out: Out = None,
    as_json: TableAsJson = False,
) -> None:
    """Measure what one and two poisoned sites do to the labels and the student of a joint study.

    If --cache holds the results of `consilium bench utility` at the same setting, only the poisoned students are
    trained. Example: consilium bench poison --data Task04_Hippocampus --hospitals 8 --epsilon 8 --delta 1e-3 --seeds 3
    """
    from common.data.split import SplitCounts
    from research.jobs import POISON
    from research.poison import poison_summary, render_poison
    from research.roles import BenchData
    from research.setting import Setting

    counts = SplitCounts(hospitals, public_images=public_images, label_maps=public_maps)
    source = _source(BenchData(data, counts, layout, sites, None, names(labels), names(channels)))
    recipes = _recipes(teacher_steps, student_steps, joint=True)
    setting = Setting("joint", len(source.hospitals()), voters, epsilon, delta, unit, 16, *recipes, rounds=rounds)
    on = study_data(source, grid=grid, spacing=spacing)
    rows = _measure(setting, (POISON,), source=source, data=on, cache=cache, seeds=seeds, jobs=jobs)
    show(poison_summary(setting, rows), render_poison, data=data, out=out, as_json=as_json)


def _recipes(teacher_steps: int, student_steps: int, *, joint: bool) -> tuple[TrainingConfig, TrainingConfig]:
    teacher = TrainingConfig(steps=teacher_steps, learning_rate=5e-3 if joint else 1e-2)
    return teacher, TrainingConfig(steps=student_steps, learning_rate=2e-3)


def _source(source: BenchData) -> BenchData:
    """Return the source. If neither the data nor an option states a number of hospitals, the usual one is set."""
    from research.roles import HOSPITALS

    named = {case.hospital for case in source.read().labelled}
    if source.sites is None and source.counts.hospitals is None and (None in named or len(named) < 2):
        return replace(source, counts=replace(source.counts, hospitals=HOSPITALS))
    return source


def _mean_shape(source: BenchData, data: DataConfig, *, paired: int) -> float | None:
    """Return the mean shape's Dice of the first seed's public label maps; None with pairs or with few maps."""
    from common.data.volume import load_label
    from server.planning.public_shapes import LEAST_MAPS, mean_shape_dice

    maps = [case.label for case in source.split(source.read(), seed=0).label_maps if case.label is not None]
    if paired or len(maps) < LEAST_MAPS:
        return None
    return mean_shape_dice([load_label(each, data) for each in maps], labels=len(data.labels))


def _planned_voters(patients: Sequence[int], budget: Budget, unit: Unit) -> int:
    """Return the number of voters that the planner recommends for the hospital with the median number of patients."""
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
    source: BenchData,
    data: DataConfig,
    cache: Path,
    seeds: int,
    jobs: int | None,
    seconds: float = 0.0,
) -> list[dict[str, float]]:
    from client.training.side_by_side import default_jobs
    from research.jobs import BenchJob, run_jobs
    from research.setting import mean_noise, study_of

    study_of(setting, data)  # refuse terms before anything is trained
    mean_noise(setting)
    cache.mkdir(parents=True, exist_ok=True)
    work = [[BenchJob(setting, source, data, cache, seed, part, seconds) for part in parts] for seed in range(seeds)]
    return run_jobs(work, jobs=jobs or default_jobs(seeds * len(parts)))
