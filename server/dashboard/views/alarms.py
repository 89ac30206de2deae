"""What an operator should know, worst first, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from server.dashboard.read_model import Follower
from server.dashboard.views.budget import BudgetView
from server.dashboard.views.run import RunView
from server.dashboard.views.sites import QUIET_S, SiteView
from server.dashboard.wording import duration, many

NEARLY_SPENT = 0.9

Level = Literal["critical", "warning", "info"]
LEVELS: tuple[Level, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator should know, and what to do about it."""

    level: Level
    title: str
    remedy: str


def alarms(
    follower: Follower, *, run: RunView, sites: Sequence[SiteView], budget: BudgetView, now: datetime
) -> tuple[Alarm, ...]:
    """Every alarm that stands, worst first."""
    unfinished = budget.releases < follower.study.privacy.planned_queries
    found = [
        *_of_the_run(follower, run, now=now),
        *_of_what_is_spent(follower, sites, unfinished=unfinished),
        *(alarm for site in sites for alarm in _of_a_site(site)),
        *_of_what_is_nearly_spent(sites, unfinished=unfinished),
    ]
    return tuple(sorted(found, key=lambda alarm: LEVELS.index(alarm.level)))


def _of_the_run(follower: Follower, run: RunView, *, now: datetime) -> Iterator[Alarm]:
    events, problem = follower.events, follower.ledger.problem
    if problem:
        yield Alarm(
            "critical",
            f"The ledger cannot be followed: {problem}",
            "Stop the run, then `consilium verify` on the ledger file names the first bad row.",
        )
    if run.state == "failed":
        yield Alarm("critical", run.words, "Cure the reason, then `consilium study resume`; nothing was lost.")
    if run.state == "running" and events.last_time:
        silence = (now - datetime.fromisoformat(events.last_time)).total_seconds()
        if silence > follower.study.collection.deadline_s + 2 * QUIET_S:
            yield Alarm(
                "warning",
                f"The run has said nothing for {duration(silence)}",
                "See `consilium study status` and the logs; a dead run goes on by `consilium study resume`.",
            )
    if events.quorum_missed and run.state != "finished":
        yield Alarm(
            "critical",
            f"Quorum missed: {events.quorum_missed.accepted} of {events.quorum_missed.needed} sites needed",
            "Nothing was charged or released. Bring the sites below back, then `consilium study resume`.",
        )
    if events.implausible:
        *what, remedy = events.implausible
        yield Alarm("warning", "; ".join(what), remedy)


def _of_what_is_spent(follower: Follower, sites: Sequence[SiteView], *, unfinished: bool) -> Iterator[Alarm]:
    spent = [site.name for site in sites if site.budget and site.budget.answers_left == 0]
    if follower.events.budget_refused or (spent and unfinished):
        yield Alarm(
            "warning",
            f"Budget exhausted: {', '.join(spent) or 'a pool'}",
            "No further answer is released with these sites; a pool's budget is for its life. See Study, refusals.",
        )


def _of_a_site(site: SiteView) -> Iterator[Alarm]:
    if site.budget and site.budget.share > 1:
        yield Alarm(
            "critical",
            f"{site.name} has spent more than its budget",
            "Recovered charges or a tightened budget; see the pool's rows in Ledger.",
        )
    if site.state == "offline":
        yield Alarm("warning", f"{site.name} {site.words}", "Ask the site for `consilium site status` and its logs.")
    if site.codes_refused:
        yield Alarm(
            "warning",
            f"{site.name}: {many(site.codes_refused, 'code')} refused, counted as the zero code",
            "The site's software or key does not fit this study; compare its kit.",
        )
    if site.receipts_problem:
        yield Alarm(
            "warning",
            f"{site.name} holds no receipts past row {site.receipts_row}",
            "It gets them at the next run. If it refuses them, `consilium site status` there says why.",
        )


def _of_what_is_nearly_spent(sites: Sequence[SiteView], *, unfinished: bool) -> Iterator[Alarm]:
    nearly = [s.name for s in sites if s.budget and NEARLY_SPENT <= s.budget.share <= 1 and s.budget.answers_left]
    if nearly and unfinished:
        yield Alarm(
            "info", f"Nine tenths of the budget are spent: {', '.join(nearly)}", "See Planner for what is left."
        )
