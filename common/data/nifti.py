"""Reads a NIfTI file's bytes: returns its voxels, its affine and the corrections made, or refuses with the reason.

Called for every volume that a site or the server opens. The header is read before any library repairs it, and every
size in it is checked before memory of that size is allocated. Refuses, before unpacking, a file that announces more
voxels than the caller accepts, or more bytes than a file of its size can compress. Refuses a file that unpacks to more
than it announces. Reads NIfTI-1 and NIfTI-2 in one file, of either byte order, plain or gzipped. Messages name no file.
"""

from __future__ import annotations

import gzip
import io
import math
import stat
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import nibabel as nib
import numpy as np
from jaxtyping import Float
from nibabel.spatialimages import HeaderDataError

from common.data.geometry import Affine, placement
from common.errors import InvalidInput
from common.reading import parsing

MAX_FILE_BYTES = 1 << 31
MAX_NATIVE_VOXELS = 1 << 27
LARGEST_INTENSITY = 1e15
GZIP_RATIO = 1032
"""Largest number of bytes that one byte of gzip can unpack to. Label maps come near this ratio."""
IMAGE_RATIO = 64
"""Largest compression ratio accepted for scans of more than :data:`_SMALL` bytes. Measured scans have 2 to 8, nearly
empty ones 20."""
_SMALL = 1 << 24
MAX_OFFSET = 1 << 24
"""Largest offset of the voxels in bytes. Header and extensions before them usually have kilobytes."""
_GZIP = b"\x1f\x8b"
_HEADERS = {348: nib.Nifti1Header, 540: nib.Nifti2Header}
_SLACK = 1 << 20
"""Most bytes that may follow the voxels, such as padding to a block."""

HOUNSFIELD_AIR = (-1100, -900)
"""Values of air in CT, in Hounsfield units."""
LEAST_AIR = 0.01
"""Least share of voxels with the values of air by which a scan is recognised as CT."""

_OTHERS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x1f\x8b", "is packed with gzip twice", "unpack it once"),
    (0, b"PK\x03\x04", "is a zip archive", "unpack it"),
    (0, b"BZh", "is packed with bzip2", "unpack it, or pack it with gzip"),
    (0, b"\xfd7zXZ\x00", "is packed with xz", "unpack it, or pack it with gzip"),
    (0, b"\x28\xb5\x2f\xfd", "is packed with zstd", "unpack it, or pack it with gzip"),
    (128, b"DICM", "is a DICOM file", "give the folder of the whole series, or convert it to NIfTI"),
    (0, b"NRRD", "is an NRRD file", "convert it to NIfTI"),
    (0, b"ObjectType", "is a MetaImage file", "convert it to NIfTI"),
    (0, b"\x89HDF", "is an HDF5 or MINC file", "convert it to NIfTI"),
    (0, b"\x89PNG", "is a picture", "export the scan itself"),
    (0, b"\xff\xd8\xff", "is a picture", "export the scan itself"),
    (
        0,
        b"\x00\x05\x16\x07",
        "is metadata that macOS keeps about a file",
        "give the file whose name has no ._ in front",
    ),
    (0, b"\x00\x00\x00\x01\x00\x00", "is a FreeSurfer volume", "convert it to NIfTI"),
    (0, b"version https://git-lfs", "is a git-LFS pointer and not the file", "fetch the file itself with git lfs pull"),
)


@dataclass(frozen=True, slots=True)
class Scan:
    """Holds a file's voxels as they are stored, before they are resampled.

    Attributes:
        array: Intensities [c, i, j, k], float32, or float64 if the file has doubles.
        affine: Voxel → mm in RAS+, [4, 4].
        notes: Corrections that were made.
        frame: UID of a DICOM series' frame of reference; empty for other files.
        modalities: Modality of each channel, CT, PET, US or MR, as a DICOM series states it; empty if unknown.
    """

    array: Float[np.ndarray, "c i j k"]
    affine: Affine
    notes: tuple[str, ...] = ()
    frame: str = ""
    modalities: tuple[str, ...] = ()

    def kinds(self) -> tuple[str, ...]:
        """Return the modality of each channel.

        It is the modality that the DICOM series states. If none is stated, it is CT if the values are plainly
        Hounsfield units, and otherwise empty (unknown).
        """
        stated = self.modalities or ("",) * len(self.array)
        return tuple(
            one or ("CT" if _in_hounsfield(channel) else "") for one, channel in zip(stated, self.array, strict=True)
        )


