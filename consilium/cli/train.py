"""Defines ``consilium site train``: trains this site's teachers; it can be interrupted and resumed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from common.plain import joined, plain
from common.wording import many
from consilium.cli.options import CORES, Again, Metrics, ResultAsJson
from consilium.cli.say import console, interruptible, say

if TYPE_CHECKING:
    from client.training.task import OnProgress, SiteReport

app = typer.Typer(help="Train a site's teachers.")

Data = Annotated[
    Path | None, typer.Option("--data", help="The site's dataset, in any layout; by default the dataset in site.toml.")
]
StudyFile = Annotated[
    Path | None, typer.Option("--study", help="The study's TOML file; by default the site's own copy.")
]
LayoutName = Annotated[
    str | None, typer.Option(help="Layout of --data, such as msd; by default site.toml's, otherwise recognised.")
]
LabelMap = Annotated[
    Path | None,
    typer.Option(
        help="TOML file with tables labels, channels and bids, which assign the names of the site's data to the "
        "study's and choose among BIDS files. By default the tables of site.toml."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Seed for assigning synthetic cases to voters; refused for real patients, who are assigned at random.",
        min=0,
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(help="Number of voters trained at once, one thread each; by default one per core.", **CORES),
]


@app.command("train")
def train(
    site_dir: Annotated[Path, typer.Option("--site-dir", help="The site's directory; teachers are written below it.")],
    data: Data = None,
    study: StudyFile = None,
    layout: LayoutName = None,
    label_map: LabelMap = None,
    seed: Seed = None,
    jobs: Jobs = None,
    strategy: Annotated[
        str,
        typer.Option(
            help="Training strategy: standard, or with differential privacy: dp-sgd (one clip for all weights), dp-bbb "
            "(learns a distribution of each weight) or dp-mac (clips each block of the network)."
        ),
    ] = "standard",
    epsilon: Annotated[float | None, typer.Option(help="ε that the training may cost each patient.")] = None,
    delta: Annotated[float, typer.Option(help="δ at which the ε of --epsilon holds.")] = 1e-5,
    relation: Annotated[
        str, typer.Option(help="Neighbouring relation for which ε is planned: add-remove or replace-one.")
    ] = "add-remove",
    sampling: Annotated[
        str,
        typer.Option(
            help="How the patients of a step are chosen: poisson, or fixed-partition (divided into batches once)."
        ),
    ] = "poisson",
    rate: Annotated[str | None, typer.Option(help="Fraction of the patients in each step, e.g. 1/4.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of a private training.", min=1, max=1_000_000)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="First learning rate of a private training.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clipping norm of a patient's gradient.")] = None,
    per_layer: Annotated[
        bool | None,
        typer.Option(
            "--per-layer/--whole", help="Clip the gradient of every layer separately instead of all layers together."
        ),
    ] = None,
    scans: Annotated[
        int | None,
        typer.Option(
            help="Scans or patches of a patient whose gradients are averaged in a step before clipping; 1 by default."
        ),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Weight of the divergence from the prior in dp-bbb's loss.")
    ] = None,
    prior_std: Annotated[float | None, typer.Option(help="Standard deviation of dp-bbb's prior, at most 1000.")] = None,
    mu: Annotated[
        float | None, typer.Option(help="Weight μ of the penalty on auxiliary coordinates in dp-mac's loss.")
    ] = None,
    mu_growth: Annotated[
        float | None, typer.Option(help="Factor by which dp-mac's μ grows from the first step to the last.")
    ] = None,
    z_steps: Annotated[
        int | None,
        typer.Option(
            help="Number of dp-mac's steps on its auxiliary coordinates before each noisy sum of gradients.", max=10_000
        ),
    ] = None,
    z_rate: Annotated[
        float | None, typer.Option(help="Size of dp-mac's steps on its auxiliary coordinates: above 0, at most 1.")
    ] = None,
    noise_multiplier: Annotated[
        str | None,
        typer.Option(help="Noise multiplier, e.g. 2.449; the ε that results must be at most --epsilon."),
    ] = None,
    again: Again = False,
    metrics: Metrics = None,
    as_json: ResultAsJson = False,
) -> None:
    """Train one teacher per voter on this site's own patients. Stop it with Ctrl-C; run it again to resume.

    The number of parallel trainings does not change the weights. Before its first step, each training is recorded in
    the site's ledger; a private training is then charged in full. At its end the teacher's hash is recorded. A step
    that was interrupted counts as taken and is not repeated. If the teachers' directory was restored from a backup that
    lacks the last steps of a private training, that training continues only with --again, which charges the patients
    again. The options of a private training have defaults for each strategy; choose other values on public data, not on
    patients. Exit code 2: no teacher has a usable case. 6: another training or a withdrawal is in progress here. 7: a
    voter's process died; the other voters are done.
    Example: consilium site train --site-dir /srv/consilium --jobs 4
    Example: consilium site train --site-dir /srv/consilium --strategy dp-sgd --epsilon 8 --delta 1e-5
    Example: consilium site train --site-dir /srv/consilium --strategy dp-sgd --noise-multiplier 2.449
    """
    from client.training.command import PrivateOptions, TrainOptions
    from client.training.command import train as train_teachers
    from client.training.teacher_curves import TeacherCurves
    from common.curves import curves_of
    from common.data.dataset import unlabelled_lines

    recipe = (learning_rate, clip, per_layer, scans, temperature, prior_std, mu, mu_growth, z_steps, z_rate)
    private = PrivateOptions(strategy, epsilon, delta, relation, sampling, rate, steps, *recipe, noise_multiplier)
    options = TrainOptions(site_dir, data, study, layout, label_map, seed, jobs, private, again)
    with (
        interruptible(),
        curves_of(metrics, TeacherCurves, run=lambda: site_dir.resolve().name) as curves,
    ):
        progress = _progress if curves is None else partial(_progress, on_step=curves.step)
        result = train_teachers(options, progress=progress, on_warning=lambda text: say(text, err=True))
        if curves is not None:
            curves.end(result.report, result.structures)
            say("the curves show data of this site's patients without any ε: keep them at the hospital", err=True)
    if as_json:
        say(json.dumps(result.to_json(), allow_nan=False))
    else:
        say(summary(result.report, result.structures))
        cases = result.cases
        say(f"{many(cases.patients, 'patient')} in {many(cases.listed, 'case')}: {cases.patient_identity.sentence}")
        for line in unlabelled_lines(cases.unlabelled):
            say(plain(line))
        if not all(voter.reused for voter in result.report.voters):
            say("to make a running worker use the new teachers, end `consilium site up` and start it again")
    result.check_finished()


@contextmanager
def _progress(voters: int, steps: int, on_step: OnProgress | None = None) -> Iterator[OnProgress]:
    """Show one progress bar over all voters' steps, with rate, loss and time left, and call ``on_step`` at each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if not task.speed else f"{task.speed:.1f} steps/s")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TextColumn("left"),
        TimeLeft(),
    )
    with Progress(*columns, console=console(stderr=True)) as bar:
        task = bar.add_task("reading cases", total=voters * steps)
        done: dict[int, int] = {}

        def on_progress(voter: int, step: int, loss: float) -> None:
            done[voter] = step
            if on_step is not None:
                on_step(voter, step, loss)
            finished = sum(count == steps for count in done.values())
            note = "" if math.isnan(loss) else f", loss {loss:.3f}"
            bar.update(
                task, completed=sum(done.values()), description=f"teachers: {finished} of {voters} trained{note}"
            )

        yield on_progress


