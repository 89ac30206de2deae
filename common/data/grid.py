"""Chooses a study's voxel spacing and grid from public label maps: large enough for the structures, small enough to
train.

Called by the planner and by the commands that draft a study. Refuses an empty list of label maps, and a file that is
damaged or not NIfTI.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.config import DataConfig
from common.data.geometry import to_axes_of, voxel_sizes
from common.data.nifti import read_nifti_file
from common.errors import InvalidInput
from common.reading import naming_file

MULTIPLE = 8
KEPT = 0.999
MOST_VOXELS = 1 << 17
"""Most voxels of a grid that is chosen automatically. Training a teacher then takes half a minute on one core."""

PATCH = 96

Triple = tuple[float, float, float]
_Extent = tuple[tuple[np.ndarray, ...], np.ndarray]

WHOLE_VOXELS = 1 << 21
"""Largest number of voxels of a volume that is predicted as a whole; larger volumes are predicted in tiles. A U-Net's
feature maps for a volume of this size take about 1 GB."""


def choose_grid(label_maps: Sequence[Path], *, spacing_mm: Triple) -> tuple[int, int, int]:
    """Return grid sizes so that on each axis a centred crop keeps 99.9 % of the maps' labelled voxels.

    Args:
        label_maps: Files of public label maps, at least one.
        spacing_mm: The study's spacing.

    Returns:
        Voxels on each axis, multiples of 8.

    Raises:
        InvalidInput: If there is no file, or one cannot be read.
    """
    return _grid(_extents(label_maps), spacing_mm)


def choose_both(label_maps: Sequence[Path], *, most: float = MOST_VOXELS) -> tuple[Triple, tuple[int, int, int]]:
    """Return the maps' median spacing in RAS+ axes, from 0.1 to 20 mm, and a grid; if the grid has more than ``most``
    voxels, the finest axes are made coarser.

    Args:
        label_maps: Files of public label maps, at least one.
        most: Largest number of voxels of the grid.

    Returns:
        Spacing in mm, and voxels on each axis. A spacing of 20 mm on all axes ends the search.

    Raises:
        InvalidInput: If there is no file, or one cannot be read.
    """
    extents = _extents(label_maps)
    median = np.median([mm for _, mm in extents], axis=0)
    x, y, z = (min(20.0, max(0.1, round(float(value), 1))) for value in median)
    while math.prod(grid := _grid(extents, (x, y, z))) > most and min(x, y, z) < 20:
        finest = min(x, y, z)
        x, y, z = (min(20.0, round(1.1 * value, 3)) if value < 1.1 * finest else value for value in (x, y, z))
    return (x, y, z), grid


def asked_at(data: DataConfig, *, most: int = WHOLE_VOXELS) -> DataConfig:
    """Return the data settings with which queries are asked. Their grid is 2 or 4 times coarser than the student's if
    the student's grid is too large.

    Args:
        data: The study's data settings, with the student's grid.
        most: Largest number of voxels of the queries' grid.

    Returns:
        The coarser settings. ``data`` itself if its grid is small enough, or no coarser grid has multiples of 8 voxels
        on each axis and at most 20 mm spacing.
    """
    for finer in (2, 4):
        x, y, z = (n // finer for n in data.grid)
        u, v, w = (size * finer for size in data.spacing_mm)
        if math.prod(data.grid) <= most or any(n % (MULTIPLE * finer) for n in data.grid) or max(u, v, w) > 20:
            return data
        if x * y * z <= most:
            return replace(data, grid=(x, y, z), spacing_mm=(u, v, w), finer=finer)
    return data


def _extents(label_maps: Sequence[Path]) -> list[_Extent]:
    """Return for each map the number of labelled voxels of every slice across each axis, in RAS order, and a voxel's
    edge lengths in mm.
    """
    if not label_maps:
        raise InvalidInput("public label maps", value=0, limit="at least one")
    found = []
    for path in label_maps:
        with naming_file(path, remedy="give label maps as NIfTI files"):
            scan = read_nifti_file(path, channels=1)
        array, affine = to_axes_of(scan.array, scan.affine, np.eye(4))
        counts = tuple(np.count_nonzero(array[0] > 0, axis=others) for others in ((1, 2), (0, 2), (0, 1)))
        found.append((counts, voxel_sizes(affine)))
    return found


def _grid(extents: Sequence[_Extent], spacing_mm: Triple) -> tuple[int, int, int]:
    x, y, z = (_voxels(extents, axis, spacing_mm[axis]) for axis in range(3))
    return x, y, z


def _voxels(extents: Sequence[_Extent], axis: int, spacing_mm: float) -> int:
    """Return the grid's size on an axis, from how far labelled voxels are from the centre, in the study's voxels."""
    parts = []
    for each, mm in extents:
        counts = each[axis]
        distances = np.abs(np.arange(len(counts)) - (len(counts) - 1) / 2)
        parts.append(np.repeat(distances * (mm[axis] / spacing_mm), counts))
    reach = np.concatenate(parts)
    kept = float(np.quantile(reach, KEPT)) if reach.size else 0.0
    return max(MULTIPLE, MULTIPLE * math.ceil((2 * kept + 1) / MULTIPLE))
