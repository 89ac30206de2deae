"""Audits a release mechanism in memory: measures what its answers reveal and compares that with the claimed guarantee.

:mod:`consilium.audit` calls this module, and adds the audit of running daemons with ledgers and workers. The audit
plays the strongest adversary that the guarantee covers:

1. It runs a whole study many times in each of two neighbouring worlds, through ``quantise``, the budget
   filter and :func:`~common.privacy.release.noisy_sum`.
2. It guesses the world from the answers.
3. It turns the error rates of the guess into a lower bound on μ. The bound holds with the stated confidence, whatever
   the distribution of the noise.

There are three pairs of worlds, each for one kind of fault. In them u is the longest code that the clipping norm
allows, in one direction. ``constant`` (one unit's code is +u in every query, or −u) detects too little noise.
``alternating`` (the sign flips from query to query) detects noise that is used twice. ``tenfold`` (±10u before
clipping) detects a missing clip. Three more tests examine the noise itself, and one the budget filter.

The audit cannot prove privacy. It detects faults that are large enough for its statistical power (docs/privacy.md gives
figures), in this code on this machine. It says nothing about a server that runs other code. It draws no randomness of
its own. Refuses parameters outside their ranges and values that are not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import floor, isfinite, log, sqrt
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int64
from scipy import stats

from common.canonical import check_integer
from common.errors import BudgetExceeded, InvalidInput
from common.privacy.accounting import admits, max_mu_squared
from common.privacy.calibration import calibrate
from common.privacy.checks import check_number
from common.privacy.claim import claimed_mu, claimed_reach
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import AccountantName, Budget, Mechanism, Protection, Relation, Unit, radius_int
from common.privacy.quantise import quantise
from common.privacy.release import noisy_sum

Code: TypeAlias = Int64[np.ndarray, "l"]
Service: TypeAlias = Callable[[Sequence[Sequence[Code]]], Sequence[Code]]
"""A function that runs one whole study: takes the sites' codes of every query and returns the answers in order.

