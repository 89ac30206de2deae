"""Plans a privacy budget before any of it is spent: noise, information, expected error, and a verdict in words.

`consilium plan` and the dashboard call it. Everything is computed from public numbers: the study's settings, the number
of hospitals and, if given, the spectrum of a codec fitted on public data. A spectrum that is not finite, non-negative
and of the code's length is refused.

The verdict depends on the largest share of a code's variance that an answer can explain. An answer carries at most b =
l/2 · log₂(1 + P/(l·σ²)) bits about the codes (Gaussian channel capacity). Here l is the length of a code and σ the
standard deviation of the noise on the sum. P = (K·m·R)² is the largest power of the sum, with K hospitals of m voters
each and the clipping norm R. No decoder can bring the mean squared error of a Gaussian source below the rate–distortion
function D(b) (Cover & Thomas 2006, Theorems 9.1.1 and 10.3.3). Therefore 1 − D(b)/Σλ is an upper bound, with the
variances λ of the code along its principal directions. The thresholds on it are:

* ``prior``        below 25 %, or under one bit an answer: pseudo-labels mostly show the public prior;
* ``weak``         25 % to 60 %: only coarse features of the codes can be recovered;
* ``informative``  60 % or more: the noise does not prevent a gain. A gain is not assured, since this is an upper bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor, log, log1p, sqrt

import numpy as np
from numpy.typing import NDArray

from common.canonical import check_integer, rational
from common.codecs.pca import water_fill
from common.errors import InvalidInput
from common.privacy.accounting import Guarantee, epsilon_by, epsilon_rdp_library, guarantee, max_mu_squared
from common.privacy.calibration import calibrate, noise_multiplier, queries_left
from common.privacy.checks import check_number
from common.privacy.consent import guess_right_at_most, guess_sentence
from common.privacy.figures import epsilon_text, percent_text
from common.privacy.mechanism import (
    HONEST_SITES,
    AccountantName,
    Budget,
    Mechanism,
    Protection,
    Relation,
    Unit,
    radius_int,
)
from common.privacy.shares import share_std
from common.wording import many

PRIOR_BELOW = 0.25
INFORMATIVE_FROM = 0.60
MIN_BITS_PER_QUERY = 1.0
MAX_HOSPITALS = 10_000
MAX_SPECTRUM = 1e200
"""Largest sum of a spectrum, so that its product with the largest noise variance is finite."""


class PlanVerdict(StrEnum):
    """Verdict on a plan: how much the noisy answers can tell at best. The module's docstring defines the values."""

    PRIOR = "prior"
    WEAK = "weak"
    INFORMATIVE = "informative"


