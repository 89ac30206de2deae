"""Prepares pictures for the slice viewer: public volumes with pseudo-labels, confidence and student predictions.

A picture is a file with the uint8 arrays of one volume, stored as ``.npz``, and a JSON file with its figures.
:func:`make_pictures` runs in a process of its own, because it loads torch. It writes a picture again only if the label
or the student has changed. :func:`draw` renders one slice of a picture as PNG. Pictures contain only public volumes,
labels decoded from noisy answers, and predictions of the student. They contain no data of a hospital.
"""

from __future__ import annotations

import io
import json
import sqlite3
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from scipy.ndimage import binary_erosion

from common.canonical import digest, sha256_file
from common.errors import ConsiliumError, InvalidInput
from common.objects import write_atomically
from common.planes import PLANES, PlaneName
from common.reading import lenient_json
from server.protocols.posterior import DRAWS, LabelUncertainty
from server.protocols.query_protocol import protocol_of
from server.protocols.stored_labels import read_label
from server.study.workspace import Workspace

PictureLayer = Literal["none", "label", "centre", "doubt", "student", "confidence", "disagreement", "own", "adapted"]
Picture = dict[str, UInt8[np.ndarray, "x y z"]]
"""The arrays of a picture, of shape [x, y, z], by name: ``image``, ``label`` and ``confidence``.

``centre`` is the label map that public data alone gives, before any answer. ``doubt`` is, for each voxel, how likely
other noise would have changed its label. Both are present only if the stored answers could be read. ``student`` is
present once a student is trained.
"""

LAYERS: tuple[PictureLayer, ...] = ("label", "centre", "doubt", "student", "confidence", "disagreement", "none")
PICTURES = 2
"""Version of the pictures' format; pictures of another version are made again."""

SIDE = 420
COLOURS = (
    *((86, 180, 233), (230, 159, 0), (204, 121, 167), (0, 158, 115), (213, 94, 0)),
    *((240, 228, 66), (148, 103, 255), (255, 158, 171), (164, 222, 91), (176, 110, 72)),
    *((0, 215, 215), (255, 64, 96), (96, 120, 255), (200, 200, 140), (255, 110, 255)),
    *((90, 160, 60), (255, 200, 150), (130, 200, 190), (190, 150, 230), (160, 140, 0)),
)
"""Colours of structures 1 to 20; further structures repeat them.

The first six are Okabe and Ito's colour-blind safe palette. The viewer's script and style sheet have the same colours.
"""


@dataclass(frozen=True, slots=True)
class Structure:
    """The figures of one structure in one public volume.

    Attributes:
        name: The structure's name.
        ml: The structure's size in the label, in ml.
        confidence: Mean confidence of the label in its voxels of the structure, 0 to 1; None if it has none.
        student_ml: The structure's size in the student's prediction, in ml; None without a student.
        dice: Dice between label and student; None without a student, or if neither contains the structure.
    """

    name: str
    ml: float
    confidence: float | None
    student_ml: float | None
    dice: float | None


@dataclass(frozen=True, slots=True)
class VolumeFacts:
    """The figures of a picture.

    Attributes:
        volume: SHA-256 of the volume.
        label: SHA-256 of the label's file.
        grid: Number of voxels along x, y and z.
        spacing_mm: Voxel spacing along x, y and z, in mm.
        centre: Indices (x, y, z) of the voxel through which the first slices go. It is the median of the labelled
            voxels, or the middle of the grid if the label is empty. It has nothing to do with the layer ``centre``.
        has_student: True if the picture contains the student's prediction.
        doubt: Expected number of voxels whose label other noise would have changed, divided by the number of labelled
            voxels (those that are not background), and at most 1. None if the stored answers could not be read or the
            label is empty.
        moved: 1 − Dice between the label and ``centre``, the label map that public data alone gives, before any answer.
            None if the stored answers could not be read or both maps are empty.
        confidence: Mean probability of the label in its labelled voxels, 0 to 1; None if the label is empty.
        agreement: Mean Dice between label and student; None without a student.
        structures: Figures of each structure.
    """

    volume: str
    label: str
    grid: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    centre: tuple[int, int, int]
    has_student: bool
    doubt: float | None
    moved: float | None
    confidence: float | None
    agreement: float | None
    structures: tuple[Structure, ...]

    @property
    def suspicion(self) -> float:
        """The sum of ``doubt`` and ``moved``, None counting as 0. Labels with larger sums should be reviewed first."""
        return (self.doubt or 0.0) + (self.moved or 0.0)


