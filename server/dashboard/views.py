"""What each page says, as frozen facts: the same objects become HTML, JSON and metrics.

Every ε carries accountant, δ, unit and relation. Pure functions of the read model and the time; nothing here touches a
file, and nothing is computed from an un-noised code: the read model has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from math import floor
from statistics import median
from typing import Any, Literal

from common.canonical import parse_rational
from common.config import Study
from common.errors import InvalidInput
from common.ledger.records import Spend, charge_of
from common.privacy.accounting import epsilon_by, guarantee
from common.privacy.calibration import noise_multiplier
from common.privacy.figures import epsilon_text
from common.privacy.mechanism import GRID_BITS, AccountantName, Budget, Protection
from common.study_mechanism import study_mechanism
from server.dashboard.read_model import STAGES, Follower, SiteState

GATES = tuple(str(name) for name in AccountantName)
CURVES = ("exact", "rdp", "paper")
CURVE_POINTS = 160
QUIET_S = 120.0
NEARLY_SPENT = 0.9
RECENT_SHOWN = 12

Level = Literal["critical", "warning", "info"]
STAGE_WORDS = {
    "collect": "Collect codes and release",
    "decode": "Decode answers",
    "student": "Train the student",
    "controls": "Train its controls",
    "export": "Export the bundle",
}
DECLINED = {
    "budget": "its budget does not cover the batch",
    "daily-cap": "its own daily cap is reached",
    "paused": "the site has paused the study",
    "alarm": "its own ledger raised an alarm",
    "not-allowed": "its policy does not allow these queries",
}
MISSED = {"offline": "was not connected at the last offer", "deadline": "did not answer the last offer in time"}
ACCOUNTANT_NOTE = (
    "One mechanism, several upper bounds. The exact curve is the tightest that holds. Rényi DP keeps only moments of "
    "the privacy loss and gives a little away when they are turned into ε, so it reads higher for the same noise; the "
    "paper's formula gives away more. Only the gate's reading stops the study."
)


@dataclass(frozen=True, slots=True)
class Reading:
    """One accountant's ε for the same spending."""

    accountant: str
    epsilon: float
    gate: bool


@dataclass(frozen=True, slots=True)
class BudgetView:
    """What was spent and is left, of a study or of a site's patient pool over all studies.

    ``share`` is of Σμ², the quantity that adds up and that the gate compares; ``answers_left`` at the planned noise.
    """

    name: str
    pool: str | None
    epsilon: float
    budget: float
    budget_text: str
    accountant: str
    delta: float
    unit: str
    relation: str
    share: float
    releases: int
    answers_left: int
    readings: tuple[Reading, ...]
    words: str


@dataclass(frozen=True, slots=True)
class SiteView:
    """A site's standing: ``state`` is one of up, idle, late, declined, offline, unseen."""

    name: str
    pool: str
    state: str
    words: str
    last_seen: str | None
    codes: int
    codes_refused: int
    replies_missing: int
    accepted: int
    declined: int
    latency_s: float | None
    receipts_row: int
    receipts_behind: int
    receipts_problem: str | None
    budget: BudgetView | None
    study_epsilon: float | None


