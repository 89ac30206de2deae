"""Computes the state of every site: whether it answers, which receipts it holds, and what budget its pool has left.

The Overview page, the Sites page and the metrics use it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from statistics import median

from common.wording import MISSED, declined_words, duration
from server.dashboard.event_fold import SiteState
from server.dashboard.read_model import Follower
from server.dashboard.views.budget import BudgetView, pool_budget
from server.dashboard.views.run import RunView

QUIET_S = 120.0
"""A site counts as late once its reply is this many seconds past the deadline."""


@dataclass(frozen=True, slots=True)
class SiteView:
    """A site's state.

    Attributes:
        state: ``up``, ``idle``, ``spent``, ``late``, ``declined``, ``offline``, ``unseen`` or ``revoked``.
        words: The state in words.
        last_seen: Time at which the site was last heard from; None if never.
        codes: Number of codes received.
        codes_refused: Number of codes refused.
        replies_missing: Number of requests for codes that the site did not answer.
        asked_again: Number of its replies that came only after a second or later request.
        accepted: Number of offers accepted.
        declined: Number of offers declined.
        missed: Number of offers without an answer.
        latency_s: Median seconds from the first request of a batch to the reply; None before the first reply.
        receipts_row: Ledger row up to which the site holds receipts; 0 if it holds none.
        receipts_behind: Number of batches in which the site took part and whose last charge is not covered by a receipt
            that the site holds.
        receipts_problem: Reason why the site could not get its receipts; None if it got them.
        declined_for: Reason why it declined its last offer; None if it did not decline.
        contradicted_row: Row number of a signed head that the site holds and the ledger does not contain; None if there
            is none.
        unwitnessed: Reason why the site has not countersigned the ledger's newest signed head; None if it has, or was
            not asked.
        slow: How often the newest run waited much longer for this site than for the others; empty if it never did.
        budget: The budget of the site's pool; None before the pool is declared.
        study_epsilon: ε that this study has spent on the site's pool.
        exhausted: True if it is certain that the site's pool cannot pay for a further query.
    """

    name: str
    pool: str
    state: str
    words: str
    last_seen: str | None
    codes: int
    codes_refused: int
    replies_missing: int
    asked_again: int
    accepted: int
    declined: int
    missed: int
    latency_s: float | None
    receipts_row: int
    receipts_behind: int
    receipts_problem: str | None
    declined_for: str | None
    contradicted_row: int | None
    unwitnessed: str | None
    slow: str
    budget: BudgetView | None
    study_epsilon: float | None
    exhausted: bool

    @property
    def revoked(self) -> bool:
        """True if its admission to the study was revoked."""
        return self.state == "revoked"

    @property
    def can_answer(self) -> bool:
        """True if no known reason prevents the site from answering.

        A site that was not heard from yet counts as able to answer.
        """
        away = self.state in ("offline", "declined", "revoked")
        return not away and self.budget is not None and not self.exhausted


def site_views(follower: Follower, *, run: RunView, now: datetime) -> tuple[SiteView, ...]:
    """Return every registered site, by name.

    Args:
        follower: The read model.
        run: The newest run.
        now: The current time.

    Returns:
        One entry for each site.
    """
    behind = _batches_without_receipts(follower)
    return tuple(_site(follower, site.name, site.pool, behind[site.name], run=run, now=now) for site in follower.sites)


def _batches_without_receipts(follower: Follower) -> Counter[str]:
    """Count, for each site, its batches whose last charge is not covered by a receipt that the site holds."""
    held = {site.name: 0 for site in follower.sites} | {
        name: seen.receipts_row for name, seen in follower.events.sites.items()
    }
    least = min(held.values(), default=0)
    return Counter(
        site
        for batch in follower.ledger.batches.values()
        if batch.last_charge > least
        for site in batch.roster
        if batch.last_charge > held.get(site, 0)
    )


def _site(follower: Follower, name: str, pool: str, behind: int, *, run: RunView, now: datetime) -> SiteView:
    seen = follower.events.sites.get(name, SiteState())
    study, facts = follower.study, follower.facts()
    spent = facts.pools.get(pool)
    budget = None if spent is None else pool_budget(spent, unanswered=facts.unanswered)
    exhausted = spent is not None and spent.exhausted and facts.spending.doubt is None
    state, words = _state_of(seen, run=run, now=now, patience_s=study.collection.deadline_s + QUIET_S)
    if name not in {site.name for site in follower.admitted}:
        state, words = "revoked", "its admission was revoked, so it answers nothing"
    elif state in ("up", "idle") and exhausted:
        state, words = "spent", "its budget takes no further answer"
    waiting = follower.events.waiting
    if state == "up" and name in waiting.sites:
        waited = max(0.0, (now - datetime.fromisoformat(waiting.since)).total_seconds())
        words = f"the run has waited {duration(waited)} for its codes"
    return SiteView(
        name=name,
        pool=pool,
        state=state,
        words=words,
        last_seen=seen.last_seen,
        codes=seen.codes,
        codes_refused=seen.refused,
        replies_missing=seen.missing,
        asked_again=seen.asked_again,
        accepted=seen.accepted,
        declined=seen.declined,
        missed=seen.missed,
        latency_s=median(seen.latencies) if seen.latencies else None,
        receipts_row=seen.receipts_row,
        receipts_behind=behind,
        receipts_problem=seen.receipts_problem,
        declined_for=seen.offer if seen.offer not in (None, "accepted", *MISSED) else None,
        contradicted_row=seen.contradicted_row,
        unwitnessed=seen.unwitnessed,
        slow=waiting.slow_words(name) if name in waiting.slow else "",
        budget=budget,
        study_epsilon=0.0 if spent is None else spent.in_study.spent.epsilon,
        exhausted=exhausted,
    )


def _state_of(seen: SiteState, *, run: RunView, now: datetime, patience_s: float) -> tuple[str, str]:
    if seen.offer is None and seen.last_seen is None:
        return "unseen", "not heard from yet"
    if seen.offer in MISSED:
        return "offline", MISSED[seen.offer]
    if seen.offer == "left-out":
        return "offline", declined_words(seen.offer)
    if seen.missing_in_a_row:
        times = "once" if seen.missing_in_a_row == 1 else f"{seen.missing_in_a_row} times in a row"
        return ("late" if seen.missing_in_a_row < 3 else "offline"), f"did not answer {times}"
    if seen.offer != "accepted" and seen.offer is not None:
        return "declined", declined_words(seen.offer)
    if run.state != "running":
        return "idle", "answered in the last run"
    if seen.last_seen and (now - datetime.fromisoformat(seen.last_seen)).total_seconds() > patience_s:
        if any(stage.name == "collect" and stage.state == "active" for stage in run.stages):
            return "late", "quiet for longer than its deadline"
        return "idle", "its part of this run is done"
    return "up", "answering"
