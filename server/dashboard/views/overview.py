"""Computes the Overview page, the dashboard's first page: budget, sites, run and alarms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType

from common.event_kinds import EventView
from server.dashboard.read_model import Follower
from server.dashboard.reports import HospitalReport
from server.dashboard.views.alarms import Alarm, MainAlarm, alarms, banners
from server.dashboard.views.budget import BudgetView, study_budget
from server.dashboard.views.run import RunView, run_view
from server.dashboard.views.sites import SiteView, site_views
from server.dashboard.views.verdict import StudyVerdict, verdict
from server.planning.planner import Plan
from server.study.workspace import VALIDATION

NO_REPORTS: Mapping[str, HospitalReport] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class LedgerState:
    """How many rows of the ledger have been read, and the problem that stopped the reading, if there is one."""

    rows: int
    rows_in_file: int
    ledger_id: str
    head: str
    head_time: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Overview:
    """The content of the first page.

    Attributes:
        gate: The hospitals' verdicts that the exported student still needs for its release, and what the operator can
            do; empty if it needs none.
    """

    study: str
    study_id: str
    planned: int
    answers: int
    refused: int
    quorum: int
    verdict: StudyVerdict
    gate: str
    alarms: tuple[Alarm, ...]
    run: RunView
    budget: BudgetView
    sites: tuple[SiteView, ...]
    recent: tuple[EventView, ...]
    ledger: LedgerState

    @property
    def admitted(self) -> int:
        """Number of registered sites that are not revoked."""
        return sum(not site.revoked for site in self.sites)

    @property
    def banners(self) -> tuple[MainAlarm, ...]:
        """The alarms, grouped into banners."""
        return banners(self.alarms)


def overview(
    follower: Follower,
    *,
    now: datetime,
    reports: Mapping[str, HospitalReport] = NO_REPORTS,
    more: Sequence[Alarm] = (),
    plan: Plan | None = None,
    gate: str = "",
) -> Overview:
    """Return the content of the first page.

    Args:
        follower: The read model.
        now: The current time.
        reports: The sites' own reports.
        more: Alarms of the dashboard itself.
        plan: The plan for the study's own settings; None if there is none.
        gate: The hospitals' verdicts that the exported student still needs for its release, and what the operator can
            do; empty if it needs none.

    Returns:
        The page's content.
    """
    study, ledger, facts = follower.study, follower.ledger, follower.facts()
    run = run_view(follower, now=now)
    sites = site_views(follower, run=run, now=now)
    return Overview(
        study=study.name,
        study_id=study.id,
        planned=study.privacy.planned_queries,
        answers=facts.answers,
        refused=sum(refusal.queries for refusal in ledger.refusals),
        quorum=study.privacy.quorum,
        verdict=verdict(
            study,
            broken=ledger.problem is not None or ledger.cut is not None,
            gain=facts.gain,
            plan=plan,
            hospitals=len(follower.admitted),
            answers=facts.answers,
            running=run.state == "running",
            trained=follower.events.student is not None,
            cases=(follower.workspace.root / VALIDATION).exists(),
        ),
        gate=gate,
        alarms=alarms(follower, run=run, sites=sites, reports=reports, more=more, now=now),
        run=run,
        budget=study_budget(facts),
        sites=sites,
        recent=follower.events.latest(),
        ledger=LedgerState(
            rows=ledger.rows,
            rows_in_file=ledger.rows_in_file,
            ledger_id=ledger.books.key.ledger_id,
            head=ledger.last.hash if ledger.last else "",
            head_time=ledger.last.time_utc if ledger.last else None,
            problem=ledger.problem,
        ),
    )
