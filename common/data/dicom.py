"""A folder with one DICOM series → a volume, by SimpleITK (``pip install 'SimpleITK>=2.4'``).

Refuses a folder without a series or with several, and slices that are not evenly spaced: a gap that nobody sees would
shift everything behind it. SimpleITK is an extra because most sites have NIfTI files; it is chosen over pydicom
because it decodes every common transfer syntax and sorts the slices by their position.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np

from common.data.geometry import check_affine
from common.data.nifti import MAX_NATIVE_VOXELS, Scan
from common.errors import InvalidInput

GAP_TOLERANCE = 0.01  # of the slice spacing
_POSITION, _ORIENTATION = "0020|0032", "0020|0037"
_LPS_TO_RAS = np.diag([-1.0, -1.0, 1.0, 1.0])


def read_series(folder: Path) -> Scan:
    """Read the series in ``folder``: one channel [1, i, j, k], rescaled, with its affine in RAS+.

    Raises InvalidInput with one remedy; InvalidInput too where SimpleITK is not installed.
    """
    sitk = _simpleitk()
    series = sitk.ImageSeriesReader.GetGDCMSeriesIDs(str(folder))
    if not series:
        raise InvalidInput("folder holds no DICOM series", remedy="give a NIfTI file, or the folder of one series")
    if len(series) > 1:
        raise InvalidInput(
            "folder holds several DICOM series",
            value=len(series),
            limit="one",
            remedy="give each series its own folder",
        )
    reader = sitk.ImageSeriesReader()
    files = reader.GetGDCMSeriesFileNames(str(folder), series[0])
    reader.SetFileNames(files)
    reader.MetaDataDictionaryArrayUpdateOn()
    reader.SetOutputPixelType(sitk.sitkFloat32)
    if len(files) < 2:
        raise InvalidInput("DICOM series has a single slice", remedy="export the whole series")
    _check_size(sitk, files)
    try:
        image = reader.Execute()
    except RuntimeError as error:
        raise InvalidInput("DICOM series cannot be read", remedy="export the series again") from error
    _check_slices(reader, len(files))
    if image.GetDimension() != 3 or image.GetNumberOfComponentsPerPixel() != 1:
        raise InvalidInput("DICOM series is not one grey-scale volume", remedy="export the scan itself")
    affine = np.eye(4)
    direction = np.array(image.GetDirection()).reshape(3, 3)
    affine[:3, :3] = direction * np.array(image.GetSpacing())
    affine[:3, 3] = image.GetOrigin()
    affine = _LPS_TO_RAS @ affine
    check_affine(affine)
    array = sitk.GetArrayFromImage(image).transpose(2, 1, 0)[None]
    return Scan(array=np.ascontiguousarray(array, dtype=np.float32), affine=affine)


def _simpleitk() -> Any:
    try:
        return importlib.import_module("SimpleITK")
    except ImportError as error:
        raise InvalidInput(
            "image is a folder, and reading DICOM needs SimpleITK", remedy='pip install "SimpleITK>=2.4"'
        ) from error


def _check_size(sitk: Any, files: tuple[str, ...]) -> None:
    one = sitk.ImageFileReader()
    one.SetFileName(files[0])
    try:
        one.ReadImageInformation()
    except RuntimeError as error:
        raise InvalidInput("DICOM series cannot be read", remedy="export the series again") from error
    if int(np.prod(one.GetSize(), dtype=np.float64)) * len(files) > MAX_NATIVE_VOXELS:
        raise InvalidInput("voxels in a DICOM series", limit=f"at most {MAX_NATIVE_VOXELS}", remedy="crop the scan")


def _check_slices(reader: Any, count: int) -> None:
    """Every slice turned the same way, one step after the other along the stack."""
    try:
        positions = np.array([_numbers(reader.GetMetaData(i, _POSITION)) for i in range(count)])
        turns = np.array([_numbers(reader.GetMetaData(i, _ORIENTATION)) for i in range(count)])
    except (RuntimeError, ValueError) as error:
        raise InvalidInput(
            "a slice of the DICOM series does not say where it lies", remedy="export the series again"
        ) from error
    steps = np.diff(positions, axis=0)
    even = np.abs(steps - steps.mean(axis=0)).max() <= max(GAP_TOLERANCE * np.linalg.norm(steps.mean(axis=0)), 1e-3)
    if not even or np.abs(turns - turns[0]).max() > 1e-3 or np.linalg.norm(steps.mean(axis=0)) < 1e-3:
        raise InvalidInput(
            "slices of the DICOM series are not evenly spaced: one is missing, doubled or turned",
            remedy="export the whole series again",
        )


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split("\\")]