@dataclass(frozen=True, slots=True)
class StageView:
    """One step of a run: ``state`` is waiting, active or done."""

    name: str
    words: str
    state: str
    done: int
    total: int
    seconds: float | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class RunView:
    """The newest run: ``state`` is none, running, stopped, finished or failed."""

    state: str
    words: str
    started: str | None
    ended: str | None
    stages: tuple[StageView, ...]


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator should know, and what to do about it."""

    level: Level
    title: str
    remedy: str


@dataclass(frozen=True, slots=True)
class EventView:
    """One line of the log in words."""

    time: str
    kind: str
    words: str
    level: str


@dataclass(frozen=True, slots=True)
class LedgerState:
    """How far the read model has come with the ledger, and what is wrong with it if anything is."""

    rows: int
    rows_in_file: int
    ledger_id: str
    head: str
    head_time: str | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class Overview:
    """The first page."""

    study: str
    study_id: str
    planned: int
    answers: int
    refused: int
    quorum: int
    alarms: tuple[Alarm, ...]
    run: RunView
    budget: BudgetView
    sites: tuple[SiteView, ...]
    recent: tuple[EventView, ...]
    ledger: LedgerState


def overview(follower: Follower, *, now: datetime) -> Overview:
    """Everything on the first screen."""
    study, ledger = follower.study, follower.ledger
    run = run_view(follower, now=now)
    sites = site_views(follower, run=run, now=now)
    budget = study_budget(follower)
    state = ledger_state(follower)
    return Overview(
        study=study.name,
        study_id=study.id,
        planned=study.privacy.planned_queries,
        answers=len(ledger.points),
        refused=sum(refusal.queries for refusal in ledger.refusals),
        quorum=study.privacy.quorum,
        alarms=tuple(_alarms(follower, run=run, sites=sites, budget=budget, state=state, now=now)),
        run=run,
        budget=budget,
        sites=sites,
        recent=tuple(event_view(event) for event in list(follower.events.recent)[:RECENT_SHOWN]),
        ledger=state,
    )


def ledger_state(follower: Follower) -> LedgerState:
    ledger = follower.ledger
    return LedgerState(
        rows=ledger.rows,
        rows_in_file=ledger.rows_in_file,
        ledger_id=ledger.books.key.ledger_id,
        head=ledger.last.hash if ledger.last else "",
        head_time=ledger.last.time_utc if ledger.last else None,
        problem=ledger.problem,
    )


# --- budgets


@lru_cache(maxsize=65536)
def _epsilon(accountant: str, mu_squared: Fraction, delta: float) -> float:
    return epsilon_by(accountant, mu_squared, delta) if mu_squared else 0.0


def epsilon_of(accountant: str, mu_squared: Fraction, budget: Budget) -> float | None:
    """ε of a Σμ² by one accountant, 0 for nothing; None where the accountant has no answer."""
    try:
        return _epsilon(accountant, mu_squared, budget.analytic_delta)
    except InvalidInput:
        return None


@lru_cache(maxsize=4096)
def _gates(mu_squared: Fraction, budget: Budget, protection: Protection) -> tuple[tuple[str, float], ...]:
    return tuple((name, guarantee(mu_squared, budget, protection, name).epsilon) for name in GATES)


@lru_cache(maxsize=64)
def _mechanism(study: Study) -> Any:
    return study_mechanism(study, dimension=1)


def study_budget(follower: Follower) -> BudgetView:
    """What the study has spent on the pool it cost most."""
    study, books = follower.study, follower.ledger.books
    privacy = study.privacy
    if study.id not in books.studies:
        return _budget("study", None, Spend(), Fraction(0), 0, privacy.budget, str(privacy.accountant), study, study)
    terms = books.studies[study.id]
    spends = [books.spent_in(study.id, pool) for pool in books.study_pools(study.id)]
    worst = max(spends, key=lambda spend: spend.mu_squared, default=Spend())
    limit = books.study_limit(study.id)
    cost = charge_of(_mechanism(study), terms.protection, terms.protection)
    left = max(0, floor((limit - worst.mu_squared) / cost))
    return _budget("study", None, worst, limit, left, terms.budget, str(terms.accountant), study, study)


def pool_budget(follower: Follower, name: str, pool: str) -> BudgetView | None:
    """What all studies together have spent on a site's pool; None before the pool is declared."""
    study, books = follower.study, follower.ledger.books
    declared = books.pools.get(pool)
    if declared is None:
        return None
    spend, limit = books.spent(pool), books.limit(pool)
    cost = charge_of(_mechanism(study), declared.protection, study.privacy.protection)
    left = floor((limit - spend.mu_squared) / cost)
    if study.id in books.studies:
        inside = books.spent_in(study.id, pool).mu_squared
        own = charge_of(_mechanism(study), study.privacy.protection, study.privacy.protection)
        left = min(left, floor((books.study_limit(study.id) - inside) / own))
    return _budget(name, pool, spend, limit, max(0, left), declared.budget, str(declared.accountant), declared, study)


def _budget(
    name: str,
    pool: str | None,
    spend: Spend,
    limit: Fraction,
    left: int,
    budget: Budget,
    accountant: str,
    protected: Any,
    study: Study,
) -> BudgetView:
    protection = protected.privacy.protection if isinstance(protected, Study) else protected.protection
    readings = tuple(
        Reading(gate, epsilon, gate == accountant) for gate, epsilon in _gates(spend.mu_squared, budget, protection)
    )
    gate = next(reading.epsilon for reading in readings if reading.gate)
    share = float(spend.mu_squared / limit) if limit else 0.0
    return BudgetView(
        name=name,
        pool=pool,
        epsilon=gate,
        budget=budget.epsilon,
        budget_text=epsilon_text(budget.epsilon),
        accountant=accountant,
        delta=budget.delta,
        unit=str(protection.unit),
        relation=str(protection.relation),
        share=share,
        releases=spend.releases,
        answers_left=left,
        readings=readings,
        words=_budget_words(gate, budget.epsilon, left, share),
    )


