"""Tests the audit's own claim against published numbers and an integral, and that it shares no code with the
accountant.
"""

from __future__ import annotations

import ast
from fractions import Fraction
from math import isqrt, sqrt
from pathlib import Path

import mpmath
import pytest

from common.errors import InvalidInput
from common.privacy import claim
from common.privacy.claim import claimed_epsilon, claimed_mu, claimed_reach

PUBLISHED = {  # σ/S per √N, from the table of methods: (exact, rdp, paper)
    (1.0, 1e-3): (2.574657, 2.901534, 3.846897),
    (8.0, 1e-3): (0.480014, 0.520052, 0.573580),
    (1.0, 1e-5): (3.730632, 4.045130, 4.900555),
    (8.0, 1e-5): (0.600229, 0.637651, 0.690350),
}


@pytest.mark.parametrize(("epsilon", "delta"), PUBLISHED)
def test_the_claimed_mu_gives_the_noise_of_the_published_table(epsilon: float, delta: float) -> None:
    for accountant, noise in zip(("exact", "rdp", "paper"), PUBLISHED[epsilon, delta], strict=True):
        assert 1 / claimed_mu(epsilon, delta, accountant=accountant) == pytest.approx(noise, abs=6e-7)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.5, 1e-4), (8.0, 1e-3), (300.0, 1e-6)])
def test_delta_at_the_claimed_mu_is_the_integral_of_what_the_likelihood_ratio_passes(
    epsilon: float, delta: float
) -> None:
    """The test integrates δ = ∫ max(0, φ(x − μ) − e^ε·φ(x)) dx numerically."""
    mu = claimed_mu(epsilon, delta)
    start = epsilon / mu + mu / 2  # where the two densities cross
    with mpmath.workdps(40):
        surplus = mpmath.quad(
            lambda x: mpmath.npdf(x - mu) - mpmath.exp(epsilon) * mpmath.npdf(x),
            [start, start + 2, start + 8, start + 40],
        )
    assert float(surplus) == pytest.approx(delta, rel=1e-9)


@pytest.mark.parametrize("accountant", ["exact", "rdp", "paper"])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0, 1000.0])
def test_epsilon_and_mu_are_each_others_inverse(accountant: str, epsilon: float) -> None:
    mu = claimed_mu(epsilon, 1e-5, accountant=accountant)
    assert claimed_epsilon(mu, 1e-5, accountant=accountant) == pytest.approx(epsilon, rel=1e-9)
    assert claimed_epsilon(mu * sqrt(2), 1e-5, accountant=accountant) > epsilon


def test_reach_is_two_norms_for_a_patient_and_as_many_as_move_for_a_hospital() -> None:
    assert claimed_reach("hospital", "replace-one", voters_per_site=5) == 10
    assert claimed_reach("hospital", "zero-out", voters_per_site=5) == 5
    assert claimed_reach("patient", "replace-one", voters_per_site=5) == 2
    with pytest.raises(InvalidInput):
        claimed_reach("patient", "zero-out", voters_per_site=5)
    with pytest.raises(InvalidInput):
        claimed_mu(8.0, 1e-3, accountant="guess")


def test_the_claim_is_worked_out_without_any_of_what_is_audited() -> None:
    names = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(Path(claim.__file__).read_text(encoding="utf-8")))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert {name for name in names if name.startswith("common")} == {"common.errors"}


@pytest.mark.parametrize(("sites", "colluders"), [(3, 1), (4, 2), (8, 1), (64, 5), (5, 0)])
def test_a_share_that_misses_the_noise_by_any_digit_is_found(sites: int, colluders: int) -> None:
    """For σ = n and n = K − t the share is √n, which a rational can miss by arbitrarily little on either side."""
    honest = sites - colluders
    digits = 10**30
    below = Fraction(isqrt(honest * digits**2 - 1), digits)
    above = Fraction(isqrt(honest * digits**2) + 1, digits)
    assert claim.shares_carry(above, Fraction(honest), sites=sites, colluders=colluders)
    assert not claim.shares_carry(below, Fraction(honest), sites=sites, colluders=colluders)
    assert not claim.shares_carry(Fraction(honest), Fraction(1), sites=colluders + 1, colluders=colluders)