@dataclass(frozen=True, slots=True)
class SpectrumErrors:
    """Expected squared error of the mean code.

    It follows from a public spectrum (eigenvalues λ of the code's covariance) and the noise variance s² on each
    coordinate.

    Attributes:
        total: Σλ, the error if the public mean is used in place of an answer.
        hard_threshold: Σ min(λ, s²): eq (7) of Fay et al. 2021 for the best number l of coordinates.
        kept: Number of coordinates that hard thresholding keeps: those with λ > s².
        wiener: Error if each coordinate is multiplied by λ/(λ + s²).
        water_filled: Error if the squared clipping norm C² is first spread over the coordinates by water-filling.
    """

    total: float
    hard_threshold: float
    kept: int
    wiener: float
    water_filled: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The noise, guarantees and expected information of a planned study. Norms are in code units.

    Attributes:
        budget: ε and δ of the study.
        accountant: The accountant that decides.
        protection: Unit and relation.
        queries: Number N of planned releases.
        hospitals: Number K of hospitals that answer.
        mechanism: Noise of one release. ``noise_std`` is its standard deviation on the integer sum,
            ``noise_per_coordinate`` that of the same noise on the mean of all voters' codes.
        radius: Clipping norm C, which is the largest norm of a code (``code_norm``).
        guarantees: The guarantee by every accountant.
        known_twice: The guarantee for a person who is a patient at two hospitals, whom no ε in ``guarantees`` covers;
            None if this ε is larger than the accountants can compute.
        library_rdp_epsilon: ε by Rényi DP with the default orders of the dp-accounting library.
        queries_left: Number of further releases that a pool's budget covers.
        spectrum: Eigenvalues of the code's covariance, from which the verdict was computed.
        errors: Expected errors of decoded codes; None if the spectrum is unknown.
        spare_draws: In a sealed sum, number of extra charges budgeted for sums that are lost and repeated.

    >>> patient, budget = c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE), c.Budget(epsilon=8.0, delta=1e-5)
    >>> planned = c.plan(
    ...     budget=budget,
    ...     accountant=c.AccountantName.EXACT,
    ...     protection=patient,
    ...     queries=4,
    ...     hospitals=8,
    ...     voters_per_site=5,
    ...     radius=1.0,
    ...     dimension=64,
    ... )
    >>> print(planned.known_twice)
    ε = 19.13 (exact) at δ = 1e-05, unit patient, relation replace-one, 2 units together
    """

    budget: Budget
    accountant: AccountantName
    protection: Protection
    queries: int
    hospitals: int
    mechanism: Mechanism
    radius: float
    guarantees: tuple[Guarantee, ...]
    known_twice: Guarantee | None
    library_rdp_epsilon: float
    queries_left: int
    spectrum: tuple[float, ...]
    errors: SpectrumErrors | None
    spare_draws: int = 0

    @property
    def noise_overhead(self) -> float:
        """Standard deviation of the noise in the sum, divided by that of the noise that counts for privacy.

        In a sealed sum of K sites it is √(K/(K − t)), because up to t colluding sites know their own shares of the
        noise. Otherwise it is 1.
        """
        return self.mechanism.noise_in_sum(self.hospitals) / float(self.noise_std)

    @property
    def smallest_roster(self) -> int | None:
        """Smallest number of sites in a sealed sum: the colluders and two more. None if the server adds the noise."""
        return None if self.mechanism.colluders is None else self.mechanism.colluders + HONEST_SITES

    @property
    def noise_std(self) -> Fraction:
        """Standard deviation σ of the noise on the integer sum, in grid steps of 2⁻¹⁶."""
        return self.mechanism.noise_std

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier z: the noise's standard deviation divided by the ℓ2 sensitivity."""
        return noise_multiplier(self.mechanism, self.protection)

    @property
    def noise_per_coordinate(self) -> float:
        """Standard deviation of the noise on the mean of all codes, in code units."""
        return self.mechanism.mean_noise_std(voters=self.voters)

    @property
    def power_ratio(self) -> float:
        """Largest power of the sum, (hospitals · voters of each · clipping norm)², divided by the noise variance."""
        noise_of_sum = self.noise_std**2 * Fraction(self.hospitals, self.hospitals - (self.mechanism.colluders or 0))
        return float(Fraction(self.hospitals * self.mechanism.site_radius_int) ** 2 / noise_of_sum)

    @property
    def ceiling_bits(self) -> float:
        """Upper bound on the bits that all answers together carry about the codes, for codes of any length."""
        return self.queries * self.power_ratio / 2 / log(2)

    @property
    def bits_per_query(self) -> float:
        """Upper bound on the bits that one answer carries about the codes."""
        return capacity_bits(self.power_ratio, self.mechanism.dimension)

    @property
    def explained_at_most(self) -> float:
        """Upper bound on the share of a code's variance that one answer can explain."""
        return explained_at_most(self.bits_per_query, self.spectrum)

    @property
    def verdict(self) -> PlanVerdict:
        """The verdict; the module's docstring defines the three possible ones."""
        return verdict_of(self.bits_per_query, self.explained_at_most)

    @property
    def code_norm(self) -> float:
        """Largest norm of a code, the clipping norm C."""
        return self.radius

    @property
    def noise_norm(self) -> float:
        """Approximate norm of the noise on the mean code: √(length of a code) times ``noise_per_coordinate``."""
        return self.noise_per_coordinate * sqrt(self.mechanism.dimension)

    @property
    def voters(self) -> int:
        """Number of voters at all hospitals together."""
        return self.hospitals * self.mechanism.voters_per_site

    @property
    def summary(self) -> str:
        """One sentence that says whether the answers can be informative, with the numbers behind it."""
        share = (
            f"{many(self.queries, 'answer')} with at most {self.bits_per_query:.2g} bits each about the codes, which "
            f"explain at most {percent_text(self.explained_at_most)} of the codes' variance"
        )
        return {
            PlanVerdict.PRIOR: f"The labels will mostly reflect the public shapes, not the hospitals' data: {share}.",
            PlanVerdict.WEAK: f"Weak: {share}.",
            PlanVerdict.INFORMATIVE: f"Informative: {share}.",
        }[self.verdict]

    @property
    def advice(self) -> tuple[str, ...]:
        """Lines that each name one change that would make the plan informative; empty if it is informative already.

        The numbers in them follow from :attr:`power_ratio` = K(K − t)·(m·R/Δ)²·Σμ²/N, for N releases of K hospitals
        with m voters each, t colluders, clipping norm R and sensitivity Δ. The last change, a shorter code, has no
        number.
        """
        if self.verdict is PlanVerdict.INFORMATIVE:
            return ()
        queries, voters_per_site = self.queries, self.mechanism.voters_per_site
        factor = _least_power_ratio(self.spectrum) / self.power_ratio
        hospitals, colluders, spare = self.hospitals, self.mechanism.colluders or 0, self.spare_draws
        half = colluders / 2
        more = max(hospitals + 1, ceil(half + sqrt(half**2 + factor * hospitals * (hospitals - colluders))))
        lines = [f"hospitals: {more} instead of {hospitals}"]
        if (fewer := min(queries - 1, floor((queries + spare) / factor) - spare)) >= 1:
            lines.append(f"queries: {fewer} instead of {queries}")
        share = 1 if self.protection.unit is Unit.HOSPITAL else voters_per_site
        voters = ceil(share * sqrt(factor * (4 if self.protection.relation is Relation.ZERO_OUT else 1)))
        if self.protection.unit is Unit.PATIENT:
            lines.append(f"voters a site: {voters} teachers on disjoint patients instead of {voters_per_site}")
        else:
            lines.append(
                f"another guarantee: unit patient with {voters} teachers a site on disjoint patients; "
                "it protects one patient, no longer a whole hospital"
            )
        larger = float(max_mu_squared(self.accountant, self.budget)) * factor
        if larger < 1e4:
            epsilon = epsilon_by(str(self.accountant), larger, self.budget.analytic_delta)
            now, then = epsilon_text(self.budget.epsilon), epsilon_text(epsilon, 3)
            if epsilon < 1000 and float(then) > float(now):
                lines.append(f"budget: ε = {then} instead of {now}, at the same δ")
        lines.append("a shorter code: the same number of bits then describes fewer coordinates")
        return tuple(lines)

    @property
    def guess_right_at_most(self) -> float:
        """Upper bound on the probability of guessing right about one unit's data once the whole budget is spent.

        See :mod:`common.privacy.consent`.
        """
        return guess_right_at_most(max_mu_squared(self.accountant, self.budget))

    @property
    def in_words(self) -> str:
        """:attr:`guess_right_at_most` as a sentence."""
        limit = max_mu_squared(self.accountant, self.budget)
        return guess_sentence(self.protection, limit, colluders=self.mechanism.colluders)

    @property
    def accountant_note(self) -> str:
        """Explanation of why the accountants report different ε for the same noise."""
        by = {g.accountant: epsilon_text(g.epsilon) for g in self.guarantees}
        return (
            f"The same mechanism has several upper bounds on ε. The exact curve gives ε = {by['exact']}. Rényi DP "
            f"keeps only moments of the privacy loss, and converting them loses a little: it gives {by['rdp']} at its "
            f"best order ({epsilon_text(self.library_rdp_epsilon)} with dp-accounting's own grid of orders). Eq (14) "
            f"of Fay et al. 2021 gives {by['paper']}. The accountant {self.accountant} decides: noise is calibrated "
            "for it, and it alone stops the study."
        )

    def to_json(self) -> dict[str, object]:
        """Return the plan as plain JSON. Floats are shortest round-trip numbers. Noise is also an exact rational."""
        return {
            "accountant": str(self.accountant),
            "accountant_note": self.accountant_note,
            "advice": list(self.advice),
            "bits_per_query": self.bits_per_query,
            "budget": {"delta": self.budget.delta, "epsilon": self.budget.epsilon},
            "ceiling_bits": self.ceiling_bits,
            "code_norm": self.code_norm,
            "dimension": self.mechanism.dimension,
            "errors": None if self.errors is None else asdict(self.errors),
            "explained_at_most": self.explained_at_most,
            "guarantees": [g.to_json() for g in self.guarantees],
            "guess_right_at_most": self.guess_right_at_most,
            "in_words": self.in_words,
            "hospitals": self.hospitals,
            "known_twice": None if self.known_twice is None else self.known_twice.to_json(),
            "library_rdp_epsilon": self.library_rdp_epsilon,
            "noise_multiplier": self.noise_multiplier,
            "noise_norm": self.noise_norm,
            "noise_per_coordinate": self.noise_per_coordinate,
            "noise_std": rational(self.noise_std),
            "queries": self.queries,
            "queries_left": self.queries_left,
            "radius": self.radius,
            "relation": str(self.protection.relation),
            "summary": self.summary,
            "unit": str(self.protection.unit),
            "verdict": str(self.verdict),
            "voters_per_site": self.mechanism.voters_per_site,
            **({} if self.mechanism.colluders is None else {"sealed_sum": self._sealed_json()}),
        }

    def _sealed_json(self) -> dict[str, object]:
        return {
            "colluders": self.mechanism.colluders,
            "noise_overhead": self.noise_overhead,
            "smallest_roster": self.smallest_roster,
            "spare_draws": self.spare_draws,
        }


