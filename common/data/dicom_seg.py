"""Writes a label map as a DICOM Segmentation that refers to its series, with highdicom.

Called by `consilium predict` for DICOM input. Each structure is a segment with its name, its coded concept if the
standard's dictionary has one, and the algorithm: the student, by the hash of its weights. The frames lie on the series'
own slices, so a viewer can overlay them. Refuses a label map that is not on the series' voxels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from common import __version__
from common.data.dicom_study import highdicom, pydicom
from common.errors import InvalidInput

PRIVATE_SCHEME = "99CONSILIUM"
"""Coding scheme for structures that DICOM's dictionary does not contain."""

SERIES_NUMBER = 9000
DESCRIPTION = "Consilium segmentation, research only"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The algorithm that found the segments: its name, and as its version the SHA-256 of its weights in hex."""

    name: str
    weights: str


def write_segmentation(
    path: Path,
    label_map: UInt8[np.ndarray, "i j k"],
    slices: Sequence[Path],
    *,
    structures: Sequence[str],
    algorithm: Algorithm,
) -> None:
    """Write a label map as a binary DICOM Segmentation.

    Args:
        path: The file to write.
        label_map: Array [i, j, k]; i runs along a slice's columns, j along its rows, k over ``slices``. Value v > 0
            stands for ``structures[v − 1]``.
        slices: The files of the series in the order of k.
        structures: Names of the labels from 1 on.
        algorithm: The algorithm that found them.

    Raises:
        InvalidInput: If the label map is not on the slices' voxels, or the headers do not suffice for a Segmentation.
    """
    dicom, hd = pydicom(), highdicom()
    source = [dicom.dcmread(file) for file in slices]
    expected = (int(source[0].Columns), int(source[0].Rows), len(source))
    if label_map.shape != expected:
        raise InvalidInput("shape of the series' label map", value=label_map.shape, limit=str(expected))
    for one in source:  # required by the standard, and left out by some scanners
        for tag in ("PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber"):
            if tag not in one:
                setattr(one, tag, "")
        if "ReferringPhysicianName" not in one:
            one.ReferringPhysicianName = ""
    identification = hd.AlgorithmIdentificationSequence(
        name=algorithm.name[:64],
        family=dicom.sr.codedict.codes.DCM.ArtificialIntelligence,
        version=algorithm.weights,
        source="Consilium",
    )
    try:
        made = hd.seg.Segmentation(
            source_images=source,
            pixel_array=np.ascontiguousarray(label_map.transpose(2, 1, 0)),
            segmentation_type=hd.seg.SegmentationTypeValues.BINARY,
            segment_descriptions=[
                _segment(hd, dicom, number, name, identification) for number, name in enumerate(structures, start=1)
            ],
            series_instance_uid=hd.UID(),
            series_number=SERIES_NUMBER,
            sop_instance_uid=hd.UID(),
            instance_number=1,
            manufacturer="Consilium",
            manufacturer_model_name="consilium predict",
            software_versions=__version__,
            device_serial_number="0",
            series_description=DESCRIPTION,
            content_description="Segmentation by a student network",
            omit_empty_frames=bool(label_map.any()),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            "no DICOM Segmentation can be made from the headers of the series",
            value=str(error)[:200],
            remedy="export the series again",
        ) from error
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path)


def _segment(hd: Any, dicom: Any, number: int, name: str, identification: Any) -> Any:
    codes = dicom.sr.codedict.codes
    return hd.seg.SegmentDescription(
        segment_number=number,
        segment_label=name[:64],
        segmented_property_category=codes.SCT.AnatomicalStructure,
        segmented_property_type=concept(name),
        algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
        algorithm_identification=identification,
    )


def concept(name: str) -> Any:
    """Return the coded concept of a structure: SNOMED's if DICOM's dictionary has the name, else one of our own scheme.

    Args:
        name: Name of the structure, such as ``left hippocampus``.

    Returns:
        The concept, as highdicom takes it.

    Raises:
        InvalidInput: If pydicom or highdicom is not installed.
    """
    dicom, hd = pydicom(), highdicom()
    keyword = "".join(word[:1].upper() + word[1:] for word in name.replace("-", " ").replace("_", " ").split())
    found = getattr(dicom.sr.codedict.codes.SCT, keyword, None) if keyword.isidentifier() else None
    if found is not None:
        return found
    value = "".join(letter for letter in name.upper() if letter.isalnum())[:16] or "STRUCTURE"
    return hd.sr.CodedConcept(value=value, scheme_designator=PRIVATE_SCHEME, meaning=name[:64])
