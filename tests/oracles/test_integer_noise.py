"""Why the noise is a rounded Gaussian and not a discrete one: the true δ of both, summed over integers at 60 digits."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import mpmath
import pytest

from common.privacy.accounting import delta_exact

Mass = Callable[[int], mpmath.mpf]


def rounded(std: mpmath.mpf) -> Mass:
    return lambda k: mpmath.ncdf((k + mpmath.mpf(1) / 2) / std) - mpmath.ncdf((k - mpmath.mpf(1) / 2) / std)


def discrete(std: mpmath.mpf) -> Mass:
    reach = int(20 * std) + 2
    total = mpmath.fsum(mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * std**2)) for k in range(-reach, reach + 1))
    return lambda k: mpmath.exp(-(mpmath.mpf(k) ** 2) / (2 * std**2)) / total


def true_delta(mass: Mass, shift: int, epsilon: float, std: mpmath.mpf) -> mpmath.mpf:
    """Σ_k (p(k − Δ) − e^ε·p(k))₊, the definition."""
    factor = mpmath.exp(epsilon)
    reach = int(12 * std) + shift + 2
    masses = {k: mass(k) for k in range(-reach - shift, reach + 1)}
    return mpmath.fsum(max(mpmath.mpf(0), masses[k - shift] - factor * masses[k]) for k in range(-reach, reach + 1))


@pytest.mark.parametrize("shift", [1, 2, 3, 16])
@pytest.mark.parametrize("ratio", [Fraction(48, 100), Fraction(2), Fraction(5)])
@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 8.0])
def test_the_rounded_gaussians_true_delta_never_exceeds_the_analytic_curve(
    shift: int, ratio: Fraction, epsilon: float
) -> None:
    with mpmath.workdps(60):
        std = mpmath.mpf(shift) * ratio.numerator / ratio.denominator
        true = true_delta(rounded(std), shift, epsilon, std)
        assert true <= mpmath.mpf(delta_exact(float(1 / ratio), epsilon)) * (1 + mpmath.mpf(10) ** -12)


@pytest.mark.parametrize(("shift", "excess"), [(2, 0.6208), (4, 0.0377), (16, 0.01137)])
def test_the_discrete_gaussians_true_delta_exceeds_the_analytic_curve_on_coarse_grids(
    shift: int, excess: float
) -> None:
    """At the noise calibrated for (8, 1e-3): 62 % more δ at Δ = 2 grid steps, 3.8 % at 4, 1.1 % at 16."""
    with mpmath.workdps(60):
        ratio = mpmath.mpf("0.480013752")
        std = shift * ratio
        true = true_delta(discrete(std), shift, 8.0, std)
        assert float(true / mpmath.mpf(delta_exact(float(1 / ratio), 8.0))) - 1 == pytest.approx(excess, rel=0.01)


def sum_of_rounded(std: mpmath.mpf, shares: int) -> tuple[Mass, mpmath.mpf]:
    """The masses of the sum of so many independent rounded Gaussians, by convolution, and √shares · std."""
    reach = int(14 * std) + 2
    one = [rounded(std)(k) for k in range(-reach, reach + 1)]
    masses = one
    for _ in range(shares - 1):
        longer = [mpmath.mpf(0)] * (len(masses) + len(one) - 1)
        for i, left in enumerate(masses):
            for j, right in enumerate(one):
                longer[i + j] += left * right
        masses = longer
    middle = len(masses) // 2
    return lambda k: masses[middle + k] if abs(k) <= middle else mpmath.mpf(0), mpmath.sqrt(shares) * std


@pytest.mark.parametrize("shares", [2, 4, 8])
@pytest.mark.parametrize("std", ["0.6", "1", "2"])
def test_the_sum_of_rounded_gaussians_stays_below_the_curve_of_their_total(shares: int, std: str) -> None:
    """So noise may be drawn in shares, one a hospital, without another accountant (docs/adr, the sealed sum)."""
    with mpmath.workdps(40):
        mass, total = sum_of_rounded(mpmath.mpf(std), shares)
        for ratio in (0.5, 1.0, 2.0):
            shift = max(1, round(float(total) * ratio))
            for epsilon in (0.5, 1.0, 2.0, 4.0):
                true = true_delta(mass, shift, epsilon, total)
                assert true <= mpmath.mpf(delta_exact(float(shift / total), epsilon)) * (1 + mpmath.mpf(10) ** -9)


def test_shares_of_a_fraction_of_a_grid_step_are_not_covered() -> None:
    """What the lemma needs: below half a step a share rounds to nothing most of the time, and the sum shows more."""
    with mpmath.workdps(40):
        mass, total = sum_of_rounded(mpmath.mpf("0.15"), 4)
        assert true_delta(mass, 1, 0.5, total) > mpmath.mpf(delta_exact(float(1 / total), 0.5))
