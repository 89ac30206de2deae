"""``consilium demo``: one command from nothing to a report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Relation, Unit
from consilium.cli import options

if TYPE_CHECKING:
    from rich.console import Console

    from consilium.demo.run import Watch


app = typer.Typer(add_completion=False)

Strategy = Annotated[
    str,
    typer.Option("--strategy", help="How teachers are trained: standard, or with a guarantee dp-sgd, dp-bbb."),
]


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Directory for everything the demo makes.")] = Path("demo-out"),
    data: Annotated[
        Path | None, typer.Option(help="A dataset with labels, in any layout; phantoms without one.")
    ] = None,
    channels: Annotated[str, typer.Option(help="Channel names, in order; without it the data's.")] = "",
    hospitals: Annotated[
        int | None, typer.Option(help="Hospitals K [as the data's sites.csv names, or 3].", **options.PLAIN)
    ] = None,
    epsilon: options.Epsilon = 8.0,
    delta: options.Delta = 1e-5,
    queries: Annotated[
        int | None,
        typer.Option(
            help="Public volumes, of a query each where it is not joint [a fifth of the data].", **options.PLAIN
        ),
    ] = None,
    accountant: options.Accountant = AccountantName.EXACT,
    unit: options.UnitOption = Unit.PATIENT,
    relation: options.RelationOption = Relation.REPLACE_ONE,
    voters: Annotated[
        int | None,
        typer.Option(help="Voters m a site, on disjoint patients [as `consilium plan` recommends].", **options.PLAIN),
    ] = None,
    aggregation: options.Aggregation = None,
    colluders: options.Colluders = 1,
    spare_draws: options.SpareDraws = 0,
    codec: options.Codec = "pca",
    joint: options.Jointly = None,
    paired: options.Paired = 0,
    strategy: Strategy = "standard",
    training_epsilon: Annotated[
        float, typer.Option(help="ε a private training may cost each patient, at the study's δ and relation.")
    ] = 8.0,
    seed: Annotated[
        int, typer.Option(help="Seed of phantoms, split and training; noise has none, nor other data's deal.")
    ] = 0,
    absent: options.Absent = "",
    dashboard: Annotated[bool, typer.Option(help="Serve the study's dashboard while the demo goes on.")] = True,
) -> None:
    """The whole road on this machine: hospitals' data, teachers, a federation of real daemons, a student, a report.

    Run the same command again to resume. Example: consilium demo --out demo-out
    Example: consilium demo --data brats --channels FLAIR,T1,T1ce,T2 --hospitals 3 --absent hospital-02=T1ce
    """
    from rich.console import Console

    from consilium.demo.options import DemoOptions
    from consilium.demo.run import run_demo

    asked = DemoOptions(
        hospitals=hospitals,
        epsilon=epsilon,
        delta=delta,
        queries=queries,
        accountant=str(accountant),
        unit=str(unit),
        relation=str(relation),
        voters=voters,
        aggregation=aggregation,
        colluders=colluders,
        spare_draws=spare_draws,
        codec=codec,
        joint=joint,
        paired=paired,
        strategy=strategy,
        training_epsilon=training_epsilon,
        seed=seed,
        data=None if data is None else str(data.absolute()),
        absent=absent,
        channels=channels,
    )
    with watching(Console(stderr=True)) as watch:
        report = run_demo(out, asked, watch=watch, show_dashboard=dashboard)
    _say(out, report, dashboard=dashboard)


def _say(out: Path, report: Path, *, dashboard: bool) -> None:
    from consilium.demo.dashboard import reopen

    typer.echo(summary(out))
    typer.echo(f"report: {report}")
    if dashboard:
        typer.echo(f"dashboard: {reopen(out / 'server', out / 'dashboard')}")
    typer.echo(f"bundle: {out / 'server' / 'bundle'}; ledger: {out / 'server' / 'ledger.sqlite'}")


@contextmanager
def watching(console: Console) -> Iterator[Watch]:
    from rich.progress import TaskID

    from consilium.demo.run import Watch
    from server.aggregation.progress import StudyProgress, stage_bars

    tasks: dict[str, TaskID] = {}
    with stage_bars(console) as bars:

        def start(name: str, total: int) -> None:
            tasks[name] = bars.add_task(name, total=total)

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                start(name, total)
            bars.update(tasks[name], completed=done, total=total)

        def finish(name: str) -> None:
            bars.update(tasks[name], completed=bars.tasks[tasks[name]].total)

        yield Watch(
            start=start,
            advance=advance,
            finish=finish,
            event=StudyProgress(bars, indent="  ").on_event,
            say=lambda text: bars.console.print(f"  … {text}"),
        )


def summary(out: Path) -> str:
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    privacy = report["privacy"]

    stated = f"δ = {delta_text(privacy['delta'])}, unit {privacy['unit']}, relation {privacy['relation']}"

    def dice(value: Any) -> str:
        return "n/a" if value is None else f"{value:.3f}"

    student = report["student"]["dice"]["mean"]
    controls = {name: one["dice"] and one["dice"]["mean"] for name, one in report["controls"].items()}
    scored = [score for score in controls.values() if score is not None]
    gain = f"{student - max(scored):+.3f}" if scored and student is not None else "n/a"
    return "\n".join(
        [
            f"guaranteed ε = {epsilon_text(privacy['planned_epsilon'])} ({privacy['accountant']}), {stated}",
            f"spent ε = {epsilon_text(privacy['epsilon_exact'])} (exact), ε = {epsilon_text(privacy['epsilon_rdp'])} "
            f"(RDP), {stated}, "
            f"{privacy['queries']} queries, noise multiplier {privacy['noise_multiplier']:.4f}",
            f"Dice on test: student {dice(student)}, "
            f"mean teacher {dice(report['mean_teacher']['dice']['mean'])}, "
            f"ensemble {dice(report['ensemble']['dice']['mean'])}, "
            f"mean shape {dice(report['mean_shape']['dice']['mean'])}",
            "Controls: "
            + ", ".join(f"{name.replace('_', ' ')} {dice(score)}" for name, score in controls.items())
            + f"; student's gain over the best of them {gain}",
            *filter(None, (report["known"], report["bought"])),
            *_at_home(out),
        ]
    )


def _at_home(out: Path) -> list[str]:
    """The newest figures a hospital has of the student on its own cases: in a real study they would stay there."""
    found = sorted(out.glob("sites/*/evaluation/*/evaluation.json"))
    if not found:
        return []
    evaluation, site = json.loads(found[-1].read_text(encoding="utf-8")), found[-1].parents[2].name
    mean = evaluation["all"]
    score = "n/a" if mean["mean_dice"] is None else f"{mean['mean_dice']:.3f}"
    return [
        f"{site} pulled the student, checked it against its receipts and scored it on its own {mean['cases']} cases: "
        f"Dice {score} (in {found[-1].parents[1]}, sent nowhere)",
        *(f"{site} on the student: {alarm}" for alarm in evaluation.get("alarms", ())),
    ]
