"""Writes a label map as a DICOM Segmentation that refers to its series, with highdicom.

Called by `consilium predict` for DICOM input. Each structure is a segment with its name, its coded concept if the
standard's lists have one, and the algorithm: the student, by the hash of its weights. The frames lie on the series'
own slices, so a viewer can overlay them. Refuses a label map that is not on the series' voxels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from common import __version__
from common.data.dicom_study import highdicom, pydicom
from common.errors import InvalidInput
from common.objects import drafting

PRIVATE_SCHEME = "99CONSILIUM"
"""Coding scheme for structures that DICOM's dictionary does not contain."""

SERIES_NUMBER = 9000
DESCRIPTION = "Consilium segmentation, research only"
UNLIKE = "UNLIKE TRAINING DATA"
"""Mark in the descriptions of a segmentation whose series differs from all training data of its network."""

CATEGORIES = {
    "cid7192": "AnatomicalStructure",
    "cid7194": "MorphologicallyAbnormalStructure",
    "cid7191": "Tissue",
    "cid7197": "BodySubstance",
}
"""The standard's lists of property types for segmentations (PS3.16), each with its category."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The algorithm that found the segments.

    Attributes:
        name: Its name.
        weights: SHA-256 of its weights in hex, which the file states as the algorithm's version.
        unlike: True if the series differs from all its training data; the file's descriptions then state it.
        centre: The point in mm about which a box was segmented; empty if the whole series was.
    """

    name: str
    weights: str
    unlike: bool = False
    centre: str = ""

    def describe(self) -> str:
        """Return the description that a DICOM file gives of the algorithm's result, with at most 64 characters."""
        box = f"box about {self.centre}" if self.centre else ""
        if self.unlike:
            return f"{box or self.name}: input {UNLIKE}"[:64]
        return (f"{self.name}: {box}" if box else self.name)[:64]


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
    source = read_slices(slices, shape=label_map.shape)
    identification = hd.AlgorithmIdentificationSequence(
        name=algorithm.name[:64],
        family=dicom.sr.codedict.codes.DCM.ArtificialIntelligence,
        version=algorithm.weights,
        source="Consilium",
        parameters={"segmented only a box about, in mm": algorithm.centre} if algorithm.centre else None,
    )
    with from_headers("DICOM Segmentation"):
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
            series_description=f"{DESCRIPTION}, {UNLIKE}" if algorithm.unlike else DESCRIPTION,
            content_description=algorithm.describe(),
            omit_empty_frames=bool(label_map.any()),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    with drafting(path) as draft:
        made.save_as(draft)


def read_slices(slices: Sequence[Path], *, shape: tuple[int, ...]) -> list[Any]:
    """Read the files of a series, with empty values for tags that the standard requires and some scanners leave out.

    Args:
        slices: The files.
        shape: Shape [i, j, k] of the array to write on them.

    Returns:
        The data sets.

    Raises:
        InvalidInput: If the array's shape differs from that of the series.
    """
    dicom = pydicom()
    source = [dicom.dcmread(file) for file in slices]
    expected = (int(source[0].Columns), int(source[0].Rows), len(source))
    if shape != expected:
        raise InvalidInput("shape of the result to write on the series", value=shape, limit=str(expected))
    for one in source:
        for tag in ("PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber"):
            if tag not in one:
                setattr(one, tag, "")
        if "ReferringPhysicianName" not in one:
            one.ReferringPhysicianName = ""
    return source


@contextmanager
def from_headers(what: str) -> Iterator[None]:
    """Turn highdicom's errors about the headers of a series into InvalidInput.

    Args:
        what: Name of the DICOM object that is being made, for the message.

    Raises:
        InvalidInput: If highdicom cannot make the object from these headers.
    """
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"no {what} can be made from the headers of the series",
            value=str(error)[:200],
            remedy="export the series again",
        ) from error


def _segment(hd: Any, dicom: Any, number: int, name: str, identification: Any) -> Any:
    category, kind = concept(name)
    return hd.seg.SegmentDescription(
        segment_number=number,
        segment_label=name[:64],
        segmented_property_category=category,
        segmented_property_type=kind,
        algorithm_type=hd.seg.SegmentAlgorithmTypeValues.AUTOMATIC,
        algorithm_identification=identification,
    )


def concept(name: str) -> tuple[Any, Any]:
    """Return the coded category and type of a structure.

    The type is SNOMED's code if one of the standard's lists (:data:`CATEGORIES`) contains the name, else a code of our
    own scheme. A name such as ``Anterior`` only says where something lies, so it is in no list and has no SNOMED code.

    Args:
        name: Name of the structure, such as ``hippocampus``.

    Returns:
        Category and type, as highdicom takes them.

    Raises:
        InvalidInput: If pydicom or highdicom is not installed.
    """
    dicom, hd = pydicom(), highdicom()
    codes = dicom.sr.codedict.codes
    keyword = "".join(word[:1].upper() + word[1:] for word in name.replace("-", " ").replace("_", " ").split())
    for listed, category in CATEGORIES.items():
        found = getattr(getattr(codes, listed), keyword, None) if keyword.isidentifier() else None
        if found is not None and found.scheme_designator == "SCT":
            return getattr(codes.SCT, category), found
    value = "".join(letter for letter in name.upper() if letter.isalnum())[:16] or "STRUCTURE"
    own = hd.sr.CodedConcept(value=value, scheme_designator=PRIVATE_SCHEME, meaning=name[:64])
    return codes.SCT.AnatomicalStructure, own


def refers_to(path: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read to which series a Segmentation refers, and with which weights it was made.

    Args:
        path: The file.

    Returns:
        UIDs of the series, and the versions of the algorithms; both empty if the file is no DICOM Segmentation.

    Raises:
        InvalidInput: If pydicom is not installed.
    """
    return read_made(
        path,
        lambda head: {
            str(one.SegmentationAlgorithmIdentificationSequence[0].AlgorithmVersion) for one in head.SegmentSequence
        },
    )


def read_made(path: Path, weights_of: Callable[[Any], Iterable[str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Read from a DICOM file which series it refers to, and which weights made it.

    Args:
        path: The file.
        weights_of: Takes the file's header and returns the SHA-256 of each weights file; may raise any error.

    Returns:
        UIDs of the series, and the SHA-256s of the weights, sorted; both empty if the file cannot be read as DICOM, its
        header names no series, or ``weights_of`` raises.

    Raises:
        InvalidInput: If pydicom is not installed.
    """
    dicom = pydicom()
    try:
        head = dicom.dcmread(path, stop_before_pixels=True)
        series = tuple(str(one.SeriesInstanceUID) for one in head.ReferencedSeriesSequence)
        return series, tuple(sorted(weights_of(head)))
    except Exception:  # noqa: BLE001  # pydicom raises any type of exception for a file that is not DICOM
        return (), ()
