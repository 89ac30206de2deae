"""Defines ``consilium audit``: runs a study many times and compares everything it releases with its claim.

The table and JSON go to stdout, the progress bar to stderr. Exit code 1: a test exceeded its limit. 2: a setting is
invalid.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from common.config import JOINT_ROUNDS, load_study
from common.errors import InvalidInput
from consilium.cli.options import PLAIN, AsJson, counting
from consilium.cli.privacy import Delta, Epsilon, Gate, Radius, RelationOption, UnitOption, Voters, given, settings_of
from consilium.cli.say import console, json_text, say
from server.study.workspace import Workspace

if TYPE_CHECKING:
    from rich.table import Table

    from common.privacy.audit import AuditFinding, AuditReport, StudyUnderAudit
    from consilium.audit.run import ServiceReport
    from consilium.audit.subject import Subject


audit_app = typer.Typer(add_completion=False, rich_markup_mode=None)

MEMORY_CONFIDENCE = 0.9999
"""Confidence of each lower bound on μ from the runs in memory. At most one audit in 1,500 then raises a false alarm."""

MOST_RUNS = 1_000_000

_MEMORY_QUERIES = 4
_MEMORY_DIMENSION = 4

HOSPITALS, DIMENSION = 8, 256

StudyOrFile = Annotated[
    Path | None,
    typer.Option(
        "--study",
        help="A study's directory at the server, or a study file. The options for its terms are then refused; with a "
        "file, --hospitals and --dimension are still allowed.",
    ),
]


@audit_app.command("audit")
def audit_command(
    study: StudyOrFile = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of a joint query [4].", **PLAIN)] = None,
    queries: Annotated[
        int | None, typer.Option(help="Audit this many releases about one volume each, instead of rounds.", **PLAIN)
    ] = None,
    hospitals: Annotated[
        int | None, typer.Option(help="Number K of hospitals that answer [8, or the study's quorum].", **PLAIN)
    ] = None,
    voters: Voters = None,
    radius: Radius = None,
    dimension: Annotated[
        int | None, typer.Option(help="Length l of a released vector [256, or as the study allows].", **PLAIN)
    ] = None,
    unit: UnitOption = None,
    relation: RelationOption = None,
    accountant: Gate = None,
    draws: Annotated[
        int | None,
        typer.Option(
            help="Number of noise values to measure [200000]; with more of them smaller faults are detected.", **PLAIN
        ),
    ] = None,
    runs: Annotated[
        int,
        typer.Option(
            help="Simulated runs in memory in each of six worlds (three neighbouring pairs): 20 or more, or 0 [2000].",
            **PLAIN,
        ),
    ] = 2000,
    as_json: AsJson = False,
) -> None:
    """Attack a study as it runs, with its ledgers and workers, and compare the result with the ε that the study claims.

    Exit code 1: a measurement exceeds its limit, so the claim is refuted.

    Example: consilium audit --epsilon 8 --delta 1e-3 --hospitals 8 --rounds 4

    Example: consilium audit --study study.toml --json
    """
    if runs and not 20 <= runs <= MOST_RUNS:
        raise InvalidInput("--runs", value=runs, limit=f"20 to {MOST_RUNS}, or 0 for no runs in memory")
    if rounds is not None and queries is not None:
        raise InvalidInput("--rounds with --queries", value=(rounds, queries), limit="only one of the two options")
    asked = rounds if queries is None else queries
    flags = given(epsilon=epsilon, delta=delta, accountant=accountant, unit=unit, relation=relation, radius=radius)
    flags |= given(queries=asked, voters=voters)
    subject = _subject(study, flags, hospitals=hospitals, dimension=dimension, joint=queries is None)
    from consilium.audit.run import DRAWS

    reports = _attack(subject, draws=DRAWS if draws is None else draws, runs=runs, show=not as_json)
    if as_json:
        say(json_text({name: r.to_json() for name, r in reports.items()}))
    else:
        _print(reports)
    if any(report.exceeded for report in reports.values()):
        raise typer.Exit(1)


def _subject(
    study: Path | None, flags: Mapping[str, Any], *, hospitals: int | None, dimension: int | None, joint: bool
) -> Subject:
    from consilium.audit.subject import from_workspace, stand_in

    if study is not None and study.is_dir():
        if flags or hospitals is not None or dimension is not None:
            raise InvalidInput(
                "options for terms together with the directory of a study",
                remedy="leave these options out; the study is audited with its own settings",
            )
        return from_workspace(Workspace(study))
    privacy, clip = settings_of(study, flags)
    if study is None and "queries" not in flags:
        privacy = replace(privacy, planned_queries=JOINT_ROUNDS)
    codec = None if study is None else load_study(study).codec
    sites, most = (HOSPITALS, DIMENSION) if codec is None else (privacy.quorum, min(codec.max_dimension, DIMENSION))
    return stand_in(
        privacy,
        hospitals=sites if hospitals is None else hospitals,
        dimension=most if dimension is None else dimension,
        radius=clip,
        framed=joint if codec is None else codec.terms.framed,
    )


def _attack(subject: Subject, *, draws: int, runs: int, show: bool) -> dict[str, ServiceReport | AuditReport]:
    from common.privacy.audit import audit
    from consilium.audit.run import audit_service

    with _mute_workers(), counting("audit", show=show) as told:  # voters fail on purpose
        reports: dict[str, ServiceReport | AuditReport] = {
            "service": audit_service(subject, draws=draws, progress=told)
        }
    if runs:
        with counting("audit in memory", show=show) as told:
            reports["memory"] = audit(_in_memory(subject), runs=runs, confidence=MEMORY_CONFIDENCE, progress=told)
    return reports


@contextmanager
def _mute_workers() -> Iterator[None]:
    logger = logging.getLogger("client")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _in_memory(subject: Subject) -> StudyUnderAudit:
    from common.privacy.audit import StudyUnderAudit

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


def _print(reports: dict[str, ServiceReport | AuditReport]) -> None:

    from consilium.audit.noise import smallest_fault
    from consilium.audit.run import ServiceReport

    service = reports["service"]
    assert isinstance(service, ServiceReport)
    subject, privacy = service.subject, service.subject.study.privacy
    how = "rounds of a joint query" if subject.frame is not None else "queries"
    screen = console()
    screen.print(
        f"{len(subject.limits)} hospitals of {privacy.voters_per_site} voters, {subject.queries} {how}, "
        f"{subject.dimension} numbers a release; {service.lives} complete runs with aggregator, workers and ledgers, "
        f"{service.draws} noise values. Noise of {smallest_fault(service.draws):.4f} times the claimed σ would be "
        "detected in 19 of 20 audits."
        if service.draws
        else f"{service.lives} complete runs, no noise measured."
    )
    for name, report in reports.items():
        screen.print(_table(name, report.findings))
        screen.print(report.summary)


def _table(name: str, findings: tuple[AuditFinding, ...]) -> Table:
    from rich.table import Table

    table = Table("", "test", "measured", "limit", "what was measured", title=_TITLES[name], title_justify="left")
    for finding in findings:
        meaning, _, sense = finding.meaning.rpartition("; ")
        limit = f"{sense} {finding.limit:.4g}"
        table.add_row("ALARM" if finding.alarm else "ok", finding.test, f"{finding.measured:.4g}", limit, meaning)
    return table


_TITLES = {"service": "The study as it runs", "memory": "In memory: guesses from the answers which world was run"}
