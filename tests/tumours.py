"""Makes tumours with the nested labels of BraTS, for tests of regions."""

from __future__ import annotations

import numpy as np


def nested(radii: tuple[float, float, float], centre: tuple[int, int, int] = (16, 16, 16)) -> np.ndarray:
    """Return edema (2) around non-enhancing core (1) around enhancing tumour (3), nested as in BraTS."""
    distance = np.sqrt(sum((axis - at) ** 2 for axis, at in zip(np.indices((32, 32, 32)), centre, strict=True)))
    result = np.zeros((32, 32, 32), np.uint8)
    for radius, value in zip(radii, (2, 1, 3), strict=True):
        result[distance <= radius] = value
    return result
