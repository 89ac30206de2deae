"""Resamples a case's files to the study's grid and back: RAS+, the study's spacing, cropped or padded, z-scored.

Called wherever an image or a label map is opened for training, prediction or scoring. In this order:

1. Files are read (:mod:`common.data.nifti`, :mod:`common.data.dicom`) and placed in space
   (:mod:`common.data.geometry`).
2. Extent and values are checked.
3. The volume is turned to RAS+ and resampled to the study's spacing.
4. Images are z-scored, then everything is cropped or padded about the centre.

A box (:mod:`common.data.box`) is cut out before step 2; results still lie on the whole file's voxels.

Refuses files that would silently lead to wrong training or labels: unreadable files, contradictory affines, non-finite
or constant images, the wrong number of channels, label values outside the study, a label map with another geometry than
its image. Corrections are listed in ``notes``. Messages name no file and no patient, since the caller knows which file
it opened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from jaxtyping import Float, Num, UInt8
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensity, Orientation, ResizeWithPadOrCrop, Spacing, SpatialResample
from nibabel.orientations import io_orientation

from common.config import DataConfig
from common.data import dicom, dicom_labels, dicom_structures, geometry
from common.data.box import Box, cut
from common.data.dataset import Case
from common.data.memory import free_memory_bytes
from common.data.nifti import (
    GZIP_RATIO,
    IMAGE_RATIO,
    MAX_NATIVE_VOXELS,
    Scan,
    VolumeLimits,
    read_nifti,
    read_nifti_file,
)
from common.errors import InvalidInput
from common.names import comparable, modality_in
from common.objects import drafting

LABEL_ROUNDING = 1e-3
LOST_WORTH_A_NOTE = 0.01
MOST_COARSER = 16
ROOM_VOXELS, RESAMPLED_VOXELS, MOST_OF_A_GRID = 1 << 25, 20_000_000, 64
"""Limits on a scan: its number of voxels as stored, and at the study's spacing (a head at 1 mm has 17 million). For a
large grid both limits are higher: the third number times the voxels of the study's grid."""
SMALL_VOXELS = 1 << 22
"""Number of voxels that is always accepted, even if little memory seems free."""
BYTES_A_VOXEL = 72
"""Measured peak memory of resampling a scan to a grid, in bytes for each voxel before or after resampling."""
_RAS = (("L", "R"), ("P", "A"), ("I", "S"))


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume on the study's grid, with the facts needed to bring results back to the file's own voxels.

    Attributes:
        image: Float32 [c, x, y, z], read-only. Each channel has mean 0 and variance 1 over its native voxels (over the
            non-zero ones if the study says so). Padding is 0.
        affine: Voxel of the grid → mm in RAS+.
        native_affine: Voxel of the file → mm in RAS+.
        native_shape: Shape of the file.
        notes: Corrections that were made.
        frame: UID of the frame of reference of a DICOM series; empty for other files.
        seen_shape: Shape of the part of the file that was used; the file's shape unless a box was cut out.
        foreign: Modalities that the file's channels have, and that differ from those that the study names for these
            channels. They are recognised by a DICOM header or by Hounsfield units.
    """

    image: Float[np.ndarray, "c x y z"]
    affine: Float[np.ndarray, "4 4"]
    native_affine: Float[np.ndarray, "4 4"]
    native_shape: tuple[int, int, int]
    notes: tuple[str, ...] = ()
    frame: str = ""
    seen_shape: tuple[int, int, int] = (0, 0, 0)
    foreign: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not any(self.seen_shape):
            object.__setattr__(self, "seen_shape", self.native_shape)
        for name, dtype in (("image", np.float32), ("affine", np.float64), ("native_affine", np.float64)):
            array = np.array(getattr(self, name), dtype=dtype)
            array.flags.writeable = False
            object.__setattr__(self, name, array)


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled case for training: the volume, its label map on the same grid, and the corrections made."""

    volume: Volume
    label: UInt8[np.ndarray, "x y z"]
    notes: tuple[str, ...]


def load_example(case: Case, data: DataConfig) -> Example:
    """Read a labelled case onto the study's grid.

    Args:
        case: A case that was matched to the study.
        data: The study's data settings.

    Returns:
        Volume and label map.

    Raises:
        InvalidInput: If the case has no label map, or a file has a fault that the module's docstring lists.
    """
    if case.label is None:
        raise InvalidInput("case has no label map", remedy="add its label map, or leave the case out")
    volume = load_case(case, data)
    scan, mapping = _label_scan(case.label, data, volume, dict(case.label_map), dict(case.structures))
    label, notes = _read_label(scan, data, volume=volume, mapping=mapping)
    return Example(volume=volume, label=label, notes=(*volume.notes, *notes))


