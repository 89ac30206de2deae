"""Reads a DICOM Segmentation as a label map, by highdicom, and puts it on its image's voxels.

A voxel's value is the number of its segment, or 0 if no segment covers it. Writers leave out slices without any
structure, so the label map is placed by the positions that its slices state. Called for labels of a case table.

Refuses, before highdicom reads it, a file that is deflated, nested too deep or has more than 2^18 elements.
Refuses a file that is no binary Segmentation, segments that overlap, and a Segmentation that is not on its
image's voxel grid.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from common.data.dicom_header import check_elements
from common.data.dicom_study import highdicom
from common.data.geometry import LPS_TO_RAS
from common.data.nifti import Scan, VolumeLimits
from common.errors import InvalidInput

ENDING = ".dcm"

OFF_VOXELS = 0.05
"""Largest distance of a Segmentation's voxel from the image's voxel, in voxels."""


def read_segmentation(path: Path, *, room: VolumeLimits) -> Scan:
    """Read a Segmentation: segment numbers [1, i, j, k] with their affine in RAS+.

    Args:
        path: The file.
        room: Limits on the number of voxels; a larger file is refused.

    Returns:
        The label map, on the slices that the file has.

    Raises:
        InvalidInput: If the file's elements are refused, it is no binary Segmentation, segments overlap, it is too
            large, or highdicom is not installed.
    """
    hd = highdicom()
    with path.open("rb") as stream:
        check_elements(stream)
    try:
        found = hd.seg.segread(path)
        size = int(found.Rows) * int(found.Columns) * len(found.PerFrameFunctionalGroupsSequence)
        segments = max(1, len(found.segment_numbers))
        if size > room.voxels * segments:
            raise InvalidInput(
                "voxels in all segments of a DICOM Segmentation",
                value=size,
                limit=f"at most {room.voxels * segments}, which is {room.voxels} for each segment",
                remedy=room.remedy,
            )
        volume = found.get_volume(combine_segments=True, dtype=np.uint8)
    except InvalidInput:
        raise
    except Exception as error:  # highdicom and pydicom raise any type of exception for a malformed file
        raise InvalidInput(
            "DICOM file cannot be read as a label map",
            value=type(error).__name__,
            limit="a Segmentation on one stack of slices, whose segments do not overlap",
            remedy="export it as DICOM-SEG again, or as NIfTI",
        ) from error
    affine = LPS_TO_RAS @ np.asarray(volume.affine, dtype=np.float64)
    return Scan(np.asarray(volume.array, dtype=np.float32)[None], affine)


def onto_image(scan: Scan, affine: np.ndarray, shape: tuple[int, int, int]) -> Scan:
    """Put a Segmentation on its image's voxels.

    Args:
        scan: What :func:`read_segmentation` returned.
        affine: The image's affine in RAS+.
        shape: The image's shape.

    Returns:
        The label map on the image's voxels; 0 where the file has no slice.

    Raises:
        InvalidInput: If the volumes of the voxels differ by more than 5 %, or if a voxel in a structure is more than
            0.05 voxels from one of the image's, or outside the image.
    """
    step = np.linalg.inv(affine) @ scan.affine
    marked = np.argwhere(scan.array[0] > 0)
    there = marked @ step[:3, :3].T + step[:3, 3]
    voxels = np.rint(there).astype(int)
    sizes = np.abs(np.linalg.det(step[:3, :3]))
    fits = abs(sizes - 1) <= OFF_VOXELS and (
        not len(marked)
        or (np.abs(there - voxels).max() <= OFF_VOXELS and (voxels >= 0).all() and (voxels < np.array(shape)).all())
    )
    if not fits:
        raise InvalidInput(
            "DICOM Segmentation lies on other voxels than its image",
            limit="the voxels of the series that it was drawn on",
            remedy="give the Segmentation that was drawn on this image, or export both from one study",
        )
    array = np.zeros((1, *shape), dtype=np.float32)
    array[0][tuple(voxels.T)] = scan.array[0][tuple(marked.T)]
    return replace(scan, array=array, affine=affine)
