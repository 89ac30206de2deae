"""``consilium site train``: train this site's teachers, with progress, to be interrupted and run again at will."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from client.training.private.charge import record_trained, record_trainings
from common.errors import DaemonFailed, InvalidInput
from common.privacy.consent import warn_about
from common.privacy.mechanism import Unit

if TYPE_CHECKING:
    from client.training.private.settings import PrivateSettings
    from client.training.site import OnProgress, SiteReport

app = typer.Typer(help="Train a site's teachers.")


@app.command("train")
def train(
    ctx: typer.Context,
    site_dir: Annotated[Path, typer.Option("--site-dir", help="The site's directory; teachers go below it.")],
    data: Annotated[
        Path | None, typer.Option("--data", help="The site's dataset, in any layout; by default the one in site.toml.")
    ] = None,
    study: Annotated[
        Path | None, typer.Option("--study", help="The study's TOML file; by default the site's own copy.")
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="msd, nnunet, bids or table; found by itself, or as site.toml says.")
    ] = None,
    label_map: Annotated[
        Path | None,
        typer.Option(
            help="TOML with the tables labels, channels and bids, the site's names = the study's; else as in site.toml."
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Deals synthetic cases to voters; refused for patients, who are dealt at random.", min=0),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Voters trained at once, one thread each; as many as there are cores by default.", min=1),
    ] = None,
    strategy: Annotated[str, typer.Option(help="standard, or with a guarantee: dp-sgd, dp-mac, dp-bbb.")] = "standard",
    epsilon: Annotated[float | None, typer.Option(help="ε the training may cost each patient.")] = None,
    delta: Annotated[float, typer.Option(help="δ of that ε.")] = 1e-5,
    relation: Annotated[str, typer.Option(help="Which ε is planned: add-remove or replace-one.")] = "add-remove",
    sampling: Annotated[str, typer.Option(help="poisson, or fixed-partition (batches dealt once).")] = "poisson",
    rate: Annotated[str | None, typer.Option(help="Share of the patients in a step, e.g. 1/4.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of a private training.", min=1)] = None,
    again: Annotated[bool, typer.Option("--again", help="Train anew: patients pay for this training too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train one teacher per voter on this site's own patients. Stop it with Ctrl-C; run it again to go on.

    How many are trained at once changes no weight. Each training goes into the site's ledger before its first step,
    with a private strategy charged in full, and its teacher's hash at its end; a step that was interrupted stays spent.
    Exit code 6: another training or a withdrawal is writing here. 7: a voter's process died; the others are done.
    Example: consilium site train --site-dir /srv/consilium --jobs 4
    Example: consilium site train --site-dir /srv/consilium --strategy dp-sgd --epsilon 8 --delta 1e-5
    """
    from client.data.cases import delta_warning, record_cases
    from client.data.layouts import DatasetSettings, load_names, open_for_training
    from client.policy import load_site
    from client.site.books import slots_file, withdrawn, writing_teachers
    from client.site.enrolment import public_start
    from client.training.side_by_side import default_jobs, side_by_side
    from client.training.site import plan_site, scans_by_patient, site_report
    from common.config import load_study

    settings, config = DatasetSettings(), None
    if data is None or study is None or (site_dir / "site.toml").exists():
        config = load_site(site_dir)
        data = data or config.path(config.data)
        study = study or config.path(config.study)
        settings = config.dataset
    if label_map is not None:
        names = load_names(label_map)
        settings = replace(settings, labels=names.labels, channels=names.channels, choice=names.choice)
    if layout is not None:
        settings = replace(settings, layout=layout)
    plan = load_study(study)
    start = public_start(site_dir)
    private = _private_settings(strategy, epsilon, delta, relation, sampling, rate, steps, begun=start is not None)
    dataset = open_for_training(data, plan.data, settings)
    voters = plan.privacy.voters_per_site
    ctx.with_resource(writing_teachers({site_dir} if config is None else {site_dir, config.books_dir}))
    tasks = plan_site(
        dataset,
        teachers=site_dir / "teachers",
        data=plan.data,
        recipe=plan.teacher,
        voters=voters,
        trainer=strategy,
        private=private,
        start=start,
        seed=seed,
        slots_file=None if config is None else slots_file(config),
        withdrawn=() if config is None else withdrawn(config.books_dir, scans_by_patient(dataset)),
    )
    patients = len({dataset.patient_of(case) for case in dataset.listed})
    warnings = {"releases": delta_warning(plan.privacy, patients=patients)}
    if private is not None:
        fewest = min(task.training_slots for task in tasks)
        warnings["training"] = warn_about(private.delta, unit=Unit.PATIENT, units=fewest)
    for what, warning in warnings.items():
        if warning is not None:
            typer.echo(f"warning, {what}: {warning}", err=True)
    record_trainings(site_dir, tasks, again=again, identity=dataset.patient_identity)
    try:
        with _progress(voters, plan.teacher.steps if private is None else private.steps) as on_progress:
            report = site_report(side_by_side(jobs or default_jobs(voters))(tasks, on_progress))
    except KeyboardInterrupt:
        typer.echo("interrupted: run the same command again to go on where it stopped", err=True)
        raise typer.Exit(130) from None
    record_trained(site_dir, tasks, report)
    cases = record_cases(site_dir / "teachers", dataset, report.problems)
    for pair in cases.doubled:
        typer.echo(f"warning: {pair.sentence}", err=True)
    if not report.crashes and not any(voter.weights for voter in report.voters):
        typer.echo("warning: no teacher has a usable case: this site will contribute zero codes", err=True)
    if as_json:
        facts = {
            "patients": cases.patients,
            "patient_identity": str(cases.patient_identity),
            "doubled": [asdict(pair) for pair in cases.doubled],
        }
        typer.echo(json.dumps({**report.to_json(), **facts}, allow_nan=False))
    else:
        typer.echo(_summary(report, plan.data.labels))
        typer.echo(f"{cases.patients} patients in {cases.listed} cases: {cases.patient_identity.sentence}")
    if report.crashes:
        raise DaemonFailed(
            f"{len(report.crashes)} of {voters} teachers did not come to an end; to fix: run the same command again"
        )


