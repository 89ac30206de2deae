"""Defines ``consilium study …``: define, publish, run and follow a study."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from common.config import load_study
from common.data.msd import nifti_files, read_dataset
from common.errors import BudgetExceeded, ConsiliumError, InvalidInput
from common.plain import joined
from common.reading import naming_file
from common.wording import many
from consilium.cli import options
from consilium.cli.say import console, interruptible, json_text, say
from consilium.cli.site_peers import consent_to_peers
from consilium.cli.study_create import create, init, template
from consilium.cli.study_words import say_files, say_left_out, say_outlook
from server.study.workspace import Workspace

if TYPE_CHECKING:
    from server.study.status import StudyStatus

study_app = typer.Typer(no_args_is_help=True, add_completion=False)
study_app.command("init")(init)
study_app.command("template")(template)
study_app.command("create")(create)


class AnswersMissing(ConsiliumError):
    """A run has ended, and some planned queries of the study have no answer."""

    exit_code = BudgetExceeded.exit_code

    def __init__(self, standing: StudyStatus) -> None:
        facts = standing.facts
        super().__init__(
            f"the study ended with {facts.answers} of {facts.planned} answers ({standing.state}); to fix: see the "
            "reasons above; `consilium study resume` continues as long as the budget lasts"
        )


@study_app.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="A study file or a study's directory.")],
    for_site: Annotated[
        bool, typer.Option("--for-site", help="Show the consent sheet that a hospital reads before it consents.")
    ] = False,
    patients: Annotated[
        int | None,
        typer.Option(help="With --for-site: number of your patients, to check whether δ is small enough for them."),
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a study's terms and plan. Every ε is shown with its accountant, δ, unit and relation.

    Example: consilium study show study.toml --for-site --patients 120
    """
    from server.study import consent_text as describe
    from server.study.read_facts import facts_of

    study = load_study(path)
    sites = Workspace(path).admitted_count() if path.is_dir() and not for_site else 0
    spending = facts_of(Workspace(path)).spending if path.is_dir() else None
    if as_json:
        say(json_text(describe.facts(study, sites=sites, spending=spending)))
    elif for_site:
        counted = "not counted here; give --patients, or read the sheet by `consilium site consent`"
        stated = counted if patients is None else "as you state with --patients"
        say(describe.consent_sheet(study, patients=patients, counted=stated, spending=spending))
        if study.privacy.sealed and ((site := path if path.is_dir() else path.parent) / "site.toml").exists():
            say(consent_to_peers(site))
    else:
        say(describe.for_consortium(study, sites=max(sites, study.privacy.quorum), spending=spending))


@study_app.command("publish")
def publish(
    directory: options.StudyDir,
    images: Annotated[
        Path | None, typer.Option(help="Folder of public volumes (.nii, .nii.gz), queried in order of name.")
    ] = None,
    paired: Annotated[
        Path | None,
        typer.Option(help="Dataset (MSD) of further public volumes with label maps, as many as the study plans."),
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(
            help="Dataset (MSD) of labelled public cases for scoring student and controls; may be given at any time."
        ),
    ] = None,
    add: Annotated[
        bool,
        typer.Option("--add", help="Add volumes, up to the planned number of queries; stored answers are kept."),
    ] = False,
) -> None:
    """Publish the public volumes. This fixes their content hashes and the order of the queries.

    Example: consilium study publish trial --images public/images --validation validation
    Example: consilium study publish trial --images public/images --paired public/paired
    """
    from server.study import create_study as setup

    if add and (images is None or paired is not None):
        raise InvalidInput("--add", limit="together with --images, and without --paired")
    if images is None and (validation is None or paired is not None):
        raise InvalidInput("--images is missing", limit="a folder of public volumes", remedy="give --images FOLDER")
    labelled = None if validation is None else read_dataset(validation)  # read before anything is written
    if labelled is not None:
        say_left_out("validation", labelled)
    if images is not None:
        files = nifti_files(images, what="folder of public volumes")
        say_files("public volumes", images)
        pairs = None if paired is None else read_dataset(paired)
        if pairs is not None:
            say_left_out("paired", pairs)
        volumes = (
            setup.add_volumes(Workspace(directory), files, validation=labelled)
            if add
            else setup.publish_volumes(Workspace(directory), files, paired=pairs, validation=labelled)
        )
        with_maps = "" if pairs is None else f", and {len(pairs.labelled)} with their label maps"
        say(f"published {many(len(volumes), 'volume')}{with_maps}")
    elif labelled is not None:
        setup.publish_validation(Workspace(directory), labelled)
    if labelled is not None:
        cases = len(labelled.labelled)
        say(f"student and controls will be scored on {cases} labelled cases (`consilium study run` ends with it)")


DespiteSpoiled = Annotated[
    bool,
    typer.Option(
        "--despite-spoiled",
        help="In a sealed sum: continue after a spoiled draw (attempt at the sum), although a site may spoil the next.",
    ),
]


Detach = Annotated[bool, typer.Option("--detach", help="Return once the run has begun; `study watch` follows it.")]