@dataclass(frozen=True, slots=True)
class VolumeLimits:
    """Limits on the size of a volume file.

    Attributes:
        voxels: Largest number of voxels over all channels.
        ratio: Largest number of bytes that one compressed byte may unpack to.
        remedy: The remedy that the error for a larger file states.
    """

    voxels: int = MAX_NATIVE_VOXELS
    ratio: int = GZIP_RATIO
    remedy: str = "crop or downsample the scan"


ANY_ROOM = VolumeLimits()


def read_nifti(content: bytes, *, channels: int | None, room: VolumeLimits = ANY_ROOM) -> Scan:
    """Read one file, with its intensities scaled by slope and intercept.

    Args:
        content: The file's bytes.
        channels: Number of channels it must have; None for any.
        room: Limits on its size. The header is compared with them before anything is unpacked.

    Returns:
        The voxels and their affine.

    Raises:
        InvalidInput: If the file is refused, with the reason and one remedy.
    """
    refused = parsing("volume file is damaged", remedy="copy or export it again")
    with refused, np.errstate(all="ignore"):  # values that are not finite are refused below, so numpy need not warn
        return _read(content, channels=channels, room=room)


def read_nifti_file(path: Path, *, channels: int | None, room: VolumeLimits = ANY_ROOM) -> Scan:
    """Read a file as :func:`read_nifti` reads its bytes; add a note if the file's name contradicts its compression.

    Args:
        path: The file.
        channels: Number of channels it must have; None for any.
        room: Limits on its size.

    Returns:
        The voxels and their affine.

    Raises:
        InvalidInput: If the file cannot be read or is refused, with the reason and one remedy.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # a pipe or a device could be read forever
            raise InvalidInput("volume is not a regular file", remedy="give the path of a NIfTI file")
        if found.st_size > MAX_FILE_BYTES:
            raise InvalidInput(
                "volume file is too large",
                limit=f"at most {MAX_FILE_BYTES} bytes",
                remedy="crop or downsample the scan",
            )
        content = path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"volume file cannot be read ({error.strerror})", remedy="check that it is there and readable"
        ) from error
    scan = read_nifti(content, channels=channels, room=room)
    packed, named = content[:2] == _GZIP, path.name.lower().endswith(".gz")
    if packed == named:
        return scan
    note = "file is compressed though its name does not say so" if packed else "file is not compressed as its name says"
    return replace(scan, notes=(*scan.notes, note))


def _read(content: bytes, *, channels: int | None, room: VolumeLimits) -> Scan:
    packed = content[:2] == _GZIP
    source = _Source(content, packed=packed)
    header, least_offset, extension = _header(source)
    shape = _shape(header, channels, room)
    dtype, more = _voxel_type(header)
    affine, placed = placement(header)
    offset = _offset(header, least_offset)
    extra = _after_header(extension, offset - least_offset)
    needed = math.prod(shape) * dtype.itemsize
    most_ratio = room.ratio if needed > _SMALL else GZIP_RATIO
    if packed and offset + needed > most_ratio * len(content):
        raise InvalidInput(
            "compression ratio of the volume file",
            value=(offset + needed) // len(content),
            limit=f"at most {most_ratio}",
            remedy="export the scan again: it is cut short, or nearly all of it is empty",
        )
    voxels = source.slice(offset, needed)
    left = source.left_over(most := max(_SLACK, needed))
    if left > most:
        raise InvalidInput(
            "file is longer than its header says",
            limit=f"at most {offset + needed + most} bytes",
            remedy="export the scan again",
        )
    notes = (*more, *placed, *extra, *(["bytes after the voxels left out"] if left else []))
    array = np.frombuffer(voxels, dtype=dtype).reshape(shape, order="F")
    return Scan(array=np.moveaxis(_intensities(array, header), -1, 0), affine=affine, notes=notes)


class _Source:
    """A file's bytes, unpacked only as far as they are requested."""

    def __init__(self, content: bytes, *, packed: bool) -> None:
        self._stream = gzip.GzipFile(fileobj=io.BytesIO(content)) if packed else io.BytesIO(content)
        self._start = b""

    def start(self, count: int) -> bytes:
        """Return the first ``count`` bytes, or fewer if the file is shorter. A later call may ask for more."""
        self._start += self._take(max(0, count - len(self._start)))
        return self._start

    def slice(self, offset: int, count: int) -> bytes:
        """Return ``count`` bytes from ``offset``.

        Raises:
            InvalidInput: If the file is shorter or damaged.
        """
        voxels = self.start(offset)[offset:]
        voxels += self._take(count - len(voxels))
        if len(voxels) < count:
            raise InvalidInput(
                "volume file is cut short", limit=f"at least {offset + count} bytes", remedy="copy or export it again"
            )
        return voxels

    def left_over(self, most: int) -> int:
        """Count the bytes that follow, up to a little more than ``most``. Reading to the end checks gzip's checksum."""
        total = 0
        while total <= most and (piece := self._take(1 << 20)):
            total += len(piece)
        return total

    def _take(self, count: int) -> bytes:
        try:
            return self._stream.read(count)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidInput("volume file is damaged", remedy="copy or export it again") from error


