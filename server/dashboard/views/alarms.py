"""Derives the operator's alarms from the read model: each has a level, a title and a remedy.

The Overview page, the metrics and the webhook use it. Alarms are ordered from critical to info.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from common.wording import declined_words, duration, many, unwitnessed_words
from server.dashboard.ledger_fold import STANDING_MISSING
from server.dashboard.read_model import SILENT_S, Follower
from server.dashboard.reports import HospitalReport
from server.dashboard.views.run import RunView
from server.dashboard.views.sites import QUIET_S, SiteView
from server.study.waiting import SLOW_REMEDY

STOP = "Stop the run with `consilium study stop`."
NEARLY_SPENT = 0.9
AWAY_S = 3600.0
"""An alarm is raised for a site that was not heard from for this many seconds, if other sites were."""

Level = Literal["critical", "warning", "info"]
LEVELS: tuple[Level, ...] = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True)
class Alarm:
    """A problem that the operator should know about.

    Attributes:
        name: Identifier from a fixed list, for programs.
        level: ``critical``, ``warning`` or ``info``.
        title: The problem, in one sentence.
        remedy: What the operator should do.
        site: Name of the site concerned; empty if none.
    """

    name: str
    level: Level
    title: str
    remedy: str
    site: str = ""


def alarms(
    follower: Follower,
    *,
    run: RunView,
    sites: Sequence[SiteView],
    reports: Mapping[str, HospitalReport],
    more: Sequence[Alarm],
    now: datetime,
) -> tuple[Alarm, ...]:
    """Return every current alarm, the most severe first.

    Args:
        follower: The read model.
        run: The newest run.
        sites: The sites' states.
        reports: The sites' own reports.
        more: Alarms of the dashboard itself.
        now: The current time.

    Returns:
        The alarms.
    """
    unfinished, admitted = follower.facts().unanswered > 0, [site for site in sites if not site.revoked]
    found = [
        *_of_the_files(follower, now=now),
        *_of_the_run(follower, run, now=now),
        *_of_what_is_spent(follower, admitted, unfinished=unfinished),
        *_of_the_quorum(follower, sites, unfinished=unfinished),
        *(
            alarm
            for site in sites
            for alarm in _of_a_site(site, sealed=follower.study.privacy.sealed, unfinished=unfinished)
        ),
        *(alarm for site in sites for alarm in _of_a_refusal(site, unfinished=unfinished)),
        *_of_who_is_away(run, admitted, unfinished=unfinished, now=now),
        *_of_the_reports(reports, {site.name for site in sites}),
        *_of_what_is_nearly_spent(admitted, unfinished=unfinished),
        *more,
    ]
    return tuple(sorted(found, key=lambda alarm: LEVELS.index(alarm.level)))


_OF_A_QUORUM = frozenset({"site-offline", "site-away", "site-declined", "site-alarm"})
_OF_A_RUN = _OF_A_QUORUM | {"quorum-missed", "quorum-at-risk", "budget-exhausted"}
_HEADS = {
    "run-failed": _OF_A_RUN,
    "run-died": _OF_A_RUN,
    "quorum-missed": _OF_A_QUORUM | {"quorum-at-risk"},
    "quorum-at-risk": _OF_A_QUORUM,
}
"""By the kind of each main alarm, the kinds of alarms that may be its cause. One banner shows all of them."""


@dataclass(frozen=True, slots=True)
class MainAlarm:
    """A main alarm, and the alarms that may be its cause."""

    head: Alarm
    also: tuple[Alarm, ...]


def banners(found: Sequence[Alarm]) -> tuple[MainAlarm, ...]:
    """Group alarms into banners, so that a failed run and its possible causes are shown together.

    Args:
        found: The alarms, worst first.

    Returns:
        The banners in the same order. Each alarm is in exactly one banner, and at most one banner contains several
        alarms.
    """
    of = {alarm.name: alarm for alarm in found}
    head = next((of[name] for name in _HEADS if name in of), None)
    below = () if head is None else tuple(a for a in found if a is not head and a.name in _HEADS[head.name])
    return tuple(MainAlarm(alarm, below if alarm is head else ()) for alarm in found if alarm not in below)


def _of_the_files(follower: Follower, *, now: datetime) -> Iterator[Alarm]:
    events, ledger = follower.events, follower.ledger
    if ledger.problem:
        yield Alarm(
            "ledger-broken",
            "critical",
            f"The ledger cannot be followed: {ledger.problem}",
            f"{STOP} Then run `consilium verify` on the ledger file, which names the first bad row.",
        )
    if ledger.cut:
        yield Alarm(
            "ledger-cut",
            "critical",
            f"The ledger was cut or replaced while it was followed: {ledger.cut}",
            f"{STOP} If an older copy was restored, `consilium ledger recover` enters the charges for which the "
            "sites hold receipts. Then restart the dashboard.",
        )
    if ledger.forgotten:
        stopped = (
            "run starts with this ledger. To fix: put its newest copy back, or enter the missing charges with "
            "`consilium ledger recover`."
        )
        archive = "If this is an unpacked archive, nothing is wrong: its figures are those of the day it was packed."
        yield Alarm(
            "ledger-older",
            "critical",
            f"Charges are missing, or may be missing, from the ledger: {ledger.forgotten}",
            f"{archive} Otherwise no {stopped}" if ledger.forgotten == STANDING_MISSING else f"No {stopped}",
        )
    if ledger.unread:
        yield Alarm(
            "standing-unread",
            "warning",
            f"The dashboard cannot tell whether this is the newest copy of the ledger: {ledger.unread}",
            "If the server cannot read that file either, no run starts. If it can, let the dashboard's user read it.",
        )
    if follower.problem or follower.silent_s > SILENT_S:
        yield Alarm(
            "not-followed",
            "critical",
            f"The study is not being followed{f': {follower.problem}' if follower.problem else ''}",
            "The pages may show old data. Read the dashboard's log, then restart it.",
        )
    if events.problem or events.malformed:
        what = events.problem or f"{many(events.malformed, 'line')} could not be read, first {events.first_malformed}"
        yield Alarm(
            "event-log-damaged",
            "warning",
            f"The event log is damaged: {what}",
            "The dashboard lacks what these lines reported. The spending shown comes from the ledger.",
        )
    if events.last_time and datetime.fromisoformat(events.last_time) - now > timedelta(seconds=QUIET_S):
        yield Alarm(
            "clock-wrong",
            "warning",
            "The newest event lies in the future",
            "Correct the clocks of the server and of this machine; until then ages and alarms about silence are wrong.",
        )


def _of_the_run(follower: Follower, run: RunView, *, now: datetime) -> Iterator[Alarm]:
    events = follower.events
    if run.state == "failed":
        yield Alarm(
            "run-failed",
            "critical",
            run.words,
            "Correct the cause, then run `consilium study resume`; answers that were released are kept.",
        )
    if run.state == "died":
        yield Alarm("run-died", "critical", "The run died", run.words)
    if run.state == "running" and events.last_time:
        silence = (now - datetime.fromisoformat(events.last_time)).total_seconds()
        if silence > follower.study.collection.deadline_s + 2 * QUIET_S:
            yield Alarm(
                "run-silent",
                "warning",
                f"The run has logged nothing for {duration(silence)}",
                "A process of the run is still alive. See `consilium study status` and the logs.",
            )
    if events.quorum_missed and run.state != "finished":
        yield Alarm(
            "quorum-missed",
            "critical",
            f"Quorum missed: {many(events.quorum_missed.accepted, 'site')} accepted, {events.quorum_missed.needed} "
            "are needed",
            "The server charged and released nothing for this batch; sites that accepted have charged their own "
            "ledgers. Bring the sites below back, then `consilium study resume`.",
        )
    if events.implausible:
        *what, remedy = events.implausible
        said = f"{'; '.join(what)}. {remedy}" if what else remedy
        yield Alarm("answers-implausible", "warning", "The answers or the labels are implausible", said)


def _of_what_is_spent(follower: Follower, sites: Sequence[SiteView], *, unfinished: bool) -> Iterator[Alarm]:
    spent = [site.name for site in sites if site.exhausted]
    if follower.events.budget_refused or (spent and unfinished):
        yield Alarm(
            "budget-exhausted",
            "warning",
            f"Budget exhausted: {', '.join(spent) or 'a pool'}",
            "No further answer is released with these sites, because a pool's budget is never renewed. See Refusals on "
            "the Study page.",
        )


def _of_the_quorum(follower: Follower, sites: Sequence[SiteView], *, unfinished: bool) -> Iterator[Alarm]:
    """Yield an alarm if fewer sites than the quorum can answer, or exactly the quorum can and another site cannot."""
    quorum = follower.study.privacy.quorum
    gone = [site.name for site in sites if not site.can_answer and not site.revoked]
    revoked = [site.name for site in sites if site.revoked]
    admitted = len(sites) - len(revoked)
    left = admitted - len(gone)
    if not sites or not unfinished or left > quorum or (left == quorum and not gone):
        return
    few = left < quorum
    missing = (f"; not counted: {', '.join(gone)}" if gone else "") + (
        f"; revoked: {', '.join(revoked)}" if revoked else ""
    )
    yield Alarm(
        "quorum-at-risk",
        "critical" if few else "warning",
        f"Quorum {'out of reach' if few else 'at risk'}: {left} of {many(admitted, 'site')} can answer, {quorum} are "
        f"needed{missing}",
        ("Bring the sites named back, or admit more." if gone else "Admit more sites.")
        if few
        else "If one more site fails, nothing is released. Bring the named sites back before that.",
    )


def _of_a_site(site: SiteView, *, sealed: bool, unfinished: bool) -> Iterator[Alarm]:
    if site.contradicted_row is not None:
        yield Alarm(
            "ledger-contradicted",
            "critical",
            f"{site.name} states a head of row {site.contradicted_row:,} that this ledger does not contain",
            "The ledger was rolled back or forked, or the statement is false. Ask the site for its receipt of that "
            f"row. If it has one: {STOP} If an older copy was restored, `consilium ledger recover` enters the charges "
            "for which the sites hold receipts. Nothing is released with the site until then.",
            site.name,
        )
    if site.unwitnessed == "disagrees":
        yield Alarm(
            "witness-disagrees",
            "critical",
            f"{site.name} knows another history of a ledger than the signed head that it was shown",
            f"A ledger was rolled back or forked. {STOP} Run `consilium verify` on the study's ledger, and compare the "
            "heads in witnesses/ there and at the site.",
            site.name,
        )
    elif site.unwitnessed is not None and not site.revoked:
        yield Alarm(
            "witness-missing",
            "warning",
            f"{site.name} has not confirmed the ledger up to its newest row, because "
            f"{unwitnessed_words(site.unwitnessed)}",
            "The site is asked again at the end of the next run. If that fails, run `consilium site status` there.",
            site.name,
        )
    if site.budget and site.budget.share > 1:
        yield Alarm(
            "budget-passed",
            "critical",
            f"{site.name} has spent more than its budget",
            "Charges were recovered or the budget was tightened; see the pool's rows on the Ledger page.",
            site.name,
        )
    if site.state == "offline":
        yield Alarm(
            "site-offline",
            "warning",
            f"{site.name} {site.words}",
            "Ask the site for `consilium site status` and its logs.",
            site.name,
        )
    if site.slow and unfinished and not site.revoked:
        yield Alarm("site-slow", "warning", site.slow, SLOW_REMEDY, site.name)
    if site.codes_refused:
        means = "requested again until the draw is lost" if sealed else "each counted as the zero code"
        yield Alarm(
            "codes-refused",
            "warning",
            f"{site.name}: {many(site.codes_refused, 'code')} refused, {means}",
            "The site's software or key does not fit this study. Compare them with the kit that the site was given.",
            site.name,
        )
    if site.receipts_problem and not site.revoked:
        yield Alarm(
            "receipts-missing",
            "warning",
            f"{site.name} holds no receipts {f'past row {site.receipts_row}' if site.receipts_row else 'yet'}",
            "The site gets them in the next run. If it refuses them, `consilium site status` there says why.",
            site.name,
        )


def _of_a_refusal(site: SiteView, *, unfinished: bool) -> Iterator[Alarm]:
    """Yield an alarm for a site that declines offers before the study is complete.

    A spent budget, a contradicted ledger and a site that is offline have their own alarms.
    """
    reason = site.declined_for
    told = reason == "ledger-contradicted" or site.exhausted or site.revoked or site.state == "offline"
    if reason is None or told or not unfinished:
        return
    remedies = {
        "paused": "Ask the site for the output of `consilium site status`. It names a pause by the staff, or an alarm; "
        "only the site can end either.",
        "withdrawn": "Nothing brings it back. If the quorum needs another site, admit one with `consilium provision "
        "approve`.",
    }
    other = (
        "Ask the site for the output of `consilium site status`. `consilium study show --for-site` prints the terms "
        "that a site consents to."
    )
    yield Alarm(
        "site-alarm" if reason in remedies else "site-declined",
        "warning",
        f"{site.name} did not accept the last offer: {declined_words(reason)}",
        remedies.get(reason, other),
        site.name,
    )


def _of_who_is_away(run: RunView, sites: Sequence[SiteView], *, unfinished: bool, now: datetime) -> Iterator[Alarm]:
    """Yield alarms for sites that were not heard from for :data:`AWAY_S`.

    While answers are collected, the time counts up to now; otherwise up to when another site was last heard from.
    """
    if not unfinished:
        return
    collecting = any(stage.name == "collect" and stage.state == "active" for stage in run.stages)
    heard = [datetime.fromisoformat(site.last_seen) for site in sites if site.last_seen]
    until = now if collecting else max(heard, default=None)
    for site in sites:
        since = site.last_seen or run.started
        if until is None or since is None or site.exhausted:
            continue
        away = (until - datetime.fromisoformat(since)).total_seconds()
        if away > AWAY_S:
            yield Alarm(
                "site-away",
                "warning",
                f"{site.name} was not heard from for {duration(away)}"
                + ("" if collecting else " while other sites were"),
                "Ask the site whether its node and worker run: `consilium site status`, and its logs.",
                site.name,
            )


def _of_the_reports(reports: Mapping[str, HospitalReport], known: set[str]) -> Iterator[Alarm]:
    for site, report in sorted(reports.items()):
        if report.problem or site not in known:
            yield Alarm(
                "report-set-aside",
                "warning",
                report.problem or f"{site}.json reports for a site that is not registered",
                "Ask the site for a new one; store it as `site-reports/NAME.json` in the study's directory.",
                site if site in known else "",
            )
        elif report.alarms:
            yield Alarm(
                "site-reports-alarm",
                "critical",
                f"{site}'s own ledger says: {report.alarms[0]}"
                + (f", and {len(report.alarms) - 1} more" if len(report.alarms) > 1 else ""),
                "See the Sites page. At the site, `consilium site status` says why it stopped.",
                site,
            )


def _of_what_is_nearly_spent(sites: Sequence[SiteView], *, unfinished: bool) -> Iterator[Alarm]:
    nearly = [s.name for s in sites if s.budget and NEARLY_SPENT <= s.budget.share <= 1 and s.budget.answers_left]
    if nearly and unfinished:
        yield Alarm(
            "budget-nearly-spent",
            "info",
            f"Nine tenths of the budget of these sites are spent: {', '.join(nearly)}",
            "The Planner page shows what the rest of a budget allows.",
        )
