"""``consilium plan`` and ``consilium audit``: what a budget buys, and whether the released noise keeps its claim.

Tables and JSON go to stdout, the progress bar to stderr. ``audit`` ends with exit code 1 when a test broke its limit;
both end with 2 and one line when a setting makes no sense. No option has a range of its own: the privacy core refuses.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.canonical import digest
from common.config import CodecConfig, DataConfig, PrivacyConfig, Study, load_study
from common.errors import BudgetExceeded, InvalidInput
from common.ledger.store import Candidate, Ledger, PoolDeclaration, RosterEntry
from common.privacy.audit import Code, Service, StudyUnderAudit, audit, audited_mechanism, memory_service
from common.privacy.gain import recommend
from common.privacy.mechanism import AccountantName, Budget, Protection, QuerySpec, Relation, Unit
from common.privacy.planner import plan
from common.privacy.release import noisy_sum
from consilium.plan_report import check_chart, delta_warning, plan_table, write_chart

plan_app = typer.Typer(add_completion=False, rich_markup_mode=None)
audit_app = typer.Typer(add_completion=False, rich_markup_mode=None)

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
    privacy, clip = _settings(study, epsilon, delta, queries, voters, radius, unit, relation, accountant)
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


@audit_app.command("audit")
def audit_command(
    study: StudyFile = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    queries: Annotated[
        int, typer.Option(help="Queries of the audited study, 2 or more; they spend the whole budget [8].", **_PLAIN)
    ] = 8,
    voters: Voters = None,
    radius: Radius = None,
    dimension: Annotated[int, typer.Option(help="Coordinates audited [4].", **_PLAIN)] = 4,
    unit: UnitOption = None,
    relation: RelationOption = None,
    accountant: Gate = None,
    runs: Annotated[
        int, typer.Option(help="Studies run in each world of each pair, 20 or more [2000].", **_PLAIN)
    ] = 2000,
    ledger_runs: Annotated[
        int,
        typer.Option(help="The same again through a real ledger on disk, 20 or more; 0 leaves it out [200].", **_PLAIN),
    ] = 200,
    as_json: Json = False,
) -> None:
    """Attack the production release path and compare what is measured with what is claimed. Exit code 1: exceeded.

    Example: consilium audit --epsilon 8 --delta 1e-3

    Example: consilium audit --study study.toml --json
    """
    for what, value in (("runs", runs), ("ledger runs", ledger_runs or 20)):
        if value < 20:
            raise InvalidInput(what, value=value, limit="20 or more")
    privacy, clip = _settings(study, epsilon, delta, None, voters, radius, unit, relation, accountant)
    subject = StudyUnderAudit(
        budget=privacy.budget,
        accountant=privacy.accountant,
        protection=privacy.protection,
        queries=queries,
        voters_per_site=privacy.voters_per_site,
        radius=clip,
        dimension=dimension,
    )
    with _progress("audit", show=not as_json) as told:
        reports = {"memory": audit(subject, runs=runs, service=memory_service(subject), progress=told)}
    if ledger_runs:
        with (
            tempfile.TemporaryDirectory() as folder,
            ledger_service(subject, Path(folder)) as service,
            _progress("audit through the ledger", show=not as_json) as told,
        ):
            reports["ledger"] = audit(subject, runs=ledger_runs, service=service, progress=told)
    if as_json:
        typer.echo(json.dumps({name: r.to_json() for name, r in reports.items()}, indent=1, ensure_ascii=False))
    else:
        for name, report in reports.items():
            typer.echo(f"{report.runs} runs a world, answers kept in {name}")
            for finding in report.findings:
                typer.echo(f"  {finding}")
            typer.echo(f"  {report.summary}")
    if any(report.exceeded for report in reports.values()):
        raise typer.Exit(1)


@contextmanager
def ledger_service(subject: StudyUnderAudit, folder: Path) -> Iterator[Service]:
    """The audited study through a real ledger file in ``folder``: every run spends freshly declared pools.

    A query past the budget raises BudgetExceeded, as the ledger's refusal; every answer is read back from the file.
    """
    privacy = PrivacyConfig(
        epsilon=float(subject.budget.epsilon),
        delta=subject.budget.delta,
        planned_queries=subject.queries,
        quorum=subject.hospitals,
        accountant=subject.accountant,
        relation=subject.protection.relation,
        unit=subject.protection.unit,
        voters_per_site=subject.voters_per_site,
    )
    study = Study(
        name="audit",
        data=DataConfig(labels=("background", "structure"), spacing_mm=(1.0, 1.0, 1.0), grid=(8, 8, 8)),
        privacy=privacy,
        codec=CodecConfig(radius=subject.radius, max_dimension=max(subject.dimension, 1)),
    )
    mechanism = audited_mechanism(subject)
    with Ledger.create(folder / "audit.sqlite", signing_key=Ed25519PrivateKey.generate()) as ledger:
        study_id = ledger.register_study(study)
        count = 0

        def run(codes: Sequence[Sequence[Code]]) -> list[Code]:
            nonlocal count
            count += 1
            roster = tuple(RosterEntry(site=f"site-{k}", pool=f"pool-{count}-{k}") for k in range(subject.hospitals))
            for entry in roster:
                ledger.declare_pool(
                    PoolDeclaration(
                        pool=entry.pool,
                        site=entry.site,
                        budget=subject.budget,
                        accountant=subject.accountant,
                        protection=subject.protection,
                    )
                )
            candidates = []
            for n, query in enumerate(codes):
                volume = digest("audit-volume", [count, n])
                spec = QuerySpec(
                    edition=privacy.edition,
                    codec=digest("audit-codec", "none"),
                    volumes=(volume,),
                    round=1,
                    centre="zero",
                    weights="codec",
                    mechanism=mechanism,
                )
                candidates.append(Candidate(query=spec, make_answer=partial(noisy_sum, query, mechanism)))
            result = ledger.release_batch(
                study_id=study_id, batch_id=f"run-{count}", roster=roster, candidates=candidates
            )
            if result.refused:
                cost = mechanism.mu_squared(subject.protection)
                left = ledger.remaining(roster[0].pool)
                raise BudgetExceeded(roster[0].pool, requested=float(cost), remaining=float(left))
            stored = [ledger.answer(candidate.query.id) for candidate in candidates]
            return [answer.noisy_sum for answer in stored if answer is not None]

        yield run


def _settings(
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


@contextmanager
def _progress(title: str, *, show: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not show:
        with nullcontext():
            yield None
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} runs"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1)

        def told(done: int, of: int) -> None:
            if done % 50 == 0 or done == of:
                bar.update(task, completed=done, total=of)

        yield told
