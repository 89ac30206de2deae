"""Writes DICOM files with pydicom: a series of slices, and RT Structure Sets drawn on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

STEP = (1.0, 1.5, 2.5)
"""Distance of a series' columns, rows and slices in mm."""
ORIGIN = (-10.0, 20.0, 30.0)
STUDY = "1.2.826.0.1.3680043.8.498.1"
FRAME = f"{STUDY}.9"
"""Frame of reference of the series that :func:`write_series` writes."""


def write_series(
    folder: Path,
    array: np.ndarray,
    *,
    uid: str = f"{STUDY}.4",
    number: int = 4,
    description: str = "T1 axial",
    modality: str = "MR",
    study: str = STUDY,
    patient: str = "1970",
    slope: float = 1.0,
) -> None:
    """Write one MR image file for each slice, with all attributes that the standard requires, under unordered names."""
    import pydicom
    from pydicom.dataset import FileDataset, FileMetaDataset
    from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, MRImageStorage

    kind = {"MR": MRImageStorage, "CT": CTImageStorage}[modality]
    folder.mkdir(parents=True, exist_ok=True)
    for k in range(array.shape[2]):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = kind, f"{uid}.{k + 1}"
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        path = folder / f"IM{(k * 20) % 31:03d}-{number}"
        file = FileDataset(path, {}, file_meta=meta, preamble=b"\0" * 128)
        file.SOPClassUID, file.SOPInstanceUID = kind, f"{uid}.{k + 1}"
        file.PatientName, file.PatientID, file.Modality = "Doe^Jane", patient, modality
        file.StudyInstanceUID, file.SeriesInstanceUID, file.SeriesNumber = study, uid, number
        file.SeriesDescription, file.FrameOfReferenceUID = description, f"{study}.9"
        file.InstanceNumber = array.shape[2] - k
        file.Columns, file.Rows = array.shape[0], array.shape[1]
        file.PixelSpacing, file.SliceThickness = [STEP[1], STEP[0]], STEP[2]
        file.ImageOrientationPatient = [1, 0, 0, 0, 1, 0]
        file.ImagePositionPatient = [ORIGIN[0], ORIGIN[1], ORIGIN[2] + k * STEP[2]]
        file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
        file.BitsAllocated, file.BitsStored, file.HighBit, file.PixelRepresentation = 16, 16, 15, 0
        file.RescaleSlope, file.RescaleIntercept = slope, 0
        file.PixelData = array[:, :, k].T.tobytes()
        pydicom.dcmwrite(path, file, enforce_file_format=True)


Contour = tuple[str, Sequence[tuple[float, float, float]]]
"""Type of a contour, and its corners (i, j, k) in voxels of the series."""


def in_slice(k: float, corners: Sequence[tuple[float, float]], kind: str = "CLOSED_PLANAR") -> Contour:
    """Return a contour in slice k with these corners (i, j)."""
    return kind, [(float(i), float(j), float(k)) for i, j in corners]


def box(k: float, i0: float, i1: float, j0: float, j1: float) -> Contour:
    """Return a rectangle in slice k."""
    return in_slice(k, [(i0, j0), (i1, j0), (i1, j1), (i0, j1)])


def write_structure_set(
    path: Path,
    structures: Sequence[tuple[str, Sequence[Contour]]],
    *,
    frame: str = FRAME,
    implicit: bool = False,
    change: Any = lambda file: None,
) -> Path:
    """Write an RT Structure Set with these names and contours; ``change`` may alter the data set first."""
    import pydicom
    from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian, RTStructureSetStorage

    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = RTStructureSetStorage, f"{STUDY}.77"
    meta.TransferSyntaxUID = ImplicitVRLittleEndian if implicit else ExplicitVRLittleEndian
    file = FileDataset(path, {}, file_meta=meta, preamble=b"\0" * 128)
    file.SOPClassUID, file.SOPInstanceUID = RTStructureSetStorage, f"{STUDY}.77"
    file.PatientName, file.PatientID, file.Modality = "Doe^Jane", "1970", "RTSTRUCT"
    file.StudyInstanceUID, file.SeriesInstanceUID = STUDY, f"{STUDY}.78"
    file.FrameOfReferenceUID = frame
    file.StructureSetROISequence, file.ROIContourSequence = [], []
    for number, (name, contours) in enumerate(structures, start=1):
        declared, drawn = Dataset(), Dataset()
        declared.ROINumber, declared.ROIName = number, name
        declared.ReferencedFrameOfReferenceUID, declared.ROIGenerationAlgorithm = frame, "MANUAL"
        drawn.ReferencedROINumber, drawn.ContourSequence = number, []
        for kind, corners in contours:
            item = Dataset()
            item.ContourGeometricType, item.NumberOfContourPoints = kind, len(corners)
            numbers = [o + s * c for corner in corners for o, s, c in zip(ORIGIN, STEP, corner, strict=True)]
            item.ContourData = [f"{number:.6g}" for number in numbers]
            drawn.ContourSequence.append(item)
        file.StructureSetROISequence.append(declared)
        file.ROIContourSequence.append(drawn)
    change(file)
    pydicom.dcmwrite(path, file, enforce_file_format=True)
    return path
