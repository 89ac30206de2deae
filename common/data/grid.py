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
from jaxtyping import Float

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
    median = np.median([sizes_mm for _, sizes_mm in extents], axis=0)
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


def _extents(label_maps: Sequence[Path]) -> list[tuple[Float[np.ndarray, "voxels 3"], Float[np.ndarray, "3"]]]:
    """Return for each map how far its labelled voxels are from the centre, in its own voxels along axes in RAS order,
    and a voxel's edge lengths in mm.
    """
    if not label_maps:
        raise InvalidInput("public label maps", value=0, limit="at least one")
    found = []
    for path in label_maps:
        with naming_file(path, remedy="give label maps as NIfTI files"):
            scan = read_nifti_file(path, channels=1)
        array, affine = to_axes_of(scan.array, scan.affine, np.eye(4))
        centre = (np.array(array.shape[1:]) - 1) / 2
        found.append((np.abs(np.argwhere(array[0] > 0) - centre), voxel_sizes(affine)))
    return found


def _grid(
    extents: Sequence[tuple[Float[np.ndarray, "voxels 3"], Float[np.ndarray, "3"]]], spacing_mm: Triple
) -> tuple[int, int, int]:
    reach = np.concatenate([distances * (sizes_mm / np.array(spacing_mm)) for distances, sizes_mm in extents])
    x, y, z = np.quantile(reach, KEPT, axis=0) if len(reach) else np.zeros(3)
    return _voxels(x), _voxels(y), _voxels(z)


def _voxels(reach: float) -> int:
    return max(MULTIPLE, MULTIPLE * math.ceil((2 * reach + 1) / MULTIPLE))
