"""``consilium study …``: define, publish, run and follow a study."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer

from common.config import DataConfig, PrivacyConfig, Study, load_study
from common.data.msd import nifti_files, read_dataset
from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Relation, Unit
from consilium.cli import options
from consilium.cli.site_peers import consent_to_peers
from server.study.workspace import Workspace

if TYPE_CHECKING:
    from server.study.status import StudyStatus

study_app = typer.Typer(no_args_is_help=True, add_completion=False, help="Define, publish, run and follow a study.")

SharedLedger = Annotated[
    Path | None,
    typer.Option(help="Another study's directory or its ledger.sqlite: share its ledger, so that pools have one sum."),
]
StandingFile = Annotated[
    Path | None, typer.Option(help="Keep the new ledger's standing in this file, best on another disk.")
]


@study_app.command("init")
def init(
    directory: options.StudyDir,
    name: Annotated[str, typer.Option(help="The study's name.")],
    labels: Annotated[str, typer.Option(help="Label names by value, separated by commas, background first.")],
    grid: Annotated[str, typer.Option(help="Grid in voxels, e.g. 32,48,32 (multiples of 8).")],
    queries: Annotated[int, typer.Option(help="Planned queries N: public volumes to be labelled, or rounds.")],
    quorum: Annotated[int, typer.Option(help="Fewest sites in a release.")],
    spacing: Annotated[str, typer.Option(help="Voxel spacing in mm.")] = "1,1,1",
    epsilon: options.Epsilon = 8.0,
    delta: options.Delta = 1e-5,
    accountant: options.Accountant = AccountantName.EXACT,
    unit: options.UnitOption = Unit.HOSPITAL,
    relation: options.RelationOption = Relation.REPLACE_ONE,
    voters: options.Voters = 1,
    aggregation: options.Aggregation = None,
    colluders: options.Colluders = 1,
    spare_draws: options.SpareDraws = 0,
    codec: options.Codec = "pca",
    joint: Annotated[
        bool,
        typer.Option(
            "--joint", help="Ask about all public volumes together, in --queries rounds (4 do well); codec pca."
        ),
    ] = False,
    protocol: Annotated[
        str,
        typer.Option(
            help="Another way to ask, by name: appearance, about what structures look like, in --queries rounds."
        ),
    ] = "",
    label_maps: Annotated[
        Path | None,
        typer.Option(
            help="Folder of public label maps: they say which of the two suits the task, in --queries rounds."
        ),
    ] = None,
    paired: Annotated[
        int, typer.Option(help="Public volumes with label maps that start, student and controls learn from (joint).")
    ] = 0,
    ledger: SharedLedger = None,
    standing: StandingFile = None,
) -> None:
    """Create a study's directory: study.toml, keys, and a ledger of its own or one shared with other studies.

    Example: consilium study init trial --name trial --labels background,lesion --grid 64,64,64 --queries 40 --quorum 5
    """
    from common.codecs.paper import codec_terms
    from common.data.grid import asked_at, patch_of
    from common.protocols.base import halves
    from common.study_mechanism import usual_aggregation
    from server.planning.recommend import training_for

    asked = _asked(joint=joint, protocol=protocol, label_maps=label_maps, paired=paired)
    teacher, student = training_for(asked)
    data = DataConfig(
        labels=tuple(labels.split(",")),
        spacing_mm=options.triple(spacing, float, what="--spacing"),
        grid=options.triple(grid, int, what="--grid"),
    )
    if asked == "joint":
        data = asked_at(data)
    study = Study(
        name=name,
        data=data,
        privacy=PrivacyConfig(
            epsilon=epsilon,
            delta=delta,
            planned_queries=queries,
            quorum=quorum,
            accountant=accountant,
            relation=relation,
            unit=unit,
            voters_per_site=voters,
            aggregation=aggregation or usual_aggregation(quorum),
            colluders=colluders,
            spare_draws=spare_draws,
        ),
        codec=replace(
            codec_terms(codec, labels=len(data.labels), grid=data.grid, protocol=asked),
            paired=paired,
        ),
        teacher=teacher,
        student=student if data.finer == 1 else replace(student, patch=patch_of(data.student.grid)),
    )
    halves(study)  # refuses a protocol that nobody registered
    _create(directory, study, ledger=ledger, standing=standing)


def _asked(*, joint: bool, protocol: str, label_maps: Path | None, paired: int) -> str:
    """The protocol's name, as said or as the planner chooses it by public label maps."""
    from server.planning.public_shapes import mean_shape_dice, read_maps
    from server.planning.recommend import protocol_for

    if sum(map(bool, (joint, protocol, label_maps))) > 1:
        raise InvalidInput("--joint, --protocol, --label-maps", limit="one of them: each says how to ask")
    if label_maps is None:
        return "joint" if joint else protocol or "per-volume"
    maps, count = read_maps(label_maps)
    found = mean_shape_dice(maps, labels=count)
    asked = protocol_for(found, paired=paired)
    typer.echo(f"asked by the protocol {asked}: these maps' mean shape has Dice {found:.2f}")
    return asked


