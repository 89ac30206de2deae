"""Reads a DICOM RT Structure Set as a label map on its image's voxels, with pydicom.

Called for labels of a case table. In this order:

1. The file has at most :data:`MAX_BYTES` bytes and 2^18 elements, and is not deflated.
2. The name of every structure is that of a label of the study, or is mapped to one. Structures mapped to the background
   are not read.
3. The structures lie in the image's frame of reference.
4. Contours are closed. There are at most :data:`MAX_CONTOURS` contours with at most :data:`MAX_POINTS` points in total,
   counted before a coordinate is read. Every coordinate is finite.
5. Every contour lies in the plane of one slice, within :data:`OFF_PLANE` of the slices' distance, and inside the image.
6. A structure is filled by the rules of :mod:`common.data.contours`. Structures of one label are joined; structures of
   different labels must not share a voxel.

Refuses everything else. A structure that is drawn on every second or third slice only is refused as well, because its
extent between these slices is unknown. Messages name structures, and no file or patient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from common.data import contours
from common.data.dicom_header import check_elements, read_class
from common.data.dicom_study import pydicom
from common.data.geometry import LPS_TO_RAS
from common.data.nifti import Scan
from common.errors import InvalidInput
from common.names import comparable

STRUCTURE_SET = "1.2.840.10008.5.1.4.1.1.481.3"
"""SOP class UID of RT Structure Set Storage."""

MAX_BYTES = 1 << 27
MAX_CONTOURS, MAX_POINTS = 20_000, 1_000_000
"""Limits on contours and points. Planning systems write hundreds of contours for a structure, each with up to a few
hundred points."""
MAX_EFFORT = 1 << 31
"""Largest number of steps to fill all contours (:func:`common.data.contours.effort`). The contours of a head take a
thousandth of it.
"""
OFF_PLANE = 0.1
"""Largest distance of a contour's points from the plane of a slice, as a share of the slices' distance."""
MOST_NAMED = 8

_CLOSED, _XOR = "CLOSED_PLANAR", "CLOSEDPLANAR_XOR"
_DRAW = "correct the structure where it was drawn, and export it again"


@dataclass(frozen=True, slots=True, eq=False)
class _Structure:
    """A structure that is read: its name in the file, the study's label, and its contours' items."""

    name: str
    label: int
    items: tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Contour:
    """A contour in one slice: corners (i, j) in voxels, and whether the file allows contours to cross (type
    CLOSEDPLANAR_XOR).
    """

    slice: int
    points: Float[np.ndarray, "n 2"]
    crossing: bool


def is_structure_set(path: Path) -> bool:
    """Return whether a file's header declares an RT Structure Set.

    Args:
        path: The file.

    Returns:
        True if it does; False for a file that cannot be opened.
    """
    try:
        with path.open("rb") as stream:
            return read_class(stream) == STRUCTURE_SET
    except OSError:
        return False


def read_structures(
    path: Path,
    *,
    names: Mapping[str, int],
    frame: str,
    affine: Float[np.ndarray, "4 4"],
    shape: tuple[int, int, int],
) -> Scan:
    """Read an RT Structure Set as the study's labels on its image's voxels.

    Args:
        path: The file.
        names: The study's label value of each structure, by the structure's name. The names are in the form that
            :func:`~common.names.comparable` returns.
        frame: UID of the image's frame of reference; empty if the image is no DICOM series.
        affine: The image's affine in RAS+; its third axis runs over the slices.
        shape: The image's shape.

    Returns:
        The label map [1, i, j, k].

    Raises:
        InvalidInput: If the image is no DICOM series, the file breaks a rule in the module's docstring, or pydicom is
            not installed.
    """
    if not frame:
        raise InvalidInput(
            "an RT Structure Set needs its image as the DICOM series that it was drawn on",
            limit="a folder with one series that states its frame of reference",
            remedy="name the series' folder as the image, or convert both to NIfTI",
        )
    try:
        structures = _structures(_read(path), names, frame)
        drawn = {one: list(_contours(one, affine, shape)) for one in structures}
    except InvalidInput:
        raise
    except Exception as error:  # pydicom raises any type of exception for a malformed file
        raise InvalidInput(
            "RT Structure Set cannot be read", value=type(error).__name__, remedy="export it again, or as DICOM-SEG"
        ) from error
    steps = sum(contours.effort(each.points, shape[:2]) for found in drawn.values() for each in found)
    if steps > MAX_EFFORT:
        raise InvalidInput(
            "voxels and edges to process for the contours of an RT Structure Set",
            value=steps,
            limit=f"at most {MAX_EFFORT}",
            remedy="export it as DICOM-SEG, or with fewer structures",
        )
    array = np.zeros(shape, dtype=np.uint8)
    owners: dict[int, str] = {}
    for structure, found in drawn.items():
        _check_slices(structure, {each.slice for each in found})
        _draw(array, structure, found, owners)
        owners.setdefault(structure.label, structure.name)
    return Scan(array[None].astype(np.float32), affine)


def _read(path: Path) -> Any:
    """Read a file's frame of reference, structures and contours; return them as a pydicom dataset.

    Refuse a file that is deflated, has more than :data:`MAX_BYTES` bytes, or has more than 2^18 elements.
    """
    dicom = pydicom()
    if (size := path.stat().st_size) > MAX_BYTES:
        raise InvalidInput(
            "bytes of an RT Structure Set",
            value=size,
            limit=f"at most {MAX_BYTES}",
            remedy="export it as DICOM-SEG, or with fewer structures",
        )
    with path.open("rb") as stream:
        check_elements(stream)
    tags = ["FrameOfReferenceUID", "StructureSetROISequence", "ROIContourSequence"]
    return dicom.dcmread(path, specific_tags=tags)


def _structures(file: Any, names: Mapping[str, int], frame: str) -> list[_Structure]:
    """Return the structures to read, before any coordinate of a contour is parsed.

    Refuse structures whose names are not in ``names``, or that lie in another frame of reference than the image. Refuse
    contours that are not closed, and too many contours or points. A structure whose label is the background is left
    out.
    """
    declared = {int(one.ROINumber): one for one in file.get("StructureSetROISequence") or ()}
    unknown = [name for one in declared.values() if comparable(name := str(one.get("ROIName") or "")) not in names]
    if unknown:
        more = [f"and {len(unknown) - MOST_NAMED} more"] if len(unknown) > MOST_NAMED else []
        raise InvalidInput(
            "structures that are neither the study's nor mapped to it",
            value=[*(name[:64] for name in unknown[:MOST_NAMED]), *more],
            limit=", ".join(sorted(names)),
            remedy='map each to a label of the study in [labels] of site.toml, or to "background" to leave it out',
        )
    found, numbers = [], 0
    for one in file.get("ROIContourSequence") or ():
        roi = declared.get(int(one.ReferencedROINumber))
        items = tuple(one.get("ContourSequence") or ())
        if roi is None:
            raise InvalidInput("contours of a structure that the RT Structure Set does not declare", remedy=_DRAW)
        name = str(roi.ROIName)
        if not items or not (label := names[comparable(name)]):
            continue
        stated = str(roi.get("ReferencedFrameOfReferenceUID") or file.get("FrameOfReferenceUID") or "").strip()
        if stated != frame:
            raise InvalidInput(
                f"structure {name} lies in another frame of reference than its image",
                value=stated or "none",
                limit=frame,
                remedy="name the series that it was drawn on as the image",
            )
        kinds = {str(item.get("ContourGeometricType") or "") for item in items} - {_CLOSED, _XOR}
        if kinds:
            raise InvalidInput(
                f"contours of structure {name}",
                value=sorted(kinds)[:MOST_NAMED],
                limit=f"closed contours, of the type {_CLOSED} or {_XOR}",
                remedy='close them, or map the structure to "background" in [labels] of site.toml',
            )
        numbers += sum(_text(item).count(b"\\") + 1 for item in items)
        found.append(_Structure(name, label, items))
    count = sum(len(one.items) for one in found)
    for what, number, most in (("contours", count, MAX_CONTOURS), ("points", -(-numbers // 3), MAX_POINTS)):
        if number > most:
            raise InvalidInput(
                f"{what} of an RT Structure Set",
                value=number,
                limit=f"at most {most}",
                remedy="export it as DICOM-SEG, or with fewer structures",
            )
    return found


def _text(item: Any) -> bytes:
    """Return the bytes of a contour's numbers, because pydicom would make an object of each number."""
    data = item.get_item("ContourData")
    text = data.value if data is not None else b""
    return text if isinstance(text, bytes) else b""


