"""Defines ``consilium demo``: a whole study from data to report with one command."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.plain import plain
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Relation, Unit
from consilium.cli import options
from consilium.cli.say import console, interruptible, say

if TYPE_CHECKING:
    from rich.console import Console

    from consilium.demo.options import DemoOptions
    from consilium.demo.run import DemoProgress


app = typer.Typer(add_completion=False)

Strategy = Annotated[
    str,
    typer.Option(
        "--strategy",
        help="Training of the teachers: standard, or with differential privacy: dp-sgd (one clip for all weights), "
        "dp-bbb (learns a distribution of each weight) or dp-mac (clips each block of the network).",
    ),
]


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(help="Directory for everything the demo makes.", callback=options.folder_to_write)
    ] = Path("demo-out"),
    data: Annotated[
        Path | None, typer.Option(help="A dataset with labels, in any layout; without this option phantoms are made.")
    ] = None,
    channels: Annotated[str, typer.Option(help="Channel names, in order; by default those of the data.")] = "",
    hospitals: options.TriedHospitals = None,
    epsilon: options.Epsilon = 8.0,
    delta: options.Delta = 1e-5,
    queries: Annotated[
        int | None,
        typer.Option(
            help="Number of public volumes to ask about; without --joint each is one query [a fifth of the data].",
            **options.PLAIN,
        ),
    ] = None,
    accountant: options.Accountant = AccountantName.EXACT,
    unit: options.TriedUnit = Unit.PATIENT,
    relation: options.RelationOption = Relation.REPLACE_ONE,
    voters: options.TriedVoters = None,
    aggregation: options.Aggregation = None,
    colluders: options.Colluders = 1,
    spare_draws: options.SpareDraws = 0,
    codec: options.Codec = "pca",
    rounds: options.Jointly = None,
    paired: options.Paired = 0,
    strategy: Strategy = "standard",
    training_epsilon: Annotated[
        float, typer.Option(help="ε that a private training may cost each patient, at the study's δ and relation.")
    ] = 8.0,
    seed: Annotated[int, typer.Option(help="Seed of phantoms, split and training. Noise has no seed.")] = 0,
    absent: options.Absent = "",
    dashboard: Annotated[bool, typer.Option(help="Serve the study's dashboard while the demo runs.")] = True,
) -> None:
    """Run a whole study on this machine: hospitals' data, teachers, real daemons, a student, a report.

    Run the same command again to resume. Example: consilium demo --out demo-out
    Example: consilium demo --data brats --channels FLAIR,T1,T1ce,T2 --hospitals 3 --absent hospital-02=T1ce
    """

    asked = asked_of(locals(), "out", "dashboard")
    from consilium.demo.run import run_demo

    options.say_unit(unit)
    with interruptible(), watching(console(stderr=True)) as watch:
        report = run_demo(out, asked, watch=watch, show_dashboard=dashboard)
    _say(out, report, dashboard=dashboard)


def asked_of(given: Mapping[str, Any], *apart: str) -> DemoOptions:
    """Return the options of a demo or a simulation from its command's parameters.

    Args:
        given: All parameters of the command, by name. A parameter that is neither an option of a demo nor in ``apart``
            is an error.
        apart: Names of the parameters that are not options of a demo.

    Returns:
        The options.
    """
    from consilium.demo.options import DemoOptions

    data = None if given["data"] is None else str(given["data"].absolute())
    return DemoOptions(**{name: value for name, value in given.items() if name not in apart} | {"data": data})


def _say(out: Path, report: Path, *, dashboard: bool) -> None:
    from consilium.demo.dashboard import reopen

    say(summary(out))
    where = f" Look at the study with `{reopen(out / 'server', out / 'dashboard')}`." if dashboard else ""
    say(f"The report is {report}.{where}")


@contextmanager
def watching(console: Console) -> Iterator[DemoProgress]:
    """Show progress bars on a console while the demo runs.

    Args:
        console: The console.

    Returns:
        A context with a :class:`DemoProgress` that the demo reports its progress to.
    """
    from rich.progress import TaskID

    from consilium.demo.run import DemoProgress
    from server.aggregation.progress import StudyProgress, stage_bars

    tasks: dict[str, TaskID] = {}
    with stage_bars(console) as bars:

        def start(name: str, total: int) -> None:
            tasks[name] = bars.add_task(plain(name), total=total)

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                start(name, total)
            bars.update(tasks[name], completed=done, total=total)

        def finish(name: str) -> None:
            bars.update(tasks[name], completed=bars.tasks[tasks[name]].total)

        yield DemoProgress(
            start=start,
            advance=advance,
            finish=finish,
            event=StudyProgress(bars, indent="  ").on_event,
            say=lambda text: bars.console.print(f"  … {text}"),
        )


def summary(out: Path) -> str:
    """Return sentences on a demo's result.

    They state the student's gain over its best control, the teachers' Dice without noise, the guarantee, the cases that
    were left out, and one hospital's scores.

    Args:
        out: Directory of the demo.

    Returns:
        The sentences.
    """
    from common.data.dataset import Problem, left_out_lines

    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    privacy, data, worth = report["privacy"], report["data"], report["worth"]
    stated = f"δ = {delta_text(privacy['delta'])}, unit {privacy['unit']}, relation {privacy['relation']}"
    gate = {"exact": "epsilon_exact", "rdp": "epsilon_rdp"}.get(privacy["accountant"])
    spent = "" if gate is None else f"; {privacy['queries']} answers spent ε = {epsilon_text(privacy[gate])} of it"
    sentences = [
        _gained(worth, report["student"]["dice"]["mean"]),
        f"All {privacy['voters']} teachers together, without noise, have Dice {_dice(report['ensemble'])}, one of them "
        f"{_dice(report['mean_teacher'])} in the mean.",
        f"Each {privacy['unit']} is protected by ε = {epsilon_text(privacy['guaranteed_epsilon'])} "
        f"({privacy['accountant']}), {stated}{spent}.",
    ]
    left_out = left_out_lines(data["used"], [Problem(one["case"], one["reason"]) for one in data["left_out"]])
    return "\n".join([*sentences, *(left_out if data["left_out"] else ()), *_at_home(out)])


def _gained(worth: dict[str, Any] | None, student: float | None) -> str:
    """Describe the gain from the hospitals' answers, with the verdict that all texts of a study use."""
    if worth is None:
        return f"The student has Dice {_figure(student)}; the gain from the answers could not be measured."
    within = "no interval, which needs at least two cases"
    if worth["interval"] is not None:
        low, high = worth["interval"]
        within = f"95 % interval {low:+.3f} to {high:+.3f} over {worth['cases']} cases"
    says = {
        "proven": "so the hospitals' answers gained",
        "not proven": "so no gain is proven:",
        "worse": "so the answers made it worse:",
    }[worth["word"]]
    return (
        f"The student has Dice {_figure(worth['student'])}, {worth['reference']} {_figure(worth['other'])}, {says} "
        f"{worth['gain']:+.3f} ({within})."
    )


def _dice(scored: dict[str, Any] | None) -> str:
    return _figure(None if scored is None else scored["dice"]["mean"])


def _figure(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _at_home(out: Path) -> list[str]:
    """Return one hospital's newest scores of the student on its own cases; in a real study they would stay there."""
    found = sorted(out.glob("sites/*/evaluation/*/evaluation.json"))
    if not found:
        return []
    evaluation, site = json.loads(found[-1].read_text(encoding="utf-8")), found[-1].parents[2].name
    mean = evaluation["all"]
    return [
        f"{site} pulled the student, checked it against its receipts and scored it on its own {mean['cases']} cases: "
        f"Dice {_figure(mean['mean_dice'])} (in {found[-1].parents[1]}, sent nowhere).",
        *(f"{site} on the student: {alarm}" for alarm in evaluation.get("alarms", ())),
    ]
