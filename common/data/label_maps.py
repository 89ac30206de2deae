"""Label maps as arrays. Free of torch."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8


def one_hot(labels: UInt8[np.ndarray, "x y z"], classes: int) -> Float[np.ndarray, "k x y z"]:
    """A label map as float32 probabilities of 0 and 1, one map per class."""
    result: np.ndarray = np.moveaxis(np.eye(classes, dtype=np.float32)[labels], -1, 0)
    return np.ascontiguousarray(result)
