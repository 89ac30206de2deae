"""Tests Dice and HD95 against independent computations: set counting and scipy's distance transform."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import ndimage

from common.config import DataConfig
from common.errors import InvalidInput
from common.metrics import dice_per_class, hd95_mm, lesion_wise, mean_dice
from tests.tumours import nested


def blobs(seed: int) -> np.ndarray:
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(20, 18, 16)), 2)
    return np.digitize(noise, np.quantile(noise, [0.7, 0.85])).astype(np.uint8)


def test_dice_equals_counting_sets() -> None:
    for seed in range(5):
        prediction, truth = blobs(seed), blobs(seed + 100)
        expected = [
            2 * len(p & t) / (len(p) + len(t))
            for c in (1, 2)
            for p, t in [(set(np.flatnonzero(prediction == c)), set(np.flatnonzero(truth == c)))]
        ]
        assert dice_per_class(prediction, truth, 3) == pytest.approx(expected, abs=1e-6)
        assert mean_dice(prediction, truth, 3) == pytest.approx(np.mean(expected), abs=1e-6)


def test_a_structure_in_neither_map_has_no_dice_and_leaves_the_mean() -> None:
    truth = np.where(blobs(1) == 2, 0, blobs(1)).astype(np.uint8)
    first, second = dice_per_class(truth, truth, 3)
    assert first == 1
    assert math.isnan(second)
    assert mean_dice(truth, truth, 3) == 1
    empty = np.zeros_like(truth)
    assert math.isnan(mean_dice(empty, empty, 3))


def test_a_structure_missed_or_invented_scores_zero() -> None:
    truth, empty = blobs(1), np.zeros((20, 18, 16), dtype=np.uint8)
    assert dice_per_class(empty, truth, 3) == (0, 0)
    assert dice_per_class(truth, empty, 3) == (0, 0)


def surface_distances(a: np.ndarray, b: np.ndarray, spacing: tuple[float, ...]) -> np.ndarray:
    """Return distances from a's surface voxels to b's, written from the definition."""
    surface_a = a & ~ndimage.binary_erosion(a)
    surface_b = b & ~ndimage.binary_erosion(b)
    return np.asarray(ndimage.distance_transform_edt(~surface_b, sampling=spacing)[surface_a])


@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.8, 1.5, 3.0)])
def test_hd95_equals_scipy_surface_distances_in_mm(spacing: tuple[float, float, float]) -> None:
    prediction, truth = blobs(3), blobs(4)
    expected = [
        max(
            np.percentile(surface_distances(prediction == c, truth == c, spacing), 95),
            np.percentile(surface_distances(truth == c, prediction == c, spacing), 95),
        )
        for c in (1, 2)
    ]
    assert hd95_mm(prediction, truth, 3, spacing_mm=spacing) == pytest.approx(expected, rel=1e-4)


def test_hd95_says_which_structures_are_missing() -> None:
    truth, empty = blobs(1), np.zeros((20, 18, 16), dtype=np.uint8)
    assert hd95_mm(truth, truth, 3, spacing_mm=(1, 1, 1)) == (0, 0)
    assert hd95_mm(empty, truth, 3, spacing_mm=(1, 1, 1)) == (math.inf, math.inf)
    assert all(math.isnan(d) for d in hd95_mm(empty, empty, 3, spacing_mm=(1, 1, 1)))


def test_maps_of_different_shape_or_unknown_values_are_refused() -> None:
    truth = blobs(1)
    with pytest.raises(InvalidInput, match="shapes"):
        dice_per_class(truth[1:], truth, 3)
    with pytest.raises(InvalidInput, match="largest value"):
        dice_per_class(truth, truth, 2)


def by_brute_force(a: np.ndarray, b: np.ndarray, spacing: tuple[float, ...]) -> float:
    """Return HD95 from every pair of surface voxels, without erosion or distance transform; outside lies background."""

    def surface(mask: np.ndarray) -> np.ndarray:
        inside = {tuple(voxel) for voxel in np.argwhere(mask)}
        steps = [(1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)]
        outer = [v for v in inside if any((v[0] + i, v[1] + j, v[2] + k) not in inside for i, j, k in steps)]
        return np.array(outer) * spacing

    pairs = np.linalg.norm(surface(a)[:, None] - surface(b)[None], axis=-1)
    return float(max(np.percentile(pairs.min(axis=1), 95), np.percentile(pairs.min(axis=0), 95)))


def shapes() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    empty = np.zeros((9, 8, 7), dtype=np.uint8)
    one, other, slab, border, full = (empty.copy() for _ in range(5))
    one[2, 3, 4] = 1
    other[6, 3, 1] = 1
    slab[2:7, 2:6, 3] = 1
    border[:3, :, :2] = 1
    full[:] = 1
    rng = np.random.default_rng(0)
    dust = (rng.random(empty.shape) < 0.1).astype(np.uint8)
    return {
        "two voxels": (one, other),
        "a voxel and a slab": (one, slab),
        "at the border": (border, slab),
        "everything": (full, border),
        "dust": (dust, slab),
        "equal": (slab, slab),
    }


@pytest.mark.parametrize("name", shapes())
@pytest.mark.parametrize("spacing", [(1.0, 1.0, 1.0), (0.5, 1.2, 3.0)])
def test_hd95_equals_brute_force_over_every_pair_of_surface_voxels(
    name: str, spacing: tuple[float, float, float]
) -> None:
    a, b = shapes()[name]
    (found,) = hd95_mm(a, b, 2, spacing_mm=spacing)
    assert found == pytest.approx(by_brute_force(a > 0, b > 0, spacing), abs=1e-4)
    (back,) = hd95_mm(b, a, 2, spacing_mm=spacing)
    assert back == pytest.approx(found, abs=1e-6)


@pytest.mark.parametrize("name", shapes())
def test_dice_equals_simpleitk(name: str) -> None:
    sitk = pytest.importorskip("SimpleITK")
    a, b = shapes()[name]
    overlap = sitk.LabelOverlapMeasuresImageFilter()
    overlap.Execute(sitk.GetImageFromArray(a), sitk.GetImageFromArray(b))
    (found,) = dice_per_class(a, b, 2)
    assert found == pytest.approx(overlap.GetDiceCoefficient(1), abs=1e-6)


def test_empty_masks_are_decided_here_and_not_by_a_library() -> None:
    empty = np.zeros((4, 4, 4), dtype=np.uint8)
    full = np.ones((4, 4, 4), dtype=np.uint8)
    for a, b, dice, distance in [
        (empty, empty, math.nan, math.nan),
        (empty, full, 0, math.inf),
        (full, empty, 0, math.inf),
    ]:
        assert dice_per_class(a, b, 2) == pytest.approx((dice,), nan_ok=True)
        assert hd95_mm(a, b, 2, spacing_mm=(1, 1, 1)) == pytest.approx((distance,), nan_ok=True)


def test_overlapping_regions_are_scored_as_the_unions_they_are() -> None:
    data = DataConfig(
        ("background", "core", "edema", "enhancing"),
        (1, 1, 1),
        (32, 32, 32),
        regions=("WT = core + edema + enhancing", "TC = core + enhancing", "ET = enhancing"),
    )
    assert data.structures == ("WT", "TC", "ET")
    assert data.members == ((1, 2, 3), (1, 3), (3,))
    truth, found = nested((12, 8, 4)), nested((12, 6, 5))
    dice = dice_per_class(found, truth, data.members)
    for value, members in zip(dice, data.members, strict=True):
        p, t = (set(np.flatnonzero(np.isin(labels, members))) for labels in (found, truth))
        assert value == pytest.approx(2 * len(p & t) / (len(p) + len(t)), abs=1e-6)
    assert dice[0] == 1  # the whole tumour is right, but its parts are not
    assert hd95_mm(found, truth, data.members, spacing_mm=(1, 1, 1))[0] == 0
    assert hd95_mm(found, truth, data.members, spacing_mm=(1, 1, 1))[1] == pytest.approx(2, abs=0.5)
    none = dice_per_class(np.where(truth == 3, 1, truth).astype(np.uint8), truth, data.members)
    assert none == (1, 1, 0)


@pytest.mark.parametrize(
    "regions",
    [("WT = core",), ("WT = core + tumour",), ("WT = core + edema", "WT = core"), ("WT",), ("a = core + core",)],
)
def test_regions_that_leave_a_structure_out_or_name_none_are_refused(regions: tuple[str, ...]) -> None:
    with pytest.raises(InvalidInput, match="regions"):
        DataConfig(("background", "core", "edema"), (1, 1, 1), (32, 32, 32), regions=regions)


def test_lesion_by_lesion_a_missed_and_a_made_up_one_count_and_an_absent_structure_is_right() -> None:
    """Of four cubes of 64 voxels, one is found, one missed, one made up, and one found with a stray part beside it."""
    truth, found = np.zeros((40, 40, 40), np.uint8), np.zeros((40, 40, 40), np.uint8)
    for where, in_truth, in_found in (((4, 4, 4), 1, 1), ((4, 4, 30), 1, 0), ((30, 4, 4), 0, 1), ((30, 30, 30), 1, 1)):
        box = tuple(slice(at, at + 4) for at in where)
        truth[box], found[box] = in_truth, in_found
    found[35, 30:34, 30:34] = 1  # a detached piece, near enough to count with its lesion
    ((dice, far), absent) = lesion_wise(found, truth, 3, spacing_mm=(1, 1, 1))
    stray = 2 * 64 / (64 + 64 + 16)
    assert dice == pytest.approx((1 + 0 + 0 + stray) / 4)
    assert 374 * 2 / 4 < far < (374 * 2 + 3) / 4
    assert absent == (1.0, 0.0)
    assert lesion_wise(found * 0, truth * 0 + (truth > 0) * 2, 3, spacing_mm=(1, 1, 1))[1] == (0.0, 374.0)


def test_a_true_lesion_below_the_least_volume_does_not_count_nor_does_a_prediction_that_touches_it() -> None:
    truth, found = np.zeros((20, 20, 20), np.uint8), np.zeros((20, 20, 20), np.uint8)
    truth[5:7, 5:8, 5:8] = 1  # 18 mm³
    assert lesion_wise(found, truth, 2, spacing_mm=(1, 1, 1)) == ((1.0, 0.0),)
    found[6, 6, 6] = 1
    assert lesion_wise(found, truth, 2, spacing_mm=(1, 1, 1)) == ((1.0, 0.0),)
    assert lesion_wise(found, truth, 2, spacing_mm=(2, 2, 2))[0][0] == pytest.approx(2 / 19)
