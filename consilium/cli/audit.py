"""``consilium audit``: a study attacked as it runs, and everything that came out held against its claim.

The table and JSON go to stdout, the progress bar to stderr. Ends with exit code 1 when a test broke its limit, with 2
and one line when a setting makes no sense.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from common.config import JOINT_ROUNDS, load_study
from common.errors import InvalidInput
from common.privacy.audit import AuditReport, Finding, StudyUnderAudit, audit
from consilium.audit.noise import smallest_fault
from consilium.audit.run import DRAWS, ServiceReport, audit_service
from consilium.audit.subject import Subject, from_workspace, stand_in
from consilium.cli.privacy import Delta, Epsilon, Gate, Json, Radius, RelationOption, UnitOption, Voters, settings_of
from server.study.workspace import Workspace

audit_app = typer.Typer(add_completion=False, rich_markup_mode=None)

MEMORY_CONFIDENCE = 0.9999
"""Of each pair of worlds in memory: with it an audit as a whole alarms falsely at most once in 1,500."""

_MEMORY_QUERIES = 4
_MEMORY_DIMENSION = 4
_PLAIN: Any = {"show_default": False}  # the help text says it, in the same words as for the others

HOSPITALS, DIMENSION = 8, 256


@audit_app.command("audit")
def audit_command(
    study: Annotated[
        Path | None,
        typer.Option(
            "--study",
            help="A study's directory at the server, audited as it is; or a study file. The flags below are then "
            "refused, but for --hospitals and --dimension beside a file.",
        ),
    ] = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a joint query [4].", **_PLAIN)] = None,
    queries: Annotated[
        int | None, typer.Option(help="In place of rounds: releases about one volume each.", **_PLAIN)
    ] = None,
    hospitals: Annotated[
        int | None, typer.Option(help="Hospitals answering, K [8, or the study's quorum].", **_PLAIN)
    ] = None,
    voters: Voters = None,
    radius: Radius = None,
    dimension: Annotated[
        int | None, typer.Option(help="Numbers released at a time, l [256, or as the study allows].", **_PLAIN)
    ] = None,
    unit: UnitOption = None,
    relation: RelationOption = None,
    accountant: Gate = None,
    draws: Annotated[
        int, typer.Option(help="Values of noise measured [200000]: the more, the smaller the faults seen.", **_PLAIN)
    ] = DRAWS,
    runs: Annotated[
        int,
        typer.Option(help="Runs in memory in each of six worlds, 20 or more; 0 leaves them out [2000].", **_PLAIN),
    ] = 2000,
    as_json: Json = False,
) -> None:
    """Attack a study as it runs, ledgers, workers and all, and compare with what it claims. Exit code 1: exceeded.

    Example: consilium audit --epsilon 8 --delta 1e-3 --hospitals 8 --rounds 4

    Example: consilium audit --study study.toml --json
    """
    if runs and runs < 20:
        raise InvalidInput("runs", value=runs, limit="20 or more, or 0")
    if study is not None and study.is_dir():
        given = (epsilon, delta, rounds, queries, hospitals, voters, radius, dimension, unit, relation, accountant)
        if any(value is not None for value in given):
            raise InvalidInput("flags beside a study's directory", remedy="leave them out: it is audited as it is")
        subject = from_workspace(Workspace(study))
    else:
        if rounds is not None and queries is not None:
            raise InvalidInput("rounds and queries", value=(rounds, queries), limit="one of the two")
        asked = rounds if queries is None else queries
        privacy, clip = settings_of(study, epsilon, delta, asked, voters, radius, unit, relation, accountant)
        if study is None and asked is None:
            privacy = replace(privacy, planned_queries=JOINT_ROUNDS)
        codec = None if study is None else load_study(study).codec
        sites, most = (HOSPITALS, DIMENSION) if codec is None else (privacy.quorum, min(codec.max_dimension, DIMENSION))
        subject = stand_in(
            privacy,
            hospitals=sites if hospitals is None else hospitals,
            dimension=most if dimension is None else dimension,
            radius=clip,
            joint=queries is None if codec is None else codec.joint,
        )
    logging.getLogger("client").setLevel(logging.CRITICAL)  # voters fail on purpose, and workers say so
    with _progress("audit", show=not as_json) as told:
        service = audit_service(subject, draws=draws, progress=told)
    reports: dict[str, ServiceReport | AuditReport] = {"service": service}
    if runs:
        with _progress("audit in memory", show=not as_json) as told:
            reports["memory"] = audit(_in_memory(subject), runs=runs, confidence=MEMORY_CONFIDENCE, progress=told)
    if as_json:
        typer.echo(json.dumps({name: r.to_json() for name, r in reports.items()}, indent=1, ensure_ascii=False))
    else:
        _print(service, reports)
    if any(report.exceeded for report in reports.values()):
        raise typer.Exit(1)


def _in_memory(subject: Subject) -> StudyUnderAudit:
    privacy = subject.study.privacy
    return StudyUnderAudit(
        budget=privacy.budget,
        accountant=privacy.accountant,
        protection=privacy.protection,
        queries=_MEMORY_QUERIES,
        hospitals=len(subject.limits),
        voters_per_site=privacy.voters_per_site,
        radius=subject.study.codec.radius,
        dimension=_MEMORY_DIMENSION,
    )


def _print(service: ServiceReport, reports: dict[str, ServiceReport | AuditReport]) -> None:
    subject, privacy = service.subject, service.subject.study.privacy
    how = "rounds of a joint query" if subject.frame is not None else "queries"
    console = Console()
    console.print(
        f"{len(subject.limits)} hospitals of {privacy.voters_per_site} voters, {subject.queries} {how}, "
        f"{subject.dimension} numbers a release; {service.lives} lives through aggregator, workers and both ledgers, "
        f"{service.draws} draws of noise: σ · {smallest_fault(service.draws):.4f} would be seen 19 times of 20."
        if service.draws
        else f"{service.lives} lives, no noise measured."
    )
    for name, report in reports.items():
        console.print(_table(name, report.findings))
        console.print(report.summary)


def _table(name: str, findings: tuple[Finding, ...]) -> Table:
    table = Table("", "test", "measured", "limit", "what was measured", title=_TITLES[name], title_justify="left")
    for finding in findings:
        meaning, _, sense = finding.meaning.rpartition("; ")
        limit = f"{sense} {finding.limit:.4g}"
        table.add_row("ALARM" if finding.alarm else "ok", finding.test, f"{finding.measured:.4g}", limit, meaning)
    return table


_TITLES = {"service": "As it runs", "memory": "In memory: guessing the world from the answers"}


@contextmanager
def _progress(title: str, *, show: bool) -> Iterator[Callable[[int, int], None] | None]:
    if not show:
        yield None
        return
    columns: tuple[Any, ...] = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} lives"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=1)
        yield lambda done, of: bar.update(task, completed=done, total=of)