def plan(
    *,
    budget: Budget,
    accountant: AccountantName,
    protection: Protection,
    queries: int,
    hospitals: int,
    voters_per_site: int,
    radius: float,
    dimension: int,
    spectrum: Sequence[float] | None = None,
    spent: Fraction = Fraction(0),
    colluders: int | None = None,
    spare_draws: int = 0,
) -> Plan:
    """Compute the noise, guarantees and expected information of a planned study. Nothing is charged.

    Guarantee: the verdict never gets worse with more hospitals, a larger limit on Σμ², or fewer queries.

    Args:
        budget: ε and δ of the study.
        accountant: The accountant that decides.
        protection: Unit and relation.
        queries: Number N of planned releases.
        hospitals: Number K of hospitals that answer.
        voters_per_site: Number m of voters of each hospital.
        radius: Clipping norm C.
        dimension: Length l of a code.
        spectrum: The l public eigenvalues of the code's covariance, in squared code units; without it all coordinates
            count as equally uncertain.
        spent: Σμ² that the pool has already spent.
        colluders: Sites t that may collude with the server in a sealed sum, whose noise is drawn at the sites; None in
            an open study.
        spare_draws: In a sealed sum, the number of extra charges budgeted for sums that are lost and repeated.

    Returns:
        The plan with its guarantees, noise, expected errors and verdict.

    Raises:
        InvalidInput: If an argument is outside its range, NaN or infinite.

    >>> patient, budget = c.Protection(c.Unit.PATIENT, c.Relation.REPLACE_ONE), c.Budget(epsilon=8.0, delta=1e-5)
    >>> planned = c.plan(
    ...     budget=budget,
    ...     accountant=c.AccountantName.EXACT,
    ...     protection=patient,
    ...     queries=4,
    ...     hospitals=8,
    ...     voters_per_site=5,
    ...     radius=1.0,
    ...     dimension=64,
    ... )
    >>> str(planned.verdict), round(planned.noise_per_coordinate, 3)
    ('informative', 0.06)
    """
    check_integer("hospitals", hospitals, least=1, most=MAX_HOSPITALS, limit=f"an integer from 1 to {MAX_HOSPITALS}")
    if colluders is None and spare_draws != 0:
        raise InvalidInput("spare draws", value=spare_draws, limit="0, unless the study has a sealed sum (colluders)")
    bound = radius_int(radius)
    noise_std = calibrate(
        budget=budget,
        accountant=accountant,
        queries=check_integer("planned queries", queries, least=1) + check_integer("spare draws", spare_draws, least=0),
        radius_int=bound,
        voters_per_site=voters_per_site,
        protection=protection,
    )
    mechanism = Mechanism(dimension, bound, voters_per_site, noise_std, colluders=colluders)
    if colluders is not None:
        share_std(mechanism, sites=hospitals)  # raises if the roster is too small to hide a site
    shape = _checked_spectrum(spectrum, dimension)
    total = (queries + spare_draws) * mechanism.mu_squared(protection)
    limit = max_mu_squared(accountant, budget)
    noise = mechanism.mean_noise_std(voters=hospitals * voters_per_site)
    return Plan(
        budget=budget,
        accountant=AccountantName(accountant),
        protection=protection,
        queries=queries,
        hospitals=hospitals,
        mechanism=mechanism,
        radius=radius,
        guarantees=tuple(guarantee(total, budget, protection, name) for name in AccountantName),
        known_twice=_known_twice(total, budget, protection, accountant),
        library_rdp_epsilon=epsilon_rdp_library(total, budget.analytic_delta),
        queries_left=queries_left(mechanism, protection=protection, spent=spent, limit=limit),
        spectrum=tuple(shape),
        errors=None if spectrum is None else spectrum_errors(shape, noise_variance=noise**2, power=radius**2),
        spare_draws=spare_draws,
    )


