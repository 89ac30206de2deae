"""Tests filled contours: a box exactly, a circle by its area, any polygon as matplotlib fills it, holes and
crossings.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from matplotlib.path import Path

from common.data import contours
from common.data.contours import combine, effort, fill
from common.errors import InvalidInput

SHAPE = (60, 50)


def box(i0: float, i1: float, j0: float, j1: float) -> np.ndarray:
    return np.array([[i0, j0], [i1, j0], [i1, j1], [i0, j1]], dtype=float)


def circle(radius: float, centre: tuple[float, float] = (29.3, 24.6), points: int = 720) -> np.ndarray:
    angles = np.linspace(0, 2 * math.pi, points, endpoint=False)
    return np.stack([centre[0] + radius * np.cos(angles), centre[1] + radius * np.sin(angles)], axis=1)


def mask(points: np.ndarray, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    return combine([fill(points, shape)], shape)


def test_a_box_between_voxels_is_filled_exactly() -> None:
    expected = np.zeros(SHAPE, dtype=bool)
    expected[3:9, 5:20] = True
    for points in (box(2.5, 8.5, 4.5, 19.5), box(2.5, 8.5, 4.5, 19.5)[::-1], np.roll(box(2.5, 8.5, 4.5, 19.5), 1, 0)):
        assert np.array_equal(mask(points), expected)


def test_boxes_with_a_common_edge_on_voxel_centres_share_no_voxel_and_leave_none_out() -> None:
    left, right, whole = box(2, 8, 3, 9), box(8, 15, 3, 9), box(2, 15, 3, 9)
    assert not (mask(left) & mask(right)).any()
    assert np.array_equal(mask(left) | mask(right), mask(whole))
    noisy = left + np.random.default_rng(1).normal(0, 1e-6, left.shape)  # rounding of the conversion from mm
    assert np.array_equal(mask(noisy), mask(left))


@pytest.mark.parametrize("radius", [5.0, 12.5, 20.0])
def test_a_circles_area_is_found(radius: float) -> None:
    """Each area may err by 0.15 voxels per voxel of the rim, wherever the centre lies; the mean of 25 may err
    by 1 %.
    """
    area, found = math.pi * radius**2, []
    for shift in np.random.default_rng(2).uniform(-0.5, 0.5, (25, 2)):
        found.append(mask(circle(radius, (29.3 + shift[0], 24.6 + shift[1]))).sum())
        assert abs(found[-1] - area) < 0.15 * 2 * math.pi * radius
    assert np.mean(found) == pytest.approx(area, rel=0.01)


@pytest.mark.parametrize("seed", range(40))
def test_any_polygon_is_filled_as_another_program_fills_it(seed: int) -> None:
    """matplotlib's Path decides point by point. Corners lie anywhere, even outside the slice, and edges may cross."""
    draws = np.random.default_rng(seed)
    points = np.round(draws.uniform(-20, 80, (draws.integers(3, 40), 2)), 3)
    centres = np.stack(np.meshgrid(*map(np.arange, SHAPE), indexing="ij"), axis=-1).reshape(-1, 2)
    nudged = centres + np.array([2e-7, 1e-7])  # off every corner and edge
    expected = Path(np.vstack([points, points[:1]]), closed=True).contains_points(nudged).reshape(SHAPE)
    assert np.array_equal(mask(points), expected)


def test_a_contour_outside_the_slice_or_of_no_area_fills_nothing() -> None:
    for points in (box(-9, -3, 2, 5), box(70, 80, 2, 5), box(3, 3, 2, 9), box(3, 9, 4, 4), np.full((5, 2), 7.0)):
        assert not mask(points).any()
    assert mask(box(-1e6, 1e6, -1e6, 1e6)).all()


def test_the_order_of_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    points = circle(20, points=333)
    whole = mask(points)
    monkeypatch.setattr(contours, "_CHUNK", 7)
    assert np.array_equal(mask(points), whole)


def test_effort_is_counted_before_anything_is_filled() -> None:
    wave = np.stack([np.tile([1.0, 50.0], 500), np.tile([0.0, 49.0], 500)], axis=1)
    assert effort(wave, SHAPE) == 999 * 49 + 49 + 49 * 49
    assert effort(box(1, 3, 1, 3), SHAPE) == 2 * 2 + 2 * 2


def test_a_contour_in_another_is_a_hole_and_one_in_the_hole_an_island() -> None:
    rings = [fill(circle(radius), SHAPE) for radius in (6, 20, 13)]
    found = combine(rings, SHAPE)
    inner, outer, middle = (mask(circle(radius)) for radius in (6, 20, 13))
    assert np.array_equal(found, (outer & ~middle) | inner)


def test_contours_beside_each_other_are_both_filled() -> None:
    two = [fill(box(2, 8, 3, 9), SHAPE), fill(box(20, 30, 3, 9), SHAPE), fill(box(8, 12, 3, 9), SHAPE)]
    assert np.array_equal(combine(two, SHAPE), mask(box(2, 12, 3, 9)) | mask(box(20, 30, 3, 9)))


def test_a_keyhole_is_a_hole() -> None:
    """The contour runs to the inner ring and back along one edge, which is how the standard draws a hole."""
    outer, inner = circle(20), circle(8)[::-1]
    keyhole = np.vstack([outer, outer[:1], inner[-1:], inner, outer[:1]])
    assert np.array_equal(mask(keyhole), mask(circle(20)) & ~mask(circle(8)))


def test_contours_that_cross_are_refused_unless_the_file_defines_it() -> None:
    crossing = [fill(box(2, 10, 2, 10), SHAPE), fill(box(6, 14, 6, 14), SHAPE)]
    with pytest.raises(InvalidInput, match=r"contours .*cross"):
        combine(crossing, SHAPE)
    assert np.array_equal(combine(crossing, SHAPE, crossing=True), mask(box(2, 10, 2, 10)) ^ mask(box(6, 14, 6, 14)))
