"""Defines ``consilium plan``, which shows what a privacy budget buys, and the options shared with ``consilium audit``.

Tables and JSON go to stdout. Exit code 2: a setting is invalid. Options have no ranges of their own; the privacy code
refuses invalid values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.config import JOINT_ROUNDS, OPEN, SEALED_SUM, DataConfig, PrivacyConfig, load_study
from common.errors import InvalidInput
from common.privacy.mechanism import HONEST_SITES, AccountantName, Relation, Unit
from common.reading import parse_json, parsing
from common.wording import many
from consilium.cli.options import PLAIN, AsJson, file_to_write
from consilium.cli.say import console, json_text, say

if TYPE_CHECKING:
    from consilium.reports.plan_report import PlannedStudy
    from server.planning.planner import Plan
    from server.planning.recommend import Recommendation, Rehearsal


plan_app = typer.Typer(add_completion=False, rich_markup_mode=None)

StudyFile = Annotated[
    Path | None,
    typer.Option(
        "--study",
        help="Read the settings from this study file or directory; the options for them are then refused.",
    ),
]
Epsilon = Annotated[float | None, typer.Option(help="ε of the budget [8].")]
Delta = Annotated[float | None, typer.Option(help="δ of the budget [1e-3].")]
Gate = Annotated[
    AccountantName | None,
    typer.Option("--accountant", help="Accountant that decides whether a release fits the budget [exact]."),
]
UnitOption = Annotated[Unit | None, typer.Option("--unit", help="Whom the guarantee protects [hospital].")]
RelationOption = Annotated[Relation | None, typer.Option("--relation", help="Neighbouring relation [replace-one].")]
Voters = Annotated[int | None, typer.Option("--voters", help="Number m of teachers of each hospital [1].")]
Aggregation = Annotated[
    str | None,
    typer.Option("--aggregation", help="Who adds the noise: open, the server, or sealed-sum, the sites [open]."),
]
Colluders = Annotated[
    int | None,
    typer.Option("--colluders", help="In a sealed sum: number t of sites that may collude with the server [1]."),
]
SpareDraws = Annotated[
    int | None,
    typer.Option("--spare-draws", help="In a sealed sum: extra budget for repeating sums when a site drops out [0]."),
]
Radius = Annotated[float | None, typer.Option(help="Clipping norm C [1].")]


@plan_app.command("plan")
def plan_command(
    study: StudyFile = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    queries: Annotated[
        int | None, typer.Option(help="Number N of planned releases [those of the recommended study].")
    ] = None,
    hospitals: Annotated[
        int | None, typer.Option(help="Number K of hospitals that answer [the study's quorum, or 8].")
    ] = None,
    voters: Annotated[
        int | None,
        typer.Option(
            help="Number m of teachers of each hospital [as recommended; 1 with --queries, --dimension, --spectrum or "
            "--chart]."
        ),
    ] = None,
    radius: Radius = None,
    dimension: Annotated[int | None, typer.Option(help="Length l of a code [the spectrum's, or 128].")] = None,
    unit: UnitOption = None,
    relation: RelationOption = None,
    accountant: Gate = None,
    aggregation: Aggregation = None,
    colluders: Colluders = None,
    spare_draws: SpareDraws = None,
    patients: Annotated[
        int | None,
        typer.Option(
            help="Number of patients of a site; it limits the recommended number of voters [no limit].", **PLAIN
        ),
    ] = None,
    spectrum: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with a list of the code's public eigenvalues; the plan then states expected errors."
        ),
    ] = None,
    label_maps: Annotated[
        Path | None,
        typer.Option(
            help="Folder of public label maps; from them the plan estimates the student's gain by a joint query."
        ),
    ] = None,
    paired: Annotated[
        int | None,
        typer.Option(
            help="Number of public cases with labels that the study has [0]; with --study the number in the "
            "study file.",
            **PLAIN,
        ),
    ] = None,
    cases: Annotated[
        Path | None,
        typer.Option(
            help="Public cases with labels, in any layout. The command trains stand-in teachers on them for some "
            "minutes, to predict the gain. With --paired they are the study's own pairs; otherwise the study itself "
            "trains no network on them."
        ),
    ] = None,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Bundle or weights of a public network that the study begins from; with --cases the stand-ins do, too."
        ),
    ] = None,
    chart: Annotated[
        Path | None, typer.Option(help="Write a chart to this PNG, SVG or PDF file.", callback=file_to_write)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a privacy budget buys, before any of it is spent. Charges nothing.

    By default the plan describes the recommended study; with --study it describes the study in that file. If one of
    --queries, --dimension, --spectrum and --chart is given without --study, the plan describes a study with a separate
    query for each public volume; --queries is the number of queries (80 if it is not given).

    Example: consilium plan --epsilon 8 --delta 1e-3 --queries 80 --hospitals 8 --chart plan.png

    Example: consilium plan --study study.toml --hospitals 12 --json

    Example: consilium plan --hospitals 8 --aggregation sealed-sum --colluders 2 --spare-draws 4

    Example: consilium plan --unit patient --epsilon 8 --delta 1e-5 --hospitals 8 --patients 15
        --label-maps split/public/label-maps

    Example: consilium plan --unit patient --epsilon 8 --delta 1e-5 --hospitals 8 --patients 15
        --label-maps split/public/label-maps --cases split/validation
    """
    from consilium.cli.study_words import say_files
    from consilium.reports.plan_report import PlannedStudy, check_chart, write_chart
    from server.planning.planner import plan
    from server.planning.public_shapes import read_shapes
    from server.planning.recommend import NOT_REHEARSED, REHEARSED, check_voters, recommend, study_prospects

    flags = given(epsilon=epsilon, delta=delta, accountant=accountant, unit=unit, relation=relation, radius=radius)
    flags |= given(queries=queries, voters=voters)
    flags |= given(aggregation=aggregation, colluders=colluders, spare_draws=spare_draws)
    privacy, clip = settings_of(study, flags)
    if chart is not None:
        check_chart(chart)
    if start is not None and not start.exists():
        raise InvalidInput("--start", value=str(start), limit="an existing file or folder")
    sites = (privacy.quorum if study else 8) if hospitals is None else hospitals
    if privacy.sealed and 1 <= sites < privacy.colluders + HONEST_SITES:
        least, otherwise = privacy.colluders + HONEST_SITES, f", or choose --aggregation {OPEN} without --colluders"
        raise InvalidInput(
            "--hospitals",
            value=sites,
            limit=f"{least} or more in a sealed sum with {many(privacy.colluders, 'colluder')}",
            remedy=f"give --hospitals {least}{'' if study else otherwise}",
        )
    values = None if spectrum is None else _read_spectrum(spectrum, length=dimension)
    planned = partial(
        plan,
        budget=privacy.budget,
        accountant=privacy.accountant,
        protection=privacy.protection,
        hospitals=sites,
        radius=clip,
        dimension=len(values) if values is not None else 128 if dimension is None else dimension,
        spectrum=values,
        colluders=privacy.sealed_colluders,
        spare_draws=privacy.spare_draws,
    )
    check_voters(privacy.voters_per_site, patients=patients)
    result = planned(queries=privacy.planned_queries, voters_per_site=privacy.voters_per_site)
    terms = None if study is None else load_study(study)
    if cases is not None and label_maps is None:
        raise InvalidInput(
            "--cases",
            limit="only with --label-maps (of patients who are not among these cases), from which the control is made",
        )
    shapes = None
    if label_maps is not None:
        shapes = read_shapes(label_maps)
        say_files("public label maps", label_maps, err=True)
    if chart is not None:
        write_chart(result, chart)
    described = terms is not None or any(one is not None for one in (queries, dimension, spectrum, chart))
    advised = recommend(
        budget=result.budget,
        accountant=result.accountant,
        protection=result.protection,
        hospitals=result.hospitals,
        voters=None if described else voters,
        patients=patients,
        colluders=result.mechanism.colluders,
        shapes=shapes,
        paired=(paired or 0) if terms is None else terms.codec.paired,
    )
    if cases is not None and label_maps is not None:
        advised = replace(advised, rehearsal=_rehearsal(advised, cases, label_maps, patients=patients, start=start))
    begins = start is not None or (terms is not None and bool(terms.start.weights))
    remark = "" if not begins else REHEARSED if start is not None and cases is not None else NOT_REHEARSED
    if not described:  # one study in all rows: the recommended one
        result = planned(queries=JOINT_ROUNDS, voters_per_site=advised.voters)
    framed = not described or (terms is not None and terms.codec.terms.framed)
    about = PlannedStudy.RECOMMENDED if not described else PlannedStudy.FRAMED if framed else PlannedStudy.SEPARATE
    own = None if terms is None else study_prospects(terms, hospitals=result.hospitals)
    _print(result, advised, own, patients=patients, remark=remark, about=about, as_json=as_json)