Each call starts with an unspent budget. It raises BudgetExceeded when a query does not fit."""

Progress: TypeAlias = Callable[[int, int], None]

PAIRS = ("constant", "alternating", "tenfold")
CONFIDENCE = 0.9995
_NOISE_ALPHA = 1e-5  # false alarm rate of each test on the noise itself


@dataclass(frozen=True, slots=True)
class StudyUnderAudit:
    """The study whose claimed guarantee is tested.

    Attributes:
        budget: Claimed ε and δ of all queries together.
        accountant: The accountant of the claim.
        protection: Unit and relation of the claim.
        queries: Number N of queries, at least 2. The noise is calibrated so that N queries spend the whole budget.
            A small N therefore tests the same claim on Σμ² as a large one, and is faster.
        hospitals: Number of sites.
        voters_per_site: Number m of voters at each site.
        radius: Clipping norm C of one voter's code.
        dimension: Length l of a code.

    Raises:
        InvalidInput: If a value is outside its range.
    """

    budget: Budget
    accountant: AccountantName
    protection: Protection
    queries: int
    hospitals: int = 2
    voters_per_site: int = 1
    radius: float = 1.0
    dimension: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "accountant", AccountantName(self.accountant))
        for name, least in (("queries", 2), ("hospitals", 1), ("dimension", 1), ("voters_per_site", 1)):
            value = getattr(self, name)
            check_integer(
                f"{name} of an audit", value, least=least, most=10_000, limit=f"an integer from {least} to 10000"
            )
        radius_int(self.radius)

    @property
    def claimed_mu(self) -> float:
        """μ of the whole study according to the claim, at δ − 2⁻⁴⁰ because 2⁻⁴⁰ is set aside for the noise sampler.

        It is computed by :mod:`common.privacy.claim`, which shares no code with the code under audit.
        """
        return claimed_mu(self.budget.epsilon, self.budget.delta - 2.0**-40, accountant=str(self.accountant))

    @property
    def claimed_noise_std(self) -> float:
        """The noise standard deviation on the integer sum that the claim requires, in grid steps of 2⁻¹⁶.

        The sensitivity from which it follows is that of :mod:`common.privacy.claim`.
        """
        unit, relation = str(self.protection.unit), str(self.protection.relation)
        reach = claimed_reach(unit, relation, voters_per_site=self.voters_per_site)
        return reach * floor(self.radius * 65536) * sqrt(self.queries) / self.claimed_mu


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """The result of one test: a measured value, its limit, and whether the value broke the limit.

    Attributes:
        test: Name of the test.
        measured: The measured value.
        limit: The limit that the value must keep.
        alarm: True if the limit is broken.
        meaning: Text that is printed between the measured value and the limit. With "measured μ at least; claimed" the
            line reads "0.52 (measured μ at least; claimed 1.2)".
    """

    test: str
    measured: float
    limit: float
    alarm: bool
    meaning: str

    @classmethod
    def at_most(cls, test: str, measured: float, limit: float, what: str, *, slack: float = 0.0) -> AuditFinding:
        """Return the finding of a test that alarms if the measured value is above the limit.

        Args:
            test: Name of the test.
            measured: The measured value.
            limit: The largest value without an alarm.
            what: Name of the measured quantity, which is printed after the value.
            slack: Share of the limit by which rounding may exceed it.

        Returns:
            The finding.
        """
        return cls(test, measured, limit, measured > limit * (1 + slack), f"{what}; at most")

    @classmethod
    def at_least(cls, test: str, measured: float, limit: float, what: str, *, slack: float = 0.0) -> AuditFinding:
        """Return the finding of a test that alarms if the measured value is below the limit.

        Args:
            test: Name of the test.
            measured: The measured value.
            limit: The smallest value without an alarm.
            what: Name of the measured quantity, which is printed after the value.
            slack: Share of the limit by which rounding may fall below it.

        Returns:
            The finding.
        """
        return cls(test, measured, limit, measured < limit * (1 - slack), f"{what}; at least")

    def __str__(self) -> str:
        return f"{'ALARM' if self.alarm else 'ok'}  {self.test}: {self.measured:.4g} ({self.meaning} {self.limit:.4g})"


class AuditOutcome:
    """Base of the audits' reports: a tuple of findings, and a verdict on the claim."""

    __slots__ = ()

    findings: tuple[AuditFinding, ...]

    @property
    def exceeded(self) -> bool:
        """True if at least one test's measured value broke its limit."""
        return any(finding.alarm for finding in self.findings)

    @property
    def alarms(self) -> tuple[str, ...]:
        """Names of the tests whose measured values broke their limits."""
        return tuple(finding.test for finding in self.findings if finding.alarm)

    def _summary(
        self, budget: tuple[float, float], accountant: str, protection: Protection, *, measured: float, claimed: float
    ) -> str:
        epsilon, delta = budget
        claim = f"(ε = {epsilon_text(epsilon)}, δ = {delta_text(delta)}) by {accountant}, {protection}"
        if self.exceeded:
            return f"The claim {claim} is BROKEN: {', '.join(self.alarms)}."
        return f"No fault found against the claim {claim}: measured μ ≥ {measured:.3f}, claimed μ ≤ {claimed:.3f}."


@dataclass(frozen=True, slots=True)
class AuditReport(AuditOutcome):
    """The report of an audit in memory.

    Attributes:
        study: The audited study.
        runs: Runs in each of two worlds, for each pair of worlds.
        confidence: Confidence of each lower bound on μ.
        findings: One finding for each test.
    """

    study: StudyUnderAudit
    runs: int
    confidence: float
    findings: tuple[AuditFinding, ...]

    @property
    def mu_lower_bound(self) -> float:
        """The largest measured lower bound on μ over the pairs of worlds."""
        return max(f.measured for f in self.findings if f.test.startswith("pair "))

    @property
    def summary(self) -> str:
        """The verdict in one sentence, with the claim and the measured and claimed μ."""
        study = self.study
        return self._summary(
            (study.budget.epsilon, study.budget.delta),
            study.accountant,
            study.protection,
            measured=max(0.0, self.mu_lower_bound),
            claimed=study.claimed_mu,
        )

    def to_json(self) -> dict[str, object]:
        """Return the report as plain JSON for machines.

        Returns:
            The study's facts, the findings, the verdict and the summary. Infinite measurements are written as strings.
        """
        return {
            "claimed_mu": self.study.claimed_mu,
            "confidence": self.confidence,
            "delta": self.study.budget.delta,
            "dimension": self.study.dimension,
            "epsilon": self.study.budget.epsilon,
            "exceeded": self.exceeded,
            "findings": [
                {
                    "alarm": f.alarm,
                    "limit": f.limit,
                    "measured": f.measured if isfinite(f.measured) else str(f.measured),
                    "test": f.test,
                }
                for f in self.findings
            ],
            "queries": self.study.queries,
            "relation": str(self.study.protection.relation),
            "runs": self.runs,
            "summary": self.summary,
            "unit": str(self.study.protection.unit),
        }


