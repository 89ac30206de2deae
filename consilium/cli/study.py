"""Defines ``consilium study …``: define, publish, run and follow a study."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import click
import typer

from common.config import (
    SEALED_SUM,
    CodecConfig,
    DataConfig,
    GateConfig,
    PoolConfig,
    PrivacyConfig,
    StartConfig,
    Study,
    load_study,
    usual_aggregation,
)
from common.data.msd import nifti_files, read_dataset
from common.errors import InvalidInput
from common.plain import joined
from common.privacy.mechanism import AccountantName, Relation, Unit
from consilium.cli import options
from consilium.cli.say import console, interruptible, json_text, say
from consilium.cli.site_peers import consent_to_peers
from consilium.cli.study_evaluate import evaluate
from consilium.cli.study_words import (
    ask_about_spoiled,
    ask_to_spend,
    create_and_say,
    given_network,
    goes_on,
    print_detached,
    print_end,
    print_status,
    say_files,
    say_left_out,
    say_outlook,
)
from server.study.workspace import Workspace

study_app = typer.Typer(no_args_is_help=True, add_completion=False)

SharedLedger = Annotated[
    Path | None,
    typer.Option(
        help="Another study's directory or its ledger.sqlite. The new study shares this ledger, so that a patient "
        "pool's budget is counted over both."
    ),
]
StandingFile = Annotated[
    Path | None,
    typer.Option(
        help="Place of the new ledger's standing file, which reveals that a ledger is an older copy. Best on another "
        "disk; by default beside the ledger."
    ),
]
StartNetwork = Annotated[
    Path | None,
    typer.Option(
        help="MONAI bundle or file of weights: a public network, or an earlier study's student. Teachers, student and "
        "controls begin from these weights. The network as it is becomes a further control."
    ),
]


@study_app.command("init")
def init(
    directory: options.StudyDir,
    name: Annotated[str, typer.Option(help="The study's name.")],
    labels: Annotated[str, typer.Option(help="Names of the labels 0, 1, …, separated by commas, background first.")],
    grid: Annotated[str, typer.Option(help="Grid in voxels, e.g. 32,48,32 (multiples of 8).")],
    queries: Annotated[int, typer.Option(help="Queries N: one per public volume, or one per round about all volumes.")],
    quorum: Annotated[int, typer.Option(help="Smallest number of sites in a release.")],
    spacing: Annotated[str, typer.Option(help="Voxel spacing in mm on three axes.")] = "1,1,1",
    epsilon: options.Epsilon = 8.0,
    delta: options.Delta = 1e-5,
    accountant: options.Accountant = AccountantName.EXACT,
    unit: options.UnitOption = Unit.HOSPITAL,
    relation: options.RelationOption = Relation.REPLACE_ONE,
    voters: options.Voters = 1,
    aggregation: options.Aggregation = None,
    colluders: options.Colluders = 1,
    spare_draws: options.SpareDraws = 0,
    verdicts: options.Verdicts = None,
    codec: options.Codec = "pca",
    joint: Annotated[
        bool,
        typer.Option(
            "--joint",
            help="Ask about all public volumes together, in --queries rounds (4 suffice); needs the codec pca.",
        ),
    ] = False,
    protocol: Annotated[
        str,
        typer.Option(
            help="Name of the query protocol. appearance asks which grey values structures have, in --queries rounds."
        ),
    ] = "",
    label_maps: Annotated[
        Path | None,
        typer.Option(help="Folder of public label maps; the planner uses them to choose joint or appearance."),
    ] = None,
    paired: Annotated[
        int,
        typer.Option(
            help="Number of public volumes with label maps; start, student and controls learn from them (joint only)."
        ),
    ] = 0,
    pool_epsilon: Annotated[
        float | None,
        typer.Option(help="ε that new pools may ever spend in all studies; by default enough for two such studies."),
    ] = None,
    ledger: SharedLedger = None,
    standing: StandingFile = None,
    start: StartNetwork = None,
) -> None:
    """Create a study's directory: study.toml, keys, and a ledger of its own or one shared with other studies.

    Example: consilium study init trial --name trial --labels none,lesion --grid 64,64,64 --joint --queries 4 --quorum 5
    """
    from common.codecs.paper import codec_terms
    from common.data.grid import PATCH, asked_at
    from common.protocol_terms import terms_of
    from common.study_mechanism import usual_pool_epsilon, usual_verdicts
    from server.planning.recommend import training_for

    asked, mean_shape = _asked(joint=joint, protocol=protocol, label_maps=label_maps, paired=paired)
    teacher, student = training_for(asked, mean_shape=mean_shape)
    mode = aggregation or usual_aggregation(quorum)
    wanted = usual_verdicts(quorum, sealed=mode == SEALED_SUM) if verdicts is None else verdicts
    data = DataConfig(
        labels=tuple(labels.split(",")),
        spacing_mm=options.triple(spacing, float, what="--spacing"),
        grid=options.triple(grid, int, what="--grid"),
    )
    if terms_of(asked).finer:
        data = asked_at(data)
    given = given_network(start, data)
    if given is not None:
        teacher, student = given.of_network(teacher), given.of_network(student)
    privacy = PrivacyConfig(
        epsilon=epsilon,
        delta=delta,
        planned_queries=queries,
        quorum=quorum,
        accountant=accountant,
        relation=relation,
        unit=unit,
        voters_per_site=voters,
        aggregation=mode,
        colluders=colluders,
        spare_draws=spare_draws,
    )
    study = Study(
        name=name,
        data=data,
        privacy=privacy,
        codec=replace(
            codec_terms(codec, labels=len(data.labels), grid=data.grid, protocol=asked),
            paired=paired,
        ),
        teacher=teacher,
        gate=GateConfig(wanted),
        pool=PoolConfig(usual_pool_epsilon(accountant, privacy.budget) if pool_epsilon is None else pool_epsilon),
        student=student if data.finer == 1 else replace(student, patch=tuple(min(PATCH, n) for n in data.student.grid)),
        start=StartConfig() if given is None else given.config,
    )
    create_and_say(directory, study, ledger=ledger, standing=standing, given=given)


def _asked(*, joint: bool, protocol: str, label_maps: Path | None, paired: int) -> tuple[str, float | None]:
    """Return the name of the query protocol, and the Dice of the public label maps' mean shape (None without maps).

    The protocol is the one that was asked for or, with label maps, the planner's choice.
    """
    from server.planning.public_shapes import mean_shape_dice, read_maps
    from server.planning.recommend import protocol_for

    if sum(map(bool, (joint, protocol, label_maps))) > 1:
        raise InvalidInput(
            "--joint, --protocol, --label-maps", limit="only one of the three, because each chooses the query protocol"
        )
    if label_maps is None:
        return CodecConfig(joint=joint, protocol=protocol).protocol_name, None
    maps, count = read_maps(label_maps)
    say_files("public label maps", label_maps)
    found = mean_shape_dice(maps, labels=count)
    asked = protocol_for(found, paired=paired)
    say(f"the study asks by the protocol {asked}, because these maps' mean shape has Dice {found:.2f}")
    return asked, found


@study_app.command("template")
def template(
    name: Annotated[str, typer.Argument(help="paper-ae or paper-pca: the PATE paper's experiment.")],
) -> None:
    """Print a study file to start from; edit it, then `consilium study create`.

    Example: consilium study template paper-ae > study.toml
    """
    from server.study import templates as studies

    say(studies.template(name), nl=False)


@study_app.command("create")
def create(
    directory: options.StudyDir,
    study: Annotated[
        Path | None, typer.Option(help="The study file: a template you edited, or one of your own.")
    ] = None,
    template: Annotated[str, typer.Option(help="An unchanged template: paper-ae or paper-pca.")] = "",
    ledger: SharedLedger = None,
    standing: StandingFile = None,
    start: StartNetwork = None,
) -> None:
    """Create a study's directory from a study file: study.toml, keys, and a ledger of its own or a shared one.

    Settings that the file leaves out get the defaults of `study init`. With a quorum of 3 or more these are a sealed
    sum, and a gate: hospitals' verdicts decide whether the student is released.
    Example: consilium study create trial --study study.toml
    Example: consilium study create trial --template paper-ae
    """
    from common.reading import MAX_TOML_BYTES, read_text
    from server.study import templates as studies
    from server.study.draft import parse_draft

    if (study is None) == (not template):
        raise InvalidInput("file of the new study", limit="either --study or --template", remedy="give --study FILE")
    if study is None:
        text = studies.template(template)
    else:
        text = read_text(study, what="study file", most_bytes=MAX_TOML_BYTES, remedy="give TOML in UTF-8")
    draft = parse_draft(text)
    given = given_network(start, draft.study.data)
    made = draft.study
    if given is not None and not made.start.weights:
        made = replace(made, start=given.config)
    create_and_say(directory, made, ledger=ledger, standing=standing, given=given)
    for sentence in draft.filled_in:
        say(sentence)


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
            setup.add_volumes(Workspace(directory), files)
            if add
            else setup.publish_volumes(Workspace(directory), files, paired=pairs)
        )
        with_maps = "" if pairs is None else f", and {len(pairs.labelled)} with their label maps"
        say(f"published {len(volumes)} volumes{with_maps}")
    if labelled is not None:
        cases = setup.publish_validation(Workspace(directory), labelled)
        say(f"student and controls will be scored on {cases} labelled cases (`consilium study run` ends with it)")


DespiteSpoiled = Annotated[
    bool,
    typer.Option(
        "--despite-spoiled",
        help="In a sealed sum: continue after a spoiled draw (attempt at the sum), although a site may spoil others.",
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
        ask_about_spoiled(workspace, go_on=despite_spoiled)
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
        print_detached(workspace, complete=complete, as_json=as_json)
    else:
        print_end(workspace, as_json=as_json)


study_app.command("evaluate")(evaluate)


@study_app.command("watch")
def watch(directory: options.StudyDir, metrics: options.Metrics = None, as_json: options.AsJson = False) -> None:
    """Follow the current run from any terminal: stages, time left, declined offers. Changes nothing.

    Example: consilium study watch trial
    Example: consilium study watch trial --metrics tensorboard:runs
    """
    from server.operations import supervisor

    with _following(directory, metrics) as on_event:
        supervisor.watch(Workspace(directory), on_event=on_event)
    print_end(Workspace(directory), as_json=as_json)


@contextmanager
def _following(directory: Path, metrics: str | None) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show progress bars for a run's events, and write curves if asked; after Ctrl-C, print that the run continues."""

    from server.aggregation.progress import StudyProgress, stage_bars
    from server.study.study_curves import curves_of

    with (
        interruptible(goes_on(directory)),
        curves_of(Workspace(directory), metrics) as curves,
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
    print_status(workspace, as_json=as_json)


@study_app.command("archive")
def archive(
    directory: options.StudyDir,
    out: options.ArchiveFile,
) -> None:
    """Pack a finished study into one file with everything that verifies it and reproduces its results, without keys.

    Deletes nothing. `consilium verify` and `consilium certificate` work on the unpacked archive.
    Example: consilium study archive trial --out trial.tar.gz
    """
    from consilium.reports.publication import KEPT_OUT, archive_study

    made = archive_study(Workspace(directory), out)
    say(f"{made.path}: {made.files} files, SHA-256 {made.sha256}")
    say(f"left out: {', '.join(KEPT_OUT)}")
    say(
        "keep keys/ elsewhere as long as the patients' pools may be asked again; then delete it together with flower/, "
        "because both together allow anybody to decrypt the hospitals' codes"
    )
