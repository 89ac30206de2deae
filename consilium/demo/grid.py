"""A study's grid from public label maps: large enough for their structures, small enough to be quick."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import nibabel as nib
import numpy as np

from common.errors import InvalidInput

MULTIPLE = 8
KEPT = 0.999


def choose_grid(label_maps: Sequence[Path], *, spacing_mm: tuple[float, float, float]) -> tuple[int, int, int]:
    """Voxels an axis, multiples of 8, so that a centred crop keeps 99.9 % of the maps' labelled voxels on each axis."""
    if not label_maps:
        raise InvalidInput("public label maps", value=0, limit="at least one")
    reach: list[list[np.ndarray]] = [[], [], []]
    for path in label_maps:
        image = nib.as_closest_canonical(nib.load(path))
        voxels = np.argwhere(np.asanyarray(image.dataobj) > 0)
        centre = (np.array(image.shape[:3]) - 1) / 2
        scale = np.array(image.header.get_zooms()[:3], dtype=float) / np.array(spacing_mm)
        distances = np.abs(voxels[:, :3] - centre) * scale
        for axis in range(3):
            reach[axis].append(distances[:, axis])
    sizes = []
    for axis in range(3):
        half = float(np.quantile(np.concatenate(reach[axis]), KEPT)) if reach[axis] else 0.0
        sizes.append(max(MULTIPLE, MULTIPLE * int(np.ceil((2 * half + 1) / MULTIPLE))))
    return (sizes[0], sizes[1], sizes[2])