def _contours(
    structure: _Structure, affine: Float[np.ndarray, "4 4"], shape: tuple[int, int, int]
) -> Iterator[_Contour]:
    """Yield a structure's contours, with corners (i, j) in voxels and the number of their slice.

    Refuse a contour with a coordinate that is not finite, outside the image, or off the plane of a slice. Refuse also a
    wrong number of coordinates, and a contour that occurs twice.
    """
    to_voxels = np.linalg.inv(affine) @ LPS_TO_RAS
    seen: set[tuple[int, bytes]] = set()
    for item in structure.items:
        numbers = np.array(_text(item).decode("ascii").strip(" \0").split("\\"), dtype=np.float64)
        stated = item.get("NumberOfContourPoints")
        if len(numbers) % 3 or len(numbers) < 9 or (stated is not None and int(stated) != len(numbers) // 3):
            raise InvalidInput(
                f"points of a contour of structure {structure.name}",
                value=f"{len(numbers)} numbers",
                limit="three coordinates for each point, at least three points, and as many points as the file states",
                remedy=_DRAW,
            )
        if not np.isfinite(numbers).all():
            raise InvalidInput(f"contour of structure {structure.name} holds NaN or infinite numbers", remedy=_DRAW)
        points = numbers.reshape(-1, 3) @ to_voxels[:3, :3].T + to_voxels[:3, 3]
        if (points < -1).any() or (points > shape).any():
            raise InvalidInput(
                f"contour of structure {structure.name} lies outside its image",
                remedy="name the series that it was drawn on as the image",
            )
        number = int(np.rint(np.median(points[:, 2])))
        off = float(np.abs(points[:, 2] - number).max())
        if off > OFF_PLANE or not 0 <= number < shape[2]:
            raise InvalidInput(
                f"contour of structure {structure.name} lies in the plane of no slice",
                value=f"{off:.2g} slices off",
                limit=f"at most {OFF_PLANE} slices off",
                remedy="name the series that it was drawn on as the image, or export it as DICOM-SEG",
            )
        corners = np.round(points[:, :2], contours.SNAP)
        same = (number, np.unique(corners, axis=0).tobytes())
        if same in seen:
            raise InvalidInput(f"a contour of structure {structure.name} occurs twice", remedy=_DRAW)
        seen.add(same)
        yield _Contour(number, corners, str(item.ContourGeometricType) == _XOR)


def _check_slices(structure: _Structure, slices: set[int]) -> None:
    """Refuse a structure that is drawn on at least three slices, with the same number of slices left out between any
    two, such as on every second slice.
    """
    steps = set(np.diff(sorted(slices)).tolist())
    if len(slices) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:
        raise InvalidInput(
            f"structure {structure.name} is drawn on one slice in {step}",
            limit="every slice that it crosses",
            remedy="interpolate it where it was drawn, and export it again",
        )


def _draw(array: np.ndarray, structure: _Structure, found: list[_Contour], owners: Mapping[int, str]) -> None:
    """Fill one structure into the label map. Refuse a structure that shares a voxel with a structure of another
    label.
    """
    by_slice: dict[int, list[_Contour]] = defaultdict(list)
    for each in found:
        by_slice[each.slice].append(each)
    shape = (array.shape[0], array.shape[1])
    for number, drawn in by_slice.items():
        filled = [contours.fill(each.points, shape) for each in drawn]
        inside = contours.combine(filled, shape, crossing=all(each.crossing for each in drawn))
        there = array[:, :, number][inside]
        other = next((int(label) for label in np.unique(there) if label not in (0, structure.label)), None)
        if other is not None:
            raise InvalidInput(
                f"structures {owners[other]} and {structure.name} overlap",
                value=f"{int((there == other).sum())} voxels of a slice",
                limit="each voxel in the structures of one label",
                remedy='correct them where they were drawn, or map one to "background" in [labels] of site.toml',
            )
        array[:, :, number][inside] = structure.label