def _header(source: _Source) -> tuple[nib.Nifti1Header, int, int | None]:
    """Return the header as stated, the least offset in bytes of the voxels, and the size of an extension before them.

    The size is None if no extension of the header is announced.
    """
    start = source.start(348)
    if not start:
        raise InvalidInput("volume file is empty", remedy="copy or export it again")
    for position, magic, what, remedy in _OTHERS:
        if start[position : position + len(magic)] == magic:
            raise InvalidInput(f"file {what}", remedy=remedy)
    if start.lstrip()[:1] == b"<":
        raise InvalidInput("file is a web page and not a scan", remedy="download it again, logged in")
    for endianness in ("<", ">"):
        size = int(np.frombuffer(start[:4], dtype=f"{endianness}i4")[0]) if len(start) >= 4 else 0
        if size not in _HEADERS:
            continue
        start = source.start(size)
        if len(start) < size:
            raise InvalidInput("volume file is damaged: cut in its header", remedy="copy or export it again")
        header = _HEADERS[size](binaryblock=start, endianness=endianness, check=False)
        magic = start[344:348] if size == 348 else start[4:12]
        if magic[:3] == b"ni1" and size == 348:
            raise InvalidInput("volume lies in two files, .hdr and .img", remedy="convert it to one .nii.gz")
        if magic == b"\x00\x00\x00\x00":
            raise InvalidInput(
                "volume is Analyze 7.5, which does not state which side is left", remedy="export it again as NIfTI"
            )
        if magic in (b"n+1\x00", b"n+2\x00\r\n\x1a\n"):
            extra = source.start(size + 8)[size:]
            order: Literal["little", "big"] = "little" if endianness == "<" else "big"
            announced = len(extra) == 8 and extra[0] != 0
            return header, size + 4, int.from_bytes(extra[4:], order, signed=True) if announced else None
    raise InvalidInput("file is no NIfTI file", remedy="copy or export it again")


def _shape(header: nib.Nifti1Header, channels: int | None, room: VolumeLimits) -> tuple[int, int, int, int]:
    """Return the shape [i, j, k, c].

    i, j and k are the sizes of the three spatial axes. The number c of channels is the size of the one later axis that
    is longer than 1, or 1 if there is none.
    """
    dim = [int(n) for n in header["dim"]]
    sizes = dim[1 : dim[0] + 1] if 1 <= dim[0] <= 7 else []
    if not sizes or min(sizes) < 1:
        raise InvalidInput(
            "volume's shape", value=tuple(dim), limit="1 to 7 axes of at least 1 voxel", remedy="export the scan again"
        )
    if len(sizes) < 3 or min(sizes[:3]) < 2:
        raise InvalidInput(
            "volume is a single slice",
            value=tuple(sizes),
            limit="three axes of at least 2 voxels",
            remedy="export the whole volume",
        )
    if math.prod(sizes) > room.voxels:
        limit = f"at most {room.voxels} in all"
        raise InvalidInput("voxels in a volume", value=tuple(sizes), limit=limit, remedy=room.remedy)
    several = [n for n in sizes[3:] if n > 1]
    count = several[0] if several else 1
    if len(several) > 1 or (channels is not None and count != channels):
        raise InvalidInput(
            "volume's channels",
            value=tuple(sizes),
            limit=f"three axes of voxels, then {channels or 'any number of'} channel{'' if channels == 1 else 's'}",
            remedy="give one 3D volume per file and channel, not a time series",
        )
    return sizes[0], sizes[1], sizes[2], count