def _budget_words(epsilon: float, budget: float, left: int, share: float) -> str:
    spent = f"ε {epsilon_text(epsilon)} of {epsilon_text(budget)} spent"
    if share > 1:
        return f"{spent}: past its budget, nothing more is released"
    if left == 0:
        return f"{spent}; no further answer fits"
    return f"{spent}; {left:,} more {'answer fits' if left == 1 else 'answers fit'}"


# --- runs


def run_view(follower: Follower, *, now: datetime) -> RunView:
    """The newest run with its stages."""
    events = follower.events
    run = events.run
    stages = tuple(_stage(follower, name, now=now) for name in STAGES)
    if run is None:
        return RunView("none", "No run has been started yet.", None, None, stages)
    if run.ended is None:
        active = next((stage for stage in stages if stage.state == "active"), None)
        words = f"Running: {active.words.lower()}." if active else "Running."
        return RunView("running", words, run.started, None, stages)
    if run.outcome == "failed":
        return RunView("failed", f"The last run failed: {run.reason}", run.started, run.ended, stages)
    if run.reason:
        return RunView("stopped", "The last run was stopped on request.", run.started, run.ended, stages)
    return RunView("finished", "The last run finished.", run.started, run.ended, stages)


def _stage(follower: Follower, name: str, *, now: datetime) -> StageView:
    state = follower.events.stages.get(name)
    running = follower.events.run is not None and follower.events.run.ended is None
    if state is None:
        return StageView(name, STAGE_WORDS[name], "waiting", 0, 0, None, None)
    if state.finished:
        return StageView(name, STAGE_WORDS[name], "done", state.total, state.total, state.seconds, None)
    eta = None
    if running and state.started and state.done > (state.base or 0):
        elapsed = (now - _when(state.started)).total_seconds()
        eta = max(0.0, elapsed / (state.done - (state.base or 0)) * (state.total - state.done))
    return StageView(name, STAGE_WORDS[name], "active" if running else "waiting", state.done, state.total, None, eta)


# --- sites


def site_views(follower: Follower, *, run: RunView, now: datetime) -> tuple[SiteView, ...]:
    """Every registered site, by name."""
    return tuple(_site(follower, site.name, site.pool, run=run, now=now) for site in follower.sites)


def _site(follower: Follower, name: str, pool: str, *, run: RunView, now: datetime) -> SiteView:
    seen = follower.events.sites.get(name, SiteState())
    books, study = follower.ledger.books, follower.study
    state, words = _standing(seen, run=run, now=now, patience_s=study.collection.deadline_s + QUIET_S)
    newest = max((batch.last_row for batch in follower.ledger.batches.values() if name in batch.roster), default=0)
    behind = sum(
        batch.last_row > seen.receipts_row for batch in follower.ledger.batches.values() if name in batch.roster
    )
    inside = books.spent_in(study.id, pool).mu_squared if study.id in books.studies else Fraction(0)
    return SiteView(
        name=name,
        pool=pool,
        state=state,
        words=words,
        last_seen=seen.last_seen,
        codes=seen.codes,
        codes_refused=seen.refused,
        replies_missing=seen.missing,
        accepted=seen.accepted,
        declined=seen.declined,
        latency_s=median(seen.latencies) if seen.latencies else None,
        receipts_row=seen.receipts_row,
        receipts_behind=behind if newest > seen.receipts_row else 0,
        receipts_problem=seen.receipts_problem,
        budget=pool_budget(follower, name, pool),
        study_epsilon=dict(_gates(inside, study.privacy.budget, study.privacy.protection))[
            str(study.privacy.accountant)
        ],
    )


def _standing(seen: SiteState, *, run: RunView, now: datetime, patience_s: float) -> tuple[str, str]:
    if seen.offer is None and seen.last_seen is None:
        return "unseen", "not heard from yet"
    if seen.offer in MISSED:
        return "offline", MISSED[seen.offer]
    if seen.missing_in_a_row:
        times = "once" if seen.missing_in_a_row == 1 else f"{seen.missing_in_a_row} times in a row"
        return ("late" if seen.missing_in_a_row < 3 else "offline"), f"did not answer {times}; it is asked again"
    if seen.offer != "accepted" and seen.offer is not None:
        return "declined", f"declined: {DECLINED.get(seen.offer, seen.offer)}"
    if run.state != "running":
        return "idle", "answered in the last run"
    if seen.last_seen and (now - _when(seen.last_seen)).total_seconds() > patience_s:
        if any(stage.name == "collect" and stage.state == "active" for stage in run.stages):
            return "late", "quiet for longer than its deadline"
        return "idle", "its part of this run is done"
    return "up", "answering"