def _private_settings(
    strategy: str,
    epsilon: float | None,
    delta: float,
    relation: str,
    sampling: str,
    rate: str | None,
    steps: int | None,
    *,
    begun: bool,
) -> PrivateSettings | None:
    """The settings the options ask for, over the strategy's own recipe; None for a training without a guarantee."""
    from fractions import Fraction

    from client.training.private.settings import STRATEGIES, defaults
    from common.privacy.training import Neighbours, Sampling

    if strategy not in STRATEGIES:
        if epsilon is not None:
            raise InvalidInput("epsilon of a training", value=strategy, limit=", ".join(STRATEGIES))
        return None
    if epsilon is None:
        raise InvalidInput(f"strategy {strategy} without an epsilon", remedy="say what it may cost: --epsilon 8")
    try:
        chosen = {"neighbours": Neighbours(relation), "sampling": Sampling(sampling)}
        share = {} if rate is None else {"rate": Fraction(rate)}
    except (ValueError, ZeroDivisionError) as error:
        raise InvalidInput("relation, sampling or rate", value=(relation, sampling, rate), limit=str(error)) from error
    longer = {} if steps is None else {"steps": steps}
    return replace(defaults(strategy, epsilon=epsilon, delta=delta, begun=begun), **chosen, **share, **longer)  # type: ignore[arg-type]


@contextmanager
def _progress(voters: int, steps: int) -> Iterator[OnProgress]:
    """One bar over all voters' steps on stderr, with rate, loss and time left."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.progress import TimeRemainingColumn as TimeLeft
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if not task.speed else f"{task.speed:.1f} steps/s")

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Rate(),
        TextColumn("left"),
        TimeLeft(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("reading cases", total=voters * steps)
        done: dict[int, int] = {}

        def on_progress(voter: int, step: int, loss: float) -> None:
            done[voter] = step
            finished = sum(count == steps for count in done.values())
            note = "" if math.isnan(loss) else f", loss {loss:.3f}"
            bar.update(
                task, completed=sum(done.values()), description=f"teachers: {finished} of {voters} trained{note}"
            )

        yield on_progress


def _summary(report: SiteReport, labels: tuple[str, ...]) -> str:
    lines = []
    for voter in report.voters:
        if voter.weights is None:
            lines.append(
                f"teacher {voter.voter}: {voter.problem or 'no usable case'}; it will contribute the zero code"
            )
            continue
        dice = ", ".join(
            f"{name} {'-' if value is None else format(value, '.3f')}"
            for name, value in zip(labels[1:], voter.dice, strict=False)
        )
        checked = f"; Dice on {voter.held_out} held-out of its own: {dice}" if voter.dice else ""
        state = "kept from before" if voter.reused else f"{voter.steps} steps in {voter.seconds:.0f} s"
        lines.append(f"teacher {voter.voter}: {voter.trained_on} patients, {state}{checked}")
        lines += [f"  each of them: {guarantee}" for guarantee in voter.guarantees]
    lines += [f"teacher {crash.voter}: not trained: {crash.reason}" for crash in report.crashes]
    if report.problems:
        lines.append(f"{len(report.problems)} case(s) left out:")
        lines += [f"  {problem.case}: {problem.reason}" for problem in report.problems]
    return "\n".join(lines)
