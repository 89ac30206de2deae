"""Computes the true figures from a ledger's rows by plain SQLite and JSON, with no code of the product.

Every Σμ² is added up from the rows that charge; ε is the analytic Gaussian formula (Balle & Wang 2018, Theorem 8), the
Rényi bound minimised over α (Canonne, Kamath & Steinke 2020, Proposition 12), or eq (14) of Fay et al. 2021.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import exp, log, sqrt
from pathlib import Path
from typing import Any

from scipy.optimize import brentq, minimize_scalar
from scipy.special import log_ndtr, ndtr

ACCOUNTANTS = ("exact", "rdp", "paper")


@lru_cache(maxsize=100_000)
def epsilon(accountant: str, mu_squared: Fraction, delta: float) -> float:
    """Return the ε at δ of a Gaussian mechanism with this μ²."""
    if not mu_squared:
        return 0.0
    mu = sqrt(mu_squared)
    paper = mu * mu / 2 + sqrt(2 * mu * mu * log(1 / delta))
    if accountant == "paper":
        return paper
    if accountant == "exact":

        def beyond(e: float) -> float:
            return float(ndtr(mu / 2 - e / mu) - exp(e + log_ndtr(-mu / 2 - e / mu)) - delta)

        return 0.0 if beyond(0.0) <= 0 else float(brentq(beyond, 0.0, paper, xtol=1e-12, rtol=1e-14))

    def renyi(log_order: float) -> float:
        more = exp(log_order)
        return (1 + more) * mu * mu / 2 + log(more / (1 + more)) - (log(delta) + log(1 + more)) / more

    middle = log(sqrt(2 * log(1 / delta)) / mu)
    found = minimize_scalar(renyi, bounds=(middle - 6, middle + 6), method="bounded", options={"xatol": 1e-10})
    return max(0.0, float(found.fun))


@lru_cache(maxsize=1000)
def limit(accountant: str, budget: float, delta: float) -> Fraction:
    """Return the Σμ² whose ε equals the budget."""
    root = brentq(lambda mu: epsilon(accountant, Fraction(mu) ** 2, delta) - budget, 1e-3, 60.0, xtol=1e-13)
    return Fraction(root) ** 2


def odds(mu_squared: Fraction) -> float:
    """Return Φ(μ/2), the chance of the best guess between N(0, 1) and N(μ, 1)."""
    return float(ndtr(sqrt(mu_squared) / 2))


def cost(mechanism: dict[str, Any], *, unit: str, relation: str, study_unit: str) -> Fraction:
    """Return (Δ/σ)² of one release for a unit; it covers all m voters if the study promises no disjoint teachers."""
    voters, radius = mechanism["voters_per_site"], mechanism["radius_int"]
    if unit == "patient":
        moved = 2 * radius * (1 if study_unit == "patient" else voters)
    else:
        moved = radius * voters * (2 if relation == "replace-one" else 1)
    return (Fraction(moved) / Fraction(mechanism["noise_std"])) ** 2


@dataclass(frozen=True)
class Terms:
    """Holds a budget as a row states it."""

    name: str
    epsilon: float
    delta: float
    accountant: str
    unit: str
    relation: str
    quorum: int = 0
    colluders: int | None = None

    def by(self, accountant: str, mu_squared: Fraction) -> float:
        return epsilon(accountant, mu_squared, self.delta)

    @property
    def limit(self) -> Fraction:
        return limit(self.accountant, self.epsilon, self.delta)


class Truth:
    """Adds up one ledger file by study and pool."""

    def __init__(self, path: Path) -> None:
        self.studies: dict[str, Terms] = {}
        self.pools: dict[str, Terms] = {}
        self.sites: dict[str, str] = {}
        self.spent_in: dict[str, dict[str, Fraction]] = defaultdict(lambda: defaultdict(Fraction))
        self.spent: dict[str, Fraction] = defaultdict(Fraction)
        self.rosters: dict[str, int] = defaultdict(int)
        self.kinds: dict[str, int] = defaultdict(int)
        self.answers: dict[str, int] = defaultdict(int)
        charged: dict[str, dict[str, Any]] = {}
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            rows = db.execute("SELECT kind, body FROM rows ORDER BY seq").fetchall()
        for kind, text in rows:
            self.kinds[kind] += 1
            body = json.loads(text)
            if kind == "study":
                self.studies[body["study_id"]] = _study(body["study"])
            elif kind == "pool":
                self.pools[body["pool"]] = _terms(body["pool"], body)
                self.sites[body["pool"]] = body["site"]
            elif kind == "release":
                charged[body["query_id"]] = body
                self.answers[body["study"]] += body.get("draw") is None
                self._charge(body["study"], body["query"]["mechanism"], body["roster"], pools=True)
            elif kind == "answer":
                self.answers[charged[body["query_id"]]["study"]] += 1
            elif kind == "recovered" and body.get("charged") is None:  # else a row of kind "lost" counts it already
                release = body["release"]
                self._charge(release["study"], release["query"]["mechanism"], release["roster"], pools=True)
            elif kind == "reuse":
                self.answers[body["study"]] += len(body["query_ids"])
                for query in body["query_ids"]:
                    of = charged[query]
                    self._charge(body["study"], of["query"]["mechanism"], of["roster"], pools=False)
            elif kind == "lost":
                for pool, spend in body["pools"].items():
                    self.spent[pool] += Fraction(spend["mu_squared"])
                for study, pools in body["studies"].items():
                    self.rosters[study] = max(self.rosters[study], len(pools))
                    for pool, spend in pools.items():
                        self.spent_in[study][pool] += Fraction(spend["mu_squared"])

    def _charge(self, study: str, mechanism: dict[str, Any], roster: list[list[str]], *, pools: bool) -> None:
        own = self.studies[study]
        self.rosters[study] = max(self.rosters[study], len(roster))
        for _, pool in roster:
            self.spent_in[study][pool] += cost(mechanism, unit=own.unit, relation=own.relation, study_unit=own.unit)
            if pools:
                of = self.pools[pool]
                self.spent[pool] += cost(mechanism, unit=of.unit, relation=of.relation, study_unit=own.unit)

    def left(self, study: str, mechanism: dict[str, Any], pools: Sequence[str], *, least: int, most: int) -> int:
        """Return how many more releases the pools can pay, up to ``most``. Each release needs ``least`` pools that can
        pay.
        """
        own = self.studies[study]
        spent = {pool: (self.spent[pool], self.spent_in[study][pool]) for pool in pools}
        inside = cost(mechanism, unit=own.unit, relation=own.relation, study_unit=own.unit)
        for number in range(most):
            after = {}
            for pool, (all_of_it, of_it) in spent.items():
                of = self.pools[pool]
                more = all_of_it + cost(mechanism, unit=of.unit, relation=of.relation, study_unit=own.unit)
                if more <= of.limit * Fraction(1 + 1e-9) and of_it + inside <= own.limit * Fraction(1 + 1e-9):
                    after[pool] = (more, of_it + inside)
            if len(after) < least:
                return number
            spent = after
        return most

    def worst(self, study: str) -> Fraction:
        return max(self.spent_in[study].values(), default=Fraction(0))


@dataclass(frozen=True)
class Figures:
    """Computes every true figure of a study by the role that a text gives it; None where no text may state one."""

    truth: Truth
    study: str
    sites: int
    doubt: bool

    def of(self, role: str) -> float:
        """Return the figure of a role. Raise KeyError for an unknown role."""
        terms, truth = self.truth.studies[self.study], self.truth
        spent, bound = truth.worst(self.study), max(truth.worst(self.study), terms.limit)
        kind, _, rest = role.partition(":")
        match kind:
            case "spent":
                return terms.by(terms.accountant if rest == "gate" else rest, spent)
            case "guaranteed":
                return max(terms.epsilon, terms.by(terms.accountant, spent))
            case "budget":
                return terms.epsilon
            case "odds":
                return odds(spent if rest == "spent" else bound)
            case "group":
                return terms.by(terms.accountant, bound * int(rest) ** 2)
            case "share":
                return float(spent / terms.limit)
            case "sealed":
                return terms.by(terms.accountant, bound * self._left(terms, rest))
            case "pool":
                accountant, _, name = rest.partition(":")
                of = truth.pools[name]
                return of.by(of.accountant if accountant == "gate" else accountant, truth.spent[name])
            case "pool-share":
                return float(truth.spent[rest] / truth.pools[rest].limit)
            case "cap":
                return truth.pools[rest].epsilon
            case "in-study":
                return terms.by(terms.accountant, truth.spent_in[self.study][rest])
        raise KeyError(role)

    def _left(self, terms: Terms, knowing: str) -> Fraction:
        """Return (K − t)/(K − c) against somebody who knows c of K shares: c = 0 on the largest roster, t + 1 on the
        smallest.
        """
        t = terms.colluders or 0
        most = max(terms.quorum, self.sites, self.truth.rosters[self.study])
        if knowing == "none":
            return Fraction(most - t, most)
        return Fraction(1) if knowing == "t" else Fraction(terms.quorum - t, terms.quorum - t - 1)


def _study(text: dict[str, Any]) -> Terms:
    privacy = text["privacy"]
    sealed = privacy.get("aggregation") == "sealed-sum"
    found = _terms(text["name"], privacy)
    return Terms(
        *(found.name, found.epsilon, found.delta, found.accountant, found.unit, found.relation),
        quorum=privacy["quorum"],
        colluders=privacy["colluders"] if sealed else None,
    )


def _terms(name: str, body: dict[str, Any]) -> Terms:
    return Terms(
        name,
        float.fromhex(body["epsilon"]),
        float.fromhex(body["delta"]),
        body["accountant"],
        body["unit"],
        body["relation"],
    )
