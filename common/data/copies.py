"""Finds an array that is given twice, such as a held-out case that would count as two.

Called wherever cases are compared, because copies of one case make an interval too narrow, and a copy on both sides of
a split makes a score too high. Compares voxels, so the format, compression and name of a file do not matter.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from common.canonical import sha256_bytes


def first_copy(arrays: Iterable[np.ndarray]) -> tuple[int, int] | None:
    """Return the numbers of the first two arrays with the same values, counted from 1; None if all differ.

    Arrays of zeros alone are skipped, because label maps of two patients without a structure are equal.

    Args:
        arrays: Arrays of one shape and type.

    Returns:
        The number of the earlier array and that of its copy, or None.

    >>> first_copy([np.ones(2), np.zeros(2), np.ones(2)]), first_copy([np.zeros(2), np.zeros(2)])
    ((1, 3), None)
    """
    seen = dict[str, int]()
    for number, array in enumerate(arrays, start=1):
        if not array.any():
            continue
        earlier = seen.setdefault(sha256_bytes((array + 0).tobytes()), number)  # + 0 turns −0.0 into 0.0
        if earlier != number:
            return earlier, number
    return None
