"""Small files that become large ones."""

from __future__ import annotations

import zlib

import nibabel as nib
import numpy as np


def bomb(shape: tuple[int, ...], dtype: str, *, spacing: float = 1.0, label: bool = False) -> bytes:
    """A gzipped volume of zeros and one other voxel, made without its voxels."""
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