def capacity_bits(power_ratio: float, dimension: int) -> float:
    """Return an upper bound, in bits, on what one answer tells about the codes: l/2 · log₂(1 + P/(l·σ²)).

    P is the largest power of the sum of the codes and σ² the variance of the noise. The bound is at most P/(2σ²·ln 2),
    which it approaches as l grows. Source: Cover & Thomas 2006, Theorem 9.1.1.

    Args:
        power_ratio: P/σ², above 0.
        dimension: Length l of a code.

    Returns:
        The capacity in bits.

    Raises:
        InvalidInput: If an argument is outside its range.

    >>> round(capacity_bits(3.0, 1), 6)
    1.0
    """
    check_number("power ratio", power_ratio)
    check_integer("length of a code", dimension, least=1)
    return dimension / 2 * log1p(power_ratio / dimension) / log(2)


def explained_at_most(bits: float, spectrum: Sequence[float]) -> float:
    """Return the largest share of a Gaussian code's variance that ``bits`` bits can explain.

    It is 1 − D/Σλ, with the least error D that b bits allow. Reverse water-filling gives D = Σ min(λ, θ) for the level
    θ at which Σ max(0, ½·log₂(λ/θ)) = b. Zero eigenvalues carry nothing. Source: Cover & Thomas 2006, Theorem 10.3.3.

    Args:
        bits: Number b of bits, above 0.
        spectrum: Eigenvalues λ ≥ 0 of the code's covariance, not all 0.

    Returns:
        The share, from 0 to 1.

    Raises:
        InvalidInput: If an argument is outside its range.

    >>> round(explained_at_most(1.0, [1.0]), 6)
    0.75
    """
    check_number("bits", bits)
    return _explained(bits, _falling(_checked_spectrum(spectrum, len(spectrum))))


