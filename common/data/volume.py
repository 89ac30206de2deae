"""A NIfTI file ↔ an array on the study's grid: RAS+, the study's spacing, centre-cropped or padded, z-scored.

Refuses what would silently train or label wrongly: files that do not read, non-finite or constant or empty images, the
wrong number of channels, label values outside the study, a label drawn on another geometry than its image. A message
names no file and no patient: who opened the file knows which it was.
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
import torch
from jaxtyping import Float, Num, UInt8
from monai.data import MetaTensor
from monai.transforms import NormalizeIntensity, Orientation, ResizeWithPadOrCrop, Spacing, SpatialResample
from nibabel.filebasedimages import ImageFileError
from nibabel.spatialimages import HeaderDataError
from nibabel.wrapstruct import WrapStructError

from common.config import DataConfig
from common.errors import InvalidInput

MAX_FILE_BYTES = 1 << 31
MAX_NATIVE_VOXELS = 1 << 28
_RAS = (("L", "R"), ("P", "A"), ("I", "S"))
_UNREADABLE = (
    ImageFileError,
    HeaderDataError,
    WrapStructError,
    OSError,
    EOFError,
    ValueError,
    TypeError,
    OverflowError,
    MemoryError,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Volume:
    """A volume on the study's grid and the way back.

    ``image``: float32 [c, x, y, z], each channel of mean 0 and variance 1 over its native voxels, padding 0, read-only.
    ``affine``: voxel of the grid → mm in RAS+. ``native_affine``, ``native_shape``: the same of the file.
    """

    image: Float[np.ndarray, "c x y z"]
    affine: Float[np.ndarray, "4 4"]
    native_affine: Float[np.ndarray, "4 4"]
    native_shape: tuple[int, int, int]

    def __post_init__(self) -> None:
        for name, dtype in (("image", np.float32), ("affine", np.float64), ("native_affine", np.float64)):
            array = np.array(getattr(self, name), dtype=dtype)
            array.flags.writeable = False
            object.__setattr__(self, name, array)


def load_volume(path: Path, data: DataConfig) -> Volume:
    """Read an image file onto the study's grid; InvalidInput where it cannot be trusted (see the module)."""
    return volume_from_bytes(_read(path), data)


def volume_from_bytes(content: bytes, data: DataConfig) -> Volume:
    """The same from a file's bytes (.nii or .nii.gz), which is how public volumes travel and are hashed."""
    array, affine = _parse(content, channels=len(data.channels))
    for channel in array:
        if not np.isfinite(channel).all():
            raise InvalidInput("image holds NaN or infinite voxels", remedy="export the scan again")
        if channel.min() == channel.max():
            raise InvalidInput("image is constant: every voxel has the same value", remedy="export the scan again")
    grid = _to_grid(array, affine, data, mode="bilinear")
    native_shape = (array.shape[1], array.shape[2], array.shape[3])
    return Volume(
        image=np.asarray(grid.array, dtype=np.float32),
        affine=np.asarray(grid.affine, dtype=np.float64),
        native_affine=affine,
        native_shape=native_shape,
    )


def load_label(path: Path, data: DataConfig, *, volume: Volume | None = None) -> UInt8[np.ndarray, "x y z"]:
    """Read a label map onto the study's grid by nearest neighbour.

    Refuses values that are not the study's label numbers and, given the image's ``volume``, a label map of another
    shape or one placed elsewhere in space.
    """
    return label_from_bytes(_read(path), data, volume=volume)


def label_from_bytes(content: bytes, data: DataConfig, *, volume: Volume | None = None) -> UInt8[np.ndarray, "x y z"]:
    """:func:`load_label` from a file's bytes."""
    array, affine = _parse(content, channels=1)
    _check_label_values(array, labels=len(data.labels))
    if volume is not None:
        if array.shape[1:] != volume.native_shape:
            raise InvalidInput(
                "label map and image have different shapes",
                value=array.shape[1:],
                limit=str(volume.native_shape),
                remedy="export the label map on the image's own voxels",
            )
        if not np.allclose(affine, volume.native_affine, rtol=0, atol=1e-2):
            raise InvalidInput(
                "label map and image lie at different places in space",
                limit="affines equal to .01 mm",
                remedy="export the label map on the image's own voxels",
            )
    grid = _to_grid(array, affine, data, mode="nearest")
    labels: np.ndarray = np.asarray(grid.array, dtype=np.uint8)[0]
    return labels