# --- alarms


def _alarms(
    follower: Follower,
    *,
    run: RunView,
    sites: Sequence[SiteView],
    budget: BudgetView,
    state: LedgerState,
    now: datetime,
) -> list[Alarm]:
    found: list[Alarm] = []
    events, study = follower.events, follower.study
    if state.problem:
        found.append(
            Alarm(
                "critical",
                f"The ledger cannot be followed: {state.problem}",
                "Stop the run, then `consilium verify` on the ledger file names the first bad row.",
            )
        )
    if run.state == "failed":
        found.append(Alarm("critical", run.words, "Cure the reason, then `consilium study resume`; nothing was lost."))
    quiet_s = study.collection.deadline_s + 2 * QUIET_S
    if run.state == "running" and events.last_time:
        silence = (now - _when(events.last_time)).total_seconds()
        if silence > quiet_s:
            found.append(
                Alarm(
                    "warning",
                    f"The run has said nothing for {duration(silence)}",
                    "See `consilium study status` and the logs; a dead run goes on by `consilium study resume`.",
                )
            )
    if events.quorum_missed and run.state != "finished":
        missed = events.quorum_missed
        found.append(
            Alarm(
                "critical",
                f"Quorum missed: {missed['accepted']} of {missed['needed']} sites needed",
                "Nothing was charged or released. Bring the sites below back, then `consilium study resume`.",
            )
        )
    if events.implausible:
        *what, remedy = events.implausible
        found.append(Alarm("warning", "; ".join(what), remedy))
    spent = [site for site in sites if site.budget and site.budget.answers_left == 0]
    if events.budget_refused or (spent and budget.releases < study.privacy.planned_queries):
        names = ", ".join(site.name for site in spent) or "a pool"
        found.append(
            Alarm(
                "warning",
                f"Budget exhausted: {names}",
                "No further answer is released with these sites; a pool's budget is for its life. See Study, refusals.",
            )
        )
    for site in sites:
        if site.budget and site.budget.share > 1:
            found.append(
                Alarm(
                    "critical",
                    f"{site.name} has spent more than its budget",
                    "Recovered charges or a tightened budget; see the pool's rows in Ledger.",
                )
            )
        if site.state == "offline":
            found.append(
                Alarm("warning", f"{site.name} {site.words}", "Ask the site for `consilium site status` and its logs.")
            )
        if site.codes_refused:
            found.append(
                Alarm(
                    "warning",
                    f"{site.name}: {many(site.codes_refused, 'code')} refused, counted as the zero code",
                    "The site's software or key does not fit this study; compare its kit.",
                )
            )
        if site.receipts_problem:
            found.append(
                Alarm(
                    "warning",
                    f"{site.name} holds no receipts past row {site.receipts_row}",
                    "It gets them at the next run. If it refuses them, `consilium site status` there says why.",
                )
            )
    nearly = [s.name for s in sites if s.budget and NEARLY_SPENT <= s.budget.share <= 1 and s.budget.answers_left]
    if nearly and budget.releases < study.privacy.planned_queries:
        found.append(
            Alarm("info", f"Nine tenths of the budget are spent: {', '.join(nearly)}", "See Planner for what is left.")
        )
    order = {"critical": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda alarm: order[alarm.level])


# --- events


