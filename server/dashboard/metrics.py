"""Writes the study's state as Prometheus text for ``/metrics``; labels name sites, never patients; units are base
units.

``health`` serves it.
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

LEAST = "at least that while pate_ledger_in_doubt is 1"
"""Part of the help text of every metric of spending."""

STATES = ("up", "idle", "spent", "late", "declined", "offline", "unseen")


class _Standing(Collector):
    def __init__(self, service: DashboardService) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        view = self._service.overview()
        counter = CounterMetricFamily("pate_releases", "Queries by what became of them", labels=["outcome"])
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

    spent = gauge("privacy_epsilon_spent", f"Epsilon a site's pool has spent over all studies, by its gate; {LEAST}")
    budget = gauge("privacy_epsilon_budget", "Epsilon a site's pool may spend")
    share = gauge("privacy_budget_spent_ratio", f"Share spent of the sum of mu^2 that a site's gate admits; {LEAST}")
    left = gauge("privacy_answers_left", "Further answers a pool's budget covers, 0 while the ledger is in doubt")
    seen = gauge("client_last_seen_timestamp_seconds", "When a site was last heard from")
    state = GaugeMetricFamily("pate_client_state", "1 for the state a site is in", labels=["site", "state"])
    codes = counter("codes_received", "Codes received and accepted from a site")
    bad = counter("codes_refused", "Codes of a site that failed a check")
    missing = counter("replies_missing", "Requests a site did not answer")
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
        f"Epsilon the study has spent, by accountant; {LEAST}",
        labels=["accountant"],
    )
    for reading in view.budget.readings:
        study.add_metric([reading.accountant], reading.epsilon)
    yield study
    yield GaugeMetricFamily("pate_study_privacy_epsilon_budget", "The study's budget", value=view.budget.budget)
    guaranteed = GaugeMetricFamily(
        "pate_study_privacy_epsilon_guaranteed",
        "The larger of the study's budget and what it has spent, by its gate; absent while the ledger is in doubt",
        labels=[],
    )
    if view.budget.guaranteed is not None:
        guaranteed.add_metric([], view.budget.guaranteed)
    yield guaranteed
    yield GaugeMetricFamily(
        "pate_ledger_in_doubt",
        "1 while more may have been spent than the ledger shows: every epsilon spent is at least its value then",
        value=float(view.budget.doubt is not None),
    )
    yield GaugeMetricFamily("pate_study_queries_planned", "Planned queries", value=view.planned)
    yield GaugeMetricFamily(
        "pate_study_answers_left",
        "Planned queries without an answer, as far as the budgets admit them; 0 while the ledger is in doubt",
        value=view.budget.answers_left,
    )
    yield GaugeMetricFamily("pate_run_active", "1 while a run goes on", value=float(view.run.state == "running"))
    progress = GaugeMetricFamily("pate_stage_progress_ratio", "Share of a stage that is done", labels=["stage"])
    for stage in view.run.stages:
        progress.add_metric([stage.name], stage.done / stage.total if stage.total else 0.0)
    yield progress
    alarms = GaugeMetricFamily("pate_alarms", "Alarms that stand", labels=["level"])
    for level in LEVELS:
        alarms.add_metric([level], sum(alarm.level == level for alarm in view.alarms))
    yield alarms
    named = GaugeMetricFamily("pate_alarm", "1 while the alarm stands", labels=["name", "level", "site"])
    for name, level, site in sorted({(alarm.name, alarm.level, alarm.site) for alarm in view.alarms}):
        named.add_metric([name, level, site], 1.0)
    yield named
    yield GaugeMetricFamily("pate_ledger_rows", "Rows of the ledger that were read and hold", value=view.ledger.rows)
    yield GaugeMetricFamily(
        "pate_ledger_readable", "1 while the ledger can be followed", value=float(view.ledger.problem is None)
    )


def exposition(service: DashboardService) -> tuple[bytes, str]:
    """Return the metrics as text, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Standing(service))
    return generate_latest(registry), CONTENT_TYPE_LATEST
