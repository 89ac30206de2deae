"""Tests pooling, enlarging, log-ratios and the public augmentation against PyTorch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.codecs.shapes import (
    augmented,
    enlarge,
    pool,
    pooling_factor,
    to_log_ratios,
    to_probabilities,
)
from common.data.label_maps import one_hot
from tests.contracts.codec_contract import GRID, LABELS, patients


@pytest.mark.parametrize("factor", [2, 4])
def test_pooling_and_enlarging_are_those_of_pytorch(factor: int) -> None:
    array = np.random.default_rng(0).normal(size=(2, 8, 16, 12))
    pooled = pool(array, factor=factor)
    np.testing.assert_allclose(pooled, torch.nn.functional.avg_pool3d(torch.tensor(array), factor).numpy(), atol=1e-12)
    oracle = torch.nn.functional.interpolate(
        torch.tensor(pooled)[None], scale_factor=factor, mode="trilinear", align_corners=False
    )[0]
    np.testing.assert_allclose(enlarge(pooled, factor=factor), oracle.numpy(), atol=1e-12)


@pytest.mark.parametrize(
    ("grid", "labels", "factor"), [((32, 48, 32), 3, 2), ((96, 96, 96), 3, 4), ((256, 128, 128), 8, 8)]
)
def test_large_grids_are_pooled_more(grid: tuple[int, int, int], labels: int, factor: int) -> None:
    assert pooling_factor(grid, labels=labels) == factor


def test_log_ratios_are_bounded_and_lead_back_to_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    probabilities = np.repeat(rng.dirichlet([1, 1, 1], size=(4, 4, 4)), 2, axis=0).repeat(2, 1).repeat(2, 2)
    probabilities = np.moveaxis(probabilities, -1, 0)
    with monkeypatch.context() as patch:
        patch.setattr("common.codecs.shapes.PROBABILITY_FLOOR", 1e-9)
        ratios = to_log_ratios(probabilities, factor=2)
    np.testing.assert_allclose(to_probabilities(ratios, factor=1), pool(probabilities, factor=2), atol=1e-6)
    certain = to_log_ratios(one_hot(patients(1, seed=0)[0], LABELS), factor=2)
    assert np.abs(certain).max() <= np.log(1.01 / 0.01) + 1e-6


def test_the_most_likely_label_survives_the_coarser_grid() -> None:
    for label_map in patients(4, seed=3):
        exact = one_hot(label_map, LABELS)
        back = to_probabilities(to_log_ratios(exact, factor=2), factor=2).argmax(0)
        assert (back == label_map).mean() > 0.97
        assert (back == label_map)[label_map > 0].mean() > 0.85


def test_probabilities_stay_finite_for_absurd_log_ratios() -> None:
    for value in (1e300, -1e300, 0.0):
        result = to_probabilities(np.full((2, 4, 4, 4), value), factor=2)
        assert np.isfinite(result).all()
        np.testing.assert_allclose(result.sum(0), 1, atol=1e-6)


def test_augmented_copies_are_soft_maps_that_depend_on_seed_and_number_alone() -> None:
    maps = patients(3, seed=0)
    state, torch_state = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    first = list(augmented(maps, labels=LABELS, copies=5, seed=4))
    again = list(augmented(maps, labels=LABELS, copies=7, seed=4))
    other = list(augmented(maps, labels=LABELS, copies=5, seed=5))
    assert (np.random.get_state()[1] == state).all()  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert len(first) == 5
    for a, b, c in zip(first, again, other, strict=False):
        assert a.shape == (LABELS, *GRID)
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
        np.testing.assert_allclose(a.sum(0), 1, atol=1e-5)
    assert not np.array_equal(first[0], first[3])  # two copies of one map


def test_augmentation_moves_shapes_but_keeps_their_size() -> None:
    maps = patients(1, seed=0)
    sizes = [copy[1:].sum() for copy in augmented(maps, labels=LABELS, copies=30, seed=0)]
    assert np.std(sizes) > 0.02 * (maps > 0).sum()
    assert np.mean(sizes) == pytest.approx((maps > 0).sum(), rel=0.15)