@study_app.command("template")
def template(
    name: Annotated[str, typer.Argument(help="paper-ae or paper-pca: the PATE paper's experiment.")],
) -> None:
    """Print a study file to start from; edit it, then `consilium study create`.

    Example: consilium study template paper-ae > study.toml
    """
    from server.study import templates as studies

    typer.echo(studies.template(name), nl=False)


@study_app.command("create")
def create(
    directory: options.StudyDir,
    study: Annotated[Path, typer.Option(help="The study file: a template you edited, or one of your own.")],
    ledger: SharedLedger = None,
    standing: StandingFile = None,
) -> None:
    """Create a study's directory from a study file: study.toml, keys, and a ledger of its own or a shared one.

    Example: consilium study create trial --study study.toml
    """
    _create(directory, load_study(study), ledger=ledger, standing=standing)


@study_app.command("show")
def show(
    path: Annotated[Path, typer.Argument(help="A study file or a study's directory.")],
    for_site: Annotated[bool, typer.Option("--for-site", help="What a hospital reads before it consents.")] = False,
    patients: Annotated[
        int | None, typer.Option(help="With --for-site: your patients, to see whether δ is small enough for them.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a study's terms and plan; every ε with its accountant, δ, unit and relation.

    Example: consilium study show study.toml --for-site --patients 120
    """
    from server.study import consent_text as describe

    study = load_study(path / "study.toml" if path.is_dir() else path)
    sites = len(Workspace(path).registered()) if path.is_dir() and not for_site else 0
    if as_json:
        typer.echo(json.dumps(describe.facts(study, sites=sites), indent=1))
    elif for_site:
        typer.echo(describe.for_site(study, patients=patients))
        site = path if path.is_dir() else path.parent
        if study.privacy.sealed and (site / "site.toml").exists():
            typer.echo(consent_to_peers(site))
    else:
        typer.echo(describe.for_consortium(study, sites=max(sites, study.privacy.quorum)))


@study_app.command("publish")
def publish(
    directory: options.StudyDir,
    images: Annotated[
        Path | None, typer.Option(help="Folder of public volumes (.nii, .nii.gz), queried in order of name.")
    ] = None,
    paired: Annotated[
        Path | None, typer.Option(help="Dataset (MSD) of other public volumes with label maps, as many as promised.")
    ] = None,
    validation: Annotated[
        Path | None,
        typer.Option(help="Dataset (MSD) of labelled public cases to score student and controls on, at any time."),
    ] = None,
) -> None:
    """Publish the public volumes: they get content hashes, and the queries their order.

    Example: consilium study publish trial --images public/images --validation validation
    Example: consilium study publish trial --images public/images --paired public/paired
    """
    from server.study import create_study as setup

    if images is None and (validation is None or paired is not None):
        raise InvalidInput("--images is missing", limit="a folder of public volumes", remedy="--images public/images")
    labelled = None if validation is None else read_dataset(validation)  # before anything is written
    if images is not None:
        files = nifti_files(images, what="folder of public volumes")
        pairs = None if paired is None else read_dataset(paired)
        volumes = setup.publish_volumes(Workspace(directory), files, paired=pairs)
        with_maps = "" if pairs is None else f", and {len(pairs.labelled)} with their label maps"
        typer.echo(f"published {len(volumes)} volumes{with_maps}")
    if labelled is not None:
        cases = setup.publish_validation(Workspace(directory), labelled)
        typer.echo(
            f"student and controls will be scored on {cases} labelled cases (`consilium study run` ends with it)"
        )


@study_app.command("run")
def run(
    directory: options.StudyDir,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the run has begun; `study watch` follows it.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run the study over Flower until it is finished; an interrupted run is resumed by running again.

    The run goes on at the server when this command ends, and is submitted again should it die: `study watch` attaches
    again, `study stop` ends it.
    Example: consilium study run trial
    """
    from server.operations import supervisor

    workspace = Workspace(directory)
    if workspace.root.is_dir() and not as_json and not workspace.busy():
        sites = max(len(workspace.registered()), workspace.study().privacy.quorum)
        say_outlook(workspace.study(), hospitals=sites, dimension=workspace.codec().dimension)
    with _following(directory) as on_event:
        supervisor.detach(workspace)
        if not detach:
            supervisor.watch(workspace, on_event=on_event)
    if detach:
        typer.echo(_goes_on(directory))
        return
    _print_end(workspace, as_json=as_json)


@study_app.command("watch")
def watch(directory: options.StudyDir, as_json: options.AsJson = False) -> None:
    """Follow the run that goes on, from any terminal and at any time: stages, ETA, what sites decline. Changes nothing.

    Example: consilium study watch trial
    """
    from server.operations import supervisor

    with _following(directory) as on_event:
        supervisor.watch(Workspace(directory), on_event=on_event)
    _print_end(Workspace(directory), as_json=as_json)


@contextmanager
def _following(directory: Path) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Bars for a run's events; who is interrupted is told that the run is not."""
    from rich.console import Console

    from server.aggregation.progress import StudyProgress, stage_bars

    try:
        with stage_bars(Console(stderr=True)) as bars:
            yield StudyProgress(bars, overall=True).on_event
    except KeyboardInterrupt:
        typer.echo(_goes_on(directory), err=True)
        raise typer.Exit(130) from None


def _goes_on(directory: Path) -> str:
    return (
        f"the run goes on at the server; `consilium study watch {directory}` attaches again, "
        f"`consilium study stop {directory}` ends it"
    )


@study_app.command("resume")
def resume(directory: options.StudyDir, as_json: options.AsJson = False) -> None:
    """Go on where a run stopped or died; stored answers are read, never drawn or charged again.

    Example: consilium study resume trial
    """
    run(directory, as_json=as_json)


@study_app.command("stop")
def stop(
    directory: options.StudyDir,
    now: Annotated[bool, typer.Option("--now", help="End it at once instead of after the running batch.")] = False,
) -> None:
    """Ask a run to stop after its batch; what was answered stays answered.

    Example: consilium study stop trial
    """
    from server.operations.supervisor import request_stop

    request_stop(Workspace(directory), now=now)
    typer.echo("stop requested; `consilium study resume` goes on")


@study_app.command("status")
def status(
    directory: options.StudyDir,
    watching: Annotated[bool, typer.Option("--watch", help="Show it anew every two seconds, until Ctrl-C.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Where a study stands: stage, answers, what was spent, which site answered last.

    Example: consilium study status trial --json
    """
    from server.study.status import study_status

    workspace = Workspace(directory)
    while watching:
        text = "\n".join(study_status(workspace).lines())
        click.clear()
        typer.echo(text)
        time.sleep(2.0)
    _print_status(workspace, as_json=as_json)


def _print_status(workspace: Workspace, *, as_json: bool) -> StudyStatus:
    from server.study.status import study_status

    status = study_status(workspace)
    typer.echo(json.dumps(status.to_json(), indent=1) if as_json else "\n".join(status.lines()))
    return status


def _print_end(workspace: Workspace, *, as_json: bool) -> None:
    """Where the study stands now that its run has ended, and what its student is worth."""
    from server.dashboard.views.verdict import of_measured, read_measured

    warned = _print_status(workspace, as_json=as_json).warnings
    if as_json or not workspace.bundle_dir.exists():
        return
    found = read_measured(workspace.root, workspace.study().id)
    if found is None:
        typer.echo(
            "what the student is worth was not measured: there is no validation set; `consilium study publish "
            f"{workspace.root} --validation DIR`, then `consilium student export {workspace.root}`"
        )
        return
    worth = of_measured(found)
    typer.echo(f"Dice on the validation set: {found.line()}\n{worth.words}. {worth.basis}")
    if worth.learned and warned:
        typer.echo(
            "the warning above is of the answers alone, before a student was measured: its worth is what was measured; "
            "that all sites answered well is not"
        )


@study_app.command("archive")
def archive(
    directory: options.StudyDir,
    out: Annotated[Path, typer.Option(help="The new file, .tar.gz, readable by you alone.")],
) -> None:
    """Pack a study that ended into one file to keep: what verifies it and makes its results again, and no key.

    Deletes nothing. `consilium verify` and `consilium certificate` work on what is unpacked from it.
    Example: consilium study archive trial --out trial.tar.gz
    """
    from consilium.reports.publication import KEPT_OUT, archive_study

    made = archive_study(Workspace(directory), out)
    typer.echo(f"{made.path}: {made.files} files, SHA-256 {made.sha256}")
    typer.echo(f"left out: {', '.join(KEPT_OUT)}")
    typer.echo(
        "keep keys/ apart while the patients' pools may be asked again; then delete it together with flower/: who has "
        "both can open the codes that were sealed to it"
    )


def _create(directory: Path, study: Study, *, ledger: Path | None, standing: Path | None) -> None:
    from server.study import consent_text as describe
    from server.study import create_study as setup

    setup.create_study(Workspace(directory), study, ledger=ledger, standing=standing)
    typer.echo(describe.for_consortium(study, sites=study.privacy.quorum))
    neighbour = None if ledger else setup.neighbour_study(directory)
    if neighbour is not None:
        typer.echo(f"it has a ledger of its own; to count hospitals' patients over both studies: --ledger {neighbour}")
    say_outlook(study, hospitals=study.privacy.quorum)
    typer.echo(f"created {directory}; next: `consilium study publish {directory} --images DIR`")


def say_outlook(study: Study, *, hospitals: int, dimension: int | None = None) -> None:
    """What `consilium plan` says of this study: the verdict on what it asks, and what is recommended in its place.

    ``dimension``: of a code, once it is fitted; until then the most it may have.
    """
    from server.planning.planner import Outlook, plan
    from server.planning.recommend import recommend
    from server.protocols.base import protocol_of

    privacy = study.privacy
    terms: dict[str, Any] = {
        "budget": privacy.budget,
        "accountant": privacy.accountant,
        "protection": privacy.protection,
        "hospitals": hospitals,
        "colluders": privacy.sealed_colluders,
    }
    try:
        advised = recommend(**terms, paired=study.codec.paired)
        if study.codec.joint:
            typer.echo(f"plan: {advised.summary}")
            return
        if study.codec.in_proportion:
            typer.echo(
                f"plan: {protocol_of(study).wording(study).plan}, whose gain `consilium plan --label-maps` predicts"
            )
            return
        found = plan(
            **terms,
            queries=privacy.planned_queries,
            voters_per_site=privacy.voters_per_site,
            radius=study.codec.radius,
            dimension=dimension or study.codec.max_dimension,
            spare_draws=privacy.spare_draws,
        )
    except InvalidInput as error:  # said, and no reason to end: nothing hangs on it
        typer.echo(f"plan: {error}")
        return
    typer.echo(f"plan: {found.summary}")
    if found.verdict is not Outlook.INFORMATIVE:
        typer.echo(f"recommended in its place: {advised.summary} (`consilium plan --study` says more)")
