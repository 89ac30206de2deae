"""Refuses duplicate arrays, for instance one held-out case given twice.

Called wherever cases are compared, because copies of one case make an interval too narrow, and a copy on both sides of
a split makes a score too high. Compares voxels, so the format, compression and name of a file do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from common.canonical import sha256_bytes
from common.errors import InvalidInput


def voxel_hash(array: np.ndarray) -> str:
    """Hash an array's values, so that copies of one volume in different files have the same hash.

    Args:
        array: The array. Hashes are comparable only between arrays of one shape and type.

    Returns:
        SHA-256 in hexadecimal digits. −0.0 and 0.0 count as the same value.
    """
    return sha256_bytes((array + 0).tobytes())  # + 0 turns −0.0 into 0.0


def check_no_copy(arrays: Iterable[np.ndarray], what: str, *, limit: str, names: Sequence[str] = ()) -> None:
    """Refuse two arrays with the same values.

    Arrays of zeros alone are skipped, because label maps of two patients without a structure are equal.

    Args:
        arrays: Arrays of one shape and type.
        what: What one array is, for the error.
        limit: What is allowed, and why.
        names: Each array's name; without names they are numbered from 1.

    Raises:
        InvalidInput: If an array is a copy of an earlier one. The error names both.

    >>> check_no_copy([np.ones(2), np.zeros(2), np.zeros(2), np.ones(2)], "image", limit="each image once")
    Traceback (most recent call last):
    ...
    common.errors.InvalidInput: image 4: got 'a copy of image 1'; allowed: each image once; to fix: leave out the copy
    """
    seen = dict[str, str]()
    for number, array in enumerate(arrays):
        name = f"{what} {names[number] if names else number + 1}"
        if not array.any():
            continue
        earlier = seen.setdefault(voxel_hash(array), name)
        if earlier != name:
            raise InvalidInput(name, value=f"a copy of {earlier}", limit=limit, remedy="leave out the copy")