def memory_service(study: StudyUnderAudit) -> Service:
    """Return a service that runs the production code, with the budget kept in memory in place of a ledger.

    The noise is calibrated once. Each run asks the budget filter before each query, and releases with ``noisy_sum``.

    Args:
        study: The study to serve.

    Returns:
        A function from the sites' codes of all queries to the released answers. It raises BudgetExceeded when a query
        does not fit the budget.
    """
    mechanism = audited_mechanism(study)
    limit = max_mu_squared(study.accountant, study.budget)
    cost = mechanism.mu_squared(study.protection)

    def run(codes: Sequence[Sequence[Code]]) -> list[Code]:
        spent, answers = Fraction(0), []
        for query in codes:
            if not admits(spent, cost, limit):
                raise BudgetExceeded("audit", requested=float(cost), remaining=float(limit - spent))
            spent += cost
            answers.append(noisy_sum(query, mechanism))
        return answers

    return run


def audited_mechanism(study: StudyUnderAudit) -> Mechanism:
    """Return the mechanism that production uses for this study.

    Args:
        study: The audited study.

    Returns:
        The mechanism, with its noise calibrated for ``study.queries`` releases.
    """
    bound = radius_int(study.radius)
    noise_std = calibrate(
        budget=study.budget,
        accountant=study.accountant,
        queries=study.queries,
        radius_int=bound,
        voters_per_site=study.voters_per_site,
        protection=study.protection,
    )
    return Mechanism(study.dimension, bound, study.voters_per_site, noise_std)


def audit(
    study: StudyUnderAudit,
    *,
    runs: int = 2000,
    confidence: float = CONFIDENCE,
    service: Service | None = None,
    stop_at_first_alarm: bool = False,
    progress: Progress | None = None,
) -> AuditReport:
    """Run a study ``runs`` times in each of two worlds, for each of three pairs of worlds, and test the answers.

    Guarantee: if the service keeps the claim, the lower bound on μ from one pair of worlds exceeds the claimed μ with
    probability at most 1 − ``confidence``, and each test of the noise raises an alarm with probability at most 1e-5.
    Both hold at any number of runs. More runs give more power.

    Args:
        study: The study and its claim.
        runs: Runs in each world of each pair, from 20 to 1,000,000.
        confidence: Confidence of each lower bound on μ, from 0.5 to below 1.
        service: The service under audit; :func:`memory_service` if None.
        stop_at_first_alarm: True to skip the remaining pairs of worlds after the first alarm.
        progress: Called with (runs done, runs in all) after each run.

    Returns:
        The report with one finding for each test.

    Raises:
        InvalidInput: If an argument is outside its range, or the service does not answer every query.

    Source: Nasr et al. 2023 (μ-GDP auditing); Clopper & Pearson 1934.
    """
    check_integer("runs of an audit", runs, least=20, most=1_000_000, limit="an integer from 20 to 1000000")
    _check_confidence(confidence)
    serve = memory_service(study) if service is None else service
    findings = [_filter_finding(study, serve)]
    residuals = []
    for index, pair in enumerate(PAIRS):
        if stop_at_first_alarm and index and any(f.alarm for f in findings):
            break
        direction = _direction(study, pair)
        statistics = []
        for world in (1, -1):
            codes = _codes(study, pair, world)
            truth = np.array([np.sum(query, axis=0) for query in codes], dtype=np.int64)
            noise = np.empty((runs, *truth.shape))
            for run in range(runs):
                noise[run] = np.asarray(serve(codes), dtype=np.int64) - truth
                if progress is not None:
                    progress(runs * (2 * index + (world < 0)) + run + 1, 2 * runs * len(PAIRS))
            statistics.append(((noise + truth) * direction).sum(axis=(1, 2)))
            residuals.append(noise)
        bound = mu_lower_bound(statistics[0], statistics[1], confidence=confidence)
        findings.append(
            AuditFinding(
                f"pair {pair}", bound, study.claimed_mu, bound > study.claimed_mu, "measured μ at least; claimed"
            )
        )
    scaled = np.concatenate(residuals) / study.claimed_noise_std
    findings += [
        spectral_finding("queries", np.moveaxis(scaled, 1, 0).reshape(scaled.shape[1], -1)),
        spectral_finding("coordinates", np.moveaxis(scaled, 2, 0).reshape(scaled.shape[2], -1)),
        residual_finding(np.concatenate(residuals), study.claimed_noise_std),
    ]
    return AuditReport(study=study, runs=runs, confidence=confidence, findings=tuple(findings))