def _voxel_type(header: nib.Nifti1Header) -> tuple[np.dtype, tuple[str, ...]]:
    try:
        dtype = header.get_data_dtype()
        known = dtype.kind in "iuf"
    except (HeaderDataError, KeyError):
        dtype, known = np.dtype(np.void), False
    if not known:
        raise InvalidInput(
            "voxel type",
            value=int(header["datatype"]),
            limit="NIfTI's codes of integers and floating point",
            remedy="export the scan with integer or float voxels",
        )
    return dtype, () if int(header["bitpix"]) == 8 * dtype.itemsize else ("bitpix contradicts the voxel type: ignored",)


def _offset(header: nib.Nifti1Header, least: int) -> int:
    offset = float(header["vox_offset"])
    if not offset.is_integer() or not least <= offset <= MAX_OFFSET:
        raise InvalidInput(
            "start of the voxels in the file, as an offset",
            value=offset,
            limit=f"a whole number of bytes from {least} to {MAX_OFFSET}",
            remedy="export the scan again",
        )
    return int(offset)


def _after_header(extension: int | None, room: int) -> tuple[str, ...]:
    """Return a note if the header announces an extension that is not there. Refuse voxels that begin inside one.

    Args:
        extension: Size in bytes that the extension states; None if none is announced.
        room: Number of bytes between header and voxels.
    """
    if extension is None or 16 <= extension <= room:
        return ()
    if extension < 16 or extension % 16 or extension > MAX_OFFSET:
        return ("the header announces an extension that is not there: ignored",)
    raise InvalidInput(
        "start of the voxels in the file, inside a header extension",
        value=f"{room} bytes after the header",
        limit=f"at least {extension}, the extension's size",
        remedy="export the scan again",
    )


def _intensities(array: np.ndarray, header: nib.Nifti1Header) -> Float[np.ndarray, "i j k c"]:
    """Return slope · stored + intercept. NaN and infinity are allowed; a scale or a value that no scanner produces is
    refused.
    """
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if math.isinf(slope) or (slope != 0 and not math.isnan(slope) and not math.isfinite(intercept)):
        raise InvalidInput(
            "scale slope and intercept",
            value=(slope, intercept),
            limit="finite numbers",
            remedy="export the scan again",
        )
    if (slope not in (0.0, 1.0) and not math.isnan(slope)) or (slope == 1.0 and intercept != 0):
        array = array.astype(np.float64) * slope + intercept
    if array.dtype.kind == "f":
        largest = max(float(np.abs(c[np.isfinite(c)]).max(initial=0)) for c in np.moveaxis(array, -1, 0))
        scaled_over = array.dtype.itemsize > 4 and bool(np.isinf(array).any()) and slope not in (0.0, 1.0)
        if largest > LARGEST_INTENSITY or scaled_over:
            raise InvalidInput(
                "largest intensity",
                value=float(f"{largest:.3g}"),
                limit=f"at most {LARGEST_INTENSITY:g}",
                remedy="replace the value that marks missing voxels, and export the scan again",
            )
    if array.dtype.kind == "f" and array.dtype.itemsize in (4, 8):
        result: np.ndarray = array.astype(array.dtype.newbyteorder("="), copy=False)
    else:
        result = array.astype(np.float64 if array.dtype.kind == "f" else np.float32)
    return result


def _in_hounsfield(channel: Float[np.ndarray, "i j k"]) -> bool:
    """Tell whether values are plainly Hounsfield units: whole numbers, many of them air, only padding below air.

    An MR image has no such values: magnitudes are not negative, and phases lie on both sides of air's values.
    """
    low, high = HOUNSFIELD_AIR
    if channel.min() > high:
        return False
    below = channel[channel < low]
    air = np.count_nonzero(channel <= high) - below.size
    one_padding = not below.size or below.min() == below.max()
    return bool(one_padding and air >= LEAST_AIR * channel.size and np.array_equal(channel, np.rint(channel)))
