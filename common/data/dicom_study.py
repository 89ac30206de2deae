"""Finds the image series in a folder of DICOM files by their headers, with pydicom.

Called by `consilium predict`. The folder of a study, as a scanner or an archive writes it, may hold several series in
one or many subfolders. Files that are not DICOM are ignored. Refuses a folder that holds no study or more than one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import InvalidInput
from common.registry import optional

MAX_FILES = 20_000
MODALITY = "MR"
"""Modality of the scans that students are trained on."""
_PACKAGES = "'highdicom>=0.28,<0.29' 'pydicom>=3' 'SimpleITK>=2.4'"
_TAGS = (
    *("SeriesInstanceUID", "StudyInstanceUID", "SeriesDescription", "SeriesNumber", "Modality", "PatientID"),
    *("FrameOfReferenceUID", "NumberOfFrames"),
)


@dataclass(frozen=True, slots=True)
class DicomSeries:
    """One series: its files sorted by name, and the facts that its headers give."""

    uid: str
    description: str
    number: str
    modality: str
    frame_of_reference: str
    files: tuple[Path, ...]
    frames: int = 1

    @property
    def name(self) -> str:
        """Description, number and modality, by which a person recognises the series."""
        return f"{self.description or 'series without a description'} (number {self.number or '?'}, {self.modality})"


def pydicom() -> Any:
    """Return the module pydicom; raise InvalidInput if it is not installed."""
    return optional("pydicom", user="DICOM", install=_PACKAGES)


def highdicom() -> Any:
    """Return the module highdicom; raise InvalidInput if it is not installed."""
    return optional("highdicom", user="DICOM", install=_PACKAGES)


def series_in(folder: Path) -> tuple[DicomSeries, ...]:
    """Find every series of the one study below ``folder``.

    Args:
        folder: Any depth of folders; only headers are read.

    Returns:
        The series by number, at least one.

    Raises:
        InvalidInput: If there is no series, more than one study or patient, or too many files.
    """
    if not folder.is_dir():
        raise InvalidInput("DICOM study", value=str(folder), limit="a folder")
    found: dict[str, list[tuple[Path, dict[str, str]]]] = {}
    for count, path in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        if count >= MAX_FILES:
            raise InvalidInput(
                "files of a DICOM study", limit=f"at most {MAX_FILES}", remedy="give the folder of one study alone"
            )
        head = _head(path)
        if head["SeriesInstanceUID"]:
            found.setdefault(head["SeriesInstanceUID"], []).append((path, head))
    if not found:
        raise InvalidInput("folder holds no DICOM series", value=str(folder), remedy="give the folder of one study")
    for what, tag in (("studies", "StudyInstanceUID"), ("patients", "PatientID")):
        several = {head[tag] for files in found.values() for _, head in files}
        if len(several) > 1:
            raise InvalidInput(
                f"{what} in the folder", value=len(several), limit="one", remedy="give each its own folder"
            )
    return tuple(sorted(map(_series, found.values()), key=lambda series: (series.number.zfill(8), series.uid)))


def _head(path: Path) -> dict[str, str]:
    """Return the needed tags of one file as text; all texts are empty if the file is not DICOM."""
    dicom = pydicom()
    try:
        head = dicom.dcmread(path, stop_before_pixels=True, specific_tags=list(_TAGS))
        return {tag: str(head.get(tag) or "").strip() for tag in _TAGS}
    except Exception:  # noqa: BLE001  # pydicom raises any type of exception for a file that is not DICOM
        return dict.fromkeys(_TAGS, "")


def _series(files: Sequence[tuple[Path, dict[str, str]]]) -> DicomSeries:
    head = files[0][1]
    return DicomSeries(
        uid=head["SeriesInstanceUID"],
        description=head["SeriesDescription"],
        number=head["SeriesNumber"],
        modality=head["Modality"],
        frame_of_reference=head["FrameOfReferenceUID"],
        files=tuple(path for path, _ in files),
        frames=max(int(one["NumberOfFrames"]) if one["NumberOfFrames"].isdigit() else 1 for _, one in files),
    )


def pick(series: Sequence[DicomSeries], *, named: str) -> DicomSeries:
    """Return the series to segment.

    Args:
        series: All series of the study.
        named: UID, number or description of a series; empty to take the only one of :data:`MODALITY`.

    Returns:
        The series.

    Raises:
        InvalidInput: If no series can be chosen, or several can; the message lists their names. The error is also
            raised if the named series has another modality or is one multi-frame file.
    """
    listed = "; ".join(one.name for one in series)
    if named:
        fit = [
            one for one in series if named in (one.uid, one.number) or named.casefold() == one.description.casefold()
        ]
    else:
        fit = [one for one in series if one.modality == MODALITY]
        if not fit:
            raise InvalidInput(
                f"no series in the folder is of modality {MODALITY}, and the student segments nothing else",
                value=listed,
                remedy=f"give the folder of a study with a series of modality {MODALITY}",
            )
    if not fit:
        raise InvalidInput("series to segment", value=named, limit=f"one of {listed}")
    if len(fit) > 1:
        raise InvalidInput(
            "series to segment",
            value="; ".join(one.name for one in fit),
            limit="one",
            remedy="name it by its number or UID: --series 4",
        )
    one = fit[0]
    if one.modality != MODALITY:
        raise InvalidInput(
            f"series {one.name}",
            value=one.modality,
            limit=f"a series of modality {MODALITY}, which the student was trained on",
            remedy=f"choose a series of modality {MODALITY} with --series",
        )
    if one.frames > 1:
        raise InvalidInput(
            f"series {one.name}", value=f"{one.frames} frames in a file", limit="a series with one file for each slice"
        )
    return one