def _rehearsal(
    advised: Recommendation, cases: Path, label_maps: Path, *, patients: int | None, start: Path | None
) -> Rehearsal:
    """Predict the gain by trying the recommended protocol on public cases, with stand-ins for the hospitals' teachers.

    Each stand-in is trained on as many cases as a voter has patients.
    """
    import numpy as np

    from client.data.layouts import open_dataset
    from common.data.grid import choose_both
    from common.data.volume import load_example
    from consilium.cli.study_words import say_left_out
    from server.planning.public_shapes import MOST_VOXELS, load_maps, map_files
    from server.planning.recommend import PATIENTS_A_TEACHER, training_for
    from server.protocols.rehearsal import PublicCases, rehearse

    dataset, files = open_dataset(cases), map_files(label_maps)
    say_left_out("public", dataset, err=True)
    data = DataConfig(
        dataset.labels, *choose_both(files, most=MOST_VOXELS), channels=dataset.channels, regions=dataset.regions
    )
    examples = [load_example(case, data) for case in dataset.labelled]
    images, labels = [each.volume.image for each in examples], [each.label for each in examples]
    mean_shape = None if advised.shapes is None else advised.shapes.mean_shape
    recipes, given = training_for(advised.protocol, mean_shape=mean_shape), None
    if start is not None:
        from server.study.start import read_given

        network = read_given(start, data)
        recipes = network.of_network(recipes[0]), network.of_network(recipes[1])
        given = network.model(recipes[1], data)
        if remark := network.remark(data):
            say(remark, err=True)
    return rehearse(
        PublicCases(np.stack(images), np.stack(labels), data),
        load_maps(files, data),
        protocol=advised.protocol,
        patients=PATIENTS_A_TEACHER if patients is None else max(1, patients // advised.voters),
        recipes=recipes,
        paired=advised.paired > 0,
        given=given,
        on_training=lambda what: say(f"rehearsal: {what}", err=True),
    )


def _print(
    result: Plan,
    advised: Recommendation,
    own: Recommendation | None,
    *,
    patients: int | None,
    remark: str,
    about: PlannedStudy,
    as_json: bool,
) -> None:
    from consilium.reports.plan_report import delta_warning, plan_table

    if as_json:
        recommended = {
            **asdict(advised),
            "recovered": advised.recovered,
            "gain": advised.gain,
            "recipe": advised.protocol,
            "gain_low": advised.low,
            "gain_high": advised.high,
            "objection": advised.objection,
            "worth_asking": advised.worth_asking,
            **({"given_network": remark} if remark else {}),
        }
        warning = delta_warning(result, patients=patients)
        facts = {**result.to_json(), "plan_of": str(about), "delta_warning": warning, "recommended": recommended}
        if own is not None:
            facts["study"] = {"gain": own.gain, "gain_low": own.low, "gain_high": own.high}
        say(json_text(facts))
    else:
        summary = f"{advised.summary}; {remark}" if remark else advised.summary
        study = "" if own is None else f"with {own.hospitals} hospitals: {own.summary}"
        console().print(plan_table(result, recommended=summary, about=about, patients=patients, study=study))


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given on the command line.

    Args:
        options: Values of the options; None for an option that was left out.

    Returns:
        The options that are not None.
    """
    return {name: value for name, value in options.items() if value is not None}


def settings_of(study: Path | None, flags: Mapping[str, Any]) -> tuple[PrivacyConfig, float]:
    """Return the privacy settings and the clipping norm C, either from the study file or from flags.

    Args:
        study: The study file; None to use the flags.
        flags: The flags that were given, by their names.

    Returns:
        The settings and C.

    Raises:
        InvalidInput: If both are given, or a setting is invalid.
    """
    if study is not None:
        if flags:
            extra = [f"--{name.replace('_', '-')}" for name in flags]
            raise InvalidInput(
                "options together with --study", value=extra, remedy="change the study file, or leave --study out"
            )
        loaded = load_study(study)
        return loaded.privacy, loaded.codec.radius
    terms = {"epsilon": 8.0, "delta": 1e-3, "aggregation": OPEN, "colluders": 1, "queries": 80, "voters": 1, **flags}
    if terms["colluders"] < 0:
        raise InvalidInput("--colluders", value=terms["colluders"], limit="an integer from 0")
    if terms["aggregation"] == OPEN and (sealed := [name for name in ("colluders", "spare_draws") if flags.get(name)]):
        spelled = " and ".join(f"--{name.replace('_', '-')}" for name in sealed)
        raise InvalidInput(
            spelled,
            limit=f"only with --aggregation {SEALED_SUM}",
            remedy=f"add --aggregation {SEALED_SUM}, or leave {spelled} out",
        )
    quorum = 1 if terms["aggregation"] == OPEN else terms["colluders"] + HONEST_SITES
    queries, voters, radius = terms.pop("queries"), terms.pop("voters"), terms.pop("radius", 1.0)
    return PrivacyConfig(**terms, planned_queries=queries, voters_per_site=voters, quorum=quorum), radius


def _read_spectrum(path: Path, *, length: int | None) -> list[float]:
    limit = "a readable JSON list of numbers"
    with parsing("spectrum file", value=str(path), limit=limit):
        values = parse_json(path.read_bytes(), what="spectrum file", value=str(path), limit=limit)
    if not isinstance(values, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise InvalidInput("content of the spectrum file", value=str(path), limit="a JSON list of numbers")
    if length not in (None, len(values)):
        raise InvalidInput(
            "length of a code",
            value=length,
            limit=f"{len(values)}, the number of values in the spectrum file",
            remedy="leave --dimension out",
        )
    with parsing("spectrum file", value=str(path), limit="numbers that a float can hold"):
        return [float(v) for v in values]
