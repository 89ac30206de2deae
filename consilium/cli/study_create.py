"""Defines ``consilium study init``, ``template`` and ``create``: create a study from options or from a study file."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    usual_aggregation,
)
from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Relation, Unit
from consilium.cli import options
from consilium.cli.say import say
from consilium.cli.study_words import say_files, say_outlook, say_rooms
from server.study.workspace import Workspace

if TYPE_CHECKING:
    from server.study.start import GivenStart

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
    given = _given(start, data)
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
    _create(directory, study, ledger=ledger, standing=standing, given=given)


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


def template(
    name: Annotated[str, typer.Argument(help="paper-ae or paper-pca: the PATE paper's experiment.")],
) -> None:
    """Print a study file to start from; edit it, then `consilium study create`.

    Example: consilium study template paper-ae > study.toml
    """
    from server.study import templates as studies

    say(studies.template(name), nl=False)


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
    given = _given(start, draft.study.data)
    made = draft.study
    if given is not None and not made.start.weights:
        made = replace(made, start=given.config)
    _create(directory, made, ledger=ledger, standing=standing, given=given)
    for sentence in draft.filled_in:
        say(sentence)


def _given(path: Path | None, data: DataConfig) -> GivenStart | None:
    """Read the network of ``--start``."""
    if path is None:
        return None
    from server.study.start import read_given  # torch

    return read_given(path, data)


def _create(
    directory: Path,
    study: Study,
    *,
    ledger: Path | None,
    standing: Path | None,
    given: GivenStart | None,
) -> None:
    """Create a study's directory; print its terms, the plan's verdict, and what the study costs each pool."""
    from server.study import consent_text as describe
    from server.study import create_study as setup

    weights = None if given is None else given.weights
    setup.create_study(Workspace(directory), study, ledger=ledger, standing=standing, start=weights)
    if given is not None and (remark := given.remark(study.data)):
        say(remark, err=True)
    say(describe.for_consortium(study, sites=study.privacy.quorum))
    neighbours = [path for path in setup.studies_beside(directory) if Workspace(path).ledger_file.exists()]
    if ledger is None and neighbours:
        say(f"this study has its own ledger; to count patients' budgets over both studies: --ledger {neighbours[0]}")
    say_outlook(study, hospitals=study.privacy.quorum)
    say(
        "to change the lifetime ε of one hospital's pool: `consilium provision approve --pool-epsilon`; to change that "
        "of all pools, make a new study in another directory with --pool-epsilon"
    )
    say_rooms(Workspace(directory), whole=True)
    say(f"created {directory}; next: `consilium study publish {shlex.quote(str(directory))} --images DIR`")