def mu_lower_bound(first: Float[np.ndarray, "runs"], second: Float[np.ndarray, "runs"], *, confidence: float) -> float:
    """Return a lower bound on μ from a statistic's values in two worlds, valid with the given confidence.

    The first half of the runs chooses the threshold that separates the worlds best. The second half gives the counts of
    false positives and false negatives, and a Clopper–Pearson upper bound on each rate at (1 − confidence)/2. The
    result is μ ≥ −Φ⁻¹(FPR) − Φ⁻¹(FNR), the μ-GDP trade-off, from the bounds FPR and FNR on these rates and the inverse
    Φ⁻¹ of the standard normal distribution function.

    Args:
        first: Float array of shape [runs]: the statistic in the first world, where it should be larger.
        second: Float array of shape [runs]: the statistic in the second world.
        confidence: From 0.5 to below 1.

    Returns:
        The bound; −∞ if the upper bound of a rate is 1.

    Raises:
        InvalidInput: If a world has fewer than two runs, or a value is not finite.
    """
    _check_confidence(confidence)
    half = min(first.size, second.size) // 2
    if half < 1:
        raise InvalidInput("runs", value=half, limit="at least two in each world")
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise InvalidInput("statistics of an audit", limit="finite numbers only")
    alpha = (1 - confidence) / 2
    thresholds = np.quantile(np.concatenate([first[:half], second[:half]]), np.linspace(0.02, 0.98, 97))
    guesses = _bounds(first[:half], second[:half], thresholds, alpha)
    best = np.median(thresholds[guesses == guesses.max()])
    return float(_bounds(first[half:], second[half:], np.array([best]), alpha)[0])


def spectral_finding(name: str, rows: Float[np.ndarray, "n samples"]) -> AuditFinding:
    """Test standardised noise by its smallest singular value: finds too little noise in any direction, or noise used
    twice.

    Let s_min be the smallest singular value of n rows with L samples each. The alarm is raised if s_min/√L < 1 − √(n/L)
    − √(2·log(1/α)/L). For independent standard normals this has probability at most α = 1e-5.

    Args:
        name: Meaning of the rows, for the finding's name.
        rows: Float array of shape [n, samples]; n rows of noise divided by its claimed standard
            deviation.

    Returns:
        The finding.

    Raises:
        InvalidInput: If a value is not finite.

    Source: Davidson & Szarek 2001, Theorem II.13.
    """
    if not np.isfinite(rows).all():  # a comparison with NaN would raise no alarm
        raise InvalidInput("noise under audit", limit="finite numbers only")
    n, samples = rows.shape
    smallest = sqrt(max(0.0, float(np.linalg.eigvalsh(rows @ rows.T / samples)[0])))
    limit = 1 - sqrt(n / samples) - sqrt(2 * log(1 / _NOISE_ALPHA) / samples)
    return AuditFinding.at_least(f"spectrum over {name}", smallest, limit, "least noise, divided by the claimed σ")


