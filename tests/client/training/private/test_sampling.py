"""Tests that Poisson sampling takes each patient with probability q, and that a fixed partition never changes."""

from __future__ import annotations

import hashlib
from fractions import Fraction

import numpy as np
import pytest
from scipy.stats import binom, chisquare

from client.training.private.sampling import FixedPartition, PoissonSampler, sampler_for
from common.errors import InvalidInput
from common.privacy.training import Sampling, TrainingEvent


def stream(seed: bytes):
    """Return a reproducible replacement of os.urandom."""
    state = {"count": 0}

    def entropy(count: int) -> bytes:
        state["count"] += 1
        return hashlib.shake_256(seed + state["count"].to_bytes(8, "little")).digest(count)

    return entropy


def test_every_patient_joins_with_probability_q_and_sizes_are_binomial() -> None:
    n, q, steps = 50, Fraction(3, 10), 4000
    sampler = PoissonSampler(n, q, stream(b"a"))
    joined = np.zeros((steps, n), dtype=bool)
    for step in range(steps):
        joined[step, sampler.batch(step)] = True
    frequency = joined.mean(axis=0)
    assert np.abs(frequency - 0.3).max() < 4.5 * np.sqrt(0.21 / steps)
    sizes = joined.sum(axis=1)
    expected = binom.pmf(np.arange(n + 1), n, 0.3) * steps
    keep = expected > 5
    observed = np.bincount(sizes, minlength=n + 1)
    pooled = np.append(observed[keep], observed[~keep].sum())
    assert chisquare(pooled, np.append(expected[keep], expected[~keep].sum())).pvalue > 1e-4
    assert sizes.var() == pytest.approx(n * 0.21, rel=0.1)  # a fixed batch size would have none
    pairs = np.corrcoef(joined[:, 0], joined[:, 1])[0, 1]
    assert abs(pairs) < 4.5 / np.sqrt(steps)


def test_the_coin_is_never_above_q_and_the_ends_are_exact() -> None:
    low = PoissonSampler(4, Fraction(1, 2), lambda n: b"\xff" * n)
    assert list(low.batch(0)) == []
    half = (1 << 63).to_bytes(8, "little") + ((1 << 63) - 1).to_bytes(8, "little") + bytes(16)
    assert list(PoissonSampler(4, Fraction(1, 2), lambda n: half).batch(0)) == [1, 2, 3]
    assert list(PoissonSampler(3, Fraction(1), lambda n: b"\xff" * n).batch(0)) == [0, 1, 2]
    assert PoissonSampler(160, Fraction(1, 10)).expected == 16


def test_a_sample_may_be_empty() -> None:
    assert PoissonSampler(5, Fraction(1, 1000), lambda n: b"\xfe" * n).batch(0).size == 0


def test_fixed_batches_are_disjoint_cover_everyone_and_stay_the_same() -> None:
    first, again = FixedPartition(10, 3, b"k" * 32), FixedPartition(10, 3, b"k" * 32)
    batches = [set(first.batch(step).tolist()) for step in range(3)]
    assert set.union(*batches) == set(range(10))
    assert sum(len(batch) for batch in batches) == 10
    assert [set(again.batch(step).tolist()) for step in range(3, 6)] == batches
    assert [set(FixedPartition(10, 3, b"l" * 32).batch(step).tolist()) for step in range(3)] != batches
    assert first.expected == pytest.approx(10 / 3)


def test_the_sampler_is_the_one_the_event_is_charged_for() -> None:
    poisson = TrainingEvent(Sampling.POISSON, Fraction(1, 4), Fraction(1), 10)
    fixed = TrainingEvent(Sampling.FIXED_PARTITION, Fraction(1, 4), Fraction(1), 10)
    assert isinstance(sampler_for(poisson, patients=8, key=b"k" * 32), PoissonSampler)
    chosen = sampler_for(fixed, patients=8, key=b"k" * 32)
    assert isinstance(chosen, FixedPartition)
    assert chosen.batches == 4


def test_a_partition_of_more_batches_than_patients_or_a_short_key_is_refused() -> None:
    with pytest.raises(InvalidInput):
        FixedPartition(3, 4, b"k" * 32)
    with pytest.raises(InvalidInput):
        FixedPartition(3, 2, b"k")