def load_case(case: Case, data: DataConfig, *, box: Box | None = None) -> Volume:
    """Read the image of a case onto the study's grid. Channels that the site does not have are filled with 0, the mean
    of a z-scored channel.

    Args:
        case: A case that was matched to the study.
        data: The study's data settings.
        box: The part of the file to use; None for the whole file.

    Returns:
        The volume.

    Raises:
        InvalidInput: If the image has a fault that the module's docstring lists.
    """
    if not case.absent:
        return load_volume(case.images, data, order=case.channel_order, box=box)
    there = [place for place in range(len(data.channels)) if place not in case.absent]
    known = replace(data, channels=tuple(data.channels[i] for i in there))
    found = load_volume(case.images, known, order=case.channel_order, box=box)
    image = np.zeros((len(data.channels), *found.image.shape[1:]), np.float32)
    image[there] = found.image
    return replace(found, image=image)


def load_volume(
    path: Path | Sequence[Path], data: DataConfig, *, order: Sequence[int] = (), box: Box | None = None
) -> Volume:
    """Read an image onto the study's grid.

    Args:
        path: A file with all channels, a folder with one DICOM series, or a sequence with one of either for each
            channel.
        data: The study's data settings.
        order: Which of a file's channels to take, in which order; empty for all.
        box: The part of the file to use; None for the whole file.

    Returns:
        The volume.

    Raises:
        InvalidInput: If the image has a fault that the module's docstring lists.
    """
    paths = [path] if isinstance(path, Path) else list(path)
    room = room_for(data)
    if len(paths) > 1:
        each = replace(room, voxels=room.voxels // len(paths))
        return _volume(_stack([_scan(path, channels=1, room=each) for path in paths]), data, box)
    scan = _scan(paths[0], channels=None if order else len(data.channels), room=room)
    if order and max(order) >= len(scan.array):
        raise InvalidInput("volume's channels", value=len(scan.array), limit=f"at least {max(order) + 1}")
    return _volume(replace(scan, array=scan.array[list(order)]) if order else scan, data, box)


def volume_from_bytes(content: bytes, data: DataConfig) -> Volume:
    """Read an image from a file's bytes onto the study's grid. Public volumes are sent and hashed as such bytes.

    Args:
        content: Bytes of a .nii or .nii.gz file.
        data: The study's data settings.

    Returns:
        The volume.

    Raises:
        InvalidInput: If the image has a fault that the module's docstring lists.
    """
    return _volume(read_nifti(content, channels=len(data.channels), room=room_for(data)), data)


def example_from_bytes(image: bytes, label: bytes, data: DataConfig) -> Example:
    """Read a labelled public volume from its files' bytes, with the study's own label numbers.

    Args:
        image: Bytes of the image's NIfTI file.
        label: Bytes of the label map's NIfTI file.
        data: The study's data settings.

    Returns:
        Volume and label map.

    Raises:
        InvalidInput: If a file has a fault that the module's docstring lists.
    """
    volume = volume_from_bytes(image, data)
    scan = read_nifti(label, channels=1, room=_label_room(data, volume))
    found, notes = _read_label(scan, data, volume=volume, mapping={})
    return Example(volume=volume, label=found, notes=(*volume.notes, *notes))


def load_label(
    path: Path,
    data: DataConfig,
    *,
    volume: Volume | None = None,
    mapping: Mapping[int, int] | None = None,
    structures: Mapping[str, int] | None = None,
) -> UInt8[np.ndarray, "x y z"]:
    """Read a label map onto the study's grid by nearest neighbour.

    Args:
        path: File of the label map.
        data: The study's data settings.
        volume: The image, if there is one. A label map in another axis order or resolution of the same space is brought
            to the image's voxels; one of another space is refused.
        mapping: The file's values → the study's; it must contain every value of the file. None if they are equal.
        structures: The names of an RT Structure Set's structures → the study's labels; None if they are the study's.

    Returns:
        Uint8 array on the grid.

    Raises:
        InvalidInput: If values are unknown, the label map lies at another place than the image, or the file is
            unreadable.
    """
    scan, mapping = _label_scan(path, data, volume, mapping or {}, structures or {})
    return _read_label(scan, data, volume=volume, mapping=mapping)[0]


def load_native_label(
    path: Path,
    data: DataConfig,
    *,
    volume: Volume,
    mapping: Mapping[int, int] | None = None,
    structures: Mapping[str, int] | None = None,
) -> UInt8[np.ndarray, "i j k"]:
    """Read a label map on its image's own voxels, in the study's label numbers, to score results in native space.

    Args:
        path: File of the label map.
        data: The study's data settings.
        volume: The image.
        mapping: The file's values → the study's; it must contain every value of the file. None if they are equal.
        structures: The names of an RT Structure Set's structures → the study's labels; None if they are the study's.

    Returns:
        Uint8 array of the image file's shape.

    Raises:
        InvalidInput: If values are unknown, the label map lies at another place than the image, or the file is
            unreadable.
    """
    scan, mapping = _label_scan(path, data, volume, mapping or {}, structures or {})
    array, _ = _label_values(scan.array, labels=len(data.labels), mapping=mapping)
    placed, _ = _onto_image(array, scan.affine, volume)
    labels: np.ndarray = placed[0].astype(np.uint8)
    return labels


def to_native(
    array: Num[np.ndarray, "*c x y z"], volume: Volume
) -> UInt8[np.ndarray, "i j k"] | Float[np.ndarray, "c i j k"]:
    """Resample a result on the study's grid back to the file's own voxels.

    Args:
        array: A label map [x, y, z], resampled by nearest neighbour, or probabilities [c, x, y, z] of c classes,
            resampled linearly.
        volume: The volume that was segmented.

    Returns:
        Uint8 [i, j, k] or float32 [c, i, j, k]. Outside the grid everything is background (channel 0).

    Raises:
        InvalidInput: If the array is not on the grid.
    """
    label = array.ndim == 3
    if array.shape[-3:] != volume.image.shape[-3:] or array.ndim not in (3, 4):
        raise InvalidInput(
            "shape of the result to resample", value=array.shape, limit=f"the grid {volume.image.shape[-3:]}"
        )
    mode = "nearest" if label else "bilinear"
    to_file = volume.native_affine, volume.native_shape
    result = _moved(array[None] if label else array, volume.affine, *to_file, mode=mode, padding="zeros")
    if label:
        labels: np.ndarray = np.rint(result[0]).astype(np.uint8)
        return labels
    result[0] += np.maximum(1 - result.sum(axis=0), 0)
    return result


def onto_grid(
    probabilities: Float[np.ndarray, "k x y z"], source: Volume, target: Volume
) -> Float[np.ndarray, "k u v w"]:
    """Resample probabilities linearly from one grid to another grid of the same scan, by their position in space.

    Args:
        probabilities: Probabilities of k classes, [k, x, y, z], on the grid of ``source``.
        source: The volume they belong to.
        target: The volume whose grid is wanted.

    Returns:
        Float32 array of shape [k, u, v, w] on the target's grid of u × v × w voxels, summing to 1 in every voxel.
    """
    to_target = target.affine, target.image.shape[1:]
    found = _moved(probabilities, source.affine, *to_target, mode="bilinear", padding="border")
    result: np.ndarray = found / found.sum(axis=0)
    return result


def _moved(
    array: np.ndarray, affine: np.ndarray, to: np.ndarray, shape: tuple[int, ...], *, mode: str, padding: str
) -> Float[np.ndarray, "c i j k"]:
    """Resample an array [c, …] from the voxels of one affine to those of another one."""
    resample = SpatialResample(mode=mode, padding_mode=padding, align_corners=True)
    source = MetaTensor(torch.tensor(array, dtype=torch.float32), affine=torch.tensor(affine))
    return np.array(resample(source, dst_affine=torch.tensor(to), spatial_size=shape).array, dtype=np.float32)


def save_label(
    path: Path, native: Num[np.ndarray, "i j k ..."], volume: Volume, *, description: str = "", comment: str = ""
) -> None:
    """Write an array as NIfTI, on the voxels of the file that ``volume`` was read from, with that file's affine in mm.

    Args:
        path: Where to write.
        native: Array with the shape of the file that ``volume`` was read from.
        volume: The volume whose voxels and affine are used.
        description: ASCII text of at most 79 characters for the header's field ``descrip``.
        comment: Text of any length for a header extension of the kind "comment"; empty to add none.
    """
    image = nib.Nifti1Image(native, volume.native_affine)
    image.header.set_xyzt_units("mm")
    image.header["descrip"] = description
    if comment:
        image.header.extensions.append(nib.nifti1.Nifti1Extension("comment", comment.encode()))
    with drafting(path) as draft:
        nib.save(image, draft)


def room_for(data: DataConfig) -> VolumeLimits:
    """Return the limits on the size of a scan that this study accepts.

    Args:
        data: The study's data settings.

    Returns:
        The largest number of voxels, the largest compression ratio (:data:`~common.data.nifti.IMAGE_RATIO`), and the
        remedy for a larger scan. The number of voxels is :data:`MOST_OF_A_GRID` times the grid's over all channels, or
        :data:`ROOM_VOXELS` if that is more, and never above :data:`~common.data.nifti.MAX_NATIVE_VOXELS`. Little free
        memory lowers it, to :data:`SMALL_VOXELS` at the least.
    """
    grid = len(data.channels) * math.prod(data.grid)
    voxels = min(MAX_NATIVE_VOXELS, max(ROOM_VOXELS, MOST_OF_A_GRID * grid))
    if (free := free_memory_bytes()) is not None and free // BYTES_A_VOXEL < voxels:
        remedy = "give the program more memory, or crop or downsample the scan"
        return VolumeLimits(max(free // BYTES_A_VOXEL, SMALL_VOXELS), IMAGE_RATIO, remedy)
    return VolumeLimits(voxels, IMAGE_RATIO)


def _label_room(data: DataConfig, volume: Volume | None) -> VolumeLimits:
    """Return the size limits of a label map, which may be twice as fine as its image on each axis."""
    most = room_for(data)
    voxels = most.voxels if volume is None else min(most.voxels, max(SMALL_VOXELS, 8 * math.prod(volume.native_shape)))
    return replace(most, voxels=voxels, ratio=GZIP_RATIO)


def _label_scan(
    path: Path, data: DataConfig, volume: Volume | None, mapping: Mapping[int, int], structures: Mapping[str, int]
) -> tuple[Scan, Mapping[int, int]]:
    """Read a label map's file. Return the scan, and a mapping from its values to the study's.

    A DICOM Segmentation is placed onto its image's voxels. The contours of an RT Structure Set are filled on these
    voxels, with the study's values.
    """
    room = _label_room(data, volume)
    if path.suffix.lower() != dicom_labels.ENDING:
        return _scan(path, channels=1, room=room), mapping
    if not dicom_structures.is_structure_set(path):
        scan = dicom_labels.read_segmentation(path, room=room)
        return scan if volume is None else dicom_labels.onto_image(
            scan, volume.native_affine, volume.native_shape
        ), mapping
    names = structures or {comparable(name): value for value, name in enumerate(data.labels)}
    scan = dicom_structures.read_structures(
        path,
        names=names,
        frame="" if volume is None else volume.frame,
        affine=np.eye(4) if volume is None else volume.native_affine,
        shape=(1, 1, 1) if volume is None else volume.native_shape,
    )
    return scan, {}


def _scan(path: Path, *, channels: int | None, room: VolumeLimits) -> Scan:
    """Read a file or a DICOM folder."""
    if os.path.isdir(path):
        return dicom.read_series(path, room=room)
    return read_nifti_file(path, channels=channels, room=room)


def _stack(scans: list[Scan]) -> Scan:
    """Join one scan per channel on the first one's voxels; refuse scans that lie on different voxels."""
    first, *others = scans
    arrays, notes = [first.array], list(first.notes)
    for scan in others:
        array, affine = scan.array, scan.affine
        if not np.array_equal(io_orientation(affine), io_orientation(first.affine)):
            array, affine = geometry.to_axes_of(array, affine, first.affine)
            notes.append("a channel with another axis order was turned to the first channel's")
        if array.shape != first.array.shape or not geometry.same_place(first.affine, affine, array.shape[1:]):
            raise InvalidInput(
                "the channels lie on different voxels",
                value=array.shape[1:],
                limit=str(first.array.shape[1:]),
                remedy="register the channels and resample them onto one of them",
            )
        if any(np.array_equal(array, known) for known in arrays):
            raise InvalidInput("two channels hold the same image", remedy="give each contrast its own file")
        arrays.append(array)
        notes += scan.notes
    modalities = tuple(modality for scan in scans for modality in scan.modalities or ("",))
    return replace(first, array=np.concatenate(arrays), notes=tuple(dict.fromkeys(notes)), modalities=modalities)


def _volume(whole: Scan, data: DataConfig, box: Box | None = None) -> Volume:
    scan = whole if box is None else cut(whole, box)
    _check_extent(scan, data)
    _check_image(scan.array, labels=len(data.labels))
    grid = _fit(_resample(_plain_float(scan.array), scan.affine, data, mode="bilinear"), data, normalise=True)
    image = np.asarray(grid.array, dtype=np.float32)
    if not np.isfinite(image).all():
        raise InvalidInput("image cannot be brought to the study's grid", remedy="export the scan again")
    return Volume(
        image=image,
        affine=np.asarray(grid.affine, dtype=np.float64),
        native_affine=whole.affine,
        native_shape=(whole.array.shape[1], whole.array.shape[2], whole.array.shape[3]),
        notes=scan.notes,
        frame=scan.frame,
        seen_shape=(scan.array.shape[1], scan.array.shape[2], scan.array.shape[3]),
        foreign=frozenset(
            k for k, name in zip(whole.kinds(), data.channels, strict=True) if k and k != modality_in(name)
        ),
    )


def _check_image(array: Float[np.ndarray, "c i j k"], *, labels: int) -> None:
    for channel in array:
        if not np.isfinite(channel).all():
            raise InvalidInput(
                "image holds NaN or infinite voxels",
                remedy="replace these voxels by the background's value, or export the image again",
            )
        low, high = float(channel.min()), float(channel.max())
        if low == high:
            raise InvalidInput("image is constant: every voxel has the same value", remedy="export the scan again")
        if low >= 0 and high < labels and np.array_equal(channel, np.rint(channel)):
            raise InvalidInput("image is a label map: it holds only label numbers", remedy="give the scan as the image")


def _plain_float(array: Float[np.ndarray, "c i j k"]) -> Float[np.ndarray, "c i j k"]:
    """Return float32. Intensities whose squares would underflow are scaled up first; the z-score undoes the scale."""
    largest = float(np.abs(array).max(initial=0))
    if 0 < largest < 1e-6:
        array = array.astype(np.float64) / largest
    result: np.ndarray = array.astype(np.float32, copy=False)
    return result


def _read_label(
    scan: Scan, data: DataConfig, *, volume: Volume | None, mapping: Mapping[int, int]
) -> tuple[UInt8[np.ndarray, "x y z"], tuple[str, ...]]:
    array, notes = _label_values(scan.array, labels=len(data.labels), mapping=mapping)
    affine = scan.affine
    if volume is not None:
        array, placed = _onto_image(array, affine, volume)
        affine, notes = volume.native_affine, (*notes, *placed)
    else:
        _check_extent(scan, data)
    spaced = _resample(array, affine, data, mode="nearest")
    grid = _fit(spaced, data, normalise=False)
    labels: np.ndarray = np.asarray(grid.array, dtype=np.uint8)[0]
    before, after = int((spaced != 0).sum()), int((labels != 0).sum())
    if before == 0:
        notes = (*notes, "the label map holds no structure")
    elif after == 0:
        raise InvalidInput(
            "every structure lies outside the study's grid",
            limit=" × ".join(map(str, data.grid)),
            remedy="crop the scan around the structures",
        )
    elif after < (1 - LOST_WORTH_A_NOTE) * before:
        notes = (*notes, f"{1 - after / before:.0%} of the structures' voxels lie outside the study's grid")
    return labels, (*scan.notes, *notes)


def _label_values(
    array: Float[np.ndarray, "1 i j k"], *, labels: int, mapping: Mapping[int, int]
) -> tuple[Float[np.ndarray, "1 i j k"], tuple[str, ...]]:
    """Return the study's label numbers; values within rounding of a whole number are rounded."""
    values = np.unique(array)
    whole = np.rint(values)
    near = np.isfinite(values) & (np.abs(values - whole) <= LABEL_ROUNDING)
    known = set(mapping) if mapping else set(range(labels))
    if not near.all():
        raise InvalidInput(
            "label map holds values that are not whole numbers",
            value=values[~near][:5].tolist(),
            limit=", ".join(map(str, sorted(known))),
            remedy="export it again as a map of labels, not of probabilities or intensities",
        )
    unknown = [float(number) for number in whole if int(number) not in known]
    if unknown:
        raise InvalidInput(
            "label map holds values that the study does not define",
            value=unknown[:5],
            limit=", ".join(map(str, sorted(known))),
            remedy="correct the label map, or map its values to the study's: at a site in [labels] of site.toml, for "
            "`consilium predict` with --label-map",
        )
    notes = ("label values were rounded to whole numbers",) if not np.array_equal(values, whole) else ()
    rounded = np.rint(array)
    if not mapping:
        return rounded, notes
    result = np.zeros_like(rounded)
    for value, target in mapping.items():
        result[rounded == value] = target
    return result, notes


def _onto_image(
    array: Float[np.ndarray, "1 i j k"], affine: Float[np.ndarray, "4 4"], volume: Volume
) -> tuple[Float[np.ndarray, "1 i j k"], tuple[str, ...]]:
    """Resample the label map to its image's own voxels if it is certain that both cover the same space, else refuse
    it.
    """
    shape, target = volume.native_shape, volume.native_affine
    if array.shape[1:] == shape and geometry.same_place(target, affine, shape):
        return array, ()
    turned, placed = geometry.to_axes_of(array, affine, target)
    if turned.shape[1:] == shape and geometry.same_place(target, placed, shape):
        return turned, ("label map with another axis order was turned to the image's",)
    if turned.shape[1:] != shape and geometry.same_box(target, shape, placed, turned.shape[1:]):
        moved = _moved(turned, placed, target, shape, mode="nearest", padding="border")
        return moved, ("label map on other voxels was resampled to the image's",)
    if array.shape[1:] != shape:
        raise InvalidInput(
            "label map and image have different shapes",
            value=array.shape[1:],
            limit=str(shape),
            remedy="export the label map on the image's own voxels",
        )
    raise InvalidInput(
        "label map and image lie at different places in space",
        limit="at most a tenth of a voxel between the places of each voxel",
        remedy="export the label map on the image's own voxels",
    )


def _check_extent(scan: Scan, data: DataConfig) -> None:
    """Refuse, before resampling, a scan that is far coarser than the study's spacing, or that has too many voxels at
    this spacing.
    """
    sizes = geometry.voxel_sizes(scan.affine)
    if float(sizes.max()) > MOST_COARSER * max(data.spacing_mm):
        raise InvalidInput(
            "scan is too coarse for the study: voxel spacing in mm",
            value=tuple(float(f"{size:.3g}") for size in sizes),
            limit=f"at most {MOST_COARSER} times the study's largest spacing, {max(data.spacing_mm):g}",
            remedy="export the scan itself and not a localiser, or check its spacing",
        )
    extent = [n * float(size) for n, size in zip(scan.array.shape[1:], sizes, strict=True)]
    resampled = math.prod(math.ceil(length / min(data.spacing_mm)) + 1 for length in extent) * len(scan.array)
    room = room_for(data)
    most = min(room.voxels, max(RESAMPLED_VOXELS, MOST_OF_A_GRID * len(scan.array) * math.prod(data.grid)))
    if resampled > most:
        raise InvalidInput(
            "field of view in mm",
            value=tuple(round(length, 1) for length in extent),
            limit=f"at most {most} voxels at the study's spacing",
            remedy=f"check the scan's spacing, or {room.remedy}",
        )


def _resample(
    array: Float[np.ndarray, "c i j k"], affine: Float[np.ndarray, "4 4"], data: DataConfig, *, mode: str
) -> MetaTensor:
    """Turn to RAS+ and resample to the study's spacing, which also removes a shear."""
    volume = MetaTensor(torch.tensor(array, dtype=torch.float32), affine=torch.tensor(affine))
    volume = Orientation(axcodes="RAS", labels=_RAS)(volume)
    spaced = np.allclose(np.asarray(volume.pixdim), data.spacing_mm, rtol=0, atol=1e-4)
    if not spaced or geometry.shear(affine) > geometry.SHEAR_OF_ROUNDING:
        volume = Spacing(pixdim=data.spacing_mm, mode=mode, padding_mode="border")(volume)
    return volume


def _fit(volume: MetaTensor, data: DataConfig, *, normalise: bool) -> MetaTensor:
    """Z-score images, then crop or pad to the grid, so that padding has the volume's mean."""
    if normalise:
        volume = NormalizeIntensity(channel_wise=True, nonzero=data.normalisation == "nonzero")(volume)
    return ResizeWithPadOrCrop(spatial_size=data.grid, mode="constant")(volume)
