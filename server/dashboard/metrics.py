"""Writes the study's state as Prometheus metrics for ``/metrics``.

:mod:`server.dashboard.health` serves them. Labels name sites, never patients. Values have Prometheus' base units.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from server.dashboard.service import DashboardService
from server.dashboard.views.alarms import LEVELS
from server.dashboard.views.overview import Overview
from server.dashboard.views.sites import SiteView

LEAST = "a lower bound while pate_ledger_in_doubt is 1"
"""Part of the help text of every metric of spending."""

STATES = ("up", "idle", "spent", "late", "declined", "offline", "unseen", "revoked")


class _Standing(Collector):
    def __init__(self, service: DashboardService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        view = self._service.overview()
        counter = CounterMetricFamily("pate_releases", "Queries by outcome: released or refused", labels=["outcome"])
        counter.add_metric(["released"], view.answers)
        counter.add_metric(["refused"], view.refused)
        yield counter
        yield from _of_sites(view.sites)
        yield from _of_the_study(view)


def _of_sites(sites: Sequence[SiteView]) -> Iterator[Metric]:
    def gauge(name: str, words: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(f"pate_{name}", words, labels=["site"])

    def counter(name: str, words: str) -> CounterMetricFamily:
        return CounterMetricFamily(f"pate_{name}", words, labels=["site"])

    spent = gauge(
        "privacy_epsilon_spent",
        f"Epsilon spent on a site's pool by all studies, by the accountant that decides; {LEAST}",
    )
    budget = gauge("privacy_epsilon_budget", "Epsilon budget of a site's pool")
    share = gauge("privacy_budget_spent_ratio", f"Spent share of the sum of mu^2 that a site's pool allows; {LEAST}")
    left = gauge(
        "privacy_answers_left",
        "Planned queries without an answer that a pool's budgets cover; 0 for a revoked site and while "
        "pate_ledger_in_doubt is 1",
    )
    seen = gauge("client_last_seen_timestamp_seconds", "Time at which a site was last heard from")
    state = GaugeMetricFamily(
        "pate_client_state", "1 for the current state of a site, 0 for the others", labels=["site", "state"]
    )
    codes = counter("codes_received", "Codes received and accepted from a site")
    bad = counter("codes_refused", "Codes of a site that failed a check and were refused")
    missing = counter("replies_missing", "Requests that a site did not answer")
    receipts = gauge("receipts_row", "Ledger row up to which a site holds receipts")
    for site in sites:
        if site.budget:
            spent.add_metric([site.name], site.budget.epsilon)
            budget.add_metric([site.name], site.budget.budget)
            share.add_metric([site.name], site.budget.share)
            left.add_metric([site.name], site.budget.answers_left)
        if site.last_seen:
            seen.add_metric([site.name], datetime.fromisoformat(site.last_seen).timestamp())
        for name in STATES:
            state.add_metric([site.name, name], float(site.state == name))
        codes.add_metric([site.name], site.codes)
        bad.add_metric([site.name], site.codes_refused)
        missing.add_metric([site.name], site.replies_missing)
        receipts.add_metric([site.name], site.receipts_row)
    yield from (spent, budget, share, left, seen, state, codes, bad, missing, receipts)


def _of_the_study(view: Overview) -> Iterator[Metric]:
    study = GaugeMetricFamily(
        "pate_study_privacy_epsilon_spent",
        f"Epsilon spent by the study, by accountant; {LEAST}",
        labels=["accountant"],
    )
    for reading in view.budget.readings:
        study.add_metric([reading.accountant], reading.epsilon)
    yield study
    yield GaugeMetricFamily(
        "pate_study_privacy_epsilon_budget", "Epsilon budget of the study", value=view.budget.budget
    )
    guaranteed = GaugeMetricFamily(
        "pate_study_privacy_epsilon_guaranteed",
        "The larger of the study's epsilon budget and its epsilon spent; absent while pate_ledger_in_doubt is 1",
        labels=[],
    )
    if view.budget.guaranteed is not None:
        guaranteed.add_metric([], view.budget.guaranteed)
    yield guaranteed
    yield GaugeMetricFamily(
        "pate_ledger_in_doubt",
        "1 while more may have been spent than the ledger shows; spent values are then lower bounds",
        value=float(view.budget.doubt is not None),
    )
    yield GaugeMetricFamily("pate_study_queries_planned", "Planned queries", value=view.planned)
    yield GaugeMetricFamily(
        "pate_study_answers_left",
        "Planned queries without an answer that the budgets cover; 0 while pate_ledger_in_doubt is 1",
        value=view.budget.answers_left,
    )
    yield GaugeMetricFamily("pate_run_active", "1 while a run is active", value=float(view.run.state == "running"))
    progress = GaugeMetricFamily("pate_stage_progress_ratio", "Completed share of a stage", labels=["stage"])
    for stage in view.run.stages:
        progress.add_metric([stage.name], stage.done / stage.total if stage.total else 0.0)
    yield progress
    alarms = GaugeMetricFamily("pate_alarms", "Number of current alarms", labels=["level"])
    for level in LEVELS:
        alarms.add_metric([level], sum(alarm.level == level for alarm in view.alarms))
    yield alarms
    named = GaugeMetricFamily("pate_alarm", "1 while the alarm is current", labels=["name", "level", "site"])
    for name, level, site in sorted({(alarm.name, alarm.level, alarm.site) for alarm in view.alarms}):
        named.add_metric([name, level, site], 1.0)
    yield named
    yield GaugeMetricFamily(
        "pate_ledger_rows", "Rows of the ledger that were read and are valid", value=view.ledger.rows
    )
    yield GaugeMetricFamily(
        "pate_ledger_readable", "1 while the ledger can be read", value=float(view.ledger.problem is None)
    )


def exposition(service: DashboardService) -> tuple[bytes, str]:
    """Return the metrics in Prometheus' text format.

    Args:
        service: The dashboard's service.

    Returns:
        The text, and its content type.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Standing(service))
    return generate_latest(registry), CONTENT_TYPE_LATEST