def to_native(
    array: Num[np.ndarray, "*c x y z"], volume: Volume
) -> UInt8[np.ndarray, "i j k"] | Float[np.ndarray, "c i j k"]:
    """Bring a result on the study's grid back to the file's own voxels.

    A label map [x, y, z] goes by nearest neighbour and comes back as uint8 [i, j, k]; probabilities [c, x, y, z] go
    linearly and come back as float32 [c, i, j, k]. Outside the grid everything is background (channel 0).
    """
    label = array.ndim == 3
    if array.shape[-3:] != volume.image.shape[-3:] or array.ndim not in (3, 4):
        raise InvalidInput("array to bring back", value=array.shape, limit=f"the grid {volume.image.shape[-3:]}")
    source = MetaTensor(
        torch.tensor(array[None] if label else array, dtype=torch.float32), affine=torch.tensor(volume.affine)
    )
    resample = SpatialResample(mode="nearest" if label else "bilinear", padding_mode="zeros", align_corners=True)
    back = resample(source, dst_affine=torch.tensor(volume.native_affine), spatial_size=volume.native_shape)
    result = np.array(back.array, dtype=np.float32)
    if label:
        labels: np.ndarray = np.rint(result[0]).astype(np.uint8)
        return labels
    result[0] += np.maximum(1 - result.sum(axis=0), 0)
    return result


def save_native(path: Path, array: Num[np.ndarray, "*c x y z"], volume: Volume) -> None:
    """:func:`to_native`, written as a NIfTI file with the original affine (channels last, as MSD has them)."""
    native = to_native(array, volume)
    if native.ndim == 4:
        native = np.moveaxis(native, 0, -1)
    nib.save(nib.Nifti1Image(native, volume.native_affine), path)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise InvalidInput("volume file is too large", limit=f"{MAX_FILE_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"volume file cannot be read ({error.strerror})") from error


def _parse(content: bytes, *, channels: int) -> tuple[Float[np.ndarray, "c i j k"], Float[np.ndarray, "4 4"]]:
    """Bytes → float32 [c, i, j, k] and affine; sizes are checked in the header before anything is allocated."""
    try:
        if content[:2] == b"\x1f\x8b":
            with gzip.open(io.BytesIO(content)) as stream:
                content = stream.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise InvalidInput("volume file is too large", limit=f"{MAX_FILE_BYTES} bytes uncompressed")
        image = nib.Nifti1Image.from_bytes(content)
        shape, kind, affine = image.shape, image.get_data_dtype().kind, np.asarray(image.affine, dtype=np.float64)
    except _UNREADABLE as error:
        raise _unreadable() from error
    if kind not in "iuf":
        raise InvalidInput("voxel type", value=str(image.get_data_dtype()), limit="integers or floating point")
    if len(shape) == 3:
        shape = (*shape, 1)
    if len(shape) != 4 or shape[3] != channels:
        raise InvalidInput(
            "volume's shape",
            value=image.shape,
            limit=f"three dimensions and {channels} channel{'s' if channels > 1 else ''}",
            remedy="one 3D volume per file; a time series is not one",
        )
    if min(shape) < 1 or max(shape[:3]) < 2 or int(np.prod(shape, dtype=np.float64)) > MAX_NATIVE_VOXELS:
        raise InvalidInput("volume's shape", value=image.shape, limit=f"2 to {MAX_NATIVE_VOXELS} voxels")
    if not np.isfinite(affine).all() or abs(np.linalg.det(affine[:3, :3])) < 1e-9:
        raise InvalidInput(
            "volume's affine is singular or not finite", remedy="export the scan again with its geometry"
        )
    try:
        with np.errstate(all="ignore"):
            array = np.asarray(image.dataobj, dtype=np.float32).reshape(shape)
    except _UNREADABLE as error:
        raise _unreadable() from error
    return np.moveaxis(array, -1, 0), affine


def _unreadable() -> InvalidInput:
    return InvalidInput("volume file is damaged, cut short or no NIfTI file", remedy="copy or export it again")


def _check_label_values(array: Float[np.ndarray, "1 i j k"], *, labels: int) -> None:
    values = np.unique(array)
    unknown = [float(v) for v in values if not (np.isfinite(v) and v == int(v) and 0 <= v < labels)]
    if unknown:
        raise InvalidInput(
            "label map holds values the study does not know",
            value=unknown[:5],
            limit=f"integers 0 to {labels - 1}",
            remedy="map the site's labels to the study's",
        )


def _to_grid(
    array: Float[np.ndarray, "c i j k"], affine: Float[np.ndarray, "4 4"], data: DataConfig, *, mode: str
) -> MetaTensor:
    """RAS+, the study's spacing, z-score (images only), then the grid: so that padding is the volume's mean."""
    volume = MetaTensor(torch.tensor(array), affine=torch.tensor(affine))
    volume = Orientation(axcodes="RAS", labels=_RAS)(volume)
    if not np.allclose(np.asarray(volume.pixdim), data.spacing_mm, rtol=0, atol=1e-4):
        volume = Spacing(pixdim=data.spacing_mm, mode=mode, padding_mode="border")(volume)
    if mode == "bilinear":
        volume = NormalizeIntensity(channel_wise=True)(volume)
    return ResizeWithPadOrCrop(spatial_size=data.grid, mode="constant")(volume)
