"""Makes small files that become very large when they are unpacked."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import nibabel as nib
import numpy as np


def bomb(shape: tuple[int, ...], dtype: str, *, spacing: float = 1.0, label: bool = False) -> bytes:
    """Return a gzipped volume of zeros and one other voxel, without ever holding all its voxels."""
    header = nib.Nifti1Header()
    header.set_data_shape(shape)
    header.set_data_dtype(dtype)
    header.set_zooms((spacing, spacing, spacing))
    header.set_sform(np.diag([spacing, spacing, spacing, 1.0]), code=1)
    header.set_xyzt_units("mm")
    header["magic"], header["vox_offset"] = b"n+1", 352
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    left = int(np.prod(shape)) * np.dtype(dtype).itemsize - 1
    pieces = [packer.compress(header.binaryblock + bytes(4) + (b"\x01" if label else b"\x7f"))]
    while left > 0:
        pieces.append(packer.compress(bytes(min(left, 1 << 22))))
        left -= 1 << 22
    return b"".join((*pieces, packer.flush()))


def element(tag: int, kind: bytes, value: bytes) -> bytes:
    """Return a little-endian DICOM element that states its kind."""
    value += (b"\0" if kind in (b"UI", b"OB") else b" ") * (len(value) % 2)
    head = struct.pack("<HH2s", tag >> 16, tag & 0xFFFF, kind)
    long = kind in (b"OB", b"OW", b"SQ", b"UN")
    return head + struct.pack("<2xI" if long else "<H", len(value)) + value


def dicom_slice(
    *, rows: int, columns: int, syntax: bytes, pieces: Iterable[bytes], more: bytes = b"", number: int = 1
) -> bytes:
    """Return a file of an MR series: ``pieces`` are its pixels unchanged; ``more`` stands in the header before the
    size.
    """
    mr = b"1.2.840.10008.5.1.4.1.1.4"
    meta = element(0x00020001, b"OB", b"\0\1") + element(0x00020002, b"UI", mr)
    meta += element(0x00020003, b"UI", b"1.2.3.%d" % number) + element(0x00020010, b"UI", syntax)
    body = element(0x00080016, b"UI", mr) + element(0x00080018, b"UI", b"1.2.3.%d" % number)
    body += element(0x00080060, b"CS", b"MR")
    body += element(0x0020000D, b"UI", b"1.2.9") + element(0x0020000E, b"UI", b"1.2.8")
    body += element(0x00200032, b"DS", b"0\\0\\%d" % number) + element(0x00200037, b"DS", b"1\\0\\0\\0\\1\\0")
    body += more
    for tag, value in ((2, 1), (0x10, rows), (0x11, columns), (0x100, 8), (0x101, 8), (0x102, 7), (0x103, 0)):
        if tag == 0x10:
            body += element(0x00280004, b"CS", b"MONOCHROME2")
        body += element(0x00280000 + tag, b"US", struct.pack("<H", value))
    item = struct.Struct("<HHI")
    pixels = struct.pack("<HH2s2xI", 0x7FE0, 0x0010, b"OB", 0xFFFFFFFF) + item.pack(0xFFFE, 0xE000, 0)
    pixels += b"".join(item.pack(0xFFFE, 0xE000, len(piece)) + piece for piece in pieces)
    group = element(0x00020000, b"UL", struct.pack("<I", len(meta)))
    return bytes(128) + b"DICM" + group + meta + body + pixels + item.pack(0xFFFE, 0xE0DD, 0)


def run_lengths(packed: bytes, *, planes: int = 1) -> bytes:
    """Return a run-length coded frame with any content."""
    return struct.pack("<16I", planes, 64, *([0] * 14)) + packed


def codestream(rows: int, columns: int) -> bytes:
    """Return the start of a JPEG 2000 picture."""
    size = struct.pack(">HHHIIIIIIIIHBBB", 0xFF51, 41, 0, columns, rows, 0, 0, columns, rows, 0, 0, 1, 7, 1, 1)
    return b"\xff\x4f" + size + bytes(64)


def picture(rows: int, columns: int) -> bytes:
    """Return the start of a JPEG picture."""
    return b"\xff\xd8\xff\xe0\x00\x04ab" + struct.pack(">HHBHHB", 0xFFC0, 11, 8, rows, columns, 1) + bytes(64)
