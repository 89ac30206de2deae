"""Reads a folder with one DICOM series as a volume, with SimpleITK (``pip install 'SimpleITK>=2.4'``).

Called when a case's image is a folder. Refuses a folder without a series or with several, files whose headers announce
more voxels than the reader accepts (:mod:`common.data.dicom_header`), and slices that are not evenly spaced. An
unnoticed gap would shift all slices behind it. SimpleITK is an optional dependency because most sites have NIfTI files.
It was preferred to pydicom because it decodes every common transfer syntax and sorts slices by position.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from common.data.dicom_header import read_pixels
from common.data.geometry import LPS_TO_RAS, check_affine
from common.data.nifti import ANY_ROOM, Scan, VolumeLimits
from common.errors import InvalidInput
from common.names import modality_in
from common.registry import optional

if TYPE_CHECKING:
    from jaxtyping import Float

GAP_TOLERANCE = 0.01  # of the slice spacing
_POSITION, _ORIENTATION, _FRAME, _MODALITY = "0020|0032", "0020|0037", "0020|0052", "0008|0060"
_PIXEL_SPACING = "0028|0030"
_MODALITIES = ("CT", "PT", "US", "MR")
"""DICOM's codes of the modalities that a study's channel can name. Other codes, such as OT, name no modality."""


def read_series(folder: Path, *, room: VolumeLimits = ANY_ROOM) -> Scan:
    """Read the DICOM series in a folder.

    Args:
        folder: Folder that holds one series and nothing else.
        room: Limits on the number of voxels; a larger series is refused.

    Returns:
        One rescaled channel, float32 [1, i, j, k], with its affine voxel → mm in RAS+.

    Raises:
        InvalidInput: If the folder does not hold exactly one readable, evenly spaced grey-scale series, the series is
            too large, or SimpleITK is not installed.
    """
    _check_headers(folder, room)
    sitk = _simpleitk()
    series = sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(folder))
    if not series:
        raise InvalidInput("folder holds no DICOM series", remedy="give a NIfTI file, or the folder of one series")
    _check_one(len(series))
    reader = sitk.ImageSeriesReader()
    files = reader.GetGDCMSeriesFileNames(str(folder), series[0])
    reader.SetFileNames(files)
    reader.MetaDataDictionaryArrayUpdateOn()
    reader.SetOutputPixelType(sitk.sitkFloat32)
    if len(files) < 2:
        raise InvalidInput("DICOM series has a single slice", remedy="export the whole series")
    _check_size(sitk, files, room)
    try:
        image = reader.Execute()
    except RuntimeError as error:
        raise InvalidInput("DICOM series cannot be read", remedy="export the series again") from error
    step = _check_slices(reader, len(files))
    if image.GetDimension() != 3 or image.GetNumberOfComponentsPerPixel() != 1:
        raise InvalidInput("DICOM series is not one grey-scale volume", remedy="export the scan itself")
    affine = np.eye(4)
    direction = np.array(image.GetDirection()).reshape(3, 3)
    affine[:3, :3] = direction * np.array(image.GetSpacing())
    if not np.allclose(affine[:3, 2], step, rtol=0, atol=GAP_TOLERANCE * np.linalg.norm(step)):
        affine[:3, 2] = step  # SimpleITK takes slices to lie straight above each other
    affine[:3, 3] = image.GetOrigin()
    affine = LPS_TO_RAS @ affine
    check_affine(affine)
    array = sitk.GetArrayFromImage(image).transpose(2, 1, 0)[None]
    frame, stated = (_stated(reader, len(files), tag) for tag in (_FRAME, _MODALITY))
    modalities = (modality_in(stated),) if stated in _MODALITIES else ()
    return Scan(np.ascontiguousarray(array, dtype=np.float32), affine, frame=frame, modalities=modalities)


def slices_of(folder: Path) -> tuple[Path, ...]:
    """Return the files of the one series in a folder, in the order in which :func:`read_series` stacks them.

    Args:
        folder: Folder of the series.

    Returns:
        The files.

    Raises:
        InvalidInput: If there is no series or several, or SimpleITK is not installed.
    """
    reader = _simpleitk().ImageSeriesReader
    series = reader.GetGDCMSeriesIDs(str(folder))
    if len(series) != 1:
        raise InvalidInput("DICOM series in a folder", value=len(series), limit="one")
    return tuple(map(Path, reader.GetGDCMSeriesFileNames(str(folder), series[0])))


def _simpleitk() -> Any:
    return optional("SimpleITK", user="reading a folder of DICOM", install="'SimpleITK>=2.4'")


def _check_headers(folder: Path, room: VolumeLimits) -> None:
    """Check every file's header before SimpleITK opens a file: one series, slices of one size, and together at most
    ``room`` voxels.
    """
    series, sizes, voxels = set(), set(), 0
    for path in folder.iterdir():
        if path.is_dir():
            continue
        if not path.is_file():  # a pipe or a device could be read forever
            raise InvalidInput("folder holds something other than files", remedy="give the series its own folder")
        with path.open("rb") as stream:
            pixels = read_pixels(stream)
        if pixels is not None:
            series.add(pixels.series)
            sizes.add((pixels.rows, pixels.columns))
            voxels += pixels.voxels
    _check_one(len(series))
    if len(sizes) > 1:
        raise InvalidInput("slices of the DICOM series differ in size", remedy="export the whole series again")
    if voxels > room.voxels:
        raise InvalidInput("voxels in a DICOM series", limit=f"at most {room.voxels}", remedy=room.remedy)


def _check_one(series: int) -> None:
    if series > 1:
        raise InvalidInput(
            "folder holds several DICOM series", value=series, limit="one", remedy="give each series its own folder"
        )


def _check_size(sitk: Any, files: tuple[str, ...], room: VolumeLimits) -> None:
    """Check from the headers that all slices have one size, and together at most ``room`` voxels."""
    sizes = set()
    for file in files:
        one = sitk.ImageFileReader()
        one.SetFileName(file)
        try:
            one.ReadImageInformation()
        except RuntimeError as error:
            raise InvalidInput("DICOM series cannot be read", remedy="export the series again") from error
        sizes.add(one.GetSize())
    if len(sizes) > 1:
        raise InvalidInput("slices of the DICOM series differ in size", remedy="export the whole series again")
    if float(np.prod(sizes.pop(), dtype=np.float64)) * len(files) > room.voxels:
        raise InvalidInput("voxels in a DICOM series", limit=f"at most {room.voxels}", remedy=room.remedy)


def _check_slices(reader: Any, count: int) -> Float[np.ndarray, "3"]:
    """Check that all slices have one orientation and pixel size and are evenly spaced along the stack.

    Return the step from a slice to the next in mm, in DICOM's axes (LPS).
    """
    try:
        positions = np.array([_numbers(reader.GetMetaData(i, _POSITION)) for i in range(count)])
        turns = np.array([_numbers(reader.GetMetaData(i, _ORIENTATION)) for i in range(count)])
    except (RuntimeError, ValueError) as error:
        raise InvalidInput(
            "a slice of the DICOM series does not state its position", remedy="export the series again"
        ) from error
    try:
        sizes = np.array([_numbers(reader.GetMetaData(i, _PIXEL_SPACING)) for i in range(count)])
    except (RuntimeError, ValueError) as error:
        raise InvalidInput(
            "a slice of the DICOM series does not state its PixelSpacing", remedy="export the series again"
        ) from error
    if sizes.shape != (count, 2) or np.abs(sizes - sizes[0]).max() > 1e-3 * sizes[0].min():
        raise InvalidInput("slices of the DICOM series differ in PixelSpacing", remedy="export the whole series again")
    steps = np.diff(positions, axis=0)
    even = np.abs(steps - steps.mean(axis=0)).max() <= max(GAP_TOLERANCE * np.linalg.norm(steps.mean(axis=0)), 1e-3)
    if not even or np.abs(turns - turns[0]).max() > 1e-3 or np.linalg.norm(steps.mean(axis=0)) < 1e-3:
        raise InvalidInput(
            "slices of the DICOM series are not evenly spaced: one is missing, doubled or turned",
            remedy="export the whole series again",
        )
    return np.asarray(steps.mean(axis=0), dtype=np.float64)


def _stated(reader: Any, count: int, tag: str) -> str:
    """Return the value of a tag that all slices state; empty if they state none or several."""
    stated = {
        reader.GetMetaData(number, tag).strip(" \0") if reader.HasMetaDataKey(number, tag) else ""
        for number in range(count)
    }
    return stated.pop() if len(stated) == 1 else ""


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split("\\")]