@study_app.command("run")
def run(
    directory: options.StudyDir,
    despite_spoiled: DespiteSpoiled = False,
    detach: Detach = False,
    yes: Annotated[bool, typer.Option("--yes", help="Spend the budget even if the plan advises against it.")] = False,
    metrics: options.Metrics = None,
    as_json: options.AsJson = False,
) -> None:
    """Run the study over Flower until it is finished. If the run is interrupted, run the command again.

    The run continues at the server when this command ends, and is restarted if it dies. `study watch` follows it again,
    `study stop` ends it. In a sealed study the first spoiled draw (attempt at a sum) ends the run, until
    --despite-spoiled is given. If the plan advises against spending the budget, the command asks first at a terminal.
    Exit code 3: the run ended without all its answers. 4, 6: see the error.
    Example: consilium study run trial
    """
    from server.operations import supervisor
    from server.study.read_facts import facts_of
    from server.study.status import study_status

    workspace = Workspace(directory)
    if detach and metrics is not None:
        raise InvalidInput(
            "--metrics with --detach",
            limit="only one of the two",
            remedy="once it runs, use `consilium study watch --metrics`",
        )
    if workspace.root.is_dir() and not workspace.busy():
        _ask_about_spoiled(workspace, go_on=despite_spoiled)
    if workspace.root.is_dir() and not as_json and not workspace.busy():
        sites = max(workspace.admitted_count(), workspace.study().privacy.quorum)
        expected = say_outlook(workspace.study(), hospitals=sites, workspace=workspace)
        if not expected and not facts_of(workspace).answers:
            ask_to_spend(go_on=yes)
    complete = detach and workspace.root.is_dir() and study_status(workspace).state == "complete"
    with _following(directory, metrics) as on_event:
        supervisor.detach(workspace)
        if not detach:
            supervisor.watch(workspace, on_event=on_event)
    if detach:
        _print_detached(workspace, complete=complete, as_json=as_json)
    else:
        _print_end(workspace, as_json=as_json)