def _falling(spectrum: Sequence[float]) -> NDArray[np.float64]:
    """Return the eigenvalues above 0, the largest first."""
    values = np.asarray(spectrum, dtype=np.float64)
    return np.sort(values[values > 0])[::-1]


def _explained(bits: float, values: NDArray[np.float64]) -> float:
    """Return :func:`explained_at_most` for falling eigenvalues above 0."""
    counts = np.arange(1, len(values) + 1)
    # the water levels if only the first ``counts`` coordinates are coded
    levels = 2 ** ((np.cumsum(np.log2(values)) - 2 * bits) / counts)
    theta = levels[np.argmax(levels >= np.append(values[1:], 0.0))]  # the first that no later eigenvalue exceeds
    return max(0.0, float(1 - np.minimum(values, theta).sum() / values.sum()))


def verdict_of(bits: float, explained: float) -> PlanVerdict:
    """Return the verdict on a plan by the thresholds in the module's docstring.

    Args:
        bits: Largest number of bits that an answer carries.
        explained: Largest share of the codes' variance that an answer can explain.

    Returns:
        The verdict.

    Raises:
        InvalidInput: If a value is negative, NaN or infinite.

    >>> str(verdict_of(bits=8.0, explained=0.3))
    'weak'
    """
    for what, value in (("bits an answer", bits), ("explained share", explained)):
        check_number(what, value, zero=True)
    if bits < MIN_BITS_PER_QUERY or explained < PRIOR_BELOW:
        return PlanVerdict.PRIOR
    return PlanVerdict.INFORMATIVE if explained >= INFORMATIVE_FROM else PlanVerdict.WEAK


