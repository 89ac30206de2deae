"""Tests clipped sums: one patient moves them by at most R, bad numbers count as zero, and noise has the stated size."""

from __future__ import annotations

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
import torch

from client.training.private import clipped_sums
from client.training.private.clipped_sums import (
    RADIUS_INT,
    ClippingPlan,
    integer_sum,
    noised,
    one_part,
    zeros_like,
)
from common.errors import InvalidInput
from tests.worlds import silent


def vectors(seed: int, patients: int = 7, scale: float = 10.0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "a": scale * torch.randn(patients, 3, 4, generator=rng),
        "b": scale * torch.randn(patients, 5, generator=rng),
    }


def norm(total: dict[str, torch.Tensor]) -> int:
    return sum(int(q) ** 2 for entry in total.values() for q in entry.flatten().tolist())


TWO = ClippingPlan((("a",), ("b",)), (0.3, 2.0))


@pytest.mark.parametrize(
    "parts", [one_part(("a", "b"), 1.0), TWO, ClippingPlan((("a",), ("b",)), (1.0, 1.0), (1.25, 1.7))]
)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e6, 1e30])
def test_one_patient_moves_the_sum_by_at_most_r_in_exact_integers(parts: ClippingPlan, scale: float) -> None:
    data = vectors(1, scale=scale)
    whole = integer_sum(data, parts)
    for patient in range(7):
        rest = {name: torch.cat([entry[:patient], entry[patient + 1 :]]) for name, entry in data.items()}
        moved = {name: whole[name] - entry for name, entry in integer_sum(rest, parts).items()}
        assert norm(moved) <= RADIUS_INT**2


def test_small_gradients_are_kept_and_large_ones_are_scaled_to_the_clip() -> None:
    small = {"a": torch.full((1, 3, 4), 0.01), "b": torch.zeros(1, 5)}
    kept = integer_sum(small, one_part(("a", "b"), 1.0))["a"].double() / RADIUS_INT
    torch.testing.assert_close(kept, torch.full((3, 4), 0.01, dtype=torch.float64), rtol=1e-4, atol=1e-6)
    big = vectors(2, patients=1)
    total = integer_sum(big, one_part(("a", "b"), 0.5))
    flat = torch.cat([entry.flatten() for entry in total.values()]).double() / RADIUS_INT
    wanted = torch.cat([big[name].flatten() for name in ("a", "b")]).double()
    torch.testing.assert_close(flat, wanted / wanted.norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_patient_with_a_bad_number_counts_as_zero_and_changes_nobody(bad: float) -> None:
    data = vectors(3)
    without = {name: torch.cat([entry[:2], entry[3:]]) for name, entry in data.items()}
    data["b"][2, 1] = bad
    for parts in (one_part(("a", "b"), 1.0), TWO):
        mine, others = integer_sum(data, parts), integer_sum(without, parts)
        assert all(torch.equal(mine[name], others[name]) for name in mine)


def test_a_network_without_gradient_contributes_zero() -> None:
    total = integer_sum({"a": torch.zeros(2, 3), "b": torch.zeros(2, 2)}, TWO)
    assert norm(total) == 0


@pytest.mark.parametrize("clip", [1e-33, 1e-40, 1e-305])
@pytest.mark.parametrize("entry", [0.0, 1e-36, 1e-3])
def test_one_patient_moves_the_sum_by_at_most_r_however_small_the_clip_is(entry: float, clip: float) -> None:
    assert norm(integer_sum({"a": torch.tensor([[entry, 0.0]])}, one_part(("a",), clip))) <= RADIUS_INT**2


def test_a_network_with_more_weights_than_one_draw_of_noise_gets_noise_on_every_weight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clipped_sums, "MAX_SIZE", 5, raising=False)
    drawn: list[int] = []

    def noise(size: int, noise_std: Fraction) -> np.ndarray:
        drawn.append(size)
        return np.full(size, len(drawn) * int(noise_std))

    zeros = {"a": torch.zeros(3, 4, dtype=torch.int64), "b": torch.zeros(1, dtype=torch.int64)}
    mean = noised(zeros, one_part(("a", "b"), 1.0), noise_multiplier=Fraction(1), expected=1.0, noise=noise)
    assert drawn == [5, 5, 3]
    assert [*mean["a"].flatten().tolist(), *mean["b"].tolist()] == [1.0] * 5 + [2.0] * 5 + [3.0] * 3


@pytest.mark.parametrize("parts", [one_part(("a", "b"), 0.7), TWO])
def test_noise_of_every_coefficient_has_its_stated_size_and_is_fresh_each_step(parts: ClippingPlan) -> None:
    """The standard deviation must be σΔ_j√(MK) within 1 %; four standard errors of 400,000 draws are 0.45 %."""
    z, expected = Fraction("1.3"), 16.0
    zeros = {"a": torch.zeros(200_000, dtype=torch.int64), "b": torch.zeros(200_000, dtype=torch.int64)}
    one = noised(zeros, parts, noise_multiplier=z, expected=expected)
    two = noised(zeros, parts, noise_multiplier=z, expected=expected)
    for index, names in enumerate(parts.names):
        wanted = 1.3 * parts.clips[index] * sqrt(len(parts.names)) / expected
        for name in names:
            assert float(one[name].std()) == pytest.approx(wanted, rel=0.01)
            assert float(one[name].mean()) == pytest.approx(0, abs=5 * wanted / sqrt(200_000))
            assert abs(np.corrcoef(one[name], two[name])[0, 1]) < 0.012


def test_division_is_by_the_constant_and_not_by_who_came() -> None:
    parts = one_part(("a",), 1.0)
    one = {"a": torch.tensor([[0.5]])}
    for patients in (1, 3):
        total = integer_sum({"a": one["a"].repeat(patients, 1)}, parts)
        mean = noised(total, parts, noise_multiplier=Fraction(1), expected=4.0, noise=silent)
        assert float(mean["a"]) == pytest.approx(0.5 * patients / 4, rel=1e-4)


def test_the_sum_over_nobody_is_zero_and_is_noised_like_any_other() -> None:
    total = zeros_like({"a": torch.zeros(1000), "b": torch.zeros(3)}, TWO)
    assert norm(total) == 0
    mean = noised(total, TWO, noise_multiplier=Fraction(1), expected=1.0)
    assert float(mean["a"].std()) > 0


@pytest.mark.parametrize(
    "bad",
    [
        {"clips": (0.0, 1.0)},
        {"clips": (float("nan"), 1.0)},
        {"shares": (1.0, 1.0)},
        {"clips": (1.0,)},
        {"names": (), "clips": ()},
    ],
)
def test_parts_that_would_pass_norm_one_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidInput):
        ClippingPlan(**{"names": (("a",), ("b",)), "clips": (1.0, 1.0), **bad})  # type: ignore[arg-type]
