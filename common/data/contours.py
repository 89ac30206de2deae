"""Fills planar contours into label maps. It decides which voxels of a slice lie inside a contour, and which contours
are holes.

Called for DICOM RT Structure Sets. The rules are:

1. A voxel lies inside a contour if its centre does, by the even-odd rule. A centre that is exactly on an edge belongs
   to the side of the larger coordinate, so that two structures with a common edge share no voxel.
2. Of the contours of one structure in one slice, a voxel belongs to the structure if it lies inside an odd number.
   A contour inside another one is therefore a hole, and a contour inside the hole is an island.

Refuses contours that cross each other, because the meaning of their overlap is unknown. The module opens no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float

from common.errors import InvalidInput

SNAP = 3
"""Number of decimals to which points are rounded, in units of a voxel, so that no voxel depends on rounding errors."""

_CHUNK = 1 << 20
"""Number of crossings of edges with rows that are computed at once."""


@dataclass(frozen=True, slots=True, eq=False)
class FilledContour:
    """The inside of one contour: the part of the slice [i, j] that it covers, and which of its voxels lie inside."""

    place: tuple[slice, slice]
    inside: Bool[np.ndarray, "a b"]


def effort(points: Float[np.ndarray, "n 2"], shape: tuple[int, int]) -> int:
    """Return the number of steps to fill a contour: the voxels in its bounding box, plus the crossings of its edges
    with rows of voxels.

    Args:
        points: The contour's corners (i, j) in voxels, as :func:`fill` takes them.
        shape: Shape of the slice.

    Returns:
        The number.
    """
    low, high = _rows(points, shape)
    (i0, i1), (j0, j1) = _box(points, shape)
    return int((high - low).clip(0).sum()) + (i1 - i0) * (j1 - j0)


def fill(points: Float[np.ndarray, "n 2"], shape: tuple[int, int]) -> FilledContour:
    """Return the voxels of a slice whose centre lies inside a closed contour.

    Args:
        points: The contour's corners (i, j) in voxels; the centre of voxel (i, j) is at (i, j). The last corner is
            joined to the first.
        shape: Shape of the slice.

    Returns:
        The voxels inside. A centre that is exactly on an edge counts as inside if the contour lies on the edge's side
        of larger coordinates. The part of the contour outside the slice is left out.

    >>> corners = np.array([[0.5, 0.5], [2.5, 0.5], [2.5, 1.5], [0.5, 1.5]])
    >>> filled = fill(corners, (4, 4))
    >>> filled.place, filled.inside.tolist()
    ((slice(1, 3, None), slice(1, 2, None)), [[True], [True]])
    """
    points = np.round(points, SNAP)
    (i0, i1), (j0, j1) = _box(points, shape)
    crossed = np.zeros((j1 - j0, i1 - i0 + 1), dtype=np.int64)
    low, high = _rows(points, shape)
    start, end = points, np.roll(points, -1, axis=0)
    up = (start[:, 1] <= end[:, 1])[:, None]  # so that both directions of an edge give the same arithmetic
    start, end = np.where(up, start, end), np.where(up, end, start)
    counts = (high - low).clip(0)
    edges = np.flatnonzero(counts)
    for part in np.split(edges, np.flatnonzero(np.diff(np.cumsum(counts[edges]) // _CHUNK)) + 1):
        edge = np.repeat(part, counts[part])
        first = np.repeat(np.cumsum(counts[part]) - counts[part], counts[part])
        row = low[edge] + np.arange(len(edge)) - first
        (x0, y0), (x1, y1) = start[edge].T, end[edge].T
        at = np.ceil(x0 + (row - y0) / (y1 - y0) * (x1 - x0)).astype(np.int64)
        np.add.at(crossed, (row - j0, np.clip(at, i0, i1) - i0), 1)
    inside = (np.cumsum(crossed, axis=1)[:, :-1] % 2 == 1).T
    return FilledContour((slice(i0, i1), slice(j0, j1)), inside)


def combine(
    contours: Sequence[FilledContour], shape: tuple[int, int], *, crossing: bool = False
) -> Bool[np.ndarray, "i j"]:
    """Return the voxels of a structure in a slice: those that lie inside an odd number of its contours.

    Args:
        contours: The insides of the structure's contours in this slice.
        shape: Shape of the slice.
        crossing: True if contours may cross. A voxel in the overlap of two contours is then outside the structure.

    Returns:
        The voxels of the structure.

    Raises:
        InvalidInput: If contours cross and ``crossing`` is False.
    """
    found = np.zeros(shape, dtype=bool)
    innermost = np.zeros(shape, dtype=np.int32)  # number of the smallest contour so far around each voxel
    for number, one in enumerate(sorted(contours, key=lambda one: -int(one.inside.sum())), start=1):
        around = innermost[one.place][one.inside]
        if not crossing and len(around) and (around != around[0]).any():
            raise InvalidInput(
                "contours of one structure cross in a slice",
                limit="contours beside each other, or one inside the other",
                remedy="correct them in the program in which they were drawn",
            )
        innermost[one.place][one.inside] = number
        found[one.place] ^= one.inside
    return found


def _rows(points: Float[np.ndarray, "n 2"], shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return, for each edge, the index j of the first row of voxels that it crosses, and of the row after the last
    one.
    """
    y = np.round(points[:, 1], SNAP)
    ends = np.stack([y, np.roll(y, -1)])
    low, high = np.ceil(ends.min(axis=0)), np.ceil(ends.max(axis=0))
    return low.clip(0, shape[1]).astype(np.int64), high.clip(0, shape[1]).astype(np.int64)


def _box(points: Float[np.ndarray, "n 2"], shape: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return, on each axis, the first voxel that a contour may cover, and the voxel after the last one."""
    rounded = np.round(points, SNAP)
    low, high = np.ceil(rounded.min(axis=0)), np.ceil(rounded.max(axis=0))
    (i0, j0), (i1, j1) = low.clip(0, shape).astype(int), high.clip(0, shape).astype(int)
    return (int(i0), int(i1)), (int(j0), int(j1))