def event_view(event: dict[str, Any]) -> EventView:
    """An event in words."""
    kind = event["event"]
    level = "info"
    match kind:
        case "run-started":
            words = f"run {'resumed' if event['resumed'] else 'started'}"
        case "stage-started":
            words = f"stage {event['stage']} began"
        case "stage-finished":
            words = f"stage {event['stage']} done in {duration(event['seconds'])}"
        case "offer-answered":
            reason = event["reason"]
            said = "accepted" if event["accepted"] else f"declined: {DECLINED.get(reason, reason)}"
            words, level = f"{event['site']} {MISSED.get(reason, said)}", "info" if event["accepted"] else "warning"
        case "quorum-missed":
            words, level = f"quorum missed: {event['accepted']} of {event['needed']} sites", "critical"
        case "batch-dispatched":
            words = f"{many(event['queries'], 'query', 'queries')} asked of {many(event['sites'], 'site')}"
        case "reply-received":
            words = f"{event['site']} sent {many(event['codes'], 'code')} in {duration(event['seconds'])}"
        case "reply-missing":
            words, level = f"{event['site']} did not answer: {event['reason']}", "warning"
        case "code-refused":
            words, level = f"{event['site']}: a code was refused: {event['reason']}", "warning"
        case "released":
            words = f"{many(len(event['queries']), 'answer')} released by {many(len(event['roster']), 'site')}; ε " + (
                f"{epsilon_text(event['epsilon_exact'])} exact, {epsilon_text(event['epsilon_rdp'])} RDP"
            )
        case "budget-refused":
            asked = many(len(event["queries"]), "query", "queries")
            words, level = f"{asked} refused: the budget does not cover more", "warning"
        case "receipts-held":
            words = f"{event['site']} holds its receipts up to row {event['ledger_row']}"
        case "receipts-missing":
            words, level = f"{event['site']} could not be brought its receipts: {event['reason']}", "warning"
        case "label-decoded":
            words = f"label of volume {event['volume'][:8]} decoded"
        case "answers-weighed":
            words = "; ".join(event["warnings"]) or "the sites' answers are as large together as expected"
            level = "warning" if event["warnings"] else level
        case "student-trained":
            words = f"student trained in {duration(event['seconds'])}"
        case "control-trained":
            words = f"control {event['name'].replace('_', ' ')} trained in {duration(event['seconds'])}"
        case "bundle-exported":
            words = f"bundle exported, {event['sha256'][:8]}"
        case "stop-requested":
            words = "stop requested"
        case "run-finished":
            words = f"run finished in {duration(event['seconds'])}"
        case "run-failed":
            words, level = f"run failed: {event['reason']}", "critical"
        case _:
            words = kind.replace("-", " ")
    return EventView(event["time"], kind, words, level)


# --- the study


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """ε by every accountant after so many answers, as numbers to draw and as texts, rounded up, to read."""

    answers: int
    time: str
    exact: float | None
    rdp: float | None
    paper: float | None
    exact_text: str
    rdp_text: str
    paper_text: str


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch: what was released, who stood on its roster, how long the sites took."""

    id: str
    time: str
    answers: int
    refused: int
    accepted: int
    offered: int
    quorum: int
    quorum_missed: bool
    attempts: int
    first_row: int | None
    last_row: int | None
    median_s: float | None
    slowest_s: float | None
    slowest: str | None


@dataclass(frozen=True, slots=True)
class RefusalView:
    """Queries that were not released, and why; costs nothing."""

    row: int
    time: str
    queries: int
    reason: str
    pool: str
    requested: float | None
    remaining: float | None


@dataclass(frozen=True, slots=True)
class StudyPage:
    """A study's spending and how its batches went; newest batches and refusals first."""

    name: str
    id: str
    structures: tuple[str, ...]
    grid: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    unit: str
    relation: str
    delta: float
    planned: int
    quorum: int
    voters_per_site: int
    clipping_norm: float
    noise_multiplier: float
    budget: BudgetView
    curve: tuple[CurvePoint, ...]
    accountant_note: str
    batches: tuple[BatchView, ...]
    batch_count: int
    refusals: tuple[RefusalView, ...]
    declined: tuple[tuple[str, str, int], ...]


def study_page(follower: Follower, *, batches: int = 100) -> StudyPage:
    """The Study page."""
    study = follower.study
    privacy = study.privacy
    views = [_batch(follower, name) for name in _batch_names(follower)[:batches]]
    declined: dict[tuple[str, str], int] = {}
    for batch in follower.events.batches.values():
        for site, reason in batch.accepted.items():
            if reason != "accepted":
                declined[site, reason] = declined.get((site, reason), 0) + 1
    return StudyPage(
        name=study.name,
        id=study.id,
        structures=study.data.labels[1:],
        grid=study.data.grid,
        spacing_mm=study.data.spacing_mm,
        unit=str(privacy.unit),
        relation=str(privacy.relation),
        delta=privacy.delta,
        planned=privacy.planned_queries,
        quorum=privacy.quorum,
        voters_per_site=privacy.voters_per_site,
        clipping_norm=study.codec.radius,
        noise_multiplier=noise_multiplier(_mechanism(study), privacy.protection),
        budget=study_budget(follower),
        curve=tuple(epsilon_curve(follower)),
        accountant_note=ACCOUNTANT_NOTE,
        batches=tuple(views),
        batch_count=len(_batch_names(follower)),
        refusals=tuple(_refusal(refusal) for refusal in reversed(follower.ledger.refusals[-100:])),
        declined=tuple((site, reason, times) for (site, reason), times in sorted(declined.items())),
    )


