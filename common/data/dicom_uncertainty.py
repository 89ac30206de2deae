"""Writes a map of uncertainty as a DICOM Parametric Map that refers to its series, with highdicom.

Called by `consilium predict --dicom --uncertainty`. Values run from 0 (certain) to 1 (nothing known). The frames lie on
the series' own slices. Refuses a map that is not on the series' voxels.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from common import __version__
from common.data.dicom_seg import SERIES_NUMBER, UNLIKE, Algorithm, from_headers, read_made, read_slices
from common.data.dicom_study import highdicom, pydicom
from common.objects import drafting


def write_uncertainty(
    path: Path, uncertainty: Float[np.ndarray, "i j k"], slices: Sequence[Path], *, algorithm: Algorithm
) -> None:
    """Write a map of uncertainty as a DICOM Parametric Map of 32-bit floating point numbers.

    Args:
        path: The file to write.
        uncertainty: Array [i, j, k] with values from 0 to 1; i runs along a slice's columns, j along its rows, k over
            ``slices``.
        slices: The files of the series in the order of k.
        algorithm: The algorithm whose uncertainty is written. The SHA-256 of its weights becomes the file's device
            serial number.

    Raises:
        InvalidInput: If the map is not on the slices' voxels, or the headers do not suffice for a Parametric Map.
    """
    dicom, hd = pydicom(), highdicom()
    source = read_slices(slices, shape=uncertainty.shape)
    mapping = hd.pm.RealWorldValueMapping(
        lut_label="UNCERTAINTY",
        lut_explanation="Entropy of the classes, 0 certain to 1 nothing known",
        unit=dicom.sr.codedict.codes.UCUM.NoUnits,
        value_range=(0.0, 1.0),
        slope=1.0,
        intercept=0.0,
    )
    mark = f", {UNLIKE}" if algorithm.unlike else ""
    with from_headers("DICOM Parametric Map"):
        made = hd.pm.ParametricMap(
            source_images=source,
            pixel_array=np.ascontiguousarray(uncertainty.transpose(2, 1, 0), dtype=np.float32),
            series_instance_uid=hd.UID(),
            series_number=SERIES_NUMBER + 1,
            sop_instance_uid=hd.UID(),
            instance_number=1,
            manufacturer="Consilium",
            manufacturer_model_name="consilium predict",
            software_versions=__version__,
            device_serial_number=algorithm.weights,
            contains_recognizable_visual_features=False,
            real_world_value_mappings=[mapping],
            voi_lut_transformations=[hd.VOILUTTransformation(window_center=0.5, window_width=1.0)],
            content_label="UNCERTAINTY",
            content_description=algorithm.describe(),
            series_description=f"Consilium uncertainty, research only{mark}",
        )
    if "Laterality" not in made:
        made.Laterality = ""  # required, and empty if unknown
    path.parent.mkdir(parents=True, exist_ok=True)
    with drafting(path) as draft:
        made.save_as(draft)


def uncertainty_of(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read to which series a map of uncertainty refers, and with which weights it was made.

    Args:
        path: The file.

    Returns:
        UIDs of the series, and the SHA-256 of the weights; both empty if the file is no such map.

    Raises:
        InvalidInput: If pydicom is not installed.
    """
    kind = pydicom().uid.ParametricMapStorage
    series, weights = read_made(path, lambda head: [str(head.DeviceSerialNumber)] if head.SOPClassUID == kind else [])
    return (series, weights) if weights else ((), ())
