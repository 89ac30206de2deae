"""``consilium plan``: what a budget buys, and the settings that ``consilium audit`` shares with it.

Tables and JSON go to stdout. Ends with exit code 2 and one line when a setting makes no sense. No option has a range of
its own: the privacy core refuses.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from common.config import PrivacyConfig, load_study
from common.errors import InvalidInput
from common.privacy.mechanism import AccountantName, Budget, Protection, Relation, Unit
from consilium.reports.plan_report import check_chart, delta_warning, plan_table, write_chart
from server.planning.planner import plan
from server.planning.recommend import recommend

plan_app = typer.Typer(add_completion=False, rich_markup_mode=None)

StudyFile = Annotated[
    Path | None,
    typer.Option("--study", help="Read the settings from this study file; the flags below are then refused."),
]
Epsilon = Annotated[float | None, typer.Option(help="ε of the budget [8].")]
Delta = Annotated[float | None, typer.Option(help="δ of the budget [1e-3].")]
Gate = Annotated[AccountantName | None, typer.Option("--accountant", help="The accountant that gates [exact].")]
UnitOption = Annotated[Unit | None, typer.Option("--unit", help="Whom the guarantee hides [hospital].")]
RelationOption = Annotated[Relation | None, typer.Option("--relation", help="Neighbouring relation [replace-one].")]
Voters = Annotated[int | None, typer.Option("--voters", help="Teachers a hospital, m [1].")]
Radius = Annotated[float | None, typer.Option(help="Clipping norm C [1].")]
_PLAIN: Any = {"show_default": False}  # the help text says it, in the same words as for the others
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


@plan_app.command("plan")
def plan_command(
    study: StudyFile = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    queries: Annotated[int | None, typer.Option(help="Releases planned, N [80].")] = None,
    hospitals: Annotated[int | None, typer.Option(help="Hospitals answering, K [the study's quorum, or 8].")] = None,
    voters: Voters = None,
    radius: Radius = None,
    dimension: Annotated[int | None, typer.Option(help="Length of a code, l [the spectrum's, or 128].")] = None,
    unit: UnitOption = None,
    relation: RelationOption = None,
    accountant: Gate = None,
    patients: Annotated[
        int | None, typer.Option(help="Patients of a site, for the recommended voters [many].", **_PLAIN)
    ] = None,
    spectrum: Annotated[
        Path | None, typer.Option(help="JSON list of the code's public eigenvalues; adds the expected errors.")
    ] = None,
    chart: Annotated[Path | None, typer.Option(help="Write a chart to this PNG, SVG or PDF file.")] = None,
    as_json: Json = False,
) -> None:
    """Say what a privacy budget buys before any of it is spent; charges nothing.

    Example: consilium plan --epsilon 8 --delta 1e-3 --queries 80 --hospitals 8 --chart plan.png

    Example: consilium plan --study study.toml --hospitals 12 --json

    Example: consilium plan --unit patient --epsilon 8 --delta 1e-5 --queries 1 --hospitals 8 --patients 15
    """
    privacy, clip = settings_of(study, epsilon, delta, queries, voters, radius, unit, relation, accountant)
    values = None if spectrum is None else _read_spectrum(spectrum)
    if values is not None and dimension not in (None, len(values)):
        raise InvalidInput(
            "length of a code", value=dimension, limit=f"{len(values)}, as in the spectrum file, or leave it out"
        )
    if chart is not None:
        check_chart(chart)
    result = plan(
        budget=privacy.budget,
        accountant=privacy.accountant,
        protection=privacy.protection,
        queries=privacy.planned_queries,
        hospitals=(privacy.quorum if study else 8) if hospitals is None else hospitals,
        voters_per_site=privacy.voters_per_site,
        radius=clip,
        dimension=len(values) if values is not None else 128 if dimension is None else dimension,
        spectrum=values,
    )
    advised = recommend(
        budget=privacy.budget,
        accountant=privacy.accountant,
        protection=privacy.protection,
        hospitals=result.hospitals,
        patients=patients,
    )
    if chart is not None:
        write_chart(result, chart)
    if as_json:
        recommended = {**asdict(advised), "recipe": "joint", "worth_asking": advised.worth_asking}
        warning = delta_warning(result, patients=patients)
        facts = {**result.to_json(), "delta_warning": warning, "recommended": recommended}
        typer.echo(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        Console().print(plan_table(result, recommended=advised.summary, patients=patients))


def settings_of(
    study: Path | None,
    epsilon: float | None,
    delta: float | None,
    queries: int | None,
    voters: int | None,
    radius: float | None,
    unit: Unit | None,
    relation: Relation | None,
    accountant: AccountantName | None,
) -> tuple[PrivacyConfig, float]:
    """The privacy settings and C, from the study file or from flags, never from a mixture."""
    given = {
        "--epsilon": epsilon,
        "--delta": delta,
        "--queries": queries,
        "--voters": voters,
        "--radius": radius,
        "--unit": unit,
        "--relation": relation,
        "--accountant": accountant,
    }
    if study is not None:
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise InvalidInput(
                "flags beside --study", value=extra, remedy="change the study file, or leave --study out"
            )
        loaded = load_study(study)
        return loaded.privacy, loaded.codec.radius
    budget = Budget(epsilon=8.0 if epsilon is None else epsilon, delta=1e-3 if delta is None else delta)
    protection = Protection(unit=unit or Unit.HOSPITAL, relation=relation or Relation.REPLACE_ONE)
    privacy = PrivacyConfig(
        epsilon=budget.epsilon,
        delta=budget.delta,
        planned_queries=80 if queries is None else queries,
        quorum=1,
        accountant=accountant or AccountantName.EXACT,
        relation=protection.relation,
        unit=protection.unit,
        voters_per_site=1 if voters is None else voters,
    )
    return privacy, 1.0 if radius is None else radius


def _read_spectrum(path: Path) -> list[float]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidInput("spectrum file", value=str(path), limit="a readable JSON list of numbers") from error
    if not isinstance(values, list) or not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        raise InvalidInput("spectrum file", value=str(path), limit="a JSON list of numbers")
    return [float(v) for v in values]