def epsilon_curve(follower: Follower) -> list[CurvePoint]:
    """ε over releases by every accountant, at most :data:`CURVE_POINTS` of them, the newest always among them."""
    points, budget = follower.ledger.points, follower.study.privacy.budget
    step = 1
    while len(points) // step > CURVE_POINTS:
        step *= 2  # a power of two: points once computed are used again as the curve grows
    chosen = list(range(step - 1, len(points), step))
    if points and (not chosen or chosen[-1] != len(points) - 1):
        chosen.append(len(points) - 1)
    curve = []
    for index in chosen:
        point = points[index]
        by = {name: epsilon_of(name, point.worst, budget) for name in CURVES}
        texts = {f"{name}_text": "–" if value is None else epsilon_text(value) for name, value in by.items()}
        curve.append(CurvePoint(index + 1, point.time, by["exact"], by["rdp"], by["paper"], **texts))
    return curve


def _batch_names(follower: Follower) -> list[str]:
    """Every batch the ledger or the log knows, newest first."""
    ledger, events = follower.ledger.batches, follower.events.batches
    names = {**{name: batch.time for name, batch in events.items()}, **{n: b.time for n, b in ledger.items()}}
    return sorted(names, key=lambda name: names[name][:19], reverse=True)


def _batch(follower: Follower, name: str) -> BatchView:
    stored, seen = follower.ledger.batches.get(name), follower.events.batches.get(name)
    replies = seen.replies if seen else []
    slowest = max(replies, key=lambda reply: reply[1], default=None)
    accepted = sum(reason == "accepted" for reason in seen.accepted.values()) if seen else 0
    return BatchView(
        id=name,
        time=stored.time if stored else seen.time if seen else "",
        answers=stored.answers if stored else 0,
        refused=seen.refused if seen else 0,
        accepted=max(accepted, len(stored.roster) if stored else 0),
        offered=len(seen.accepted) if seen else 0,
        quorum=follower.study.privacy.quorum,
        quorum_missed=bool(seen and seen.quorum_missed and not stored),
        attempts=seen.attempts if seen else 0,
        first_row=stored.first_row if stored else None,
        last_row=stored.last_row if stored else None,
        median_s=median(seconds for _, seconds in replies) if replies else None,
        slowest_s=slowest[1] if slowest else None,
        slowest=slowest[0] if slowest else None,
    )


def _refusal(refusal: Any) -> RefusalView:
    return RefusalView(
        row=refusal.seq,
        time=refusal.time,
        queries=refusal.queries,
        reason=refusal.reason,
        pool=refusal.pool,
        requested=float(parse_rational(refusal.requested)) if refusal.requested else None,
        remaining=float(parse_rational(refusal.remaining)) if refusal.remaining else None,
    )


@dataclass(frozen=True, slots=True)
class NoiseView:
    """The code's public standard deviations, largest first, against the noise on the mean of ``voters`` codes."""

    stds: tuple[float, ...]
    noise: float
    voters: int
    above: int
    words: str


def noise_view(follower: Follower, stds: Sequence[float]) -> NoiseView:
    """Which coordinates of an answer stand out of its noise, by public knowledge alone.

    The voters are those of the newest release, or of all registered sites before there is one.
    """
    study = follower.study
    batches = list(follower.ledger.batches.values())
    voters = batches[-1].voters if batches else max(1, len(follower.sites)) * study.privacy.voters_per_site
    noise = float(_mechanism(study).noise_std) / 2**GRID_BITS / voters
    above = sum(std > noise for std in stds)
    return NoiseView(
        stds=tuple(stds),
        noise=noise,
        voters=voters,
        above=above,
        words=f"{above} of {len(stds)} coordinates vary more over public shapes than the noise on the mean of {voters} "
        f"codes; the decoder shrinks every coordinate by its own signal to noise.",
    )


# --- small helpers


def many(count: int, one: str, several: str = "") -> str:
    """A count with its noun: 1 code, 2 codes."""
    return f"{count:,} {one if count == 1 else several or one + 's'}"


def duration(seconds: float) -> str:
    """Seconds for a person: 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 d 2 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for size, name, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size} {name}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def _when(time: str) -> datetime:
    return datetime.fromisoformat(time)