def make_pictures(workspace: Workspace, out: Path) -> int:
    """Make the picture of every labelled volume whose picture is missing or out of date.

    Args:
        workspace: The study's directory.
        out: Folder of the pictures.

    Returns:
        Number of pictures made.
    """
    from common.data.volume import volume_from_bytes
    from common.models.fit import predict
    from server.postprocess.networks import load_student

    study, student = workspace.study(), student_hash(workspace)
    model: Any = None
    doubts: dict[str, LabelUncertainty] | None = None
    made = 0
    for volume in workspace.volumes():
        if (label := label_hash(workspace, volume)) is None:
            continue
        key = picture_key(label, student)
        if (known := read_facts(out, volume)) is not None and known[1] == key:
            continue
        image = volume_from_bytes(workspace.objects.get(volume), study.data).image
        probabilities = read_label(workspace.labels_dir / f"{volume}.npz")
        arrays: Picture = {
            "image": grey(image[0]),
            "label": probabilities.argmax(axis=0).astype(np.uint8),
            "confidence": np.round(255 * probabilities.max(axis=0)).astype(np.uint8),
        }
        doubts = _doubts(workspace) if doubts is None else doubts
        if volume in doubts:
            arrays["centre"] = doubts[volume].centre
            arrays["doubt"] = np.round(255 * doubts[volume].doubt).astype(np.uint8)
        if student:
            model = model or load_student(study, workspace.student_dir)
            arrays["student"] = predict(model, image).argmax(axis=0).astype(np.uint8)
        facts = summarise(volume, label, arrays, names=study.data.labels, spacing_mm=study.data.spacing_mm)
        stream = io.BytesIO()
        np.savez_compressed(stream, **arrays)  # type: ignore[arg-type]
        write_atomically(out / f"{volume}.npz", stream.getvalue())
        write_atomically(out / f"{volume}.json", json.dumps({"key": key, "facts": asdict(facts)}).encode())
        made += 1
    return made


def _doubts(workspace: Workspace) -> dict[str, LabelUncertainty]:
    """Return the uncertainty of each volume's label; an empty dict if no verified copy of the ledger can be made."""
    from server.ledger.backup import backup
    from server.postprocess.labels import read_released

    try:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "ledger.sqlite"
            backup(workspace.ledger_file, copy)
            released = read_released(workspace, ledger_file=copy)
        said = protocol_of(released.public.study).aggregate(released.public, released.answers)
        return {one.volume: one for one in said.doubts(draws=DRAWS)}
    except (ConsiliumError, OSError, sqlite3.Error):
        return {}


def label_hash(workspace: Workspace, volume: str) -> str | None:
    """Return the SHA-256 of a volume's label file.

    Args:
        workspace: The study's directory.
        volume: SHA-256 of the volume.

    Returns:
        The hash in hexadecimal; None before the label is decoded.
    """
    return _hash_of(workspace.labels_dir / f"{volume}.npz")


def student_hash(workspace: Workspace) -> str:
    """Return the SHA-256 of the student's weights; an empty text before it is trained."""
    return _hash_of(workspace.student_dir / "weights.pt") or ""