def summary(report: SiteReport, structures: tuple[str, ...]) -> str:
    """Describe each teacher of a finished `site train`: its patients, steps, scores, guarantees, or why there is none.

    Args:
        report: The report.
        structures: Names of the structures that teachers segment.

    Returns:
        The lines as one text.
    """
    lines = []
    for voter in report.voters:
        if voter.weights is None:
            why = voter.problem or "no usable case to train on"
            lines.append(f"teacher {voter.voter}: {why}; it will contribute the zero code")
            continue
        dice = ", ".join(
            f"{name} {'-' if value is None else format(value, '.3f')}"
            for name, value in zip(structures, voter.dice, strict=False)
        )
        checked = f"; Dice on {voter.held_out} held-out of its own: {dice}" if voter.dice else ""
        state = "kept from before" if voter.reused else f"{many(voter.steps, 'step')} in {voter.seconds:.0f} s"
        if voter.lost_steps and not voter.reused:
            lost = f"{many(voter.lost_steps, 'further step')} charged and lost to interruptions"
            state = f"{many(voter.steps, 'step')}, {lost}; this run took {voter.seconds:.0f} s"
        lines.append(f"teacher {voter.voter}: {many(voter.trained_on, 'patient')}, {state}{checked}")
        lines += [f"  each of them: {guarantee}" for guarantee in voter.guarantees]
    lines += [f"teacher {crash.voter}: not trained: {crash.reason}" for crash in report.crashes]
    if report.problems:
        lines.append(f"{many(len(report.problems), 'case')} left out:")
        lines += [f"  {problem.case}: {problem.reason}" for problem in report.problems]
    return joined(lines)
