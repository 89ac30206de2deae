"""Segments one DICOM series with a student, and writes a DICOM Segmentation that refers to it.

`consilium predict` calls it. Refuses a series of another modality, with a geometry that the student cannot use, or
that differs from every volume that the student was trained on. Otherwise an unreliable segmentation could enter a
hospital's archive. Refuses to overwrite a file of another series or another network.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from common.canonical import sha256_bytes
from common.data.box import Box, Point
from common.data.dataset import Case
from common.data.dicom import slices_of
from common.data.dicom_seg import Algorithm, refers_to, write_segmentation
from common.data.dicom_study import DicomSeries, pick, series_in
from common.data.dicom_uncertainty import uncertainty_of, write_uncertainty
from common.data.input_ranges import odd_sizes
from common.errors import InvalidInput
from common.models.bundle import Bundle
from common.models.native import predict_native
from common.plain import RESEARCH_ONLY
from consilium.predict import box_about, load_model, place_in_name, unlike_remedy


@dataclass(frozen=True, slots=True)
class Segmented:
    """A written segmentation.

    Attributes:
        file: The DICOM Segmentation.
        series: The series that it refers to.
        weights: SHA-256 of the student's weights.
        voxels: Number of voxels of each structure.
        centre: The point about which a box was segmented, in whole mm; empty if the whole series was.
        unlike: Description of how the series differs from the student's training data; empty if it is like them.
        odd: Warnings of structures that are missing or far too small.
        uncertainty: The map of uncertainty, a DICOM Parametric Map; None if none was asked for.
    """

    file: Path
    series: tuple[DicomSeries, ...]
    weights: str
    voxels: Mapping[str, int]
    centre: str = ""
    unlike: str = ""
    odd: tuple[str, ...] = ()
    uncertainty: Path | None = None

    def to_json(self) -> dict[str, object]:
        """Return the result as plain values for JSON."""
        return {
            "schema": 1,
            "file": str(self.file),
            "series": [{"name": one.name, "uid": one.uid} for one in self.series],
            "student": self.weights,
            "voxels": dict(self.voxels),
            **({"centre_mm": self.centre} if self.centre else {}),
            **({"uncertainty": str(self.uncertainty)} if self.uncertainty else {}),
            "unlike": self.unlike,
            "warnings": list(self.odd),
            "statement": RESEARCH_ONLY,
        }

    def to_text(self) -> str:
        """Return the result as text: file, voxels of each structure, series, and warnings."""
        sizes = ", ".join(f"{name} {count} voxels" for name, count in self.voxels.items())
        lines = [f"{self.file}: {sizes}", *(f"refers to {one.name}, {one.uid}" for one in self.series)]
        lines += [f"uncertainty: {self.uncertainty}"] if self.uncertainty else []
        lines += [f"only a box about {self.centre} mm was segmented"] if self.centre else []
        lines += [f"warning: the series is unlike the student's training: {self.unlike}"] if self.unlike else []
        lines += [f"warning: {one}" for one in self.odd]
        return "\n".join([*lines, RESEARCH_ONLY])


def predict_dicom(
    study: Path,
    model: Path,
    out: Path,
    *,
    chosen: Sequence[str] = (),
    even_if_unlike: bool = False,
    centre: Point | None = None,
    uncertainty: bool = False,
) -> Segmented:
    """Segment one DICOM series of a study, or one for each channel of the student, and write a DICOM Segmentation.

    Args:
        study: The folder of one study.
        model: The student's bundle.
        out: The folder for the file, ``NUMBER-UID-seg.dcm`` with the series' number and UID, and with the point if one
            is given. For several channels the number is the first series', and a hash of all UIDs replaces the UID.
        chosen: Series by UID, number or description; for several channels ``CHANNEL=SERIES`` each.
        even_if_unlike: True to write the file even if the series differs from all training volumes of the student.
        centre: A point in mm of DICOM's coordinates (LPS). Only a box about it is segmented. None for the whole series.
        uncertainty: True to also write a map of uncertainty, ``NUMBER-UID-uncertainty.dcm``.

    Returns:
        The written segmentation.

    Raises:
        InvalidInput: If a series is missing, ambiguous, of another modality, or too different from the training data,
            or if the file exists and is of another series or network.
    """
    bundle = load_model(model)
    series = _chosen(series_in(study), bundle, chosen)
    box = None if centre is None else box_about(centre, bundle, axes="LPS")
    weights = bundle.weights
    target = _target(out, series, weights, box)
    unsure = _target(out, series, weights, box, ending="uncertainty") if uncertainty else None
    with tempfile.TemporaryDirectory(prefix="consilium-dicom-") as folder:
        places = [_alone(one, Path(folder) / str(number)) for number, one in enumerate(series)]
        channels = tuple(zip(bundle.data.channels, places, strict=True))
        case = Case("series", places[0], channel_files=channels if len(places) > 1 else ())
        try:
            done = predict_native(
                case, bundle.network, bundle.data, patch=bundle.patch, uncertainty=uncertainty, box=box
            )
        except InvalidInput as error:
            what = f"series {series[0].name} cannot be segmented: {error.what}"
            raise InvalidInput(what, value=error.value, limit=error.limit, remedy=error.remedy) from error
        unlike = "" if bundle.inputs is None else bundle.inputs.unlike(done.volume)
        if unlike and not even_if_unlike:
            raise InvalidInput(
                f"series {series[0].name} is unlike every public volume the student was trained on",
                value=unlike,
                remedy=unlike_remedy("choose another series with --series", box),
            )
        slices = slices_of(places[0])
        algorithm = Algorithm(f"Consilium {bundle.who}", weights, bool(unlike), "" if box is None else str(box))
        write_segmentation(target, done.label_map, slices, structures=bundle.data.labels[1:], algorithm=algorithm)
        if unsure is not None and done.uncertainty is not None:
            write_uncertainty(unsure, done.uncertainty, slices, algorithm=algorithm)
    voxels = {name: int((done.label_map == value).sum()) for value, name in enumerate(bundle.data.labels) if value}
    odd = odd_sizes(done.label_map, done.volume, bundle.data.labels[1:], bundle.inputs)
    return Segmented(target, series, weights, voxels, algorithm.centre, unlike, odd, unsure)


def _target(out: Path, series: Sequence[DicomSeries], weights: str, box: Box | None, *, ending: str = "seg") -> Path:
    """Return the file to write, whose name no other series or box has.

    The name contains the first series' number, the series' UID (a hash of all UIDs for several channels) and the centre
    of the box. Raises InvalidInput if the file exists, unless the same network made it from the same first series.
    """
    number = re.sub("[^0-9A-Za-z]", "", series[0].number) or "series"
    uids = [one.uid for one in series]
    alone = len(uids) == 1 and re.fullmatch(r"[0-9.]{1,64}", uids[0])
    name = uids[0] if alone else sha256_bytes(" ".join(uids).encode())[:32]
    target = out / f"{number}-{name}{place_in_name(box)}-{ending}.dcm"
    read = refers_to if ending == "seg" else uncertainty_of
    if target.exists() and read(target) != ((uids[0],), (weights,)):
        raise InvalidInput(
            "the file exists already and is not of this series and network",
            value=str(target),
            remedy="choose another folder with --out",
        )
    return target


def _chosen(found: Sequence[DicomSeries], bundle: Bundle, chosen: Sequence[str]) -> tuple[DicomSeries, ...]:
    """Return one series for each of the student's channels, all in the same frame of reference."""
    channels = bundle.data.channels
    if len(channels) == 1:
        if len(chosen) > 1:
            raise InvalidInput("--series", value=len(chosen), limit="one series, because the student has one channel")
        return (pick(found, named=chosen[0] if chosen else ""),)
    named = dict(text.partition("=")[::2] for text in chosen)
    if set(named) != set(channels):
        raise InvalidInput(
            "--series",
            value=", ".join(named) or None,
            limit=f"one series for each of the channels {', '.join(channels)}, such as --series {channels[0]}=4",
        )
    series = tuple(pick(found, named=named[channel]) for channel in channels)
    if len({one.uid for one in series}) < len(series):
        raise InvalidInput("series of the channels", value=named, limit="a different series for each channel")
    if len({one.frame_of_reference for one in series}) > 1:
        names = "; ".join(one.name for one in series)
        raise InvalidInput(
            "series of the channels are in different frames of reference",
            value=names,
            remedy="register the series to one frame of reference first",
        )
    return series


def _alone(series: DicomSeries, folder: Path) -> Path:
    """Link the series' files into a folder of their own, because a series is read from a folder."""
    folder.mkdir()
    for number, file in enumerate(series.files):
        (folder / f"{number:06d}.dcm").symlink_to(file.resolve())
    return folder