def spectrum_errors(spectrum: Sequence[float], *, noise_variance: float, power: float) -> SpectrumErrors:
    """Return the expected squared errors of decoded codes for three methods of decoding, without the error of clipping.

    Water-filling gives coordinate i, of variance λ_i, the signal power p_i = max(0, √(λ_i·s²/ν) − s²), where s² is the
    noise variance and the water level ν is chosen so that Σp = C². The error that remains is λ_i·s²/(p_i + s²). Hard
    thresholding and Wiener shrinkage take the codes unchanged, p = λ. If no λ exceeds s², hard thresholding keeps no
    coordinate. Source: Fay et al. 2021, eq (7); Cover & Thomas 2006, §9.4.

    Args:
        spectrum: Eigenvalues λ ≥ 0 of the code's covariance, not all 0.
        noise_variance: Noise variance s² on each coordinate, above 0.
        power: Squared clipping norm C², above 0.

    Returns:
        The errors (:class:`SpectrumErrors`).

    Raises:
        InvalidInput: If an argument is outside its range.
    """
    noise = check_number("noise variance", noise_variance)
    budget = check_number("power", power)
    values = [v for v in _checked_spectrum(spectrum, len(spectrum)) if v > 0]
    ordered = sorted(values, reverse=True)
    powers = water_fill(np.array(ordered), noise_std=sqrt(noise), power=budget)
    return SpectrumErrors(
        total=sum(values),
        hard_threshold=sum(min(v, noise) for v in values),
        kept=sum(v > noise for v in values),
        wiener=sum(v * (noise / (v + noise)) for v in values),
        water_filled=sum(v * noise / (p + noise) for v, p in zip(ordered, powers.tolist(), strict=True)),
    )


def _known_twice(
    total: Fraction, budget: Budget, protection: Protection, accountant: AccountantName
) -> Guarantee | None:
    try:
        return guarantee(total, budget, protection, accountant, group=2)
    except InvalidInput:  # ε for two units is larger than the accountants compute
        return None


def _informs(power_ratio: float, dimension: int, values: NDArray[np.float64]) -> bool:
    bits = capacity_bits(power_ratio, dimension)
    return verdict_of(bits, _explained(bits, values)) is PlanVerdict.INFORMATIVE


@lru_cache(maxsize=256)
def _least_power_ratio(spectrum: tuple[float, ...]) -> float:
    """Return the smallest ratio of the sum's power to the noise variance with which an answer is informative."""
    values, low, high = _falling(spectrum), 1e-12, 1e12
    for _ in range(64):  # as fine as a double
        middle = sqrt(low * high)
        low, high = (low, middle) if _informs(middle, len(spectrum), values) else (middle, high)
    return high


def _checked_spectrum(spectrum: Sequence[float] | None, dimension: int) -> list[float]:
    if spectrum is None:
        return [1.0] * dimension
    if not isinstance(spectrum, list | tuple | np.ndarray) or np.ndim(spectrum) != 1:
        raise InvalidInput("spectrum", value=type(spectrum).__name__, limit="a list of numbers")
    values = [float(check_number("eigenvalue of the spectrum", v, zero=True)) for v in spectrum]
    if len(values) != dimension or not 0 < sum(values) <= MAX_SPECTRUM:
        raise InvalidInput(
            "spectrum",
            value=f"{len(values)} numbers",
            limit=f"{dimension} finite numbers, 0 or above, not all of them 0, with a sum of at most {MAX_SPECTRUM:g}",
        )
    return values