def residual_finding(noise: Float[np.ndarray, "..."], noise_std: float) -> AuditFinding:
    """Test noise by its Kolmogorov distance to the rounded Gaussian of the claimed σ: finds too little and too much
    noise.

    The distance is the largest over all half-integers k + ½ (k an integer), where the rounded Gaussian has exactly the
    distribution function Φ((k + ½)/σ), with the standard normal distribution function Φ. The alarm is raised if the
    distance of n values exceeds √(log(2/α)/2n), with α = 1e-5.

    Args:
        noise: Integer-valued float array of any shape: answers minus true sums, in grid steps of 2⁻¹⁶.
        noise_std: The claimed standard deviation σ of the noise, in grid steps of 2⁻¹⁶.

    Returns:
        The finding.

    Raises:
        InvalidInput: If σ is not a finite number above 0, or the noise is empty or not finite.

    Source: Massart 1990.
    """
    check_number("noise standard deviation", noise_std)
    if not noise.size or not np.isfinite(noise).all():
        raise InvalidInput("noise under audit", limit="finite numbers only, at least one")
    values, counts = np.unique(noise.ravel(), return_counts=True)
    empirical = np.cumsum(counts) / noise.size
    above = np.abs(empirical - stats.norm.cdf((values + 0.5) / noise_std)).max()
    below = np.abs(empirical - counts / noise.size - stats.norm.cdf((values - 0.5) / noise_std)).max()
    distance = float(max(above, below))
    limit = sqrt(log(2 / _NOISE_ALPHA) / 2 / noise.size)
    return AuditFinding.at_most("noise distribution", distance, limit, "distance from the claimed noise")


def _check_confidence(confidence: float) -> None:
    if not isinstance(confidence, float) or not 0.5 <= confidence < 1:
        raise InvalidInput("confidence", value=confidence, limit="0.5 to below 1")


def _filter_finding(study: StudyUnderAudit, serve: Service) -> AuditFinding:
    """Test the budget filter: the service must answer all planned queries, and must refuse one more."""
    codes = _codes(study, "constant", 1)
    if (answered := len(serve(codes))) != study.queries:
        raise InvalidInput(
            "answers of the audited service", value=answered, limit=f"one for each of {study.queries} queries"
        )
    try:
        answered = len(serve([*codes, codes[-1]]))
    except BudgetExceeded:
        answered = study.queries
    return AuditFinding.at_most("budget filter", answered, study.queries, "queries answered from one budget")


def _direction(study: StudyUnderAudit, pair: str) -> Float[np.ndarray, "n l"]:
    """Return the Neyman–Pearson direction: the difference of the two worlds' means, scaled to unit length for each
    query.
    """
    sign = [float(_sign(pair, n)) for n in range(study.queries)]
    direction: Float[np.ndarray, "n l"] = np.outer(sign, _unit_vector(study))
    return direction


def _codes(study: StudyUnderAudit, pair: str, world: int) -> list[list[Code]]:
    """Return the codes that the sites send in each query. Only the audited unit differs between the two worlds."""
    bound = radius_int(study.radius)
    reach = 10.0 if pair == "tenfold" else 1.0
    moved = study.voters_per_site if study.protection.unit is Unit.HOSPITAL else 1
    u = _unit_vector(study)
    still = quantise(0.5 * study.radius * np.roll(u, 1) * np.resize([1.0, -1.0], study.dimension), radius_int=bound)
    result = []
    for n in range(study.queries):
        absent = world < 0 and study.protection.relation is Relation.ZERO_OUT
        target = np.zeros(study.dimension) if absent else world * _sign(pair, n) * reach * study.radius * u
        voter = quantise(target, radius_int=bound)
        others = study.hospitals - 1
        result.append([voter * moved, *[still] * others])
    return result


def _sign(pair: str, query: int) -> int:
    return -1 if pair == "alternating" and query % 2 else 1


def _unit_vector(study: StudyUnderAudit) -> Float[np.ndarray, "l"]:
    return np.full(study.dimension, 1 / sqrt(study.dimension))


def _bounds(
    first: Float[np.ndarray, "runs"],
    second: Float[np.ndarray, "runs"],
    thresholds: Float[np.ndarray, "t"],
    alpha: float,
) -> Float[np.ndarray, "t"]:
    missed = (first[:, None] <= thresholds).sum(axis=0)
    false = (second[:, None] > thresholds).sum(axis=0)
    rates = _upper_rate(missed, first.size, alpha), _upper_rate(false, second.size, alpha)
    bounds: Float[np.ndarray, "t"] = -stats.norm.ppf(rates[0]) - stats.norm.ppf(rates[1])
    return bounds


def _upper_rate(count: Int64[np.ndarray, "t"], of: int, alpha: float) -> Float[np.ndarray, "t"]:
    """Return the Clopper–Pearson upper confidence bound on a rate, which is 1 if every trial counted."""
    rate = stats.beta.ppf(1 - alpha, count + 1, np.maximum(of - count, 0.5))
    return np.where(count == of, 1.0, rate)
