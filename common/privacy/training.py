"""Computes the ε that a differentially private training spends, and the noise that a planned training needs.

Called by sites before they train and for every statement about their trainings. A training is a sequence of noisy sums
over samples of patients, with every patient's part clipped to one norm. It may include a few Gaussian releases of other
statistics, such as a private PCA. The unit is the patient. The ledger stores the facts (:class:`TrainingEvent`), and ε
is computed from them under either relation.

``poisson``          Every patient joins every step with the same probability, independently. Accounted by
                     dp-accounting's privacy loss distributions, discretised pessimistically, in both directions of
                     add-remove.
``fixed-partition``  Patients are divided once, independently of their data, into disjoint batches that are used in
                     turn. A patient is in one batch of each pass, so E passes are E Gaussian mechanisms without
                     amplification: μ = √E / z (Dong, Roth & Su 2022, Corollary 3.3). The ε of Poisson sampling would
                     understate the cost of such batches several times.

Under ``add-remove`` one patient changes a sum by at most the clipping norm, under ``replace-one`` by twice that. The
noise multiplier z (the noise's standard deviation over the clipping norm) is stated for add-remove, and every
accountant here halves it for replace-one.

Refuses NaN, infinite, zero and negative parameters before they reach dp-accounting, which answers ε = 0 for a NaN
multiplier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import ceil, log, log1p, log10
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from common.canonical import check_integer, member
from common.document import Document
from common.errors import InvalidInput
from common.privacy.accounting import epsilon_exact
from common.privacy.checks import AS_FRACTION, check_delta, check_kind, check_number
from common.privacy.figures import delta_text, epsilon_text
from common.privacy.mechanism import Unit

MAX_STEPS = 1_000_000
MIN_MULTIPLIER, MAX_MULTIPLIER = Fraction(1, 16), Fraction(10_000)
_DIGITS = 4  # significant digits of a planned noise multiplier
_FINE, _ROUGH = 1e-4, 2e-3  # grids of the privacy losses: for every stated ε, and for the search
_POINTS = 1 << 25  # most points of a grid: 2 GiB in the library
_FEW = 64  # added to the steps in the bound on the library's rounding, for events of few steps


class Sampling(StrEnum):
    """The choice of patients in a training step: independently (``poisson``), or by batches of a ``fixed-partition``.

    >>> [str(way) for way in c.Sampling]
    ['poisson', 'fixed-partition']
    """

    POISSON = "poisson"
    FIXED_PARTITION = "fixed-partition"


class Neighbours(StrEnum):
    """The neighbouring relation of a training: one patient added or removed, or one patient replaced by another.

    >>> [str(relation) for relation in c.Neighbours]
    ['add-remove', 'replace-one']
    """

    ADD_REMOVE = "add-remove"
    REPLACE_ONE = "replace-one"


@dataclass(frozen=True, slots=True)
class TrainingEvent(Document):
    """The privacy facts of a training, from which any accountant can compute its cost; the unit is the patient.

    Attributes:
        sampling: How the patients of a step are chosen.
        rate: Sampling rate q: the probability of Poisson sampling, or one over the number of fixed batches.
        noise_multiplier: Noise multiplier z, from 1/16 to 10000: the noise's standard deviation divided by the norm
            bound of one patient's part of a sum.
        steps: Number of noisy sums. An event with zero steps and no release costs nothing.
        releases: Noise multipliers of further Gaussian releases, each over all patients.

    Raises:
        InvalidInput: If a value is outside its range.

    >>> c.TrainingEvent(c.Sampling.POISSON, Fraction(1, 10), Fraction(2), 100).noise_multiplier
    Fraction(2, 1)
    """

    STATED: ClassVar = {"kind": "training", "unit": str(Unit.PATIENT)}

    sampling: Sampling
    rate: Fraction
    noise_multiplier: Fraction
    steps: int
    releases: tuple[Fraction, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "sampling", member(Sampling, self.sampling, what="sampling"))
        if not isinstance(self.releases, list | tuple):
            raise InvalidInput("further releases of a training", value=type(self.releases).__name__, limit="a list")
        object.__setattr__(self, "releases", tuple(self.releases))
        if not isinstance(self.rate, Fraction) or not 0 < self.rate <= 1:
            raise InvalidInput(
                "sampling rate q",
                value=self.rate,
                limit="a rational above 0, at most 1",
                remedy="" if isinstance(self.rate, Fraction) else AS_FRACTION,
            )
        if self.sampling is Sampling.FIXED_PARTITION and self.rate.numerator != 1:
            raise InvalidInput("rate of a fixed partition", value=self.rate, limit="1/n for n batches, such as 1/4")
        for value in (self.noise_multiplier, *self.releases):
            if not isinstance(value, Fraction) or not MIN_MULTIPLIER <= value <= MAX_MULTIPLIER:
                raise InvalidInput("noise multiplier", value=value, limit="a rational from 1/16 to 10000")
        check_integer("training steps", self.steps, least=0, most=MAX_STEPS, limit=f"an integer from 0 to {MAX_STEPS}")

    @property
    def passes(self) -> int:
        """The largest number of batches of a fixed partition that any patient was in: ⌈steps · rate⌉."""
        return ceil(self.steps * self.rate)


@dataclass(frozen=True, slots=True)
class TrainingGuarantee:
    """The patient-level ε of a site's training together with its δ and relation, so that it is never printed alone.

    Attributes:
        epsilon: ε of the training.
        delta: δ, above 0 and below 1.
        neighbours: The training's neighbouring relation.

    Raises:
        InvalidInput: For a relation that trainings do not have, such as ``zero-out``.
    """

    epsilon: float
    delta: float
    neighbours: Neighbours

    def __post_init__(self) -> None:
        relation = member(Neighbours, self.neighbours, what="relation of a training")
        object.__setattr__(self, "neighbours", relation)

    def __str__(self) -> str:
        words = f"unit {Unit.PATIENT}, relation {self.neighbours} (training)"
        return f"ε = {epsilon_text(self.epsilon)} at δ = {delta_text(self.delta)}, {words}"

    def to_json(self) -> dict[str, object]:
        """Return the guarantee as plain JSON: ``delta``, ``epsilon``, ``relation`` and ``unit``."""
        return {
            "delta": self.delta,
            "epsilon": self.epsilon,
            "relation": str(self.neighbours),
            "unit": str(Unit.PATIENT),
        }


def epsilon_of(event: TrainingEvent, *, delta: float, neighbours: Neighbours) -> float:
    """Return the ε that a training spent at δ.

    Poisson sampling gives an upper bound within about 1e-3 of the true curve for up to 10⁴ steps (pessimistic
    discretisation at 1e-4). The library's float64 convolution of T steps changes δ by less than T·2⁻⁵³, as measured
    against another algorithm. So ε is computed for the smaller δ − (T + 64)·2⁻⁵¹, unless the difference is at most a
    millionth of δ. If this δ is not above 0, or the grid would not fit in memory, the returned ε is that of the same
    steps without sampling. Sampling never makes ε larger.

    A fixed partition gives the exact Gaussian curve at μ² = E/z² + Σ1/zᵢ², and at four times that for replace-one. Here
    E is the number of :attr:`~TrainingEvent.passes`, and zᵢ are the noise multipliers of the further releases. For
    replace-one with Poisson sampling at rate q the two output distributions are (1−q)N(0)+qN(+1) and (1−q)N(0)+qN(−1),
    where N(x) is the normal distribution with mean x and standard deviation z. They are compared directly, because
    composing two add-remove steps would not give this pair.

    Args:
        event: The training.
        delta: δ, above 0 and below 1.
        neighbours: The neighbouring relation.

    Returns:
        ε; 0 for an event without a step or release.

    Raises:
        InvalidInput: If δ is outside its range.

    Source: Zhu, Dong & Wang 2022; Koskela et al. 2020; Doroshenko et al. 2022.

    >>> event = c.TrainingEvent(c.Sampling.FIXED_PARTITION, Fraction(1, 4), Fraction(4), 40)
    >>> round(c.epsilon_of(event, delta=1e-5, neighbours=c.Neighbours.ADD_REMOVE), 3)
    3.341
    """
    return epsilon_of_all((event,), delta=delta, neighbours=neighbours)


def epsilon_of_all(events: tuple[TrainingEvent, ...], *, delta: float, neighbours: Neighbours) -> float:
    """Return the ε of several trainings on the same patients, composed.

    Args:
        events: The trainings.
        delta: δ, above 0 and below 1.
        neighbours: The neighbouring relation.

    Returns:
        ε; 0 without a training.

    Raises:
        InvalidInput: If δ is outside its range.
    """
    check_delta("delta", delta)
    for event in events:
        check_kind("training", event, TrainingEvent)
    return _epsilon(tuple(events), delta, _relation(neighbours))


def _relation(neighbours: Neighbours | str) -> Neighbours:
    return member(Neighbours, neighbours, what="neighbouring relation of a training")


def guarantee_of(event: TrainingEvent, *, delta: float, neighbours: Neighbours) -> TrainingGuarantee:
    """Return the ε of a training together with its δ and relation.

    Args:
        event: The training's privacy facts.
        delta: δ, above 0 and below 1.
        neighbours: The relation.

    Returns:
        The guarantee, with ε from :func:`epsilon_of`.

    Raises:
        InvalidInput: If δ or the relation is invalid.
    """
    return TrainingGuarantee(epsilon_of(event, delta=delta, neighbours=neighbours), delta, _relation(neighbours))


def plan_noise(
    *,
    epsilon: float,
    delta: float,
    rate: Fraction,
    steps: int,
    neighbours: Neighbours,
    sampling: Sampling = Sampling.POISSON,
    releases: tuple[Fraction, ...] = (),
) -> TrainingEvent:
    """Return the training with the smallest noise multiplier whose ε is at most ``epsilon``.

    The multiplier has four significant digits, rounded up. It is found by a search that calls the accountant for each
    multiplier it tries. The ε of the returned event is checked to be at most ``epsilon``.

    Args:
        epsilon: ε of the whole training, finite and above 0.
        delta: δ, above 0 and below 1.
        rate: Sampling rate q.
        steps: Number of steps, at least 1.
        neighbours: The neighbouring relation.
        sampling: How the patients of a step are chosen.
        releases: Noise multipliers of further releases, which the same ε pays for.

    Returns:
        The training's event.

    Raises:
        InvalidInput: If the further releases alone cost more than ``epsilon``, or no noise multiplier is large enough.

    >>> event = c.plan_noise(
    ...     epsilon=8.0,
    ...     delta=1e-5,
    ...     rate=Fraction(1, 4),
    ...     steps=40,
    ...     neighbours=c.Neighbours.REPLACE_ONE,
    ...     sampling=c.Sampling.FIXED_PARTITION,
    ... )
    >>> float(event.noise_multiplier)
    3.797
    """
    check_number("epsilon of a training", epsilon)
    check_integer("training steps", steps, least=1, most=MAX_STEPS, limit=f"an integer from 1 to {MAX_STEPS}")

    def event(multiplier: Fraction) -> TrainingEvent:
        return TrainingEvent(sampling, rate, multiplier, steps, releases)

    def cost(multiplier: Fraction) -> float:
        return epsilon_of(event(multiplier), delta=delta, neighbours=neighbours)

    def roughly(multiplier: Fraction) -> float:  # pessimistic too, and cheap where the noise is small
        return _epsilon((event(multiplier),), delta, _relation(neighbours), _ROUGH)

    others = TrainingEvent(sampling, rate, MAX_MULTIPLIER, 0, releases)
    if epsilon_of(others, delta=delta, neighbours=neighbours) > epsilon:
        raise InvalidInput(
            "the other releases alone exceed the planned epsilon; no noise multiplier is large enough",
            limit=f"epsilon {epsilon_text(epsilon)}",
            remedy="plan a larger epsilon, or give the other releases more noise",
        )
    start = _least(roughly, float(epsilon), high=Fraction(1), factor=Fraction(2))
    return event(_least(cost, float(epsilon), high=start, factor=Fraction(51, 50)))


def _least(cost: Callable[[Fraction], float], epsilon: float, *, high: Fraction, factor: Fraction) -> Fraction:
    """Return the smallest multiplier of ``_DIGITS`` digits whose cost is at most ε.

    ``cost`` is nearly a power law of the multiplier. The search brackets the root from ``high`` in steps of ``factor``,
    then narrows the bracket on the grid of multipliers. Each next point is interpolated in the logarithms, so few
    evaluations are needed.
    """
    of_high = cost(high)
    while of_high > epsilon:
        high *= factor
        if high > MAX_MULTIPLIER:
            raise InvalidInput(
                "no noise multiplier is large enough for the planned epsilon",
                limit=f"at most {MAX_MULTIPLIER}",
                remedy="plan a larger epsilon or delta, fewer steps, or a smaller sampling rate",
            )
        of_high = cost(high)
    low = max(high / factor, MIN_MULTIPLIER)
    while (of_low := cost(low)) <= epsilon:
        if low == MIN_MULTIPLIER:
            return MIN_MULTIPLIER
        high, of_high, low = low, of_low, max(low / factor, MIN_MULTIPLIER)
    step = Fraction(10) ** (ceil(log10(high)) - _DIGITS)
    below, above = int(low / step), ceil(high / step)  # below does not fit, above does
    of_below, of_above = of_low, of_high
    while above - below > 1:
        share = log(of_below / epsilon) / log(of_below / of_above) if of_above > 0 else 0.5
        guess = round(below * (above / below) ** share)
        for place in (guess, guess - 1):  # the two sides of the root, if the interpolation is right
            place = min(max(place, below + 1), above - 1)
            if below < place < above:
                value = cost(place * step)
                if value <= epsilon:
                    above, of_above = place, value
                else:
                    below, of_below = place, value
    return above * step


@lru_cache(maxsize=4096)
def _epsilon(events: tuple[TrainingEvent, ...], delta: float, neighbours: Neighbours, interval: float = _FINE) -> float:
    mu_squared = Fraction(0)
    poisson = []
    for event in events:
        mu_squared += sum((1 / value**2 for value in event.releases), start=Fraction(0))
        if event.sampling is Sampling.FIXED_PARTITION:
            mu_squared += event.passes / event.noise_multiplier**2
        elif event.steps:
            poisson.append(event)
    moved = 4 if neighbours is Neighbours.REPLACE_ONE else 1
    if not poisson:
        return 0.0 if mu_squared == 0 else epsilon_exact(moved * mu_squared, delta)
    rounding = (sum(event.steps for event in poisson) + _FEW) * 2.0**-51
    left = delta if rounding <= delta * 2.0**-20 else delta - rounding
    found = _by_losses(poisson, mu_squared, left, neighbours, interval) if left > 0 else None
    if found is None:
        unsampled = sum((event.steps / event.noise_multiplier**2 for event in poisson), start=mu_squared)
        return epsilon_exact(moved * unsampled, delta)
    return found


def _by_losses(
    poisson: list[TrainingEvent], mu_squared: Fraction, delta: float, neighbours: Neighbours, interval: float
) -> float | None:
    """Return ε from privacy loss distributions; None if their grid would have more than ``_POINTS`` points."""
    import dp_accounting  # importing takes a second, so it happens on first use
    from dp_accounting.pld import PLDAccountant

    relation = {
        Neighbours.ADD_REMOVE: dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
        Neighbours.REPLACE_ONE: dp_accounting.NeighboringRelation.REPLACE_ONE,
    }[neighbours]
    if sum(_range(event, neighbours) for event in poisson) > _POINTS * interval:
        return None
    accountant = PLDAccountant(
        relation, value_discretization_interval=interval
    )  # doubles a Gaussian's sensitivity itself for REPLACE_ONE
    for event in poisson:
        step = dp_accounting.GaussianDpEvent(_down(event.noise_multiplier))
        accountant.compose(dp_accounting.PoissonSampledDpEvent(float(event.rate), step), event.steps)
    if mu_squared:
        accountant.compose(dp_accounting.GaussianDpEvent(_down(1 / mu_squared, root=True)))
    return float(accountant.get_epsilon(delta))


def _range(event: TrainingEvent, neighbours: Neighbours) -> float:
    """Estimate the width of the interval to which the library truncates the total privacy loss of an event's steps.

    The library cuts off a tail of mass 1e-15. It finds the tail by Chernoff bounds of orders k/w for k from 1 to 20,
    where w is the width of one step's privacy losses.
    """
    from scipy.special import logsumexp

    rate, noise = float(event.rate), _down(event.noise_multiplier)
    outputs = np.linspace(-1 - 10 * noise, 1 + 10 * noise, 4001)

    def log_mixture(centre: int) -> NDArray[np.float64]:
        there = log(rate or sys.float_info.min) - (outputs - centre) ** 2 / (2 * noise**2)
        return there if rate == 1 else np.logaddexp(log1p(-rate) - outputs**2 / (2 * noise**2), there)

    replaced = neighbours is Neighbours.REPLACE_ONE
    log_p, log_q = log_mixture(1), log_mixture(-1) if replaced else -(outputs**2) / (2 * noise**2)
    loss = log_p - log_q
    low, width = loss.min(), np.ptp(loss)
    if event.steps * width < 1:
        return float(event.steps * width)
    orders = np.arange(1, 21)[:, None] / width
    widest = 0.0
    for log_weight, one in ((log_p, loss - low), (log_q, low + width - loss)):
        log_weight = log_weight - logsumexp(log_weight)
        above, below = (
            (event.steps * logsumexp(log_weight + sign * orders * one, axis=1) + log(2 / 1e-15)) / orders[:, 0]
            for sign in (1, -1)
        )
        highest, lowest = min(event.steps * width, above.min()), max(0.0, -below.min())
        widest = max(widest, highest - lowest)
    return float(widest)


def _down(value: Fraction, *, root: bool = False) -> float:
    """Return a float64 slightly below the rational (or its square root): less noise, hence a larger ε."""
    plain = float(value) ** 0.5 if root else float(value)
    return plain * (1 - 2.0**-50)
