"""Converts label maps to probabilities, without torch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8


def one_hot(labels: UInt8[np.ndarray, "x y z"], classes: int) -> Float[np.ndarray, "k x y z"]:
    """Return a label map as float32 probabilities of 0 and 1.

    Args:
        labels: Label map, uint8 [x, y, z].
        classes: Number k of classes.

    Returns:
        Float32 array of shape [k, x, y, z] for k classes.

    >>> one_hot(np.array([[[0, 1]]], dtype=np.uint8), 2)[1]
    array([[[0., 1.]]], dtype=float32)
    """
    result: np.ndarray = np.arange(classes, dtype=np.uint8)[:, None, None, None] == labels
    return result.astype(np.float32)
