"""Cuts a scan to a box about a point that a person chose, so that a student sees the same field of view as in training.

Called by `consilium predict --centre`, for scans that are much larger than the student's training data, such as a whole
head. Refuses a point outside the scan, and a box in which all voxels have the same value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from nibabel.orientations import io_orientation

from common.data import geometry
from common.data.nifti import Scan
from common.errors import InvalidInput

Point = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """A box about a point.

    Attributes:
        centre_mm: The point in mm, in the coordinates that ``axes`` names.
        size_mm: Length of its sides along x, y and z of the patient, in mm.
        axes: "RAS" for NIfTI's coordinates (right, anterior and superior are positive), "LPS" for DICOM's (left,
            posterior and superior are positive).
    """

    centre_mm: Point
    size_mm: Point
    axes: str = "RAS"

    def __str__(self) -> str:
        """Return the point in whole mm and its axes, such as ``-12,40,3 LPS``."""
        return f"{','.join(f'{value:.0f}' for value in self.centre_mm)} {self.axes}"


def cut(scan: Scan, box: Box) -> Scan:
    """Return the part of a scan inside a box.

    The box's sides run along the scan's own axes. A box that reaches beyond the scan ends at the scan's edge.

    Args:
        scan: The scan.
        box: The box.

    Returns:
        The part, with the affine of its own first voxel.

    Raises:
        InvalidInput: If the point lies outside the scan, or all voxels of the box have the same value.
    """
    shape = np.array(scan.array.shape[1:])
    to_axes = geometry.LPS_TO_RAS if box.axes == "LPS" else np.eye(4)
    affine = to_axes @ scan.affine  # LPS_TO_RAS is its own inverse
    place = np.linalg.solve(affine, (*box.centre_mm, 1.0))[:3]
    if not np.all((place >= -0.5) & (place <= shape - 0.5)):
        reach = (affine @ geometry.corners(tuple(shape), margin=0.5))[:3]
        ranges = (f"{x} {a:.1f} to {b:.1f}" for x, a, b in zip("xyz", reach.min(1), reach.max(1), strict=True))
        raise InvalidInput(
            "the point of --centre lies outside the volume",
            value=",".join(f"{value:g}" for value in box.centre_mm),
            limit=f"mm in {box.axes} coordinates, {', '.join(ranges)}",
            remedy=f"read the point's {box.axes} coordinates in your viewer",
        )
    along = io_orientation(scan.affine)[:, 0].astype(int)  # the patient's axis of each of the scan's axes
    voxels = np.maximum(np.rint(np.array(box.size_mm)[along] / geometry.voxel_sizes(scan.affine)), 1)
    first = np.rint(place - (voxels - 1) / 2)
    start, end = np.maximum(first, 0).astype(int), np.minimum(first + voxels, shape).astype(int)
    array = scan.array[(slice(None), *map(slice, start, end))]
    if any(channel.min() == channel.max() for channel in array):
        raise InvalidInput(
            "all voxels of the box about --centre have the same value",
            value=str(box),
            remedy="choose a point inside the structure to segment",
        )
    moved = scan.affine.copy()
    moved[:3, 3] = (scan.affine @ (*start, 1.0))[:3]
    return replace(scan, array=array, affine=moved)