def _hash_of(path: Path) -> str | None:
    try:
        return _hash_since(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None


@lru_cache(maxsize=4096)
def _hash_since(path: Path, _modified_ns: int) -> str:
    return sha256_file(path)


def picture_key(label: str, student: str) -> str:
    """Return a digest of the files from which a picture is made, to detect an outdated picture.

    Args:
        label: SHA-256 of the label's file.
        student: SHA-256 of the student's weights; empty without a student.

    Returns:
        The digest in hexadecimal.
    """
    return digest("picture", [PICTURES, label, student])


def grey(image: Float[np.ndarray, "x y z"]) -> UInt8[np.ndarray, "x y z"]:
    """Convert an image to 8-bit grey values: its 1st percentile becomes 0, its 99.5th becomes 255.

    Args:
        image: Array [x, y, z].

    Returns:
        Uint8 array [x, y, z].
    """
    low, high = np.percentile(image, (1.0, 99.5))
    scaled = (image - low) / max(float(high - low), 1e-9)
    result: np.ndarray = np.round(255 * np.clip(scaled, 0, 1)).astype(np.uint8)
    return result


def summarise(
    volume: str,
    label: str,
    arrays: Picture,
    *,
    names: tuple[str, ...],
    spacing_mm: tuple[float, float, float],
) -> VolumeFacts:
    """Compute the figures of a picture.

    Args:
        volume: SHA-256 of the volume.
        label: SHA-256 of the label's file.
        arrays: The picture.
        names: Names of the label values, background first.
        spacing_mm: Voxel spacing along x, y and z, in mm.

    Returns:
        The figures; a mean over no values is None.
    """
    hard, sure, student = arrays["label"], arrays["confidence"], arrays.get("student")
    voxel_ml = float(np.prod(spacing_mm)) / 1000
    structures: list[Structure] = []
    for value, name in enumerate(names[1:], start=1):
        inside = hard == value
        theirs = None if student is None else student == value
        together = 0 if theirs is None else int(inside.sum() + theirs.sum())
        structures.append(
            Structure(
                name=name,
                ml=float(inside.sum() * voxel_ml),
                confidence=float(sure[inside].mean() / 255) if inside.any() else None,
                student_ml=None if theirs is None else float(theirs.sum() * voxel_ml),
                dice=None if theirs is None or not together else float(2 * (inside & theirs).sum() / together),
            )
        )
    found = np.argwhere(hard > 0)
    x, y, z = np.median(found, axis=0).astype(int) if len(found) else np.array(hard.shape) // 2
    dices = [one.dice for one in structures if one.dice is not None]
    return VolumeFacts(
        volume=volume,
        label=label,
        grid=hard.shape,
        spacing_mm=spacing_mm,
        centre=(int(x), int(y), int(z)),
        has_student=student is not None,
        doubt=_doubt(hard, arrays),
        moved=_moved(hard, arrays),
        confidence=float(sure[hard > 0].mean() / 255) if len(found) else None,
        agreement=sum(dices) / len(dices) if dices else None,
        structures=tuple(structures),
    )


def _doubt(hard: UInt8[np.ndarray, "x y z"], arrays: Picture) -> float | None:
    """Return the sum of ``doubt`` over all voxels, divided by the number of labelled voxels, and at most 1.

    The result is None if the picture has no doubt, or the label is empty.
    """
    if "doubt" not in arrays or not hard.any():
        return None
    return min(1.0, float(arrays["doubt"].sum() / 255 / (hard > 0).sum()))


def _moved(hard: UInt8[np.ndarray, "x y z"], arrays: Picture) -> float | None:
    """Return 1 − Dice between label and ``centre``, averaged over the structures that at least one of them contains.

    The result is None if the picture has no ``centre``, or neither map contains a structure.
    """
    if "centre" not in arrays:
        return None
    centre, found = arrays["centre"], []
    for value in range(1, int(max(hard.max(), centre.max())) + 1):
        ours, theirs = hard == value, centre == value
        if together := int(ours.sum() + theirs.sum()):
            found.append(1 - float(2 * (ours & theirs).sum() / together))
    return sum(found) / len(found) if found else None


def read_facts(folder: Path, volume: str) -> tuple[VolumeFacts, str] | None:
    """Read the figures of a picture.

    Args:
        folder: Folder of the pictures.
        volume: SHA-256 of the volume.

    Returns:
        The figures, and the digest of the files from which the picture was made (:func:`picture_key`); None if there is
        no picture of the current format.
    """
    try:
        record = lenient_json((folder / f"{volume}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    facts = record["facts"]
    if record["key"].__class__ is not str or facts.keys() != {field.name for field in fields(VolumeFacts)}:
        return None  # written by an earlier version; it will be made again
    structures = tuple(Structure(**one) for one in facts.pop("structures"))
    facts |= {name: tuple(facts[name]) for name in ("grid", "spacing_mm", "centre")}
    return VolumeFacts(**facts, structures=structures), record["key"]


def load_picture(folder: Path, volume: str) -> Picture:
    """Read the arrays of a picture.

    Args:
        folder: Folder of the pictures.
        volume: SHA-256 of the volume.

    Returns:
        The picture.

    Raises:
        InvalidInput: If the picture has not been made yet.
    """
    path = folder / f"{volume}.npz"
    if not path.exists():
        raise InvalidInput(
            "the picture of this volume is not prepared yet",
            remedy="open the Labels page and wait until the picture appears",
        )
    with np.load(path, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


DOWNLOADS: tuple[str, ...] = ("image", "label", "centre", "doubt", "student")
"""Arrays that can be downloaded as NIfTI files."""

VOXELS: tuple[str, ...] = (*DOWNLOADS, "confidence")
"""Arrays that the viewer draws, in the order in which they are sent."""


def voxels(arrays: Picture) -> bytes:
    """Return the bytes of the arrays that the viewer draws, one after the other.

    Args:
        arrays: The picture.

    Returns:
        The arrays in the order of :data:`VOXELS`, each in Fortran order (x fastest); missing arrays are left out.
    """
    return b"".join(arrays[name].tobytes(order="F") for name in VOXELS if name in arrays)


def nifti(values: UInt8[np.ndarray, "x y z"], spacing_mm: tuple[float, float, float]) -> bytes:
    """Convert an array to a gzipped NIfTI file in RAS+ orientation.

    Args:
        values: Uint8 array [x, y, z].
        spacing_mm: Voxel spacing along x, y and z, in mm.

    Returns:
        The file's bytes.
    """
    import gzip

    import nibabel as nib

    image = nib.Nifti1Image(values, np.diag((*spacing_mm, 1.0)))
    image.header.set_xyzt_units("mm")
    return gzip.compress(image.to_bytes(), mtime=0)


def draw(
    arrays: Picture,
    *,
    plane: PlaneName,
    index: int,
    layer: PictureLayer,
    spacing_mm: tuple[float, float, float],
    side: int = SIDE,
) -> bytes:
    """Draw one slice as PNG, with voxels in their true proportions.

    The layers are drawn as follows:

    - ``label``, ``student``, ``own`` (a hospital's own teachers) and ``adapted`` (a hospital's adapted network): each
      structure is tinted and outlined.
    - ``centre``: the same, for the label map that public data alone gives, before any answer.
    - ``doubt``: voxels whose label other noise could have changed are orange. The orange grows with the chance, from
      nothing at 0 to full strength at 0.5.
    - ``confidence``: voxels whose label has a low probability are orange, from nothing at 1 to full strength at 0.5.
    - ``disagreement``: voxels are blue where the label has a structure and the student differs, and orange where only
      the student has a structure.
    - ``none``: the image alone.

    Args:
        arrays: The picture.
        plane: The plane.
        index: Number of the slice, from 0.
        layer: Layer to draw over the image.
        spacing_mm: Voxel spacing along x, y and z, in mm.
        side: Longer side of the PNG in pixels.

    Returns:
        The PNG file's bytes.

    Raises:
        InvalidInput: If the index is outside the grid, or the picture does not have the layer.
    """
    view = PLANES[plane]
    size = arrays["image"].shape[view.fixed]
    if not 0 <= index < size:
        raise InvalidInput("slice", value=index, limit=f"0 to {size - 1}")
    needed = {"disagreement": "student", "none": "image"}.get(layer, layer)
    if needed not in arrays:
        why = "there is no student yet" if needed == "student" else "the answers could not be read"
        raise InvalidInput(f"this volume has no such layer, because {why}", value=layer, remedy="choose another layer")
    width, height = (arrays["image"].shape[axis] * spacing_mm[axis] for axis in (view.across, view.up))
    scale = side / max(width, height)
    shape = max(1, round(width * scale)), max(1, round(height * scale))

    def scaled(name: str, how: Image.Resampling) -> np.ndarray:
        cut = np.ascontiguousarray(view.cut(arrays[name], index)[::-1])  # rows from the top
        return np.asarray(Image.fromarray(cut).resize(shape, how))

    base = scaled("image", Image.Resampling.BICUBIC)
    picture = _overlaid(np.repeat(base[..., None], 3, axis=2).astype(np.float32), layer, scaled)
    stream = io.BytesIO()
    Image.fromarray(np.round(np.clip(picture, 0, 255)).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def _overlaid(
    picture: Float[np.ndarray, "v u 3"], layer: PictureLayer, scaled: Callable[[str, Image.Resampling], np.ndarray]
) -> Float[np.ndarray, "v u 3"]:
    """Draw a layer over a slice's RGB image, which may be modified.

    ``scaled`` takes the name of an array of the picture, and returns the array's slice resampled to the image's pixels.
    """
    if layer in ("label", "student", "centre", "own", "adapted"):
        values = scaled(layer, Image.Resampling.NEAREST)
        for value in range(1, int(values.max()) + 1):
            mask = values == value
            colour = np.array(COLOURS[(value - 1) % len(COLOURS)], dtype=np.float32)
            picture[mask] = 0.74 * picture[mask] + 0.26 * colour
            picture[edge(mask)] = colour
    elif layer in ("confidence", "doubt"):
        values = scaled(layer, Image.Resampling.BILINEAR) / 255.0
        unsure = np.clip(2 * (values if layer == "doubt" else 1 - values), 0, 1)[..., None]
        picture = (1 - 0.85 * unsure) * picture + 0.85 * unsure * np.array((255, 122, 47), dtype=np.float32)
    elif layer == "disagreement":
        ours = scaled("label", Image.Resampling.NEAREST)
        theirs = scaled("student", Image.Resampling.NEAREST)
        marks = (((ours > 0) & (ours != theirs), (86, 180, 233)), ((ours == 0) & (theirs > 0), (255, 122, 47)))
        for mask, tint in marks:
            picture[mask] = 0.35 * picture[mask] + 0.65 * np.array(tint, dtype=np.float32)
    return picture


def edge(mask: Bool[np.ndarray, "v u"]) -> Bool[np.ndarray, "v u"]:
    """Return the outline of a mask: its pixels that are at most two pixels from its outside.

    Args:
        mask: Boolean image.

    Returns:
        Boolean image of the outline.
    """
    result: np.ndarray = mask & ~binary_erosion(mask, iterations=2)
    return result