@study_app.command("evaluate")
def evaluate(
    directory: options.StudyDir,
    files: Annotated[list[Path] | None, typer.Argument(help="Scores that hospitals sent, one file each.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Read hospitals' signed scores of the student, and print their mean with its interval, and the worst one.

    A hospital makes them with `site evaluate --figures` and sends them if it consents; hospitals without scores are
    named. The scores appear in the model card of `student publish`.
    Example: consilium study evaluate trial north-figures.json south-figures.json
    """
    from server.aggregation.pipeline import locked_events
    from server.study.evaluated import evaluated, take_figures

    if files:
        with locked_events(Workspace(directory)) as (workspace, _):
            for path in files:
                with naming_file(path, remedy="give the file that the hospital wrote with `site evaluate --figures`"):
                    take_figures(workspace, options.read_file(path))
    found = evaluated(Workspace(directory))
    say(json_text(found.to_json()) if as_json else "\n".join(found.lines))


@study_app.command("watch")
def watch(directory: options.StudyDir, metrics: options.Metrics = None, as_json: options.AsJson = False) -> None:
    """Follow the current run from any terminal: stages, time left, declined offers. Changes nothing.

    Example: consilium study watch trial
    Example: consilium study watch trial --metrics tensorboard:runs
    """
    from server.operations import supervisor

    with _following(directory, metrics) as on_event:
        supervisor.watch(Workspace(directory), on_event=on_event)
    _print_end(Workspace(directory), as_json=as_json)


@contextmanager
def _following(directory: Path, metrics: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show progress bars for a run's events, and write curves if asked; after Ctrl-C, print that the run continues."""

    from common.curves import curves_of
    from server.aggregation.progress import StudyProgress, stage_bars
    from server.study.study_curves import StudyCurves

    with (
        interruptible(_goes_on(directory)),
        curves_of(metrics, StudyCurves, run=lambda: Workspace(directory).study().name) as curves,
        stage_bars(console(stderr=True)) as bars,
    ):
        progress = StudyProgress(bars, overall=True)

        def on_event(event: dict[str, Any]) -> None:
            progress.on_event(event)
            if curves is not None:
                curves.on_event(event)

        yield on_event


@study_app.command("resume")
def resume(
    directory: options.StudyDir,
    despite_spoiled: DespiteSpoiled = False,
    detach: Detach = False,
    metrics: options.Metrics = None,
    as_json: options.AsJson = False,
) -> None:
    """Resume a run that stopped or died. Stored answers are used again; no noise is drawn again, nothing charged again.

    Example: consilium study resume trial
    """
    run(directory, despite_spoiled=despite_spoiled, detach=detach, metrics=metrics, as_json=as_json)


@study_app.command("stop")
def stop(
    directory: options.StudyDir,
    now: Annotated[bool, typer.Option("--now", help="End the run at once instead of after the current batch.")] = False,
) -> None:
    """Stop a run after its current batch. Stored answers are kept.

    Example: consilium study stop trial
    """
    from server.operations.supervisor import request_stop

    request_stop(Workspace(directory), now=now)
    say("stop requested; `consilium study resume` goes on")


@study_app.command("status")
def status(
    directory: options.StudyDir,
    watching: Annotated[
        bool, typer.Option("--watch", help="Refresh the display every two seconds, until Ctrl-C.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Show a study's state: stage, answers, spent budget, and which site answered last.

    Example: consilium study status trial --json
    """
    from server.study.status import study_status

    if watching and as_json:
        raise InvalidInput("--watch with --json", limit="only one of the two", remedy="repeat it with --json")
    workspace = Workspace(directory)
    while watching:
        text = joined(study_status(workspace).lines())
        click.clear()
        say(text)
        time.sleep(2.0)
    _print_status(workspace, as_json=as_json)


@study_app.command("archive")
def archive(
    directory: options.StudyDir,
    out: options.ArchiveFile,
) -> None:
    """Pack a finished study into one .tar.gz file with all that verifies it and reproduces its results, without keys.

    Deletes nothing. `consilium verify` and `consilium certificate` work on the unpacked archive.
    Example: consilium study archive trial --out trial.tar.gz
    """
    from consilium.reports.publication import archive_study

    made = archive_study(Workspace(directory), out)
    say(f"{made.path}: {made.files} files, SHA-256 {made.sha256}")
    say(f"left out: {', '.join(made.left_out)}")
    say(
        "keep keys/ elsewhere as long as the patients' pools may be asked again; then delete it together with flower/, "
        "because both together allow anybody to decrypt the hospitals' codes"
    )


def _ask_about_spoiled(workspace: Workspace, *, go_on: bool) -> None:
    """Refuse to start a run after a spoiled draw until somebody decides to continue; ``go_on`` records the decision."""
    from server.ledger.server_ledger import Ledger
    from server.study.spoiled import accept_spoiled, check_answered

    if not workspace.study().privacy.sealed:
        return
    if go_on:
        accept_spoiled(workspace)
    with Ledger.open(workspace.ledger_file) as ledger:
        check_answered(workspace, ledger, workspace.study())


def ask_to_spend(*, go_on: bool) -> None:
    """Ask at a terminal whether to spend a budget although the plan advises against it. Without a terminal only warn.

    Args:
        go_on: True to spend it without asking.

    Raises:
        InvalidInput: If the answer is no.
    """
    doubt = "the plan above advises against spending this budget, and a spent budget cannot be restored"
    if not go_on and sys.stdin.isatty():
        if not typer.confirm(f"{doubt}; spend it"):
            raise InvalidInput(
                "spending the budget was not confirmed",
                limit="the answer y",
                remedy="plan another study with `consilium plan --study`, or run this one with --yes",
            )
    elif not go_on:
        say(f"warning: {doubt}", err=True)


def _print_status(workspace: Workspace, *, as_json: bool) -> StudyStatus:
    """Print a study's state, and return it."""
    from server.study.status import study_status

    status = study_status(workspace)
    say(json_text(status.to_json()) if as_json else joined(status.lines()))
    return status


def _goes_on(directory: Path) -> str:
    """Say that a detached run goes on, and how to watch or stop it."""
    study = shlex.quote(str(directory))
    return (
        f"the run goes on at the server; `consilium study watch {study}` attaches again, "
        f"`consilium study stop {study}` ends it"
    )


def _print_detached(workspace: Workspace, *, complete: bool, as_json: bool) -> None:
    """Print that a detached run goes on, or that there was nothing to run; as JSON, print the study's state."""
    named = shlex.quote(str(workspace.root))
    done = f"the study is complete, so no query is asked; `consilium study status {named}` shows it"
    say(done if complete else _goes_on(workspace.root), err=as_json)
    if as_json:
        _print_status(workspace, as_json=True)


def _print_end(workspace: Workspace, *, as_json: bool) -> None:
    """Print the study's state after its run ended, and its student's gain over the controls.

    Raises AnswersMissing if the run ended by itself and planned queries have no answer.
    """
    standing = _print_status(workspace, as_json=as_json)
    if not as_json and workspace.bundle_dir.exists():
        _print_worth(workspace, warned=bool(standing.warnings))
    if standing.facts.unanswered and not standing.running and not workspace.stop_file.exists():
        raise AnswersMissing(standing)


def _print_worth(workspace: Workspace, *, warned: bool) -> None:
    from common.measured_gain import ONE_RUN, GainVerdict
    from server.study.read_facts import read_measured

    found = read_measured(workspace.root, workspace.study().id)
    if found is None:
        root = shlex.quote(str(workspace.root))
        say(
            "the student's gain was not measured, because there is no validation set; to measure it: `consilium study "
            f"publish {root} --validation DIR`, then `consilium student export {root}`"
        )
        return
    say(f"Dice on the validation set: {found.line()}\n{ONE_RUN}")
    if found.measured_gain.word is GainVerdict.PROVEN and warned:
        say(
            "the warning above is about the answers alone. The student was measured afterwards; the measurement does "
            "not show that all sites answered honestly"
        )
